//! What the benchmarks share: what is measured ([`subject`]), the load on it ([`work`], [`mix`]),
//! and where the figures go ([`setup`], [`facts`], [`record`]).
//!
//! docs/BENCHMARKS.md says how to run them and what may be compared with what.
//!
//! Nothing here is tuned to the pool: a subject is asked for bytes and given them back, whichever
//! it is.

#![forbid(unsafe_code)]

pub mod facts;
pub mod mix;
pub mod record;
pub mod samples;
pub mod setup;
pub mod subject;
pub mod work;
