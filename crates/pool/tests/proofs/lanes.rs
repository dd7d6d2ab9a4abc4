//! Lanes: growth by several threads, and lanes that end while others ask and free.

use std::sync::Arc;

use shuttle::sync::atomic::{AtomicBool, Ordering::SeqCst};
use shuttle::thread::yield_now;
use vmm_pool::{Error, block_of, free_raw};

use crate::rig::{CHUNK, MIB, Owned, Rig, prove, spawn};

/// Claim, act, publish: threads that miss in one lane at once each bring memory of their own.
///
/// Caught: a window that is not taken as a block when it is claimed (`alloc_at` in `lane::claim`).
/// Meant to catch: a claimed slot that is not marked (`Region::claim`).
#[test]
fn threads_grow_one_lane_at_once() {
    prove("threads_grow_one_lane_at_once", || {
        let rig = Rig::new(|pool| pool);
        let (lane, owned) = (rig.lane(), Owned::default());
        let threads: Vec<_> = [(3 * MIB, 1000), (300 << 10, CHUNK), (CHUNK, 5 * MIB)]
            .into_iter()
            .map(|(first, second)| {
                let (lane, owned) = (lane.clone(), owned.clone());
                spawn(move || {
                    let one = owned.take(lane.alloc(first).unwrap());
                    let two = owned.take(lane.alloc(second).unwrap());
                    drop(one);
                    two
                })
            })
            .collect();
        let kept: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        assert_eq!(rig.sound().buffers, 3);
        drop((kept, lane));
        assert_eq!(rig.sound().live_bytes, 0);
        rig.end();
    });
}

/// A lane that is closed while one thread brings memory and another drops its last buffer ends
/// once, after all of them, and loses nothing.
///
/// Caught: `should_retire` without `busy`.
#[test]
fn a_lane_closes_while_others_are_at_the_driver() {
    prove("a_lane_closes_while_others_are_at_the_driver", || {
        let rig = Rig::new(|pool| pool);
        let lane = rig.lane();
        let (stream, first) = (lane.stream().clone(), lane.alloc(1000).unwrap());
        let grows = spawn({
            let lane = lane.clone();
            move || match lane.alloc(3 * MIB) {
                Ok(buffer) => drop(buffer),
                Err(error) => assert!(matches!(error, Error::LaneClosed), "{error}"),
            }
        });
        let drops = spawn(move || drop(first));
        rig.pool.close_lane(&stream);
        // The same stream gets a new lane, maybe beside what is left of the old one.
        let next = rig.pool.lane(&stream).unwrap();
        let buffer = next.alloc(CHUNK).unwrap();
        grows.join().unwrap();
        drops.join().unwrap();
        let stats = rig.sound();
        assert_eq!((stats.buffers, stats.lanes), (1, 1), "{stats:?}");
        drop((buffer, next, lane, stream));
        rig.end();
    });
}

/// Two threads see at once that a lane is over: its shell is taken from it once, and not from the
/// lane that is in it by the time the second one comes.
///
/// Meant to catch: `retire` that takes the state without asking again.
#[test]
fn a_lane_ends_once() {
    prove("a_lane_ends_once", || {
        let rig = Rig::new(|pool| pool);
        let lane = rig.lane();
        let buffer = lane.alloc(1000).unwrap();
        let drops = spawn(move || drop(buffer));
        rig.pool.close_lane(lane.stream());
        let next = rig.lane();
        let kept = next.alloc(1000).unwrap();
        drops.join().unwrap();
        assert!(next.alloc(1000).is_ok(), "the next lane was taken out of its shell");
        assert_eq!(rig.sound().lanes, 1);
        drop((kept, next, lane));
        rig.end();
    });
}

/// A shell is reused as soon as its lane has ended: who comes late with the old lane's handle is
/// told so, and gets nothing of the new one.
///
/// Caught: a comparison of `open_id` with "not 0" in `alloc_with`; `Lane::state` without the
/// comparison of numbers. Meant to catch: the same in `LaneRef::lock`; a shell that is given back
/// before its lane was taken out.
#[test]
fn who_comes_late_to_a_reused_shell_finds_out() {
    prove("who_comes_late_to_a_reused_shell_finds_out", || {
        let rig = Rig::new(|pool| pool);
        let lane = rig.lane();
        let is_closed = Arc::new(AtomicBool::new(false));
        let late = spawn({
            let (lane, is_closed) = (lane.clone(), is_closed.clone());
            move || {
                for bytes in [1000, CHUNK, 1000] {
                    let was_closed = is_closed.load(SeqCst);
                    let answer = lane.alloc(bytes);
                    assert!(answer.is_err() || !was_closed, "a closed lane gave {answer:?}");
                }
                while !is_closed.load(SeqCst) {
                    yield_now();
                }
                for _ in 0..10 {
                    assert_eq!(lane.largest_free_bytes(), 0, "that is another lane's");
                    yield_now();
                }
            }
        });
        let closes = spawn({
            let rig = rig.clone();
            move || {
                rig.pool.close_lane(lane.stream());
                is_closed.store(true, SeqCst);
            }
        });
        let next = rig.lane();
        let buffers = [next.alloc(2000).unwrap(), next.alloc(CHUNK).unwrap()];
        late.join().unwrap();
        closes.join().unwrap();
        let third = rig.lane();
        let more = third.alloc(2000).unwrap();
        assert_eq!(rig.sound().buffers, 3);
        drop((buffers, next, more, third));
        rig.end();
    });
}

/// The directory: an address is found while its block lives, whatever lanes come and go, and a free
/// that comes late or twice changes nothing.
///
/// Caught: a lane that ends without leaving the directory (`unlist` in `retire`), or leaves it only
/// after its addresses were given back; a range that is not entered when it is added (`list_range`).
/// Meant to catch: a free that trusts the directory and does not look whether the lane is listed.
#[test]
fn plain_addresses_are_found_while_lanes_come_and_go() {
    prove("plain_addresses_are_found_while_lanes_come_and_go", || {
        let rig = Rig::new(|pool| pool);
        let (stays, goes) = (rig.lane(), rig.lane());
        let old = goes.alloc_raw(CHUNK).unwrap();
        // Two free one block: one of them does.
        let frees = [0, 1].map(|_| spawn(move || free_raw(old, CHUNK).is_ok()));
        let comes_and_goes = spawn({
            let rig = rig.clone();
            move || {
                rig.pool.close_lane(goes.stream());
                drop(goes);
                // Maybe in the same shell, at the same address: its length tells the blocks apart.
                let lane = rig.lane();
                let address = lane.alloc_raw(2 * CHUNK).unwrap();
                assert_eq!(block_of(address).unwrap().stream, lane.stream().id());
                (lane, address)
            }
        });
        let kept = [1024, 5 * MIB].map(|bytes| (stays.alloc_raw(bytes).unwrap(), bytes));
        for (address, bytes) in kept {
            let block = block_of(address).unwrap();
            assert_eq!((block.bytes, block.stream), (bytes, stays.stream().id()));
        }
        let (lane, third) = comes_and_goes.join().unwrap();
        let freed = frees.map(|thread| thread.join().unwrap());
        assert!(freed[0] != freed[1], "{freed:?}");
        rig.sound();
        for (address, bytes) in kept.into_iter().chain([(third, 2 * CHUNK)]) {
            free_raw(address, bytes).unwrap();
            assert!(free_raw(address, bytes).is_err());
        }
        assert_eq!(rig.sound().live_bytes, 0);
        drop((stays, lane));
        rig.end();
    });
}
