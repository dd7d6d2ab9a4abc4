//! Quiet points: nobody holds anything, and what is left must be what was left before.
//!
//! What is looked at: nothing is alive; the walker and the sums; the stock is within its marks once the
//! pool's thread had its time; addresses of lanes and buffers, and descriptors of the process, are those of
//! the first quiet point; ranges, mappings and streams are no more than then, beside what pools keep ready
//! for moves; host memory is not above that of the second quiet point by more than an allowance; what a
//! device has less of than in the beginning is what the pools hold.

use std::time::{Duration, Instant};

use vmm_pool::{DeviceStats, Pool};
use vmm_sys::Call;

use super::blocks;
use super::elastic;
use super::kv;
use super::os::{Process, give_back_free_memory};
use super::sharing;
use super::sleep;
use super::trouble::{Step, Trouble};
use super::worker::Worker;
use super::world::{BARE, DRIVER_BYTES, HIGH_BYTES, KEPT, World, lock};

/// How long memory may take to come back: the pool's thread looks by itself.
const SETTLE: Duration = Duration::from_secs(30);
/// What was left at each quiet point.
#[derive(Default)]
pub(super) struct Marks {
    all: Vec<Mark>,
}

/// What is left at a quiet point.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Mark {
    /// Must not change.
    pub(super) fixed: Fixed,
    /// Must not grow, beside what is kept ready.
    ranges: u64,
    mappings: u64,
    streams: u64,
    /// Chunks of the host in the stock: a move may have left each of them mapped, for the next one.
    host_chunks: u64,
    pub(super) resident_bytes: u64,
    pub(super) held_bytes: u64,
    pub(super) settled_ms: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Fixed {
    /// Reserved addresses of lanes and elastic buffers.
    pub(super) reserved_bytes: u64,
    pub(super) descriptors: u64,
}

impl Marks {
    pub(super) fn points(&self) -> usize {
        self.all.len()
    }

    pub(super) fn first_and_last(&self) -> Option<(&Mark, &Mark)> {
        self.all.first().zip(self.all.last())
    }
}

/// What a round begins with.
pub(super) fn begin(world: &World) -> Result<(), String> {
    *lock(&world.caches) = kv::make(world).map_err(in_words)?;
    Ok(())
}

fn in_words(trouble: Trouble) -> String {
    trouble.to_string()
}

/// A quiet point. All threads wait with nothing in hand.
pub(super) fn point(world: &World, marks: &mut Marks) -> Result<(), String> {
    let mut worker = Worker::new(world, world.options.threads);
    tidy(&mut worker).map_err(|trouble| format!("tidying up: {trouble}"))?;
    let settled_ms = settle(world)?;
    for index in 0..world.tracks() {
        world.renew(index).map_err(in_words)?;
    }
    world.renew_captured().map_err(in_words)?;
    // Closed lanes leave behind the last work of their streams, which is over.
    settle(world)?;
    let mark = look(world, settled_ms)?;
    println!("quiet point {}: {mark:?}", marks.points() + 1);
    compare(world, marks, &mark)?;
    marks.all.push(mark);
    Ok(())
}

/// Checks and drops what the threads share.
fn tidy(worker: &mut Worker<'_>) -> Step {
    let world = worker.world;
    sharing::end(world)?;
    let mail = std::mem::take(&mut *lock(&world.mail));
    for block in mail {
        blocks::check_and_drop(worker, block)?;
    }
    let caches = std::mem::take(&mut *lock(&world.caches));
    for caches in &caches {
        caches.verify().map_err(Trouble::Wrong)?;
    }
    drop(caches);
    let items = std::mem::take(&mut *lock(&world.items));
    let (asleep, awake): (Vec<_>, Vec<_>) =
        items.into_iter().partition(|item| item.buffer.asleep().is_some());
    // Those that sleep find room once the others are gone.
    for item in awake.into_iter().chain(asleep) {
        item.buffer.wake()?;
        elastic::check_all(worker, &item)?;
    }
    sleep::wake_all(world)?;
    worker.settle()
}

/// Waits until memory is back. Returns how long it took.
fn settle(world: &World) -> Result<u64, String> {
    let begun = Instant::now();
    let mut pause = Duration::from_millis(1);
    loop {
        // The pool without a thread does its work when somebody comes.
        for device in world.machine.devices() {
            let trimmed = world.pools[BARE].trim(device);
            trimmed.map_err(|error| format!("{device} cannot be trimmed: {error}"))?;
        }
        let left = left_over(world);
        match left {
            None => return Ok(begun.elapsed().as_millis() as u64),
            Some(text) if begun.elapsed() > SETTLE => return Err(text),
            Some(_) => {}
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(100));
    }
}

