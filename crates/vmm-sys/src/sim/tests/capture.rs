//! Stream capture and graphs: rows G and D-V1.

use super::*;
use crate::error::ResultCode as Code;

const MODES: [CaptureMode; 3] =
    [CaptureMode::Global, CaptureMode::ThreadLocal, CaptureMode::Relaxed];

fn begin(sim: &Sim, stream: StreamHandle, mode: CaptureMode) -> DriverResult<()> {
    // SAFETY: the simulator checks handles itself.
    unsafe { sim.capture_begin(D0, stream, mode) }
}

fn end(sim: &Sim, stream: StreamHandle) -> DriverResult<GraphHandle> {
    // SAFETY: the simulator checks handles itself.
    unsafe { sim.capture_end(D0, stream) }
}

fn status(sim: &Sim, stream: StreamHandle) -> CaptureInfo {
    // SAFETY: the simulator checks handles itself.
    unsafe { sim.capture_info(D0, stream) }.unwrap()
}

fn executable(sim: &Sim, graph: GraphHandle) -> GraphExecHandle {
    // SAFETY: the simulator checks handles itself.
    unsafe { sim.graph_instantiate(D0, graph) }.unwrap()
}

fn replay(sim: &Sim, graph: GraphExecHandle, stream: StreamHandle) {
    // SAFETY: the simulator checks handles itself.
    unsafe { sim.graph_launch(D0, graph, stream) }.unwrap();
    sim.t_sync(D0, stream).unwrap();
}

fn fill(dst: u64, value: u32) -> ProbeKernel {
    ProbeKernel::FillWords { dst, words: 4, value }
}

#[test]
fn captured_work_runs_at_launch_only_and_again_each_time() {
    let sim = sim();
    let (va, _) = sim.t_mapped(D0, G);
    let stream = sim.stream_create(D0).unwrap();
    begin(&sim, stream, CaptureMode::Global).unwrap();
    assert_eq!(code(begin(&sim, stream, CaptureMode::Global)), Code::ILLEGAL_STATE);
    sim.t_launch(D0, fill(va, 1), stream).unwrap();
    assert_eq!(status(&sim, stream).status, CaptureStatus::Active);
    let graph = end(&sim, stream).unwrap();
    assert_eq!(sim.peek(va, 4).unwrap(), [0; 4]);
    let exec = executable(&sim, graph);
    // SAFETY: the graph is live.
    unsafe { sim.graph_destroy(D0, graph) }.unwrap();
    for _ in 0..2 {
        sim.poke(va, &[9; 4]).unwrap();
        replay(&sim, exec, stream);
        assert_eq!(sim.peek(va, 4).unwrap(), [1, 0, 0, 0]);
    }
    // SAFETY: as above; then it is gone.
    unsafe { sim.graph_exec_destroy(D0, exec) }.unwrap();
    // SAFETY: the simulator checks handles itself.
    assert_eq!(code(unsafe { sim.graph_launch(D0, exec, stream) }), Code::INVALID_HANDLE);
    assert_eq!(sim.ledger_summary().graphs, 0);
}

#[test]
fn mapping_calls_do_not_disturb_a_capture() {
    for mode in MODES {
        let sim = sim();
        let stream = sim.stream_create(D0).unwrap();
        begin(&sim, stream, mode).unwrap();
        let (va, chunk) = sim.t_mapped(D0, G);
        sim.t_unmapped(va, G, chunk);
        assert!(end(&sim, stream).is_ok(), "{mode:?}");
    }
}

/// Queries, waits and allocates; each must answer `expected`.
fn three_calls(sim: &Sim, expected: Code, what: &str) {
    let event = sim.event_create(D0).unwrap();
    assert_eq!(code(sim.t_query(D0, event)), expected, "{what}");
    // SAFETY: the event is live.
    assert_eq!(code(unsafe { sim.event_synchronize(D0, event) }), expected, "{what}");
    assert_eq!(code(sim.mem_alloc(D0, 512)), expected, "{what}");
}

