//! Every driver call of every operation fails once: nothing is lost, and nothing is left behind.

use vmm_kv::{KvError, PagedCache, PagedSequence};
use vmm_pool::Place;
use vmm_sys::ResultCode;
use vmm_sys::sim::FaultPlan;

use crate::harness::*;

type Written = (PagedSequence, Vec<u64>);

struct Story {
    machine: Machine,
    cache: PagedCache,
    one: Written,
    two: Written,
}

/// A sequence, and a fork of it that has gone on; holes in between, and a begun block in common.
fn story() -> Story {
    let machine =
        Machine::new(|sim| sim.device_bytes_of(0, 64 * G), |pool| pool.host_memory(0, 64 * G, 0));
    let cache = machine.builder().host_blocks(Place::HostNuma(0), 64).build().unwrap();
    let mut holes: Vec<PagedSequence> = Vec::new();
    let mut one = written(&cache, 4, 100);
    for round in 0..5 {
        holes.push(cache.open(9).unwrap());
        extend(&cache, &mut one, 3, 200 + 10 * round);
    }
    let mut two = (one.0.fork().unwrap(), one.1.clone());
    extend(&cache, &mut two, 4, 300);
    drop(holes);
    let mut story = Story { machine, cache, one, two };
    let Story { one, two, .. } = &mut story;
    // The last block is begun and both have it.
    two.0.truncate(0);
    two.0 = one.0.fork().unwrap();
    two.1 = one.1.clone();
    story
}

impl Story {
    fn check(&self) {
        self.cache.verify().unwrap();
        self.machine.pool.verify().unwrap();
        check(&self.cache, &self.one.0, &self.one.1);
        check(&self.cache, &self.two.0, &self.two.1);
    }
}

/// Fails the k-th call of `work`, for every k, each time in a story of its own.
fn fail_each_call(work: impl Fn(&mut Story) -> Result<(), KvError>) {
    let codes = [ResultCode::OUT_OF_MEMORY, ResultCode::INVALID_VALUE];
    for code in codes {
        let mut refused = 0;
        for k in 1.. {
            let mut story = story();
            let fired = story.machine.sim.faults_fired();
            story.machine.sim.inject(FaultPlan::fail(code).at(k).once());
            let outcome = work(&mut story);
            story.machine.sim.clear_faults();
            let is_over = story.machine.sim.faults_fired() == fired;
            if let Err(error) = &outcome {
                assert!(!is_over, "{error}");
                refused += 1;
                story.check();
                // It is as it was: the same succeeds.
                work(&mut story).unwrap();
            }
            story.check();
            let Story { machine, cache, one, two } = story;
            drop((one, two));
            assert_eq!(cache.stats().committed_bytes, 0, "call {k}");
            drop(cache);
            machine.end();
            if is_over {
                assert!(refused > 0, "no call of it matters");
                break;
            }
        }
    }
}

#[test]
fn an_open_that_fails_leaves_nothing() {
    fail_each_call(|story| {
        let sequences = story.cache.stats().sequences;
        let opened = story.cache.open(100);
        assert_eq!(story.cache.stats().sequences, sequences + u64::from(opened.is_ok()));
        opened.map(drop)
    });
}

#[test]
fn an_append_that_fails_leaves_the_sequence_as_it_was() {
    fail_each_call(|story| {
        let first = story.one.0.tokens();
        story.one.0.append(100)?;
        for token in 0..100 {
            write_quietly(story, first + token);
        }
        Ok(())
    });
}

/// The faults are for the operation.
fn write_quietly(story: &mut Story, token: u64) {
    story.machine.sim.clear_faults();
    write(&story.cache, &story.one.0, token, 700 + token);
    story.one.1.push(700 + token);
}

#[test]
fn a_copy_of_ones_own_that_fails_leaves_the_block_in_common() {
    fail_each_call(|story| {
        assert_eq!(story.one.0.blocks(), story.two.0.blocks());
        let first = story.one.0.tokens();
        let appended = story.one.0.append(1);
        match &appended {
            Ok(_) => write_quietly(story, first),
            Err(_) => assert_eq!(story.one.0.blocks(), story.two.0.blocks()),
        }
        let _second = story.two.0.fork();
        appended.map(|_| ())
    });
}

#[test]
fn packing_that_fails_moves_nothing() {
    fail_each_call(|story| {
        let before = story.one.0.blocks();
        let packed = story.cache.pack(u64::MAX);
        match &packed {
            Ok(packed) => assert!(packed.blocks > 0),
            Err(_) => assert_eq!(story.one.0.blocks(), before),
        }
        packed.map(|_| ())
    });
}

#[test]
fn parking_and_resuming_that_fail_change_nothing() {
    fail_each_call(|story| {
        // All is in common: parked alone it would have nothing of its own.
        story.two.0.truncate(8);
        story.two.1.truncate(8);
        let parked = story.one.0.park();
        assert_eq!(story.one.0.is_parked(), parked.is_ok());
        parked?;
        let resumed = story.one.0.resume();
        assert_eq!(story.one.0.is_parked(), resumed.is_err());
        resumed.map(|_| ())
    });
}
