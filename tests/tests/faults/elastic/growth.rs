//! Memory that comes and goes.

use vmm_pool::{AheadState, Growth};
use vmm_sys::Access;
use vmm_sys::sim::SimBuilder;

use super::{borrower, check, first, four};
use crate::engine::{Case, Done, done};
use crate::stage::{G, HOME, HOST, NEXT, SOON, stage, threaded, usual};

pub(super) fn cases() -> Vec<Case> {
    vec![
        Case::new(
            "elastic::build",
            &["ElasticBuilder::build"],
            || {
                let stage = usual();
                stage.pool().grant(HOME, NEXT, Access::Read).unwrap();
                stage
            },
            |stage| {
                let buffer = stage.pool().elastic(HOME).build()?;
                stage.elastic.push(buffer);
                Ok(())
            },
            |stage| assert_eq!(first(stage).access(NEXT), Access::Read),
        ),
        Case::new(
            "elastic::build_for_a_peer",
            &["ElasticBuilder::build"],
            usual,
            |stage| {
                let builder = stage.elastic_builder().access([(NEXT, Access::ReadWrite)]);
                stage.elastic.push(builder.build()?);
                Ok(())
            },
            |stage| assert_eq!(first(stage).access(NEXT), Access::ReadWrite),
        ),
        Case::new(
            "elastic::grow_to",
            &["ElasticBuffer::grow_to"],
            || {
                let stage = four();
                stage.pool().prefill(HOME, G).unwrap();
                stage
            },
            |stage| done(first(stage).grow_to(7 * G)),
            |stage| check(stage, 7),
        ),
        Case::new(
            "elastic::grow_for_a_peer",
            &["ElasticBuffer::grow_to"],
            || {
                let stage = four();
                first(&stage).grant(NEXT, Access::ReadWrite).unwrap();
                stage
            },
            |stage| done(first(stage).grow_to(7 * G)),
            |stage| check(stage, 7),
        ),
        Case::new(
            "elastic::grow_scrubbed",
            &["ElasticBuffer::grow_to"],
            || {
                let stage = usual().with_built(2, |builder| builder.scrub(true)).with_elastic(3);
                stage.elastic[1].shrink_to(0).unwrap();
                stage
            },
            |stage| done(first(stage).grow_to(6 * G)),
            |stage| {
                assert_eq!(first(stage).committed_bytes(), 6 * G);
                for piece in &first(stage).pieces()[2..] {
                    let found = stage.sim.peek(piece.address, 64).unwrap();
                    assert_eq!(found, [0; 64], "what the other wrote is seen");
                }
            },
        ),
        Case::new(
            "elastic::commit",
            &["ElasticBuffer::commit"],
            four,
            |stage| done(first(stage).commit(6 * G..8 * G)),
            |stage| check(stage, 6),
        ),
        Case::new(
            "elastic::grow_ranges",
            &["ElasticBuffer::grow"],
            four,
            |stage| done(first(stage).grow(Growth::ranges([20 * G..22 * G, 2 * G..5 * G]))),
            |stage| check(stage, 7),
        ),
        Case::new(
            "elastic::commit_from_a_neighbour",
            &["ElasticBuffer::commit_from"],
            four,
            |stage| done(first(stage).commit_from(NEXT.into(), 6 * G..8 * G)),
            |stage| {
                check(stage, 6);
                assert_eq!(stage.count_at(NEXT), 2);
            },
        ),
        Case::new(
            "elastic::commit_from_the_host",
            &["ElasticBuffer::commit_from"],
            four,
            |stage| done(first(stage).commit_from(HOST, 3 * G..6 * G)),
            |stage| {
                check(stage, 6);
                assert_eq!(stage.count_at(HOST), 2);
            },
        ),
        Case::new(
            "elastic::grow_borrows",
            &["ElasticBuffer::grow"],
            || {
                // A lender whose chunk lies ready, and which has too little: the host has the rest.
                let sim = |sim: SimBuilder| sim.device_bytes_of(0, 6 * G);
                let stage = stage(sim, |pool| pool.lend(NEXT, 2 * G)).with_elastic(4);
                stage.pool().prefill(NEXT, G).unwrap();
                stage
            },
            |stage| {
                let growth = Growth::to(10 * G).borrow_from([NEXT.into(), HOST]);
                done(first(stage).grow(growth))
            },
            |stage| {
                check(stage, 10);
                // All from the host, if what was asked of the neighbour failed.
                assert_eq!(stage.count_at(NEXT) + stage.count_at(HOST), 4);
            },
        ),
        Case::new(
            "elastic::grow_ahead",
            &["ElasticBuffer::grow_ahead", "GrowAhead::wait"],
            four,
            |stage| ended(first(stage).grow_ahead(6 * G)?.wait(SOON)),
            |stage| check(stage, 6),
        ),
        Case::new(
            "elastic::grow_ahead_in_the_background",
            &["ElasticBuffer::grow_ahead", "GrowAhead::wait"],
            || threaded().with_elastic(4),
            |stage| ended(first(stage).grow_ahead(6 * G)?.wait(SOON)),
            |stage| check(stage, 6),
        ),
        Case::new(
            "elastic::shrink_to",
            &["ElasticBuffer::shrink_to"],
            four,
            |stage| done(first(stage).shrink_to(G)),
            |stage| {
                stage.pool().trim(HOME).unwrap();
                check(stage, 1);
                let stats = stage.pool().device_stats(HOME).unwrap();
                assert_eq!(stats.held_bytes, G, "{stats:?}");
            },
        )
        .quiet(),
        Case::new(
            "elastic::decommit",
            &["ElasticBuffer::decommit", "Use::drop"],
            || {
                let stage = four();
                drop(first(&stage).use_on(&stage.streams[0]).unwrap());
                drop(first(&stage).use_on(&stage.streams[1]).unwrap());
                stage
            },
            |stage| done(first(stage).decommit(G..3 * G)),
            |stage| {
                assert_eq!(first(stage).committed_bytes(), 2 * G);
                first(stage).grow_to(4 * G).unwrap();
                stage.pool().trim(HOME).unwrap();
            },
        )
        .quiet(),
        Case::new(
            "elastic::drop",
            &["ElasticBuffer::drop"],
            || {
                let stage = borrower();
                drop(first(&stage).use_on(&stage.streams[1]).unwrap());
                stage
            },
            |stage| {
                stage.elastic.clear();
                Ok(())
            },
            |stage| {
                for device in [HOME, NEXT] {
                    stage.pool().trim(device).unwrap();
                    let stats = stage.pool().device_stats(device).unwrap();
                    let held_bytes = stats.held_bytes - stats.anchor_bytes;
                    assert_eq!((held_bytes, stats.lent_bytes), (0, 0), "{stats:?}");
                }
            },
        )
        .quiet(),
    ]
}

/// What a growth ahead became.
fn ended(state: AheadState) -> Done {
    match state {
        AheadState::Done => Ok(()),
        AheadState::Failed(error) => Err(error.into()),
        state => panic!("it hangs: {state:?}"),
    }
}
