//! [`PagedBuilder`]: the settings of a paged cache, validated once.

use std::sync::Arc;

use vmm_pool::{Place, Pool};
use vmm_sys::Call;
use vmm_sys::caught::caught;
use vmm_sys::object::Stream;

use super::cache::PagedCache;
use super::shared::Shared;
use super::state::State;
use super::zone::{Geometry, Zone};
use crate::error::KvError;
use crate::grower::Grower;
use crate::layout::{BlockLayout, KvShape};
use crate::memory::{Lending, helper};
use crate::settings::{Settings, refuse};

/// Chunks that whole blocks fill are not made longer than that, in bytes: the length of a long chunk
/// that still comes and goes quickly.
const FITTING_CHUNK_MAX_BYTES: u64 = 32 << 20;

/// Settings of a paged cache; see [`PagedCache::builder`].
#[derive(Clone, Debug)]
pub struct PagedBuilder {
    common: Settings,
    block_tokens: u32,
    max_blocks: Option<u32>,
    host: Option<(Place, u32)>,
    ahead_blocks: u32,
}

impl PagedBuilder {
    pub(super) fn new(pool: &Pool, stream: &Stream, shape: KvShape) -> PagedBuilder {
        PagedBuilder {
            common: Settings::new(pool.clone(), stream.clone(), shape, 0),
            block_tokens: 16,
            max_blocks: None,
            host: None,
            ahead_blocks: 64,
        }
    }

    /// Tokens of a block. Default: 16.
    pub fn block_tokens(mut self, tokens: u32) -> Self {
        self.block_tokens = tokens;
        self
    }

    /// How many blocks there are at most: as many addresses are reserved, which costs no memory. Default:
    /// as many as the device's whole memory holds.
    pub fn max_blocks(mut self, blocks: u32) -> Self {
        self.max_blocks = Some(blocks);
        self
    }

    /// Blocks in the memory of `place`, most often a node of the host, behind those of the device: sequences are
    /// parked there. Their memory, too, comes only when it is needed. Default: none.
    pub fn host_blocks(mut self, place: impl Into<Place>, blocks: u32) -> Self {
        self.host = Some((place.into(), blocks));
        self
    }

    /// The length of the chunks that memory comes and goes by, in bytes: a multiple of the granularity.
    /// Best is a multiple of the length of a block: else blocks lie across two chunks, which both must
    /// be there for one block, and packing gives less back. Default: the shortest such chunk, if
    /// that is no longer than 32 MiB; else the granularity.
    pub fn chunk_bytes(mut self, bytes: u64) -> Self {
        self.common.chunk_bytes = Some(bytes);
        self
    }

    /// How many free blocks the background thread keeps committed ahead; when fewer than half of
    /// them are left it commits more. Default: 64.
    pub fn ahead_blocks(mut self, blocks: u32) -> Self {
        self.ahead_blocks = blocks;
        self
    }

    /// How much memory without tokens is kept, in bytes, beside what is kept ahead. Default: none.
    pub fn keep_idle_bytes(mut self, bytes: u64) -> Self {
        self.common.keep_idle_bytes = bytes;
        self
    }

    /// Who lends what the device has not. Default: nobody.
    pub fn lenders(mut self, lending: Lending) -> Self {
        self.common.lending = lending;
        self
    }

    /// A label of the owner: [`Pool::sleep`] and the statistics know the buffer by it.
    pub fn tag(mut self, tag: &str) -> Self {
        self.common.tag = Some(tag.to_owned());
        self
    }

    /// What the cache may commit at most, in bytes, its blocks on the host included. Default: no limit.
    pub fn quota_bytes(mut self, bytes: u64) -> Self {
        self.common.quota_bytes = Some(bytes);
        self
    }

    /// Whether a thread of the cache grows ahead and gives back. Without it who appends or ends a sequence
    /// does that work. Default: true.
    pub fn background(mut self, on: bool) -> Self {
        self.common.background = on;
        self
    }

