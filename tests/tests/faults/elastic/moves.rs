//! Moves, sleep, recalls and balance.

use vmm_pool::{Balance, Contents, MigrationState, Move};
use vmm_sys::Access;

use super::{borrower, check, check_slots, first, four, full, shared};
use crate::engine::{Case, Done, Scene, done};
use crate::stage::{G, HOME, HOST, NEXT, SOON, Stage, stage, threaded, usual};

const KEPT: Contents = Contents::Kept { node: 0 };
const BALANCE: Balance = Balance { full: 0.6, empty: 0.5, cold_ms: 1000, bytes_per_s: 64 * G };

fn asleep(contents: Contents) -> Stage {
    let stage = usual().with_built(4, |builder| builder.tag("kv"));
    first(&stage).share(0..G, 6 * G).unwrap();
    first(&stage).sleep(contents, SOON).unwrap();
    stage
}

/// What a move became.
fn moved(state: MigrationState) -> Done {
    match state {
        MigrationState::Done(_) => Ok(()),
        MigrationState::Failed(error) => Err(error.into()),
        state => panic!("it hangs: {state:?}"),
    }
}

/// What [`shared`] held, at each address.
fn check_shared(stage: &Stage) {
    check(stage, 6);
    check_slots(stage, [(6, 0), (7, 1)]);
}

pub(super) fn cases() -> Vec<Case> {
    vec![
        Case::new(
            "elastic::migrate",
            &["ElasticBuffer::migrate"],
            four,
            |stage| done(first(stage).migrate(Move::to(NEXT))),
            |stage| {
                check(stage, 4);
                assert_eq!((stage.count_at(NEXT), first(stage).device()), (4, NEXT));
            },
        ),
        Case::new(
            "elastic::migrate_off_a_full_device",
            &["ElasticBuffer::migrate"],
            full,
            |stage| done(first(stage).migrate(Move::to(NEXT))),
            |stage| {
                check(stage, 4);
                assert_eq!(stage.count_at(NEXT), 4);
            },
        ),
        Case::new(
            "elastic::migrate_shared",
            &["ElasticBuffer::migrate"],
            || {
                let stage = shared();
                first(&stage).grant(NEXT, Access::ReadWrite).unwrap();
                drop(first(&stage).use_on(&stage.streams[1]).unwrap());
                stage
            },
            |stage| done(first(stage).migrate(Move::to(NEXT))),
            |stage| {
                check_shared(stage);
                assert_eq!(stage.count_at(NEXT), 6);
            },
        ),
        Case::new(
            "elastic::migrate_one_address_of_two",
            &["ElasticBuffer::migrate"],
            shared,
            |stage| done(first(stage).migrate(Move::to(HOST).range(G..7 * G))),
            |stage| {
                // Slots 0 and 7 keep the chunks whose other address got its own.
                check_shared(stage);
                assert_eq!((stage.count_at(HOST), stage.count_at(HOME)), (4, 2));
            },
        ),
        Case::new(
            "elastic::migrate_to_the_host",
            &["ElasticBuffer::migrate"],
            four,
            |stage| {
                let part = Move::to(HOST).range(G..3 * G).patience(SOON);
                done(first(stage).migrate(part))
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
            |stage| done(first(stage).come_home(SOON)),
            |stage| {
                check(stage, 4);
                assert_eq!(stage.count_at(HOME), 4);
            },
        ),
        Case::new(
            "elastic::sleep_dropped",
            &["ElasticBuffer::sleep"],
            shared,
            |stage| done(first(stage).sleep(Contents::Dropped, SOON)),
            |stage| {
                assert_eq!(first(stage).asleep(), Some(Contents::Dropped));
                first(stage).wake().unwrap();
                assert_eq!(first(stage).committed_bytes(), 6 * G);
            },
        ),
        Case::new(
            "elastic::sleep_kept",
            &["ElasticBuffer::sleep"],
            shared,
            |stage| done(first(stage).sleep(KEPT, SOON)),
            |stage| {
                assert_eq!(first(stage).asleep(), Some(KEPT));
                first(stage).wake().unwrap();
                check_shared(stage);
            },
        ),
        Case::new(
            "elastic::wake_dropped",
            &["ElasticBuffer::wake"],
            || asleep(Contents::Dropped),
            |stage| done(first(stage).wake()),
            |stage| assert_eq!((stage.count_at(HOME), first(stage).asleep()), (5, None)),
        ),
        Case::new(
            "elastic::wake_kept",
            &["ElasticBuffer::wake"],
            || asleep(KEPT),
            |stage| done(first(stage).wake()),
            |stage| {
                check(stage, 5);
                check_slots(stage, [(6, 0)]);
                assert_eq!((stage.count_at(HOME), first(stage).asleep()), (5, None));
            },
        ),
        Case::new(
            "pool::sleep",
            &["Pool::sleep"],
            || usual().with_built(2, |builder| builder.tag("kv")),
            |stage| done(stage.pool().sleep("kv", KEPT, SOON)),
            |stage| assert_eq!(first(stage).asleep(), Some(KEPT)),
        ),
        Case::new(
            "pool::wake",
            &["Pool::wake"],
            || asleep(KEPT),
            |stage| done(stage.pool().wake("kv")),
            |stage| check(stage, 5),
        ),
        Case::new(
            "pool::recall",
            &["Pool::recall"],
            || {
                // Room at home for one of two, of which one has two addresses: the other goes to the host.
                let stage = borrower();
                first(&stage).share(4 * G..5 * G, 10 * G).unwrap();
                drop(first(&stage).use_on(&stage.streams[0]).unwrap());
                first(&stage).decommit(0..G).unwrap();
                stage.pool().trim(HOME).unwrap();
                stage
            },
            |stage| {
                let recall = stage.pool().recall(NEXT, u64::MAX, SOON)?;
                match recall.refused.into_iter().next() {
                    Some(refused) => Err(refused.why.into()),
                    None => Ok(()),
                }
            },
            |stage| {
                check(stage, 6);
                check_slots(stage, [(5, 5), (10, 4)]);
                assert_eq!(stage.count_at(NEXT), 0);
            },
        ),
        Case::new(
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
        )
        .quiet(),
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
