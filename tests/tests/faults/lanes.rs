//! Pools, and the lanes of streams.

use std::time::Duration;

use vmm_pool::{Budget, DebugMode, Request, block_of, free_raw, free_raw_on, record_stream_raw};
use vmm_sys::object::Stream;
use vmm_sys::{Access, CaptureMode, StreamHandle};

use crate::engine::{Case, Done};
use crate::stage::{G, HOME, HOST, NEXT, Stage, bare, stage, usual};

fn lanes() -> Stage {
    usual().with_lanes()
}

/// A lane with two blocks, and one that was given back.
fn filled() -> Stage {
    let mut stage = lanes();
    stage.alloc(0, 3 * G);
    stage.alloc(0, 2 * G);
    stage.alloc(0, 5 * G);
    drop(stage.buffers.remove(1));
    stage
}

/// Within the soft limit memory moves between lanes rather than that more is made.
fn tight() -> Stage {
    stage(|sim| sim, |pool| pool.soft_limit(Some(0.0))).with_lanes()
}

fn guarded() -> Stage {
    stage(|sim| sim, |pool| pool.debug_mode(DebugMode::Guard)).with_lanes()
}

/// Takes a block of the first lane, of so many chunks.
fn take(stage: &mut Stage, lane: usize, bytes: u64) -> Done {
    let buffer = stage.lanes[lane].alloc(bytes)?;
    stage.mark(buffer.address());
    stage.buffers.push(buffer);
    Ok(())
}

/// Every block can be written to its end, and nobody has written into another.
fn check_blocks(stage: &Stage) {
    for buffer in &stage.buffers {
        let mut found = [0];
        buffer.read(0, &mut found).unwrap();
        assert_eq!(found, [(buffer.address() / G) as u8]);
        buffer.write(buffer.bytes() - 1, &[7]).unwrap();
    }
}

fn blocks(count: usize) -> impl Fn(&Stage) {
    move |stage| {
        assert_eq!(stage.buffers.len(), count);
        check_blocks(stage);
    }
}