#[test]
fn unsafe_calls_are_forbidden_by_mode_and_thread() {
    for mode in MODES {
        for other_thread in [false, true] {
            for relaxed in [false, true] {
                let sim = sim();
                let what = format!("{mode:?}, other thread {other_thread}, relaxed {relaxed}");
                let stream = sim.stream_create(D0).unwrap();
                begin(&sim, stream, mode).unwrap();
                let forbidden = !relaxed
                    && match mode {
                        CaptureMode::Global => true,
                        CaptureMode::ThreadLocal => !other_thread,
                        CaptureMode::Relaxed => false,
                    };
                let expected =
                    if forbidden { Code::STREAM_CAPTURE_UNSUPPORTED } else { Code::SUCCESS };
                let calls = || {
                    let old =
                        relaxed.then(|| sim.exchange_capture_mode(CaptureMode::Relaxed).unwrap());
                    three_calls(&sim, expected, &what);
                    old.map(|old| sim.exchange_capture_mode(old).unwrap())
                };
                let back = if other_thread {
                    std::thread::scope(|scope| scope.spawn(calls).join().unwrap())
                } else {
                    calls()
                };
                assert_eq!(back, relaxed.then_some(CaptureMode::Relaxed), "{what}");
                let ended = code(end(&sim, stream));
                let spoilt = Code::STREAM_CAPTURE_INVALIDATED;
                assert_eq!(ended, if forbidden { spoilt } else { Code::SUCCESS }, "{what}");
                // Over in any case.
                assert_eq!(status(&sim, stream).status, CaptureStatus::None, "{what}");
            }
        }
    }
}

#[test]
fn a_spoilt_capture_says_so_until_it_is_ended() {
    let sim = sim();
    let stream = sim.stream_create(D0).unwrap();
    begin(&sim, stream, CaptureMode::ThreadLocal).unwrap();
    assert_eq!(code(sim.t_sync(D0, stream)), Code::STREAM_CAPTURE_UNSUPPORTED);
    assert_eq!(status(&sim, stream), CaptureInfo { status: CaptureStatus::Invalidated, id: 0 });
    let spin = ProbeKernel::Spin { busy_us: 1, done: 0 };
    assert_eq!(code(sim.t_launch(D0, spin, stream)), Code::STREAM_CAPTURE_INVALIDATED);
    assert_eq!(code(end(&sim, stream)), Code::STREAM_CAPTURE_INVALIDATED);
    assert_eq!(code(end(&sim, stream)), Code::STREAM_CAPTURE_UNMATCHED);
    sim.t_launch(D0, spin, stream).unwrap();
}

#[test]
fn a_capture_spreads_by_events_and_must_be_joined() {
    for join in [true, false] {
        let sim = sim();
        let (va, _) = sim.t_mapped(D0, G);
        let (a, b) = (sim.stream_create(D0).unwrap(), sim.stream_create(D0).unwrap());
        let (fork, done) = (sim.event_create(D0).unwrap(), sim.event_create(D0).unwrap());
        begin(&sim, a, CaptureMode::Relaxed).unwrap();
        sim.t_launch(D0, fill(va, 1), a).unwrap();
        sim.t_record(D0, fork, a).unwrap();
        sim.t_wait(D0, b, fork).unwrap();
        assert_eq!(status(&sim, a), status(&sim, b));
        let copy = ProbeKernel::CopyWords { dst: va + 64, src: va, words: 4 };
        sim.t_launch(D0, copy, b).unwrap();
        assert_eq!(code(end(&sim, b)), Code::STREAM_CAPTURE_UNMATCHED);
        if !join {
            assert_ne!(code(end(&sim, a)), Code::SUCCESS);
            continue;
        }
        // Ending it in the wrong stream has spoilt it: once more, properly.
        assert_eq!(code(end(&sim, a)), Code::STREAM_CAPTURE_INVALIDATED);
        begin(&sim, a, CaptureMode::Relaxed).unwrap();
        sim.t_launch(D0, fill(va, 1), a).unwrap();
        sim.t_record(D0, fork, a).unwrap();
        sim.t_wait(D0, b, fork).unwrap();
        sim.t_launch(D0, copy, b).unwrap();
        sim.t_record(D0, done, b).unwrap();
        sim.t_wait(D0, a, done).unwrap();
        let exec = executable(&sim, end(&sim, a).unwrap());
        replay(&sim, exec, a);
        assert_eq!(sim.peek(va + 64, 8).unwrap(), [1, 0, 0, 0, 2, 0, 0, 0]);
    }
}

