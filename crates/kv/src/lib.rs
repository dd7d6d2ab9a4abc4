//! KV caches for inference servers, on elastic buffers of [`vmm_pool`].
//!
//! [`ContiguousCache`] has a sequence at addresses in a row, [`PagedCache`] in blocks and tables; docs/KV.md
//! has a step of each, their states and what can go wrong. [`layout`] says where a token's keys and
//! values lie: pure arithmetic.
//!
//! What the forms have in common: `settings`, of which they are built; `memory`, the buffer and what is done when memory is short;
//! `hands`, who changes it; `grower`, the thread that grows ahead; `shortage`, hooks that evict;
//! `stats` and `room`, the figures.

#![forbid(unsafe_code)]

pub mod contiguous;
pub mod error;
mod grower;
mod hands;
pub mod layout;
mod memory;
mod paged;
mod room;
mod settings;
mod shortage;
mod stats;
mod sync;

pub use contiguous::{ContiguousBuilder, ContiguousCache, KvCapacity, Sequence};
pub use error::KvError;
pub use layout::{BlockLayout, Dtype, KvShape, LayoutError, Order, Part, SequenceLayout};
pub use memory::Lending;
pub use paged::{BlockTables, Packed, PagedBuilder, PagedCache, PagedSequence};
pub use room::{ADDRESS_SPACE_BYTES, KvRoom, MAPPINGS_MAX};
pub use shortage::{EvictionHook, KvShortage};
pub use stats::KvStats;
