//! Placement of blocks in one address space, over plain numbers.
//!
//! A [`Heap`] hands out byte offsets from 0. It knows no driver, no stream and no memory: its owner
//! tells it which parts of the space are backed ([`Heap::insert_free`], [`Heap::remove_free`]) and
//! asks for blocks inside them. When nothing fits, the answer is a [`Miss`] that says what would
//! have helped; [`Heap::windows`] then lists the places where new backing makes the request fit.
//!
//! # How a request is placed
//!
//! 1. It is rounded up to the granule of [`GRANULE_BYTES`], and no further.
//! 2. A small one (`small_max_bytes`, 256 KiB by default) is taken from a magazine, a short stack
//!    of freed blocks of exactly this size; else from the free blocks inside the slabs, best fit;
//!    else from a new slab.
//! 3. A larger one, and a slab, is taken from the large placement, [`Placement::FirstFit`] or
//!    [`Placement::Buddy`]. Both cut the block to size, give the rest back at once, and merge at
//!    once when it is freed.
//!
//! Memory in a magazine or in an empty part of a slab cannot serve another size, so
//! [`Heap::drain`] must come before any growth.
//!
//! # Costs
//!
//! A warm operation takes no lock, allocates nothing on the host, and finds a block from its offset
//! through two small tables, without a hash. Room for spans is reserved when space is inserted;
//! only a slab more than ever before, or blocks far smaller than 256 KiB in the large placement,
//! make a table grow. Operations that come with a driver call anyway, such as growth, may be linear
//! in the number of blocks.
//!
//! ```
//! use vmm_heap::{Heap, HeapConfig};
//!
//! let mut heap = Heap::new(HeapConfig::default());
//! let miss = heap.alloc(100_000, 256).unwrap_err();
//! assert_eq!(miss.bytes, 2 << 20); // a small request asks for a whole slab
//! heap.insert_free(0, 32 << 20); // 32 MiB were mapped at offset 0
//! let small = heap.alloc(100_000, 256)?;
//! let large = heap.alloc(5_000_000, 256)?;
//! assert_eq!(heap.free(small.offset)?, small.bytes);
//! assert_eq!(heap.free(large.offset)?, large.bytes);
//! assert!(heap.free(large.offset).is_err()); // a second free is an error, and changes nothing
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![deny(unsafe_code)]

mod config;
mod error;
mod heap;
mod large;
mod slab;
mod sparse;
mod stats;
mod verify;

pub use config::{HeapConfig, Placement};
pub use error::{Miss, NotAllocated, NotFree};
pub use heap::{Block, Heap};
pub use stats::{FreeRun, HeapStats};

/// Bytes of a granule: every block is a multiple of it, and every offset is aligned to it.
pub const GRANULE_BYTES: u64 = 512;

/// `log2` of [`GRANULE_BYTES`].
pub(crate) const GRANULE_SHIFT: u32 = GRANULE_BYTES.trailing_zeros();

/// Bytes of the largest space: no device has a wider address range, and offsets below it leave
/// room to round up without overflow.
pub(crate) const SPACE_BYTES: u64 = 1 << 47;

/// The end of a chain in any of the index-linked lists.
pub(crate) const NIL: u32 = u32::MAX;

/// `bytes` rounded up to the granule; what does not fit into 64 bits becomes the largest multiple.
#[inline]
pub(crate) fn round_to_granule(bytes: u64) -> u64 {
    bytes.max(1).checked_next_multiple_of(GRANULE_BYTES).unwrap_or(!(GRANULE_BYTES - 1))
}

/// `offset` rounded up to `align`, a power of two.
pub(crate) fn align_up(offset: u64, align: u64) -> u64 {
    // No overflow: offsets are at most SPACE_BYTES, alignments at most 2^63.
    (offset + (align - 1)) & !(align - 1)
}

/// `offset` rounded down to `align`, a power of two.
pub(crate) fn align_down(offset: u64, align: u64) -> u64 {
    offset & !(align - 1)
}

/// Property tests are the same in every run: a fixed seed, and no file of earlier failures.
#[cfg(test)]
pub(crate) fn test_config() -> proptest::test_runner::Config {
    proptest::test_runner::Config {
        cases: 500,
        failure_persistence: None,
        rng_seed: proptest::test_runner::RngSeed::Fixed(20_261_129),
        ..Default::default()
    }
}
