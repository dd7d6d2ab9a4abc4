//! Idle lanes and idle memory: what is given to others, to whom, and when. The time is the test's.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::common::graph::{Graph, begin, fill, holds};
use crate::common::{HOME, Held, MIB, Rig};
use vmm_pool::{Buffer, ChunkSize, Lane, PoolBuilder};
use vmm_sys::object::Stream;

const IDLE_MS: u64 = 1000;
/// Nothing here takes as long; a story that hangs says so.
const PATIENCE: Duration = Duration::from_secs(30);

/// A clock in a test's hand, which tells how often it was read.
#[derive(Clone, Default)]
struct Hand(Arc<(Mutex<(Duration, u64)>, Condvar)>);

impl Hand {
    fn state(&self) -> MutexGuard<'_, (Duration, u64)> {
        // A story that failed still ends its pool, which reads the time.
        self.0.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn reads(&self) -> u64 {
        self.state().1
    }

    fn read(&self) -> Duration {
        let mut state = self.state();
        state.1 += 1;
        self.0.1.notify_all();
        state.0
    }

    fn pass(&self, ms: u64) {
        self.state().0 += Duration::from_millis(ms);
    }

    /// Waits until `is_true` is, asking after each reading of the clock.
    fn wait(&self, what: &str, mut is_true: impl FnMut() -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !is_true() {
            let state = self.state();
            let reads = state.1;
            let wait = self.0.1.wait_timeout_while(state, PATIENCE, |state| state.1 == reads);
            drop(wait.unwrap());
            assert!(Instant::now() < deadline, "{what}");
        }
    }

    /// Waits until the background thread has looked, from begin to end.
    fn wait_for_look(&self) {
        let begin = self.reads();
        // The first reading may be of a look that had begun.
        self.wait("no look", || self.reads() >= begin + 3);
    }

    fn settings(&self, builder: PoolBuilder) -> PoolBuilder {
        let hand = self.clone();
        builder
            .chunk(ChunkSize::Fixed(2 * MIB))
            // Beyond a soft limit lanes would share what they have without resting.
            .soft_limit(None)
            .idle_lane_ms(Some(IDLE_MS))
            .clock(move || hand.read())
    }
}

fn rig(hand: &Hand, more: impl FnOnce(PoolBuilder) -> PoolBuilder) -> Rig {
    Rig::new(|builder| more(hand.settings(builder)))
}

fn second_lane(rig: &Rig) -> (Stream, Lane) {
    let stream = Stream::create(&rig.driver, HOME).unwrap();
    let lane = rig.pool.lane(&stream).unwrap();
    (stream, lane)
}

/// One miss: a lane that grows looks at the others in passing.
fn miss(lane: &Lane, kept: &mut Vec<Buffer>) {
    kept.push(lane.alloc(2 * MIB).unwrap());
}

#[test]
fn an_idle_lane_serves_another_at_its_next_miss() {
    let hand = Hand::default();
    let rig = rig(&hand, |b| b);
    let (stream, other) = second_lane(&rig);
    let mut kept = Vec::new();
    drop(rig.lane.alloc(16 * MIB).unwrap());
    hand.pass(IDLE_MS / 4);
    miss(&other, &mut kept); // a look: the lane was used
    hand.pass(IDLE_MS - 1);
    miss(&other, &mut kept);
    assert_eq!((rig.stats().idle_bytes, rig.stats().idle_lanes_emptied), (16 * MIB, 0));
    let held_bytes = rig.stats().held_bytes;
    hand.pass(IDLE_MS / 4);
    miss(&other, &mut kept);
    let stats = rig.stats();
    assert_eq!((stats.idle_bytes, stats.stock_bytes), (0, 14 * MIB), "{stats:?}");
    assert_eq!((stats.held_bytes, stats.idle_lanes_emptied), (held_bytes, 1), "nothing was made");
    kept.push(other.alloc(14 * MIB).unwrap());
    assert_eq!(rig.stats().held_bytes, held_bytes);
    drop((kept, other, stream));
    rig.end();
}

#[test]
fn beyond_the_high_mark_idle_memory_goes_back_to_the_driver() {
    let hand = Hand::default();
    let rig = rig(&hand, |b| b.stock_marks(0, 4 * MIB));
    let (stream, other) = second_lane(&rig);
    let mut kept = Vec::new();
    drop(rig.lane.alloc(16 * MIB).unwrap());
    hand.pass(IDLE_MS / 4);
    miss(&other, &mut kept);
    hand.pass(IDLE_MS);
    miss(&other, &mut kept);
    let stats = rig.stats();
    assert_eq!((stats.held_bytes, stats.stock_bytes), (6 * MIB, 2 * MIB), "{stats:?}");
    drop((kept, other, stream));
    rig.end();
}

