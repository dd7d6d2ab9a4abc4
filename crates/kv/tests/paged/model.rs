//! Random histories, compared with a shadow that knows what every token holds.
//!
//! `KV_SEEDS` sets how many histories are tried, `KV_SEED` which one alone.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use vmm_kv::{BlockTables, EvictionHook, KvError, Lending, PagedCache, PagedSequence};
use vmm_pool::{Contents, ElasticBuffer, Place};
use vmm_sys::sim::FaultPlan;
use vmm_sys::{DeviceId, ResultCode};

use crate::harness::*;
use crate::rng::Rng;

const HOST: Place = Place::HostNuma(0);
const TABLE_ROWS: usize = 16;

/// A sequence, and what its tokens hold.
type Written = (PagedSequence, Vec<u64>);

struct Run {
    rng: Rng,
    machine: Machine,
    cache: PagedCache,
    /// Hooks evict from here too.
    sequences: Arc<Mutex<Vec<Written>>>,
    hook: Option<EvictionHook>,
    tenant: ElasticBuffer,
    tables: BlockTables,
    last_stamp: u64,
    row: usize,
    faulty: bool,
    tally: Tally,
}

/// What happened at all: a history in which nothing does proves nothing.
#[derive(Clone, Copy, Debug, Default)]
struct Tally {
    packed: u64,
    parked: u64,
    resumed: u64,
    copied: u64,
    refused: u64,
    faults: u64,
    evicted: u64,
    borrowed: u64,
}

impl Tally {
    fn add(&mut self, other: Tally) {
        self.packed += other.packed;
        self.parked += other.parked;
        self.resumed += other.resumed;
        self.copied += other.copied;
        self.refused += other.refused;
        self.faults += other.faults;
        self.evicted += other.evicted;
        self.borrowed += other.borrowed;
    }
}

impl Run {
    fn new(seed: u64, faulty: bool) -> Run {
        let mut rng = Rng::new(seed);
        let chunks = 6 + rng.below(20);
        let machine = Machine::new(
            |sim| sim.device_bytes_of(0, chunks * G).seed(seed),
            |pool| pool.host_memory(0, 64 * G, 0).lend(DeviceId(1), 4 * G),
        );
        let block_tokens = [4, 4, 3, 5, 16, 40][rng.below(6) as usize];
        let mut builder = machine.builder().block_tokens(block_tokens).chunk_bytes(G);
        builder = builder.max_blocks(20 + rng.below(100) as u32);
        builder = builder.host_blocks(HOST, 10 + rng.below(30) as u32);
        builder = builder.ahead_blocks(rng.below(3) as u32 * 4);
        builder = builder.keep_idle_bytes(rng.below(3) * G).tag("kv");
        if rng.chance(400) {
            builder = builder.lenders(Lending::Any);
        }
        if rng.chance(200) {
            builder = builder.quota_bytes((4 + rng.below(8)) * G);
        }
        let cache = builder.build().unwrap();
        let sequences: Arc<Mutex<Vec<Written>>> = Arc::default();
        let evicts = sequences.clone();
        let evict = move |_: &vmm_kv::KvShortage| {
            let victim = evicts.lock().pop();
            victim.is_some()
        };
        let hook = rng.chance(500).then(|| cache.on_shortage(evict));
        let tenant = machine.pool.elastic(DeviceId(0)).chunk_bytes(G).build().unwrap();
        let tables = BlockTables::new(TABLE_ROWS, 256);
        let (last_stamp, row, tally) = (0, 0, Tally::default());
        Run { rng, machine, cache, sequences, hook, tenant, tables, last_stamp, row, faulty, tally }
    }

    /// Does `work`, during which a driver call may fail.
    fn attempt<T>(&mut self, work: impl FnOnce(&PagedCache) -> Result<T, KvError>) -> Option<T> {
        if self.faulty && self.rng.chance(400) {
            let codes = [ResultCode::OUT_OF_MEMORY, ResultCode::INVALID_VALUE];
            let code = codes[self.rng.below(2) as usize];
            let at = 1 + self.rng.below(24);
            self.machine.sim.inject(FaultPlan::fail(code).at(at).once());
        }
        let fired_before = self.machine.sim.faults_fired();
        let outcome = work(&self.cache);
        let fired = self.machine.sim.faults_fired() - fired_before;
        self.machine.sim.clear_faults();
        match outcome {
            Ok(done) => Some(done),
            Err(KvError::NoMemory { .. } | KvError::TooLong { .. }) => {
                self.tally.refused += 1;
                None
            }
            Err(error) if fired > 0 => {
                self.tally.faults += 1;
                assert!(matches!(error, KvError::Pool(_)), "{error}");
                None
            }
            Err(error) => panic!("{error}"),
        }
    }

