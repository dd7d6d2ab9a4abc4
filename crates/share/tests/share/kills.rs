//! Each side dies at each step; the other goes on.

use std::time::Duration;

use vmm_share::{
    Access, Address, EXPORTER_STEPS, IMPORTER_STEPS, Importer, ImporterOptions, NamedBuffer,
    OWNER_STEPS, OwnerClient, OwnerStatus, ShareError, WORKER_STEPS,
};
use vmm_sys::sim::Sim;

use crate::common::owner::Owner;
use crate::common::second::Second;
use crate::common::{G, connect, machine, pattern, socket_path};

const KILL: i32 = 9;

/// All that an importer does, while the owner changes its memory.
fn use_all(owner: &mut Second, sim: &std::sync::Arc<Sim>) -> Result<(), ShareError> {
    let driver = sim.clone() as std::sync::Arc<dyn vmm_sys::Driver>;
    let options = ImporterOptions::new(driver).timeout(Duration::from_secs(5));
    let importer = Importer::connect(&owner.address, options)?;
    let import = importer.open("buffer", Access::ReadWrite)?;
    let mut byte = [0];
    import.read(G, &mut byte)?;
    assert_eq!(byte, [pattern(1)]);
    owner.order("move 1");
    owner.answer();
    // A dead owner is noticed before the notice page is believed.
    let alive = importer.is_owner_alive();
    let refreshed = import.refresh(Duration::from_secs(5));
    if refreshed.is_err() || !alive {
        // The memory that is mapped stays, and nothing stale is handed out.
        match import.read(G, &mut byte) {
            Ok(()) => assert_eq!(byte, [pattern(1)]),
            Err(error) => assert!(
                matches!(error, ShareError::Changing { .. } | ShareError::Lagging { .. }),
                "{error}"
            ),
        }
        return refreshed.map(drop).and(Err(ShareError::OwnerGone { step: "test" }));
    }
    import.read(3 * G, &mut byte)?;
    assert_eq!(byte, [pattern(3)]);
    Ok(())
}

#[test]
fn the_owner_dies_at_each_step() {
    for step in EXPORTER_STEPS {
        // Descriptors are made when they are asked for, so that each step is reached.
        let more = [("VMM_SHARE_DIE_AT", *step), ("VMM_SHARE_TEST_DESCRIPTORS", "0")];
        let mut owner = Second::owner(&more);
        let (sim, _) = machine(2);
        let failed = use_all(&mut owner, &sim).expect_err(step);
        assert!(
            matches!(
                failed,
                ShareError::OwnerGone { .. } | ShareError::Changing { .. } | ShareError::Io { .. }
            ),
            "{step}: {failed}"
        );
        assert_eq!(owner.wait(), Some(KILL), "{step} was not reached");
        if let Err(left) = sim.check_clean() {
            panic!("{step}: {left}");
        }
    }
    // Alive, it gets to the end of all that.
    let mut owner = Second::owner(&[("VMM_SHARE_TEST_DESCRIPTORS", "0")]);
    let (sim, _) = machine(2);
    use_all(&mut owner, &sim).unwrap();
    owner.finish(&sim);
}

#[test]
fn an_importer_dies_at_each_step() {
    let mut owner = Owner::new(Address::Path(socket_path()), 4);
    let address = owner.exporter.as_ref().unwrap().address().clone();
    let mut place = 0;
    for step in IMPORTER_STEPS {
        let mut reader = Second::start("reader", address.clone(), &[("VMM_SHARE_DIE_AT", *step)]);
        for order in ["connect", "open"] {
            reader.order(order);
            let Some(answer) = reader.answer() else { break };
            assert!(answer == "connected" || answer == "opened", "{step}: {answer}");
        }
        place = 1 - place;
        owner.buffer.migrate(vmm_pool::Place::Device(vmm_sys::DeviceId(place))).unwrap();
        reader.order("refresh");
        assert_eq!(reader.answer(), None, "{step} was not reached");
        assert_eq!(reader.wait(), Some(KILL), "{step}");
        // The owner serves the next one.
        let (sim, driver) = machine(2);
        let importer = connect(&address, &driver);
        let import = importer.open("buffer", Access::Read).unwrap();
        let mut byte = [0];
        import.read(2 * G, &mut byte).unwrap();
        assert_eq!(byte, [pattern(2)], "{step}");
        drop((import, importer));
        owner.offer.as_ref().unwrap().wait_ready(crate::common::SOON).unwrap();
        drop(sim);
    }
    let exporter = owner.exporter.as_ref().unwrap();
    let deadline = std::time::Instant::now() + crate::common::SOON;
    while exporter.stats().clients > 0 {
        assert!(std::time::Instant::now() < deadline, "{:?}", exporter.stats());
        std::thread::sleep(Duration::from_millis(1));
    }
    owner.offer = None;
    assert_eq!(owner.exporter.as_ref().unwrap().stats().descriptors, 0);
    assert_eq!(owner.end(), "clean");
}