#[test]
fn off_is_off_and_what_lives_stays() {
    let hand = Hand::default();
    let rig = rig(&hand, |b| b.idle_lane_ms(None));
    let (stream, other) = second_lane(&rig);
    let mut kept = vec![rig.lane.alloc(2 * MIB).unwrap()];
    drop(rig.lane.alloc(8 * MIB).unwrap());
    for _ in 0..3 {
        hand.pass(100 * IDLE_MS);
        miss(&other, &mut kept);
    }
    assert_eq!((rig.stats().idle_bytes, rig.stats().idle_lanes_emptied), (8 * MIB, 0));
    // On, the chunk of a live buffer stays where it is.
    let hand = Hand::default();
    let on = self::rig(&hand, |b| b);
    let live = on.lane.alloc(2 * MIB).unwrap();
    live.write(0, &[7; 100]).unwrap();
    drop(on.lane.alloc(8 * MIB).unwrap());
    let (on_stream, on_other) = second_lane(&on);
    let mut on_kept = Vec::new();
    hand.pass(IDLE_MS / 4);
    miss(&on_other, &mut on_kept);
    hand.pass(IDLE_MS);
    miss(&on_other, &mut on_kept);
    assert_eq!(on.stats().idle_bytes, 0);
    let mut bytes = [0; 100];
    live.read(0, &mut bytes).unwrap();
    assert_eq!(bytes, [7; 100]);
    drop((live, on_kept, on_other, on_stream, kept, other, stream));
    on.end();
    rig.end();
}

#[test]
fn work_that_repeats_makes_no_call_however_long_it_goes_on() {
    let hand = Hand::default();
    for background in [false, true] {
        let rig = rig(&hand, |b| b.background(background));
        let (stream, other) = second_lane(&rig);
        let pass = || {
            for lane in [&rig.lane, &other] {
                let buffers: Vec<_> =
                    (1..20).map(|nth| lane.alloc(nth * 300_000).unwrap()).collect();
                drop(buffers);
            }
        };
        pass();
        pass();
        for _ in 0..20 {
            hand.pass(IDLE_MS * 3 / 4);
            if background {
                hand.wait_for_look();
            }
            assert_eq!(rig.calls(pass).total(), 0);
        }
        assert_eq!(rig.stats().idle_lanes_emptied, 0);
        drop((other, stream));
        rig.end();
    }
}

#[test]
fn a_warm_pass_reads_no_clock() {
    let hand = Hand::default();
    let rig = rig(&hand, |b| b);
    drop(rig.lane.alloc(8 * MIB).unwrap());
    let reads = hand.reads();
    for _ in 0..100 {
        drop(rig.lane.alloc(8 * MIB).unwrap());
        drop(rig.lane.alloc(3 * MIB).unwrap());
    }
    assert_eq!(hand.reads(), reads);
    rig.end();
}

#[test]
fn the_background_thread_empties_an_idle_lane_and_it_comes_back() {
    let hand = Hand::default();
    let rig = rig(&hand, |b| b.background(true));
    drop(rig.lane.alloc(16 * MIB).unwrap());
    hand.pass(IDLE_MS);
    hand.wait_for_look();
    hand.pass(IDLE_MS);
    // The memory is there before it is counted.
    hand.wait("not emptied", || {
        let stats = rig.pool.device_stats(HOME).unwrap();
        stats.stock_bytes == 16 * MIB && stats.idle_lanes_emptied == 1
    });
    // Used again: mapped again, nothing is made.
    let calls = rig.calls(|| drop(rig.lane.alloc(16 * MIB).unwrap()));
    assert_eq!(calls.of(vmm_sys::Call::MemCreate), 0, "{calls}");
    assert_eq!(rig.stats().held_bytes, 16 * MIB);
    rig.end();
}

#[test]
fn whoever_gets_a_chunk_comes_after_all_its_earlier_users() {
    let hand = Hand::default();
    // No memory but the one chunk that goes from hand to hand.
    let rig = rig(&hand, |b| b.limit_bytes(2 * MIB).background(true));
    let mut lanes = vec![(rig.stream.clone(), rig.lane.clone())];
    lanes.extend((0..3).map(|_| second_lane(&rig)));
    let mut chunk = lanes[0].1.alloc(2 * MIB).unwrap();
    for hop in 0..12 {
        let (stream, _) = &lanes[hop % 4];
        let (next_stream, next) = &lanes[(hop + 1) % 4];
        let value = 1000 * (1 + hop as u32);
        let held = Held::new(&rig.sim, stream.handle());
        fill(&rig, stream, &chunk, value);
        // Every third time a second stream, which the lane's own does not wait for.
        let (third_stream, _) = &lanes[(hop + 2) % 4];
        let over = (hop % 3 == 0).then(|| {
            let over = Held::new(&rig.sim, third_stream.handle());
            chunk.record_stream(third_stream).unwrap();
            fill(&rig, third_stream, &chunk, value + 100);
            over
        });
        drop(chunk);
        for _ in 0..2 {
            hand.pass(IDLE_MS);
            hand.wait_for_look();
        }
        assert_eq!(rig.pool.device_stats(HOME).unwrap().held_bytes, 2 * MIB);
        assert!(next.try_alloc(2 * MIB).is_err(), "hop {hop}: before its time");
        drop(held);
        hand.pass(IDLE_MS);
        hand.wait_for_look();
        assert_eq!(next.try_alloc(2 * MIB).is_err(), over.is_some(), "hop {hop}");
        drop(over);
        hand.wait("the chunk does not come", || {
            hand.pass(IDLE_MS);
            let stats = rig.pool.device_stats(HOME).unwrap();
            stats.stock_bytes == 2 * MIB && stats.retired_mappings + stats.limbo_buffers == 0
        });
        chunk = next.alloc(2 * MIB).unwrap();
        fill(&rig, next_stream, &chunk, value + 200);
        for (stream, _) in &lanes {
            stream.synchronize().unwrap();
        }
        assert!(holds(&chunk, value + 200), "hop {hop}: an earlier user wrote later");
    }
    assert!(rig.stats().idle_lanes_emptied > 0);
    drop((chunk, lanes));
    rig.end();
}

