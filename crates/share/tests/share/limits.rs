//! Few descriptors, and GPUs by other names.

use std::sync::Arc;
use std::time::{Duration, Instant};

use vmm_share::{Access, Address, Refusal, ShareError};
use vmm_sys::sim::Sim;
use vmm_sys::{Call, DeviceId, Driver, Location};

use crate::common::second::Second;
use crate::common::{G, SOON, connect, machine, pattern, socket_path};

#[test]
fn a_limit_of_256_descriptors_suffices_for_100_pieces() {
    // The simulated device itself has a descriptor open for each chunk that is shared.
    let few = [("VMM_SHARE_TEST_SLOTS", "100"), ("VMM_SHARE_TEST_NOFILE", "256")];
    let address = Address::Path(socket_path());
    let mut owner = Second::start("owner", address.clone(), &few);
    let kept: usize = owner.ask("ready").parse().unwrap();
    assert!(kept < 100, "{kept} are kept, which leaves no room for others");
    let mut reader = Second::start("reader", address, &few);
    for _ in 0..2 {
        assert_eq!(
            (reader.ask("connect"), reader.ask("open")),
            ("connected".into(), "opened".into())
        );
        assert_eq!(reader.ask(&format!("read {}", 99 * G)), pattern(99).to_string());
        assert_eq!(reader.ask("close"), "closed");
    }
    // What was made for one answer goes with it.
    let deadline = Instant::now() + SOON;
    while owner.ask("descriptors").parse::<usize>().unwrap() > kept {
        assert!(Instant::now() < deadline, "more than {kept} are kept");
    }
    assert_eq!(owner.ask("end"), "clean");
    assert_eq!(reader.ask("end"), "clean");
}

#[test]
fn an_owner_without_descriptors_says_so_and_goes_on() {
    let few = [("VMM_SHARE_TEST_SLOTS", "300"), ("VMM_SHARE_TEST_NOFILE", "256")];
    let mut owner = Second::owner(&few);
    let (sim, driver) = machine(2);
    let importer = connect(&owner.address, &driver);
    let refused = importer.open("buffer", Access::Read).unwrap_err();
    assert!(matches!(refused, ShareError::Refused { reason: Refusal::Failed, .. }), "{refused}");
    owner.ask("shrink 20");
    let import = importer.open("buffer", Access::Read).unwrap();
    assert_eq!(import.bytes(), 20 * G);
    drop((import, importer));
    owner.finish(&sim);
}

#[test]
fn descriptors_that_cannot_be_sent_now_are_sent_when_they_can() {
    let few = [("VMM_SHARE_TEST_NOFILE", "256"), ("VMM_SHARE_TEST_TIMEOUT_MS", "1000")];
    let mut owner = Second::owner(&few);
    let (sim, driver) = machine(2);
    let importer = connect(&owner.address, &driver);
    owner.ask("clog");
    // For too long: it says so, and nobody is cut off.
    let refused = importer.open("buffer", Access::Read).unwrap_err();
    assert!(matches!(refused, ShareError::Refused { reason: Refusal::Failed, .. }), "{refused}");
    assert!(refused.to_string().contains("too many descriptors of this user"), "{refused}");
    assert_eq!(owner.ask("clients"), "1");
    // For a while: the answer comes late.
    let import = std::thread::scope(|scope| {
        let opening = scope.spawn(|| importer.open("buffer", Access::Read));
        std::thread::sleep(Duration::from_millis(200));
        assert!(!opening.is_finished(), "the way is not clogged");
        owner.ask("unclog");
        opening.join().unwrap().unwrap()
    });
    let mut byte = [0];
    import.read(3 * G, &mut byte).unwrap();
    assert_eq!(byte, [pattern(3)]);
    drop((import, importer));
    owner.finish(&sim);
}

#[test]
fn f_f5_gpus_are_told_apart_by_what_they_are_called_everywhere() {
    let mut owner = Second::owner(&[]);
    owner.ask("move 1");
    for (visible, found) in [(&[0, 1][..], Some(1)), (&[1, 0], Some(0)), (&[2], None)] {
        let sim = Sim::builder().visible(visible).device_bytes(1 << 30).build();
        let driver: Arc<dyn Driver> = sim.clone();
        let other = DeviceId(visible.len() as u32 - 1);
        let current = driver.primary_context_retain(other).unwrap();
        // SAFETY: retained just now, and released below.
        unsafe { driver.context_set_current(Some(current)) }.unwrap();
        let importer = connect(&owner.address, &driver);
        let calls = driver.ledger().snapshot();
        let import = importer.open("buffer", Access::Read);
        match found {
            Some(device) => {
                let import = import.unwrap();
                let device = DeviceId(device);
                let here = |it: &vmm_share::ImportedPiece| it.location == Location::Device(device);
                assert!(import.pieces().iter().all(here), "{visible:?}");
                assert_eq!(import.devices(), [device]);
                let mut byte = [0];
                import.read(3 * G, &mut byte).unwrap();
                assert_eq!(byte, [pattern(3)]);
            }
            None => {
                let refused = import.unwrap_err();
                assert!(matches!(refused, ShareError::NotVisibleHere { .. }), "{refused}");
                let calls = driver.ledger().snapshot().since(&calls);
                assert_eq!(calls.of(Call::MemImportFromShareableHandle), 0);
                assert_eq!(calls.total(), 0);
            }
        }
        assert_eq!(driver.context_current().unwrap(), Some(current), "{visible:?}");
        // SAFETY: no context is a valid choice.
        unsafe { driver.context_set_current(None) }.unwrap();
        driver.primary_context_release(other).unwrap();
    }
    owner.ask("end");
}