/// All that a worker does with an owner process.
fn live_with(address: &Address, sim: &std::sync::Arc<Sim>) -> Result<(), ShareError> {
    let driver = sim.clone() as std::sync::Arc<dyn vmm_sys::Driver>;
    let options = ImporterOptions::new(driver).timeout(Duration::from_secs(5));
    let client = OwnerClient::connect(address, options)?;
    let wanted = NamedBuffer::new("buffer", 2 * G).chunk_bytes(G);
    for created in [true, false] {
        let (import, is_new) = client.create_or_find(&wanted)?;
        assert_eq!(is_new, created);
        import.write(G, &[7; 8])?;
        drop(import);
    }
    OwnerStatus::ask(address, Duration::from_secs(5))?;
    client.leave("buffer")?;
    client.release("buffer")
}

#[test]
fn an_owner_process_dies_at_each_step() {
    for step in OWNER_STEPS.iter().map(|step| Some(*step)).chain([None]) {
        let more: Vec<_> = step.map(|step| ("VMM_SHARE_DIE_AT", step)).into_iter().collect();
        let mut keeper = Second::start("keeper", Address::Path(socket_path()), &more);
        let (sim, _) = machine(2);
        let lived = live_with(&keeper.address, &sim);
        let Some(step) = step else {
            lived.unwrap();
            assert_eq!(keeper.ask("end"), "clean");
            continue;
        };
        let failed = lived.expect_err(step);
        assert!(matches!(failed, ShareError::OwnerGone { .. } | ShareError::Io { .. }), "{failed}");
        assert_eq!(keeper.wait(), Some(KILL), "{step} was not reached");
        if let Err(left) = sim.check_clean() {
            panic!("{step}: {left}");
        }
    }
}

#[test]
fn a_worker_dies_at_each_step_and_holds_nothing_any_more() {
    let mut keeper = Second::start("keeper", Address::Path(socket_path()), &[]);
    for step in WORKER_STEPS {
        let more = [("VMM_SHARE_DIE_AT", *step)];
        let mut worker = Second::start("worker", keeper.address.clone(), &more);
        for order in [&*format!("create buffer {}", 2 * G), "leave buffer", "release buffer"] {
            worker.order(order);
            if worker.answer().is_none() {
                break;
            }
        }
        assert_eq!(worker.wait(), Some(KILL), "{step} was not reached");
        let deadline = std::time::Instant::now() + crate::common::SOON;
        let left = loop {
            let status = OwnerStatus::ask(&keeper.address, crate::common::SOON).unwrap();
            // Who asks is a client too.
            if status.buffers.iter().all(|buffer| buffer.holders.is_empty()) && status.clients <= 1
            {
                break status.buffers.len();
            }
            assert!(std::time::Instant::now() < deadline, "{step}: {status:?}");
            std::thread::sleep(Duration::from_millis(1));
        };
        // What it had made is there for whoever comes next, until its lease is over.
        assert!(left <= 1, "{step}");
        let mut next = Second::start("worker", keeper.address.clone(), &[]);
        let found = if left == 1 { "found" } else { "created" };
        let answer = next.ask(&format!("create buffer {} succeed", 2 * G));
        assert_eq!(answer, format!("{found} ReadWrite"), "{step}");
        assert_eq!(next.ask("release buffer"), "released");
        assert_eq!(next.ask("end"), "clean");
    }
    assert_eq!(keeper.ask("end"), "clean");
}
