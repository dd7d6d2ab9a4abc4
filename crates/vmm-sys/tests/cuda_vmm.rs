//! Machine, contexts and the VMM calls through a library with the driver's ABI: which call goes
//! out, with which bytes, in which context, and what comes back.

#![allow(clippy::unwrap_used, reason = "helpers of tests are not seen as tests")]

mod fake;

use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;

use fake::{Fake, mapped};
use vmm_sys::topology::Topology;
use vmm_sys::{
    Access, AccessGrant, Call, ChunkProps, DeviceAttribute, DeviceId, Driver, DriverError,
    GranularityKind, HandleTypes, Location, PeerAttribute, ProbeKernel, ResultCode, Transfer,
};

const G: u64 = 2 << 20;
const ZERO: DeviceId = DeviceId(0);
const ONE: DeviceId = DeviceId(1);

#[test]
fn questions_about_the_machine_need_no_context() {
    let Some((fake, cuda)) = Fake::open("machine", &[]) else { return };
    assert_eq!(cuda.driver_version(), Ok(13_000));
    assert_eq!(cuda.device_count(), Ok(2));
    assert_eq!(cuda.device_name(ONE).unwrap(), "Fake GPU 1");
    let uuid = cuda.device_uuid(ONE).unwrap();
    assert_eq!(uuid.to_string(), "GPU-f0f1f2f3-f4f5-f6f7-f8f9-fafbfcfdfeff");
    assert_eq!(cuda.device_total_bytes(ONE), Ok(141 << 30));
    assert_eq!(cuda.device_attribute(ONE, DeviceAttribute::HostNumaId), Ok(134));
    assert_eq!(cuda.can_access_peer(ZERO, ONE), Ok(true));
    assert_eq!(cuda.peer_attribute(PeerAttribute::AccessSupported, ZERO, ONE), Ok(2));
    let log = fake.log();
    assert!(log.iter().all(|line| line.starts_with("- ") && !line.contains("Ctx")), "{log:?}");
    assert!(log.contains(&"- cuDeviceGetP2PAttribute 2 1000 1001".to_owned()), "{log:?}");
    assert_eq!(cuda.library(), fake.path.to_str().unwrap());
}

#[test]
fn a_device_that_does_not_exist_gets_the_drivers_own_refusal() {
    let Some((fake, cuda)) = Fake::open("device_99", &[]) else { return };
    let device = DeviceId(99);
    let errors = [
        cuda.device_name(device).unwrap_err(),
        cuda.mem_info(device).unwrap_err(),
        cuda.primary_context_retain(device).unwrap_err(),
        cuda.create(G, &ChunkProps::on_device(device)).unwrap_err(),
    ];
    for error in errors {
        assert_eq!(error.code(), ResultCode::INVALID_DEVICE, "{error}");
        assert_eq!(error.device(), Some(device));
        assert!(error.to_string().contains("this process sees 2 device(s)"), "{error}");
    }
    // Creation is the driver's to refuse (row D-C2): the location's id is the ordinal.
    let log = fake.log();
    assert!(log.iter().any(|line| line.contains("cuMemCreate") && line.contains("0100000063")));
}

