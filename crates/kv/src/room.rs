//! [`KvRoom`]: what a cache could still take, for whoever admits requests.

/// How much more a cache could take now: an estimate of the moment, for others take from the same
/// pool. Tokens are bytes over the bytes of a token; each sequence has an unfinished chunk or block
/// beside.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct KvRoom {
    /// Tokens that memory of the cache's device has room for, idle memory of the cache included.
    pub here_tokens: u64,
    /// More of them, in memory of devices that lend to the cache.
    pub borrowed_tokens: u64,
    /// More of them, in memory of the host's nodes that the pool may use: for sequences that are parked,
    /// or as a lender if the cache names it.
    pub host_tokens: u64,
    /// Sequences that can be opened beside those that are open, by the builder's limit.
    pub sequences: u64,
    /// Chunks that can be mapped beside those of the pool's elastic buffers (count): see
    /// [`MAPPINGS_MAX`].
    pub mappings: u64,
}

/// How many chunks a context can have mapped, about: measured on an H100 with 2 MiB pages by the
/// authors of ForkedKV, the same within 1 % whatever the split into ranges; beyond it
/// `cuMemSetAccess` fails. Longer chunks are the way around it.
pub const MAPPINGS_MAX: u64 = 520_000;

/// The addresses that a process can reserve, 128 TiB, in bytes.
pub const ADDRESS_SPACE_BYTES: u64 = 128 << 40;
