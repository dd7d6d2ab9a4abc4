//! Kernels of the home on its own memory and on the neighbour's, however they were come by.

use vmm_pool::{ChunkSize, ElasticBuffer, Place, Pool};
use vmm_pool_cli::replay::Cause;
use vmm_sys::object::{Mapping, Range, Stream};
use vmm_sys::{AccessGrant, ChunkProps, DeviceId};

use super::ground::map_all;
use super::row::in_words;
use super::{Case, Ground, Rows};
use crate::gpu::{self, Alloc, Area};
use crate::timed::{Parts, Run, in_turns};

/// Kernels behind each other in one repetition, so that the launch does not count.
const BATCH: u32 = 8;

/// The memory that kernels run over, by the names of the rows.
const ALLOC: &str = "cuMemAlloc";
const OWN: &str = "pool: own memory";
const NEIGHBOUR: &str = "bare: the neighbour's memory";
const BORROWED: &str = "pool: the neighbour's memory";

/// Lets kernels write and read `bytes` of each memory.
///
/// # Errors
/// The driver's; the pool's; a word that is not what the kernel wrote.
pub fn measure(
    ground: &Ground,
    peer: Option<DeviceId>,
    bytes: u64,
    chunk_bytes: u64,
    repetitions: u32,
) -> Result<Rows, Cause> {
    let home = ground.home();
    let alloc = Alloc::new(ground.driver(), home, bytes)?;
    let other = Alloc::new(ground.driver(), home, bytes)?;
    let pooled = Pooled::new(ground, peer, bytes, chunk_bytes)?;
    let own = pooled.elastic(Place::Device(home), bytes)?;
    let mut memories = vec![(ALLOC, Area::of_alloc(&alloc)), (OWN, Area::of_buffer(&own))];
    let neighbour =
        peer.map(|peer| bare_neighbour(ground, peer, bytes, chunk_bytes)).transpose()?;
    let borrowed = peer.map(|peer| pooled.elastic(Place::Device(peer), bytes)).transpose()?;
    memories.extend(neighbour.iter().map(|(range, _)| (NEIGHBOUR, Area::of_range(range))));
    memories.extend(borrowed.iter().map(|buffer| (BORROWED, Area::of_buffer(buffer))));

    let kernels = &Kernels { ground, stream: ground.stream()?, other: Area::of_alloc(&other) };
    let reference = |side: &str| match side {
        OWN => Some(ALLOC),
        BORROWED => Some(NEIGHBOUR),
        _ => None,
    };
    let mut rows = Rows::of_work(ground, "bandwidth", repetitions);
    let case = |what| Case { name: format!("{what} {}", in_words(bytes)), bytes, chunk_bytes };
    let write = |(name, area)| -> Run<'_> { Box::new(move || kernels.write(name, area)) };
    let found = in_turns(repetitions, memories.iter().copied().map(write).collect())?;
    rows.add(&case("a kernel writes"), found, reference)?;
    for (name, area) in &memories {
        kernels.check(name, *area)?;
    }
    let read = |(name, area)| -> Run<'_> { Box::new(move || kernels.read(name, area)) };
    let found = in_turns(repetitions, memories.iter().copied().map(read).collect())?;
    rows.add(&case("a kernel reads"), found, reference)?;
    Ok(rows)
}

/// A pool over both devices.
struct Pooled {
    pool: Pool,
    home: DeviceId,
}

impl Pooled {
    fn new(
        ground: &Ground,
        peer: Option<DeviceId>,
        bytes: u64,
        chunk_bytes: u64,
    ) -> Result<Pooled, Cause> {
        let home = ground.home();
        let builder = Pool::builder(ground.driver().clone()).device(home);
        let builder = match peer {
            Some(peer) => builder.device(peer),
            None => builder,
        };
        let chunk = ChunkSize::Fixed(chunk_bytes.min(bytes));
        Ok(Pooled { pool: builder.chunk(chunk).background(false).build()?, home })
    }

    /// A buffer of the home, with memory of a place.
    fn elastic(&self, place: Place, bytes: u64) -> Result<ElasticBuffer, Cause> {
        let buffer = self.pool.elastic(self.home).capacity_bytes(bytes).build()?;
        buffer.commit_from(place, 0..bytes)?;
        Ok(buffer)
    }
}

/// Chunks of the neighbour, mapped for the home.
fn bare_neighbour(
    ground: &Ground,
    peer: DeviceId,
    bytes: u64,
    chunk_bytes: u64,
) -> Result<(Range, Vec<Mapping>), Cause> {
    let range = ground.range(bytes, chunk_bytes)?;
    let chunks = ground.chunks(&ChunkProps::on_device(peer), bytes, chunk_bytes)?;
    let mappings = map_all(&range, &chunks, &[AccessGrant::read_write(ground.home())])?;
    Ok((range, mappings))
}

/// The kernels, on a stream of the home.
struct Kernels<'a> {
    ground: &'a Ground,
    stream: Stream,
    /// Where read words go, and come from: memory of the home.
    other: Area<'a>,
}

impl Kernels<'_> {
    /// What one kernel of a batch takes.
    fn batch(
        &self,
        name: &'static str,
        launch: impl Fn() -> Result<(), Cause>,
    ) -> Result<Parts, Cause> {
        let end = self.ground.event()?;
        let ((), mut took) = self.ground.timed(|| {
            (0..BATCH).try_for_each(|_| launch())?;
            end.record(&self.stream)?;
            Ok(end.wait()?)
        })?;
        took.us /= f64::from(BATCH);
        Ok(vec![(name, took)])
    }

    fn write(&self, name: &'static str, area: Area<'_>) -> Result<Parts, Cause> {
        self.batch(name, || gpu::write_words(&self.stream, area, 1))
    }

    fn read(&self, name: &'static str, area: Area<'_>) -> Result<Parts, Cause> {
        self.batch(name, || gpu::copy_words(&self.stream, self.other, area))
    }

    /// The words must be those that were written.
    fn check(&self, name: &str, area: Area<'_>) -> Result<(), Cause> {
        match gpu::wrong_words(&self.stream, area, 1, self.other)? {
            0 => Ok(()),
            wrong => Err(format!("{name}: {wrong} wrong words after a kernel wrote them").into()),
        }
    }
}