#[test]
fn the_callers_context_is_as_before_whatever_happens() {
    let Some((fake, cuda)) = Fake::open("contexts", &[]) else { return };
    // None before, none after; the context is made once.
    cuda.mem_info(ONE).unwrap();
    let made = ["- cuDevicePrimaryCtxRetain 1001", "- cuCtxGetCurrent", "- cuCtxSetCurrent 1"];
    let used = ["1 cuMemGetInfo_v2", "1 cuCtxSetCurrent none"];
    assert_eq!(fake.log(), [&made[..], &used].concat());
    assert_eq!(cuda.context_current(), Ok(None));
    fake.log();
    // Somebody else's context before and after, also when the call fails.
    fake.push_other_context(0);
    fake.fail("cuMemGetInfo_v2", 700);
    assert!(cuda.mem_info(ONE).unwrap_err().is_sticky());
    let expected = [
        "100 cuCtxGetCurrent",
        "100 cuCtxSetCurrent 1",
        "1 cuMemGetInfo_v2",
        "1 cuCtxSetCurrent 100",
    ];
    assert_eq!(fake.log(), expected);
    // Already current: nothing is switched.
    let context = cuda.primary_context_retain(ONE).unwrap();
    // SAFETY: one reference is held.
    unsafe { cuda.context_set_current(Some(context)) }.unwrap();
    fake.log();
    cuda.device_synchronize(ONE).unwrap();
    assert_eq!(fake.log(), ["1 cuCtxGetCurrent", "1 cuCtxSynchronize"]);
    // The context cannot be made current: the call does not go out.
    fake.fail("cuCtxSetCurrent", 201);
    let error = cuda.mem_info(ZERO).unwrap_err();
    assert_eq!((error.call(), error.device()), (Call::CtxSetCurrent, Some(ZERO)));
    assert_eq!(cuda.context_current(), Ok(Some(context)));
    assert!(fake.log().iter().all(|line| !line.contains("MemGetInfo")));
    cuda.primary_context_release(ONE).unwrap();
}

#[test]
fn contexts_go_back_when_the_driver_object_goes() {
    let Some((fake, cuda)) = Fake::open("give_back", &[]) else { return };
    cuda.mem_info(ONE).unwrap();
    let address = mapped(&cuda, G);
    let stream = cuda.stream_create(ONE).unwrap();
    // SAFETY: stream and memory are live.
    unsafe { cuda.launch(ONE, &ProbeKernel::Spin { busy_us: 1, done: address }, stream) }.unwrap();
    fake.log();
    drop(cuda);
    let expected =
        ["- cuCtxGetCurrent", "- cuCtxSetCurrent 1", "1 cuModuleUnload", "1 cuCtxSetCurrent none"];
    assert_eq!(fake.log(), [&expected[..], &["- cuDevicePrimaryCtxRelease_v2 1001"]].concat());
}

#[test]
fn a_context_is_made_once_for_all_threads() {
    let Some((fake, cuda)) = Fake::open("threads", &[]) else { return };
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| cuda.mem_info(ONE).unwrap());
        }
    });
    let log = fake.log();
    assert_eq!(log.iter().filter(|line| line.contains("CtxRetain")).count(), 1, "{log:?}");
    assert_eq!(log.iter().filter(|line| line.contains("1 cuMemGetInfo")).count(), 8, "{log:?}");
}

