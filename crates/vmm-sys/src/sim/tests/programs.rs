//! What programs on the stand-in `libcuda` need beside the contract.

use super::*;
use crate::error::ResultCode as Code;
use crate::sim::{ByteKernel, ByteSpan, TimeMode};

/// Adds the bytes of the second stretch to those of the first.
fn add_bytes(dst: u64, src: u64, bytes: u64) -> ByteKernel {
    ByteKernel::new([ByteSpan::write(dst, bytes), ByteSpan::read(src, bytes)], |spans| {
        let [dst, src] = spans else { panic!("two stretches") };
        for (into, from) in dst.iter_mut().zip(src) {
            *into += *from;
        }
    })
}

#[test]
fn a_byte_kernel_reaches_over_the_borders_of_mappings() {
    let sim = sim();
    let va = sim.address_reserve(2 * G, 0, 0).unwrap();
    for at in [va, va + G] {
        let chunk = sim.create(G, &ChunkProps::on_device(D0)).unwrap();
        sim.t_map(at, G, chunk).unwrap();
        sim.t_release(chunk).unwrap();
    }
    sim.set_access(va, 2 * G, &[AccessGrant::read_write(D0)]).unwrap();
    let stream = sim.stream_create(D0).unwrap();
    sim.poke(va + G - 4, &[1, 2, 3, 4, 5, 6, 7, 8]).unwrap();
    sim.poke(va, &[10; 8]).unwrap();
    sim.launch_bytes(D0, add_bytes(va + G - 4, va, 8), stream).unwrap();
    sim.t_sync(D0, stream).unwrap();
    assert_eq!(sim.peek(va + G - 4, 8).unwrap(), [11, 12, 13, 14, 15, 16, 17, 18]);
    assert_eq!(sim.peek(va, 8).unwrap(), [10; 8], "what is only read stays");
}

#[test]
fn a_byte_kernel_waits_for_its_turn_and_is_captured() {
    let sim = sim();
    let (va, _) = sim.t_mapped(D0, G);
    let stream = sim.stream_create(D0).unwrap();
    sim.poke(va, &[1; 16]).unwrap();
    let hold = sim.hold(D0, stream).unwrap();
    sim.launch_bytes(D0, add_bytes(va, va + 8, 8), stream).unwrap();
    assert_eq!(sim.peek(va, 8).unwrap(), [1; 8], "held");
    sim.release_hold(hold);
    assert_eq!(sim.peek(va, 8).unwrap(), [2; 8]);
    // SAFETY: the simulator checks handles itself.
    let exec = unsafe {
        sim.capture_begin(D0, stream, CaptureMode::Global).unwrap();
        sim.launch_bytes(D0, add_bytes(va, va + 8, 8), stream).unwrap();
        let graph = sim.capture_end(D0, stream).unwrap();
        sim.graph_instantiate(D0, graph).unwrap()
    };
    assert_eq!(sim.peek(va, 8).unwrap(), [2; 8], "captured, not run");
    for expected in 3..5 {
        // SAFETY: the simulator checks handles itself.
        unsafe { sim.graph_launch(D0, exec, stream) }.unwrap();
        sim.t_sync(D0, stream).unwrap();
        assert_eq!(sim.peek(va, 8).unwrap(), [expected; 8]);
    }
}

#[test]
fn a_byte_kernel_faults_as_a_probe_kernel_does() {
    for (dst, expected) in [(4, Code::ILLEGAL_ADDRESS), (G - 4, Code::ILLEGAL_ADDRESS)] {
        let sim = sim();
        let (va, _) = sim.t_mapped(D0, G);
        let stream = sim.stream_create(D0).unwrap();
        // Nothing at all, and the end of the mapping.
        let dst = if dst == 4 { dst } else { va + dst };
        sim.launch_bytes(D0, add_bytes(dst, va, 8), stream).unwrap();
        assert_eq!(code(sim.t_sync(D0, stream)), expected);
        assert_eq!(code(sim.mem_info(D0)), expected, "for good");
        assert_eq!(sim.peek(va, 8).unwrap(), [0; 8], "all or nothing");
    }
    let sim = sim();
    let (va, _) = sim.t_mapped(D0, G);
    let stream = sim.stream_create(D0).unwrap();
    sim.launch_bytes(D0, add_bytes(va + 2, va, 8), stream).unwrap();
    assert_eq!(code(sim.t_sync(D0, stream)), Code::MISALIGNED_ADDRESS);
}

