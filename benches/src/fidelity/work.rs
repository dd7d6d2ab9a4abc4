//! The work: replays, the tour, and KV caches. One thread asks, so that counts do not depend on time.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::Arc;

use vmm_kv::{ContiguousCache, Dtype, KvError, KvShape, PagedCache, PagedSequence, Sequence};
use vmm_pool::{ChunkSize, Pool};
use vmm_pool_cli::driver_choice::DriverChoice;
use vmm_pool_cli::replay::{Cause, HostClock, Plan, count};
use vmm_pool_cli::target::{IdleLanes, PoolOptions, PoolTarget};
use vmm_pool_cli::tour::{Outcome, Plan as TourPlan, tour};
use vmm_pool_cli::trace::Trace;
use vmm_sys::object::Stream;
use vmm_sys::{CallCounts, DeviceId, Driver};

use super::Row;

const DEVICE: DeviceId = DeviceId(0);
/// Passes of a replay: the first finds an empty pool, the second a warm one.
const PASSES: u32 = 2;
/// The tour's buffer, the same on both drivers.
const TOUR_BYTES: u64 = 64 << 20;
const STEPS: u64 = 400;
const BATCH: usize = 24;
const PROMPT_TOKENS: u64 = 500;

/// Does all of it on the first `devices`, and gives each row to `tell`.
///
/// # Errors
/// What went wrong first: a trace that cannot be read, or an allocator that failed.
pub fn all(
    choice: &DriverChoice,
    devices: u32,
    traces: &[impl AsRef<Path>],
    mut tell: impl FnMut(Row) -> Result<(), Cause>,
) -> Result<(), Cause> {
    let mut tell = |row: Row| tell(Row { devices, ..row });
    choice.driver.ledger().set_timing(true);
    for path in traces {
        replays(&choice.driver, path.as_ref(), &mut tell)?;
    }
    tell(contiguous(&choice.driver)?)?;
    tell(paged(&choice.driver)?)?;
    toured(choice, devices, &mut tell)
}

/// The traces under the settings that matter.
fn replays(
    driver: &Arc<dyn Driver>,
    path: &Path,
    tell: &mut impl FnMut(Row) -> Result<(), Cause>,
) -> Result<(), Cause> {
    let trace = Trace::open(path)?;
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let plan = Plan::new(&trace, None);
    // Time decides when a lane is idle, and what the pool's thread does: it is not what is compared.
    let usual = PoolOptions {
        idle_lanes: IdleLanes::After(None),
        background: Some(false),
        ..PoolOptions::default()
    };
    let settings = [
        ("defaults", usual),
        ("soft limit off", PoolOptions { soft_limit: None, ..usual }),
        ("chunks of 32 MiB", PoolOptions { chunk: ChunkSize::Fixed(32 << 20), ..usual }),
    ];
    for (setting, options) in settings {
        let make = || PoolTarget::new(driver, DEVICE, &options, plan.streams);
        for pass in count(&plan, PASSES, &HostClock::new(), make, || ())? {
            let work = format!("replay {name}, {setting}, pass {}", pass.pass);
            tell(Row::new(work, &**driver, &pass.calls, pass.peak_held_bytes))?;
        }
    }
    Ok(())
}

/// Each step of the tour, without the one that starts another process.
fn toured(
    choice: &DriverChoice,
    devices: u32,
    tell: &mut impl FnMut(Row) -> Result<(), Cause>,
) -> Result<(), Cause> {
    let plan = TourPlan {
        driver: choice.driver.clone(),
        sim: choice.sim.clone(),
        devices: (0..devices).map(DeviceId).collect(),
        bytes: TOUR_BYTES,
        program: None,
    };
    let mut before = choice.driver.ledger().snapshot();
    let mut outcome = Ok(());
    let well = tour(&plan, &mut |telling| {
        let now = choice.driver.ledger().snapshot();
        let work = format!("tour, {}", telling.step);
        let row = Row::new(work, &*choice.driver, &now.since(&before), 0);
        if outcome.is_ok() && telling.outcome == Outcome::Ok {
            outcome = tell(row);
        }
        before = now;
    });
    outcome?;
    if well { Ok(()) } else { Err("the tour failed".into()) }
}

// ---- KV caches: sequences come, grow, fork and go ----

fn shape() -> Result<KvShape, Cause> {
    // 64 KiB a token: half of Llama 3 8B.
    Ok(KvShape::new(16, 8, 128, Dtype::Bf16)?)
}

fn pool(driver: &Arc<dyn Driver>) -> Result<Pool, Cause> {
    Ok(Pool::builder(driver.clone()).device(DEVICE).background(false).build()?)
}

fn peak_held_bytes(pool: &Pool) -> u64 {
    pool.device_stats(DEVICE).map_or(0, |stats| stats.peak_held_bytes)
}

/// How long the prompt of a step's sequence is, and how far a sequence grows in a step.
fn prompt_tokens(step: u64) -> u64 {
    step * 97 % PROMPT_TOKENS
}

fn grown_tokens(step: u64) -> u64 {
    1 + step * 13 % 29
}

fn contiguous(driver: &Arc<dyn Driver>) -> Result<Row, Cause> {
    let (pool, stream) = (pool(driver)?, Stream::create(driver, DEVICE)?);
    let cache = ContiguousCache::builder(&pool, &stream, shape()?)
        .max_tokens(16_384)
        .max_sequences(64)
        .keep_idle_bytes(64 << 20)
        .background(false)
        .build()?;
    let open = |tokens| cache.open(tokens);
    let calls = decode(driver, open, Sequence::fork, Sequence::append, |_| {
        stream.synchronize()?;
        Ok(cache.settle()?)
    })?;
    Ok(Row::new("kv, contiguous".to_owned(), &**driver, &calls, peak_held_bytes(&pool)))
}

fn paged(driver: &Arc<dyn Driver>) -> Result<Row, Cause> {
    let (pool, stream) = (pool(driver)?, Stream::create(driver, DEVICE)?);
    let cache = PagedCache::builder(&pool, &stream, shape()?)
        .max_blocks(1 << 14)
        .keep_idle_bytes(64 << 20)
        .background(false)
        .build()?;
    let open = |tokens| cache.open(tokens);
    let calls = decode(driver, open, PagedSequence::fork, PagedSequence::append, |step| {
        if step % 40 == 39 {
            cache.pack(64)?;
        }
        Ok(stream.synchronize()?)
    })?;
    Ok(Row::new("kv, paged".to_owned(), &**driver, &calls, peak_held_bytes(&pool)))
}

/// The calls of all steps. What a step has enqueued is over when `end_step` returns: then counts do not
/// depend on how fast it is.
fn decode<S>(
    driver: &Arc<dyn Driver>,
    open: impl Fn(u64) -> Result<S, KvError>,
    fork: impl Fn(&mut S) -> Result<S, KvError>,
    append: impl Fn(&mut S, u64) -> Result<u64, KvError>,
    end_step: impl Fn(u64) -> Result<(), Cause>,
) -> Result<CallCounts, Cause> {
    let before = driver.ledger().snapshot();
    let mut batch: VecDeque<S> = VecDeque::new();
    for step in 0..STEPS {
        if batch.len() == BATCH {
            batch.pop_front();
        }
        let next = match batch.back_mut() {
            Some(last) if step % 5 == 4 => fork(last)?,
            _ => open(prompt_tokens(step))?,
        };
        batch.push_back(next);
        for sequence in &mut batch {
            append(sequence, grown_tokens(step))?;
        }
        end_step(step)?;
    }
    drop(batch);
    Ok(driver.ledger().snapshot().since(&before))
}
