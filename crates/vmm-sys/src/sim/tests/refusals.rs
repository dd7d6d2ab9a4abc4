//! What is refused, with the reason in words, and what ends captures from outside.

use std::time::Duration;

use super::*;
use crate::error::ResultCode as Code;
use crate::sim::{Link, TimeMode};

fn begin(sim: &Sim, stream: StreamHandle) {
    // SAFETY: the simulator checks handles itself.
    unsafe { sim.capture_begin(D0, stream, CaptureMode::Relaxed) }.unwrap();
}

fn end(sim: &Sim, stream: StreamHandle) -> DriverResult<GraphHandle> {
    // SAFETY: the simulator checks handles itself.
    unsafe { sim.capture_end(D0, stream) }
}

fn destroy(sim: &Sim, stream: StreamHandle) -> DriverResult<()> {
    // SAFETY: the simulator checks handles itself.
    unsafe { sim.stream_destroy(D0, stream) }
}

fn wait_value(sim: &Sim, stream: StreamHandle, word: u64) -> DriverResult<()> {
    // SAFETY: the simulator checks handles and words itself.
    unsafe { sim.stream_wait_value32(D0, stream, PinnedAddress(word), 1) }
}

/// An event of `from`, in its capture if it has one.
fn event_of(sim: &Sim, from: StreamHandle) -> EventHandle {
    let event = sim.event_create(D0).unwrap();
    sim.t_record(D0, event, from).unwrap();
    event
}

#[test]
fn a_stream_that_goes_away_takes_its_capture_with_it_and_spoils_one_that_it_joined() {
    let sim = sim();
    let (origin, fork) = (sim.stream_create(D0).unwrap(), sim.stream_create(D0).unwrap());
    begin(&sim, origin);
    let event = event_of(&sim, origin);
    sim.t_wait(D0, fork, event).unwrap();
    sim.reset_context(D1);
    // SAFETY: the simulator checks handles itself.
    let info = unsafe { sim.capture_info(D0, origin) }.unwrap();
    assert_eq!(info.status, CaptureStatus::Active, "another device's reset is nothing to it");
    destroy(&sim, fork).unwrap();
    assert_eq!(code(end(&sim, origin)), Code::STREAM_CAPTURE_INVALIDATED);
    begin(&sim, origin);
    let late = event_of(&sim, origin);
    destroy(&sim, origin).unwrap();
    assert_eq!(code(destroy(&sim, origin)), Code::INVALID_HANDLE);
    // Nobody can join what is over; who tries in a capture of its own spoils that one.
    let other = sim.stream_create(D0).unwrap();
    assert_eq!(code(sim.t_wait(D0, other, late)), Code::INVALID_VALUE);
    begin(&sim, other);
    assert_eq!(code(sim.t_wait(D0, other, late)), Code::INVALID_VALUE);
    assert_eq!(code(end(&sim, other)), Code::STREAM_CAPTURE_INVALIDATED);
}

#[test]
fn a_capture_is_not_joined_by_the_legacy_stream_nor_once_it_is_spoilt() {
    let sim = sim();
    let (stream, other) = (sim.stream_create(D0).unwrap(), sim.stream_create(D0).unwrap());
    begin(&sim, stream);
    let event = event_of(&sim, stream);
    assert_eq!(code(sim.t_wait(D0, StreamHandle::NULL, event)), Code::STREAM_CAPTURE_IMPLICIT);
    assert_eq!(code(sim.t_wait(D0, other, event)), Code::STREAM_CAPTURE_INVALIDATED);
    let wait = || {
        // SAFETY: the simulator checks handles itself.
        unsafe { sim.event_synchronize(D0, event) }
    };
    assert_eq!(code(wait()), Code::CAPTURED_EVENT);
    assert_eq!(code(end(&sim, stream)), Code::STREAM_CAPTURE_INVALIDATED);
    assert_eq!(code(wait()), Code::INVALID_VALUE, "what it was recorded in is over");
}

