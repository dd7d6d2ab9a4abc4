//! One chunk at several addresses of an elastic buffer, and copies in stream order.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use vmm_pool::{ChunkSize, Pool};
use vmm_sys::object::Stream;
use vmm_sys::{Call, DeviceId, ProbeKernel};

use super::elastic::{counts_up, elastic, fill, holds, launch};
use super::{G, builder, clean, machine, sound};
use crate::hold::keep_busy;
use crate::machine::{DriverChoice, Machine, Skip};

const HOME: DeviceId = DeviceId(0);
const LONG: Duration = Duration::from_secs(20);
/// Pages that are copied one by one, in bytes.
const PAGE: u64 = 64 << 10;

/// A pool whose stock is so many chunks.
fn stocked(machine: &Machine, chunks: u64) -> Pool {
    let built = builder(machine).chunk(ChunkSize::Fixed(G)).build();
    let pool = built.expect("a pool is built");
    pool.prefill(HOME, chunks * G).expect("stock is made");
    assert_eq!(sound(&pool).stock_bytes, chunks * G);
    pool
}

pub(super) fn shared_chunks_are_the_same_bytes_at_both_addresses(
    choice: DriverChoice,
) -> Result<(), Skip> {
    let machine = machine(choice)?;
    let (pool, stream) = (stocked(&machine, 2), machine.stream(0));
    let buffer = elastic(&pool, 64 * G);
    buffer.grow_to(2 * G).expect("it grows");
    fill(&buffer, &stream, 0, 10);
    fill(&buffer, &stream, G, 20);
    assert_eq!(buffer.share(0..2 * G, 4 * G).expect("both are shared"), 2 * G);
    stream.synchronize().expect("no fault");
    for (offset, word) in [(0, 10), (G, 20), (4 * G, 10), (5 * G, 20)] {
        assert!(holds(&buffer, HOME, offset, word), "at {offset:#x}");
    }
    // Written at either address, and read at the other.
    fill(&buffer, &stream, 5 * G, 30);
    fill(&buffer, &stream, 0, 40);
    stream.synchronize().expect("no fault");
    assert!(holds(&buffer, HOME, G, 30) && holds(&buffer, HOME, 4 * G, 40));
    let figures = sound(&pool);
    assert_eq!((figures.elastic_bytes, figures.held_bytes), (2 * G, 2 * G), "{figures:?}");
    // The first addresses go: the bytes stay at the others, and so does the memory.
    assert_eq!(buffer.decommit(0..2 * G).expect("they go"), 2 * G);
    assert!(holds(&buffer, HOME, 4 * G, 40) && holds(&buffer, HOME, 5 * G, 30));
    assert_eq!(sound(&pool).elastic_bytes, 2 * G);
    drop(buffer);
    let after = sound(&pool);
    assert_eq!((after.elastic_bytes, after.stock_bytes), (0, 2 * G), "{after:?}");
    drop((pool, stream));
    clean(&machine);
    Ok(())
}

/// Tells a thread to stop when it is dropped, also by a failure.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// Launches fills of one chunk until it is told to stop. The last word that it began with.
fn keep_filling(
    buffer: &vmm_pool::ElasticBuffer,
    stream: &Stream,
    offset: u64,
    over: &AtomicBool,
) -> u32 {
    let mut word = 0;
    while !over.load(Ordering::SeqCst) {
        word += 1;
        fill(buffer, stream, offset, word);
        stream.synchronize().expect("no fault");
    }
    word
}

