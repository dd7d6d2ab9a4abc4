//! Streams, events, holds, faults of kernels: rows S, V, D-M6, D-U4.

use super::*;
use crate::error::ResultCode as Code;

fn fill(dst: u64, words: u64, value: u32) -> ProbeKernel {
    ProbeKernel::FillWords { dst, words, value }
}

#[test]
fn handles_come_back_and_identities_do_not() {
    let sim = sim();
    let first = sim.stream_create(D0).unwrap();
    // SAFETY: the simulator checks handles itself.
    let (id, destroyed) = unsafe { (sim.stream_id(D0, first), sim.stream_destroy(D0, first)) };
    destroyed.unwrap();
    assert_eq!(code(sim.t_sync(D0, first)), Code::INVALID_HANDLE);
    let second = sim.stream_create(D0).unwrap();
    assert_eq!(second, first);
    // SAFETY: as above.
    let new_id = unsafe { sim.stream_id(D0, second) };
    assert_ne!(new_id.unwrap(), id.unwrap());

    // SAFETY: as above.
    let id_of = |sim: &Sim, stream| unsafe { sim.stream_id(D0, stream) }.unwrap();
    assert_eq!(id_of(&sim, StreamHandle::NULL), id_of(&sim, StreamHandle::LEGACY));
    let mine = id_of(&sim, StreamHandle::PER_THREAD);
    let theirs = std::thread::scope(|scope| {
        scope.spawn(|| id_of(&sim, StreamHandle::PER_THREAD)).join().unwrap()
    });
    assert_ne!(mine, theirs);
    assert_eq!(mine, id_of(&sim, StreamHandle::PER_THREAD));
}

#[test]
fn held_work_waits_in_order_and_events_tell() {
    let sim = sim();
    let (va, _) = sim.t_mapped(D0, G);
    let (a, b) = (sim.stream_create(D0).unwrap(), sim.stream_create(D0).unwrap());
    let event = sim.event_create(D0).unwrap();
    assert!(sim.t_query(D0, event).unwrap(), "never recorded counts as passed");
    let hold = sim.hold(D0, a).unwrap();
    sim.t_launch(D0, fill(va, 4, 7), a).unwrap();
    sim.t_record(D0, event, a).unwrap();
    sim.t_wait(D0, b, event).unwrap();
    sim.t_launch(D0, ProbeKernel::CopyWords { dst: va + 64, src: va, words: 4 }, b).unwrap();
    assert!(!sim.t_query(D0, event).unwrap());
    assert_eq!(sim.peek(va, 4).unwrap(), [0; 4]);
    sim.release_hold(hold);
    assert!(sim.t_query(D0, event).unwrap());
    sim.t_sync(D0, b).unwrap();
    assert_eq!(sim.peek(va + 64, 8).unwrap(), [7, 0, 0, 0, 8, 0, 0, 0]);
}

#[test]
fn a_later_record_does_not_move_an_earlier_wait() {
    let sim = sim();
    let (a, b) = (sim.stream_create(D0).unwrap(), sim.stream_create(D0).unwrap());
    let event = sim.event_create(D0).unwrap();
    let first = sim.hold(D0, a).unwrap();
    sim.t_record(D0, event, a).unwrap();
    sim.t_wait(D0, b, event).unwrap();
    let second = sim.hold(D0, a).unwrap();
    sim.t_record(D0, event, a).unwrap();
    sim.release_hold(first);
    // SAFETY: the simulator checks handles itself.
    assert!(unsafe { sim.stream_query(D0, b) }.unwrap());
    assert!(!sim.t_query(D0, event).unwrap());
    sim.release_hold(second);
    assert!(sim.t_query(D0, event).unwrap());
}

#[test]
fn the_legacy_stream_is_ordered_after_blocking_streams_only() {
    let sim = sim();
    let other = sim.stream_create(D0).unwrap();
    let elsewhere = sim.stream_create_blocking(D1).unwrap();
    let blocking = sim.stream_create_blocking(D0).unwrap();
    let gone = sim.stream_create_blocking(D0).unwrap();
    let unrelated = [sim.hold(D0, other).unwrap(), sim.hold(D1, elsewhere).unwrap()];
    let event = sim.event_create(D0).unwrap();
    for stream in [StreamHandle::PER_THREAD, blocking, gone] {
        sim.busy(D0, stream, 500).unwrap();
        if stream == gone {
            // SAFETY: the simulator checks handles itself.
            unsafe { sim.stream_destroy(D0, gone) }.unwrap(); // its work goes on
        }
        sim.t_record(D0, event, StreamHandle::LEGACY).unwrap();
        assert!(!sim.t_query(D0, event).unwrap());
        sim.advance(500);
        assert!(sim.t_query(D0, event).unwrap());
    }
    unrelated.into_iter().for_each(|hold| sim.release_hold(hold));
}

