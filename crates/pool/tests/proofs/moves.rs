//! Elastic buffers that change place while others use them.

use std::sync::Arc;

use vmm_pool::{ElasticBuffer, ElasticError, Error, Move};
use vmm_sys::ProbeKernel;
use vmm_sys::object::Stream;

use crate::rig::{AWAY, CHUNK, HOME, LONG, Rig, prove, spawn};

fn scene() -> (Rig, Arc<ElasticBuffer>) {
    let rig = Rig::two(|pool| pool);
    let buffer = rig.elastic(2, 4);
    (rig, buffer)
}

/// Writes `value` in each chunk by work of the stream, within a use.
fn write(rig: &Rig, buffer: &ElasticBuffer, stream: &Stream, word: u64, value: u32) {
    let _using = buffer.use_on(stream).unwrap();
    for chunk in 0..2 {
        let dst = buffer.address() + chunk * CHUNK + 4 * word;
        let kernel = ProbeKernel::FillWords { dst, words: 1, value };
        // SAFETY: a live stream, and an address of the pool.
        unsafe { rig.driver.launch(HOME, &kernel, stream.handle()) }.unwrap();
    }
}

fn word(buffer: &ElasticBuffer, chunk: u64, word: u64) -> u32 {
    let mut bytes = [0; 4];
    buffer.read(chunk * CHUNK + 4 * word, &mut bytes).unwrap();
    u32::from_le_bytes(bytes)
}

/// Two threads write by their streams while a third moves the memory there and back: each write is
/// at the place where the memory is in the end, and none hit an address with nothing behind it.
///
/// Caught: a use that was let in without being held (`Uses::pass`); a move that did not wait for the
/// guards that were alive (`Uses::close`).
#[test]
fn no_write_is_lost_to_a_move() {
    prove("no_write_is_lost_to_a_move", || {
        let (rig, buffer) = scene();
        let streams = [rig.stream(), rig.stream()];
        let users = [0, 1].map(|at| {
            let (rig, buffer, stream) = (rig.clone(), buffer.clone(), streams[at as usize].clone());
            spawn(move || (1..3).for_each(|value| write(&rig, &buffer, &stream, at, value)))
        });
        let mover = buffer.clone();
        let moves = spawn(move || {
            for to in [AWAY, HOME] {
                mover.migrate(Move::to(to).patience(LONG)).unwrap();
            }
        });
        users.into_iter().for_each(|user| user.join().unwrap());
        moves.join().unwrap();
        for (at, stream) in streams.iter().enumerate() {
            stream.synchronize().unwrap();
            let found = [0, 1].map(|chunk| word(&buffer, chunk, at as u64));
            assert_eq!(found, [2, 2]);
        }
        drop((buffer, streams));
        rig.sound();
        rig.end();
    });
}

/// Moves, growth, sleep and the end of a pool's moves in the background meet: one after the other, and
/// all are told of their end.
///
/// Meant to catch: an operation that is not waited for, or not handed on (`operation_ended`); a task
/// that is lost where the thread stops (`Mover::run`, `Mover::end`).
#[test]
fn changes_of_one_buffer_come_one_after_the_other() {
    prove("changes_of_one_buffer_come_one_after_the_other", || {
        let (rig, buffer) = scene();
        let migration = buffer.migrate_async(Move::to(AWAY).patience(LONG)).unwrap();
        let grower = buffer.clone();
        let grows = spawn(move || match grower.grow_to(3 * CHUNK) {
            Ok(bytes) => assert_eq!(bytes, CHUNK),
            Err(error) => assert!(matches!(error, Error::Elastic(ElasticError::Asleep))),
        });
        buffer.sleep(vmm_pool::Contents::Dropped, LONG).unwrap();
        grows.join().unwrap();
        buffer.wake().unwrap();
        let pieces = buffer.pieces().len();
        assert!((2..4).contains(&pieces), "{pieces} pieces");
        drop(buffer);
        rig.sound();
        rig.end();
        assert!(migration.is_finished());
    });
}