#[test]
fn the_vmm_calls_carry_the_drivers_bytes() {
    let Some((fake, cuda)) = Fake::open("vmm", &[]) else { return };
    let props = ChunkProps {
        location: Location::Device(ONE),
        handle_types: HandleTypes::POSIX_FD,
        rdma: true,
    };
    let image = "01000000010000000100000001000000000000000000000000010000" // type..usage
        .to_owned()
        + "00000000"; // reserved
    assert_eq!(cuda.granularity(&props, GranularityKind::Recommended), Ok(2 * G));
    let address = cuda.address_reserve(2 * G, 1 << 30, 7 * G).unwrap();
    let chunk = cuda.create(2 * G, &props).unwrap();
    // SAFETY: the chunk lives until its release below.
    unsafe {
        assert_eq!(cuda.properties(chunk), Ok(props));
        cuda.map(address, 2 * G, 0, chunk).unwrap();
    }
    let grants = [
        AccessGrant::read_write(ONE),
        AccessGrant { location: Location::HostNuma(3), access: Access::Read },
    ];
    cuda.set_access(address, 2 * G, &grants).unwrap();
    assert_eq!(cuda.get_access(address, Location::Device(ONE)), Ok(Access::ReadWrite));
    assert_eq!(cuda.get_access(address, Location::Host), Ok(Access::None));
    assert_eq!(cuda.address_range(ONE, address + 5), Ok((address, G)));
    assert_eq!(cuda.retain(address).unwrap().0, 0xabc);
    cuda.unmap(address, 2 * G).unwrap();
    // SAFETY: the reference is ours.
    unsafe { cuda.release(chunk) }.unwrap();
    cuda.address_free(address, 2 * G).unwrap();
    let expected = [
        format!("- cuMemGetAllocationGranularity {image} 1"),
        format!("- cuMemAddressReserve {} {} {} 0", 2 * G, 1 << 30, 7 * G),
        format!("- cuMemCreate {} {image} 0", 2 * G),
        "- cuMemGetAllocationPropertiesFromHandle".to_owned(),
        format!("- cuMemMap {} 0 0", 2 * G),
        format!("- cuMemSetAccess {} 2 010000000100000003000000030000000300000001000000", 2 * G),
        "- cuMemGetAccess 0100000001000000".to_owned(),
        "- cuMemGetAccess 0200000000000000".to_owned(),
        // The one that asks in its device's context, which is made for it.
        "- cuDevicePrimaryCtxRetain 1001".to_owned(),
        "- cuCtxGetCurrent".to_owned(),
        "- cuCtxSetCurrent 1".to_owned(),
        "1 cuMemGetAddressRange_v2".to_owned(),
        "1 cuCtxSetCurrent none".to_owned(),
        "- cuMemRetainAllocationHandle".to_owned(),
        format!("- cuMemUnmap {}", 2 * G),
        "- cuMemRelease".to_owned(),
        format!("- cuMemAddressFree {}", 2 * G),
    ];
    assert_eq!(fake.log(), expected);
}

#[test]
fn more_grants_than_fit_inline_arrive_too() {
    let Some((fake, cuda)) = Fake::open("many_grants", &[]) else { return };
    let address = cuda.address_reserve(G, 0, 0).unwrap();
    for count in [0_u32, 16, 17, 40] {
        let grants: Vec<_> = (0..count).map(|n| AccessGrant::read_write(DeviceId(n))).collect();
        fake.log();
        assert_eq!(cuda.set_access(address, G, &grants).is_ok(), count != 0);
        let wanted: String = (0..count).map(|n| format!("01000000{n:02x}00000003000000")).collect();
        assert_eq!(fake.log()[0], format!("- cuMemSetAccess {G} {count} {wanted}"));
    }
}

#[test]
fn refused_numbers_come_with_their_remainders() {
    let Some((fake, cuda)) = Fake::open("explained", &[]) else { return };
    let address = mapped(&cuda, G);
    let chunk = cuda.create(G, &ChunkProps::on_device(ZERO)).unwrap();
    // SAFETY: the chunk is live.
    let map = |address, bytes, offset| unsafe { cuda.map(address, bytes, offset, chunk) };
    let grant = [AccessGrant::read_write(ZERO)];
    let cases = [
        (cuda.address_reserve(4096, 0, 0).unwrap_err(), "4096 bytes = 0 x 2097152 + 4096"),
        (cuda.address_reserve(0, 0, 0).unwrap_err(), "more than 0 bytes"),
        (cuda.address_reserve(G, 3, 0).unwrap_err(), "alignment 3 is no power of two"),
        (
            cuda.create(3 << 20, &ChunkProps::on_device(ZERO)).unwrap_err(),
            "= 1 x 2097152 + 1048576",
        ),
        (map(address + 4096, G, 0).unwrap_err(), "x 2097152 + 4096, 2097152 bytes"),
        (map(address, G, 4096).unwrap_err(), "a chunk is mapped whole, from offset 0"),
        (cuda.unmap(address, 4096).unwrap_err(), "0 x 2097152 + 4096"),
        (cuda.address_free(address + 1, G).unwrap_err(), "x 2097152 + 1"),
        (cuda.set_access(address, G, &[]).unwrap_err(), "there is no grant in the list"),
        (cuda.set_access(address + 1, G, &grant).unwrap_err(), "n x 2097152 + 1"),
    ];
    for (error, part) in cases {
        assert!(error.to_string().contains(part), "{part} is missing in: {error}");
    }
    // Aligned, and refused all the same: then it is something else.
    fake.fail("cuMemMap", 1);
    let error = map(address, G, 0).unwrap_err();
    assert!(error.to_string().contains("mapped already"), "{error}");
    // A copy without a grant, a kind of memory without support, a shortage of either kind.
    fake.fail("cuMemsetD8_v2", 1);
    let fill = Transfer::Fill8 { dst: address, value: 1, bytes: 1 };
    // SAFETY: the address is mapped.
    let error = unsafe { cuda.copy(ZERO, &fill) }.unwrap_err();
    assert!(error.to_string().contains("every mapping starts with none"), "{error}");
    let fabric = ChunkProps { handle_types: HandleTypes::FABRIC, ..ChunkProps::on_device(ZERO) };
    let error = cuda.create(G, &fabric).unwrap_err();
    assert!(error.to_string().contains("an attribute is no promise"), "{error}");
    fake.fail("cuMemAddressReserve", 2);
    assert!(cuda.address_reserve(G, 0, 0).unwrap_err().is_out_of_addresses());
    fake.fail("cuMemCreate", 2);
    assert!(cuda.create(G, &ChunkProps::on_device(ZERO)).unwrap_err().is_out_of_memory());
}

