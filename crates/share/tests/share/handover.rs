//! A buffer goes to another process.

use vmm_share::{Access, ImportState, Importer, ImporterOptions, Refusal, ShareError};
use vmm_sys::DeviceId;
use vmm_sys::object::Stream;

use crate::common::second::Second;
use crate::common::{G, SOON, connect, machine, pattern};

#[test]
fn another_process_reads_and_writes_the_same_memory() {
    let mut owner = Second::owner(&[]);
    let (sim, driver) = machine(2);
    let importer = connect(&owner.address, &driver);
    let import = importer.open("buffer", Access::ReadWrite).unwrap();
    assert_eq!((import.bytes(), import.reserved_bytes()), (4 * G, 4 * G));
    assert_eq!((import.check(), import.pieces().len()), (ImportState::Current, 4));
    for slot in 0..4 {
        let mut bytes = [0; 64];
        import.read(slot * G, &mut bytes).unwrap();
        assert_eq!(bytes, [pattern(slot); 64]);
    }
    import.write(3 * G + 5, &[99]).unwrap();
    assert_eq!(owner.ask(&format!("read {}", 3 * G + 5)), "99");
    owner.ask(&format!("write {} 55", G));
    let mut byte = [0];
    import.read(G, &mut byte).unwrap();
    assert_eq!(byte, [55]);
    drop((import, importer));
    owner.finish(&sim);
}

#[test]
fn a_read_only_offer_is_read_only() {
    let mut owner = Second::owner(&[("VMM_SHARE_TEST_READ_ONLY", "1")]);
    let (sim, driver) = machine(1);
    let importer = connect(&owner.address, &driver);
    let refused = importer.open("buffer", Access::ReadWrite).unwrap_err();
    assert!(matches!(refused, ShareError::Refused { reason: Refusal::Access, .. }), "{refused}");
    let import = importer.open("buffer", Access::Read).unwrap();
    let refused = import.write(0, &[1]).unwrap_err();
    assert!(matches!(refused, ShareError::NotPermitted { .. }), "{refused}");
    // The mapping itself has no more.
    let stream = Stream::create(&driver, DeviceId(0)).unwrap();
    // SAFETY: the address is the driver's.
    let filled = unsafe { stream.fill(import.address(), 4, 9) };
    assert!(filled.is_err(), "a copy engine wrote to a read-only mapping");
    assert_eq!(owner.ask("read 0"), pattern(0).to_string());
    let unknown = importer.open("nothing", Access::Read).unwrap_err();
    assert!(matches!(unknown, ShareError::Refused { reason: Refusal::Unknown, .. }), "{unknown}");
    drop((import, importer, stream));
    owner.finish(&sim);
}

#[test]
fn opening_twice_imports_once() {
    let owner = Second::owner(&[]);
    let (sim, driver) = machine(2);
    let importer = connect(&owner.address, &driver);
    let first = importer.open("buffer", Access::Read).unwrap();
    let calls = driver.ledger().snapshot();
    let second = importer.open("buffer", Access::Read).unwrap();
    let third = second.reopen(8 * G).unwrap();
    let calls = driver.ledger().snapshot().since(&calls);
    assert_eq!(calls.of(vmm_sys::Call::MemImportFromShareableHandle), 0);
    assert_eq!(third.reserved_bytes(), 8 * G);
    assert_eq!(sim.ledger_summary().handles, 4);
    drop(first);
    let mut byte = [0];
    second.read(2 * G, &mut byte).unwrap();
    assert_eq!(byte, [pattern(2)]);
    drop((second, third, importer));
    owner.finish(&sim);
}

#[test]
fn what_is_published_is_waited_for() {
    let mut owner = Second::owner(&[]);
    let (sim, driver) = machine(1);
    let importer = connect(&owner.address, &driver);
    let import = importer.open("buffer", Access::Read).unwrap();
    let stream = Stream::create(&driver, DeviceId(0)).unwrap();
    let short = std::time::Duration::from_millis(20);
    let early = import.wait_published(1, &stream, short).unwrap_err();
    assert!(matches!(early, ShareError::Timeout { .. }), "{early}");
    assert_eq!((owner.ask("publish"), owner.ask("publish")), ("1".to_owned(), "2".to_owned()));
    import.wait_published(2, &stream, SOON).unwrap();
    assert_eq!(import.published(), 2);
    owner.kill();
    let gone = import.wait_published(3, &stream, SOON).unwrap_err();
    assert!(matches!(gone, ShareError::OwnerGone { .. }), "{gone}");
    drop((import, importer, stream));
    sim.check_clean().unwrap();
}

#[test]
fn each_device_that_is_named_has_access() {
    let owner = Second::owner(&[]);
    let (sim, driver) = machine(2);
    let devices = [DeviceId(0), DeviceId(1)];
    let options = ImporterOptions::new(driver.clone()).devices(devices);
    let importer = Importer::connect(&owner.address, options).unwrap();
    let import = importer.open("buffer", Access::ReadWrite).unwrap();
    assert_eq!(import.devices(), devices);
    let stream = Stream::create(&driver, DeviceId(1)).unwrap();
    let using = import.use_on(&stream).unwrap();
    // SAFETY: the address is the driver's.
    unsafe { stream.fill(import.address_for(G..G + 4).unwrap(), 4, 77).unwrap() };
    drop(using);
    stream.synchronize().unwrap();
    let mut byte = [0];
    import.read(G, &mut byte).unwrap();
    assert_eq!(byte, [77]);
    drop((import, importer));
    let beyond = ImporterOptions::new(driver.clone()).devices([DeviceId(2)]);
    let refused = Importer::connect(&owner.address, beyond).unwrap_err();
    assert!(matches!(refused, ShareError::BadArgument { .. }), "{refused}");
    let options = ImporterOptions::new(driver.clone()).devices([DeviceId(0)]);
    let importer = Importer::connect(&owner.address, options).unwrap();
    let import = importer.open("buffer", Access::Read).unwrap();
    assert!(matches!(import.use_on(&stream), Err(ShareError::BadArgument { .. })));
    drop((import, importer, stream));
    owner.finish(&sim);
}
