//! Memory whose GPU work is not known to be finished: not reused, not unmapped, not forgotten.

use std::time::Duration;

use vmm_pool::ChunkSize;
use vmm_sys::sim::FaultPlan;
use vmm_sys::{Call, CaptureMode, CaptureStatus, DeviceId, ResultCode};

use super::{G, Later, MIB, builder, clean, lane, machine, pool, sound, stats, write_on};
use crate::hold::keep_busy;
use crate::machine::{DriverChoice, Machine, MachineSpec, Skip};

pub(super) fn f_c3_a_slow_event_hides_no_finished_one(choice: DriverChoice) -> Result<(), Skip> {
    // The slow one first, and last.
    for slow_at in [0, 100] {
        let machine = machine(choice)?;
        let pool = pool(&machine);
        let lane = lane(&machine, &pool);
        let (slow, quick) = (machine.stream(0), machine.stream(0));
        let hold = machine.hold(&slow).expect("the stream is held");
        let mut buffers: Vec<_> =
            (0..=100).map(|_| lane.alloc(G).expect("a block is served")).collect();
        for (index, buffer) in buffers.iter_mut().enumerate() {
            let stream = if index == slow_at { &slow } else { &quick };
            write_on(stream, buffer, 1);
            buffer.record_stream(stream).expect("the stream is recorded");
        }
        quick.synchronize().expect("the quick stream goes on");
        drop(buffers);
        let held = stats(&pool).held_bytes;
        let again: Vec<_> = (0..100).map(|_| lane.alloc(G).expect("a freed block")).collect();
        let after = sound(&pool);
        assert_eq!((after.held_bytes, after.limbo_buffers), (held, 1));
        hold.release().expect("the held work went well");
        drop((again, lane, pool, slow, quick));
        clean(&machine);
    }
    Ok(())
}

pub(super) fn f_c4_streams_may_be_dropped_before_their_work_is_done(
    choice: DriverChoice,
) -> Result<(), Skip> {
    let machine = machine(choice)?;
    let pool = builder(&machine).limit_bytes(32 * G).build().expect("a pool is built");
    for value in 0..32 {
        let lane = lane(&machine, &pool);
        let buffer = lane.alloc(G).expect("a block below the limit");
        keep_busy(lane.stream(), 20_000).expect("the stream is busy");
        write_on(lane.stream(), &buffer, value);
        if value % 2 == 0 {
            pool.close_lane(lane.stream());
        }
        // Buffer, lane and stream go, in this order, with their work ahead of them.
    }
    let lane = lane(&machine, &pool);
    let all = lane.alloc(32 * G).expect("what the streams freed comes back");
    // A fault of their work would show here.
    lane.stream().synchronize().expect("no work touched memory that was gone");
    sound(&pool);
    drop((all, lane, pool));
    clean(&machine);
    Ok(())
}

pub(super) fn f_c5_a_trim_waits_for_the_work(choice: DriverChoice) -> Result<(), Skip> {
    let machine = machine(choice)?;
    let pool = pool(&machine);
    let lane = lane(&machine, &pool);
    let buffer = lane.alloc(G).expect("the only block of its chunk");
    let later = Later::release(&machine, lane.stream());
    write_on(lane.stream(), &buffer, 5);
    drop(buffer);
    let given = pool.trim(DeviceId(0)).expect("the device is trimmed");
    assert!(later.is_released(), "the work was not waited for");
    later.done();
    assert!(given >= G);
    assert_eq!(sound(&pool).held_bytes, 0);
    drop((lane, pool));
    clean(&machine);
    Ok(())
}

pub(super) fn f_c5_the_end_of_the_pool_waits_for_the_work(
    choice: DriverChoice,
) -> Result<(), Skip> {
    // The buffer goes before the pool, and after it.
    for before in [true, false] {
        let machine = machine(choice)?;
        let pool = pool(&machine);
        let lane = lane(&machine, &pool);
        let stream = lane.stream().clone();
        let buffer = lane.alloc(G).expect("the only block of its chunk");
        let later = Later::release(&machine, &stream);
        write_on(&stream, &buffer, 5);
        if before {
            drop(buffer);
            drop((lane, pool));
        } else {
            drop((lane, pool));
            drop(buffer);
        }
        assert!(later.is_released(), "the work was not waited for");
        later.done();
        drop(stream);
        clean(&machine);
    }
    Ok(())
}

