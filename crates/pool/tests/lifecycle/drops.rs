//! Handles are dropped in every order, also while their thread unwinds: nothing panics, and the machine is
//! clean at the end. Lanes and devices: `tests/src/stories/drops.rs`.

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use vmm_pool::{Growth, Pool};
use vmm_sys::object::Stream;
use vmm_sys::sim::Sim;
use vmm_sys::{DeviceId, Driver};

use crate::common::HOME;
use crate::common::elastic::{G, machine};
use crate::orders::in_every_order;
use crate::scene::SECOND;

#[test]
fn elastic_buffers_their_guards_and_lenders_end_in_every_order() {
    in_every_order(|| {
        let machine =
            machine(2, |sim| sim.device_bytes_of(0, 4 * G), |pool| pool.lend(SECOND, 8 * G));
        let buffer = machine.buffer(0, 16 * G);
        buffer.grow(Growth::to(6 * G).borrow_from([SECOND])).unwrap();
        let stream = machine.stream(0);
        let guard = buffer.use_on(&stream).unwrap();
        // SAFETY: the address is this driver's, and its memory is there.
        unsafe { stream.fill(buffer.address(), 6 * G, 7) }.unwrap();
        let own = machine.buffer(1, 4 * G);
        own.grow_to(2 * G).unwrap();
        let hook = buffer.on_backing_change(|_| {});
        let (sim, pool, driver) =
            (machine.sim.clone(), machine.pool.clone(), machine.driver.clone());
        drop(machine);
        let things: [Box<dyn Any>; 5] = [
            Box::new((pool, driver)),
            Box::new(buffer),
            Box::new(guard),
            Box::new((own, hook)),
            Box::new(stream),
        ];
        (vec![sim], things)
    });
}

#[test]
fn moves_and_growth_behind_end_in_every_order() {
    in_every_order(|| {
        let machine = machine(2, |sim| sim, |pool| pool.background(true));
        let buffer = machine.buffer(0, 16 * G);
        buffer.grow_to(4 * G).unwrap();
        let (sim, pool) = (machine.sim.clone(), machine.pool.clone());
        let growth = buffer.grow_ahead(6 * G).unwrap();
        let migration = buffer.migrate_async(SECOND).unwrap();
        drop(machine);
        // The move under way keeps the buffer: the end of the pool waits for it, and comes last.
        let ended = Waited(migration.clone());
        let things: [Box<dyn Any>; 4] =
            [Box::new(pool), Box::new(buffer), Box::new(growth), Box::new((migration, ended))];
        (vec![sim], things)
    });
}

/// Waits for the end of a move when it is dropped.
struct Waited(vmm_pool::Migration);

impl Drop for Waited {
    fn drop(&mut self) {
        self.0.wait(Duration::from_secs(15));
    }
}

#[test]
fn captures_and_graph_memory_end_in_every_order() {
    in_every_order(|| {
        let sim = Sim::builder().build();
        let driver: Arc<dyn Driver> = sim.clone();
        let pool = Pool::builder(driver.clone()).background(false).build().unwrap();
        let stream = Stream::create(&driver, DeviceId(HOME.0)).unwrap();
        let lane = pool.lane(&stream).unwrap();
        let kept = lane.alloc(3 * G).unwrap();
        let scope = lane.capture().unwrap();
        let inside = lane.alloc(2 * G).unwrap();
        let memory = scope.memory().clone();
        memory.keep(kept);
        let things: [Box<dyn Any>; 5] = [
            Box::new((pool, driver)),
            Box::new((lane, stream)),
            Box::new(scope),
            Box::new(memory),
            Box::new(inside),
        ];
        (vec![sim], things)
    });
}
