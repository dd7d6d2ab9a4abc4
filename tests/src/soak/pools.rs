//! What concerns pools as a whole: memory given back and made ahead, streams that go, pools that come
//! and go, requests that must be refused, figures.

use std::time::Duration;

use vmm_pool::{DebugMode, ElasticError, Error, Pool, Request};

use super::blocks::random_bytes;
use super::board::Words;
use super::trouble::{Step, Trouble};
use super::worker::Worker;
use super::world::{HIGH_BYTES, KEPT, NODE};

pub(super) fn trim(worker: &mut Worker<'_>) -> Step {
    let (pool, device) = (worker.pool(), worker.device());
    worker.world.pools[pool].trim(device)?;
    Ok(())
}

pub(super) fn trim_idle(worker: &mut Worker<'_>) -> Step {
    let (pool, device) = (worker.pool(), worker.device());
    let idle = Duration::from_millis(worker.rng.below(300));
    worker.world.pools[pool].trim_idle(device, idle)?;
    Ok(())
}

pub(super) fn prefill(worker: &mut Worker<'_>) -> Step {
    // Not above the high mark: what is asked for by name stays there.
    let bytes = worker.rng.below(HIGH_BYTES);
    let pool = &worker.world.pools[KEPT];
    if worker.rng.chance(200) {
        pool.prefill(NODE, bytes / 4)?;
        return Ok(());
    }
    pool.prefill(worker.device(), bytes)?;
    Ok(())
}

pub(super) fn new_stream(worker: &mut Worker<'_>) -> Step {
    let index = worker.rng.below(worker.world.tracks() as u64) as usize;
    worker.world.renew(index)
}

/// A pool that lives for a moment; its blocks may outlive it.
pub(super) fn come_and_go(worker: &mut Worker<'_>) -> Step {
    let track = worker.track();
    let device = track.device();
    let budget = worker.world.passing[device.0 as usize].clone();
    let guard = worker.rng.chance(250);
    let pool = Pool::builder(worker.world.driver().clone())
        .device(device)
        .budget(device, budget)
        .background(worker.rng.chance(500))
        .debug_mode(if guard { DebugMode::Guard } else { DebugMode::Off })
        .build()?;
    let lane = pool.lane(&track.stream)?;
    let mut kept = Vec::new();
    for _ in 0..worker.rng.below(6) {
        let bytes = random_bytes(worker);
        match lane.alloc(bytes) {
            Ok(buffer) => kept.push((buffer, worker.value())),
            Err(error) if error.is_out_of_memory() => break,
            Err(error) => return Err(error.into()),
        }
    }
    for (buffer, value) in &kept {
        for words in Words::over(buffer.address(), buffer.bytes(), *value).areas(false) {
            words.fill(&track.stream)?;
        }
    }
    pool.verify().map_err(Trouble::Wrong)?;
    let early = worker.rng.chance(500);
    let rest = if early { None } else { Some((pool, lane)) };
    for (buffer, value) in kept {
        for words in Words::over(buffer.address(), buffer.bytes(), value).areas(false) {
            worker.enqueue_check(&track.stream, words)?;
        }
        drop(buffer);
    }
    drop(rest);
    Ok(())
}

fn must_fail<T: std::fmt::Debug>(
    got: Result<T, Error>,
    expected: impl Fn(&Error) -> bool,
    what: &str,
) -> Step {
    match got {
        Err(error) if expected(&error) => Ok(()),
        other => Err(Trouble::Wrong(format!("{what}: {other:?}"))),
    }
}

/// Requests that change nothing.
pub(super) fn refused(worker: &mut Worker<'_>) -> Step {
    let (track, pool) = (worker.track(), worker.pool());
    let lane = &track.lanes[pool];
    must_fail(
        lane.alloc(1 << 60),
        |error| matches!(error, Error::TooLarge { .. } | Error::LaneClosed),
        "an exabyte was asked for",
    )?;
    must_fail(
        lane.alloc_with(&Request::new(4096).align(3)),
        |error| matches!(error, Error::BadAlignment { .. } | Error::LaneClosed),
        "an alignment of 3",
    )?;
    must_fail(
        vmm_pool::free_raw(0xdead_0000_0000, 512),
        |error| matches!(error, Error::UnknownAddress { .. }),
        "an address of nobody was freed",
    )?;
    if let Some(item) = super::elastic::item(worker) {
        let beyond = item.buffer.capacity_bytes() * 2;
        must_fail(
            item.buffer.grow_to(beyond),
            |error| matches!(error, Error::Elastic(ElasticError::BeyondCapacity { .. })),
            "a buffer grew beyond its capacity",
        )?;
    }
    Ok(())
}

/// More than the pool may own: everything that could help is tried first.
pub(super) fn beyond_all(worker: &mut Worker<'_>) -> Step {
    let (track, pool) = (worker.track(), worker.pool());
    let bytes = worker.world.options.memory_bytes;
    let request = Request::new(bytes);
    let request = if worker.rng.chance(500) { request.may_borrow() } else { request };
    must_fail(
        track.lanes[pool].alloc_with(&request),
        |error| error.is_out_of_memory() || matches!(error, Error::LaneClosed),
        "more than the limit was asked for",
    )
}

pub(super) fn stats(worker: &mut Worker<'_>) -> Step {
    let pool = &worker.world.pools[worker.rng.below(2) as usize];
    let stats = pool.stats();
    for (device, figures) in &stats.devices {
        if !figures.adds_up() || figures.held_bytes > figures.limit_bytes {
            return Err(Trouble::Wrong(format!("{device}: {figures:?}")));
        }
    }
    match stats.hosts.iter().find(|host| !host.adds_up()) {
        Some(host) => Err(Trouble::Wrong(format!("{host:?}"))),
        None => Ok(()),
    }
}

pub(super) fn verify(worker: &mut Worker<'_>) -> Step {
    let pool = worker.pool();
    worker.world.pools[pool].verify().map_err(Trouble::Wrong)?;
    for caches in super::world::lock(&worker.world.caches).clone() {
        caches.verify().map_err(Trouble::Wrong)?;
    }
    Ok(())
}
