//! Hooks for the memory behind elastic buffers: called in whichever thread changes it.

use std::sync::Arc;

use shuttle::sync::Mutex;
use vmm_pool::{BackingChange, BackingHook, ElasticBuffer, ElasticError, Error, Move, Phase};

use crate::rig::{AWAY, CHUNK, LONG, Rig, clean, prove, spawn, wait_for_others};

type Seen = Arc<Mutex<Vec<BackingChange>>>;

/// Notes all that happens to a buffer.
fn watch(buffer: &ElasticBuffer) -> (Seen, BackingHook) {
    let seen = Seen::default();
    let notes = seen.clone();
    (seen, buffer.on_backing_change(move |change| notes.lock().unwrap().push(*change)))
}

/// Two threads change a buffer: a hook sees each change from its beginning to its end before the next
/// begins. One that comes and goes meanwhile sees nothing that begins after it has gone, and takes
/// nobody else's place away.
///
/// Caught: a change beside another one (`Body::operate`); one whose end nobody who waits is told of, or that
/// its thread is thought to make for ever (`Operation::drop`); a hook that is not taken from the list, or
/// another in its place (`Registered::drop`).
#[test]
fn a_hook_sees_one_change_after_the_other() {
    prove("a_hook_sees_one_change_after_the_other", || {
        let rig = Rig::new(|pool| pool);
        let buffer = rig.elastic(0, 2);
        let (seen, hook) = watch(&buffer);
        let changes = [0, 1].map(|chunk| {
            let buffer = buffer.clone();
            spawn(move || {
                let range = chunk * CHUNK..(chunk + 1) * CHUNK;
                buffer.grow(range.clone()).unwrap();
                assert_eq!(buffer.decommit(range).unwrap(), CHUNK);
            })
        });
        let (late_seen, late) = watch(&buffer);
        drop(late);
        let generation = buffer.generation();
        changes.into_iter().for_each(|thread| thread.join().unwrap());
        let seen = std::mem::take(&mut *seen.lock().unwrap());
        assert_eq!(seen.len(), 8, "{seen:?}");
        for (number, pair) in (0..).zip(seen.chunks(2)) {
            let phases = (pair[0].phase, pair[1].phase);
            assert_eq!(phases, (Phase::Before, Phase::After), "{seen:?}");
            let (before, after) = (pair[0].generation, pair[1].generation);
            assert_eq!((before, after, pair[0].offset), (number, number + 1, pair[1].offset));
        }
        let late_seen = late_seen.lock().unwrap();
        assert!(late_seen.iter().all(|it| it.generation <= generation), "{late_seen:?}");
        drop((hook, buffer));
        rig.nothing_elastic();
        rig.end();
    });
}

/// Two buffers' hooks change each other's buffer, in two threads: none waits for the other, and a third
/// that only waits gets its turn.
///
/// Caught: a thread with a change that waits for another's (`Body::operate`); ends of changes that nobody
/// is told of (`Operation::drop`).
#[test]
fn hooks_that_change_each_others_buffer_do_not_wait_for_each_other() {
    prove("hooks_that_change_each_others_buffer_do_not_wait_for_each_other", || {
        let rig = Rig::new(|pool| pool);
        let buffers = [rig.elastic(0, 2), rig.elastic(0, 2)];
        let hooks = [0, 1].map(|at| {
            let other = buffers[1 - at].clone();
            buffers[at].on_backing_change(move |_| match other.grow_to(CHUNK) {
                Ok(_) | Err(Error::Elastic(ElasticError::Busy)) => {}
                Err(error) => panic!("{error}"),
            })
        });
        let grows = [0, 1, 1].map(|at| {
            let buffer = buffers[at].clone();
            spawn(move || assert!(buffer.grow_to(2 * CHUNK).is_ok()))
        });
        grows.into_iter().for_each(|thread| thread.join().unwrap());
        let committed = buffers.each_ref().map(|buffer| buffer.committed_bytes());
        assert_eq!(committed, [2 * CHUNK; 2]);
        drop(hooks);
        drop(buffers);
        rig.nothing_elastic();
        rig.end();
    });
}

/// A hook asks the pool and its own buffer for this and that, while another thread does so too. Only a
/// change of its own buffer is refused.
///
/// Caught: a hook that is called with the state locked (`Operation::relocate`); a change from within that
/// waits for itself (`Body::operate`).
#[test]
fn a_hook_may_ask_the_pool() {
    prove("a_hook_may_ask_the_pool", || {
        let rig = Rig::two(|pool| pool.limit_bytes(4 * CHUNK));
        let (buffer, lane) = (rig.elastic(1, 2), rig.lane());
        let asked = {
            let (rig, buffer, lane) = (rig.clone(), buffer.clone(), lane.clone());
            move || {
                drop(lane.alloc(1000).unwrap());
                rig.pool.trim(crate::rig::HOME).unwrap();
                rig.pool.verify().unwrap();
                assert_eq!(buffer.stats().committed_bytes, buffer.pieces().len() as u64 * CHUNK);
                drop(buffer.use_on(lane.stream()).unwrap());
            }
        };
        let hook = {
            let (asked, buffer) = (asked.clone(), buffer.clone());
            buffer.clone().on_backing_change(move |_| {
                asked();
                let answer = buffer.shrink_to(0);
                assert!(matches!(answer, Err(Error::Elastic(ElasticError::Busy))), "{answer:?}");
            })
        };
        let asks = spawn(asked);
        buffer.migrate(Move::to(AWAY).patience(LONG)).unwrap();
        asks.join().unwrap();
        drop((hook, buffer, lane));
        rig.nothing_elastic();
        rig.end();
    });
}

/// What a hook drops when it is called first.
type Last = Arc<Mutex<Option<(vmm_pool::Pool, Arc<ElasticBuffer>)>>>;

/// The last handles of a pool and a buffer go in a hook, which a thread of the pool calls: the one that
/// moves or the one that grows ahead, while the other may wait for that. The end waits for neither.
///
/// Found: an end that waited for its own thread, until it gave up (`Mover::end`, `Background::drop`). Caught:
/// either of them again; what is asked for and not told of its end (`Task::drop`, `Ahead::end`).
#[test]
fn the_last_handles_may_go_in_a_hook() {
    prove("the_last_handles_may_go_in_a_hook", || {
        let rig = Rig::two(|pool| pool.background(true));
        let buffer = rig.elastic(1, 2);
        let last = Last::default();
        let hook = {
            let last = last.clone();
            buffer.on_backing_change(move |_| {
                let handles = last.lock().unwrap().take();
                drop(handles);
            })
        };
        let Rig { sim, driver, pool } = rig;
        let migration = buffer.migrate_async(Move::to(AWAY).patience(LONG)).unwrap();
        let growth = buffer.grow_ahead(2 * CHUNK).unwrap();
        *last.lock().unwrap() = Some((pool, buffer));
        drop((migration.wait(LONG), growth.wait(LONG)));
        // They are there still if both changes were over before.
        drop((last, hook));
        wait_for_others(&driver);
        clean(&sim, driver);
    });
}
