//! What goes wrong on purpose: injected failures, lies, limits, old drivers, lost contexts, fork.

use std::time::{Duration, Instant};

use super::*;
use crate::call::Call;
use crate::error::ResultCode as Code;
use crate::sim::{FaultPlan, Link, Property};

#[test]
fn a_failed_call_changes_nothing_and_is_counted() {
    let sim = sim();
    let (va, chunk) = sim.t_mapped(D0, G);
    let before = (sim.ledger_summary(), sim.now_ns());
    sim.inject(FaultPlan::fail(Code::UNKNOWN));
    let props = ChunkProps::on_device(D0);
    assert_eq!(code(sim.create(G, &props)), Code::UNKNOWN);
    assert_eq!(code(sim.address_reserve(G, 0, 0)), Code::UNKNOWN);
    assert_eq!(code(sim.unmap(va, G)), Code::UNKNOWN);
    assert_eq!(code(sim.t_release(chunk)), Code::UNKNOWN);
    assert_eq!(code(sim.address_free(va, G)), Code::UNKNOWN);
    assert_eq!(code(sim.stream_create(D0)), Code::UNKNOWN);
    assert_eq!(sim.ledger_summary(), before.0);
    assert!(sim.now_ns() > before.1);
    assert_eq!((sim.faults_fired(), sim.ledger().snapshot().of(Call::MemUnmap)), (6, 1));
    sim.clear_faults();
    sim.t_unmapped(va, G, chunk);
    assert_eq!(sim.check_clean(), Ok(()));
}

#[test]
fn delays_are_virtual_or_real() {
    let sim = sim();
    let id = sim.inject(FaultPlan::delay_us(5000).on(Call::MemGetInfo).once());
    let before = sim.ledger().snapshot();
    sim.mem_info(D0).unwrap();
    let spent = sim.ledger().snapshot().since(&before);
    assert_eq!(spent.nanos_of(Call::MemGetInfo), 5_007_000);
    sim.clear_fault(id);
    sim.inject(FaultPlan::delay_real(Duration::from_millis(30)).on(Call::MemGetInfo));
    let start = Instant::now();
    std::thread::scope(|scope| {
        scope.spawn(|| sim.mem_info(D0).unwrap());
        // The lock is free while the other call sleeps.
        std::thread::sleep(Duration::from_millis(5));
        sim.address_reserve(G, 0, 0).unwrap();
        assert!(start.elapsed() >= Duration::from_millis(5));
    });
    assert!(start.elapsed() >= Duration::from_millis(30));
}

#[test]
fn advertised_and_then_refused() {
    let sim = Sim::builder()
        .devices(2)
        .refuse(Property::Rdma, Call::MemSetAccess, Code::NOT_SUPPORTED)
        .refuse(Property::PosixFd, Call::MemExportToShareableHandle, Code::NOT_PERMITTED)
        .refuse(Property::HostNuma, Call::MemMap, Code::INVALID_DEVICE)
        .refuse(Property::Fabric, Call::MemCreate, Code::SUCCESS)
        .attribute(1, DeviceAttribute::VirtualMemoryManagementSupported, 0)
        .build();
    let plain = ChunkProps::on_device(D0);
    let says = |device| {
        let attribute = DeviceAttribute::VirtualMemoryManagementSupported;
        sim.device_attribute(device, attribute).unwrap()
    };
    assert_eq!((says(D0), says(D1)), (1, 0));

    let rdma = sim.create(G, &ChunkProps { rdma: true, ..plain }).unwrap();
    let va = sim.address_reserve(G, 0, 0).unwrap();
    sim.t_map(va, G, rdma).unwrap();
    let grant = [AccessGrant::read_write(D0)];
    assert_eq!(code(sim.set_access(va, G, &grant)), Code::NOT_SUPPORTED);
    let fd = sim.create(G, &ChunkProps { handle_types: HandleTypes::POSIX_FD, ..plain }).unwrap();
    // SAFETY: the simulator checks handles itself.
    assert_eq!(code(unsafe { sim.export_fd(fd) }), Code::NOT_PERMITTED);
    let host = ChunkProps { location: Location::HostNuma(0), ..plain };
    let host = sim.create(G, &host).unwrap();
    sim.unmap(va, G).unwrap();
    assert_eq!(code(sim.t_map(va, G, host)), Code::INVALID_DEVICE);
    assert!(sim.create(G, &ChunkProps { handle_types: HandleTypes::FABRIC, ..plain }).is_ok());
}

#[test]
fn an_old_driver_lacks_calls() {
    let sim = Sim::builder().driver_version(11_000).build();
    assert_eq!(sim.driver_version().unwrap(), 11_000);
    let stream = sim.stream_create(D0).unwrap();
    // SAFETY: the stream is live.
    assert_eq!(code(unsafe { sim.stream_id(D0, stream) }), Code::NOT_FOUND);
    // SAFETY: as above.
    assert_eq!(code(unsafe { sim.mem_alloc_async(D0, 512, stream) }), Code::NOT_FOUND);
    assert!(sim.create(G, &ChunkProps::on_device(D0)).is_ok());
    let unknown = sim.device_attribute(D0, DeviceAttribute::HostNumaId);
    assert_eq!(code(unknown), Code::INVALID_VALUE);
    let older = Sim::builder().driver_version(10_000).build();
    assert_eq!(code(older.create(G, &ChunkProps::on_device(D0))), Code::NOT_FOUND);
}

