//! Growth of 1 GiB from warm stock: through a lane of the pool and through an elastic buffer, and by
//! the bare driver calls that it needs.
//! See docs/BENCHMARKS.md.
//!
//! Both sides map chunks of the same length that were made and mapped once before, at addresses
//! that were reserved before. The order of the sides alternates, as the second may find a warmer
//! driver than the first.

#![forbid(unsafe_code)]

use std::fmt;
use std::sync::Arc;

use serde::Serialize;
use vmm_pool::{Buffer, ChunkSize, ElasticBuffer, Lane, Pool};
use vmm_pool_benches::samples::Spread;
use vmm_pool_benches::setup::{Setup, fail, no_arguments, repetitions};
use vmm_pool_benches::timed::{Side, Took, timed};
use vmm_pool_cli::replay::Cause;
use vmm_pool_cli::target::CurrentContext;
use vmm_sys::object::{Chunk, Mapping, Range, Stream};
use vmm_sys::{AccessGrant, ChunkProps, DeviceId, Driver};

const GROWTH_BYTES: u64 = 1 << 30;
const CHUNK_BYTES: u64 = 32 << 20;
const REPETITIONS: u32 = 21;
/// The ratio that the pool is meant to stay under.
const RATIO_MAX: f64 = 1.1;

/// How the pool is asked for the memory.
#[derive(Clone, Copy, Debug)]
enum Case {
    /// Requests of a lane, of so many bytes each.
    Requests(u64),
    /// One growth of an elastic buffer whose chunks have so many bytes.
    Elastic(u64),
}

impl Case {
    fn chunk_bytes(self) -> u64 {
        match self {
            Case::Requests(_) => CHUNK_BYTES,
            Case::Elastic(chunk_bytes) => chunk_bytes,
        }
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Case::Requests(bytes) => {
                write!(f, "{} request(s) of {} MiB", GROWTH_BYTES / bytes, bytes >> 20)
            }
            Case::Elastic(chunk_bytes) => {
                let count = GROWTH_BYTES / chunk_bytes;
                write!(f, "an elastic buffer by {} MiB, {count} chunk(s)", GROWTH_BYTES >> 20)
            }
        }
    }
}

/// A pool whose lane has its addresses already, and so has its elastic buffer.
struct PoolSide {
    pool: Pool,
    lane: Lane,
    elastic: ElasticBuffer,
    device: DeviceId,
}

impl PoolSide {
    fn new(
        driver: &Arc<dyn Driver>,
        device: DeviceId,
        chunk_bytes: u64,
    ) -> Result<PoolSide, Cause> {
        let chunk = ChunkSize::Fixed(chunk_bytes);
        // No second thread: between the timed parts it would do what is done here.
        let builder = Pool::builder(driver.clone()).device(device).chunk(chunk);
        let pool = builder.background(false).build()?;
        let lane = pool.lane(&Stream::create(driver, device)?)?;
        let elastic = pool.elastic(device).capacity_bytes(GROWTH_BYTES).build()?;
        Ok(PoolSide { pool, lane, elastic, device })
    }

    fn grow(&self, case: Case) -> Result<Took, Cause> {
        self.pool.prefill(self.device, GROWTH_BYTES)?;
        let took = match case {
            Case::Requests(bytes) => self.grow_lane(bytes)?,
            Case::Elastic(_) => {
                timed(self.pool.driver(), || Ok(self.elastic.grow_to(GROWTH_BYTES)?))?.1
            }
        };
        self.elastic.shrink_to(0)?;
        self.pool.trim(self.device)?;
        let held = self.pool.device_stats(self.device).map_or(0, |stats| stats.held_bytes);
        if held != 0 {
            return Err(format!("{held} bytes are held after a trim, 0 expected").into());
        }
        Ok(took)
    }

    fn grow_lane(&self, request_bytes: u64) -> Result<Took, Cause> {
        let mut buffers: Vec<Buffer> = Vec::with_capacity((GROWTH_BYTES / request_bytes) as usize);
        let ((), took) = timed(self.pool.driver(), || {
            for _ in 0..GROWTH_BYTES / request_bytes {
                buffers.push(self.lane.alloc(request_bytes)?);
            }
            Ok(())
        })?;
        drop(buffers);
        Ok(took)
    }
}

/// The bare calls.
struct BareSide {
    driver: Arc<dyn Driver>,
    chunk_bytes: u64,
    props: ChunkProps,
    grants: [AccessGrant; 1],
    range: Range,
    /// Where chunks are mapped for the first time.
    elsewhere: Range,
}

