//! Any order of dropping, on any thread, also while unwinding.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use vmm_sys::sim::FaultPlan;
use vmm_sys::{Call, DeviceId, ResultCode};

use super::{G, MIB, builder, clean, lane, machine, write_on};
use crate::hold::keep_busy;
use crate::machine::{DriverChoice, Machine, MachineSpec, Skip};
use crate::orders::orders;

type Things = Vec<Box<dyn Any + Send>>;

fn in_order(things: Things, order: &[usize]) -> Things {
    let mut things: Vec<_> = things.into_iter().map(Some).collect();
    order.iter().filter_map(|index| things[*index].take()).collect()
}

/// Pool, lane, a buffer that another stream uses, both streams; with work that is not done.
fn things(machine: &Machine) -> Things {
    let pool = builder(machine).stock_marks(G, 4 * G).build().expect("a pool is built");
    let lane = lane(machine, &pool);
    let (own, other) = (lane.stream().clone(), machine.stream(0));
    let mut buffer = lane.alloc(3 * MIB).expect("a block is served");
    for (stream, value) in [(&own, 1), (&other, 1)] {
        keep_busy(stream, 100).expect("the stream is busy");
        write_on(stream, &buffer, value);
    }
    buffer.record_stream(&other).expect("the stream is recorded");
    vec![Box::new(pool), Box::new(lane), Box::new(buffer), Box::new(own), Box::new(other)]
}

pub(super) fn every_order_of_dropping_leaves_nothing(choice: DriverChoice) -> Result<(), Skip> {
    for order in orders(5) {
        let machine = machine(choice)?;
        in_order(things(&machine), &order).into_iter().for_each(drop);
        // Had work met memory that was gone, the device would be lost.
        machine.driver().device_synchronize(DeviceId(0)).unwrap_or_else(|error| {
            panic!("{order:?}: {error}");
        });
        clean(&machine);
    }
    Ok(())
}

pub(super) fn f_e1_a_pool_outlives_the_handles_of_its_devices(
    choice: DriverChoice,
) -> Result<(), Skip> {
    let spec = MachineSpec { devices: 2, ..MachineSpec::default() };
    for order in orders(5) {
        let machine = Machine::new(choice, spec)?;
        let pool = builder(&machine).device(DeviceId(0)).device(DeviceId(1));
        let pool = pool.build().expect("a pool is built");
        let streams = [machine.stream(0), machine.stream(1)];
        let blocks = streams.each_ref().map(|stream| {
            let lane = pool.lane(stream).expect("a lane is opened");
            lane.alloc(MIB).expect("a block is served")
        });
        let ([zero, one], [block, far_block]) = (streams, blocks);
        let things: Things = vec![
            Box::new(pool),
            Box::new(zero),
            Box::new(one),
            Box::new(block),
            Box::new(far_block),
        ];
        in_order(things, &order).into_iter().for_each(drop);
        clean(&machine);
    }
    Ok(())
}

pub(super) fn f_d3_buffers_are_dropped_on_threads_without_a_context(
    choice: DriverChoice,
) -> Result<(), Skip> {
    let machine = Machine::new(choice, MachineSpec { devices: 2, ..MachineSpec::default() })?;
    let driver = machine.driver().clone();
    let current = || driver.context_current().expect("the context can be asked for");
    let pool = builder(&machine).device(DeviceId(0)).device(DeviceId(1));
    let pool = pool.build().expect("a pool is built");
    let near = driver.primary_context_retain(DeviceId(0)).expect("a context is made");
    // SAFETY: the context is live: it was retained just now, and is released below.
    unsafe { driver.context_set_current(Some(near)) }.expect("it is made current");
    let far = pool.lane(&machine.stream(1)).expect("a lane is opened");
    let buffers: Vec<_> = (1..5).map(|n| far.alloc(n * MIB).expect("a block")).collect();
    assert_eq!(current(), Some(near), "the caller's context was changed");
    // A thread that never had one.
    std::thread::scope(|scope| {
        scope.spawn(|| {
            drop(buffers);
            let more = far.alloc(10 * MIB).expect("a block is served");
            more.write(0, &[1, 2, 3]).expect("bytes are written");
            drop(more);
            pool.trim(DeviceId(1)).expect("the device is trimmed");
            assert_eq!(driver.context_current().expect("it can be asked for"), None);
        });
    });
    drop((far, pool));
    assert_eq!(current(), Some(near), "the caller's context was changed");
    // SAFETY: no context is a valid choice.
    unsafe { driver.context_set_current(None) }.expect("none is made current");
    driver.primary_context_release(DeviceId(0)).expect("the context is given back");
    clean(&machine);
    Ok(())
}

/// Everything a program does with device 0 and device 1, while any context is current or none.
pub(super) fn f_d3_no_operation_changes_the_callers_context(
    choice: DriverChoice,
) -> Result<(), Skip> {
    let machine = Machine::new(choice, MachineSpec { devices: 2, ..MachineSpec::default() })?;
    let driver = machine.driver().clone();
    let contexts = [0, 1].map(|device| {
        let context = driver.primary_context_retain(DeviceId(device));
        context.expect("a context is made")
    });
    for current in [None, Some(contexts[0]), Some(contexts[1])] {
        // SAFETY: the contexts are live: they are released below.
        unsafe { driver.context_set_current(current) }.expect("it is made current");
        let unchanged = |what: &str| {
            let now = driver.context_current().expect("the context can be asked for");
            assert_eq!(now, current, "{what} changed the caller's context");
        };
        use_both_devices(&machine, &unchanged);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let none = |what: &str| {
                    let now = driver.context_current().expect("the context can be asked for");
                    assert_eq!(now, None, "{what} left a context behind");
                };
                use_both_devices(&machine, &none);
            });
        });
        unchanged("another thread");
    }
    // SAFETY: no context is a valid choice.
    unsafe { driver.context_set_current(None) }.expect("none is made current");
    for device in [0, 1] {
        driver.primary_context_release(DeviceId(device)).expect("the context is given back");
    }
    clean(&machine);
    Ok(())
}

