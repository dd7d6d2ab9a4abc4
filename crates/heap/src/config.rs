//! Settings of a heap, and the values they resolve to.

use crate::GRANULE_BYTES;

/// How blocks that are not small find their place.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Placement {
    /// At a multiple of the power of two that covers the request, in the free run whose largest
    /// aligned piece fits most closely. A few instructions, but live blocks are scattered, so a
    /// pool moves more memory to serve the next large request.
    Buddy,
    /// At the lowest address that fits. Low addresses fill up and high ones drain into whole
    /// chunks: the denser one.
    #[default]
    FirstFit,
}

/// Settings of a [`Heap`](crate::Heap). Values out of range are moved to the nearest one in range;
/// [`Heap::config`](crate::Heap::config) reads them back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct HeapConfig {
    /// How blocks that are not small find their place.
    pub placement: Placement,
    /// Bytes of a slab: a power of two from 64 KiB to 4 MiB.
    pub slab_bytes: u64,
    /// The largest request, in bytes, that is served from slabs; 0 means no slabs. A multiple of
    /// the granule, at most `slab_bytes`.
    pub small_max_bytes: u64,
    /// How many freed blocks a magazine holds back for each exact small size; 0 means none.
    pub magazine_depth: u32,
}

/// Below this a slab is not worth its table; with it, handles of slabs stay within 32 bits.
const SLAB_BYTES_MIN: u64 = 64 << 10;
/// Lengths inside a slab are kept in 14 bits of granules.
const SLAB_BYTES_MAX: u64 = 4 << 20;

impl Default for HeapConfig {
    fn default() -> Self {
        Self {
            placement: Placement::default(),
            slab_bytes: 2 << 20,
            small_max_bytes: 256 << 10,
            magazine_depth: 16,
        }
    }
}

impl HeapConfig {
    /// The same settings with every value in range.
    pub(crate) fn resolve(self) -> Self {
        let slab_bytes = self.slab_bytes.clamp(SLAB_BYTES_MIN, SLAB_BYTES_MAX).next_power_of_two();
        let small_max_bytes = self.small_max_bytes.min(slab_bytes) & !(GRANULE_BYTES - 1);
        Self { slab_bytes, small_max_bytes, ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_out_of_range_move_to_the_nearest() {
        let wild = HeapConfig {
            slab_bytes: 3 << 20,
            small_max_bytes: u64::MAX,
            magazine_depth: 0,
            placement: Placement::Buddy,
        };
        let config = wild.resolve();
        assert_eq!(config.slab_bytes, 4 << 20);
        assert_eq!(config.small_max_bytes, 4 << 20);
        assert_eq!(config.placement, Placement::Buddy);
        let tiny = HeapConfig { slab_bytes: 0, small_max_bytes: 1000, ..wild }.resolve();
        assert_eq!((tiny.slab_bytes, tiny.small_max_bytes), (64 << 10, 512));
        let default = HeapConfig::default();
        assert_eq!(default.resolve(), default);
    }
}
