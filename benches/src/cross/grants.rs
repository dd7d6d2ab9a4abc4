//! Letting the neighbour use memory: with a mapping of the pair alive elsewhere (an anchor), and
//! without any.

use std::sync::Arc;

use vmm_pool::{ChunkSize, ElasticBuffer, Pool};
use vmm_pool_cli::replay::Cause;
use vmm_sys::object::{Chunk, Mapping, Range};
use vmm_sys::{Access, AccessGrant, ChunkProps, DeviceId, Location};

use super::row::in_words;
use super::{Anchor, Case, Ground, Rows};
use crate::timed::{Parts, Run, in_turns};

const ALONE: &str = "bare: no anchor";
const ANCHORED: &str = "bare: anchored";

/// Grants the neighbour the use of one chunk of each length.
///
/// # Errors
/// The driver's; the pool's.
pub fn measure(
    ground: &Ground,
    peer: DeviceId,
    chunks: &[u64],
    repetitions: u32,
) -> Result<Rows, Cause> {
    let mut rows = Rows::of_calls(ground, "grant", repetitions);
    for &chunk_bytes in chunks {
        let name = format!("one chunk of {}", in_words(chunk_bytes));
        let case = Case { name, bytes: chunk_bytes, chunk_bytes };
        let bare = BareChunk::new(ground, peer, chunk_bytes)?;
        // Before any anchor, the pool's included.
        let found = in_turns(repetitions, vec![Box::new(|| bare.grant_alone())])?;
        rows.add(&case, found, |_| None)?;

        let _anchor = Anchor::new(ground, ground.home(), peer)?;
        let pool = PoolChunk::new(ground, peer, chunk_bytes)?;
        let standing = bare.map()?;
        let sides: Vec<Run<'_>> =
            vec![Box::new(|| bare.grant_and_revoke(&standing)), Box::new(|| pool.grant())];
        let found = in_turns(repetitions, sides)?;
        rows.add(&case, found, |side| Some(if side == ANCHORED { ALONE } else { ANCHORED }))?;
    }
    Ok(rows)
}

/// One chunk of the home, and the bare calls.
struct BareChunk<'g> {
    ground: &'g Ground,
    peer: DeviceId,
    range: Range,
    chunk: Arc<Chunk>,
}

impl BareChunk<'_> {
    fn new(ground: &Ground, peer: DeviceId, bytes: u64) -> Result<BareChunk<'_>, Cause> {
        let props = ChunkProps::on_device(ground.home());
        let chunk = Arc::new(Chunk::create(ground.driver(), bytes, &props)?);
        Ok(BareChunk { ground, peer, range: ground.range(bytes, bytes)?, chunk })
    }

    /// Mapped for its home alone.
    fn map(&self) -> Result<Mapping, Cause> {
        let mapping = Mapping::map(&self.range, 0, self.chunk.clone())?;
        mapping.set_access(&[AccessGrant::read_write(self.ground.home())])?;
        Ok(mapping)
    }

    /// The link of the pair goes down with the mapping.
    fn grant_alone(&self) -> Result<Parts, Cause> {
        let mapping = self.map()?;
        let grant = [AccessGrant::read_write(self.peer)];
        let ((), took) = self.ground.timed(|| Ok(mapping.set_access(&grant)?))?;
        mapping.unmap().map_err(|(_, error)| error)?;
        Ok(vec![(ALONE, took)])
    }

    fn grant_and_revoke(&self, mapping: &Mapping) -> Result<Parts, Cause> {
        let grant = [AccessGrant::read_write(self.peer)];
        let ((), took) = self.ground.timed(|| Ok(mapping.set_access(&grant)?))?;
        let location = Location::Device(self.peer);
        mapping.set_access(&[AccessGrant { location, access: Access::None }])?;
        Ok(vec![(ANCHORED, took)])
    }
}

/// An elastic buffer of one chunk. Its pool has an anchor of its own from the first grant on.
struct PoolChunk<'g> {
    ground: &'g Ground,
    peer: DeviceId,
    buffer: ElasticBuffer,
}

impl PoolChunk<'_> {
    fn new(ground: &Ground, peer: DeviceId, bytes: u64) -> Result<PoolChunk<'_>, Cause> {
        let home = ground.home();
        let builder = Pool::builder(ground.driver().clone()).device(home).device(peer);
        let pool = builder.chunk(ChunkSize::Fixed(bytes)).background(false).build()?;
        let buffer = pool.elastic(home).capacity_bytes(bytes).build()?;
        buffer.grow_to(bytes)?;
        Ok(PoolChunk { ground, peer, buffer })
    }

    fn grant(&self) -> Result<Parts, Cause> {
        let grant = || Ok(self.buffer.grant(self.peer, Access::ReadWrite)?);
        let ((), took) = self.ground.timed(grant)?;
        self.buffer.revoke(self.peer)?;
        Ok(vec![("pool: grant of an elastic buffer", took)])
    }
}
