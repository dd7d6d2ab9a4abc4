//! Memory that one device lends to buffers of another: borrowed, called back, brought home.

use std::sync::Arc;
use std::time::Duration;

use shuttle::sync::atomic::{AtomicU64, Ordering::SeqCst};
use vmm_pool::{Budget, ElasticBuffer, ElasticError, Error, Growth, PoolBuilder, Refusal};
use vmm_sys::ProbeKernel;

use crate::rig::{AWAY, CHUNK, HOME, LONG, Rig, clean, prove, spawn};

/// A home that may have two chunks, and a device that lends so many.
fn lends(chunks: u64) -> impl FnOnce(PoolBuilder) -> PoolBuilder {
    move |pool| pool.budget(HOME, Budget::new(2 * CHUNK)).lend(AWAY, chunks * CHUNK)
}

fn lent_bytes(rig: &Rig) -> u64 {
    rig.pool.device_stats(AWAY).unwrap().lent_bytes
}

/// A home that somebody else fills, and a buffer that had to borrow its one chunk.
fn borrowed(settings: impl FnOnce(PoolBuilder) -> PoolBuilder) -> (Rig, [Arc<ElasticBuffer>; 2]) {
    let rig = Rig::two(|pool| settings(lends(2)(pool)));
    let (fills, borrows) = (rig.elastic(2, 2), rig.elastic(0, 2));
    let grown = borrows.grow(Growth::to(CHUNK).borrow_from_any()).unwrap();
    assert_eq!(grown.borrowed, [(AWAY.into(), CHUNK)]);
    (rig, [fills, borrows])
}

/// Two buffers want more than their home and a lender's budget have together: the budget is never
/// passed, who is refused has nothing, and one of them gets all that it wants.
///
/// Caught: a booking that looks before it books (`Lending::book`); one that outlives its chunk
/// (`Loan::drop`), or the growth that was refused (`hand_back`).
#[test]
fn nobody_borrows_beyond_the_budget() {
    prove("nobody_borrows_beyond_the_budget", || {
        let rig = Rig::two(lends(1));
        let grows = [0, 1].map(|_| {
            let (rig, buffer) = (rig.clone(), rig.elastic(0, 2));
            spawn(move || {
                let grown = buffer.grow(Growth::to(2 * CHUNK).borrow_from_any());
                assert!(lent_bytes(&rig) <= CHUNK);
                match grown {
                    Ok(grown) => assert_eq!(grown.bytes, 2 * CHUNK),
                    Err(Error::Elastic(ElasticError::NobodyLends { answers, .. })) => {
                        let over = matches!(answers[0].refusal, Refusal::Budget { .. });
                        assert!(over, "{answers:?}");
                    }
                    Err(error) => panic!("{error}"),
                }
                buffer
            })
        });
        let buffers = grows.map(|thread| thread.join().unwrap());
        let mut committed = buffers.each_ref().map(|buffer| buffer.committed_bytes());
        committed.sort_unstable();
        assert_eq!(committed, [0, 2 * CHUNK]);
        rig.sound();
        drop(buffers);
        rig.nothing_elastic();
        rig.end();
    });
}

/// A lender calls its memory back while the borrower grows and ends, and while its home becomes free:
/// nothing is refused to the borrower, nothing is said of one that has ended, and the accounts are
/// even.
///
/// Caught: one that has ended and is named (`operate_unless_ended` in `Pool::recall`); an end beside a change
/// (`Body::end`); a change that is over too early for the next (`Operation::give_back`), or beside it
/// (`Body::operate`).
#[test]
fn memory_is_called_back_from_who_grows_and_ends() {
    prove("memory_is_called_back_from_who_grows_and_ends", || {
        let (rig, [fills, borrows]) = borrowed(|pool| pool);
        let grows = spawn(move || {
            let grown = borrows.grow(Growth::to(2 * CHUNK).borrow_from_any()).unwrap();
            assert_eq!(grown.bytes, CHUNK);
        });
        let calls = spawn({
            let pool = rig.pool.clone();
            move || {
                let recall = pool.recall(AWAY, u64::MAX, LONG).unwrap();
                assert!(recall.moved_bytes <= 2 * CHUNK && recall.to_host_bytes == 0, "{recall:?}");
                let is_short = |why: &Error| why.is_out_of_memory();
                assert!(recall.refused.iter().all(|it| is_short(&it.why)), "{recall:?}");
            }
        });
        drop(fills);
        grows.join().unwrap();
        calls.join().unwrap();
        rig.nothing_elastic();
        rig.end();
    });
}

