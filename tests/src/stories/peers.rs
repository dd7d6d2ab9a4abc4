//! What other devices have to do with a device's memory: nothing that they would have to wait for,
//! and little that has to be called.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use vmm_pool::{ChunkSize, Pool};
use vmm_sys::object::Stream;
use vmm_sys::{Access, Call, CallCounts, DeviceId, Location};

use super::{G, MIB, builder, clean, sound, write_on};
use crate::machine::{DriverChoice, Machine, MachineSpec, Skip};

/// A pool over device 0, whose memory all the others may use.
fn shared_with_all(machine: &Machine, chunk: ChunkSize) -> Result<Pool, Skip> {
    let others = machine.devices().skip(1);
    let pool = others.fold(builder(machine).chunk(chunk), |builder, peer| {
        builder.access(DeviceId(0), peer, Access::ReadWrite)
    });
    pool.build().map_err(Skip::because)
}

/// Runs `work`, which must not wait for `held`: if it does, the stream is let go after a while, and
/// that is told.
fn waits_for(machine: &Machine, held: &Stream, work: impl FnOnce()) -> bool {
    let hold = machine.hold(held).expect("the stream is held");
    let (releaser, done) = (hold.releaser(), AtomicBool::new(false));
    let waited = std::thread::scope(|scope| {
        let watchdog = scope.spawn(|| {
            for _ in 0..1500 {
                if done.load(Ordering::SeqCst) {
                    return false;
                }
                std::thread::sleep(Duration::from_millis(10));
            }
            releaser.now();
            true
        });
        work();
        done.store(true, Ordering::SeqCst);
        watchdog.join().expect("the watchdog ends")
    });
    hold.release().expect("the held work went well");
    waited
}

pub(super) fn f_x4_a_free_waits_for_no_other_device(choice: DriverChoice) -> Result<(), Skip> {
    let machine = Machine::new(choice, MachineSpec { devices: 2, ..MachineSpec::default() })?;
    let pool = shared_with_all(&machine, ChunkSize::Auto)?;
    let (stream, far) = (machine.stream(0), machine.stream(1));
    let lane = pool.lane(&stream).expect("a lane is opened");
    let buffers: Vec<_> = (1..9).map(|n| lane.alloc(n * MIB).expect("a block")).collect();
    let elastic = pool.elastic(DeviceId(0)).capacity_bytes(8 * G).chunk_bytes(G);
    let elastic = elastic.build().expect("an elastic buffer is made");
    elastic.grow_to(4 * G).expect("it grows");
    let buffer = lane.alloc(G).expect("a block is served");
    write_on(&stream, &buffer, 1);
    let waited = waits_for(&machine, &far, || {
        drop((buffers, buffer));
        elastic.shrink_to(G).expect("it shrinks");
        pool.trim(DeviceId(0)).expect("the device is trimmed");
        drop(lane.alloc(40 * MIB).expect("a block is served"));
        drop((elastic, lane));
        pool.trim(DeviceId(0)).expect("the device is trimmed");
    });
    assert!(!waited, "a free on device 0 waited for the work of device 1");
    sound(&pool);
    drop((pool, stream, far));
    clean(&machine);
    Ok(())
}

/// What a request of 1 GiB costs a new pool.
fn cost_of(machine: &Machine, pool: &Pool) -> CallCounts {
    const BYTES: u64 = 1 << 30;
    let lane = pool.lane(&machine.stream(0)).expect("a lane is opened");
    let calls = machine.driver().ledger().snapshot();
    let buffer = lane.alloc(BYTES).expect("the block is served");
    let calls = machine.driver().ledger().snapshot().since(&calls);
    let accessors = machine.devices().filter(|device| {
        [buffer.address(), buffer.address() + BYTES - 1].into_iter().all(|at| {
            let access = machine.driver().get_access(at, Location::Device(*device));
            access.expect("access can be asked for") == Access::ReadWrite
        })
    });
    let wanted = if pool.access_matrix().pairs.is_empty() { 1 } else { machine.devices().count() };
    assert_eq!(accessors.count(), wanted);
    sound(pool);
    calls
}

/// 1 GiB for eight peers (on a GPU: for as many as there are): as many calls as without them.
pub(super) fn f_x14_many_peers_cost_one_grant_a_piece(choice: DriverChoice) -> Result<(), Skip> {
    let with = |devices| Machine::new(choice, MachineSpec { devices, ..MachineSpec::default() });
    let machine = [9, 8, 4, 2].into_iter().map(with).find(Result::is_ok);
    let machine = machine.unwrap_or_else(|| Err(Skip::because("needs two devices")))?;
    // By themselves lanes grow in pieces of a 256th of what they have.
    let sizes = [ChunkSize::Auto, ChunkSize::Fixed(32 * MIB), ChunkSize::Fixed(1 << 30)];
    for (chunk, pieces) in sizes.into_iter().zip([256, 32, 1]) {
        let calls = cost_of(&machine, &shared_with_all(&machine, chunk)?);
        // One grant a piece, for the owner and all peers at once.
        let kinds = [Call::MemCreate, Call::MemMap, Call::MemSetAccess];
        assert_eq!(kinds.map(|call| calls.of(call)), [pieces; 3], "{chunk:?}: {calls}");
        assert_eq!(calls.of(Call::MemAddressReserve), 1, "{calls}");
        let alone = builder(&machine).chunk(chunk).build().expect("a pool is built");
        assert_eq!(cost_of(&machine, &alone).total(), calls.total(), "{chunk:?}");
    }
    clean(&machine);
    Ok(())
}
