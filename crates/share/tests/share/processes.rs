//! Forks, ends in either order, and two exporters at one place.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use vmm_pool::{Phase, Place};
use vmm_share::{Access, Address, Exporter, ImportState, PeerRule, Refusal, ShareError};
use vmm_sys::object::Stream;
use vmm_sys::{CaptureMode, DeviceId};

use crate::common::owner::{HOME, Owner};
use crate::common::second::Second;
use crate::common::{G, SOON, connect, machine, pattern, socket_path};

#[test]
fn a_forked_child_harms_neither_side() {
    let address = Address::Path(socket_path());
    let mut owner = Second::start("owner", address.clone(), &[]);
    let mut reader = Second::start("reader", address.clone(), &[]);
    assert_eq!((reader.ask("connect"), reader.ask("open")), ("connected".into(), "opened".into()));
    assert_eq!(owner.ask("fork"), "well");
    assert_eq!(reader.ask("fork"), "well");
    assert_eq!(reader.ask("check"), "Current");
    assert_eq!(reader.ask(&format!("read {G}")), pattern(1).to_string());
    owner.ask("grow 5");
    assert_eq!(reader.ask("refresh"), G.to_string());
    assert_eq!(reader.ask("open"), "opened");
    assert_eq!(reader.ask("close"), "closed");
    assert_eq!(owner.ask("end"), "clean");
    assert_eq!(reader.ask("end"), "clean");
}

/// Forks have the sockets of their parent open, for as long as they live.
#[test]
fn the_end_of_a_process_shows_while_its_forks_live_on() {
    let mut owner = Second::owner(&[]);
    let mut reader = Second::start("reader", owner.address.clone(), &[]);
    assert_eq!((reader.ask("connect"), reader.ask("open")), ("connected".into(), "opened".into()));
    let (sim, driver) = machine(2);
    let importer = connect(&owner.address, &driver);
    let import = importer.open("buffer", Access::Read).unwrap();
    // One that the owner serves.
    assert_eq!((reader.ask("leave a fork"), owner.ask("clients")), ("left".into(), "2".into()));
    reader.kill();
    let deadline = Instant::now() + SOON;
    while owner.ask("clients") != "1" {
        assert!(Instant::now() < deadline, "the reader is not missed");
    }
    assert!(importer.is_owner_alive());
    // The owner itself, from whom an answer is awaited too.
    owner.ask("leave a fork");
    owner.kill();
    assert!(!importer.is_owner_alive());
    assert_eq!(import.check(), ImportState::OwnerGone);
    let refused = importer.open("buffer", Access::Read).unwrap_err();
    assert!(matches!(refused, ShareError::OwnerGone { .. }), "{refused}");
    let mut byte = [0];
    import.read(G, &mut byte).unwrap();
    assert_eq!(byte, [pattern(1)]);
    drop((import, importer, driver));
    // The owner's fork has its descriptors too.
    let kept = sim.check_clean().unwrap_err();
    assert!(kept.contains("4 chunks kept by an open exported descriptor"), "{kept}");
}

#[test]
fn a_process_may_import_from_itself_and_end_in_any_order() {
    for owner_first in [true, false] {
        let owner = Owner::new(Address::Path(socket_path()), 4);
        let address = owner.exporter.as_ref().unwrap().address().clone();
        let (sim, driver) = machine(2);
        let importer = connect(&address, &driver);
        let import = importer.open("buffer", Access::Read).unwrap();
        match owner_first {
            true => {
                drop(owner);
                assert_eq!(import.check(), ImportState::Withdrawn);
                assert!(!importer.is_owner_alive());
                assert!(import.address_for(0..G).is_err());
                drop((import, importer));
            }
            false => {
                drop((import, importer));
                assert_eq!(owner.end(), "clean");
            }
        }
        sim.check_clean().unwrap();
    }
}

#[test]
fn an_address_has_one_exporter_and_a_dead_one_is_replaced() {
    let path = socket_path();
    let address = Address::Path(path.clone());
    let mut owner = Second::start("owner", address.clone(), &[]);
    let taken = Exporter::builder().bind(address.clone()).unwrap_err();
    assert!(matches!(taken, ShareError::Io { .. }), "{taken}");
    owner.kill();
    assert!(path.exists(), "it had no time to remove it");
    let exporter = Exporter::builder().bind(address).unwrap();
    drop(exporter);
    assert!(!path.exists());
    std::fs::write(&path, "a file of somebody's").unwrap();
    assert!(Exporter::builder().bind(Address::Path(path.clone())).is_err());
    assert_eq!(std::fs::read(&path).unwrap(), b"a file of somebody's");
    std::fs::remove_file(&path).unwrap();
}

