//! What happens before memory is made beyond the soft limit: other lanes give what they have free,
//! lengths that fit nowhere are swapped, and nobody waits for the GPU.
use crate::common::{HOME, Held, MIB, Rig};
use vmm_pool::{Buffer, ChunkSize, DebugMode, Lane, PoolBuilder, Request};
use vmm_sys::object::Stream;
use vmm_sys::{Call, CallCounts, CaptureMode};

fn tight(builder: PoolBuilder) -> PoolBuilder {
    builder.chunk(ChunkSize::Fixed(2 * MIB)).soft_limit(Some(0.0))
}

fn second_lane(rig: &Rig) -> (Stream, Lane) {
    let stream = Stream::create(&rig.driver, HOME).unwrap();
    let lane = rig.pool.lane(&stream).unwrap();
    (stream, lane)
}

fn waits(calls: &CallCounts) -> u64 {
    [Call::EventSynchronize, Call::StreamSynchronize, Call::CtxSynchronize, Call::StreamWaitEvent]
        .iter()
        .map(|call| calls.of(*call))
        .sum()
}

#[test]
fn what_one_lane_holds_free_serves_another() {
    let rig = Rig::new(tight);
    let (_stream, other) = second_lane(&rig);
    drop(rig.lane.alloc(20 * MIB).unwrap());
    assert_eq!(rig.stats().idle_bytes, 20 * MIB);
    let mut buffers = Vec::new();
    let calls = rig.calls(|| buffers.push(other.alloc(12 * MIB).unwrap()));
    assert_eq!((calls.of(Call::MemCreate), calls.of(Call::MemUnmap), waits(&calls)), (0, 6, 0));
    let stats = rig.stats();
    assert_eq!((stats.held_bytes, stats.idle_bytes, stats.stock_bytes), (20 * MIB, 8 * MIB, 0));
    // No more is taken than is lacking: what is left is still warm where it was.
    let calls = rig.calls(|| buffers.push(rig.lane.alloc(8 * MIB).unwrap()));
    assert_eq!(calls.total(), 0, "{calls}");
    drop((buffers, other, _stream));
    rig.end();
}

#[test]
fn the_limit_goes_by_what_all_lanes_have_alive() {
    let rig = Rig::new(tight);
    let (_stream, other) = second_lane(&rig);
    let kept = rig.lane.alloc(20 * MIB).unwrap();
    let freed = rig.lane.alloc(10 * MIB).unwrap();
    // 30 MiB were alive together: so much may be held, and no more.
    drop(freed);
    let first = other.alloc(10 * MIB).unwrap();
    assert_eq!(rig.stats().held_bytes, 30 * MIB);
    // Now nothing is free, and what is alive grows.
    let second = other.alloc(4 * MIB).unwrap();
    assert_eq!(rig.stats().held_bytes, 34 * MIB);
    drop((kept, first, second, other, _stream));
    rig.end();
}

#[test]
fn memory_of_a_busy_stream_is_passed_over_and_given_once_it_has_passed() {
    let rig = Rig::new(tight);
    let (_stream, other) = second_lane(&rig);
    let early = rig.lane.alloc(6 * MIB).unwrap();
    // Free neighbours are one run, and as young as the youngest.
    let wall = rig.lane.alloc(2 * MIB).unwrap();
    let late = rig.lane.alloc(6 * MIB).unwrap();
    let hold = Held::new(&rig.sim, rig.stream.handle());
    drop(early);
    let mut buffers = Vec::new();
    let calls = rig.calls(|| buffers.push(other.alloc(2 * MIB).unwrap()));
    assert_eq!((calls.of(Call::MemCreate), waits(&calls)), (1, 0), "made, not waited for");
    assert_eq!(rig.stats().retired_mappings, 0, "nothing was torn out in vain");

    // What was free when it was asked has passed; what was freed behind a second hold has not.
    drop(hold);
    let hold = Held::new(&rig.sim, rig.stream.handle());
    drop(late);
    let calls = rig.calls(|| buffers.push(other.alloc(6 * MIB).unwrap()));
    assert_eq!((calls.of(Call::MemCreate), calls.of(Call::MemUnmap), waits(&calls)), (0, 3, 0));
    let calls = rig.calls(|| buffers.push(other.alloc(6 * MIB).unwrap()));
    assert_eq!((calls.of(Call::MemCreate), waits(&calls)), (3, 0));

    drop(hold);
    let calls = rig.calls(|| buffers.push(other.alloc(6 * MIB).unwrap()));
    assert_eq!((calls.of(Call::MemCreate), calls.of(Call::MemUnmap)), (0, 3));
    drop((wall, buffers, other, _stream));
    rig.end();
}

