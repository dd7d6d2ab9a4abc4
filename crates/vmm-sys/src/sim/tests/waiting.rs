//! Which calls wait for held work, and for each other: rows D-N1, D-N2 and D-N18; and what a
//! synchronous copy has waited for.

use std::thread;
use std::time::{Duration, Instant};

use super::*;
use crate::sim::{SimBuilder, TimeMode};

/// Long enough to see that a thread does not move.
const SOME_TIME: Duration = Duration::from_millis(40);
/// Long enough for any call on a busy machine.
const LONG: Duration = Duration::from_secs(10);

fn ends(thread: &thread::ScopedJoinHandle<'_, ()>, within: Duration) -> bool {
    let deadline = Instant::now() + within;
    while !thread.is_finished() && Instant::now() < deadline {
        thread::sleep(Duration::from_millis(1));
    }
    thread.is_finished()
}

/// Checks whether `call` waits in another thread while this one's `waiting` stands before a held
/// stream.
#[track_caller]
fn beside(
    sim: &Sim,
    waiting: impl FnOnce() + Send,
    call: impl FnOnce() + Send,
    (what, waits): (&str, bool),
) {
    let stream = sim.stream_create(D0).unwrap();
    let hold = sim.hold(D0, stream).unwrap();
    thread::scope(|scope| {
        let waiting = scope.spawn(waiting);
        let stood = !ends(&waiting, SOME_TIME);
        let call = scope.spawn(call);
        let waited = !ends(&call, if waits { SOME_TIME } else { LONG });
        // Before anything is checked: a thread that is left waiting would keep the scope.
        sim.release_hold(hold);
        assert!(stood, "{what}: nothing to wait behind");
        assert_eq!(waited, waits, "{what}");
    });
    // SAFETY: the stream is live, and this is its end.
    unsafe { sim.stream_destroy(D0, stream) }.unwrap();
}

/// Each call of a move beside `waiting`, a fresh one each time.
fn moves_beside(sim: &Sim, enqueuing_waits: bool, waiting: impl Fn() + Send + Sync) {
    let (va, _) = sim.t_mapped(D0, G);
    let stream = sim.stream_create(D0).unwrap();
    let event = sim.event_create(D0).unwrap();
    sim.t_record(D0, event, stream).unwrap();
    let word = sim.host_alloc(D0, 4096).unwrap();
    let beside = |call: &(dyn Fn() + Sync), what: &str, waits: bool| {
        beside(sim, &waiting, call, (what, waits));
    };
    let fill = ProbeKernel::FillWords { dst: va, words: 4, value: 1 };
    beside(&|| sim.t_launch(D0, fill, stream).unwrap(), "launch", enqueuing_waits);
    let copied = || {
        let copy = Transfer::DeviceToDevice { dst: va + G / 2, src: va, bytes: 64 };
        // SAFETY: the stream is live, and the addresses are device memory.
        unsafe { sim.copy_async(D0, &copy, stream) }.unwrap();
    };
    beside(&copied, "copy", enqueuing_waits);
    beside(&|| assert!(sim.event_create(D0).is_ok()), "make an event", enqueuing_waits);
    beside(&|| sim.t_record(D0, event, stream).unwrap(), "record", enqueuing_waits);
    beside(&|| assert!(sim.t_query(D0, event).is_ok()), "event query", false);
    // SAFETY: the stream is live, and passes the word at once.
    let wait = || unsafe { sim.stream_wait_value32(D0, stream, word, 0) }.unwrap();
    beside(&wait, "wait for a value", false);
    let mapping = || {
        let (va, chunk) = sim.t_mapped(D0, G);
        sim.t_unmapped(va, G, chunk);
    };
    beside(&mapping, "mapping calls", false);
    beside(&|| assert!(sim.event_create(D1).is_ok()), "make an event elsewhere", false);
    // SAFETY: nothing waits for the word any more.
    unsafe { sim.host_free(D0, word) }.unwrap();
}

#[test]
fn enqueuing_waits_behind_a_thread_that_frees_memory() {
    let sim = sim();
    moves_beside(&sim, true, || {
        let memory = sim.mem_alloc(D0, 4096).unwrap();
        sim.mem_free(D0, memory).unwrap();
    });
    assert_eq!(sim.ledger_summary().mappings, 1, "what the test keeps");
}

#[test]
fn enqueuing_waits_behind_a_thread_that_frees_page_locked_memory() {
    let sim = sim();
    moves_beside(&sim, true, || {
        let word = sim.host_alloc(D0, 4096).unwrap();
        // SAFETY: nobody else knows it.
        unsafe { sim.host_free(D0, word) }.unwrap();
    });
}

#[test]
fn enqueuing_waits_behind_a_thread_whose_stream_has_no_room() {
    let sim = SimBuilder::new().devices(2).stream_slots(2).build();
    let streams = std::sync::Mutex::new(Vec::new());
    moves_beside(&sim, true, || {
        // As many as it has room for between two waits.
        let made = (0..32).map(|_| sim.stream_create(D0).unwrap());
        streams.lock().unwrap().extend(made);
    });
}

#[test]
fn nothing_waits_behind_a_thread_that_synchronises() {
    let sim = sim();
    moves_beside(&sim, false, || sim.device_synchronize(D0).unwrap());
}

#[test]
fn a_synchronous_copy_is_over_when_it_returns() {
    const BYTES: u64 = 256 << 20;
    let sim = SimBuilder::new().devices(2).time(TimeMode::Modelled).build();
    let (from, _) = sim.t_mapped(D0, BYTES);
    let (to, _) = sim.t_mapped(D0, BYTES);
    let (there, _) = sim.t_mapped(D1, BYTES);
    let stream = sim.stream_create(D0).unwrap();
    let last = BYTES - 4;
    let transfers = [
        Transfer::Fill8 { dst: from, value: 7, bytes: BYTES },
        Transfer::DeviceToDevice { dst: to, src: from, bytes: BYTES },
        Transfer::Peer { dst: there, dst_device: D1, src: from, src_device: D0, bytes: BYTES },
    ];
    for transfer in transfers {
        sim.t_copy(D0, transfer).unwrap();
        // SAFETY: the legacy stream is always there.
        assert!(unsafe { sim.stream_query(D0, StreamHandle::LEGACY) }.unwrap(), "{transfer:?}");
    }
    // A stream that is not ordered with the legacy stream sees the last bytes.
    sim.t_launch(D0, ProbeKernel::CopyWords { dst: from, src: to + last, words: 1 }, stream)
        .unwrap();
    sim.t_sync(D0, stream).unwrap();
    assert_eq!(sim.peek(from, 4).unwrap(), [7; 4]);
    assert_eq!(sim.peek(there + last, 4).unwrap(), [7; 4]);
}