pub(super) fn f_c5_two_recorded_streams_are_both_waited_for(
    choice: DriverChoice,
) -> Result<(), Skip> {
    let machine = machine(choice)?;
    let pool = pool(&machine);
    let lane = lane(&machine, &pool);
    let others = [machine.stream(0), machine.stream(0)];
    let mut buffer = lane.alloc(G).expect("the only block of its chunk");
    let laters = others.each_ref().map(|stream| Later::release(&machine, stream));
    for (stream, value) in others.iter().zip(1..) {
        write_on(stream, &buffer, value);
        buffer.record_stream(stream).expect("the stream is recorded");
        // Twice counts once.
        buffer.record_stream(stream).expect("the stream is recorded");
    }
    drop(buffer);
    pool.trim(DeviceId(0)).expect("the device is trimmed");
    assert!(laters.iter().all(Later::is_released), "one of them was not waited for");
    laters.into_iter().for_each(Later::done);
    assert_eq!(sound(&pool).held_bytes, 0);
    drop((others, lane, pool));
    clean(&machine);
    Ok(())
}

pub(super) fn f_c5_a_shrink_waits_for_the_work(choice: DriverChoice) -> Result<(), Skip> {
    let machine = machine(choice)?;
    let pool = pool(&machine);
    let streams = [machine.stream(0), machine.stream(0)];
    let builder = pool.elastic(DeviceId(0)).capacity_bytes(4 * G).chunk_bytes(G);
    let buffer = builder.build().expect("an elastic buffer is made");
    buffer.grow_to(2 * G).expect("it grows");
    let laters = streams.each_ref().map(|stream| Later::release(&machine, stream));
    for (stream, value) in streams.iter().zip(1..) {
        let _using = buffer.use_on(stream).expect("it is used");
        // SAFETY: the buffer's own address, committed.
        unsafe { stream.fill(buffer.address() + G, G, value) }.expect("the work is enqueued");
    }
    assert_eq!(buffer.shrink_to(G).expect("it shrinks"), G);
    // The shrink itself waits for nobody; what gives the memory back waits for both.
    pool.trim(DeviceId(0)).expect("the device is trimmed");
    if stats(&pool).held_bytes == G {
        assert!(laters.iter().all(Later::is_released), "one of them was not waited for");
    }
    laters.into_iter().for_each(Later::done);
    pool.trim(DeviceId(0)).expect("the device is trimmed");
    assert_eq!(sound(&pool).held_bytes, G);
    drop((buffer, pool, streams));
    clean(&machine);
    Ok(())
}

/// Kernels of milliseconds, and no hand on them: what is unmapped under one is a sticky fault.
pub(super) fn f_c5_no_memory_goes_under_a_running_kernel(choice: DriverChoice) -> Result<(), Skip> {
    let machine = machine(choice)?;
    let pool = builder(&machine).chunk(ChunkSize::Fixed(G)).build().expect("a pool is built");
    let lane = lane(&machine, &pool);
    let other = machine.stream(0);
    for round in 0..20 {
        let mut buffer = lane.alloc(G).expect("the only block of its chunk");
        for stream in [lane.stream(), &other] {
            keep_busy(stream, 3000).expect("the stream is busy");
            write_on(stream, &buffer, round);
        }
        buffer.record_stream(&other).expect("the stream is recorded");
        drop(buffer);
        match round % 3 {
            0 => drop(pool.trim(DeviceId(0)).expect("the device is trimmed")),
            1 => drop(lane.alloc(2 * G).expect("a free chunk moves")),
            _ => {}
        }
        if round % 3 == 0 {
            assert_eq!(sound(&pool).held_bytes, 0, "round {round}");
        }
    }
    for stream in [lane.stream(), &other] {
        stream.synchronize().expect("no kernel met memory that was gone");
    }
    drop((lane, pool, other));
    clean(&machine);
    Ok(())
}