#[test]
fn frees_that_waited_for_other_streams_serve_another_lane_too() {
    let rig = Rig::new(tight);
    let (stream, other) = second_lane(&rig);
    let mut crossed = rig.lane.alloc(8 * MIB).unwrap();
    crossed.record_stream(&stream).unwrap();
    drop(crossed);
    assert_eq!(rig.stats().limbo_bytes, 8 * MIB);
    let buffer = other.alloc(8 * MIB).unwrap();
    let stats = rig.stats();
    assert_eq!((stats.held_bytes, stats.limbo_bytes), (8 * MIB, 0));
    drop((buffer, other, stream));
    rig.end();
}

#[test]
fn chunks_too_long_for_a_hole_are_swapped_for_shorter_ones() {
    // 32 MiB chunks, so that a hole of 2 MiB can only be filled by making one.
    let rig = Rig::new(|b| b.chunk(ChunkSize::Fixed(32 * MIB)).soft_limit(Some(0.0)));
    let (_stream, other) = second_lane(&rig);
    let blocks: Vec<_> = (0..4).map(|_| rig.lane.alloc(32 * MIB).unwrap()).collect();
    let [a, b, c, d]: [_; 4] = blocks.try_into().unwrap();
    let wall = other.alloc(40 * MIB).unwrap();
    assert_eq!(rig.stats().held_bytes, (128 + 64) * MIB);
    // The other lane's chunk that is half used has 24 MiB free; 26 lack 2 more.
    drop((a, c));
    let mut buffers = Vec::new();
    let calls = rig.calls(|| buffers.push(other.alloc(26 * MIB).unwrap()));
    let stats = rig.stats();
    assert!(stats.held_bytes <= (128 + 64) * MIB, "{stats:?}");
    assert_eq!(waits(&calls), 0, "{calls}");
    assert_eq!(stats.stock_bytes, 0, "{stats:?}");
    drop((b, d, wall, buffers, other, _stream));
    rig.end();
}

#[test]
fn stock_made_ahead_of_need_is_not_swapped_away() {
    let rig = Rig::new(|b| {
        b.chunk(ChunkSize::Fixed(32 * MIB)).soft_limit(Some(0.0)).stock_marks(128 * MIB, u64::MAX)
    });
    // One chunk of the stock, and a hole behind it that is too short for another.
    let first = rig.lane.alloc(32 * MIB).unwrap();
    let calls = rig.calls(|| drop(rig.lane.alloc(20 * MIB).unwrap()));
    assert_eq!((calls.of(Call::MemCreate), calls.of(Call::MemRelease)), (0, 0), "{calls}");
    assert_eq!(rig.stats().held_bytes, 128 * MIB);
    drop(first);
    rig.end();
}

#[test]
fn without_a_soft_limit_nothing_crosses() {
    let rig = Rig::new(|b| b.chunk(ChunkSize::Fixed(2 * MIB)).soft_limit(None));
    let (_stream, other) = second_lane(&rig);
    drop(rig.lane.alloc(8 * MIB).unwrap());
    let buffer = other.alloc(8 * MIB).unwrap();
    assert_eq!(rig.stats().held_bytes, 16 * MIB);
    let calls = rig.calls(|| drop(rig.lane.alloc(8 * MIB).unwrap()));
    assert_eq!(calls.total(), 0, "{calls}");
    drop((buffer, other, _stream));
    rig.end();
}

#[test]
fn a_lane_whose_stream_is_captured_gives_nothing_and_its_capture_lives() {
    let rig = Rig::new(tight);
    let (_stream, other) = second_lane(&rig);
    drop(rig.lane.alloc(8 * MIB).unwrap());
    // SAFETY: the rig's stream is alive, and is not captured yet.
    unsafe { rig.driver.capture_begin(HOME, rig.stream.handle(), CaptureMode::Global) }.unwrap();
    let buffer = other.alloc(8 * MIB).unwrap();
    assert_eq!(rig.stats().held_bytes, 16 * MIB);
    // SAFETY: it was begun above, in this thread.
    let graph = unsafe { rig.driver.capture_end(HOME, rig.stream.handle()) }.unwrap();
    // SAFETY: nobody else has it.
    unsafe { rig.driver.graph_destroy(HOME, graph) }.unwrap();
    drop(buffer);
    let again = other.alloc(16 * MIB).unwrap();
    assert_eq!(rig.stats().held_bytes, 16 * MIB, "both lanes' chunks serve it");
    drop((again, other, _stream));
    rig.end();
}

