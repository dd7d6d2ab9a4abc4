//! Buffers of the pool for other processes.
//!
//! A process that owns a buffer offers it by a name; another one opens it and has the same memory at an
//! address of its own. The driver's descriptors go over a local socket; everything that a descriptor
//! does not say (length, place, order, generation) goes with them, and is checked.
//!
//! ```no_run
//! # use std::sync::Arc;
//! # use vmm_share::{Access, Address, Exporter, Importer, ImporterOptions, Offered};
//! # fn owner(pool: &vmm_pool::Pool) -> Result<(), Box<dyn std::error::Error>> {
//! // The owner.
//! let builder = pool.elastic(vmm_sys::DeviceId(0)).capacity_bytes(1 << 30).exportable(true);
//! let weights = Arc::new(builder.build()?);
//! weights.grow_to(256 << 20)?;
//! let exporter = Exporter::builder().bind(Address::Path("/run/weights.sock".into()))?;
//! let _offer = exporter.offer("weights", &weights, Offered::Read)?;
//! # Ok(()) }
//! # fn other(driver: Arc<dyn vmm_sys::Driver>) -> Result<(), Box<dyn std::error::Error>> {
//! // Another process.
//! let address = Address::Path("/run/weights.sock".into());
//! let importer = Importer::connect(&address, ImporterOptions::new(driver))?;
//! let weights = importer.open("weights", Access::Read)?;
//! let mut word = [0; 4];
//! weights.read(0, &mut word)?;
//! # Ok(()) }
//! ```
//!
//! docs/SHARING.md has the protocol, the life of what is shared, and what can be enforced.
//!
//! `wire`: the messages as bytes. `socket`: bytes and descriptors. `page`: what an importer sees
//! without asking. `exporter`, `importer`: the two sides. `owner`: a
//! process that holds buffers for others. `os`: the only unsafe code.

#![deny(unsafe_code)]

mod address;
mod error;
mod exporter;
#[cfg(test)]
mod hostile;
mod importer;
mod limits;
mod os;
mod owner;
mod page;
mod socket;
mod steps;
mod wire;

pub use address::Address;
pub use error::{Refusal, ShareError};
pub use exporter::{Exporter, ExporterBuilder, ExporterStats, Offer, Offered, PeerRule};
pub use importer::{
    Access, Import, ImportState, ImportUse, ImportedPiece, Importer, ImporterOptions, Refreshed,
    retry_leftovers,
};
pub use os::PeerCredentials;
pub use owner::{
    HeldBuffer, Holder, LeaseState, NamedBuffer, Owner, OwnerBuilder, OwnerClient, OwnerDevice,
    OwnerStatus,
};
#[cfg(any(test, feature = "fault-steps"))]
pub use steps::{EXPORTER_STEPS, IMPORTER_STEPS, OWNER_STEPS, WORKER_STEPS};
#[doc(hidden)]
pub use wire::fuzz_decode;