#[test]
fn patterns_go_on_over_borders_and_are_refused_as_copies_are() {
    let sim = sim();
    let (va, _) = sim.t_mapped(D0, G);
    let stream = sim.stream_create(D0).unwrap();
    sim.fill_pattern(D0, va, [1, 2, 3, 4], 10, Some(stream)).unwrap();
    sim.t_sync(D0, stream).unwrap();
    assert_eq!(sim.peek(va, 12).unwrap(), [1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 0, 0]);
    sim.fill_pattern(D0, va, [5, 6, 7, 8], G, None).unwrap();
    assert_eq!(sim.peek(va + G - 4, 4).unwrap(), [5, 6, 7, 8], "to the last word");
    let refused = sim.fill_pattern(D0, va + G - 4, [0; 4], 8, None);
    assert_eq!(code(refused), Code::INVALID_VALUE, "past the mapping");
    assert_eq!(sim.peek(va + G - 4, 4).unwrap(), [5, 6, 7, 8], "nothing was written");
}

#[test]
fn staged_bytes_are_those_of_the_call() {
    let sim = sim();
    let (va, _) = sim.t_mapped(D0, G);
    let stream = sim.stream_create(D0).unwrap();
    let hold = sim.hold(D0, stream).unwrap();
    let mut bytes = vec![7; 100];
    sim.upload_staged(D0, va, &bytes, stream).unwrap();
    bytes.fill(0);
    drop(bytes);
    sim.release_hold(hold);
    sim.t_sync(D0, stream).unwrap();
    assert_eq!(sim.peek(va, 101).unwrap(), [vec![7; 100], vec![0]].concat());
    let refused = sim.upload_staged(D0, va + G - 1, &[1, 2], stream);
    assert_eq!(code(refused), Code::INVALID_VALUE);
}

#[test]
fn timed_events_tell_the_virtual_time_between_their_last_records() {
    let sim = Sim::builder().time(TimeMode::Modelled).build();
    let stream = sim.stream_create(D0).unwrap();
    let [start, end] = [(); 2].map(|()| sim.event_create_timed(D0).unwrap());
    let plain = sim.event_create(D0).unwrap();
    let record = |event| {
        // SAFETY: the simulator checks handles itself.
        unsafe { sim.event_record(D0, event, stream) }.unwrap();
    };
    assert_eq!(code(sim.event_elapsed_ns(D0, start, end)), Code::INVALID_HANDLE, "not recorded");
    record(start);
    sim.busy(D0, stream, 1000).unwrap();
    record(end);
    record(plain);
    assert_eq!(code(sim.event_elapsed_ns(D0, start, end)), Code::NOT_READY);
    sim.t_sync(D0, stream).unwrap();
    let elapsed_ns = sim.event_elapsed_ns(D0, start, end).unwrap();
    assert!((1_000_000..1_010_000).contains(&elapsed_ns), "{elapsed_ns}");
    assert_eq!(sim.event_elapsed_ns(D0, end, start).unwrap(), -elapsed_ns);
    assert_eq!(code(sim.event_elapsed_ns(D0, start, plain)), Code::INVALID_HANDLE, "not timed");
    record(start);
    sim.t_sync(D0, stream).unwrap();
    assert!(sim.event_elapsed_ns(D0, end, start).unwrap() > 0, "recorded anew");
    for event in [start, end] {
        // SAFETY: the simulator checks handles itself.
        unsafe { sim.event_destroy(D0, event) }.unwrap();
    }
    assert_eq!(code(sim.event_elapsed_ns(D0, end, start)), Code::INVALID_HANDLE, "gone");
}