/// Two gates in one sweep: the first has passed and is forgotten, the second is made in its place.
pub(super) fn one_gate_is_never_taken_for_another(choice: DriverChoice) -> Result<(), Skip> {
    let machine = machine(choice)?;
    let pool = pool(&machine);
    let lane = lane(&machine, &pool);
    let quick = machine.stream(0);
    let mut crossed = lane.alloc(G).expect("a block is served");
    let own = lane.alloc(4 * G).expect("a block is served");
    crossed.record_stream(&quick).expect("the stream is recorded");
    drop(crossed);
    let later = Later::release(&machine, lane.stream());
    write_on(lane.stream(), &own, 5);
    drop(own);
    pool.trim(DeviceId(0)).expect("the device is trimmed");
    assert!(later.is_released(), "the lane's own stream was not waited for");
    later.done();
    sound(&pool);
    drop((lane, pool, quick));
    clean(&machine);
    Ok(())
}

pub(super) fn a_stream_of_another_device_is_waited_for(choice: DriverChoice) -> Result<(), Skip> {
    let machine = Machine::new(choice, MachineSpec { devices: 2, ..MachineSpec::default() })?;
    let pool = pool(&machine);
    let lane = lane(&machine, &pool);
    let far = machine.stream(1);
    let mut buffer = lane.alloc(G).expect("a block is served");
    let hold = machine.hold(&far).expect("the stream is held");
    buffer.record_stream(&far).expect("the stream is recorded");
    let address = buffer.address();
    drop(buffer);
    let other = lane.alloc(G).expect("another block is served");
    assert_ne!(other.address(), address, "the stream is still held");
    assert_eq!(sound(&pool).limbo_buffers, 1);
    hold.release().expect("the held work went well");
    let third = lane.alloc(40 * MIB).expect("a miss looks at limbo");
    assert_eq!(sound(&pool).limbo_buffers, 0, "the stream was released");
    drop((other, third, lane, pool, far));
    clean(&machine);
    Ok(())
}

pub(super) fn a_gate_that_cannot_be_recorded_is_still_waited_for(
    choice: DriverChoice,
) -> Result<(), Skip> {
    ends_behind_its_work(choice, &[Call::EventCreate, Call::EventRecord])?;
    ends_behind_its_work(choice, &[Call::StreamGetCaptureInfo])
}

pub(super) fn a_gate_that_cannot_be_asked_is_still_waited_for(
    choice: DriverChoice,
) -> Result<(), Skip> {
    ends_behind_its_work(choice, &[Call::EventQuery, Call::EventSynchronize])
}

/// A lane ends while `calls` fail: it waits for its own stream and the recorded one all the same.
fn ends_behind_its_work(choice: DriverChoice, calls: &[Call]) -> Result<(), Skip> {
    for recorded in [false, true] {
        let machine = machine(choice)?;
        let sim = machine.sim()?.clone();
        let pool = pool(&machine);
        let lane = lane(&machine, &pool);
        let (own, other) = (lane.stream().clone(), machine.stream(0));
        let busy = if recorded { &other } else { &own };
        let mut buffer = lane.alloc(G).expect("a block is served");
        let later = Later::release(&machine, busy);
        write_on(busy, &buffer, 5);
        for call in calls {
            sim.inject(FaultPlan::fail(ResultCode::UNKNOWN).on(*call));
        }
        buffer.record_stream(&other).expect("the stream is recorded");
        drop(buffer);
        drop((lane, pool));
        assert!(later.is_released(), "{calls:?}: the work was not waited for");
        sim.clear_faults();
        later.done();
        drop((own, other));
        clean(&machine);
    }
    Ok(())
}