#[test]
fn blocking_streams_are_ordered_after_the_legacy_stream() {
    let sim = sim();
    let event = sim.event_create(D0).unwrap();
    let (blocking, other) =
        (sim.stream_create_blocking(D0).unwrap(), sim.stream_create(D0).unwrap());
    let hold = sim.hold(D0, StreamHandle::LEGACY).unwrap();
    for (stream, waits) in [(StreamHandle::PER_THREAD, true), (blocking, true), (other, false)] {
        sim.t_record(D0, event, stream).unwrap();
        assert_eq!(sim.t_query(D0, event).unwrap(), !waits, "{stream:?}");
    }
    sim.release_hold(hold);
}

#[test]
fn a_stream_that_is_kept_busy_ends_as_late_after_the_last_word() {
    let sim = sim();
    let stream = sim.stream_create(D0).unwrap();
    let event = sim.event_create(D0).unwrap();
    for _ in 0..100 {
        sim.keep_busy(D0, stream, 2000).unwrap();
        sim.advance(10);
    }
    sim.t_record(D0, event, stream).unwrap();
    sim.advance(1980);
    assert!(!sim.t_query(D0, event).unwrap());
    sim.advance(20);
    assert!(sim.t_query(D0, event).unwrap(), "not a hundred times as long");
    // Behind longer work it adds nothing, before the next it is still there.
    sim.busy(D0, stream, 500).unwrap();
    sim.keep_busy(D0, stream, 100).unwrap();
    let before_ns = sim.now_ns();
    sim.t_sync(D0, stream).unwrap();
    assert_eq!((sim.now_ns() - before_ns) / 100_000, 5);
}

#[test]
fn waiting_jumps_the_clock_to_the_end_of_the_work() {
    let sim = sim();
    let stream = sim.stream_create(D0).unwrap();
    sim.t_launch(D0, ProbeKernel::Spin { busy_us: 300_000, done: 0 }, stream).unwrap();
    let before = sim.now_ns();
    sim.t_sync(D0, stream).unwrap();
    let waited_us = (sim.now_ns() - before) / 1000;
    assert!((299_000..302_000).contains(&waited_us), "{waited_us}");
}

#[test]
fn a_stream_that_nobody_releases_is_named_after_the_limit() {
    let limit = std::time::Duration::from_millis(20);
    let sim = Sim::builder().blocked_limit(limit).build();
    let stream = sim.stream_create(D0).unwrap();
    let hold = sim.hold(D0, stream).unwrap();
    let error = sim.t_sync(D0, stream).unwrap_err();
    assert_eq!(error.code(), Code::LAUNCH_TIMEOUT);
    assert!(error.detail().contains(&format!("{:#x}", stream.0)), "{error}");
    sim.release_hold(hold);
    sim.t_sync(D0, stream).unwrap();
}

#[test]
fn another_thread_lets_a_blocked_wait_go() {
    let sim = sim();
    let stream = sim.stream_create(D0).unwrap();
    let hold = sim.hold(D0, stream).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| sim.release_hold(hold));
        sim.t_sync(D0, stream).unwrap();
    });
}

#[test]
fn a_kernel_without_access_faults_at_the_next_wait_and_for_good() {
    let sim = sim();
    let (va, _) = sim.t_mapped(D1, G);
    let stream = sim.stream_create(D0).unwrap();
    sim.t_launch(D0, fill(va, 4, 1), stream).unwrap();
    let error = sim.t_sync(D0, stream).unwrap_err();
    assert_eq!(error.code(), Code::ILLEGAL_ADDRESS, "{error}");
    assert_eq!(code(sim.stream_create(D0)), Code::ILLEGAL_ADDRESS);
    assert_eq!(code(sim.mem_info(D0)), Code::ILLEGAL_ADDRESS);
    assert_eq!(sim.peek(va, 4).unwrap(), [0; 4]);

    // A thread with the lost context current gets it from every call.
    assert!(sim.address_reserve(G, 0, 0).is_ok());
    let context = sim.primary_context_retain(D0).unwrap();
    // SAFETY: the context is live.
    unsafe { sim.context_set_current(Some(context)) }.unwrap();
    assert_eq!(code(sim.address_reserve(G, 0, 0)), Code::ILLEGAL_ADDRESS);
}