#[test]
fn a_refused_peer_is_named_with_its_link() {
    let Some((fake, cuda)) = Fake::open("peers", &[]) else { return };
    let address = mapped(&cuda, G);
    fake.refuse_peers();
    let grants = [AccessGrant::read_write(ZERO), AccessGrant::read_write(ONE)];
    let error = cuda.set_access(address, G, &grants).unwrap_err();
    let text = error.to_string();
    assert!(
        text.contains("device 1 to memory of device 0: no peer access over this link"),
        "{text}"
    );
    let grants = [AccessGrant::read_write(DeviceId(7))];
    let text = cuda.set_access(address, G, &grants).unwrap_err().to_string();
    assert!(text.contains("there is no device 7"), "{text}");
}

#[test]
fn descriptors_carry_chunks_and_do_not_leak_into_children() {
    let Some((_fake, cuda)) = Fake::open("share", &[]) else { return };
    let props = ChunkProps { handle_types: HandleTypes::POSIX_FD, ..ChunkProps::on_device(ZERO) };
    let chunk = cuda.create(G, &props).unwrap();
    // SAFETY: the chunk is live.
    let descriptor = unsafe { cuda.export_fd(chunk) }.unwrap();
    // SAFETY: reads a flag of an open descriptor.
    let flags = unsafe { libc::fcntl(descriptor.as_raw_fd(), libc::F_GETFD) };
    assert_eq!(flags & libc::FD_CLOEXEC, libc::FD_CLOEXEC);
    let imported = cuda.import_fd(descriptor.as_fd()).unwrap();
    assert_ne!(imported, chunk);
    let address = cuda.address_reserve(G, 0, 0).unwrap();
    // SAFETY: the handle is live.
    unsafe { cuda.map(address, G, 0, imported) }.unwrap();

    let plain = cuda.create(G, &ChunkProps::on_device(ZERO)).unwrap();
    // SAFETY: the chunk is live.
    let error = unsafe { cuda.export_fd(plain) }.unwrap_err();
    assert!(error.to_string().contains("created with a POSIX descriptor"), "{error}");
    let nothing = std::fs::File::open("/dev/null").unwrap();
    let error = cuda.import_fd(nothing.as_fd()).unwrap_err();
    assert_eq!(error.code(), ResultCode::UNKNOWN);
    assert!(error.to_string().contains("no exported chunk"), "{error}");
}

