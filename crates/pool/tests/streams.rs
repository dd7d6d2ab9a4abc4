//! Which queue a lane belongs to: per-thread and legacy streams, handle values that come back,
//! streams that are gone. Ids F-… are those of the reports that the stories come from.
#![allow(clippy::unwrap_used, reason = "a failure ends the story")]

mod common;

use std::sync::Arc;
use std::thread;

use common::{HOME, Held, MIB, Rig};
use vmm_pool::{ChunkSize, Error, Pool, free_raw, free_raw_on};
use vmm_sys::object::Stream;
use vmm_sys::sim::Sim;
use vmm_sys::{Call, Driver, ProbeKernel, StreamHandle};

/// Long enough for a thread to do what it must not, if it would.
const SOME_TIME: std::time::Duration = std::time::Duration::from_millis(20);

/// Runs `work` in a thread of its own and gives its answer back.
fn elsewhere<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    thread::scope(|scope| scope.spawn(work).join().unwrap())
}

fn per_thread(rig: &Rig) -> Stream {
    Stream::per_thread(&rig.driver, HOME).unwrap()
}

/// Takes a stream by its handle, as an adapter of another framework does.
fn borrowed(driver: &Arc<dyn Driver>, handle: StreamHandle) -> Stream {
    // SAFETY: the stories keep the stream alive until its lane is closed.
    unsafe { Stream::from_raw(driver, HOME, handle, None) }.unwrap()
}

fn fill(rig: &Rig, stream: StreamHandle, address: u64, value: u32) {
    let kernel = ProbeKernel::FillWords { dst: address, words: 1024, value };
    // SAFETY: a live stream, and an address of the pool.
    unsafe { rig.driver.launch(HOME, &kernel, stream) }.unwrap();
}

#[test]
fn the_legacy_stream_has_one_lane_under_both_handles() {
    let rig = Rig::new(|b| b);
    let legacy = Stream::legacy(&rig.driver, HOME).unwrap();
    let lane = rig.pool.lane(&legacy).unwrap();
    let buffer = lane.alloc(3 * MIB).unwrap();
    let address = buffer.address();
    drop(buffer);
    for handle in [StreamHandle::NULL, StreamHandle::LEGACY] {
        let stream = borrowed(&rig.driver, handle);
        assert!(stream.is_legacy() && !stream.is_per_thread() && !stream.is_borrowed());
        let again = rig.pool.lane(&stream).unwrap();
        let calls = rig.calls(|| assert_eq!(again.alloc(3 * MIB).unwrap().address(), address));
        assert_eq!(calls.total(), 0, "{calls}");
    }
    assert_eq!(rig.stats().lanes, 2);
    drop((lane, legacy));
    rig.end();
}

#[test]
fn f_c2_threads_do_not_share_the_lane_of_handle_2() {
    let rig = Rig::new(|b| b.chunk(ChunkSize::Fixed(2 * MIB)));
    let mine = rig.pool.lane(&per_thread(&rig)).unwrap();
    let buffer = mine.alloc(2 * MIB).unwrap();
    let address = buffer.address();
    let hold = Held::new(&rig.sim, StreamHandle::PER_THREAD);
    fill(&rig, StreamHandle::PER_THREAD, address, 1);
    drop(buffer); // behind held work
    elsewhere(|| {
        let theirs = rig.pool.lane(&per_thread(&rig)).unwrap();
        let other = theirs.alloc(2 * MIB).unwrap();
        assert_ne!(other.address(), address);
    });
    // In its own thread it is warm, and in order.
    let calls = rig.calls(|| drop(mine.alloc(2 * MIB).unwrap()));
    assert_eq!(calls.total(), 0, "{calls}");
    drop(hold);
    drop(mine);
    rig.end();
}

