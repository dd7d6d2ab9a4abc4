//! Paged KV caches: bytes by block tables, packing beside work, the host's zone, lenders.

use vmm_kv::{BlockTables, KvError, Lending, PagedCache, PagedSequence};
use vmm_pool::{Buffer, Place, Pool};
use vmm_sys::{DeviceId, ProbeKernel};

use super::contiguous::{HOST, shape, with_host, with_lender};
use super::elastic::{counts_up, launch};
use super::{clean, machine, sound};
use crate::machine::{DriverChoice, Skip};

const HOME: DeviceId = DeviceId(0);
const AWAY: DeviceId = DeviceId(1);
const BLOCK_TOKENS: u32 = 16;
/// 2^17: words of a block, of which a sequence has eight at most.
const BLOCK_WORDS: u64 = 131_072;
const BLOCKS_MAX: usize = 8;
/// Sequences of a batch, of which one in so many lives on.
const SEQUENCES: u32 = 32;
const LIVES_ON: u32 = 4;

/// Sequences, each with a number by which its words are known, and their tables.
struct Batch {
    sequences: Vec<(u32, PagedSequence)>,
    tables: BlockTables,
}

impl Batch {
    /// Sequences of these lengths, whose blocks hold words of their own.
    fn written(
        cache: &PagedCache,
        lengths: impl IntoIterator<Item = u64>,
    ) -> Result<Batch, KvError> {
        let mut sequences = Vec::new();
        for (number, tokens) in (1..).zip(lengths) {
            let mut sequence = cache.open(0)?;
            assert_eq!(sequence.append(tokens)?, 0);
            sequences.push((number, sequence));
        }
        let mut batch = Batch { tables: BlockTables::new(sequences.len(), BLOCKS_MAX), sequences };
        batch.update();
        let _using = cache.use_now()?;
        for (block, value) in batch.blocks() {
            let dst = cache.address() + cache.layout().bytes_of(block).start;
            let kernel = ProbeKernel::FillWords { dst, words: BLOCK_WORDS, value };
            launch(cache.stream(), &kernel);
        }
        Ok(batch)
    }

    /// The tables as they are now. Which rows changed.
    fn update(&mut self) -> Vec<usize> {
        let sequences: Vec<&PagedSequence> = self.sequences.iter().map(|(_, it)| it).collect();
        self.tables.update(&sequences).expect("the tables have room").to_vec()
    }

    /// Each block of each row, and the word that it begins with.
    fn blocks(&self) -> Vec<(u32, u32)> {
        let rows = self.sequences.iter().zip(self.tables.blocks_in_rows()).enumerate();
        let of_row = |(row, ((number, _), count)): (usize, (&(u32, PagedSequence), &usize))| {
            let first = number << 24;
            let blocks = self.tables.row(row)[..*count].iter();
            let words = (0..).map(move |at| first + at * BLOCK_WORDS as u32);
            blocks.map(|block| *block as u32).zip(words).collect::<Vec<_>>()
        };
        rows.flat_map(of_row).collect()
    }

    /// Whether every block that the tables name holds what was written for its row.
    fn is_right(&self, cache: &PagedCache) -> bool {
        self.blocks().into_iter().all(|(block, word)| holds(cache, block, word))
    }
}

/// Whether a block's words count up from this one.
fn holds(cache: &PagedCache, block: u32, word: u32) -> bool {
    cache.stream().synchronize().expect("no fault");
    let mut bytes = vec![0; cache.layout().block_bytes() as usize];
    let offset = cache.layout().bytes_of(block).start;
    cache.buffer().read(offset, &mut bytes).expect("blocks of tables can be read");
    counts_up(&bytes, word)
}

fn builder(pool: &Pool, stream: &vmm_sys::object::Stream) -> vmm_kv::PagedBuilder {
    let builder = PagedCache::builder(pool, stream, shape()).block_tokens(BLOCK_TOKENS);
    builder.max_blocks(1024).ahead_blocks(0)
}

fn check_sound(pool: &Pool, cache: &PagedCache) {
    cache.verify().expect("the walker finds nothing");
    assert!(cache.stats().adds_up(), "{:?}", cache.stats());
    pool.verify().expect("the walker finds nothing");
}

/// The sequences are gone: the cache's memory goes back.
fn end(pool: &Pool, cache: PagedCache) {
    check_sound(pool, &cache);
    cache.release_idle(0).expect("nothing else is under way");
    assert_eq!(cache.stats().committed_bytes, 0, "{:?}", cache.stats());
    drop(cache);
    pool.trim(HOME).expect("the device is trimmed");
    let after = sound(pool);
    assert_eq!((after.elastic_bytes, after.limbo_bytes), (0, 0), "{after:?}");
}

/// Copies blocks away on the cache's stream, as a step reads them: by the tables of its time.
fn read_on(cache: &PagedCache, blocks: &[(u32, u32)], found: &Buffer) {
    let _using = cache.use_now().expect("the stream may use it");
    for (at, (block, _)) in (0..).zip(blocks) {
        let src = cache.address() + cache.layout().bytes_of(*block).start;
        let dst = found.address() + at * cache.layout().block_bytes();
        launch(cache.stream(), &ProbeKernel::CopyWords { dst, src, words: BLOCK_WORDS });
    }
}