    fn take_one(&mut self) -> Option<Written> {
        let mut sequences = self.sequences.lock();
        let at = self.rng.below(sequences.len() as u64) as usize;
        (!sequences.is_empty()).then(|| sequences.swap_remove(at))
    }

    fn put(&self, written: Written) {
        self.sequences.lock().push(written);
    }

    /// Writes what the sequence has and the shadow has not.
    fn write_rest(&mut self, (sequence, stamps): &mut Written) {
        for token in stamps.len() as u64..sequence.tokens() {
            self.last_stamp += 1;
            write(&self.cache, sequence, token, self.last_stamp);
            stamps.push(self.last_stamp);
        }
    }

    fn step(&mut self) {
        match self.rng.below(100) {
            0..14 => {
                let tokens = self.rng.below(40);
                let is_ahead = self.rng.chance(300);
                let open = |cache: &PagedCache| match is_ahead {
                    true => cache.open_ahead(tokens),
                    false => cache.open(tokens),
                };
                if let Some(sequence) = self.attempt(open) {
                    assert_eq!(sequence.tokens(), if is_ahead { 0 } else { tokens });
                    let mut written = (sequence, Vec::new());
                    self.write_rest(&mut written);
                    self.put(written);
                }
            }
            14..44 => self.append(),
            44..52 => {
                let Some((mut sequence, mut stamps)) = self.take_one() else { return };
                let tokens = self.rng.below(stamps.len() as u64 + 2);
                sequence.truncate(tokens);
                stamps.truncate(tokens as usize);
                self.put((sequence, stamps));
            }
            52..64 => self.fork(),
            64..72 => drop(self.take_one()),
            72..80 => self.park(),
            80..86 => {
                let max_blocks = [1, 3, 10, u64::MAX][self.rng.below(4) as usize];
                let packed = self.attempt(|cache| cache.pack(max_blocks));
                self.tally.packed += packed.map_or(0, |packed| packed.blocks);
            }
            86..88 => {
                let keep_bytes = self.rng.below(3) * G;
                self.attempt(|cache| cache.release_idle(keep_bytes));
            }
            88..94 => {
                let bytes = self.rng.below(12) * G;
                let tenant = &self.tenant;
                let _short = match self.rng.chance(500) {
                    true => tenant.grow_to(bytes),
                    false => tenant.shrink_to(bytes),
                };
            }
            94..98 => self.show(),
            _ => {
                let slept =
                    self.machine.pool.sleep("kv", Contents::Kept { node: 0 }, Duration::ZERO);
                self.cache.verify().unwrap();
                // The tenant makes room, or the sleep would be for ever.
                self.tenant.shrink_to(0).unwrap();
                slept.map_or_else(|error| assert!(error.is_out_of_memory(), "{error}"), drop);
                self.machine.pool.wake("kv").unwrap();
            }
        }
    }

    fn append(&mut self) {
        let Some((mut sequence, stamps)) = self.take_one() else { return };
        let tokens = [1, 1, 1, 2, 7, 50][self.rng.below(6) as usize];
        if sequence.is_parked() {
            assert!(matches!(sequence.append(tokens), Err(KvError::Parked)));
        } else {
            let (first, before) = (stamps.len() as u64, sequence.blocks());
            let growths = self.cache.stats().foreground_growths;
            let is_ready = sequence.is_ready(tokens);
            if let Some(at) = self.attempt(|_| sequence.append(tokens)) {
                assert_eq!(at, first);
                assert!(!is_ready || self.cache.stats().foreground_growths == growths);
                self.tally.copied += u64::from(sequence.blocks()[..before.len()] != before);
            }
        }
        let mut written = (sequence, stamps);
        self.write_rest(&mut written);
        self.put(written);
    }