#[test]
fn new_peaks_of_the_statistics_change_nothing_of_what_growth_goes_by() {
    let work = |resets: bool| {
        let rig = Rig::new(|b| b.soft_limit(Some(0.5)));
        let mut calls = Vec::new();
        for round in 1..=4 {
            calls.push(rig.calls(|| drop(rig.lane.alloc(round * 700 * MIB).unwrap())).to_string());
            if resets {
                rig.pool.reset_peaks();
                assert_eq!(rig.stats().peak_live_bytes, 0);
            }
        }
        rig.end();
        calls
    };
    assert_eq!(work(false), work(true));
}

/// Makes a lane whose next 16 MiB go to a hole of 30 MiB, where the stock's chunks of 32 MiB are too
/// long, and whose free memory, 28 MiB, is of no use for it.
fn with_a_hole(rig: &Rig) -> Vec<Buffer> {
    rig.pool.prefill(HOME, 32 * MIB).unwrap();
    let mut pieces: Vec<Buffer> =
        [14, 2, 14, 2].map(|mib| rig.lane.alloc(mib * MIB).unwrap()).into();
    rig.pool.trim(HOME).unwrap();
    for _ in 0..2 {
        pieces.push(rig.lane.alloc_with(&Request::new(2 * MIB).align(32 * MIB)).unwrap());
    }
    assert_eq!(pieces[5].address() - pieces[4].address(), 32 * MIB);
    drop((pieces.remove(2), pieces.remove(0)));
    pieces
}

#[test]
fn an_exchange_takes_no_more_than_it_needs_and_leaves_the_low_mark() {
    let stocked = |low_mib: u64, stock_mib: u64| {
        let rig = Rig::new(|b| b.soft_limit(Some(0.0)).stock_marks(low_mib * MIB, u64::MAX));
        let pieces = with_a_hole(&rig);
        rig.pool.prefill(HOME, stock_mib * MIB).unwrap();
        let stock_bytes = rig.stats().stock_bytes;
        let mut block = None;
        let calls = rig.calls(|| block = Some(rig.lane.alloc(16 * MIB).unwrap()));
        let given = stock_bytes - rig.stats().stock_bytes;
        let counts = (calls.of(Call::MemRelease), given / MIB);
        drop((pieces, block));
        rig.end();
        counts
    };
    // One chunk is more than 16 MiB already.
    assert_eq!(stocked(0, 128), (1, 32));
    assert_eq!(stocked(96, 128), (1, 32));
    // What is made ahead of need is not for this.
    assert_eq!(stocked(128, 128), (0, 0));
    assert_eq!(stocked(97, 128), (0, 0));
}

#[test]
fn at_the_hard_limit_as_much_stock_goes_as_is_lacking() {
    let rig = Rig::new(|b| b.limit_bytes(256 * MIB).stock_marks(64 * MIB, u64::MAX));
    let pieces = with_a_hole(&rig);
    let room_bytes = 256 * MIB - rig.stats().held_bytes;
    rig.pool.prefill(HOME, rig.stats().stock_bytes + room_bytes).unwrap();
    let before = rig.stats();
    assert_eq!(before.held_bytes, 256 * MIB);
    let block = rig.lane.alloc(16 * MIB).unwrap();
    let stats = rig.stats();
    assert!(before.stock_bytes - stats.stock_bytes <= 32 * MIB, "{before:?} {stats:?}");
    assert_eq!((stats.ladder.stock_released, stats.ladder.other_pools), (1, 0));
    drop((pieces, block));
    rig.end();
}

#[test]
fn the_limit_of_guarded_lanes_goes_by_what_all_had_alive_too() {
    let rig = Rig::new(|b| b.debug_mode(DebugMode::Guard));
    let (_stream, other) = second_lane(&rig);
    drop(rig.lane.alloc(32 * MIB).unwrap());
    rig.pool.trim(HOME).unwrap();
    // Each takes more than it asks for. That is within what was alive once, so nobody is disturbed.
    let few: Vec<Buffer> = (0..4).map(|_| rig.lane.alloc(1000).unwrap()).collect();
    let more = other.alloc(1000).unwrap();
    assert_eq!(rig.stats().lanes_asked, 0);
    drop((few, more, other, _stream));
    rig.end();
}