impl BareSide {
    fn new(
        driver: &Arc<dyn Driver>,
        device: DeviceId,
        chunk_bytes: u64,
    ) -> Result<BareSide, Cause> {
        let reserve = |bytes| Range::reserve(driver, bytes, chunk_bytes, 0);
        Ok(BareSide {
            driver: driver.clone(),
            chunk_bytes,
            props: ChunkProps::on_device(device),
            grants: [AccessGrant::read_write(device)],
            range: reserve(GROWTH_BYTES)?,
            elsewhere: reserve(chunk_bytes)?,
        })
    }

    /// A chunk that was mapped before, as the chunks of warm stock were.
    fn warm_chunk(&self) -> Result<Arc<Chunk>, Cause> {
        let chunk = Arc::new(Chunk::create(&self.driver, self.chunk_bytes, &self.props)?);
        let mapping = Mapping::map(&self.elsewhere, 0, chunk)?;
        mapping.set_access(&self.grants)?;
        mapping.unmap().map_err(|(_, error)| error.into())
    }

    fn grow(&self) -> Result<Took, Cause> {
        let count = GROWTH_BYTES / self.chunk_bytes;
        let chunks = (0..count).map(|_| self.warm_chunk()).collect::<Result<Vec<_>, _>>()?;
        let mut mappings = Vec::with_capacity(chunks.len());
        let ((), took) = timed(&self.driver, || {
            for (index, chunk) in (0..).zip(chunks) {
                // The owning object adds nothing to the call but its place in the vector.
                let mapping = Mapping::map(&self.range, index * self.chunk_bytes, chunk)?;
                mapping.set_access(&self.grants)?;
                mappings.push(mapping);
            }
            Ok(())
        })?;
        Ok(took) // the mappings, then the chunks, are given back here
    }
}

/// What is recorded of one way to ask for the memory.
#[derive(Serialize)]
struct Row {
    case: String,
    growth_bytes: u64,
    chunk_bytes: u64,
    repetitions: u32,
    /// `measured` on a GPU, `modelled` on the simulated device: there the driver's part is.
    time: &'static str,
    pool_us: Spread,
    bare_us: Spread,
    /// Of the medians.
    ratio: f64,
    pool_calls: String,
    bare_calls: String,
}

fn compare(setup: &Setup, case: Case, repetitions: u32) -> Result<Row, Cause> {
    let chunk_bytes = case.chunk_bytes();
    let pool_side = PoolSide::new(&setup.driver, setup.device, chunk_bytes)?;
    let bare_side = BareSide::new(&setup.driver, setup.device, chunk_bytes)?;
    // Once each untimed: the lane reserves its addresses, the driver its tables.
    pool_side.grow(case)?;
    bare_side.grow()?;
    let (mut pool, mut bare) = (Side::default(), Side::default());
    for repetition in 0..repetitions {
        if repetition % 2 == 0 {
            pool.add(&pool_side.grow(case)?)?;
            bare.add(&bare_side.grow()?)?;
        } else {
            bare.add(&bare_side.grow()?)?;
            pool.add(&pool_side.grow(case)?)?;
        }
    }
    let (pool_us, pool_calls) = pool.figures()?;
    let (bare_us, bare_calls) = bare.figures()?;
    Ok(Row {
        case: case.to_string(),
        growth_bytes: GROWTH_BYTES,
        chunk_bytes,
        repetitions,
        time: if setup.is_gpu() { "measured" } else { "modelled" },
        pool_us,
        bare_us,
        ratio: pool_us.median / bare_us.median,
        pool_calls,
        bare_calls,
    })
}

fn run() -> Result<(), Cause> {
    no_arguments()?;
    let mut setup = Setup::start("growth")?;
    let _context = CurrentContext::enter(&setup.driver, setup.device)?;
    setup.driver.ledger().set_timing(!setup.is_gpu());
    let repetitions = repetitions(REPETITIONS)?;
    let cases = [
        Case::Requests(GROWTH_BYTES),
        Case::Requests(CHUNK_BYTES),
        Case::Elastic(CHUNK_BYTES),
        Case::Elastic(GROWTH_BYTES),
    ];
    for case in cases {
        let row = compare(&setup, case, repetitions)?;
        let Row { case, time, pool_us, bare_us, ratio, .. } = &row;
        let verdict = if *ratio <= RATIO_MAX { "within" } else { "beyond" };
        println!(
            "{case}: pool {:.0} us, bare calls {:.0} us ({time}), ratio {ratio:.3}: {verdict} \
             the aim of {RATIO_MAX}",
            pool_us.median, bare_us.median,
        );
        println!("  pool {:.0}..{:.0} us: {}", pool_us.min, pool_us.max, row.pool_calls);
        println!("  bare {:.0}..{:.0} us: {}", bare_us.min, bare_us.max, row.bare_calls);
        setup.record(&row)?;
    }
    setup.say_where();
    Ok(())
}

fn main() {
    if let Err(error) = run() {
        fail("growth", error);
    }
}
