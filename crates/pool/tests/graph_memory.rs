//! What is given out during a capture stays where it is until the graph is gone, and then comes back.
#![allow(clippy::unwrap_used, reason = "a failure ends the story")]

mod common;

use std::sync::Arc;

use common::graph::*;
use common::{HOME, Held, MIB, Rig};
use vmm_pool::{ChunkSize, Error, free_raw};
use vmm_sys::object::Stream;
use vmm_sys::sim::Sim;
use vmm_sys::{Call, CaptureMode, Driver, StreamHandle};

#[test]
fn graphs_replay_right_whatever_the_pool_does_between() {
    let rig = busy_rig(false);
    let aside = Stream::create(&rig.driver, HOME).unwrap();
    let bystander = rig.lane.alloc(MIB).unwrap();
    fill(&rig, &rig.stream, &bystander, 0xB0B0);
    let mut graphs = Vec::new();
    for value in [1000, 2000, 3000] {
        let out = rig.lane.alloc(4 * WORDS).unwrap();
        let scope = rig.lane.capture().unwrap();
        let graph = capture_chain(&rig, &out, value);
        graphs.push((graph, scope.finish(), out, value));
    }
    let private_bytes = rig.stats().private_bytes;
    assert_eq!(private_bytes, graphs.iter().map(|it| it.1.mapped_bytes()).sum::<u64>());
    assert!(private_bytes >= 9 * MIB);
    for round in 0..6 {
        let before = rig.driver.ledger().snapshot();
        churn(&rig, &rig.lane, &aside, round);
        let calls = rig.driver.ledger().snapshot().since(&before);
        assert!(calls.of(Call::MemUnmap) > 5, "chunks move: {calls}");
        for (graph, _, out, value) in &graphs {
            graph.launch(&rig.stream);
            rig.stream.synchronize().unwrap();
            assert!(holds(out, *value), "round {round}, graph of {value}");
        }
        assert!(holds(&bystander, 0xB0B0), "round {round}");
        assert_eq!(rig.stats().private_bytes, private_bytes);
    }
    // Memory that is asked for while the graphs live is no memory of theirs.
    while let Some((graph, memory, out, _)) = graphs.pop() {
        drop((graph, memory, out));
        let left: u64 = graphs.iter().map(|it| it.1.mapped_bytes()).sum();
        assert_eq!(rig.stats().private_bytes, left);
    }
    drop((bystander, aside));
    rig.pool.trim(HOME).unwrap();
    assert_eq!(rig.stats().held_bytes, 0);
    rig.end();
}

#[test]
fn memory_comes_back_behind_the_launches_of_its_graph() {
    let rig = Rig::new(|b| b.chunk(ChunkSize::Fixed(2 * MIB)));
    let far = Stream::create(&rig.driver, HOME).unwrap();
    let out = rig.lane.alloc(4 * WORDS).unwrap();
    for on_its_own_stream in [true, false] {
        let scope = rig.lane.capture().unwrap();
        let graph = capture_chain(&rig, &out, 5);
        let memory = scope.finish();
        let private_bytes = rig.stats().private_bytes;
        assert!(private_bytes > 0);
        let stream = if on_its_own_stream { &rig.stream } else { &far };
        memory.launched_on(stream).unwrap();
        memory.keep(rig.lane.alloc(512).unwrap()); // as if the graph used it
        let held = Held::new(&rig.sim, stream.handle());
        graph.launch(stream);
        let calls = rig.calls(|| drop((graph, memory.clone(), memory)));
        assert_eq!(calls.of(Call::MemUnmap), 0, "it is in flight: {calls}");
        let stats = rig.stats();
        // In its own lane's order the kept buffer needs no gate.
        let kept = u64::from(!on_its_own_stream);
        assert_eq!((stats.buffers, stats.limbo_buffers), (1, kept));
        assert_eq!(stats.limbo_bytes, private_bytes + 512 * kept);
        assert_eq!(stats.private_bytes, 0);
        drop(held);
        let calls = rig.calls(|| drop(rig.lane.alloc(private_bytes).unwrap()));
        assert_eq!(calls.of(Call::MemCreate), 0, "from the graph's memory: {calls}");
        stream.synchronize().unwrap(); // no fault
        assert!(holds(&out, 5));
        rig.pool.trim(HOME).unwrap();
        assert_eq!(rig.stats().limbo_bytes, 0);
    }
    drop((out, far));
    rig.end();
}