fn pools() -> Vec<Case> {
    vec![
        Case::new(
            "pool::build",
            &["PoolBuilder::build", "Pool::builder"],
            || bare(|sim| sim),
            |stage| {
                let builder = stage.builder().stock_marks(3 * G, 8 * G);
                stage.pool = Some(builder.access(HOME, NEXT, Access::ReadWrite).build()?);
                Ok(())
            },
            |stage| assert_eq!(stage.pool().device_stats(NEXT).unwrap().stock_bytes, 3 * G),
        ),
        Case::new(
            "pool::grant",
            &["Pool::grant"],
            || filled().with_elastic(3),
            |stage| Ok(stage.pool().grant(HOME, NEXT, Access::ReadWrite)?),
            |stage| {
                let pair = stage.pool().access_matrix();
                assert_eq!(pair.pair(HOME, NEXT).unwrap().policy, Access::ReadWrite);
                let address = stage.buffers[0].address();
                let location = vmm_sys::Location::Device(NEXT);
                let access = stage.driver.get_access(address, location).unwrap();
                assert_eq!(access, Access::ReadWrite);
                assert_eq!(stage.elastic[0].access(NEXT), Access::ReadWrite);
            },
        ),
        Case::new(
            "pool::grant_none",
            &["Pool::grant"],
            || {
                let stage = filled().with_elastic(3);
                stage.pool().grant(HOME, NEXT, Access::ReadWrite).unwrap();
                stage
            },
            |stage| Ok(stage.pool().grant(HOME, NEXT, Access::None)?),
            |stage| assert_eq!(stage.elastic[0].access(NEXT), Access::None),
        ),
        Case::quiet(
            "pool::figures",
            &["Pool::room", "Pool::access", "Pool::access_matrix", "ElasticBuffer::room"],
            || filled().with_elastic(2),
            |stage| {
                stage.pool().room(HOME)?;
                stage.elastic[0].room();
                stage.pool().access_matrix();
                assert_eq!(stage.pool().access(HOME, NEXT)?, Access::None);
                Ok(())
            },
            check_blocks,
        ),
        Case::new(
            "pool::prefill",
            &["Pool::prefill"],
            usual,
            |stage| stage.pool().prefill(HOME, 4 * G).map(drop).map_err(Into::into),
            |stage| assert_eq!(stage.pool().device_stats(HOME).unwrap().stock_bytes, 4 * G),
        ),
        Case::new(
            "pool::prefill_host",
            &["Pool::prefill"],
            usual,
            |stage| stage.pool().prefill(HOST, 4 * G).map(drop).map_err(Into::into),
            |stage| assert_eq!(stage.pool().stats().hosts[0].stock_bytes, 4 * G),
        ),
        Case::new(
            "pool::trim",
            &["Pool::trim"],
            || {
                let mut stage = filled();
                let other = stage.streams[1].clone();
                stage.buffers[1].record_stream(&other).unwrap();
                drop(stage.buffers.remove(1));
                stage.pool().prefill(HOME, 2 * G).unwrap();
                stage
            },
            |stage| stage.pool().trim(HOME).map(drop).map_err(Into::into),
            |stage| {
                // What could not go goes at the next trim.
                stage.pool().trim(HOME).unwrap();
                let stats = stage.pool().device_stats(HOME).unwrap();
                assert_eq!((stats.idle_bytes, stats.stock_bytes), (0, 0), "{stats:?}");
                check_blocks(stage);
            },
        ),
        Case::new(
            "pool::trim_idle",
            &["Pool::trim_idle"],
            || {
                let stage = filled();
                stage.pool().prefill(HOME, 2 * G).unwrap();
                stage.pool().trim_idle(HOME, Duration::from_secs(1)).unwrap();
                stage.pass(5000);
                stage
            },
            |stage| {
                stage.pool().trim_idle(HOME, Duration::from_secs(1))?;
                Ok(())
            },
            |stage| {
                for _ in 0..3 {
                    stage.pass(5000);
                    stage.pool().trim_idle(HOME, Duration::from_secs(1)).unwrap();
                }
                let stats = stage.pool().device_stats(HOME).unwrap();
                assert_eq!((stats.idle_bytes, stats.stock_bytes), (0, 0), "{stats:?}");
                check_blocks(stage);
            },
        ),
        Case::quiet(
            "pool::drop",
            &["Pool::drop"],
            || {
                let mut stage = filled().with_elastic(2);
                stage.pool().grant(HOME, NEXT, Access::Read).unwrap();
                stage.pool().prefill(HOST, 2 * G).unwrap();
                stage.elastic.clear();
                stage.buffers.clear();
                stage.lanes.clear();
                stage
            },
            |stage| {
                stage.pool = None;
                Ok(())
            },
            |_| {},
        ),
    ]
}