#[test]
fn work_that_the_origin_never_waits_for_is_unjoined() {
    let sim = sim();
    let (a, b) = (sim.stream_create(D0).unwrap(), sim.stream_create(D0).unwrap());
    let fork = sim.event_create(D0).unwrap();
    begin(&sim, a, CaptureMode::Relaxed).unwrap();
    sim.t_record(D0, fork, a).unwrap();
    sim.t_wait(D0, b, fork).unwrap();
    sim.t_launch(D0, ProbeKernel::Spin { busy_us: 0, done: 0 }, b).unwrap();
    assert_eq!(code(end(&sim, a)), Code::STREAM_CAPTURE_UNJOINED);
    // Both streams are free again.
    assert_eq!(status(&sim, b).status, CaptureStatus::None);
}

#[test]
fn captured_events_cannot_be_asked_and_die_with_their_capture() {
    let sim = sim();
    let (a, b) = (sim.stream_create(D0).unwrap(), sim.stream_create(D0).unwrap());
    let event = sim.event_create(D0).unwrap();
    begin(&sim, a, CaptureMode::Relaxed).unwrap();
    sim.t_record(D0, event, a).unwrap();
    assert_eq!(code(sim.t_query(D0, event)), Code::CAPTURED_EVENT);
    end(&sim, a).unwrap();
    assert_eq!(code(sim.t_query(D0, event)), Code::INVALID_VALUE);
    assert_eq!(code(sim.t_wait(D0, b, event)), Code::INVALID_VALUE);
    // A record outside a capture makes it whole.
    sim.t_record(D0, event, b).unwrap();
    assert!(sim.t_query(D0, event).unwrap());
}

#[test]
fn captures_neither_merge_nor_wait_for_work_outside() {
    let sim = sim();
    let (a, b) = (sim.stream_create(D0).unwrap(), sim.stream_create(D0).unwrap());
    let (outside, inside) = (sim.event_create(D0).unwrap(), sim.event_create(D0).unwrap());
    sim.t_record(D0, outside, b).unwrap();
    begin(&sim, a, CaptureMode::Relaxed).unwrap();
    assert_eq!(code(sim.t_wait(D0, a, outside)), Code::STREAM_CAPTURE_ISOLATION);
    assert_eq!(code(end(&sim, a)), Code::STREAM_CAPTURE_INVALIDATED);

    begin(&sim, a, CaptureMode::Relaxed).unwrap();
    begin(&sim, b, CaptureMode::Relaxed).unwrap();
    sim.t_record(D0, inside, a).unwrap();
    assert_eq!(code(sim.t_wait(D0, b, inside)), Code::STREAM_CAPTURE_MERGE);
    for stream in [a, b] {
        assert_eq!(code(end(&sim, stream)), Code::STREAM_CAPTURE_INVALIDATED);
    }
}

#[test]
fn only_a_relaxed_capture_is_ended_by_another_thread() {
    for mode in MODES {
        let sim = sim();
        let stream = sim.stream_create(D0).unwrap();
        begin(&sim, stream, mode).unwrap();
        let elsewhere =
            std::thread::scope(|scope| scope.spawn(|| code(end(&sim, stream))).join().unwrap());
        if mode == CaptureMode::Relaxed {
            assert_eq!(elsewhere, Code::SUCCESS);
        } else {
            assert_eq!(elsewhere, Code::STREAM_CAPTURE_WRONG_THREAD);
            assert!(end(&sim, stream).is_ok(), "the capture goes on");
        }
    }
}

