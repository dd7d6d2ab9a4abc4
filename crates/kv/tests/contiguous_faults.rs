//! Every driver call of every operation fails once: nothing is lost, and the next try succeeds.
#![allow(clippy::unwrap_used, reason = "a failure ends the story")]

mod common;

use common::{Machine, ORDERS, T, append, check, machine, read, write};
use vmm_kv::{ContiguousCache, KvError, Order, Sequence};
use vmm_pool::Place;
use vmm_sys::ResultCode;
use vmm_sys::sim::FaultPlan;

const HOST: Place = Place::HostNuma(0);
/// A sequence of so many tokens, each written.
const TOKENS: u64 = 2 * T + 3;

struct Stage {
    machine: Machine,
    cache: ContiguousCache,
    sequences: Vec<Sequence>,
}

impl Stage {
    fn new(order: Order, keep_idle_bytes: u64) -> Stage {
        let machine = machine(1, |sim| sim, |pool| pool.host_memory(0, 1 << 20, 0));
        let builder = machine.builder().order(order).keep_idle_bytes(keep_idle_bytes);
        let cache = builder.build().unwrap();
        let mut first = cache.open(0).unwrap();
        append(&machine, &cache, &mut first, TOKENS, 1);
        Stage { machine, cache, sequences: vec![first] }
    }

    /// All tokens are there, and everything that must hold does.
    fn check(&self) {
        check(&self.cache);
        self.machine.stats(0);
        for sequence in &self.sequences {
            read(&self.machine, &self.cache, sequence, 0..TOKENS.min(sequence.tokens()), 1);
        }
    }

    fn end(self) {
        let Stage { machine, cache, sequences } = self;
        drop(sequences);
        cache.settle().unwrap();
        cache.release_idle(0).unwrap();
        check(&cache);
        assert_eq!(cache.stats().committed_bytes, 0);
        drop(cache);
        machine.end();
    }
}

/// Fails the k-th call of `work`, for every k.
fn fail_each_call(
    order: Order,
    prepare: impl Fn(&mut Stage),
    work: impl Fn(&mut Stage) -> Result<(), KvError>,
) {
    let mut failures = 0;
    for k in 1.. {
        let mut stage = Stage::new(order, 0);
        prepare(&mut stage);
        stage.check();
        let before: Vec<u64> = stage.sequences.iter().map(Sequence::tokens).collect();
        let fired = stage.machine.sim.faults_fired();
        stage.machine.sim.inject(FaultPlan::fail(ResultCode::UNKNOWN).at(k).once());
        let outcome = work(&mut stage);
        stage.machine.sim.clear_faults();
        let is_over = stage.machine.sim.faults_fired() == fired;
        stage.check();
        if let Err(error) = outcome {
            failures += 1;
            let after: Vec<u64> = stage.sequences.iter().map(Sequence::tokens).collect();
            assert_eq!(after, before, "call {k} failed: {error}");
            work(&mut stage).unwrap();
            stage.check();
        }
        stage.end();
        if is_over {
            assert!(failures > 0, "no call of it matters");
            return;
        }
    }
}

#[test]
fn open_fails_at_any_call() {
    for order in ORDERS {
        fail_each_call(
            order,
            |_| {},
            |stage| {
                let sequence = stage.cache.open(4 * T)?;
                write(&stage.machine, &stage.cache, &sequence, 0..4 * T, 1);
                stage.sequences.push(sequence);
                Ok(())
            },
        );
    }
}

#[test]
fn append_fails_at_any_call() {
    for order in ORDERS {
        fail_each_call(
            order,
            |_| {},
            |stage| {
                let first = stage.sequences[0].append(10 * T)?;
                write(&stage.machine, &stage.cache, &stage.sequences[0], first..first + 10 * T, 2);
                Ok(())
            },
        );
    }
}

#[test]
fn fork_fails_at_any_call() {
    for order in ORDERS {
        fail_each_call(
            order,
            |_| {},
            |stage| {
                let child = stage.sequences[0].fork()?;
                stage.sequences.push(child);
                Ok(())
            },
        );
    }
}

#[test]
fn the_first_append_of_a_fork_fails_at_any_call() {
    for order in ORDERS {
        fail_each_call(
            order,
            |stage| {
                let child = stage.sequences[0].fork().unwrap();
                stage.sequences.push(child);
            },
            |stage| {
                let first = stage.sequences[1].append(1)?;
                write(&stage.machine, &stage.cache, &stage.sequences[1], first..first + 1, 2);
                Ok(())
            },
        );
    }
}

#[test]
fn park_and_resume_fail_at_any_call() {
    for order in ORDERS {
        let fork = |stage: &mut Stage| {
            let child = stage.sequences[0].fork().unwrap();
            stage.sequences.push(child);
        };
        fail_each_call(order, fork, |stage| stage.sequences[0].park(HOST).map(drop));
        let park = |stage: &mut Stage| {
            stage.sequences[0].park(HOST).unwrap();
        };
        fail_each_call(order, park, |stage| stage.sequences[0].resume().map(drop));
    }
}

#[test]
fn memory_that_cannot_be_taken_away_now_is_taken_away_later() {
    for order in ORDERS {
        for k in 1..12 {
            let mut stage = Stage::new(order, 0);
            let child = stage.sequences[0].fork().unwrap();
            let other = stage.cache.open(3 * T).unwrap();
            stage.machine.sim.inject(FaultPlan::fail(ResultCode::UNKNOWN).at(k).once());
            drop((child, other));
            stage.sequences[0].truncate(T);
            stage.machine.sim.clear_faults();
            check(&stage.cache);
            // Nobody gets what is another's.
            let mut again = stage.cache.open(0).unwrap();
            append(&stage.machine, &stage.cache, &mut again, TOKENS, 1);
            stage.sequences.push(again);
            stage.check();
            stage.end();
        }
    }
}