#[test]
fn f_c2_a_drop_in_another_thread_is_ordered_after_both() {
    let rig = Rig::new(|b| b.chunk(ChunkSize::Fixed(2 * MIB)).soft_limit(None));
    let lane = rig.pool.lane(&per_thread(&rig)).unwrap();
    for held_thread in ["the owner", "the dropper"] {
        let buffer = lane.alloc(2 * MIB).unwrap();
        let address = buffer.address();
        let own_hold =
            (held_thread == "the owner").then(|| Held::new(&rig.sim, StreamHandle::PER_THREAD));
        let their_hold = elsewhere(|| {
            let hold = (held_thread == "the dropper")
                .then(|| Held::new(&rig.sim, StreamHandle::PER_THREAD));
            drop(buffer);
            hold
        });
        assert_eq!(rig.stats().limbo_buffers, 1, "{held_thread}");
        let meanwhile = lane.alloc(2 * MIB).unwrap();
        assert_ne!(meanwhile.address(), address, "{held_thread}");
        drop((own_hold, their_hold));
        // A miss looks into limbo before anything grows.
        let held = rig.stats().held_bytes;
        let again = lane.alloc(2 * MIB).unwrap();
        assert_eq!((again.address(), rig.stats().held_bytes), (address, held), "{held_thread}");
        assert_eq!(rig.stats().limbo_buffers, 0);
    }
    drop(lane);
    rig.end();
}

#[test]
fn f_c2_a_thread_ends_before_its_buffers() {
    let rig = Rig::new(|b| b);
    let (lane, buffers) = elsewhere(|| {
        let lane = rig.pool.lane(&per_thread(&rig)).unwrap();
        let buffers: Vec<_> = (1..=4).map(|i| lane.alloc(i * MIB).unwrap()).collect();
        fill(&rig, StreamHandle::PER_THREAD, buffers[0].address(), 7);
        (lane, buffers)
    });
    assert!(lane.stream().has_ended());
    rig.pool.trim(HOME).unwrap(); // somebody joins memory up meanwhile
    let mut words = [0; 4];
    buffers[0].read(0, &mut words).unwrap();
    assert_eq!(words, [7, 0, 0, 0]);
    elsewhere(|| drop(buffers));
    // Another thread's lane comes: those of ended threads are closed, and their memory comes back.
    assert_eq!(rig.stats().lanes, 2);
    let other = elsewhere(|| rig.pool.lane(&per_thread(&rig)).unwrap());
    assert_eq!(rig.stats().lanes, 2, "one went, one came");
    assert!(matches!(lane.alloc(1), Err(Error::LaneClosed)));
    rig.pool.trim(HOME).unwrap();
    assert_eq!(rig.stats().held_bytes, 0);
    drop((lane, other));
    rig.end();
}

#[test]
fn the_memory_of_a_per_thread_lane_waits_for_it_in_whatever_thread_gives_it_back() {
    let rig = Rig::new(|b| b.chunk(ChunkSize::Fixed(2 * MIB)));
    let lane = rig.pool.lane(&per_thread(&rig)).unwrap();
    let buffer = lane.alloc(2 * MIB).unwrap();
    let hold = Held::new(&rig.sim, StreamHandle::PER_THREAD);
    fill(&rig, StreamHandle::PER_THREAD, buffer.address(), 1);
    drop(buffer);
    let before = rig.driver.ledger().snapshot();
    thread::scope(|scope| {
        let trim = scope.spawn(|| rig.pool.trim(HOME).unwrap());
        thread::sleep(SOME_TIME);
        let unmaps = rig.driver.ledger().snapshot().since(&before).of(Call::MemUnmap);
        let finished = trim.is_finished();
        drop(hold); // before anything can fail: the thread waits for it
        assert_eq!((unmaps, finished), (0, false));
        assert_eq!(trim.join().unwrap(), 2 * MIB);
    });
    lane.stream().synchronize().unwrap(); // no fault
    // A buffer of another lane that this thread's stream used is gated in whatever thread, too.
    let mut crossed = rig.lane.alloc(2 * MIB).unwrap();
    crossed.record_stream(lane.stream()).unwrap();
    let hold = Held::new(&rig.sim, StreamHandle::PER_THREAD);
    elsewhere(|| drop(crossed));
    assert!(rig.lane.try_alloc(2 * MIB).is_ok());
    assert_eq!(rig.stats().limbo_buffers, 1);
    drop(hold);
    rig.pool.trim(HOME).unwrap();
    assert_eq!(rig.stats().limbo_buffers, 0);
    drop(lane);
    rig.end();
}

