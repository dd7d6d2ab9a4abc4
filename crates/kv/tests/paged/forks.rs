//! Sequences that have blocks in common.

use vmm_kv::{KvError, PagedCache, PagedSequence};

use crate::harness::*;

fn fork(cache: &PagedCache, parent: &mut (PagedSequence, Vec<u64>)) -> (PagedSequence, Vec<u64>) {
    let child = (parent.0.fork().unwrap(), parent.1.clone());
    check(cache, &child.0, &child.1);
    child
}

#[test]
fn a_fork_costs_nothing_until_one_of_them_appends() {
    let machine = Machine::small(64);
    let cache = machine.builder().build().unwrap();
    let mut parent = written(&cache, 10, 100);
    let committed = cache.stats().committed_bytes;
    let calls = machine.calls();
    let mut child = (parent.0.fork().unwrap(), parent.1.clone());
    assert_eq!(machine.calls(), calls);
    assert_eq!(child.0.blocks(), parent.0.blocks());
    let stats = cache.stats();
    assert_eq!((stats.shared_bytes, stats.committed_bytes), (3 * G / 4, committed));
    assert_eq!((stats.tokens, stats.sequences), (20, 2));
    // Whoever appends first gets a copy of the block that both have begun; the other keeps it.
    extend(&cache, &mut parent, 1, 200);
    assert_eq!((parent.0.blocks(), child.0.blocks()), (vec![0, 1, 3], vec![0, 1, 2]));
    check(&cache, &child.0, &child.1);
    let calls = machine.calls();
    assert_eq!(child.0.append(1).unwrap(), 10);
    assert_eq!(machine.calls(), calls, "the block is its own by now");
    write(&cache, &child.0, 10, 300);
    child.1.push(300);
    check(&cache, &parent.0, &parent.1);
    check(&cache, &child.0, &child.1);
    cache.verify().unwrap();
    drop(parent);
    check(&cache, &child.0, &child.1);
    drop((child, cache));
    machine.end();
}

#[test]
fn many_forks_diverge_each_with_bytes_of_its_own() {
    let machine = Machine::small(64);
    let cache = machine.builder().build().unwrap();
    let mut parent = written(&cache, 14, 1000);
    let mut children: Vec<_> = (0..5).map(|_| fork(&cache, &mut parent)).collect();
    let mut grandchild = fork(&cache, &mut children[2]);
    for (n, child) in children.iter_mut().enumerate() {
        extend(&cache, child, 1 + n as u64, 2000 + 100 * n as u64);
    }
    extend(&cache, &mut grandchild, 3, 3000);
    extend(&cache, &mut parent, 7, 4000);
    for (sequence, stamps) in children.iter().chain([&parent, &grandchild]) {
        check(&cache, sequence, stamps);
    }
    cache.verify().unwrap();
    drop((parent, children, grandchild));
    cache.verify().unwrap();
    assert_eq!(cache.stats().committed_bytes, 0);
    drop(cache);
    machine.end();
}

#[test]
fn a_fork_of_a_part_and_truncation_into_what_is_shared_leave_the_other_alone() {
    let machine = Machine::small(64);
    let cache = machine.builder().build().unwrap();
    let mut parent = written(&cache, 12, 100);
    let mut child = (parent.0.fork_at(6).unwrap(), parent.1[..6].to_vec());
    check(&cache, &child.0, &child.1);
    // Within the parent's second block, which it had filled.
    extend(&cache, &mut child, 5, 200);
    check(&cache, &parent.0, &parent.1);
    let third = fork(&cache, &mut parent);
    // A full block that both have, cut short: it is no longer the parent's to write.
    parent.0.truncate(11);
    parent.1.truncate(11);
    extend(&cache, &mut parent, 1, 300);
    check(&cache, &third.0, &third.1);
    parent.0.truncate(0);
    parent.1.clear();
    assert_eq!(parent.0.blocks(), [0; 0]);
    extend(&cache, &mut parent, 2, 400);
    for (sequence, stamps) in [&parent, &child, &third] {
        check(&cache, sequence, stamps);
    }
    let empty = parent.0.fork_at(0).unwrap();
    assert_eq!((empty.tokens(), empty.blocks()), (0, vec![]));
    assert!(matches!(parent.0.fork_at(3), Err(KvError::TooLong { .. })));
    cache.verify().unwrap();
    drop((parent, child, third, empty, cache));
    machine.end();
}
