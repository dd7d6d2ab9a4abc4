//! The settings of the forms whose memory grows.

use vmm_kv::{BlockTables, ContiguousCache, KvError, KvShape, Lending, PagedCache};
use vmm_pool::Pool;
use vmm_sys::object::Stream;

use super::{CacheSettings, HOST};

/// Which part of the pool's limit the contiguous form keeps idle, at most.
const IDLE_SHARE: u64 = 16;

pub(super) fn contiguous(
    pool: &Pool,
    stream: &Stream,
    shape: KvShape,
    settings: &CacheSettings,
) -> Result<ContiguousCache, KvError> {
    let share = || pool.device_stats(stream.device()).map_or(0, |it| it.limit_bytes / IDLE_SHARE);
    ContiguousCache::builder(pool, stream, shape)
        .max_tokens(u64::from(settings.max_tokens))
        .max_sequences(settings.max_sequences)
        .chunk_bytes(settings.chunk_bytes)
        .keep_idle_bytes(settings.keep_idle_bytes.unwrap_or_else(share))
        .lenders(lending(settings))
        .tag(&settings.tag)
        .background(settings.background)
        .build()
}

/// The cache, and tables for its batches.
pub(super) fn paged(
    pool: &Pool,
    stream: &Stream,
    shape: KvShape,
    settings: &CacheSettings,
) -> Result<(PagedCache, BlockTables), KvError> {
    let block_bytes = shape.token_bytes().saturating_mul(u64::from(settings.block_tokens)).max(1);
    let blocks = |bytes: u64| u32::try_from(bytes / block_bytes).unwrap_or(u32::MAX);
    let mut device_bytes = pool.driver().device_total_bytes(stream.device())?;
    if settings.borrows {
        // As much again of others: addresses cost nothing.
        device_bytes = device_bytes.saturating_mul(2);
    }
    let mut builder = PagedCache::builder(pool, stream, shape)
        .block_tokens(settings.block_tokens)
        .max_blocks(blocks(device_bytes).min(BLOCKS_MAX))
        .keep_idle_bytes(settings.keep_idle_bytes.unwrap_or(u64::MAX))
        .lenders(lending(settings))
        .tag(&settings.tag)
        .background(settings.background);
    if settings.host_bytes > 0 {
        builder = builder.host_blocks(HOST, blocks(settings.host_bytes).clamp(1, BLOCKS_MAX));
    }
    let row_blocks = settings.max_tokens.div_ceil(settings.block_tokens) as usize;
    let tables = BlockTables::new(settings.max_sequences as usize, row_blocks);
    Ok((builder.build()?, tables))
}

/// Kernels take block numbers of 31 bits, those of the host included.
const BLOCKS_MAX: u32 = 1 << 29;

fn lending(settings: &CacheSettings) -> Lending {
    if settings.borrows { Lending::Any } else { Lending::Nobody }
}
