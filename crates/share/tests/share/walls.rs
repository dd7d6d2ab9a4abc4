//! What the system or the address space forbids. Ids F-… are those of the reports that the stories
//! come from.

use std::sync::Arc;

use vmm_share::{Access, Address, ShareError};
use vmm_sys::Driver;
use vmm_sys::sim::Sim;

use crate::common::second::Second;
use crate::common::{G, connect, pattern, socket_path};

/// Starts both sides with system calls forbidden, by their names.
fn behind_a_wall(owner: &str, reader: &str) -> Option<(Second, Second)> {
    let address = Address::Path(socket_path());
    let mut owner = Second::start("owner", address.clone(), &[("VMM_SHARE_TEST_FORBID", owner)]);
    let mut reader = Second::start("reader", address, &[("VMM_SHARE_TEST_FORBID", reader)]);
    if owner.ask("forbidden") == "no" || reader.ask("forbidden") == "no" {
        println!("skipped (1): this system takes no filter of system calls");
        return None;
    }
    Some((owner, reader))
}

/// Fetching a descriptor out of another process needs rights; a socket needs none.
#[test]
fn f_f1_descriptors_come_through_the_socket_where_fetching_them_is_forbidden() {
    const FETCHING: &str = "pidfd_getfd ptrace process_vm_readv";
    let Some((mut owner, mut reader)) = behind_a_wall(FETCHING, FETCHING) else { return };
    assert_eq!((reader.ask("connect"), reader.ask("open")), ("connected".into(), "opened".into()));
    assert_eq!(reader.ask(&format!("read {}", 3 * G)), pattern(3).to_string());
    owner.ask("grow 6");
    assert_eq!(reader.ask("refresh"), (2 * G).to_string());
    assert_eq!(reader.ask("close"), "closed");
    assert_eq!(owner.ask("end"), "clean");
    assert_eq!(reader.ask("end"), "clean");
}

#[test]
fn f_f1_where_the_socket_is_forbidden_too_the_step_is_named() {
    for (call, step) in [("socket", "connecting"), ("recvmsg", "being let in")] {
        let forbidden = format!("pidfd_getfd ptrace {call}");
        let Some((mut owner, mut reader)) = behind_a_wall("ptrace", &forbidden) else { return };
        let why = reader.ask("why");
        assert!(why.starts_with(step), "{call}: {why}");
        assert!(why.contains("not permitted"), "{call}: {why}");
        assert_eq!(reader.ask("connect"), "Io", "{call}: a typed error");
        assert_eq!(reader.ask("end"), "clean");
        assert_eq!(owner.ask("end"), "clean");
    }
}

fn few_addresses(bytes: u64) -> (Arc<Sim>, Arc<dyn Driver>) {
    let sim = Sim::builder().device_bytes(80 << 30).address_space_bytes(bytes).build();
    (sim.clone(), sim)
}

/// An import takes the addresses that it maps and no more, so thousands fit.
#[test]
fn f_f2_ten_thousand_imports_reserve_what_they_map() {
    const IMPORTS: u64 = 10_000;
    let owner = Second::owner(&[("VMM_SHARE_TEST_SLOTS", "1")]);
    let (sim, driver) = few_addresses(128 << 40);
    let importer = connect(&owner.address, &driver);
    let first = importer.open("buffer", Access::Read).unwrap();
    let mut imports: Vec<_> = (1..IMPORTS).map(|_| first.reopen(0).unwrap()).collect();
    imports.push(first);
    let summary = sim.ledger_summary();
    assert_eq!((summary.ranges, summary.mappings), (IMPORTS, IMPORTS));
    assert_eq!(summary.reserved_bytes, IMPORTS * G, "20,000 MiB");
    drop(imports);
    let summary = sim.ledger_summary();
    assert_eq!((summary.ranges, summary.reserved_bytes, summary.mappings), (0, 0, 0));
    drop(importer);
    owner.finish(&sim);
}

#[test]
fn f_f2_a_lack_of_addresses_is_told_from_a_lack_of_memory() {
    let owner = Second::owner(&[("VMM_SHARE_TEST_SLOTS", "1")]);
    let (sim, driver) = few_addresses(1 << 30);
    let importer = connect(&owner.address, &driver);
    let first = importer.open("buffer", Access::Read).unwrap();
    let mut imports = Vec::new();
    let refused = loop {
        match first.reopen(0) {
            Ok(import) => imports.push(import),
            Err(error) => break error,
        }
        assert!(imports.len() < 1000, "no more fit");
    };
    assert_eq!(imports.len(), 511, "1 GiB with the first");
    let ShareError::Driver { step, cause } = &refused else { panic!("{refused}") };
    assert_eq!(*step, "reserving addresses");
    assert!(cause.is_out_of_addresses() && refused.to_string().contains("addresses"), "{refused}");
    imports.pop();
    imports.push(first.reopen(0).unwrap());
    drop((imports, first, importer));
    owner.finish(&sim);
}
