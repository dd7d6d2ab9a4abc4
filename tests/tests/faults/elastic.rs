//! Elastic buffers.

use vmm_pool::{
    AheadState, Balance, Cause, Contents, ElasticBuffer, Growth, MigrationState, Move, Phase,
};
use vmm_sys::Access;

use crate::engine::{Case, Done, Scene};
use crate::stage::{G, HOME, HOST, NEXT, SOON, Stage, stage, threaded, usual};

/// A buffer of four chunks.
fn four() -> Stage {
    usual().with_elastic(4)
}

fn exportable() -> Stage {
    usual().with_built(4, |builder| builder.exportable(true))
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

fn asleep(contents: Contents) -> Stage {
    let stage = usual().with_built(4, |builder| builder.tag("kv"));
    stage.elastic[0].sleep(contents, SOON).unwrap();
    stage
}

const KEPT: Contents = Contents::Kept { node: 0 };

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

fn growth() -> Vec<Case> {
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
            |stage| first(stage).grow_to(7 * G).map(drop).map_err(Into::into),
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
            |stage| first(stage).grow_to(7 * G).map(drop).map_err(Into::into),
            |stage| check(stage, 7),
        ),
        Case::new(
            "elastic::grow_scrubbed",
            &["ElasticBuffer::grow_to"],
            || {
                let stage = usual().with_built(4, |builder| builder.scrub(true)).with_elastic(3);
                first(&stage).shrink_to(2 * G).unwrap();
                stage.elastic[1].shrink_to(G).unwrap();
                stage
            },
            |stage| first(stage).grow_to(5 * G).map(drop).map_err(Into::into),
            |stage| assert_eq!(first(stage).committed_bytes(), 5 * G),
        ),
        Case::new(
            "elastic::commit",
            &["ElasticBuffer::commit"],
            four,
            |stage| first(stage).commit(6 * G..8 * G).map(drop).map_err(Into::into),
            |stage| check(stage, 6),
        ),
        Case::new(
            "elastic::commit_from_a_neighbour",
            &["ElasticBuffer::commit_from"],
            four,
            |stage| {
                first(stage).commit_from(NEXT.into(), 6 * G..8 * G).map(drop).map_err(Into::into)
            },
            |stage| {
                check(stage, 6);
                assert_eq!(stage.count_at(NEXT), 2);
            },
        ),
        Case::new(
            "elastic::commit_from_the_host",
            &["ElasticBuffer::commit_from"],
            four,
            |stage| first(stage).commit_from(HOST, 6 * G..8 * G).map(drop).map_err(Into::into),
            |stage| {
                check(stage, 6);
                assert_eq!(stage.count_at(HOST), 2);
            },
        ),
        Case::new(
            "elastic::grow_borrows",
            &["ElasticBuffer::grow"],
            full,
            |stage| {
                let growth = Growth::to(7 * G).borrow_from_any();
                first(stage).grow(growth).map(drop).map_err(Into::into)
            },
            |stage| {
                check(stage, 7);
                assert_eq!(stage.count_at(NEXT), 3);
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
        Case::quiet(
            "elastic::shrink_to",
            &["ElasticBuffer::shrink_to"],
            four,
            |stage| first(stage).shrink_to(G).map(drop).map_err(Into::into),
            |stage| {
                stage.pool().trim(HOME).unwrap();
                check(stage, 1);
                let stats = stage.pool().device_stats(HOME).unwrap();
                assert_eq!(stats.held_bytes, G, "{stats:?}");
            },
        ),
        Case::quiet(
            "elastic::decommit",
            &["ElasticBuffer::decommit", "Use::drop"],
            || {
                let stage = four();
                drop(first(&stage).use_on(&stage.streams[0]).unwrap());
                drop(first(&stage).use_on(&stage.streams[1]).unwrap());
                stage
            },
            |stage| first(stage).decommit(G..3 * G).map(drop).map_err(Into::into),
            |stage| {
                assert_eq!(first(stage).committed_bytes(), 2 * G);
                first(stage).grow_to(4 * G).unwrap();
                stage.pool().trim(HOME).unwrap();
            },
        ),
        Case::quiet(
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
        ),
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

/// What a move became.
fn moved(state: MigrationState) -> Done {
    match state {
        MigrationState::Done(_) => Ok(()),
        MigrationState::Failed(error) => Err(error.into()),
        state => panic!("it hangs: {state:?}"),
    }
}

fn use_and_access() -> Vec<Case> {
    vec![
        Case::new(
            "elastic::use_on",
            &["ElasticBuffer::use_on", "Use::drop"],
            four,
            |stage| {
                drop(first(stage).use_on(&stage.streams[1])?);
                drop(first(stage).use_on(&stage.streams[1])?);
                Ok(())
            },
            |stage| check(stage, 4),
        ),
        Case::new(
            "elastic::use_on_after_a_return",
            &["ElasticBuffer::use_on"],
            || {
                // Memory that came back before its users were done: later ones are ordered behind.
                let stage = four();
                let hold = stage.sim.hold(HOME, stage.streams[0].handle()).unwrap();
                drop(first(&stage).use_on(&stage.streams[0]).unwrap());
                first(&stage).shrink_to(2 * G).unwrap();
                first(&stage).grow_to(4 * G).unwrap();
                stage.sim.release_hold(hold);
                stage
            },
            |stage| {
                drop(first(stage).use_on(&stage.streams[1])?);
                Ok(())
            },
            |stage| check(stage, 4),
        ),
        Case::new(
            "elastic::grant",
            &["ElasticBuffer::grant"],
            borrower,
            |stage| Ok(first(stage).grant(NEXT, Access::Read)?),
            |stage| assert_eq!(first(stage).access(NEXT), Access::Read),
        ),
        Case::new(
            "elastic::revoke",
            &["ElasticBuffer::revoke"],
            || {
                let stage = four();
                first(&stage).grant(NEXT, Access::ReadWrite).unwrap();
                stage
            },
            |stage| Ok(first(stage).revoke(NEXT)?),
            |stage| assert_eq!(first(stage).access(NEXT), Access::None),
        ),
        Case::new(
            "elastic::bytes",
            &["ElasticBuffer::write", "ElasticBuffer::read", "ElasticBuffer::read_by"],
            || {
                let stage = borrower();
                first(&stage).grant(NEXT, Access::ReadWrite).unwrap();
                stage
            },
            |stage| {
                let mark = [(first(stage).address() / G) as u8];
                first(stage).write(0, &mark)?;
                let mut found = [0];
                first(stage).read(0, &mut found)?;
                assert_eq!(found, mark);
                first(stage).read_by(NEXT, 0, &mut found)?;
                assert_eq!(found, mark);
                Ok(())
            },
            |stage| check(stage, 6),
        ),
        Case::new(
            "elastic::copy_on",
            &["ElasticBuffer::copy_on", "ElasticBuffer::copies_on"],
            four,
            |stage| {
                // Over its own mark with the same bytes, so that a copy that was refused half way shows
                // nothing: each of them is enqueued or not.
                first(stage).copy_on(&stage.streams[0], 64..128, G + 64)?;
                let copies = [(64..128, 2 * G + 64), (64..128, 3 * G + 64)];
                first(stage).copies_on(&stage.streams[1], copies)?;
                Ok(())
            },
            |stage| check(stage, 4),
        ),
        Case::new(
            "elastic::share",
            &["ElasticBuffer::share"],
            four,
            |stage| first(stage).share(0..2 * G, 6 * G).map(drop).map_err(Into::into),
            |stage| check(stage, 6),
        ),
        Case::new(
            "elastic::unshare",
            &["ElasticBuffer::unshare", "ElasticBuffer::unshare_all"],
            || {
                let stage = four();
                first(&stage).share(0..2 * G, 6 * G).unwrap();
                stage
            },
            |stage| first(stage).unshare(0..8 * G, SOON).map(drop).map_err(Into::into),
            |stage| {
                check(stage, 6);
                assert!(first(stage).pieces().iter().all(|piece| !piece.shared));
            },
        ),
        Case::new(
            "elastic::export_pieces",
            &["ElasticBuffer::export_pieces", "ElasticBuffer::export_pieces_in"],
            exportable,
            |stage| {
                assert_eq!(first(stage).export_pieces()?.len(), 4);
                assert_eq!(first(stage).export_pieces_in(G..3 * G)?.len(), 2);
                Ok(())
            },
            |stage| check(stage, 4),
        ),
        Case::new(
            "elastic::dma_bufs",
            &["ElasticBuffer::dma_bufs"],
            exportable,
            |stage| {
                assert_eq!(first(stage).dma_bufs()?.len(), 1);
                Ok(())
            },
            |stage| check(stage, 4),
        ),
        Case::new(
            "elastic::grow_with_hooks",
            &["ElasticBuffer::on_backing_change"],
            || {
                let mut stage = four();
                let hook = first(&stage).on_backing_change(|change| {
                    let told = matches!(change.phase, Phase::Before | Phase::After | Phase::Failed);
                    assert!(told && change.cause == Cause::Commit);
                });
                stage.kept.push(Box::new(hook));
                stage
            },
            |stage| first(stage).grow_to(6 * G).map(drop).map_err(Into::into),
            |stage| check(stage, 6),
        ),
    ]
}

fn moves() -> Vec<Case> {
    vec![
        Case::new(
            "elastic::migrate",
            &["ElasticBuffer::migrate"],
            four,
            |stage| first(stage).migrate(Move::to(NEXT)).map(drop).map_err(Into::into),
            |stage| {
                check(stage, 4);
                assert_eq!((stage.count_at(NEXT), first(stage).device()), (4, NEXT));
            },
        ),
        Case::new(
            "elastic::migrate_shared",
            &["ElasticBuffer::migrate"],
            || {
                let stage = four();
                first(&stage).grant(NEXT, Access::ReadWrite).unwrap();
                first(&stage).share(0..G, 6 * G).unwrap();
                drop(first(&stage).use_on(&stage.streams[1]).unwrap());
                stage
            },
            |stage| first(stage).migrate(Move::to(NEXT)).map(drop).map_err(Into::into),
            |stage| {
                check(stage, 5);
                assert_eq!(stage.count_at(NEXT), 5);
            },
        ),
        Case::new(
            "elastic::migrate_to_the_host",
            &["ElasticBuffer::migrate"],
            four,
            |stage| {
                let part = Move::to(HOST).range(G..3 * G).patience(SOON);
                first(stage).migrate(part).map(drop).map_err(Into::into)
            },
            |stage| {
                check(stage, 4);
                assert_eq!(stage.count_at(HOST), 2);
            },
        ),
        Case::new(
            "elastic::migrate_async",
            &["ElasticBuffer::migrate_async", "Migration::wait"],
            || threaded().with_elastic(4),
            |stage| moved(first(stage).migrate_async(Move::to(NEXT))?.wait(SOON)),
            |stage| {
                check(stage, 4);
                assert_eq!(stage.count_at(NEXT), 4);
            },
        ),
        Case::new(
            "elastic::come_home",
            &["ElasticBuffer::come_home"],
            || {
                let stage = four();
                first(&stage).migrate(Move::to(HOST).range(0..2 * G)).unwrap();
                stage
            },
            |stage| first(stage).come_home(SOON).map(drop).map_err(Into::into),
            |stage| {
                check(stage, 4);
                assert_eq!(stage.count_at(HOME), 4);
            },
        ),
        Case::new(
            "elastic::sleep_dropped",
            &["ElasticBuffer::sleep"],
            four,
            |stage| first(stage).sleep(Contents::Dropped, SOON).map(drop).map_err(Into::into),
            |stage| {
                assert_eq!(first(stage).asleep(), Some(Contents::Dropped));
                first(stage).wake().unwrap();
                assert_eq!(first(stage).committed_bytes(), 4 * G);
            },
        ),
        Case::new(
            "elastic::sleep_kept",
            &["ElasticBuffer::sleep"],
            four,
            |stage| first(stage).sleep(KEPT, SOON).map(drop).map_err(Into::into),
            |stage| {
                assert_eq!(first(stage).asleep(), Some(KEPT));
                first(stage).wake().unwrap();
                check(stage, 4);
            },
        ),
        Case::new(
            "elastic::wake_dropped",
            &["ElasticBuffer::wake"],
            || asleep(Contents::Dropped),
            |stage| first(stage).wake().map(drop).map_err(Into::into),
            |stage| assert_eq!((stage.count_at(HOME), first(stage).asleep()), (4, None)),
        ),
        Case::new(
            "elastic::wake_kept",
            &["ElasticBuffer::wake"],
            || asleep(KEPT),
            |stage| first(stage).wake().map(drop).map_err(Into::into),
            |stage| {
                check(stage, 4);
                assert_eq!((stage.count_at(HOME), first(stage).asleep()), (4, None));
            },
        ),
        Case::new(
            "pool::sleep",
            &["Pool::sleep"],
            || usual().with_built(2, |builder| builder.tag("kv")),
            |stage| stage.pool().sleep("kv", KEPT, SOON).map(drop).map_err(Into::into),
            |stage| assert_eq!(first(stage).asleep(), Some(KEPT)),
        ),
        Case::new(
            "pool::wake",
            &["Pool::wake"],
            || asleep(KEPT),
            |stage| stage.pool().wake("kv").map(drop).map_err(Into::into),
            |stage| check(stage, 4),
        ),
        Case::new(
            "pool::recall",
            &["Pool::recall"],
            borrower,
            |stage| {
                let recall = stage.pool().recall(NEXT, u64::MAX, SOON)?;
                match recall.refused.into_iter().next() {
                    Some(refused) => Err(refused.why.into()),
                    None => Ok(()),
                }
            },
            |stage| {
                check(stage, 6);
                assert_eq!(stage.count_at(NEXT), 0);
            },
        ),
        Case::quiet(
            "pool::rebalance",
            &["Pool::rebalance"],
            || {
                let stage = stage(|sim| sim.device_bytes(20 * G), |pool| pool.balance(BALANCE));
                let stage = stage.with_built(4, |builder| builder.movable(true)).with_elastic(9);
                stage.pass(5000);
                stage
            },
            |stage| {
                rebalance(stage);
                Ok(())
            },
            |stage| {
                // A look that was refused is made again.
                rebalance(stage);
                stage.settle();
                check(stage, 4);
                let stats = stage.pool().stats().balance.unwrap();
                assert!(stats.moves == 1 || stats.failed == 1, "it is told: {stats:?}");
            },
        ),
    ]
}

/// One look, and the end of the move that it began.
fn rebalance(stage: &Stage) {
    stage.pass(5000);
    stage.pool().rebalance();
    while stage.pool().stats().balance.is_some_and(|it| it.moving) {
        std::thread::yield_now();
    }
}

const BALANCE: Balance = Balance { full: 0.6, empty: 0.5, cold_ms: 1000, bytes_per_s: 64 * G };

pub(crate) fn cases() -> Vec<Case> {
    [growth(), use_and_access(), moves()].into_iter().flatten().collect()
}
