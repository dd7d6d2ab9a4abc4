//! Growth that is asked for now and made by the pool's thread.

use vmm_pool::{AheadState, ElasticError, Error};

use crate::rig::{CHUNK, LONG, Rig, prove, spawn};

/// Two threads ask for growth of one buffer, one that joins the other's or begins anew: each is told
/// when all that it asked for is there.
///
/// Caught: a request that is joined after it has begun, or read before nobody can join it any more
/// (`ahead::serve`); states that nobody is told of (`Progress::update`).
#[test]
fn who_asks_ahead_gets_all_of_it() {
    prove("who_asks_ahead_gets_all_of_it", || {
        let rig = Rig::new(|pool| pool.background(true));
        let buffer = rig.elastic(0, 3);
        let asks = [1, 2].map(|chunks| {
            let buffer = buffer.clone();
            spawn(move || {
                for bytes in [chunks * CHUNK, (chunks + 1) * CHUNK] {
                    let growth = buffer.grow_ahead(bytes).unwrap();
                    let state = growth.wait(LONG);
                    assert!(matches!(state, AheadState::Done), "{state:?}");
                    assert!(buffer.committed_bytes() >= bytes && growth.target_bytes() >= bytes);
                }
            })
        });
        asks.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(buffer.committed_bytes(), 3 * CHUNK);
        drop(buffer);
        rig.nothing_elastic();
        rig.end();
    });
}

/// A buffer, and then its pool, end while growth is asked for or under way: who waits is told, and
/// nothing is left.
///
/// Caught: a buffer that ends and leaves its request to nobody (`Body::end`), or says nothing of its end
/// (`Ahead::end`); growth of what has ended (`Body::operate`).
#[test]
fn the_end_of_a_buffer_ends_what_was_asked_ahead() {
    prove("the_end_of_a_buffer_ends_what_was_asked_ahead", || {
        let rig = Rig::new(|pool| pool.background(true));
        let buffer = rig.elastic(1, 2);
        let growth = buffer.grow_ahead(2 * CHUNK).unwrap();
        let waits = spawn({
            let growth = growth.clone();
            move || match growth.wait(LONG) {
                AheadState::Done | AheadState::Failed(Error::Elastic(ElasticError::Ended)) => {}
                state => panic!("{state:?}"),
            }
        });
        let drops = spawn(move || drop(buffer));
        // With the pool open, or while its thread ends.
        if shuttle::rand::Rng::gen_bool(&mut shuttle::rand::thread_rng(), 0.5) {
            waits.join().unwrap();
            drops.join().unwrap();
            rig.nothing_elastic();
            return rig.end();
        }
        let Rig { sim, driver, pool } = rig;
        drop(pool);
        drops.join().unwrap();
        assert!(growth.is_finished(), "its pool has ended");
        waits.join().unwrap();
        crate::rig::clean(&sim, driver);
    });
}
