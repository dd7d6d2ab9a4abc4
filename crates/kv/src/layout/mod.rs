//! Where a token's keys and values lie: layers, heads, head size, type, tokens to offsets and blocks.
//!
//! Pure arithmetic: nothing here knows memory, devices or sequences. Whatever is too large for 64 bits
//! is refused when a layout is made, so that later sums cannot overflow.
//!
//! ```
//! use vmm_kv::{BlockLayout, Dtype, KvShape, Order, Part, SequenceLayout};
//!
//! // Llama 3 8B: 32 layers, 8 heads for keys and values of 128 elements, 16 bits each.
//! let shape = KvShape::new(32, 8, 128, Dtype::Bf16)?;
//! assert_eq!(shape.token_bytes(), 128 << 10);
//! // One of four devices that share the heads.
//! assert_eq!(shape.shard(1, 4)?.token_bytes(), 32 << 10);
//!
//! let paged = BlockLayout::new(shape, 16)?;
//! assert_eq!((paged.block_bytes(), paged.blocks_for(33)), (2 << 20, 3));
//!
//! let contiguous = SequenceLayout::new(shape, 131_072, Order::TokenMajor)?;
//! assert_eq!(contiguous.offset(0, Part::Key, 1, 0), contiguous.token_stride_bytes());
//! # Ok::<(), vmm_kv::LayoutError>(())
//! ```

mod block;
mod sequence;
mod shape;

pub use block::BlockLayout;
pub use sequence::{Order, SequenceLayout};
pub use shape::{Dtype, KvShape, LayoutError, Part};