fn allocation() -> Vec<Case> {
    vec![
        Case::silent(
            "pool::figures_of_its_own",
            &[
                "Pool::stats",
                "Pool::device_stats",
                "Pool::devices",
                "Pool::driver",
                "Pool::elastic_mappings",
                "Pool::elastic_stats",
                "Pool::on_shortage",
                "Pool::reset_peaks",
                "Pool::verify",
                "ElasticBuffer::access",
                "ElasticBuffer::address",
                "ElasticBuffer::asleep",
                "ElasticBuffer::capacity_bytes",
                "ElasticBuffer::chunk_bytes",
                "ElasticBuffer::committed_bytes",
                "ElasticBuffer::device",
                "ElasticBuffer::driver",
                "ElasticBuffer::generation",
                "ElasticBuffer::is_exportable",
                "ElasticBuffer::pieces",
                "ElasticBuffer::quota_room_bytes",
                "ElasticBuffer::stats",
            ],
            || filled().with_elastic(2),
            |stage| {
                let (pool, buffer) = (stage.pool(), &stage.elastic[0]);
                pool.verify()?;
                pool.reset_peaks();
                drop(pool.on_shortage(|_, _| false));
                assert_eq!(pool.stats().devices.len(), pool.devices().count());
                assert_eq!(pool.elastic_mappings(), buffer.pieces().len() as u64);
                assert_eq!(pool.elastic_stats(), [buffer.stats()]);
                assert!(pool.device_stats(buffer.device()).is_some() && buffer.asleep().is_none());
                assert!(std::ptr::addr_eq(pool.driver(), pool.driver()));
                let end = buffer.address() + buffer.committed_bytes();
                assert_eq!(end, buffer.pieces()[1].address + buffer.chunk_bytes());
                assert_eq!((buffer.capacity_bytes(), buffer.generation()), (64 * G, 1));
                assert!(!buffer.is_exportable() && buffer.quota_room_bytes() == u64::MAX);
                assert_eq!(buffer.access(NEXT), Access::None);
                assert!(buffer.driver().ledger().snapshot().total() > 0);
                Ok(())
            },
        ),
        Case::silent("lane::open", &["Pool::lane", "Pool::elastic"], usual, |stage| {
            stage.lanes.push(stage.pool().lane(&stage.streams[0])?);
            Ok(())
        }),
        Case::silent(
            "lane::warm",
            &["Lane::alloc", "Lane::largest_free_bytes", "Lane::alloc_raw_warm"],
            filled,
            |stage| {
                stage.lanes[0].largest_free_bytes();
                let buffer = stage.lanes[0].alloc(2 * G)?;
                drop(buffer);
                Ok(())
            },
        ),
        Case::new(
            "lane::alloc_first",
            &["Lane::alloc", "Lane::alloc_with"],
            lanes,
            |stage| take(stage, 0, 1000),
            |stage| blocks(1)(stage),
        ),
        Case::new(
            "lane::alloc_grow",
            &["Lane::alloc"],
            filled,
            |stage| take(stage, 0, 9 * G + 5),
            |stage| blocks(3)(stage),
        ),
        Case::new(
            "lane::alloc_for_peers",
            &["Lane::alloc"],
            || {
                let stage = filled();
                stage.pool().grant(HOME, NEXT, Access::ReadWrite).unwrap();
                stage
            },
            |stage| take(stage, 0, 3 * G),
            |stage| blocks(3)(stage),
        ),
        Case::new(
            "lane::try_alloc",
            &["Lane::try_alloc"],
            filled,
            |stage| {
                let buffer = stage.lanes[0].try_alloc(4 * G)?;
                stage.mark(buffer.address());
                stage.buffers.push(buffer);
                Ok(())
            },
            |stage| blocks(3)(stage),
        ),
        Case::new(
            "lane::alloc_moves_chunks",
            &["Lane::alloc"],
            || {
                let mut stage = tight();
                (0..8).for_each(|_| stage.alloc(0, G));
                for at in [6, 4, 2] {
                    drop(stage.buffers.remove(at));
                }
                stage
            },
            |stage| take(stage, 0, 3 * G),
            |stage| {
                assert_eq!(stage.buffers.len(), 6);
                check_blocks(stage);
            },
        ),
        Case::new(
            "lane::alloc_from_another_lane",
            &["Lane::alloc"],
            || {
                let mut stage = tight();
                stage.alloc(0, 6 * G);
                stage.buffers.clear();
                stage
            },
            |stage| take(stage, 1, 4 * G),
            |stage| blocks(1)(stage),
        ),
        Case::new(
            "lane::alloc_when_full",
            &["Lane::alloc_with"],
            || {
                let mut stage =
                    stage(|sim| sim.device_bytes_of(0, 8 * G), |pool| pool).with_lanes();
                stage.alloc(0, 2 * G);
                stage.alloc(0, 3 * G);
                let other = stage.streams[1].clone();
                stage.buffers[1].record_stream(&other).unwrap();
                drop(stage.buffers.remove(1));
                stage.alloc(1, 2 * G);
                drop(stage.buffers.remove(1));
                stage
            },
            |stage| {
                let buffer = stage.lanes[0].alloc_with(&Request::new(6 * G))?;
                stage.mark(buffer.address());
                stage.buffers.push(buffer);
                Ok(())
            },
            |stage| blocks(2)(stage),
        ),
        Case::new(
            "lane::alloc_borrows",
            &["Lane::alloc_with"],
            || {
                let mut stage =
                    stage(|sim| sim.device_bytes_of(0, 8 * G), |pool| pool.lend(NEXT, 64 * G))
                        .with_lanes()
                        .with_built(6, |builder| builder.movable(true));
                stage.moves = true;
                stage
            },
            |stage| {
                let buffer = stage.lanes[0].alloc_with(&Request::new(5 * G).may_borrow())?;
                stage.mark(buffer.address());
                stage.buffers.push(buffer);
                Ok(())
            },
            |stage| {
                blocks(1)(stage);
                stage.check_marks();
            },
        ),
        Case::new(
            "lane::alloc_guarded",
            &["Lane::alloc"],
            guarded,
            |stage| take(stage, 0, 5000),
            |stage| blocks(1)(stage),
        ),
        Case::quiet(
            "lane::free_guarded",
            &["Buffer::drop"],
            || {
                let mut stage = guarded();
                stage.alloc(0, 5000);
                stage.alloc(0, G);
                stage
            },
            |stage| {
                stage.buffers.truncate(1);
                Ok(())
            },
            |stage| blocks(1)(stage),
        ),
        Case::new(
            "lane::alloc_in_a_budget",
            &["Lane::alloc"],
            || {
                stage(|sim| sim, |pool| pool.budget(HOME, Budget::new(64 * G)).exportable(true))
                    .with_lanes()
            },
            |stage| take(stage, 0, 3 * G),
            |stage| blocks(1)(stage),
        ),
        Case::new(
            "buffer::write_read",
            &["Buffer::write", "Buffer::read"],
            filled,
            |stage| {
                let mark = (stage.buffers[1].address() / G) as u8;
                stage.buffers[1].write(64, &[mark; 8])?;
                let mut found = [0; 8];
                stage.buffers[1].read(64, &mut found)?;
                assert_eq!(found, [mark; 8]);
                Ok(())
            },
            check_blocks,
        ),
        Case::silent("buffer::record_stream", &["Buffer::record_stream"], filled, |stage| {
            let other = stage.streams[1].clone();
            Ok(stage.buffers[0].record_stream(&other)?)
        }),
        Case::quiet(
            "buffer::drop_recorded",
            &["Buffer::drop"],
            || {
                let mut stage = filled();
                for other in [1, 2].map(|at: usize| stage.streams[at].clone()) {
                    stage.buffers[1].record_stream(&other).unwrap();
                }
                stage
            },
            |stage| {
                drop(stage.buffers.remove(1));
                Ok(())
            },
            |stage| {
                // Its memory is used again, once the streams are done.
                stage.streams.iter().for_each(|stream| stream.synchronize().unwrap());
                stage.pool().trim(HOME).unwrap();
                let stats = stage.pool().device_stats(HOME).unwrap();
                assert_eq!((stats.buffers, stats.limbo_bytes), (1, 0), "{stats:?}");
            },
        ),
    ]
}