#[test]
fn a_dma_buf_is_asked_in_the_context_of_its_device_and_kept_to_ourselves() {
    let Some((fake, cuda)) = Fake::open("dma_buf", &[]) else { return };
    cuda.mem_info(ONE).unwrap();
    fake.log();
    let descriptor = cuda.dma_buf(ONE, G, 65536).unwrap();
    // SAFETY: a fcntl without arguments on an open descriptor.
    let flags = unsafe { libc::fcntl(descriptor.as_raw_fd(), libc::F_GETFD) };
    assert_eq!(flags, libc::FD_CLOEXEC);
    let error = cuda.dma_buf(ONE, G + 4096, 4096).unwrap_err();
    assert!(error.to_string().contains("4096 bytes at 0x201000"), "{error}");
    assert_eq!(
        fake.log_without_contexts(),
        ["1 cuMemGetHandleForAddressRange 65536 1 0", "1 cuMemGetHandleForAddressRange 4096 1 0"]
    );
}

#[test]
fn pointers_are_described_in_any_context_there_is() {
    let Some((fake, cuda)) = Fake::open("pointers", &[]) else { return };
    let info = cuda.pointer_info(G).unwrap();
    assert_eq!((info.memory_type, info.device, info.context), (2, ZERO, None));
    assert!(!info.legacy_ipc_capable);
    assert_eq!(fake.log(), ["- cuPointerGetAttributes 4"], "no context was made for it");
    cuda.mem_info(ONE).unwrap();
    fake.log();
    let info = cuda.pointer_info(16).unwrap();
    assert_eq!(info.device, DeviceId(u32::MAX), "no device backs it");
    assert!(info.legacy_ipc_capable);
    assert_eq!(fake.log_without_contexts(), ["1 cuPointerGetAttributes 4"]);
    assert_eq!(cuda.context_current(), Ok(None));
    assert!(cuda.legacy_ipc_export(ZERO, 16).is_ok());
    let error = cuda.legacy_ipc_export(ZERO, G).unwrap_err();
    assert!(error.to_string().contains("export a descriptor"), "{error}");
}

#[test]
fn every_call_is_booked_and_timed_only_when_asked() {
    let Some((fake, cuda)) = Fake::open("ledger", &[]) else { return };
    let before = cuda.ledger().snapshot();
    fake.fail("cuMemCreate", 2);
    let _ = cuda.create(G, &ChunkProps::on_device(ZERO));
    cuda.mem_info(ONE).unwrap();
    let work = cuda.ledger().snapshot().since(&before);
    assert_eq!(work.total(), fake.log().len() as u64, "{work}");
    assert_eq!((work.of(Call::MemCreate), work.total_nanos()), (1, 0));
    cuda.ledger().set_timing(true);
    let before = cuda.ledger().snapshot();
    cuda.mem_info(ONE).unwrap();
    let work = cuda.ledger().snapshot().since(&before);
    assert!(work.nonzero().all(|(call, _)| work.nanos_of(call) > 0), "{work}");
}

#[test]
fn a_topology_is_probed_without_a_context_and_gives_all_back() {
    let Some((fake, cuda)) = Fake::open("topology", &[]) else { return };
    let driver: Arc<dyn Driver> = cuda;
    let topology = Topology::probe(&driver, &[ZERO, ONE]).unwrap();
    assert!(topology.reaches(ZERO, ONE) && topology.device(ONE).unwrap().abilities.rdma.works());
    let fabric = &topology.devices[0].abilities.fabric;
    assert_eq!(fabric.error().map(DriverError::code), Some(ResultCode::NOT_PERMITTED));
    let log = fake.log();
    assert!(log.iter().all(|line| line.starts_with("- ") && !line.contains("Ctx")), "{log:?}");
    let count = |name: &str| log.iter().filter(|line| line.contains(name)).count();
    // Two fabric chunks are refused; the exported ones come back as a second handle each.
    assert_eq!(count("cuMemCreate") - 2 + count("cuMemImport"), count("cuMemRelease"));
    assert_eq!(count("cuMemMap"), count("cuMemUnmap"));
    assert_eq!(count("cuMemAddressReserve"), count("cuMemAddressFree"));
}
