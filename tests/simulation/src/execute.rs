//! One run, from its seed to its clean end.

use std::sync::Arc;

use shuttle::thread;
use vmm_sys::object::{failed_drops, retry_failed_drops};

use crate::actor::Actor;
use crate::caches::Caches;
use crate::notes::Notes;
use crate::rng::Rng;
use crate::setup::Setup;
use crate::time;
use crate::world::World;

/// The body of an execution. A run that goes wrong panics.
pub(crate) fn run(seed: u64, notes: &Arc<Notes>) {
    let setup = Setup::of(seed);
    notes.line(format!("{setup:?}"));
    note_setup(&setup, notes);
    let world = Arc::new(World::new(setup, seed, notes.clone()));
    notes.set_machines(vec![world.sim.clone(), world.other.clone()]);
    let hand = thread::spawn({
        let world = world.clone();
        move || time::pass(&world, seed)
    });
    // All before the first begins: what makes an actor must not fail.
    let actors: Vec<Actor> =
        (0..world.setup.actors).map(|number| Actor::new(number, world.clone(), seed)).collect();
    let threads = actors.into_iter().map(|mut actor| {
        thread::spawn(move || {
            actor.act();
            actor
        })
    });
    let actors: Vec<_> = threads.collect();
    let mut actors: Vec<Actor> = actors.into_iter().map(|it| it.join().unwrap()).collect();
    note_faults(&world);
    world.sim.clear_faults();
    actors.iter_mut().for_each(Actor::wait_for_moves);
    world.end();
    hand.join().unwrap();
    if world.is_lost() {
        // Nothing can be relied upon, but that it ends, and quietly.
        drop(actors);
        drop(world);
        // Lanes whose gates nobody can ask keep what they have until the process ends.
        notes.shut_down();
        notes.set_machines(Vec::new());
        return;
    }
    end_of_actors(&world, &mut actors, seed);
    drop(actors);
    end_of_world(world);
    notes.set_machines(Vec::new());
}

fn note_setup(setup: &Setup, notes: &Notes) {
    let seen = [
        (setup.background, "background threads"),
        (setup.guard, "guard mode"),
        (setup.tight, "tight machines"),
        (setup.modelled_time, "modelled time"),
    ];
    for (_, name) in seen.into_iter().filter(|(is_so, _)| *is_so) {
        notes.cover(|coverage| coverage.feature(name));
    }
}

fn note_faults(world: &World) {
    for (call, code, times) in world.sim.faults_fired_by() {
        world.notes.cover(|coverage| match code {
            Some(code) => coverage.fault(call.name(), code.name().unwrap_or("?"), times),
            None => coverage.feature("driver calls slowed down"),
        });
    }
}

/// Everything is compared once more, and dropped, by whom chance says.
fn end_of_actors(world: &World, actors: &mut [Actor], seed: u64) {
    let mut rng = Rng::new(seed ^ 0xE4D);
    sound(world);
    while let Some(block) = world.take_offer(rng.next_u64()) {
        let at = rng.below(actors.len() as u64) as usize;
        actors[at].free_block(block);
    }
    for actor in actors.iter_mut() {
        actor.end_sequences();
        actor.end_graphs();
        actor.free_all();
    }
    for device in world.setup.devices() {
        world.pool.trim(device).expect("a device is trimmed");
    }
    for elastic in world.elastics() {
        let woken = elastic.buffer.wake();
        assert!(woken.is_ok() || world.setup.tight, "{}: {woken:?}", elastic.name);
    }
    actors.iter_mut().for_each(Actor::check_parts);
    for device in world.setup.devices() {
        world.driver.device_synchronize(device).expect("no work met memory that was gone");
    }
    sound(world);
}

fn sound(world: &World) {
    if let Some(wrong) = world.notes.first_wrong() {
        panic!("{wrong}");
    }
    if let Err(wrong) = world.pool.verify() {
        panic!("the pool is not sound: {wrong}");
    }
    if let Some(Err(wrong)) = world.caches.as_ref().map(Caches::verify) {
        panic!("a cache is not sound: {wrong}");
    }
}

/// The driver has everything again.
fn end_of_world(world: Arc<World>) {
    let Some(world) = Arc::into_inner(world) else { panic!("somebody has the world still") };
    let has_thread = world.setup.background || world.setup.balance;
    let World { sim, other, driver, pool, shared, own, caches, streams, notes, .. } = world;
    drop((shared, own, caches));
    let stats = pool.stats();
    for (device, stats) in &stats.devices {
        assert_eq!((stats.live_bytes, stats.buffers), (0, 0), "{device}: {stats:?}");
        // A thread of the pool that changes an elastic buffer at the moment ends it when it is done.
        let elastic = (stats.elastic_bytes, stats.elastic_buffers);
        assert!(has_thread || elastic == (0, 0), "{device}: {stats:?}");
    }
    drop((streams, pool));
    assert_eq!(retry_failed_drops(&driver), 0, "{:?}", failed_drops(&driver));
    world_line(&notes, &sim);
    drop(driver);
    sim.check_clean().expect("nothing is left");
    other.check_clean().expect("nothing is left in the other process");
}

/// What two equal runs have in common.
fn world_line(notes: &Notes, sim: &vmm_sys::sim::Sim) {
    let calls = vmm_sys::Driver::ledger(sim).snapshot();
    notes.line(format!("{} ns, {calls}", sim.now_ns()));
}