fn begin_capture(stage: &Stage) {
    let handle = stage.streams[0].handle();
    // SAFETY: a live stream.
    unsafe { stage.driver.capture_begin(HOME, handle, CaptureMode::Relaxed) }.unwrap();
}

fn end_capture(stage: &Stage) {
    let handle = stage.streams[0].handle();
    // SAFETY: a live stream that is being captured; the graph is not used afterwards.
    unsafe {
        let graph = stage.driver.capture_end(HOME, handle).unwrap();
        stage.driver.graph_destroy(HOME, graph).unwrap();
    }
}

/// A graph that has memory.
fn captured() -> Stage {
    let mut stage = filled();
    let scope = stage.lanes[0].capture().unwrap();
    scope.join(&stage.lanes[1]).unwrap();
    begin_capture(&stage);
    stage.alloc(0, 3 * G);
    stage.alloc(1, G);
    end_capture(&stage);
    stage.buffers.truncate(2);
    stage.graphs.push(scope.finish());
    stage
}

fn captures() -> Vec<Case> {
    vec![
        Case::silent(
            "capture::open",
            &[
                "Lane::capture",
                "CaptureScope::join",
                "CaptureScope::memory",
                "CaptureScope::finish",
            ],
            filled,
            |stage| {
                let scope = stage.lanes[0].capture()?;
                scope.join(&stage.lanes[1])?;
                stage.graphs.push(scope.memory().clone());
                scope.finish();
                Ok(())
            },
        ),
        Case::new(
            "capture::alloc",
            &["Lane::alloc", "Lane::capture"],
            || {
                let mut stage = filled();
                stage.scope = Some(stage.lanes[0].capture().unwrap());
                begin_capture(&stage);
                stage
            },
            |stage| take(stage, 0, 3 * G),
            |stage| {
                end_capture(stage);
                blocks(3)(stage);
            },
        ),
        Case::new(
            "capture::alloc_into",
            &["Lane::capture_into"],
            || {
                let mut stage = captured();
                stage.scope = Some(stage.lanes[0].capture_into(&stage.graphs[0]).unwrap());
                stage
            },
            |stage| take(stage, 0, 5 * G),
            |stage| blocks(3)(stage),
        ),
        Case::silent(
            "graph::launched_on",
            &["GraphMemory::launched_on", "GraphMemory::keep", "GraphMemory::mapped_bytes"],
            captured,
            |stage| {
                stage.graphs[0].launched_on(&stage.streams[2])?;
                stage.graphs[0].keep(stage.buffers.remove(1));
                Ok(())
            },
        ),
        Case::quiet(
            "graph::drop",
            &["GraphMemory::drop"],
            || {
                let mut stage = captured();
                stage.graphs[0].launched_on(&stage.streams[2]).unwrap();
                stage.graphs[0].keep(stage.buffers.remove(1));
                stage
            },
            |stage| {
                stage.graphs.clear();
                Ok(())
            },
            |stage| {
                stage.pool().trim(HOME).unwrap();
                let stats = stage.pool().device_stats(HOME).unwrap();
                assert_eq!((stats.private_bytes, stats.limbo_bytes), (0, 0), "{stats:?}");
                blocks(1)(stage);
            },
        ),
        Case::quiet(
            "pool::close_lane",
            &["Pool::close_lane"],
            || {
                let mut stage = usual();
                // SAFETY: the stage keeps it alive.
                let stream = unsafe {
                    Stream::from_raw(&stage.driver, HOME, stage.streams[0].handle(), None)
                };
                stage.lanes.push(stage.pool().lane(&stream.unwrap()).unwrap());
                stage.alloc(0, 2 * G);
                stage.alloc(0, 3 * G);
                stage.buffers.truncate(1);
                stage
            },
            |stage| {
                stage.pool().close_lane(stage.lanes[0].stream());
                Ok(())
            },
            |stage| {
                assert!(stage.pool().close_lane(stage.lanes[0].stream()), "the stream may go");
                assert!(stage.lanes[0].alloc(1).is_err());
                check_blocks(stage);
            },
        ),
    ]
}

