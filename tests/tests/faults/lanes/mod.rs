//! Pools, and the lanes of streams.

mod allocation;
mod captures;
mod pools;
mod raw;

use crate::engine::{Case, Done};
use crate::stage::{G, Stage, usual};

fn lanes() -> Stage {
    usual().with_lanes()
}

/// A lane with two blocks, and one that was given back.
fn filled() -> Stage {
    let mut stage = lanes();
    stage.alloc(0, 3 * G);
    stage.alloc(0, 2 * G);
    stage.alloc(0, 5 * G);
    drop(stage.buffers.remove(1));
    stage
}

/// Takes a block of a lane.
fn take(stage: &mut Stage, lane: usize, bytes: u64) -> Done {
    let buffer = stage.lanes[lane].alloc(bytes)?;
    stage.mark(buffer.address());
    stage.buffers.push(buffer);
    Ok(())
}

/// Every block can be written to its end, and nobody has written into another.
fn check_blocks(stage: &Stage) {
    for buffer in &stage.buffers {
        let mut found = [0];
        buffer.read(0, &mut found).unwrap();
        assert_eq!(found, [(buffer.address() / G) as u8]);
        buffer.write(buffer.bytes() - 1, &[7]).unwrap();
    }
}

fn blocks(count: usize) -> impl Fn(&Stage) {
    move |stage| {
        assert_eq!(stage.buffers.len(), count);
        check_blocks(stage);
    }
}

pub(crate) fn cases() -> Vec<Case> {
    [pools::cases(), allocation::cases(), captures::cases(), raw::cases()]
        .into_iter()
        .flatten()
        .collect()
}
