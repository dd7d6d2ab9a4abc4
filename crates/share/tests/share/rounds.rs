//! Nothing adds up, on either side.

use std::fs;

use vmm_share::Address;

use crate::common::second::Second;
use crate::common::{descriptors, socket_path};

fn rounds() -> u64 {
    let asked = std::env::var("VMM_SHARE_ROUNDS").ok().and_then(|it| it.parse().ok());
    asked.unwrap_or(10_000)
}

/// A figure of a process: the first number behind the name of a field.
fn status(pid: u32, field: &str) -> u64 {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(field)).unwrap();
    line.split_whitespace().next().unwrap().parse().unwrap()
}

#[test]
fn f_f4_rounds_of_connect_map_unmap_leave_nothing() {
    let rounds = rounds();
    let address = Address::Path(socket_path());
    // Few may be open, and each round exports anew.
    let few = [("VMM_SHARE_TEST_NOFILE", "256"), ("VMM_SHARE_TEST_DESCRIPTORS", "0")];
    let mut owner = Second::start("owner", address.clone(), &few);
    let mut reader = Second::start("reader", address, &few);
    assert_eq!(owner.ask("ready"), "0");
    // What is made once and kept.
    assert_eq!(reader.ask(&format!("rounds {}", rounds / 10)), "0");
    let figures = |pid: u32| (descriptors(pid), status(pid, "Threads:"));
    let settle = |owner: &mut Second| {
        while owner.ask("clients") != "0" {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    };
    settle(&mut owner);
    let pids = [owner.pid(), reader.pid()];
    let before = pids.map(figures);
    let memory = pids.map(|pid| status(pid, "VmRSS:"));
    assert_eq!(reader.ask(&format!("rounds {rounds}")), "0", "reserved bytes");
    settle(&mut owner);
    assert_eq!(pids.map(figures), before);
    let grown = [0, 1].map(|at| status(pids[at], "VmRSS:").saturating_sub(memory[at]));
    println!("{rounds} rounds (VMM_SHARE_ROUNDS sets them): memory grew by {grown:?} kB");
    assert!(grown.iter().all(|kb| *kb < 4096), "{grown:?} kB");
    assert_eq!(owner.ask("end"), "clean");
    assert_eq!(reader.ask("end"), "clean");
}
