//! A pool of GPU memory on the CUDA virtual memory management calls.
//!
//! It takes physical memory from the driver in chunks and hands out **stable virtual addresses**.
//! A warm allocation or free makes no driver call.
//!
//! ```
//! use vmm_pool::Pool;
//! use vmm_sys::{DeviceId, object::Stream, sim::Sim};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let driver: std::sync::Arc<dyn vmm_sys::Driver> = Sim::builder().build();
//! let pool = Pool::builder(driver.clone()).build()?;
//! let lane = pool.lane(&Stream::create(&driver, DeviceId(0))?)?;
//!
//! let buffer = lane.alloc(1 << 20)?; // a miss: chunks are created and mapped
//! buffer.write(0, b"bytes")?;
//! drop(buffer); // free again in the stream's order
//!
//! let calls = driver.ledger().snapshot();
//! let again = lane.alloc(1 << 20)?; // warm: no driver call
//! assert_eq!(driver.ledger().snapshot().since(&calls).total(), 0);
//! # drop(again);
//! # Ok(())
//! # }
//! ```
//!
//! The way down, each room knowing only those below: [`Pool`] finds a device and a [`Lane`]; the
//! lane's heap places a block (package `vmm-heap`, plain numbers); on a miss, growth decides which
//! chunks go where, the region maps them, the stock gives them or the driver makes them
//! (package `vmm-sys`). docs/ARCHITECTURE.md walks one allocation down and up.

#![forbid(unsafe_code)]

mod access_matrix;
mod account;
mod background;
mod balance;
mod broken;
mod budget;
mod buffer;
mod capture;
mod carries;
mod config;
mod depot;
mod device;
mod directory;
mod elastic;
mod error;
mod events;
mod growth;
mod host;
mod idle;
mod ladder;
mod landing;
mod lane;
mod lanes;
mod leaving;
mod lending;
mod mover;
mod obstacle;
mod out_of_memory;
mod past;
mod peers;
mod place;
mod places;
mod policy;
mod pool;
mod region;
mod request;
mod room;
mod stats;
mod stock;
mod stranded;
mod sync;
mod trace;
mod turn;
mod verify;

pub use access_matrix::{AccessMatrix, AccessPair};
pub use balance::{Balance, BalanceMove, BalanceStats, BalanceVerdict};
pub use broken::{Broken, BrokenPart};
pub use budget::Budget;
pub use buffer::Buffer;
pub use capture::{CaptureScope, GraphMemory};
pub use config::{ChunkSize, DebugMode, Placement, text};
#[doc(hidden)]
pub use elastic::operation::is_operating;
pub use elastic::{
    AheadState, BackingChange, BackingHook, Cause, Contents, DmaBuf, ElasticBuffer, ElasticBuilder,
    ElasticError, ElasticStats, GrowAhead, Grown, Growth, LenderAnswer, Migration, MigrationState,
    Move, Moved, NotRecalled, PeerFault, Phase, Piece, Recall, Refusal, Slept, Use,
};
pub use error::Error;
pub use ladder::{LadderStats, Relief, ShortageHook};
pub use lane::Lane;
pub use lane::raw::{RawBlock, block_of, free_raw, free_raw_on, record_stream_raw};
pub use out_of_memory::{Hint, OutOfMemory};
pub use peers::PeerVerdict;
pub use place::Place;
pub use pool::{Pool, PoolBuilder};
pub use request::Request;
pub use room::{LenderRoom, Room};
pub use stats::{DeviceStats, HostStats, PoolStats};
