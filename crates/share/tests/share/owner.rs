//! An owner process and its workers: what outlives whom.

use std::time::{Duration, Instant};

use vmm_share::{Address, HeldBuffer, LeaseState, OwnerStatus, Refusal, ShareError};

use crate::common::second::Second;
use crate::common::{G, SOON, descriptors, socket_path};

fn keeper(more: &[(&str, &str)]) -> Second {
    Second::start("keeper", Address::Path(socket_path()), more)
}

fn worker(keeper: &Second) -> Second {
    Second::start("worker", keeper.address.clone(), &[])
}

fn status(keeper: &Second) -> OwnerStatus {
    OwnerStatus::ask(&keeper.address, SOON).unwrap()
}

/// Waits until the status is as asked for.
fn wait(keeper: &Second, is_it: impl Fn(&OwnerStatus) -> bool) -> OwnerStatus {
    let deadline = Instant::now() + SOON;
    loop {
        let status = status(keeper);
        if is_it(&status) {
            return status;
        }
        assert!(Instant::now() < deadline, "{status:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Waits for the memory, which goes a moment after the name.
fn wait_empty(keeper: &mut Second) {
    let deadline = Instant::now() + SOON;
    while keeper.ask("memory") != "0" {
        assert!(Instant::now() < deadline);
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn only(status: &OwnerStatus) -> &HeldBuffer {
    let [buffer] = status.buffers.as_slice() else { panic!("{status:?}") };
    buffer
}

#[test]
fn a_buffer_outlives_the_worker_that_made_it() {
    let mut keeper = keeper(&[]);
    let mut first = worker(&keeper);
    assert_eq!(first.ask(&format!("create weights {}", 3 * G)), "created ReadWrite");
    assert_eq!(first.ask("read 0"), "0");
    assert_eq!(first.ask(&format!("write {G} 42")), "written");
    let held = only(&status(&keeper)).clone();
    assert_eq!((held.name.as_str(), held.bytes, held.lease), ("weights", 3 * G, LeaseState::Held));
    let holders: Vec<(u32, bool)> = held.holders.iter().map(|it| (it.pid, it.writes)).collect();
    assert_eq!(holders, [(first.pid(), true)]);
    first.kill();
    let left = wait(&keeper, |status| only(status).holders.is_empty());
    assert_eq!(only(&left).lease, LeaseState::Ends(Duration::from_secs(60)));
    // Most of the lease later.
    keeper.ask("advance 59");
    let mut second = worker(&keeper);
    assert_eq!(second.ask(&format!("create weights {}", 3 * G)), "found Read");
    assert_eq!(second.ask(&format!("read {G}")), "42");
    let mut third = worker(&keeper);
    assert_eq!(third.ask("open weights rw"), "Access");
    assert_eq!(third.ask("open weights r"), "opened");
    assert_eq!(third.ask(&format!("read {G}")), "42");
    assert_eq!(third.ask("write 0 1"), "NotPermitted");
    assert_eq!(third.ask("force"), "CUDA_ERROR_INVALID_VALUE (1)");
    // The successor of the one that was killed may write, and others see it.
    let mut heir = worker(&keeper);
    assert_eq!(heir.ask(&format!("create weights {} succeed", 3 * G)), "found ReadWrite");
    assert_eq!(heir.ask("write 0 7"), "written");
    assert_eq!(third.ask("read 0"), "7");
    assert_eq!(second.ask(&format!("create weights {} succeed", 3 * G)), "found Read");
    assert_eq!(only(&status(&keeper)).holders.len(), 3);
    for mut it in [second, third, heir] {
        assert_eq!(it.ask("end"), "clean");
    }
    wait(&keeper, |status| only(status).holders.is_empty());
    // A new lease, from now on.
    keeper.ask("advance 59");
    assert_eq!(only(&status(&keeper)).lease, LeaseState::Ends(Duration::from_secs(1)));
    keeper.ask("advance 1");
    wait(&keeper, |status| status.buffers.is_empty());
    wait_empty(&mut keeper);
    assert_eq!(keeper.ask("end"), "clean");
}

#[test]
fn of_workers_at_the_same_time_one_creates() {
    let mut keeper = keeper(&[("VMM_SHARE_TEST_LEASE_MS", "0")]);
    let mut workers: Vec<Second> = (0..4).map(|_| worker(&keeper)).collect();
    for round in 0..5 {
        for worker in &mut workers {
            worker.order(&format!("create round-{round} {G} second others"));
        }
        let answers: Vec<String> = workers.iter_mut().map(|it| it.answer().unwrap()).collect();
        let created = answers.iter().filter(|it| *it == "created ReadWrite").count();
        let found = answers.iter().filter(|it| *it == "found ReadWrite").count();
        assert_eq!((created, found), (1, 3), "{answers:?}");
    }
    for mut worker in workers {
        assert_eq!(worker.ask("end"), "clean");
    }
    // A lease of zero does not end.
    let left = wait(&keeper, |status| status.clients == 1);
    assert_eq!(left.buffers.len(), 5);
    assert!(left.buffers.iter().all(|it| it.lease == LeaseState::UntilReleased), "{left:?}");
    let mut last = worker(&keeper);
    assert_eq!(last.ask("release round-9"), "Unknown");
    for round in 0..5 {
        assert_eq!(last.ask(&format!("release round-{round}")), "released");
    }
    assert_eq!(keeper.ask("memory"), "0");
    assert_eq!(keeper.ask("end"), "clean");
}

#[test]
fn limits_are_refused_before_memory_is_made() {
    let (own, total) = ((4 * G).to_string(), (6 * G).to_string());
    let mut keeper = keeper(&[
        ("VMM_SHARE_TEST_CLIENT_BYTES", own.as_str()),
        ("VMM_SHARE_TEST_TOTAL_BYTES", &total),
    ]);
    let (mut first, mut second) = (worker(&keeper), worker(&keeper));
    assert_eq!(first.ask(&format!("create a {}", 5 * G)), "Limit");
    // A byte beyond whole chunks is a chunk.
    assert_eq!(first.ask(&format!("create a {}", 4 * G + 1)), "Limit");
    assert_eq!(first.ask(&format!("create a {}", u64::MAX)), "Limit");
    assert_eq!(keeper.ask("memory"), "0");
    assert_eq!(first.ask(&format!("create a {}", 4 * G)), "created ReadWrite");
    assert_eq!(first.ask("create b 1"), "Limit");
    assert_eq!(second.ask(&format!("create b {}", 3 * G)), "Limit");
    assert_eq!(second.ask(&format!("create b {}", 2 * G)), "created ReadWrite");
    assert_eq!(second.ask(&format!("create a {}", 2 * G)), "Differs");
    assert_eq!(second.ask(&format!("create a {} second", 4 * G)), "Differs");
    assert_eq!(second.ask("open nothing r"), "Unknown");
    assert_eq!(status(&keeper).bytes(), 6 * G);
    // What was refused holds nothing; what is left counts for nobody but the whole.
    assert_eq!(only_holder(&keeper, "a"), first.pid());
    assert_eq!(second.ask("release b"), "released");
    assert_eq!(second.ask("check"), "Withdrawn");
    assert_eq!(first.ask("leave a"), "left");
    assert_eq!(first.ask(&format!("create c {}", 3 * G)), "Limit");
    assert_eq!(first.ask(&format!("create c {}", 2 * G)), "created ReadWrite");
    assert_eq!((first.ask("end"), second.ask("end")), ("clean".into(), "clean".into()));
    assert_eq!(keeper.ask("end"), "clean");
}

fn only_holder(keeper: &Second, name: &str) -> u32 {
    let status = status(keeper);
    let buffer = status.buffers.iter().find(|it| it.name == name).unwrap();
    assert_eq!(buffer.holders.len(), 1, "{buffer:?}");
    buffer.holders[0].pid
}

#[test]
fn workers_keep_their_memory_when_the_owner_process_dies() {
    let mut keeper = keeper(&[]);
    let (mut writer, mut reader) = (worker(&keeper), worker(&keeper));
    assert_eq!(writer.ask(&format!("create weights {G}")), "created ReadWrite");
    assert_eq!(reader.ask("open weights r"), "opened");
    keeper.kill();
    assert_eq!(writer.ask("alive"), "false");
    assert_eq!(writer.ask("check"), "OwnerGone");
    assert_eq!(writer.ask("write 0 5"), "written");
    assert_eq!(reader.ask("read 0"), "5");
    for order in ["create more 1", "open weights r", "release weights", "leave weights"] {
        assert_eq!(reader.ask(order), "OwnerGone");
    }
    assert_eq!((writer.ask("end"), reader.ask("end")), ("clean".into(), "clean".into()));
    // Another one takes its place, and knows nothing of that.
    let mut next = Second::start("keeper", keeper.address.clone(), &[]);
    assert!(status(&next).buffers.is_empty());
    assert_eq!(next.ask("end"), "clean");
}

#[test]
fn an_exporter_that_is_no_owner_process_says_so() {
    let mut owner = Second::owner(&[]);
    let refused = OwnerStatus::ask(&owner.address, SOON).unwrap_err();
    let ShareError::Refused { reason: Refusal::Request, .. } = refused else { panic!("{refused}") };
    assert_eq!(owner.ask("end"), "clean");
}

/// A figure of a process: the first number behind the name of a field.
fn memory_kb(pid: u32) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.split_whitespace().next().unwrap().parse().unwrap()
}

/// The fewest descriptors of some looks: the connection of the last question is closed a moment later.
fn settled_descriptors(pid: u32) -> usize {
    let look = |_| {
        std::thread::sleep(Duration::from_millis(5));
        descriptors(pid)
    };
    (0..40).map(look).min().unwrap()
}

#[test]
fn two_hundred_workers_that_are_killed_leave_nothing() {
    let mut keeper = keeper(&[("VMM_SHARE_TEST_LEASE_MS", "1")]);
    let mut before = None;
    for round in 0..220 {
        let mut worker = worker(&keeper);
        worker.order(&format!("create round-{round} {}", 2 * G));
        // Some die before they have an answer.
        if round % 2 == 0 {
            assert_eq!(worker.answer().as_deref(), Some("created ReadWrite"));
        }
        worker.kill();
        wait(&keeper, |status| status.buffers.is_empty() && status.clients == 1);
        // What is made once and kept is there after some.
        if round == 20 {
            before = Some((settled_descriptors(keeper.pid()), memory_kb(keeper.pid())));
        }
    }
    wait_empty(&mut keeper);
    let (open, kb) = before.unwrap();
    assert_eq!(settled_descriptors(keeper.pid()), open);
    let grown = memory_kb(keeper.pid()).saturating_sub(kb);
    assert!(grown < 4096, "{grown} kB more");
    assert_eq!(keeper.ask("end"), "clean");
}
