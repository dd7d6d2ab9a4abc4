//! What a soak says of itself: lines of progress, and the end.

use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use super::os::Process;
use super::quiet::Marks;
use super::worker::{KINDS, Kind};
use super::world::{Slot, World};

/// From so many operations on every kind must have been done. In a shorter run a rare one may have found
/// nothing to do it with.
const SHORT: u64 = 30_000;

/// How a run went.
#[derive(Clone, Debug)]
pub struct Report {
    /// What went wrong, if anything did.
    pub failure: Option<String>,
    /// One line of JSON.
    pub json: String,
}

impl Report {
    /// The line of JSON, which says whether the run failed.
    pub fn summary(&self) -> String {
        let errors = u64::from(self.failure.is_some());
        format!("{{\"errors\":{errors},{}}}", self.json)
    }
}

fn sum(world: &World, of: impl Fn(&Slot) -> u64) -> u64 {
    world.slots.iter().map(of).sum()
}

fn by_kind(world: &World, of: impl Fn(&Slot) -> &Vec<AtomicU64>) -> Vec<u64> {
    let count = |kind: usize| sum(world, |slot| of(slot)[kind].load(Ordering::Relaxed));
    (0..KINDS.len()).map(count).collect()
}

pub(super) fn opening(world: &World) -> String {
    let options = &world.options;
    format!(
        "soak on {}: {} threads, {} streams, {} devices, {} bytes of each, seed {}",
        world.driver().kind(),
        options.threads,
        options.streams,
        options.devices,
        options.memory_bytes,
        options.seed
    )
}

pub(super) fn progress(world: &World, begun: Instant) -> String {
    let done = by_kind(world, |slot| &slot.done);
    let refused = by_kind(world, |slot| &slot.refused);
    let stats: Vec<_> = world.pools.iter().flat_map(|pool| pool.stats().devices).collect();
    let of = |figure: fn(&vmm_pool::DeviceStats) -> u64| -> u64 {
        stats.iter().map(|(_, stats)| figure(stats)).sum()
    };
    let free = world.machine.devices().map(|device| world.driver().mem_info(device));
    let free: Vec<_> = free.map(|info| info.map_or(0, |info| info.free_bytes >> 20)).collect();
    let process = Process::now();
    let operations: u64 = done.iter().sum();
    let mut line = format!(
        "{:.0} s: {operations} operations, {} refused, {} checks; MiB: held {}, stock {}, live {}, \
         elastic {}, reserved {}, free {free:?}, resident {}; {} descriptors, {} driver calls;",
        begun.elapsed().as_secs_f64(),
        refused.iter().sum::<u64>(),
        sum(world, |slot| slot.checks.load(Ordering::Relaxed)),
        of(|it| it.held_bytes) >> 20,
        of(|it| it.stock_bytes) >> 20,
        of(|it| it.live_bytes) >> 20,
        of(|it| it.elastic_bytes) >> 20,
        of(|it| it.reserved_bytes) >> 20,
        process.resident_bytes >> 20,
        process.descriptors,
        world.driver().ledger().snapshot().total(),
    );
    for (kind, (done, refused)) in KINDS.iter().zip(done.iter().zip(&refused)) {
        let _ = write!(line, " {} {done}/{}", kind.name, done + refused);
    }
    line
}

/// The kinds that should have been done by then and were not.
fn never(devices: u32, done: &[u64]) -> Vec<&'static str> {
    if done.iter().sum::<u64>() < SHORT {
        return Vec::new();
    }
    let lacks = |(kind, done): &(&Kind, &u64)| **done == 0 && kind.needs_devices <= devices;
    KINDS.iter().zip(done).filter(lacks).map(|(kind, _)| kind.name).collect()
}

/// Tells the whole of it, and that every kind of operation was done.
pub(super) fn report(world: &World, marks: &Marks, begun: Instant) -> Report {
    let seconds = begun.elapsed().as_secs_f64();
    let done = by_kind(world, |slot| &slot.done);
    let refused = by_kind(world, |slot| &slot.refused);
    let operations: u64 = done.iter().sum();
    let never = never(world.options.devices, &done);
    let failure = world.failure().or_else(|| {
        (!never.is_empty()).then(|| format!("never done in the whole run: {}", never.join(", ")))
    });
    let options = &world.options;
    let mut json = format!(
        "\"driver\":\"{}\",\"seed\":{},\"threads\":{},\"streams\":{},\"devices\":{},\
         \"memory_bytes\":{},\"seconds\":{seconds:.1},\"operations\":{operations},\"refused\":{},\
         \"checks\":{},\"operations_per_s\":{:.0},\"driver_calls\":{},\"quiet_points\":{}",
        world.driver().kind(),
        options.seed,
        options.threads,
        options.streams,
        options.devices,
        options.memory_bytes,
        refused.iter().sum::<u64>(),
        sum(world, |slot| slot.checks.load(Ordering::Relaxed)),
        operations as f64 / seconds,
        world.driver().ledger().snapshot().total(),
        marks.points(),
    );
    if let Some((first, last)) = marks.first_and_last() {
        for (name, mark) in [("first", first), ("last", last)] {
            let _ = write!(
                json,
                ",\"{name}_quiet\":{{\"reserved_bytes\":{},\"descriptors\":{},\
                 \"resident_bytes\":{},\"held_bytes\":{},\"settled_ms\":{}}}",
                mark.fixed.reserved_bytes,
                mark.fixed.descriptors,
                mark.resident_bytes,
                mark.held_bytes,
                mark.settled_ms,
            );
        }
    }
    let kinds = KINDS.iter().zip(done.iter().zip(&refused));
    let kinds = kinds.map(|(it, (done, refused))| format!("\"{}\":[{done},{refused}]", it.name));
    let _ = write!(json, ",\"kinds\":{{{}}}", kinds.collect::<Vec<_>>().join(","));
    Report { failure, json }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each kind done so often, but for one.
    fn all_but(name: &str, each: u64) -> Vec<u64> {
        KINDS.iter().map(|kind| if kind.name == name { 0 } else { each }).collect()
    }

    #[test]
    fn a_kind_that_was_never_done_is_told_unless_the_run_was_short_or_of_too_few_devices() {
        for name in ["alloc", "elastic_move", "elastic_grant"] {
            assert_eq!(never(1, &all_but(name, SHORT)), [name]);
        }
        assert_eq!(never(2, &all_but("elastic_revoke", SHORT)), ["elastic_revoke"]);
        assert!(never(1, &all_but("elastic_revoke", SHORT)).is_empty());
        assert!(never(2, &all_but("alloc", 1)).is_empty(), "a short run");
        assert!(never(2, &all_but("none of them", SHORT)).is_empty());
    }
}