#[test]
fn raw_blocks_of_a_per_thread_lane_know_their_thread() {
    let rig = Rig::new(|b| b.soft_limit(None));
    let lane = rig.pool.lane(&per_thread(&rig)).unwrap();
    let address = lane.alloc_raw(MIB).unwrap();
    free_raw_on(address, MIB, StreamHandle::PER_THREAD).unwrap();
    let calls = rig.calls(|| assert_eq!(lane.alloc_raw(MIB).unwrap(), address));
    assert_eq!(calls.total(), 0, "{calls}");
    let hold = Held::new(&rig.sim, StreamHandle::PER_THREAD);
    elsewhere(|| {
        // There the handle names another stream.
        let error = free_raw_on(address, MIB, StreamHandle::PER_THREAD).unwrap_err();
        assert!(matches!(error, Error::OtherStream { .. }), "{error}");
        free_raw(address, MIB).unwrap();
        assert!(matches!(free_raw(address, MIB), Err(Error::NotAllocated { .. })));
    });
    assert_eq!(rig.stats().limbo_buffers, 1);
    let meanwhile = lane.alloc_raw(MIB).unwrap();
    assert_ne!(meanwhile, address);
    drop(hold);
    free_raw(meanwhile, MIB).unwrap();
    rig.pool.trim(HOME).unwrap();
    assert_eq!((rig.stats().limbo_buffers, rig.stats().held_bytes), (0, 0));
    // Both handles of the legacy stream name its lane.
    let legacy = rig.pool.lane(&Stream::legacy(&rig.driver, HOME).unwrap()).unwrap();
    for handle in [StreamHandle::NULL, StreamHandle::LEGACY] {
        free_raw_on(legacy.alloc_raw(MIB).unwrap(), MIB, handle).unwrap();
    }
    drop((lane, legacy));
    rig.end();
}

#[test]
fn f_c4_streams_that_are_gone_leave_their_memory_and_no_handle() {
    let sim = Sim::builder().stream_slots(100).build(); // making a stream never waits for a held one
    let rig = Rig::on(sim, |b| b.chunk(ChunkSize::Fixed(2 * MIB)).limit_bytes(64 * MIB));
    let mut holds = Vec::new();
    let mut handles = Vec::new();
    for index in 0..32 {
        // Half of them are kept alive by their lanes, half belong to somebody else.
        let handle = rig.driver.stream_create(HOME).unwrap();
        let stream = match index % 2 {
            0 => Stream::create(&rig.driver, HOME).unwrap(),
            _ => borrowed(&rig.driver, handle),
        };
        let lane = rig.pool.lane(&stream).unwrap();
        let buffer = lane.alloc(2 * MIB).unwrap();
        holds.push(Held::new(&rig.sim, stream.handle()));
        fill(&rig, stream.handle(), buffer.address(), index);
        drop(buffer);
        rig.pool.close_lane(&stream); // waits for nothing
        drop((lane, stream));
        // SAFETY: made above, and nobody uses it any more.
        unsafe { rig.driver.stream_destroy(HOME, handle) }.unwrap();
        handles.push(handle);
    }
    let stats = rig.stats();
    assert_eq!((stats.lanes, stats.limbo_bytes, stats.held_bytes), (1, 64 * MIB, 64 * MIB));
    let legacy = rig.pool.lane(&Stream::legacy(&rig.driver, HOME).unwrap()).unwrap();
    assert!(legacy.try_alloc(64 * MIB).unwrap_err().is_out_of_memory());
    // A handle value that comes back is another stream, and waits as well.
    let again = Stream::create(&rig.driver, HOME).unwrap();
    assert!(handles.contains(&again.handle()));
    let other = rig.pool.lane(&again).unwrap();
    assert!(other.try_alloc(2 * MIB).unwrap_err().is_out_of_memory());
    drop(holds);
    let whole = legacy.try_alloc(64 * MIB).unwrap();
    assert_eq!(rig.stats().held_bytes, 64 * MIB);
    rig.driver.device_synchronize(HOME).unwrap(); // no fault
    drop((whole, legacy, other, again));
    rig.end();
}

