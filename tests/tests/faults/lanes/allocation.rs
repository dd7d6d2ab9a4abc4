//! Requests to lanes, and their buffers.

use vmm_pool::{Budget, DebugMode, Request};
use vmm_sys::Access;

use super::{blocks, check_blocks, filled, lanes, take};
use crate::engine::Case;
use crate::stage::{G, HOME, NEXT, Stage, stage, usual};

/// Within the soft limit memory moves between lanes rather than that more is made.
fn tight() -> Stage {
    stage(|sim| sim, |pool| pool.soft_limit(Some(0.0))).with_lanes()
}

fn guarded() -> Stage {
    stage(|sim| sim, |pool| pool.debug_mode(DebugMode::Guard)).with_lanes()
}

pub(super) fn cases() -> Vec<Case> {
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
        Case::new(
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
        )
        .quiet(),
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
        Case::new(
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
        )
        .quiet(),
    ]
}