#[test]
fn waiting_for_a_device_spoils_its_captures_and_no_others() {
    let sim = sim();
    let stream = sim.stream_create(D0).unwrap();
    begin(&sim, stream);
    sim.device_synchronize(D1).unwrap();
    assert_eq!(code(sim.device_synchronize(D0)), Code::STREAM_CAPTURE_UNSUPPORTED);
    assert_eq!(code(end(&sim, stream)), Code::STREAM_CAPTURE_INVALIDATED);
    sim.device_synchronize(D0).unwrap();
}

#[test]
fn a_graph_that_is_launched_in_a_capture_becomes_a_part_of_it() {
    let sim = sim();
    let (va, _) = sim.t_mapped(D0, G);
    let stream = sim.stream_create(D0).unwrap();
    let exec_of = |graph| {
        // SAFETY: the simulator checks handles itself.
        unsafe { sim.graph_instantiate(D0, graph) }.unwrap()
    };
    let launch = |exec| {
        // SAFETY: as above.
        unsafe { sim.graph_launch(D0, exec, stream) }.unwrap();
    };
    begin(&sim, stream);
    sim.t_launch(D0, ProbeKernel::FillWords { dst: va, words: 1, value: 7 }, stream).unwrap();
    let inner = exec_of(end(&sim, stream).unwrap());
    begin(&sim, stream);
    launch(inner);
    sim.t_launch(D0, ProbeKernel::CopyWords { dst: va + 64, src: va, words: 1 }, stream).unwrap();
    let outer = exec_of(end(&sim, stream).unwrap());
    assert_eq!(sim.peek(va + 64, 1).unwrap(), [0], "nothing ran yet");
    launch(outer);
    sim.t_sync(D0, stream).unwrap();
    assert_eq!(sim.peek(va + 64, 1).unwrap(), [7]);
}

#[test]
fn a_wait_for_a_word_needs_page_locked_memory_to_its_end() {
    let sim = sim();
    let word = sim.host_alloc(D0, 4096).unwrap();
    let stream = sim.stream_create(D0).unwrap();
    for bad in [word.0 + 2, word.0 + 4096, 64] {
        let error = wait_value(&sim, stream, bad).unwrap_err();
        assert_eq!(error.code(), Code::INVALID_VALUE);
        assert!(error.to_string().contains("no aligned word of page-locked memory"), "{error}");
    }
    // SAFETY: the simulator checks addresses itself.
    assert_eq!(code(unsafe { sim.host_free(D0, PinnedAddress(64)) }), Code::INVALID_VALUE);
    let info = sim.pointer_info(word.0).unwrap();
    assert_eq!((info.memory_type, info.legacy_ipc_capable), (1, false));
}

/// Whoever gives a wait up is told what stands in front of each stream.
#[test]
fn a_wait_that_is_given_up_names_what_is_in_the_way() {
    let sim = Sim::builder().blocked_limit(Duration::from_millis(20)).build();
    let word = sim.host_alloc(D0, 4096).unwrap();
    let (held, waiting) = (sim.stream_create(D0).unwrap(), sim.stream_create(D0).unwrap());
    let hold = sim.hold(D0, held).unwrap();
    wait_value(&sim, waiting, word.0).unwrap();
    let (behind, last) = (sim.stream_create(D0).unwrap(), sim.stream_create_blocking(D0).unwrap());
    let event = event_of(&sim, held);
    sim.t_wait(D0, behind, event).unwrap();
    sim.t_wait(D0, last, event).unwrap();
    sim.t_wait(D0, StreamHandle::PER_THREAD, event).unwrap();
    let error = sim.device_synchronize(D0).unwrap_err();
    assert_eq!(error.code(), Code::LAUNCH_TIMEOUT);
    let text = error.to_string();
    for part in ["a hold", "a wait for a host word", "a wait for an event", "a per-thread stream"] {
        assert!(text.contains(part), "{part} is missing: {text}");
    }
    sim.release_hold(hold);
    sim.t_sync(D0, held).unwrap();
    sim.t_sync(D0, behind).unwrap();
}