/// What a pool still has that nobody uses.
fn left_over(world: &World) -> Option<String> {
    let left = |pool: usize, stats: &DeviceStats| {
        let alive = [
            stats.live_bytes,
            stats.rounding_bytes,
            stats.idle_bytes,
            stats.limbo_bytes,
            stats.private_bytes,
            stats.elastic_bytes,
            stats.lent_bytes + stats.borrowed_bytes + stats.lending_booked_bytes,
            stats.buffers + stats.elastic_buffers,
            stats.retired_mappings + stats.limbo_buffers,
        ];
        let most = if pool == KEPT { HIGH_BYTES } else { 0 };
        alive.iter().any(|figure| *figure != 0) || stats.stock_bytes > most
    };
    for (number, pool) in world.pools.iter().enumerate() {
        let stats = pool.stats();
        if let Some((device, stats)) = stats.devices.iter().find(|(_, it)| left(number, it)) {
            return Some(format!("pool {number} keeps memory of {device}: {stats:?}"));
        }
        let host = stats.hosts.iter().find(|host| host.elastic_bytes + host.limbo_bytes > 0);
        if let Some(host) = host {
            return Some(format!("pool {number} keeps memory of the host: {host:?}"));
        }
    }
    None
}

fn held_bytes(pools: &[Pool]) -> u64 {
    let stats = pools.iter().flat_map(|pool| pool.stats().devices);
    stats.map(|(_, stats)| stats.held_bytes).sum()
}

fn reserved_bytes(pools: &[Pool]) -> u64 {
    let stats = pools.iter().flat_map(|pool| pool.stats().devices);
    stats.map(|(_, stats)| stats.reserved_bytes).sum()
}

fn look(world: &World, settled_ms: u64) -> Result<Mark, String> {
    for pool in &world.pools {
        pool.verify()?;
        let stats = pool.stats();
        if let Some((device, stats)) = stats.devices.iter().find(|(_, stats)| !stats.adds_up()) {
            return Err(format!("the figures of {device} do not add up: {stats:?}"));
        }
    }
    free_bytes(world)?;
    let calls = world.driver().ledger().snapshot();
    let count = |more, less| calls.of(more).saturating_sub(calls.of(less));
    let hosts = world.pools.iter().flat_map(|pool| pool.stats().hosts);
    let host_bytes: u64 = hosts.map(|host| host.held_bytes).sum();
    give_back_free_memory();
    let process = Process::now();
    let mut mark = Mark {
        fixed: Fixed {
            reserved_bytes: reserved_bytes(&world.pools),
            descriptors: process.descriptors,
        },
        ranges: count(Call::MemAddressReserve, Call::MemAddressFree),
        mappings: world.pools.iter().map(Pool::elastic_mappings).sum(),
        streams: count(Call::StreamCreate, Call::StreamDestroy),
        host_chunks: host_bytes / world.machine.granularity_bytes(),
        resident_bytes: process.resident_bytes,
        held_bytes: held_bytes(&world.pools),
        settled_ms,
    };
    if let Ok(sim) = world.machine.sim() {
        let summary = sim.ledger_summary();
        (mark.ranges, mark.mappings) = (summary.ranges, summary.mappings);
        mark.streams = summary.streams;
    }
    Ok(mark)
}

/// What a device lacks is what the pools hold of it.
fn free_bytes(world: &World) -> Result<(), String> {
    for (device, before) in world.machine.devices().zip(&world.free_before) {
        let info = world.driver().mem_info(device).map_err(|error| error.to_string())?;
        let stats = world.pools.iter().filter_map(|pool| pool.device_stats(device));
        let held: u64 = stats.map(|stats| stats.held_bytes).sum();
        if info.free_bytes + held + DRIVER_BYTES < *before {
            let free = info.free_bytes;
            return Err(format!("{device}: {before} bytes free before, {free} now, {held} held"));
        }
    }
    Ok(())
}

fn compare(world: &World, marks: &Marks, mark: &Mark) -> Result<(), String> {
    if let Some(first) = marks.all.first()
        && first.fixed != mark.fixed
    {
        return Err(format!(
            "left at the first quiet point {:?}, now {:?}",
            first.fixed, mark.fixed
        ));
    }
    if let Some(first) = marks.all.first() {
        // A move has a stream for its copies, which is kept: so many run at once.
        let options = &world.options;
        let moves = world.pools.len() as u64 * u64::from(options.devices * (options.threads + 1));
        let grown = [
            ("ranges", first.ranges, mark.ranges, mark.host_chunks),
            ("mappings", first.mappings, mark.mappings, mark.host_chunks),
            ("streams", first.streams, mark.streams, moves),
        ];
        for (what, then, now, ready) in grown {
            if now > then + ready {
                return Err(format!(
                    "{what}: {then} at the first quiet point, {now} now: {mark:?}"
                ));
            }
        }
    }
    let allowed = world.options.allowance_bytes;
    if let Some(second) = marks.all.get(1)
        && mark.resident_bytes > second.resident_bytes + allowed
    {
        let (then, now) = (second.resident_bytes, mark.resident_bytes);
        return Err(format!("{then} bytes of host memory at the second quiet point, {now} now"));
    }
    Ok(())
}