pub(super) fn the_end_of_a_lane_harms_no_capture(choice: DriverChoice) -> Result<(), Skip> {
    let machine = machine(choice)?;
    let driver = machine.driver().clone();
    let captured = machine.stream(0);
    let pool = pool(&machine);
    let lane = lane(&machine, &pool);
    let other = machine.stream(0);
    let mut buffer = lane.alloc(G).expect("a block is served");
    buffer.record_stream(&other).expect("the stream is recorded");
    // SAFETY: the stream is live.
    unsafe { driver.capture_begin(DeviceId(0), captured.handle(), CaptureMode::Global) }
        .expect("the capture begins");
    std::thread::scope(|scope| {
        let end = scope.spawn(move || {
            drop(buffer);
            drop((lane, pool));
        });
        end.join().expect("the pool ends");
    });
    let info = captured.capture_info().expect("the capture can be asked");
    assert_eq!(info.status, CaptureStatus::Active, "the capture was harmed");
    // SAFETY: the stream is live and being captured; the graph is dropped at once.
    unsafe {
        let graph = driver.capture_end(DeviceId(0), captured.handle()).expect("it ends well");
        driver.graph_destroy(DeviceId(0), graph).expect("the graph goes");
    }
    drop((captured, other));
    clean(&machine);
    Ok(())
}

/// Limbo looks empty while another thread asks its gates: a request must not fail for that.
pub(super) fn what_another_thread_sweeps_is_waited_for(choice: DriverChoice) -> Result<(), Skip> {
    let machine = machine(choice)?;
    let sim = machine.sim()?.clone();
    let pool = builder(&machine).limit_bytes(4 * G).build().expect("a pool is built");
    let lane = lane(&machine, &pool);
    let other = machine.stream(0);
    let mut buffer = lane.alloc(4 * G).expect("all of the limit");
    buffer.record_stream(&other).expect("the stream is recorded");
    drop(buffer);
    sim.inject(FaultPlan::delay_real(Duration::from_millis(100)).on(Call::EventQuery).once());
    std::thread::scope(|scope| {
        // Asks, is slow about it, and finds that there is room.
        let asking = scope.spawn(|| lane.alloc(G).map(drop));
        while sim.faults_fired() == 0 {
            std::thread::yield_now();
        }
        assert_eq!(stats(&pool).limbo_buffers, 1, "it waits, in whosever hands it is");
        drop(lane.alloc(G).expect("what the other thread finds is there for this one too"));
        asking.join().expect("the thread ends").expect("its request is served");
    });
    sound(&pool);
    drop((lane, pool, other));
    clean(&machine);
    Ok(())
}

/// A thread waits for a slow stream; what is finished meanwhile serves others.
pub(super) fn a_wait_keeps_nothing_from_other_threads(choice: DriverChoice) -> Result<(), Skip> {
    let machine = machine(choice)?;
    let pool = builder(&machine).limit_bytes(4 * G).build().expect("a pool is built");
    let lane = lane(&machine, &pool);
    let (slow, quick) = (machine.stream(0), machine.stream(0));
    let holds = [&slow, &quick].map(|stream| machine.hold(stream).expect("it is held"));
    for stream in [&slow, &quick] {
        let mut buffer = lane.alloc(2 * G).expect("half of the limit");
        buffer.record_stream(stream).expect("the stream is recorded");
        drop(buffer);
    }
    let [slow_hold, quick_hold] = holds;
    let calls = machine.driver().ledger().snapshot();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| lane.alloc(4 * G).map(drop));
        // It has asked both gates, and waits: its first wait is for the slow one.
        while machine.driver().ledger().snapshot().since(&calls).of(Call::EventQuery) < 2 {
            std::thread::yield_now();
        }
        quick_hold.release().expect("the quick stream goes on");
        // The other thread has the gates in hand now and then.
        let served = (0..10_000).any(|_| {
            std::thread::yield_now();
            lane.try_alloc(2 * G).is_ok()
        });
        assert!(served && !waiting.is_finished(), "the wait hides what is finished");
        slow_hold.release().expect("the slow stream goes on");
        waiting.join().expect("the thread ends").expect("its request is served");
    });
    sound(&pool);
    drop((lane, pool, slow, quick));
    clean(&machine);
    Ok(())
}