#[test]
fn peers_without_a_link_and_oneself_are_refused() {
    let sim = Sim::builder().devices(3).link(0, 1, Link::Pcie).link(0, 2, Link::None).build();
    let ask = |attribute, peer| sim.peer_attribute(attribute, D0, DeviceId(peer));
    assert_eq!(code(ask(PeerAttribute::AccessSupported, 0)), Code::INVALID_DEVICE);
    assert_eq!(ask(PeerAttribute::AccessSupported, 1), Ok(1));
    assert_eq!(ask(PeerAttribute::AccessSupported, 2), Ok(0));
    assert_eq!(ask(PeerAttribute::PerformanceRank, 1), Ok(1));
    let error = sim.enable_peer_access(D0, DeviceId(2)).unwrap_err();
    assert_eq!(error.code(), Code::PEER_ACCESS_UNSUPPORTED);
    assert!(error.to_string().contains("no link between device 0 and device 2"), "{error}");
}

#[test]
fn memory_of_a_pool_and_plain_memory_are_told_apart() {
    let sim = sim();
    let stream = sim.stream_create(D0).unwrap();
    let plain = sim.mem_alloc(D0, G).unwrap();
    sim.legacy_ipc_export(D0, plain).unwrap();
    // SAFETY: the simulator checks handles and addresses itself.
    let ordered = unsafe {
        assert_eq!(code(sim.mem_free_async(D0, plain, stream)), Code::INVALID_VALUE);
        sim.mem_alloc_async(D0, G, stream).unwrap()
    };
    assert_eq!(code(sim.legacy_ipc_export(D0, ordered)), Code::INVALID_VALUE);
    sim.mem_free(D0, ordered).unwrap();
    sim.mem_free(D0, plain).unwrap();
    assert_eq!(code(sim.mem_free(D0, plain)), Code::INVALID_VALUE);
}

/// Farther memory costs a kernel more: own, a neighbour's over NVLink, over PCIe, the host's.
#[test]
fn kernels_pay_for_distance() {
    let sim = Sim::builder().devices(3).time(TimeMode::Modelled).link(0, 2, Link::Pcie).build();
    let stream = sim.stream_create(D0).unwrap();
    let words = G / 4;
    let nanos_of = |kernel| {
        let before = sim.now_ns();
        sim.t_launch(D0, kernel, stream).unwrap();
        sim.t_sync(D0, stream).unwrap();
        sim.now_ns() - before
    };
    let at = |device| {
        let (va, _) = sim.t_mapped(DeviceId(device), G);
        sim.set_access(va, G, &[AccessGrant::read_write(D0)]).unwrap();
        va
    };
    let host = sim.host_alloc(D0, G).unwrap().0;
    let own = at(0);
    let places = [own, at(1), at(2), host];
    let reads = places.map(|src| nanos_of(ProbeKernel::CopyWords { dst: own, src, words }));
    let writes = places.map(|dst| nanos_of(ProbeKernel::FillWords { dst, words, value: 1 }));
    assert!(reads[..3].is_sorted() && reads[0] < reads[1] && reads[1] < reads[2], "{reads:?}");
    assert!(reads[0] < reads[3], "{reads:?}");
    assert!(
        writes[..3].is_sorted() && writes[0] < writes[1] && writes[1] < writes[2],
        "{writes:?}"
    );
    assert!(writes[0] < writes[3], "{writes:?}");
}

#[test]
fn what_a_device_and_its_errors_are_called() {
    let sim = sim();
    let of = |attribute| sim.device_attribute(D1, attribute).unwrap();
    assert!(of(DeviceAttribute::MultiprocessorCount) > 0);
    assert_ne!(
        of(DeviceAttribute::PciBusId),
        sim.device_attribute(D0, DeviceAttribute::PciBusId).unwrap()
    );
    assert_eq!((of(DeviceAttribute::PciDeviceId), of(DeviceAttribute::PciDomainId)), (0, 0));
    assert_eq!(sim.kind().to_string(), "sim");
    assert_eq!(DriverKind::Cuda.to_string(), "cuda");
    // Neither waits for the machine's lock.
    assert_eq!(format!("{sim:?}"), "Sim { .. }");
    let uuid = sim.device_uuid(D1).unwrap();
    assert_eq!(format!("{uuid:?}"), uuid.to_string());
    let error = sim.mem_info(DeviceId(9)).unwrap_err();
    assert_eq!(format!("{error:?}"), error.to_string());
}