#[test]
fn a_name_without_a_file_works_and_the_rule_decides() {
    let (_sim, driver) = machine(1);
    let rules = [
        (PeerRule::SameUser, true),
        (PeerRule::Users(vec![rustix::process::geteuid().as_raw()]), true),
        (PeerRule::Users(vec![u32::MAX - 1]), false),
        (PeerRule::custom(|peer| peer.pid == std::process::id()), true),
        (PeerRule::custom(|_| panic!("a rule that panics")), false),
    ];
    for (at, (rule, admits)) in rules.into_iter().enumerate() {
        // A name each: a process that another test has begun may have the last one for a moment more.
        let address = Address::Abstract(format!("vmm-share-test-{}-{at}", std::process::id()));
        let exporter = Exporter::builder().rule(rule.clone()).bind(address.clone()).unwrap();
        let options = vmm_share::ImporterOptions::new(driver.clone());
        match (vmm_share::Importer::connect(&address, options), admits) {
            (Ok(importer), true) => assert_ne!(importer.exporter_id(), [0; 16]),
            (Err(ShareError::Refused { reason: Refusal::Peer, .. }), false) => {}
            (other, _) => panic!("{rule:?}: {other:?}"),
        }
        drop(exporter);
    }
}

#[test]
fn a_number_stands_for_all_before_it() {
    let owner = Owner::new(Address::Path(socket_path()), 1);
    let address = owner.exporter.as_ref().unwrap().address().clone();
    let (sim, driver) = machine(2);
    let importer = connect(&address, &driver);
    let import = importer.open("buffer", Access::Read).unwrap();
    let mine = Stream::create(&driver, HOME).unwrap();
    let slow = Stream::create(&owner.driver, HOME).unwrap();
    let quick = Stream::create(&owner.driver, DeviceId(1)).unwrap();
    let hold = owner.sim.hold(HOME, slow.handle()).unwrap();
    let offer = owner.offer.as_ref().unwrap();
    assert_eq!((offer.publish(&slow).unwrap(), offer.publish(&quick).unwrap()), (1, 2));
    let early = import.wait_published(2, &mine, Duration::from_millis(30)).unwrap_err();
    assert!(matches!(early, ShareError::Timeout { .. }), "{early}");
    owner.sim.release_hold(hold);
    import.wait_published(2, &mine, SOON).unwrap();
    // SAFETY: the stream is live, and so is the graph.
    unsafe {
        owner.driver.capture_begin(HOME, slow.handle(), CaptureMode::Relaxed).unwrap();
        let refused = offer.publish(&slow).unwrap_err();
        assert!(matches!(refused, ShareError::BadArgument { .. }), "{refused}");
        let graph = owner.driver.capture_end(HOME, slow.handle()).unwrap();
        owner.driver.graph_destroy(HOME, graph).unwrap();
    }
    let strange = offer.publish(&mine).unwrap_err();
    assert!(matches!(strange, ShareError::BadArgument { .. }), "{strange}");
    assert_eq!(import.published(), 2);
    drop((import, importer, mine, slow, quick));
    assert_eq!(owner.end(), "clean");
    sim.check_clean().unwrap();
}

#[test]
fn descriptors_are_closed_before_their_memory_goes() {
    let mut owner = Owner::new(Address::Path(socket_path()), 4);
    let exporter = Arc::new(owner.exporter.take().unwrap());
    let asked = Arc::new(Mutex::new(Vec::new()));
    let (told, seen) = (exporter.clone(), asked.clone());
    // Called after the exporter's own, which is older.
    let hook = owner.buffer.on_backing_change(move |change| {
        if change.phase == Phase::Before {
            seen.lock().unwrap().push(told.stats().descriptors);
        }
    });
    let ready = || owner.offer.as_ref().unwrap().wait_ready(SOON).unwrap();
    ready();
    owner.buffer.shrink_to(G).unwrap();
    ready();
    owner.buffer.grow_to(4 * G).unwrap();
    ready();
    owner.buffer.migrate(Place::Device(DeviceId(1))).unwrap();
    assert_eq!(asked.lock().unwrap()[..], [1, 1, 0]);
    drop((hook, exporter));
    assert_eq!(owner.end(), "clean");
}