/// A lender calls its memory back from who is using it: that is waited for, all of it comes, and what
/// was written stays.
///
/// Caught: a recall that passes over who is in use (`Pool::recall`); a move that does not wait for the
/// guards that are alive (`Uses::close`).
#[test]
fn memory_is_called_back_behind_its_users() {
    prove("memory_is_called_back_behind_its_users", || {
        let (rig, [fills, borrows]) = borrowed(|pool| pool);
        drop(fills);
        let stream = rig.stream();
        let uses = spawn({
            let (rig, buffer, stream) = (rig.clone(), borrows.clone(), stream.clone());
            move || {
                for value in 1..3 {
                    let _using = buffer.use_on(&stream).unwrap();
                    let kernel = ProbeKernel::FillWords { dst: buffer.address(), words: 1, value };
                    // SAFETY: a live stream, and an address of the pool.
                    unsafe { rig.driver.launch(HOME, &kernel, stream.handle()) }.unwrap();
                }
            }
        });
        let recall = rig.pool.recall(AWAY, u64::MAX, LONG).unwrap();
        assert!(recall.moved_bytes == CHUNK && recall.refused.is_empty(), "{recall:?}");
        assert_eq!(lent_bytes(&rig), 0);
        uses.join().unwrap();
        stream.synchronize().unwrap();
        let mut word = [0; 4];
        borrows.read(0, &mut word).unwrap();
        assert_eq!(u32::from_le_bytes(word), 2);
        drop((borrows, stream));
        rig.nothing_elastic();
        rig.end();
    });
}

/// Borrowed memory comes home by itself, though its buffer is in use, and grows, when it is looked at
/// first.
///
/// Caught: a buffer that is thought to be on its way for ever (`Homecoming::drop`); a queue whose thread is
/// not notified (`Mover::submit`, `Mover::end`).
#[test]
fn what_was_borrowed_comes_home_by_itself() {
    prove("what_was_borrowed_comes_home_by_itself", || {
        // Each look at the clock is later by what a buffer rests after it borrowed.
        let seconds = AtomicU64::new(0);
        let clock = move || Duration::from_secs(seconds.fetch_add(1, SeqCst));
        let (rig, [fills, borrows]) = borrowed(|pool| pool.background(true).clock(clock));
        let uses = spawn({
            let (borrows, stream) = (borrows.clone(), rig.stream());
            move || {
                drop(borrows.use_on(&stream).unwrap());
                borrows.grow(Growth::to(2 * CHUNK).borrow_from_any()).unwrap();
                borrows.shrink_to(CHUNK).unwrap();
            }
        });
        drop(fills);
        uses.join().unwrap();
        while lent_bytes(&rig) > 0 {
            // The pool's thread need not look by itself, here: asked for what is there, it does.
            borrows.grow_ahead(CHUNK).unwrap().wait(LONG);
            shuttle::thread::yield_now();
        }
        // Behind who still moves it.
        assert_eq!(borrows.shrink_to(0).unwrap(), CHUNK);
        drop(borrows);
        rig.nothing_elastic();
        rig.end();
    });
}

/// The last handles of a pool and a borrower go while a lender calls its memory back: the recall keeps
/// the pool, and nothing is left.
///
/// Meant to catch: a recall that leaves a buffer which ends meanwhile to nobody (`Operation::drop`).
#[test]
fn a_borrower_and_its_pool_end_while_memory_is_called_back() {
    prove("a_borrower_and_its_pool_end_while_memory_is_called_back", || {
        let (rig, [fills, borrows]) = borrowed(|pool| pool);
        drop(fills);
        let Rig { sim, driver, pool } = rig;
        let calls = spawn({
            let pool = pool.clone();
            move || drop(pool.recall(AWAY, u64::MAX, LONG).unwrap())
        });
        let drops = spawn(move || drop(borrows));
        drop(pool);
        calls.join().unwrap();
        drops.join().unwrap();
        clean(&sim, driver);
    });
}
