//! What the benchmarks share: what is measured ([`subject`]), the load on it ([`work`], [`mix`]), how it
//! is timed ([`timed`], [`samples`]), and where the figures go ([`setup`], [`facts`], [`record`]).
//! [`cross`] is a program's own: the parts of `src/bin/cross.rs`; so is [`fidelity`].
//!
//! docs/BENCHMARKS.md says how to run them and what may be compared with what.
//!
//! Nothing here is tuned to the pool: a subject is asked for bytes and given them back, whichever
//! it is.

#![deny(unsafe_code)] // `gpu` has the few exceptions, each with its reason

pub mod cross;
pub mod facts;
pub mod fidelity;
pub mod gpu;
pub mod mix;
pub mod record;
pub mod samples;
pub mod setup;
pub mod subject;
pub mod timed;
pub mod work;