pub(super) fn chunks_part_while_streams_use_them(choice: DriverChoice) -> Result<(), Skip> {
    let machine = machine(choice)?;
    let (pool, stream, other) = (stocked(&machine, 8), machine.stream(0), machine.stream(0));
    let buffer = elastic(&pool, 64 * G);
    buffer.grow_to(3 * G).expect("it grows");
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let filling = scope.spawn(|| keep_filling(&buffer, &other, 2 * G, &over));
        let stop = Stop(&over);
        for round in 0..4 {
            // Addresses of its own: the old ones may still be in use by a guard of the other thread.
            let (word, to) = (1000 * (round + 1), (4 + 2 * u64::from(round)) * G);
            assert_eq!(buffer.share(0..2 * G, to).expect("they are shared"), 2 * G);
            // Not done yet when they part: it must be in both.
            keep_busy(&stream, 20_000).expect("the stream is busy");
            fill(&buffer, &stream, 0, word);
            fill(&buffer, &stream, to + G, word + 1);
            let parted = buffer.unshare(to..to + 2 * G, LONG).expect("they part");
            assert_eq!(parted.bytes, 2 * G);
            // From here on each is alone.
            fill(&buffer, &stream, to, word + 2);
            stream.synchronize().expect("no fault");
            for (offset, word) in [(0, word), (G, word + 1), (to, word + 2), (to + G, word + 1)] {
                assert!(holds(&buffer, HOME, offset, word), "round {round}, at {offset:#x}");
            }
            assert_eq!(buffer.decommit(to..to + 2 * G).expect("they go"), 2 * G);
        }
        drop(stop);
        let last = filling.join().expect("no fill failed");
        assert!(holds(&buffer, HOME, 2 * G, last), "after {last} fills");
    });
    drop(buffer);
    pool.trim(HOME).expect("the device is trimmed");
    let after = sound(&pool);
    assert_eq!((after.elastic_bytes, after.limbo_bytes), (0, 0), "{after:?}");
    drop((pool, stream, other));
    clean(&machine);
    Ok(())
}

/// The pages of two chunks at 0, in reverse order behind `to`.
fn reversed(to: u64) -> Vec<(Range<u64>, u64)> {
    let pages = 2 * G / PAGE;
    let copy = |page: u64| (page * PAGE..(page + 1) * PAGE, to + (pages - 1 - page) * PAGE);
    (0..pages).map(copy).collect()
}

pub(super) fn copies_follow_the_writes_before_them(choice: DriverChoice) -> Result<(), Skip> {
    let machine = machine(choice)?;
    let (pool, stream) = (super::pool(&machine), machine.stream(0));
    let buffer = elastic(&pool, 64 * G);
    buffer.grow_to(8 * G).expect("it grows");
    let held = machine.hold(&stream).expect("the stream is held");
    fill(&buffer, &stream, 0, 0);
    // Words that count on.
    fill(&buffer, &stream, G, (G / 4) as u32);
    let mut copies = reversed(2 * G);
    // Across chunks, and of what earlier ones wrote.
    copies.push((2 * G + PAGE..4 * G - PAGE, 4 * G + PAGE / 2));
    buffer.copies_on(&stream, copies).expect("they are enqueued");
    // Written again behind them: that is too late for them. And the memory goes, but not under them.
    fill(&buffer, &stream, 0, 9_999);
    let before = machine.driver().ledger().snapshot();
    assert_eq!(buffer.decommit(0..4 * G).expect("it goes, and nobody waits"), 4 * G);
    let unmapped = machine.driver().ledger().snapshot().since(&before).of(Call::MemUnmap);
    assert_eq!(unmapped, 0, "copies that wait still read there");
    held.release().expect("the held work went well");
    let mut found = vec![0; (2 * G - 2 * PAGE) as usize];
    buffer.read(4 * G + PAGE / 2, &mut found).expect("committed memory can be read");
    let words_of_page = (PAGE / 4) as u32;
    // The first and the last page of the reversed order were left out.
    let last_page = (2 * G / PAGE) as u32 - 2;
    for (page, bytes) in (0..).zip(found.chunks_exact(PAGE as usize)) {
        assert!(counts_up(bytes, (last_page - page) * words_of_page), "page {page}");
    }
    sound(&pool);
    drop((buffer, pool, stream));
    clean(&machine);
    Ok(())
}

pub(super) fn copies_go_through_either_address_of_a_shared_chunk(
    choice: DriverChoice,
) -> Result<(), Skip> {
    let machine = machine(choice)?;
    let (pool, stream) = (super::pool(&machine), machine.stream(0));
    let buffer = elastic(&pool, 64 * G);
    buffer.grow_to(2 * G).expect("it grows");
    buffer.share(0..G, 4 * G).expect("it is shared");
    let whole = ProbeKernel::FillWords { dst: buffer.address() + G, words: G / 4, value: 50 };
    let using = buffer.use_on(&stream).expect("the stream may use it");
    launch(&stream, &whole);
    drop(using);
    buffer.copy_on(&stream, G..2 * G, 4 * G).expect("it is enqueued");
    let refused = buffer.copy_on(&stream, 0..PAGE, 4 * G);
    assert!(refused.is_err(), "they are the same bytes");
    stream.synchronize().expect("no fault");
    assert!(holds(&buffer, HOME, 0, 50) && holds(&buffer, HOME, 4 * G, 50));
    sound(&pool);
    drop((buffer, pool, stream));
    clean(&machine);
    Ok(())
}
