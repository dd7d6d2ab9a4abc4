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

/// A buffer of four chunks, of which the first two have a second address: slots 6 and 7.
fn shared() -> Stage {
    let stage = four();
    first(&stage).share(0..2 * G, 6 * G).unwrap();
    stage
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
    let pieces = first(stage).pieces();
    check_slots(stage, pieces.iter().take(4).map(|piece| (piece.offset / G, piece.offset / G)));
}

/// The first of two slots holds what was written at the second.
fn check_slots(stage: &Stage, slots: impl IntoIterator<Item = (u64, u64)>) {
    let address = |slot| first(stage).address() + slot * G;
    for (slot, written_at) in slots {
        let found = stage.sim.peek(address(slot), 1).unwrap();
        assert_eq!(found, [(address(written_at) / G) as u8], "slot {slot} of {written_at}");
    }
}

pub(crate) fn cases() -> Vec<Case> {
    [growth::cases(), uses::cases(), moves::cases()].into_iter().flatten().collect()
}
