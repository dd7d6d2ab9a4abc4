//! The queue of moves in the background, and the thread that makes them.

use vmm_pool::{ElasticError, Error, MigrationState, Move};

use crate::rig::{AWAY, CHUNK, HOME, LONG, Rig, prove, spawn};

fn move_to(to: vmm_sys::DeviceId) -> Move {
    Move::to(to).patience(LONG)
}

/// Where nobody is left to make the move it has failed, and says so.
fn is_done_or_ended(state: &MigrationState) -> bool {
    let ended = |error: &Error| matches!(error, Error::Elastic(ElasticError::Ended));
    match state {
        MigrationState::Done(moved) => moved.bytes == CHUNK,
        MigrationState::Failed(error) => ended(error),
        _ => false,
    }
}

/// Two threads ask for moves while the thread of moves starts, works or sleeps: each is made, and who
/// waits for it is told.
///
/// Caught: a thread that works already and is not notified of the next (`Mover::submit`); one that is
/// started beside another (`runs`); an end of it that is not notified (`Mover::run`); states that
/// nobody is told of (`Progress::update`).
#[test]
fn every_move_that_is_asked_for_is_made() {
    prove("every_move_that_is_asked_for_is_made", || {
        let rig = Rig::two(|pool| pool);
        let asks = [0, 1].map(|_| {
            let buffer = rig.elastic(1, 1);
            spawn(move || {
                for to in [AWAY, HOME] {
                    let state = buffer.migrate_async(move_to(to)).unwrap().wait(LONG);
                    let is_done = matches!(state, MigrationState::Done(it) if it.bytes == CHUNK);
                    assert!(is_done && buffer.device() == to, "{state:?}");
                }
            })
        });
        asks.into_iter().for_each(|thread| thread.join().unwrap());
        rig.nothing_elastic();
        rig.end();
    });
}

/// A pool ends while moves are queued or under way: each is made or has failed, who waits is told, and
/// nothing of the pool is left.
///
/// Caught: what nobody began stays in the queue, a thread that is not notified of the end, or not waited
/// for (`Mover::end`); a task that is dropped without a word (`Task::drop`).
#[test]
fn the_end_of_a_pool_ends_its_moves() {
    prove("the_end_of_a_pool_ends_its_moves", || {
        let rig = Rig::two(|pool| pool);
        let buffers = [rig.elastic(1, 1), rig.elastic(1, 1)];
        let migrations =
            buffers.each_ref().map(|buffer| buffer.migrate_async(move_to(AWAY)).unwrap());
        let waits = migrations.clone().map(|migration| spawn(move || migration.wait(LONG)));
        let [one, two] = buffers;
        let drops = spawn(move || drop(two));
        drop(one);
        drops.join().unwrap();
        rig.end();
        for (wait, migration) in waits.into_iter().zip(migrations) {
            assert!(migration.is_finished(), "its pool has ended");
            let state = wait.join().unwrap();
            assert!(is_done_or_ended(&state), "{state:?}");
        }
    });
}

/// A buffer is dropped while its move is queued or under way, in an open pool: whoever comes last
/// takes its memory away, once, and the next move is made.
///
/// Caught: a change that is over and does not end its buffer (`Operation::drop`); an end beside a change
/// (`Body::end`); a change of what has ended (`Body::operate`).
#[test]
fn a_buffer_that_is_dropped_before_its_move_leaves_nothing() {
    prove("a_buffer_that_is_dropped_before_its_move_leaves_nothing", || {
        let rig = Rig::two(|pool| pool);
        let (goes, stays) = (rig.elastic(1, 1), rig.elastic(1, 1));
        let migration = goes.migrate_async(move_to(AWAY)).unwrap();
        let next = stays.migrate_async(move_to(AWAY)).unwrap();
        let drops = spawn(move || drop(goes));
        let state = migration.wait(LONG);
        assert!(is_done_or_ended(&state), "{state:?}");
        drops.join().unwrap();
        let state = next.wait(LONG);
        assert!(matches!(state, MigrationState::Done(_)), "{state:?}");
        assert_eq!(rig.pool.device_stats(AWAY).unwrap().elastic_bytes, CHUNK);
        drop(stays);
        rig.nothing_elastic();
        rig.end();
    });
}
