use std::path::Path;

use vmm_pool_cli::trace::{Op, Trace};

/// A trace file: an error that names a line of it, or a trace that adds up.
///
/// # Panics
/// If it does not hold.
pub fn trace(bytes: &[u8]) -> bool {
    let path = Path::new("fuzzed.trace");
    let trace = match Trace::read(bytes, path) {
        Ok(trace) => trace,
        Err(error) => {
            assert!(error.to_string().contains("fuzzed.trace"), "{error}");
            return false;
        }
    };
    let mut slots = vec![None; trace.slots];
    let mut blocks = trace.blocks.iter();
    let (mut live_bytes, mut peak_bytes) = (0, 0);
    for op in &trace.ops {
        match *op {
            Op::Alloc { slot } => {
                let bytes = blocks.next().expect("a block for each").bytes;
                assert!(slots[slot as usize].replace(bytes).is_none(), "a slot used twice");
                live_bytes += bytes;
                peak_bytes = peak_bytes.max(live_bytes);
            }
            Op::Free { slot } => {
                live_bytes -= slots[slot as usize].take().expect("what is freed lives");
            }
        }
    }
    assert_eq!(blocks.next(), None);
    assert_eq!(peak_bytes, trace.peak_live_bytes);
    assert_eq!(slots.iter().flatten().count(), trace.left_live);
    assert!(trace.blocks.iter().all(|block| (block.stream as usize) < trace.streams));
    true
}
