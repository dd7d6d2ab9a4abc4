//! Elastic buffers.

mod growth;
mod moves;
mod uses;

use vmm_pool::{ElasticBuffer, Growth};

use crate::engine::Case;
use crate::stage::{G, NEXT, Stage, stage, usual};

/// A buffer of four chunks.
fn four() -> Stage {
    usual().with_elastic(4)
}

/// A buffer that fills its home of four chunks.
fn full() -> Stage {
    stage(|sim| sim.device_bytes_of(0, 4 * G), |pool| pool.lend(NEXT, 64 * G)).with_elastic(4)
}

/// One that borrows two more.
fn borrower() -> Stage {
    let stage = full();
    stage.elastic[0].grow(Growth::to(6 * G).borrow_from_any()).unwrap();
    stage.mark_elastic();
    stage
}

fn first(stage: &Stage) -> &ElasticBuffer {
    &stage.elastic[0]
}

/// So many chunks, of which the first four hold what they held.
fn check(stage: &Stage, chunks: u64) {
    assert_eq!(first(stage).committed_bytes(), chunks * G);
    for piece in first(stage).pieces().into_iter().take(4) {
        let found = stage.sim.peek(piece.address, 1).unwrap();
        assert_eq!(found, [(piece.address / G) as u8], "the bytes at {:#x}", piece.address);
    }
}

pub(crate) fn cases() -> Vec<Case> {
    [growth::cases(), uses::cases(), moves::cases()].into_iter().flatten().collect()
}