#[test]
fn a_capture_that_spreads_is_followed() {
    let rig = busy_rig(false);
    let out = rig.lane.alloc(4 * WORDS).unwrap();
    let fork = Stream::create(&rig.driver, HOME).unwrap();
    let fork_lane = rig.pool.lane(&fork).unwrap();
    let bystander = Stream::create(&rig.driver, HOME).unwrap();
    let bystander_lane = rig.pool.lane(&bystander).unwrap();
    for joined in [true, false] {
        let scope = rig.lane.capture().unwrap();
        begin(&rig, &rig.stream, CaptureMode::Global);
        let from = rig.lane.alloc(3 * MIB).unwrap();
        fill(&rig, &rig.stream, &from, 77);
        order(&rig, &rig.stream, &fork);
        if joined {
            scope.join(&fork_lane).unwrap();
            scope.join(&fork_lane).unwrap(); // once
        }
        // Not joined: found out at the first miss.
        let mut across = fork_lane.alloc(9 * MIB).unwrap();
        copy(&rig, &fork, &across, &from);
        across.record_stream(&rig.stream).unwrap();
        order(&rig, &fork, &rig.stream);
        copy(&rig, &rig.stream, &out, &across);
        drop((across, from));
        assert_eq!(rig.stats().limbo_buffers, 1, "a branch may still be using it");
        // A lane beside the capture is left alone.
        drop(bystander_lane.alloc(9 * MIB).unwrap());
        let private_bytes = rig.stats().private_bytes + rig.stats().limbo_bytes;
        assert_eq!(private_bytes, scope.memory().mapped_bytes());
        assert!(private_bytes >= 12 * MIB);
        let graph = Graph::end(&rig, &rig.stream);
        let memory = scope.finish();
        for round in 0..3 {
            churn(&rig, &fork_lane, &rig.stream, round);
            graph.launch(&bystander);
            bystander.synchronize().unwrap();
            assert!(holds(&out, 77), "joined {joined}, round {round}");
            fill(&rig, &rig.stream, &out, 0);
            rig.stream.synchronize().unwrap();
        }
        assert_eq!(rig.stats().private_bytes, memory.mapped_bytes());
        drop((graph, memory));
        assert_eq!(rig.stats().private_bytes, 0);
        rig.pool.trim(HOME).unwrap();
    }
    drop((out, fork_lane, fork, bystander_lane, bystander));
    rig.end();
}

#[test]
fn memory_of_every_branch_waits_for_launches_on_every_captured_stream() {
    let rig = Rig::new(|b| b.chunk(ChunkSize::Fixed(2 * MIB)));
    let out = rig.lane.alloc(4 * WORDS).unwrap();
    let branch = Stream::create(&rig.driver, HOME).unwrap();
    let branch_lane = rig.pool.lane(&branch).unwrap();
    for launched_on in [&rig.stream, &branch] {
        let scope = rig.lane.capture().unwrap();
        begin(&rig, &rig.stream, CaptureMode::Global);
        scope.join(&branch_lane).unwrap();
        let own = rig.lane.alloc(2 * MIB).unwrap();
        order(&rig, &rig.stream, &branch);
        let other = branch_lane.alloc(2 * MIB).unwrap();
        fill(&rig, &branch, &other, 8);
        copy(&rig, &branch, &own, &other);
        order(&rig, &branch, &rig.stream);
        copy(&rig, &rig.stream, &out, &own);
        drop((own, other));
        let graph = Graph::end(&rig, &rig.stream);
        let memory = scope.finish();
        let held = Held::new(&rig.sim, launched_on.handle());
        graph.launch(launched_on);
        let calls = rig.calls(|| drop((graph, memory)));
        assert_eq!(calls.of(Call::MemUnmap), 0, "it is in flight: {calls}");
        assert_eq!(rig.stats().limbo_bytes, 4 * MIB);
        drop(held);
        launched_on.synchronize().unwrap(); // no fault
        assert!(holds(&out, 8));
        rig.pool.trim(HOME).unwrap();
        assert_eq!(rig.stats().limbo_bytes, 0);
    }
    drop((out, branch_lane, branch));
    rig.end();
}

#[test]
fn graphs_that_never_run_together_can_share_their_memory() {
    let rig = busy_rig(false);
    let outs = [rig.lane.alloc(4 * WORDS).unwrap(), rig.lane.alloc(4 * WORDS).unwrap()];
    let scope = rig.lane.capture().unwrap();
    let first = capture_chain(&rig, &outs[0], 10);
    let memory = scope.finish();
    let mapped_bytes = memory.mapped_bytes();
    let scope = rig.lane.capture_into(&memory).unwrap();
    let second = capture_chain(&rig, &outs[1], 20);
    let shared = scope.finish();
    assert_eq!((shared.mapped_bytes(), rig.stats().private_bytes), (mapped_bytes, mapped_bytes));
    drop(memory); // each graph has its own
    for _ in 0..3 {
        first.launch(&rig.stream);
        second.launch(&rig.stream);
        rig.stream.synchronize().unwrap();
        assert!(holds(&outs[0], 10) && holds(&outs[1], 20));
        churn(&rig, &rig.lane, &rig.stream, 9);
    }
    drop((first, second, shared, outs));
    assert_eq!(rig.stats().private_bytes, 0);
    rig.end();
}