#[test]
fn links_and_the_number_of_peers_limit_grants() {
    let sim = Sim::builder().devices(10).max_peers(8).link(0, 9, Link::None).build();
    let (va, _) = sim.t_mapped(D0, G);
    assert_eq!(
        code(sim.set_access(va, G, &[AccessGrant::read_write(DeviceId(9))])),
        Code::INVALID_VALUE
    );
    assert!(!sim.can_access_peer(D0, DeviceId(9)).unwrap());
    for peer in 1..=8 {
        sim.set_access(va, G, &[AccessGrant::read_write(DeviceId(peer))]).unwrap();
    }
    assert_eq!(sim.ledger_summary().devices[0].peers, 8);

    let sim = Sim::builder().devices(10).max_peers(8).build();
    let (va, _) = sim.t_mapped(D0, G);
    let all: Vec<_> = (1..10).map(|peer| AccessGrant::read_write(DeviceId(peer))).collect();
    assert_eq!(code(sim.set_access(va, G, &all)), Code::TOO_MANY_PEERS);
    assert_eq!(sim.ledger_summary().devices[0].peers, 0, "nothing was granted");
    sim.set_access(va, G, &all[..8]).unwrap();
    assert_eq!(code(sim.set_access(va, G, &all[8..])), Code::TOO_MANY_PEERS);
    // A peer that goes makes room.
    let gone = AccessGrant { access: Access::None, ..all[0] };
    sim.set_access(va, G, &[gone]).unwrap();
    sim.set_access(va, G, &all[8..]).unwrap();
    // Nobody else was touched: only the owner has no context either, as nothing needed one.
    assert!(sim.ledger_summary().devices.iter().all(|device| device.contexts_made == 0));
}

#[test]
fn limits_of_addresses_and_reservations() {
    let sim = Sim::builder().address_space_bytes(8 * G).max_reservation_bytes(4 * G).build();
    assert!(sim.address_reserve(8 * G, 0, 0).unwrap_err().is_out_of_addresses());
    let first = sim.address_reserve(4 * G, 0, 0).unwrap();
    sim.address_reserve(4 * G, 0, 0).unwrap();
    assert!(sim.address_reserve(G, 0, 0).unwrap_err().is_out_of_addresses());
    sim.address_free(first, 4 * G).unwrap();
    sim.address_reserve(G, 0, 0).unwrap();
}

#[test]
fn any_granularity_and_one_for_each_property() {
    for g in [4 << 10, 64 << 10, 2 << 20, 512 << 20] {
        let sim = Sim::builder().granularity(g, 2 * g).granularity_rdma(4 * g, 4 * g).build();
        let plain = ChunkProps::on_device(D0);
        let rdma = ChunkProps { rdma: true, ..plain };
        let of = |props, kind| sim.granularity(props, kind).unwrap();
        assert_eq!(of(&plain, GranularityKind::Minimum), g);
        assert_eq!(of(&plain, GranularityKind::Recommended), 2 * g);
        assert_eq!(of(&rdma, GranularityKind::Minimum), (4 * g).min(1 << 30));
        assert_eq!(code(sim.create(g, &rdma)), Code::INVALID_VALUE);
        let chunk = sim.create(g, &plain).unwrap();
        assert_eq!(code(sim.create(g / 2, &plain)), Code::INVALID_VALUE);
        let va = sim.address_reserve(3 * g, 0, 0).unwrap();
        assert_eq!(code(sim.t_map(va + g / 2, g, chunk)), Code::INVALID_VALUE);
        sim.t_map(va + g, g, chunk).unwrap();
    }
}

#[test]
fn a_lost_context_fails_every_call_until_it_is_made_anew() {
    let sim = sim();
    sim.primary_context_retain(D0).unwrap();
    let stream = sim.stream_create(D0).unwrap();
    sim.hold(D0, stream).unwrap();
    sim.lose_context(D0, Code::ECC_UNCORRECTABLE);
    for result in [
        code(sim.t_sync(D0, stream)),
        code(sim.event_create(D0)),
        code(sim.mem_alloc(D0, 512)),
        code(sim.device_synchronize(D0)),
    ] {
        assert_eq!(result, Code::ECC_UNCORRECTABLE);
    }
    assert!(sim.mem_info(D1).is_ok(), "the other device is not lost");
    // What was queued never runs.
    assert_eq!(sim.ledger_summary().pending_work, 0);
    sim.reset_context(D0);
    assert_eq!(code(sim.t_sync(D0, stream)), Code::INVALID_HANDLE);
    let fresh = sim.stream_create(D0).unwrap();
    sim.t_sync(D0, fresh).unwrap();
}

#[test]
fn a_forked_child_gets_one_answer_from_every_call_and_makes_none() {
    let sim = sim();
    let before = sim.ledger().snapshot().total();
    // SAFETY: the child calls the simulator, which takes no lock there, and leaves by `_exit`.
    let child = unsafe { libc::fork() };
    assert!(child >= 0);
    if child == 0 {
        let refused = [
            code(sim.mem_info(D0)),
            code(sim.address_reserve(G, 0, 0)),
            code(sim.driver_version()),
        ];
        let right = refused.iter().all(|code| *code == Code::NOT_INITIALIZED)
            && sim.is_gone()
            && sim.ledger().snapshot().total() == before;
        // SAFETY: ends the child without running the test harness's exit code.
        unsafe { libc::_exit(i32::from(!right)) };
    }
    let mut status = -1;
    // SAFETY: waits for the child made above.
    unsafe { libc::waitpid(child, &mut status, 0) };
    assert_eq!(status, 0);
    assert!(!sim.is_gone());
    sim.mem_info(D0).unwrap();
}