#[test]
fn peer_access_is_for_plain_allocations_and_ends_with_the_context() {
    let sim = sim();
    let address = sim.mem_alloc(D0, 4096).unwrap();
    sim.primary_context_retain(D1).unwrap();
    assert_eq!(code(sim.enable_peer_access(D1, D1)), Code::INVALID_DEVICE);
    assert_eq!(code(sim.disable_peer_access(D1, D0)), Code::PEER_ACCESS_NOT_ENABLED);
    sim.enable_peer_access(D1, D0).unwrap();
    assert_eq!(code(sim.enable_peer_access(D1, D0)), Code::PEER_ACCESS_ALREADY_ENABLED);
    let fill = |dst| ProbeKernel::FillWords { dst, words: 4, value: 1 };
    let stream = sim.stream_create(D1).unwrap();
    sim.t_launch(D1, fill(address), stream).unwrap();
    sim.t_sync(D1, stream).unwrap();
    assert_eq!(sim.peek(address, 4).unwrap(), [1, 0, 0, 0]);
    sim.reset_context(D1);
    let stream = sim.stream_create(D1).unwrap();
    sim.t_launch(D1, fill(address), stream).unwrap();
    assert_eq!(code(sim.t_sync(D1, stream)), Code::ILLEGAL_ADDRESS, "enabled no more");
}

#[test]
fn handles_are_told_apart_without_making_anything() {
    let sim = sim();
    assert_eq!(sim.primary_context(D0), None);
    let context = sim.primary_context_retain(D0).unwrap();
    assert_eq!((sim.primary_context(D0), sim.context_device(context)), (Some(context), Some(D0)));
    let [plain, blocking] =
        [sim.stream_create(D1).unwrap(), sim.stream_create_blocking(D1).unwrap()];
    assert_eq!(sim.created_stream(plain), Some((D1, false)));
    assert_eq!(sim.created_stream(blocking), Some((D1, true)));
    assert_eq!(sim.created_stream(StreamHandle::LEGACY), None);
    sim.reset_context(D0);
    assert_eq!((sim.primary_context(D0), sim.context_device(context)), (None, None));
    let locked = sim.host_alloc(D0, 4096).unwrap().0;
    assert!(sim.is_page_locked(locked, 4096) && !sim.is_page_locked(locked, 4097));
}

#[test]
fn registered_memory_is_page_locked_until_it_is_not() {
    let sim = sim();
    let mut words = vec![7_u32; 4096];
    let address = PinnedAddress(words.as_mut_ptr().expose_provenance() as u64);
    // SAFETY: the vector outlives the registration.
    let register = |bytes| unsafe { sim.host_register(D0, address, bytes) };
    assert_eq!(code(register(0)), Code::INVALID_VALUE);
    register(16_384).unwrap();
    assert_eq!(code(register(4)), Code::HOST_MEMORY_ALREADY_REGISTERED);
    assert!(sim.is_page_locked(address.0 + 4, 16_380));
    assert_eq!(sim.ledger_summary().pinned_allocations, 1);
    let stream = sim.stream_create(D0).unwrap();
    let fill = ProbeKernel::FillWords { dst: address.0, words: 4096, value: 0 };
    sim.t_launch(D0, fill, stream).unwrap();
    sim.t_sync(D0, stream).unwrap();
    sim.host_unregister(D0, address).unwrap();
    assert!(words.iter().enumerate().all(|(index, word)| index as u32 == *word));
    assert_eq!(code(sim.host_unregister(D0, address)), Code::HOST_MEMORY_NOT_REGISTERED);
    assert!(!sim.is_page_locked(address.0, 1));
    sim.t_launch(D0, fill, stream).unwrap();
    assert_eq!(code(sim.t_sync(D0, stream)), Code::ILLEGAL_ADDRESS);
}