fn raw() -> Vec<Case> {
    let filled = || {
        let mut stage = lanes();
        for bytes in [3 * G, 2 * G] {
            let address = stage.lanes[0].alloc_raw(bytes).unwrap();
            stage.mark(address);
            stage.raw.push((address, bytes));
        }
        stage
    };
    let cases = vec![
        Case::new(
            "raw::alloc",
            &["Lane::alloc_raw", "Lane::alloc_raw_with"],
            lanes,
            |stage| {
                let first = stage.lanes[0].alloc_raw(3 * G)?;
                let second = stage.lanes[0].alloc_raw_with(&Request::new(5 * G));
                let second = second.inspect_err(|_| free_raw(first, 3 * G).unwrap())?;
                for (address, bytes) in [(first, 3 * G), (second, 5 * G)] {
                    stage.mark(address);
                    stage.raw.push((address, bytes));
                }
                Ok(())
            },
            |stage| assert!(stage.raw.iter().all(|(address, _)| block_of(*address).is_ok())),
        ),
        Case::quiet(
            "raw::free",
            &["free_raw", "free_raw_on", "record_stream_raw", "block_of"],
            filled,
            |stage| {
                let (address, bytes) = stage.raw.pop().unwrap();
                record_stream_raw(address, &stage.streams[2])?;
                free_raw(address, bytes)?;
                let (address, bytes) = stage.raw.pop().unwrap();
                record_stream_raw(address, &stage.streams[1])?;
                let handle: StreamHandle = stage.streams[0].handle();
                free_raw_on(address, bytes, handle)?;
                Ok(())
            },
            |stage| {
                stage.pool().trim(HOME).unwrap();
                let stats = stage.pool().device_stats(HOME).unwrap();
                assert_eq!((stats.held_bytes, stats.buffers), (0, 0), "{stats:?}");
            },
        ),
    ];
    cases.into_iter().map(Case::alone).collect()
}

pub(crate) fn cases() -> Vec<Case> {
    [pools(), allocation(), captures(), raw()].into_iter().flatten().collect()
}