    fn fork(&mut self) {
        let Some((mut sequence, stamps)) = self.take_one() else { return };
        let tokens = self.rng.below(stamps.len() as u64 + 1);
        match sequence.fork_at(tokens) {
            Ok(child) => self.put((child, stamps[..tokens as usize].to_vec())),
            Err(error) => assert!(sequence.is_parked(), "{error}"),
        }
        self.put((sequence, stamps));
    }

    fn park(&mut self) {
        let Some((mut sequence, stamps)) = self.take_one() else { return };
        let was_parked = sequence.is_parked();
        let done = match was_parked {
            true => self.attempt(|_| sequence.resume()),
            false => self.attempt(|_| sequence.park()),
        };
        assert_eq!(sequence.is_parked(), was_parked != done.is_some());
        match was_parked {
            true => self.tally.resumed += u64::from(done > Some(0)),
            false => self.tally.parked += u64::from(done > Some(0)),
        }
        self.put((sequence, stamps));
    }

    /// The matrix shows what the sequences have, whatever happened since it last did.
    fn show(&mut self) {
        let sequences = self.sequences.lock();
        let shown: Vec<&PagedSequence> = sequences
            .iter()
            .map(|it| &it.0)
            .filter(|it| !it.is_parked())
            .take(TABLE_ROWS)
            .collect();
        self.tables.update(&shown).unwrap();
        for (row, sequence) in shown.iter().enumerate() {
            let mut blocks: Vec<i32> = sequence.blocks().iter().map(|it| *it as i32).collect();
            blocks.resize(self.tables.max_blocks_per_row(), 0);
            assert_eq!(self.tables.row(row), blocks);
            assert_eq!(self.tables.seq_lens()[row] as u64, sequence.tokens());
        }
    }

    /// Every token holds what it should, in one of its rows; in all of them at last.
    fn check(&mut self) {
        self.cache.verify().unwrap();
        self.row += 1;
        self.tally.borrowed += u64::from(!self.cache.buffer().stats().borrowed.is_empty());
        for (sequence, stamps) in &*self.sequences.lock() {
            assert_eq!(sequence.tokens(), stamps.len() as u64);
            for (token, stamp) in stamps.iter().enumerate() {
                let found = read_row(&self.cache, sequence, token as u64, self.row + token);
                assert_eq!(found, Some(*stamp), "token {token} of {sequence:?}");
            }
        }
    }

    fn end(self) -> Tally {
        let Run { machine, cache, sequences, hook, tenant, mut tally, .. } = self;
        tally.evicted = cache.stats().evictions;
        for (sequence, stamps) in &*sequences.lock() {
            check(&cache, sequence, stamps);
        }
        machine.pool.verify().unwrap();
        drop(std::mem::take(&mut *sequences.lock()));
        cache.release_idle(0).unwrap();
        assert_eq!(cache.stats().committed_bytes, 0);
        cache.verify().unwrap();
        drop((hook, cache, tenant));
        machine.end();
        tally
    }
}

fn histories(first_seed: u64, faulty: bool) -> Tally {
    let number = |name: &str| std::env::var(name).ok().and_then(|it| it.parse::<u64>().ok());
    let seeds = match number("KV_SEED") {
        Some(seed) => seed..seed + 1,
        None => first_seed..first_seed + number("KV_SEEDS").unwrap_or(25),
    };
    let mut tally = Tally::default();
    for seed in seeds {
        // Shown when it fails.
        eprintln!("KV_SEED={seed}");
        let mut run = Run::new(seed, faulty);
        for _ in 0..150 {
            run.step();
            run.check();
        }
        tally.add(run.end());
    }
    tally
}

/// Whether each of these things happened, unless one history was asked for.
fn check_tally(tally: Tally) {
    eprintln!("{tally:?}");
    let Tally { packed, parked, resumed, copied, refused, evicted, borrowed, .. } = tally;
    let all = [packed, parked, resumed, copied, refused, evicted, borrowed];
    assert!(std::env::var("KV_SEED").is_ok() || all.iter().all(|times| *times >= 10), "{tally:?}");
}

#[test]
fn every_token_is_where_its_sequence_says() {
    check_tally(histories(1, false));
}

#[test]
fn nothing_is_lost_to_driver_calls_that_fail() {
    let tally = histories(1_000_001, true);
    check_tally(tally);
    assert!(std::env::var("KV_SEED").is_ok() || tally.faults >= 10, "{tally:?}");
}