#[test]
fn the_legacy_stream_is_not_captured_and_does_not_wait_for_captured_streams() {
    let sim = sim();
    let begun = begin(&sim, StreamHandle::LEGACY, CaptureMode::Relaxed);
    assert_eq!(code(begun), Code::STREAM_CAPTURE_UNSUPPORTED);
    let blocking = sim.stream_create_blocking(D0).unwrap();
    for stream in [StreamHandle::PER_THREAD, blocking] {
        begin(&sim, stream, CaptureMode::Relaxed).unwrap();
        // SAFETY: the simulator checks handles itself.
        let asked = unsafe { sim.capture_info(D0, StreamHandle::LEGACY) };
        assert_eq!(code(asked), Code::STREAM_CAPTURE_IMPLICIT);
        // SAFETY: as above.
        let other_device = unsafe { sim.capture_info(D1, StreamHandle::LEGACY) };
        assert_eq!(other_device.unwrap().status, CaptureStatus::None);
        assert_eq!(status(&sim, stream).status, CaptureStatus::Active);
        let spin = ProbeKernel::Spin { busy_us: 0, done: 0 };
        let launched = sim.t_launch(D0, spin, StreamHandle::NULL);
        assert_eq!(code(launched), Code::STREAM_CAPTURE_IMPLICIT);
        assert_eq!(code(end(&sim, stream)), Code::STREAM_CAPTURE_INVALIDATED);
    }
}

#[test]
fn a_graph_follows_the_address_to_whatever_chunk_is_there() {
    let sim = sim();
    let (va, first) = sim.t_mapped(D0, G);
    let (out, _) = sim.t_mapped(D0, G);
    let stream = sim.stream_create(D0).unwrap();
    begin(&sim, stream, CaptureMode::Relaxed).unwrap();
    sim.t_launch(D0, fill(va, 5), stream).unwrap();
    let copy = Transfer::DeviceToDevice { dst: out, src: va, bytes: 16 };
    let set = Transfer::Fill8 { dst: va + 64, value: 3, bytes: 8 };
    for transfer in [copy, set] {
        // SAFETY: device addresses only; the stream is live.
        unsafe { sim.copy_async(D0, &transfer, stream) }.unwrap();
    }
    let exec = executable(&sim, end(&sim, stream).unwrap());
    replay(&sim, exec, stream);

    let host = ChunkProps { location: Location::HostNuma(0), ..ChunkProps::on_device(D0) };
    for props in [ChunkProps::on_device(D1), host] {
        let next = sim.create(G, &props).unwrap();
        sim.unmap(va, G).unwrap();
        sim.t_map(va, G, next).unwrap();
        sim.set_access(va, G, &[AccessGrant::read_write(D0)]).unwrap();
        sim.poke(out, &[0; 16]).unwrap();
        replay(&sim, exec, stream);
        assert_eq!(sim.peek(out, 8).unwrap(), [5, 0, 0, 0, 6, 0, 0, 0], "{props:?}");
        assert_eq!(sim.peek(va + 64, 8).unwrap(), [3; 8]);
    }
    sim.t_release(first).unwrap();
    // With nothing there, the replay faults.
    sim.unmap(va, G).unwrap();
    // SAFETY: the simulator checks handles itself.
    unsafe { sim.graph_launch(D0, exec, stream) }.unwrap();
    assert_eq!(code(sim.t_sync(D0, stream)), Code::ILLEGAL_ADDRESS);
}

#[test]
fn what_cannot_be_replayed_is_not_captured() {
    let sim = sim();
    let stream = sim.stream_create(D0).unwrap();
    begin(&sim, stream, CaptureMode::Relaxed).unwrap();
    // SAFETY: the stream is live.
    let refused = unsafe { sim.launch_host_function(D0, stream, Box::new(|| {})) };
    assert_eq!(code(refused), Code::STREAM_CAPTURE_UNSUPPORTED);
    assert_eq!(code(end(&sim, stream)), Code::STREAM_CAPTURE_INVALIDATED);
}