#[test]
fn f_c4_a_borrowed_stream_is_not_touched_once_its_lane_is_closed() {
    let rig = Rig::new(|b| b);
    let handle = rig.driver.stream_create(HOME).unwrap();
    let stream = borrowed(&rig.driver, handle);
    let lane = rig.pool.lane(&stream).unwrap();
    let buffer = lane.alloc(4 * MIB).unwrap();
    let hold = Held::new(&rig.sim, handle);
    fill(&rig, handle, buffer.address(), 3);
    rig.pool.close_lane(&stream);
    // SAFETY: made above, and its lane is closed.
    unsafe { rig.driver.stream_destroy(HOME, handle) }.unwrap();
    let calls = rig.calls(|| drop(buffer));
    let named = [Call::EventRecord, Call::StreamGetCaptureInfo, Call::StreamSynchronize];
    assert_eq!(named.map(|call| calls.of(call)), [0; 3], "{calls}");
    assert_eq!((rig.stats().lanes, calls.of(Call::MemUnmap)), (1, 0));
    drop(hold);
    rig.pool.trim(HOME).unwrap();
    assert_eq!(rig.stats().held_bytes, 0);
    rig.driver.device_synchronize(HOME).unwrap(); // no fault
    drop((lane, stream));
    rig.end();
}

#[test]
fn f_x6_memory_freed_on_streams_that_nobody_uses_comes_back() {
    let rig = Rig::new(|b| b.chunk(ChunkSize::Fixed(2 * MIB)).limit_bytes(32 * MIB));
    let unused = Stream::create(&rig.driver, HOME).unwrap();
    let idle = Stream::create(&rig.driver, HOME).unwrap();
    for _ in 0..3 {
        let idle_lane = rig.pool.lane(&idle).unwrap();
        let mut buffer = idle_lane.alloc(16 * MIB).unwrap();
        buffer.record_stream(&unused).unwrap();
        drop((buffer, idle_lane.alloc(16 * MIB).unwrap()));
        let whole = rig.lane.alloc(32 * MIB).unwrap();
        assert_eq!(rig.stats().held_bytes, 32 * MIB);
        drop(whole);
    }
    drop((unused, idle));
    rig.end();
}

#[test]
fn many_threads_use_one_lane() {
    let rig = Rig::new(|b| b.chunk(ChunkSize::Fixed(2 * MIB)).background(true));
    thread::scope(|scope| {
        for seed in 1..=6_u64 {
            let lane = rig.lane.clone();
            scope.spawn(move || {
                let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15);
                let mut live = Vec::new();
                for turn in 0..300_u64 {
                    state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(seed);
                    let bytes = 1 + (state >> 33) % (1 << (10 + (state >> 20) % 13));
                    let buffer = lane.alloc(bytes).unwrap();
                    let mark = (seed << 32 | turn).to_le_bytes();
                    let length = buffer.bytes().min(8) as usize;
                    buffer.write(buffer.bytes() - length as u64, &mark[..length]).unwrap();
                    live.push((buffer, mark, length));
                    if live.len() > 20 {
                        let nth = (state >> 7) as usize % live.len();
                        let (buffer, mark, length) = live.swap_remove(nth);
                        let mut back = [0; 8];
                        let end = buffer.bytes() - length as u64;
                        buffer.read(end, &mut back[..length]).unwrap();
                        assert_eq!(back[..length], mark[..length], "seed {seed} turn {turn}");
                    }
                }
            });
        }
    });
    let stats = rig.stats();
    assert_eq!((stats.buffers, stats.live_bytes), (0, 0));
    rig.end();
}

#[test]
fn a_pool_that_is_dropped_waits_for_what_leaves() {
    let sim = Sim::builder().build();
    let driver: Arc<dyn Driver> = sim.clone();
    let pool = Pool::builder(driver.clone()).background(false).build().unwrap();
    let stream = Stream::create(&driver, HOME).unwrap();
    let lane = pool.lane(&stream).unwrap();
    let buffer = lane.alloc(4 * MIB).unwrap();
    let kernel = ProbeKernel::FillWords { dst: buffer.address(), words: 4, value: 1 };
    let hold = Held::new(&sim, stream.handle());
    // SAFETY: a live stream, and an address of the pool.
    unsafe { driver.launch(HOME, &kernel, stream.handle()) }.unwrap();
    drop((buffer, lane));
    let before = driver.ledger().snapshot();
    thread::scope(|scope| {
        let end = scope.spawn(move || drop(pool));
        thread::sleep(SOME_TIME);
        let unmaps = driver.ledger().snapshot().since(&before).of(Call::MemUnmap);
        let finished = end.is_finished();
        drop(hold); // before anything can fail: the thread waits for it
        assert_eq!((unmaps, finished), (0, false));
    });
    stream.synchronize().unwrap(); // no fault
    drop((stream, driver));
    sim.check_clean().unwrap();
}