    /// Reserves the addresses. Nothing is committed.
    ///
    /// # Errors
    /// [`KvError::Layout`], [`KvError::BadSetting`]; the pool's.
    pub fn build(self) -> Result<PagedCache, KvError> {
        let layout = BlockLayout::new(self.common.shape, self.block_tokens)?;
        let chunk_bytes = self.common.chunk_bytes_or(|| self.fitting_chunk_bytes(&layout))?;
        let max_blocks = self.block_count(&layout)?;
        let device = Geometry {
            first_block: 0,
            blocks: max_blocks,
            block_bytes: layout.block_bytes(),
            chunk_bytes,
            keeps_first: true,
        };
        let host = self.host.map(|(_, blocks)| behind(&device, blocks)).transpose()?;
        let capacity_bytes = host.as_ref().unwrap_or(&device).bytes().end;
        let memory = self.common.memory(capacity_bytes, chunk_bytes)?;
        let bell = memory.bell.clone();
        let state = State::new(Zone::new(device), host.map(Zone::new));
        let mut shared = Shared::new(memory, layout, state);
        shared.host = self.host.map(|(place, _)| place);
        shared.ahead_blocks = self.ahead_blocks.into();
        shared.keep_idle_bytes = self.common.keep_idle_bytes;
        let shared = Arc::new(shared);
        let grower = self.common.background.then(|| Grower::start(shared.clone(), bell));
        let hook = self.common.pool.on_shortage(helper(&shared));
        Ok(PagedCache::new(shared, grower, hook))
    }

    /// The shortest chunks that whole blocks fill, unless they are long.
    fn fitting_chunk_bytes(&self, layout: &BlockLayout) -> Result<u64, KvError> {
        let mut granularity_bytes = self.common.granularity_bytes(self.common.home())?;
        if let Some((place, _)) = self.host {
            granularity_bytes = granularity_bytes.max(self.common.granularity_bytes(place)?);
        }
        let fitting = layout.block_bytes() / gcd(layout.block_bytes(), granularity_bytes);
        let fitting_bytes = fitting.checked_mul(granularity_bytes);
        let short_bytes = fitting_bytes.filter(|bytes| *bytes <= FITTING_CHUNK_MAX_BYTES);
        Ok(short_bytes.unwrap_or(granularity_bytes))
    }

    fn block_count(&self, layout: &BlockLayout) -> Result<u32, KvError> {
        let blocks = match self.max_blocks {
            Some(blocks) => blocks,
            None => {
                let bytes = caught(Call::DeviceTotalMem, || {
                    self.common.pool.driver().device_total_bytes(self.common.stream.device())
                })?;
                u32::try_from(bytes / layout.block_bytes()).unwrap_or(u32::MAX)
            }
        };
        let host_blocks = self.host.map_or(0, |(_, blocks)| blocks);
        // Kernels take block numbers of 31 bits; half of them, so that no sum overflows.
        match blocks.checked_add(host_blocks) {
            Some(all) if blocks > 0 && all <= 1 << 30 => {}
            _ => return Err(refuse("max_blocks", blocks, "1 to 2^30, those of the host included")),
        }
        layout.blocks_bytes(u64::from(blocks) + u64::from(host_blocks))?;
        Ok(blocks)
    }
}

/// The zone behind another one, in chunks of its own.
fn behind(device: &Geometry, blocks: u32) -> Result<Geometry, KvError> {
    let first_block = device.bytes().end.div_ceil(device.block_bytes);
    match u32::try_from(first_block).ok().filter(|first| *first <= 1 << 30) {
        Some(first_block) if blocks > 0 => {
            Ok(Geometry { first_block, blocks, keeps_first: false, ..*device })
        }
        _ => Err(refuse("host_blocks", blocks, "at least 1, and 2^30 blocks in all")),
    }
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a.max(1) } else { gcd(b, a % b) }
}
