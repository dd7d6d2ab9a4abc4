//! KV caches for inference servers, on elastic buffers of [`vmm_pool`].
//!
//! [`layout`] says where a token's keys and values lie: pure arithmetic.

#![forbid(unsafe_code)]

pub mod error;
pub mod layout;
mod paged;

pub use error::KvError;
pub use layout::{BlockLayout, Dtype, KvShape, LayoutError, Order, Part, SequenceLayout};
