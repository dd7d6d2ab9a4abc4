//! What a heap tells about itself.

/// Where the bytes of a heap are. `mapped_bytes = used_bytes + free_bytes`, and
/// `free_bytes = large_free_bytes + slab_free_bytes + magazine_bytes`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct HeapStats {
    /// Bytes inserted and not removed.
    pub mapped_bytes: u64,
    /// Bytes of the blocks handed out, each rounded to the granule.
    pub used_bytes: u64,
    /// Bytes mapped and not handed out.
    pub free_bytes: u64,
    /// Free bytes that the large placement can give to any request, or give back.
    pub large_free_bytes: u64,
    /// Free bytes inside slabs that also hold other blocks.
    pub slab_free_bytes: u64,
    /// Bytes of freed small blocks held back for the next request of the same size.
    pub magazine_bytes: u64,
    /// Blocks handed out.
    pub blocks: u64,
    /// Slabs taken from the large placement.
    pub slab_count: u64,
    /// Operations counted so far: the clock of [`FreeRun::last_freed_tick`].
    pub tick: u64,
    /// Bytes of host memory held by the tables of this heap.
    pub metadata_bytes: u64,
}

/// A maximal run of free space in the large placement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FreeRun {
    /// Start, in bytes.
    pub offset: u64,
    /// Length, in bytes.
    pub bytes: u64,
    /// The latest tick at which a part of this run became free. Each call of `alloc`, `alloc_at`
    /// and `free` is a tick; the lowest is the coldest.
    pub last_freed_tick: u64,
}