#[test]
fn scopes_end_well_however_they_end() {
    let rig = Rig::new(|b| b.chunk(ChunkSize::Fixed(2 * MIB)));
    let kept = rig.lane.alloc(3 * MIB).unwrap();
    let kept_address = kept.address();
    let scope = rig.lane.capture().unwrap();
    assert!(matches!(rig.lane.capture(), Err(Error::CaptureOpen)));
    let outlives = rig.lane.alloc(2 * MIB).unwrap();
    let plain = rig.lane.alloc_raw(MIB).unwrap();
    let address = outlives.address();
    // Warm requests make no driver call here either.
    let calls = rig.calls(|| {
        drop(rig.lane.alloc(MIB).unwrap());
        free_raw(plain, MIB).unwrap();
        free_raw(rig.lane.alloc_raw(MIB).unwrap(), MIB).unwrap();
    });
    assert_eq!(calls.total(), 0, "{calls}");
    scope.memory().keep(kept);
    let memory = scope.finish();
    assert!(rig.lane.capture().is_ok(), "the lane is free again, and the scope given up");
    // Live buffers are live; what is kept and free is private.
    let stats = rig.stats();
    assert_eq!(stats.live_bytes, 5 * MIB);
    assert_eq!(stats.private_bytes, memory.mapped_bytes() - 2 * MIB);
    assert_eq!((stats.lanes, stats.buffers), (1, 2));
    drop(memory);
    // A buffer outlives the memory it came from, and the kept one went with it.
    assert_eq!((rig.stats().private_bytes, rig.stats().live_bytes), (0, 2 * MIB));
    assert_eq!(outlives.address(), address);
    fill(&rig, &rig.stream, &outlives, 4);
    rig.stream.synchronize().unwrap();
    assert!(holds(&outlives, 4));
    drop(outlives);
    assert_eq!(rig.lane.alloc(3 * MIB).unwrap().address(), kept_address);
    // A lane that is closed in its scope.
    let other = Stream::create(&rig.driver, HOME).unwrap();
    let other_lane = rig.pool.lane(&other).unwrap();
    let before = other_lane.alloc(MIB).unwrap();
    let scope = other_lane.capture().unwrap();
    let buffer = other_lane.alloc(MIB).unwrap();
    rig.pool.close_lane(&other);
    assert!(matches!(other_lane.alloc(MIB), Err(Error::LaneClosed)));
    assert!(matches!(other_lane.capture(), Err(Error::LaneClosed)));
    drop(scope);
    assert!(matches!(other_lane.alloc(MIB), Err(Error::LaneClosed)));
    drop((buffer, before));
    assert_eq!(rig.stats().private_bytes, 0);
    drop((other_lane, other));
    rig.end();
}

#[test]
fn memory_of_graphs_outlives_every_other_handle_of_the_pool() {
    let rig = Rig::new(|b| b);
    let out = rig.lane.alloc(4 * WORDS).unwrap();
    let scope = rig.lane.capture().unwrap();
    let graph = capture_chain(&rig, &out, 6);
    let memory = scope.finish();
    let Rig { sim, driver, pool, stream, lane } = rig;
    drop((lane, pool));
    graph.launch(&stream);
    stream.synchronize().unwrap();
    assert!(holds(&out, 6));
    drop((graph, memory, out, stream, driver));
    sim.check_clean().unwrap();
}

#[test]
fn another_driver_is_told_apart() {
    let rig = Rig::new(|b| b);
    let memory = rig.lane.capture().unwrap().finish();
    let foreign: Arc<dyn Driver> = Sim::builder().build();
    let stream = Stream::create(&foreign, HOME).unwrap();
    assert!(matches!(memory.launched_on(&stream), Err(Error::UnknownDevice { .. })));
    // SAFETY: the legacy stream lives as long as its context.
    let legacy = unsafe { Stream::from_raw(&rig.driver, HOME, StreamHandle::NULL, None) }.unwrap();
    memory.launched_on(&legacy).unwrap();
    drop((stream, legacy, memory));
    rig.end();
}