#[test]
fn a_reported_fault_takes_every_context_and_leaves_the_vmm_calls() {
    let sim = Sim::builder().devices(3).build();
    let (nothing, theirs) = (sim.address_reserve(G, 0, 0).unwrap(), sim.t_mapped(D1, G));
    let (stream, other) = (sim.stream_create(D0).unwrap(), sim.stream_create(D1).unwrap());
    sim.t_launch(D0, fill(nothing, 1, 1), stream).unwrap();
    sim.t_sync(D1, other).unwrap();
    assert_eq!(code(sim.t_sync(D0, stream)), Code::ILLEGAL_ADDRESS);
    for result in [
        code(sim.device_synchronize(D1)),
        code(sim.mem_info(D1)),
        // A device that nobody had named before.
        code(sim.device_synchronize(DeviceId(2))),
        code(sim.t_launch(D1, fill(theirs.0, 1, 1), other)),
        code(sim.mem_info(D0)),
    ] {
        assert_eq!(result, Code::ILLEGAL_ADDRESS);
    }
    sim.t_unmapped(theirs.0, G, theirs.1);
    let (address, chunk) = sim.t_mapped(D1, G);
    sim.t_unmapped(address, G, chunk);
}

#[test]
fn a_stream_too_many_waits_for_the_work_of_its_device_alone() {
    let sim = Sim::builder().devices(2).stream_slots(3).build();
    let held = sim.stream_create(D0).unwrap();
    let theirs: Vec<_> = (0..9).map(|_| sim.stream_create(D1).unwrap()).collect();
    let hold = sim.hold(D0, held).unwrap();
    let second = sim.stream_create(D0).unwrap();
    sim.stream_create(D0).unwrap();
    // SAFETY: the stream is live.
    unsafe { sim.stream_destroy(D0, second) }.unwrap();
    sim.stream_create(D0).unwrap();
    let made = std::thread::scope(|scope| {
        let maker = scope.spawn(|| sim.stream_create(D0));
        std::thread::sleep(std::time::Duration::from_millis(20));
        assert!(!maker.is_finished(), "the fourth alive waits");
        sim.stream_create(D1).unwrap();
        sim.release_hold(hold);
        maker.join().unwrap()
    });
    assert!(made.is_ok() && theirs.len() == 9);
    // Room for 32 more was made: 35 in all, of which four are taken.
    let hold = sim.hold(D0, held).unwrap();
    for _ in 0..31 {
        sim.stream_create(D0).unwrap();
    }
    sim.release_hold(hold);
    let limited =
        Sim::builder().stream_slots(1).blocked_limit(std::time::Duration::from_millis(20)).build();
    let held = limited.stream_create(D0).unwrap();
    let hold = limited.hold(D0, held).unwrap();
    let error = limited.stream_create(D0).unwrap_err();
    assert!(
        error.code() == Code::LAUNCH_TIMEOUT && error.to_string().contains("a hold"),
        "{error}"
    );
    assert_eq!(limited.ledger_summary().streams, 1);
    limited.release_hold(hold);
    limited.stream_create(D0).unwrap();
}

#[test]
fn unmap_does_not_wait_and_the_running_kernel_faults() {
    for remap in [false, true] {
        let sim = Sim::builder().time(crate::sim::TimeMode::Modelled).build();
        let (va, chunk) = sim.t_mapped(D0, G);
        let stream = sim.stream_create(D0).unwrap();
        sim.t_launch(D0, ProbeKernel::Spin { busy_us: 1000, done: 0 }, stream).unwrap();
        sim.t_launch(D0, fill(va, 4, 1), stream).unwrap();
        let before = sim.now_ns();
        sim.unmap(va, G).unwrap();
        assert!(sim.now_ns() - before < 100_000, "unmap waits for nobody");
        if remap {
            // Mapped again before its turn: nothing is wrong with that.
            sim.t_map(va, G, chunk).unwrap();
            sim.set_access(va, G, &[AccessGrant::read_write(D0)]).unwrap();
        }
        let expected = if remap { Code::SUCCESS } else { Code::ILLEGAL_ADDRESS };
        assert_eq!(code(sim.t_sync(D0, stream)), expected);
    }
    let sim = sim();
    let (va, _) = sim.t_mapped(D0, G);
    let stream = sim.stream_create(D0).unwrap();
    sim.t_launch(D0, ProbeKernel::Spin { busy_us: 1000, done: va }, stream).unwrap();
    sim.unmap(va, G).unwrap();
    assert_eq!(code(sim.t_sync(D0, stream)), Code::ILLEGAL_ADDRESS);
}

#[test]
fn a_swap_under_a_running_kernel_is_noticed_even_if_the_address_is_mapped_again() {
    let sim = Sim::builder().time(crate::sim::TimeMode::Modelled).build();
    let (va, chunk) = sim.t_mapped(D0, 512 << 20);
    let stream = sim.stream_create(D0).unwrap();
    // About 147 us of writing; unmap, map and access take about 64.
    sim.t_launch(D0, fill(va, 128 << 20, 1), stream).unwrap();
    sim.unmap(va, 512 << 20).unwrap();
    sim.t_map(va, 512 << 20, chunk).unwrap();
    sim.set_access(va, 512 << 20, &[AccessGrant::read_write(D0)]).unwrap();
    assert_eq!(code(sim.t_sync(D0, stream)), Code::ILLEGAL_ADDRESS);
}

