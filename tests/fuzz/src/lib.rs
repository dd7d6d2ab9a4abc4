//! What is fuzzed: each function takes bytes from outside and panics if something does not hold that
//! must, whatever the bytes are. It says whether they were taken (all or some of them) or refused. `tests/fuzz.sh` runs them under libFuzzer; `tests/short.rs` runs the
//! corpora and seeded changes of them among the ordinary tests.

mod c_abi;
mod environment;
mod peer;
mod reader;
mod trace;

pub use c_abi::c_abi;
pub use environment::environment;
pub use peer::peer;
pub use trace::trace;

/// What takes bytes, and says whether they were taken.
pub type Target = fn(&[u8]) -> bool;

/// Each target by its name, which is that of its corpus.
pub const TARGETS: [(&str, Target); 5] = [
    ("trace", trace),
    ("environment", environment),
    ("wire", wire),
    ("peer", peer),
    ("c_abi", c_abi),
];

/// A message between processes: refused, or of one form.
pub fn wire(bytes: &[u8]) -> bool {
    vmm_share::fuzz_decode(bytes)
}