pub(super) fn packing_keeps_every_block_while_a_step_still_reads(
    choice: DriverChoice,
) -> Result<(), Skip> {
    let machine = machine(choice)?;
    let (pool, stream) = (super::pool(&machine), machine.stream(0));
    let lane = pool.lane(&stream).expect("a lane is opened");
    let cache = builder(&pool, &stream).build().expect("addresses are reserved");
    let lengths = (0..SEQUENCES).map(|number| u64::from(1 + number * 37 % 128));
    let mut batch = Batch::written(&cache, lengths).expect("there is memory");
    let before = cache.stats().committed_bytes;
    batch.sequences.retain(|(number, _)| number % LIVES_ON == 0);
    batch.update();
    let old = batch.blocks();
    let found = lane.alloc(old.len() as u64 * cache.layout().block_bytes()).expect("it is served");
    let held = machine.hold(&stream).expect("the stream is held");
    read_on(&cache, &old, &found);
    let packed = cache.pack(u64::MAX).expect("nobody waits for the step");
    assert!(packed.blocks > 0, "{packed:?}");
    assert!(!batch.update().is_empty() && batch.blocks() != old, "blocks have other numbers");
    // Else the thread does it, some time.
    cache.release_idle(0).expect("nothing else is under way");
    let limbo_bytes = sound(&pool).limbo_bytes;
    assert!(packed.emptied_bytes > 0 && limbo_bytes >= packed.emptied_bytes, "{limbo_bytes}");
    held.release().expect("the held work went well");
    for (at, (_, word)) in (0..).zip(&old) {
        let mut bytes = vec![0; cache.layout().block_bytes() as usize];
        found.read(at * cache.layout().block_bytes(), &mut bytes).expect("it can be read");
        assert!(counts_up(&bytes, *word), "what the step read of block {at}");
    }
    assert!(batch.is_right(&cache), "by the tables of the next step");
    let stats = cache.stats();
    let blocks_bytes = old.len() as u64 * cache.layout().block_bytes();
    assert!(stats.committed_bytes < blocks_bytes + cache.buffer().chunk_bytes(), "{stats:?}");
    assert!(stats.committed_bytes < before / 2, "{before} before, {stats:?}");
    pool.trim(HOME).expect("the device is trimmed");
    let after = sound(&pool);
    assert_eq!((after.elastic_bytes, after.limbo_bytes), (stats.committed_bytes, 0), "{after:?}");
    drop((batch, found));
    end(&pool, cache);
    drop((lane, pool, stream));
    clean(&machine);
    Ok(())
}

pub(super) fn parked_blocks_come_back_from_the_host(choice: DriverChoice) -> Result<(), Skip> {
    let (machine, pool) = with_host(choice)?;
    let stream = machine.stream(0);
    let cache = builder(&pool, &stream).host_blocks(HOST, 32);
    let cache = cache.build().expect("addresses are reserved");
    let mut batch = Batch::written(&cache, [100, 20, 128]).expect("there is memory");
    let (number, mut parked) = batch.sequences.remove(0);
    let bytes = parked.park().expect("the host has room");
    assert_eq!(bytes, 7 * cache.layout().block_bytes());
    let host = |cache: &PagedCache| {
        let by_place = cache.buffer().stats().by_place;
        by_place.iter().find(|(place, _)| *place == HOST).map_or(0, |(_, bytes)| *bytes)
    };
    assert!(host(&cache) >= bytes, "{:?}", cache.buffer().stats().by_place);
    let on_host = |at: usize, block: u32| {
        holds(&cache, block, (number << 24) + at as u32 * BLOCK_WORDS as u32)
    };
    assert!(parked.blocks().into_iter().enumerate().all(|(at, block)| on_host(at, block)));
    // Others get its blocks on the device.
    let others = Batch::written(&cache, [90, 90]).expect("there is memory");
    batch.update();
    assert!(batch.is_right(&cache) && others.is_right(&cache));
    assert_eq!(parked.resume().expect("the device has room"), bytes);
    cache.release_idle(0).expect("nothing else is under way");
    assert_eq!(host(&cache), 0, "nothing is parked there any more");
    batch.sequences.insert(0, (number, parked));
    batch.update();
    assert!(batch.is_right(&cache) && others.is_right(&cache));
    check_sound(&pool, &cache);
    drop((batch, others));
    end(&pool, cache);
    drop((pool, stream));
    clean(&machine);
    Ok(())
}

pub(super) fn blocks_lie_in_memory_of_the_neighbour(choice: DriverChoice) -> Result<(), Skip> {
    let (machine, pool) = with_lender(choice)?;
    let stream = machine.stream(0);
    let cache = builder(&pool, &stream).lenders(Lending::Any).build();
    let cache = cache.expect("addresses are reserved");
    // 32 blocks, of which 24 fit at home.
    let mut batch = Batch::written(&cache, [128; 4]).expect("the neighbour has room");
    let by_place = cache.buffer().stats().by_place;
    let places: Vec<Place> = by_place.iter().map(|(place, _)| *place).collect();
    assert_eq!(places, [Place::Device(HOME), Place::Device(AWAY)], "{by_place:?}");
    assert!(batch.is_right(&cache));
    check_sound(&pool, &cache);
    // Room at home: what is left of the last ones is copied from the neighbour.
    batch.sequences.drain(..2);
    for (_, sequence) in &mut batch.sequences {
        sequence.truncate(100);
    }
    cache.pack(u64::MAX).expect("there is room");
    batch.update();
    assert!(batch.is_right(&cache));
    check_sound(&pool, &cache);
    drop(batch);
    end(&pool, cache);
    pool.trim(AWAY).expect("the device is trimmed");
    drop((pool, stream));
    clean(&machine);
    Ok(())
}