/// A pool over both devices: allocations, frees, errors, moves and ends. `check` is called after
/// each.
fn use_both_devices(machine: &Machine, check: &dyn Fn(&str)) {
    let (zero, one) = (DeviceId(0), DeviceId(1));
    let pool = builder(machine).device(zero).device(one).limit_bytes(64 * G);
    let pool = pool.build().expect("a pool is built");
    check("building a pool");
    // Device 1 is opened first.
    let streams = [machine.stream(1), machine.stream(0)];
    for (stream, other) in [(&streams[0], &streams[1]), (&streams[1], &streams[0])] {
        let lane = pool.lane(stream).expect("a lane is opened");
        let mut crossed = lane.alloc(3 * G).expect("a block is served");
        check("growing");
        let warm = lane.alloc(1000).expect("a block is served");
        write_on(stream, &warm, 1);
        // An event of the other device's stream, made and recorded there.
        crossed.record_stream(other).expect("the stream is recorded");
        drop((crossed, warm));
        check("freeing");
        let error = lane.alloc(65 * G).expect_err("more than the limit");
        assert!(error.is_out_of_memory(), "{error}");
        check("a shortage");
        if let Ok(sim) = machine.sim() {
            for call in [Call::MemCreate, Call::MemMap, Call::MemSetAccess] {
                pool.trim(lane.device()).expect("the device is trimmed");
                sim.inject(FaultPlan::fail(ResultCode::UNKNOWN).on(call).once());
                lane.alloc(9 * G).expect_err("its call fails");
                check("a failure");
            }
        }
        let kept = lane.alloc(G).expect("a block is served");
        let unwound = catch_unwind(AssertUnwindSafe(|| {
            let _kept = kept;
            resume_unwind(Box::new("on purpose"));
        }));
        assert!(unwound.is_err());
        check("a drop while unwinding");
        let home = lane.device();
        let elastic = pool.elastic(home).capacity_bytes(4 * G).chunk_bytes(G).build();
        let elastic = elastic.expect("an elastic buffer is made");
        elastic.grow_to(2 * G).expect("it grows");
        elastic.write(0, &[7; 64]).expect("bytes are written");
        drop(elastic.use_on(stream).expect("it is used"));
        elastic.shrink_to(G).expect("it shrinks");
        check("an elastic buffer");
        pool.trim(home).expect("the device is trimmed");
        pool.verify().expect("the walker finds nothing");
        assert!(pool.close_lane(stream), "it is owned");
        check("a trim and a closed lane");
        drop((elastic, lane));
        check("the end of a lane");
    }
    drop((pool, streams));
    check("the end of a pool");
}

pub(super) fn drops_while_unwinding_leave_nothing(choice: DriverChoice) -> Result<(), Skip> {
    for order in orders(5).into_iter().step_by(7) {
        let machine = machine(choice)?;
        let things = in_order(things(&machine), &order);
        let unwound = catch_unwind(AssertUnwindSafe(|| {
            let _things = things;
            // Unwinds as a panic does, without its message in the log.
            resume_unwind(Box::new(order));
        }));
        assert!(unwound.is_err());
        clean(&machine);
    }
    Ok(())
}

pub(super) fn the_end_of_a_pool_with_a_thread_leaves_nothing(
    choice: DriverChoice,
) -> Result<(), Skip> {
    for round in 0..60 {
        let machine = machine(choice)?;
        let builder = builder(&machine).background(true).stock_marks(8 * MIB, 64 * MIB);
        let pool = builder.build().expect("a pool is built");
        let lane = lane(&machine, &pool);
        let buffer = lane.alloc(MIB * (1 + round % 9)).expect("a block is served");
        if round % 3 == 0 {
            std::thread::sleep(std::time::Duration::from_millis(2));
        }
        match round % 2 {
            0 => drop((buffer, lane, pool)),
            _ => drop((lane, pool, buffer)),
        }
        clean(&machine);
    }
    Ok(())
}

/// A kernel went wrong: every call in the context fails from then on.
pub(super) fn f_e2_a_lost_device_is_left_in_peace(choice: DriverChoice) -> Result<(), Skip> {
    for unwinding in [false, true] {
        let machine = machine(choice)?;
        let sim = machine.sim()?.clone();
        let pool = builder(&machine).build().expect("a pool is built");
        let lane = lane(&machine, &pool);
        let other = machine.stream(0);
        let mut buffers: Vec<_> =
            (0..1000).map(|_| lane.alloc(5000).expect("a block is served")).collect();
        for buffer in buffers.iter_mut().step_by(10) {
            buffer.record_stream(&other).expect("the stream is recorded");
        }
        sim.lose_context(DeviceId(0), ResultCode::ILLEGAL_ADDRESS);
        let calls = machine.driver().ledger().snapshot();
        // No answer is wrong here, but a panic or an endless loop would be.
        let _served_or_refused = lane.alloc(100 * MIB);
        pool.trim(DeviceId(0)).expect("trimming gives back what it can");
        let everything = (buffers, lane, pool, other);
        let ended = catch_unwind(AssertUnwindSafe(move || {
            let _everything = everything;
            if unwinding {
                resume_unwind(Box::new("on purpose"));
            }
        }));
        assert_eq!(ended.is_err(), unwinding);
        let calls = machine.driver().ledger().snapshot().since(&calls);
        assert!(calls.total() < 2000, "retried without end: {calls}");
    }
    Ok(())
}