#[test]
fn a_captured_stream_keeps_its_chunks_until_the_capture_is_over() {
    let hand = Hand::default();
    let rig = rig(&hand, |b| b);
    let (stream, other) = second_lane(&rig);
    let mut kept = Vec::new();
    drop(rig.lane.alloc(4 * MIB).unwrap());
    hand.pass(IDLE_MS / 4);
    miss(&other, &mut kept);
    begin(&rig, &rig.stream, vmm_sys::CaptureMode::Relaxed);
    hand.pass(IDLE_MS);
    miss(&other, &mut kept);
    assert_eq!((rig.stats().idle_bytes, rig.stats().idle_lanes_emptied), (4 * MIB, 0));
    drop(Graph::end(&rig, &rig.stream));
    hand.pass(IDLE_MS);
    miss(&other, &mut kept);
    assert_eq!((rig.stats().idle_bytes, rig.stats().idle_lanes_emptied), (0, 1));
    drop((kept, other, stream));
    rig.end();
}

#[test]
fn memory_goes_back_by_its_age() {
    let hand = Hand::default();
    // Nothing looks but the trims.
    let rig = rig(&hand, |b| b.idle_lane_ms(None).stock_marks(4 * MIB, u64::MAX));
    let (stream, busy) = second_lane(&rig);
    let trim = |ms| rig.pool.trim_idle(HOME, Duration::from_millis(ms)).unwrap();
    drop(rig.lane.alloc(8 * MIB).unwrap());
    drop(busy.alloc(6 * MIB).unwrap());
    rig.pool.prefill(HOME, 6 * MIB).unwrap();
    assert_eq!(trim(500), 0, "all of it is young");
    hand.pass(499);
    assert_eq!(trim(500), 0);
    drop(busy.alloc(6 * MIB).unwrap());
    hand.pass(1);
    // Two MiB of stock above the low mark, and the lane that was not used.
    assert_eq!(trim(500), 10 * MIB);
    let stats = rig.stats();
    assert_eq!((stats.stock_bytes, stats.idle_bytes), (4 * MIB, 6 * MIB), "{stats:?}");
    hand.pass(1000);
    assert_eq!(trim(u64::MAX), 0);
    assert_eq!(trim(1000), 6 * MIB);
    assert_eq!(trim(0), 0, "the low mark stays");
    assert_eq!(rig.pool.trim(HOME).unwrap(), 4 * MIB);
    assert_eq!(rig.stats().held_bytes, 0);
    let chunks = rig.sim.ledger_summary().chunks;
    assert_eq!(chunks, 0, "the driver holds nothing of the pool");
    drop((busy, stream));
    rig.end();
}

#[test]
fn unfinished_work_is_not_waited_for_by_age() {
    let hand = Hand::default();
    let rig = rig(&hand, |b| b);
    let buffer = rig.lane.alloc(8 * MIB).unwrap();
    let held = Held::new(&rig.sim, rig.stream.handle());
    fill(&rig, &rig.stream, &buffer, 1);
    drop(buffer);
    assert_eq!(rig.pool.trim_idle(HOME, Duration::ZERO).unwrap(), 0);
    drop(held);
    assert_eq!(rig.pool.trim_idle(HOME, Duration::ZERO).unwrap(), 8 * MIB);
    rig.end();
}

#[test]
fn a_pool_that_ends_amid_all_this_leaves_nothing() {
    let hand = Hand::default();
    let rig = rig(&hand, |b| b.background(true));
    let (stream, other) = second_lane(&rig);
    let buffer = rig.lane.alloc(8 * MIB).unwrap();
    let live = other.alloc(2 * MIB).unwrap();
    let held = Held::new(&rig.sim, rig.stream.handle());
    fill(&rig, &rig.stream, &buffer, 1);
    drop(buffer);
    hand.pass(IDLE_MS);
    hand.wait_for_look();
    hand.pass(IDLE_MS);
    let retires = || rig.pool.device_stats(HOME).unwrap().retired_mappings == 4;
    hand.wait("nothing retires", retires);
    drop((held, live, other, stream));
    rig.end();
}