#[test]
fn a_wait_on_a_host_word_holds_the_stream_while_the_chunk_is_swapped() {
    let sim = sim();
    let (va, old) = sim.t_mapped(D0, G);
    let stream = sim.stream_create(D0).unwrap();
    let word = sim.host_alloc(D0, 4096).unwrap();
    // SAFETY: the stream is live, and the word is freed after the wait is over.
    unsafe { sim.stream_wait_value32(D0, stream, word, 5) }.unwrap();
    sim.t_launch(D0, fill(va, 4, 9), stream).unwrap();
    let new = sim.create(G, &ChunkProps::on_device(D1)).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            sim.unmap(va, G).unwrap();
            sim.t_map(va, G, new).unwrap();
            sim.set_access(va, G, &[AccessGrant::read_write(D0)]).unwrap();
            // SAFETY: the word is ours and aligned.
            let word = unsafe { std::sync::atomic::AtomicU32::from_ptr(word.0 as *mut u32) };
            word.store(5, std::sync::atomic::Ordering::Release);
        });
        sim.t_sync(D0, stream).unwrap();
    });
    assert_eq!(sim.peek(va, 4).unwrap(), [9, 0, 0, 0]);
    assert_eq!(sim.pointer_info(va).unwrap().device, D1);
    sim.t_release(old).unwrap();
    // SAFETY: nothing uses the word any more.
    unsafe { sim.host_free(D0, word) }.unwrap();
}

#[test]
fn nothing_else_waits_while_a_gate_holds_one_stream() {
    let sim = sim();
    let held = sim.stream_create(D0).unwrap();
    let streams: Vec<_> = (0..40).map(|_| sim.stream_create(D0).unwrap()).collect();
    let (open, opened) = std::sync::mpsc::channel::<()>();
    let gate = Box::new(move || opened.recv().unwrap_or_default());
    // SAFETY: the stream is live.
    unsafe { sim.launch_host_function(D0, held, gate) }.unwrap();
    let (va, chunk) = sim.t_mapped(D0, G);
    sim.stream_create(D0).unwrap();
    let event = sim.event_create(D0).unwrap();
    for stream in &streams {
        sim.t_launch(D0, fill(va, 4, 3), *stream).unwrap();
        sim.t_record(D0, event, *stream).unwrap();
        assert!(sim.t_query(D0, event).unwrap());
    }
    assert_eq!(sim.t_download(D0, va, 4).unwrap(), [3, 0, 0, 0]);
    let legacy = sim.mem_alloc(D0, 4096).unwrap();
    sim.t_unmapped(va, G, chunk);
    // SAFETY: the stream is live.
    assert!(!unsafe { sim.stream_query(D0, held) }.unwrap());
    open.send(()).unwrap();
    sim.t_sync(D0, held).unwrap();
    sim.mem_free(D0, legacy).unwrap();
}

#[test]
fn a_quick_host_function_is_done_when_the_call_returns() {
    use std::sync::atomic::{AtomicU32, Ordering};
    let sim = Sim::builder().host_function_grace(std::time::Duration::from_secs(10)).build();
    let stream = sim.stream_create(D0).unwrap();
    let runs = Arc::new(AtomicU32::new(0));
    let inner_code = Arc::new(AtomicU32::new(0));
    for _ in 0..3 {
        let (runs, inner_code, sim_inside) = (runs.clone(), inner_code.clone(), sim.clone());
        let function = Box::new(move || {
            inner_code.store(code(sim_inside.driver_version()).0, Ordering::SeqCst);
            runs.fetch_add(1, Ordering::SeqCst);
        });
        // SAFETY: the stream is live.
        unsafe { sim.launch_host_function(D0, stream, function) }.unwrap();
    }
    assert_eq!(runs.load(Ordering::SeqCst), 3);
    assert_eq!(inner_code.load(Ordering::SeqCst), Code::NOT_PERMITTED.0);
    // SAFETY: the stream is live.
    assert!(unsafe { sim.stream_query(D0, stream) }.unwrap());
}

#[test]
fn events_and_kernels_stay_with_their_device() {
    let sim = sim();
    let (on0, on1) = (sim.stream_create(D0).unwrap(), sim.stream_create(D1).unwrap());
    let event = sim.event_create(D0).unwrap();
    assert_eq!(code(sim.t_record(D0, event, on1)), Code::INVALID_HANDLE);
    let spin = ProbeKernel::Spin { busy_us: 1, done: 0 };
    assert_eq!(code(sim.t_launch(D0, spin, on1)), Code::INVALID_HANDLE);
    sim.t_record(D0, event, on0).unwrap();
    sim.t_wait(D1, on1, event).unwrap();
    sim.t_sync(D1, on1).unwrap();
}
