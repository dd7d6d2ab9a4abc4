//! The paged form: fixed blocks, which sequences have in any order, in one elastic buffer.
//!
//! `bits`, `zone`: which blocks are free, whose chunks stand, what to grow by, give back and pack; plain
//! numbers. `state`: which sequence has which block. `shared`: how memory follows that. `sequence`: the
//! handle of one. `moves`: contents that change their blocks. `tables`: what kernels take. `cache`,
//! `builder`: the handle of all, and its settings. `figures`: what it has and could have.

mod bits;
mod builder;
mod cache;
mod figures;
mod moves;
mod sequence;
mod shared;
mod state;
mod tables;
mod zone;

pub use builder::PagedBuilder;
pub use cache::PagedCache;
pub use moves::Packed;
pub use sequence::PagedSequence;
pub use tables::BlockTables;
