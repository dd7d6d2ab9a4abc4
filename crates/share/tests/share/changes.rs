//! The owner changes the memory.

use std::time::Duration;

use vmm_share::{Access, Import, ImportState, ShareError};
use vmm_sys::object::Stream;
use vmm_sys::{Call, DeviceId};

use crate::common::second::Second;
use crate::common::{G, SOON, connect, machine, pattern};

fn first_byte(import: &Import, slot: u64) -> u8 {
    let mut byte = [0];
    import.read(slot * G, &mut byte).unwrap();
    byte[0]
}

#[test]
fn an_importer_follows_growth_shrinking_moves_and_sleep() {
    let mut owner = Second::owner(&[]);
    let (sim, driver) = machine(2);
    let importer = connect(&owner.address, &driver);
    let import = importer.open_with_room("buffer", Access::ReadWrite, 16 * G).unwrap();
    let address = import.address();
    // Order, what it leaves, what comes and goes at the importer.
    for (order, slots, came, left) in [
        ("grow 6", 6, 2, 0),
        ("shrink 3", 3, 0, 3),
        ("grow 8", 8, 5, 0),
        ("move 1", 8, 8, 8),
        ("move 0", 8, 8, 8),
        ("sleep", 8, 8, 8),
        ("wake", 8, 8, 8),
    ] {
        let have = import.generation();
        owner.ask(order);
        let lags = import.check();
        assert!(matches!(lags, ImportState::Lagging { have: it, .. } if it == have), "{order}");
        let refused = import.read(0, &mut [0]).unwrap_err();
        assert!(matches!(refused, ShareError::Lagging { .. }), "{order}: {refused}");
        assert!(import.address_for(0..1).is_err());
        let calls = driver.ledger().snapshot();
        let refreshed = import.refresh(SOON).unwrap();
        let calls = driver.ledger().snapshot().since(&calls);
        assert_eq!((refreshed.came_bytes, refreshed.left_bytes), (came * G, left * G), "{order}");
        assert_eq!(calls.of(Call::MemImportFromShareableHandle), came, "{order}");
        assert_eq!(import.check(), ImportState::Current);
        assert_eq!((import.bytes(), import.address()), (slots * G, address), "{order}");
        for slot in 0..slots {
            assert_eq!(first_byte(&import, slot), pattern(slot), "{order}, slot {slot}");
        }
    }
    assert_eq!(import.refresh(SOON).unwrap().came_bytes, 0);
    drop((import, importer));
    owner.finish(&sim);
}

#[test]
fn memory_is_not_unmapped_under_work() {
    let mut owner = Second::owner(&[]);
    let (sim, driver) = machine(1);
    let importer = connect(&owner.address, &driver);
    let import = importer.open("buffer", Access::Read).unwrap();
    let stream = Stream::create(&driver, DeviceId(0)).unwrap();
    let hold = sim.hold(DeviceId(0), stream.handle()).unwrap();
    let using = import.use_on(&stream).unwrap();
    owner.ask("shrink 2");
    let refused = import.use_on(&stream).unwrap_err();
    assert!(matches!(refused, ShareError::Lagging { .. }), "{refused}");
    for using in [Some(using), None] {
        let late = import.refresh(Duration::from_millis(10)).unwrap_err();
        assert!(matches!(late, ShareError::Timeout { .. }), "{late}");
        assert_eq!(import.bytes(), 4 * G, "as before");
        drop(using);
    }
    sim.release_hold(hold);
    assert_eq!(import.refresh(SOON).unwrap().left_bytes, 2 * G);
    assert!(matches!(import.read(2 * G, &mut [0]), Err(ShareError::NotMapped { .. })));
    drop((import, importer, stream));
    owner.finish(&sim);
}

#[test]
fn an_import_that_ends_under_work_leaves_it_its_memory() {
    let owner = Second::owner(&[]);
    let (sim, driver) = machine(1);
    let options = vmm_share::ImporterOptions::new(driver.clone());
    let options = options.drop_patience(Duration::from_millis(10));
    let importer = vmm_share::Importer::connect(&owner.address, options).unwrap();
    let import = importer.open("buffer", Access::Read).unwrap();
    let stream = Stream::create(&driver, DeviceId(0)).unwrap();
    let hold = sim.hold(DeviceId(0), stream.handle()).unwrap();
    drop(import.use_on(&stream).unwrap());
    drop(import);
    assert_eq!(sim.ledger_summary().mappings, 4);
    sim.release_hold(hold);
    // Other tests of this process may have leftovers too.
    vmm_share::retry_leftovers();
    assert_eq!(sim.ledger_summary().mappings, 0);
    drop((importer, stream));
    owner.finish(&sim);
}

#[test]
fn growth_beyond_the_addresses_is_followed_or_told() {
    let mut owner = Second::owner(&[]);
    let (sim, driver) = machine(1);
    let importer = connect(&owner.address, &driver);
    let import = importer.open("buffer", Access::Read).unwrap();
    owner.ask("grow 6");
    let blocked = driver.address_reserve(G, 0, import.address() + 4 * G);
    let blocked = blocked.unwrap();
    assert_eq!(blocked, import.address() + 4 * G, "the simulator follows hints");
    let refused = import.refresh(SOON).unwrap_err();
    assert!(matches!(refused, ShareError::NeedsReopen { .. }), "{refused}");
    assert_eq!((import.bytes(), sim.ledger_summary().ranges), (4 * G, 2), "as before");
    let moved = import.reopen(0).unwrap();
    assert_eq!(first_byte(&moved, 5), pattern(5));
    drop(moved);
    driver.address_free(blocked, G).unwrap();
    assert_eq!(import.refresh(SOON).unwrap().came_bytes, 2 * G);
    assert_eq!(first_byte(&import, 5), pattern(5));
    let mut across = vec![0; 2 * G as usize];
    import.read(3 * G, &mut across).unwrap();
    assert_eq!((across[0], across[G as usize]), (pattern(3), pattern(4)));
    drop((import, importer));
    owner.finish(&sim);
}

#[test]
fn a_refresh_that_fails_leaves_all_as_it_was() {
    let mut owner = Second::owner(&[]);
    let (sim, driver) = machine(2);
    let importer = connect(&owner.address, &driver);
    let import = importer.open("buffer", Access::Read).unwrap();
    owner.ask("move 1");
    let before = sim.ledger_summary();
    for (call, nth) in [
        (Call::MemImportFromShareableHandle, 3),
        (Call::MemMap, 2),
        (Call::MemUnmap, 2),
        (Call::MemSetAccess, 1),
    ] {
        let plan = vmm_sys::sim::FaultPlan::fail(vmm_sys::ResultCode::UNKNOWN);
        sim.inject(plan.on(call).at(nth).once());
        let failed = import.refresh(SOON).unwrap_err();
        assert!(matches!(failed, ShareError::Driver { .. }), "{call:?}: {failed}");
        let after = sim.ledger_summary();
        assert_eq!((after.mappings, after.handles), (before.mappings, before.handles), "{call:?}");
        assert!(matches!(import.check(), ImportState::Lagging { .. }));
    }
    import.refresh(SOON).unwrap();
    assert_eq!(first_byte(&import, 3), pattern(3));
    drop((import, importer));
    owner.finish(&sim);
}

#[test]
fn a_withdrawn_buffer_and_a_dead_owner_are_told() {
    let mut owner = Second::owner(&[]);
    let (sim, driver) = machine(2);
    let importer = connect(&owner.address, &driver);
    let import = importer.open("buffer", Access::Read).unwrap();
    owner.ask("withdraw");
    assert_eq!(import.check(), ImportState::Withdrawn);
    assert!(matches!(import.read(0, &mut [0]), Err(ShareError::Withdrawn { .. })));
    assert!(matches!(import.refresh(SOON), Err(ShareError::Withdrawn { .. })));
    assert!(importer.open("buffer", Access::Read).is_err());
    drop((import, importer));
    owner.finish(&sim);

    let mut owner = Second::owner(&[]);
    let importer = connect(&owner.address, &driver);
    let import = importer.open("buffer", Access::Read).unwrap();
    assert!(importer.is_owner_alive());
    owner.kill();
    assert!(!importer.is_owner_alive());
    assert_eq!(import.check(), ImportState::OwnerGone);
    assert_eq!(first_byte(&import, 2), pattern(2), "the memory stays until it is let go of");
    assert!(matches!(importer.open("buffer", Access::Read), Err(ShareError::OwnerGone { .. })));
    drop((import, importer));
    sim.check_clean().unwrap();
}

#[test]
fn descriptors_that_are_kept_do_not_keep_memory_that_goes() {
    let mut owner = Second::owner(&[]);
    assert_eq!(owner.ask("ready"), "4");
    for (order, kept) in [("shrink 1", "1"), ("grow 4", "4"), ("move 1", "4"), ("shrink 0", "0")] {
        owner.ask(order);
        assert_eq!(owner.ask("orphans"), "0", "{order}");
        assert_eq!(owner.ask("ready"), kept, "{order}");
    }
    owner.finish(&machine(1).0);
}

/// Waits until so many chunks are left at the owner that only somebody's descriptor keeps. It asks; the
/// owner does nothing for it.
fn wait_orphans(owner: &mut Second, count: u64) {
    let deadline = std::time::Instant::now() + SOON;
    loop {
        let orphans = owner.ask("orphans");
        if orphans == count.to_string() {
            return;
        }
        assert!(std::time::Instant::now() < deadline, "{orphans} chunks and not {count}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn f_f4_memory_stays_with_the_importer_and_goes_with_it() {
    let mut owner = Second::owner(&[]);
    let (sim, driver) = machine(2);
    let importer = connect(&owner.address, &driver);
    let import = importer.open("buffer", Access::Read).unwrap();
    owner.ask("shrink 1");
    // Freed there, mapped here.
    wait_orphans(&mut owner, 3);
    drop(import);
    wait_orphans(&mut owner, 0);
    // The same with an importer that is killed.
    owner.ask("grow 4");
    let mut reader = Second::start("reader", owner.address.clone(), &[]);
    assert_eq!((reader.ask("connect"), reader.ask("open")), ("connected".into(), "opened".into()));
    owner.ask("shrink 1");
    wait_orphans(&mut owner, 3);
    reader.kill();
    wait_orphans(&mut owner, 0);
    drop((reader, importer));
    owner.finish(&sim);
}

/// The consumer's drop is all that it takes: no refresh, no word to the owner.
#[test]
fn f_x9_what_a_consumer_drops_is_free_at_the_producer() {
    let mut owner = Second::owner(&[]);
    let (sim, driver) = machine(2);
    let importer = connect(&owner.address, &driver);
    let imports = [(); 2].map(|()| importer.open("buffer", Access::ReadWrite).unwrap());
    owner.ask("shrink 0");
    let [first, second] = imports;
    drop(first);
    // Another import has them.
    wait_orphans(&mut owner, 4);
    let calls = driver.ledger().snapshot();
    drop(second);
    let calls = driver.ledger().snapshot().since(&calls);
    assert_eq!((calls.of(Call::MemUnmap), calls.of(Call::MemRelease)), (4, 4), "{calls}");
    wait_orphans(&mut owner, 0);
    drop(importer);
    owner.finish(&sim);
}
