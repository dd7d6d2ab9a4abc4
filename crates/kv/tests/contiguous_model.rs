//! A seeded model: sequences come, grow, fork, are cut, parked and go, another tenant takes and gives
//! memory, driver calls fail; a shadow knows each token, and after each step all bytes are compared.
#![allow(clippy::unwrap_used, reason = "a failure ends the story")]

mod common;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::rng::Rng;
use common::{G, HOME, Machine, NEIGHBOUR, ORDERS, T, check, machine, read, write};
use vmm_kv::{ContiguousCache, EvictionHook, KvError, Lending, Order, Sequence};
use vmm_pool::{Contents, ElasticBuffer, ElasticError, Error, Place};
use vmm_sys::sim::FaultPlan;
use vmm_sys::{Call, ResultCode};

const HOST: Place = Place::HostNuma(0);

/// Calls that may fail. Not among them: `cuEventDestroy`, since an event that cannot be destroyed is let go.
const FAULTY_CALLS: [Call; 13] = [
    Call::MemCreate,
    Call::MemMap,
    Call::MemSetAccess,
    Call::MemUnmap,
    Call::MemRelease,
    Call::MemAddressReserve,
    Call::MemAddressFree,
    Call::EventCreate,
    Call::EventRecord,
    Call::EventQuery,
    Call::EventSynchronize,
    Call::ThreadExchangeStreamCaptureMode,
    Call::MemcpyDtoDAsync,
];

struct Known {
    sequence: Sequence,
    /// What each token was written with.
    tokens: Vec<u64>,
}

struct Model {
    rng: Rng,
    machine: Machine,
    cache: ContiguousCache,
    known: Vec<Known>,
    /// The hook's to end.
    victims: Arc<Mutex<Vec<Sequence>>>,
    hook: Option<EvictionHook>,
    tenant: ElasticBuffer,
    faulty: bool,
    last_seed: u64,
}

/// What a failure may be, if no call was made to fail.
fn is_allowed(error: &KvError) -> bool {
    error.is_shortage()
        || matches!(error, KvError::TooLong { .. } | KvError::Parked)
        || matches!(error, KvError::Pool(error) if is_pools(error))
}

fn is_pools(error: &Error) -> bool {
    error.is_out_of_memory() || matches!(error, Error::Elastic(ElasticError::StillUsed { .. }))
}

impl Model {
    fn new(seed: u64, order: Order, faulty: bool) -> Model {
        let mut rng = Rng::new(seed);
        let machine = machine(
            2,
            |sim| sim.device_bytes_of(0, 60 * G).device_bytes_of(1, 200 * G).seed(seed),
            |pool| pool.lend(NEIGHBOUR, 12 * G).host_memory(0, 100 * G, 0),
        );
        let lending = if rng.chance(500) { Lending::Any } else { Lending::Nobody };
        let cache = machine
            .builder()
            .order(order)
            .tag("cache")
            .max_sequences(12)
            .ahead_tokens(rng.below(3) * T)
            .keep_idle_bytes(rng.below(20) * G)
            .lenders(lending)
            .background(false)
            .build()
            .unwrap();
        let victims: Arc<Mutex<Vec<Sequence>>> = Arc::default();
        let list = victims.clone();
        let hook = cache.on_shortage(move |_| list.lock().unwrap().pop().is_some());
        let tenant =
            machine.pool.elastic(HOME).capacity_bytes(64 * G).chunk_bytes(G).build().unwrap();
        let (known, hook) = (Vec::new(), Some(hook));
        Model { rng, machine, cache, known, victims, hook, tenant, faulty, last_seed: 0 }
    }

    fn pick(&mut self) -> Option<usize> {
        let count = self.known.len() as u64;
        (count > 0).then(|| self.rng.below(count) as usize)
    }

    fn step(&mut self) {
        let is_spoilt = self.faulty && self.rng.chance(300);
        let fired = self.machine.sim.faults_fired();
        if is_spoilt {
            eprint!("spoilt: ");
            let code = [ResultCode::UNKNOWN, ResultCode::OUT_OF_MEMORY][self.rng.below(2) as usize];
            let call = FAULTY_CALLS[self.rng.below(FAULTY_CALLS.len() as u64) as usize];
            let at = 1 + self.rng.below(5);
            self.machine.sim.inject(FaultPlan::fail(code).on(call).at(at).once());
        }
        let outcome = self.act();
        self.machine.sim.clear_faults();
        eprintln!("{outcome:?}");
        let was_spoilt = self.machine.sim.faults_fired() > fired;
        if let Err(error) = outcome {
            assert!(was_spoilt || is_allowed(&error), "{error}");
        }
        self.compare();
    }

    /// One thing. After an error everything must be as it was.
    fn act(&mut self) -> Result<(), KvError> {
        let (what, at) = (self.rng.below(100), self.pick());
        // Shown if the run fails.
        eprintln!("{what} of {at:?} {:?}", at.map(|at| &self.known[at].sequence));
        match (what, at) {
            (0..12, _) | (_, None) => {
                let (tokens, is_victim) = (self.rng.below(60), self.rng.chance(300));
                let sequence = match self.rng.chance(300) {
                    true => self.cache.open_ahead(tokens)?,
                    false => self.cache.open(tokens)?,
                };
                let has = sequence.tokens();
                assert!(sequence.committed_tokens() >= has && (has == 0 || has == tokens));
                self.last_seed += 1;
                let seed = self.last_seed;
                write(&self.machine, &self.cache, &sequence, 0..has, seed);
                match is_victim {
                    true => self.victims.lock().unwrap().push(sequence),
                    false => self.known.push(Known { sequence, tokens: vec![seed; has as usize] }),
                }
            }
            (12..50, Some(at)) => self.append(at)?,
            (50..60, Some(at)) => {
                let known = &mut self.known[at];
                let tokens = self.rng.below(known.tokens.len() as u64 + 1);
                known.sequence.truncate(tokens);
                known.tokens.truncate(tokens as usize);
            }
            (60..70, Some(at)) => {
                let known = &mut self.known[at];
                let tokens = match self.rng.chance(600) {
                    true => known.tokens.len(),
                    false => self.rng.below(known.tokens.len() as u64 + 1) as usize,
                };
                let sequence = known.sequence.fork_at(tokens as u64)?;
                let tokens = known.tokens[..tokens].to_vec();
                self.known.push(Known { sequence, tokens });
            }
            (70..78, Some(at)) => drop(self.known.swap_remove(at)),
            (78..82, Some(at)) => {
                let place = if self.rng.chance(700) { HOST } else { NEIGHBOUR.into() };
                self.known[at].sequence.park(place)?;
            }
            (82..88, Some(at)) => _ = self.known[at].sequence.resume()?,
            (88..90, Some(at)) => _ = self.known[at].sequence.migrate(HOME)?,
            (90..92, _) => _ = self.cache.release_idle(self.rng.below(10) * G)?,
            (92..95, _) => _ = self.tenant.grow_to(self.rng.below(40) * G)?,
            (95..97, _) => _ = self.tenant.shrink_to(self.rng.below(20) * G)?,
            (97, _) => self.sleep()?,
            (_, _) => {
                let using = self.cache.use_now()?;
                self.machine.sim.busy(HOME, self.machine.stream.handle(), 500).unwrap();
                drop(using);
            }
        }
        Ok(())
    }

    fn append(&mut self, at: usize) -> Result<(), KvError> {
        let n = if self.rng.chance(600) { 1 } else { self.rng.below(40) };
        let known = &mut self.known[at];
        let (is_ready, foreground) =
            (known.sequence.is_ready(n), self.cache.stats().foreground_growths);
        let first = known.sequence.append(n)?;
        if is_ready {
            assert_eq!(self.cache.stats().foreground_growths, foreground, "it was ready");
        }
        assert_eq!(first, known.tokens.len() as u64);
        self.last_seed += 1;
        let seed = self.last_seed;
        write(&self.machine, &self.cache, &known.sequence, first..first + n, seed);
        known.tokens.extend((0..n).map(|_| seed));
        Ok(())
    }

    /// The cache sleeps and wakes. Where the waking fails it is tried again without faults.
    fn sleep(&mut self) -> Result<(), KvError> {
        // What sequences share they have for themselves afterwards, and that must find room.
        if self.cache.buffer().committed_bytes() > 50 * G {
            return Ok(());
        }
        self.machine.pool.sleep("cache", Contents::Kept { node: 0 }, Duration::ZERO)?;
        let woken = self.machine.pool.wake("cache");
        if woken.is_err() {
            self.machine.sim.clear_faults();
            self.tenant.shrink_to(0)?;
            self.victims.lock().unwrap().clear();
            while self.machine.pool.wake("cache").is_err() {
                assert!(self.known.pop().is_some(), "nothing is left, and it does not wake");
            }
        }
        // What was to be taken away meanwhile.
        self.cache.settle()
    }

    /// Whatever was tried, the bytes are there.
    fn compare(&self) {
        check(&self.cache);
        self.machine.pool.verify().unwrap();
        for Known { sequence, tokens } in &self.known {
            assert_eq!(sequence.tokens(), tokens.len() as u64);
            for (token, seed) in (0..).zip(tokens) {
                read(&self.machine, &self.cache, sequence, token..token + 1, *seed);
            }
        }
    }

    fn end(self) {
        let Model { machine, cache, known, victims, hook, tenant, .. } = self;
        drop((known, hook));
        victims.lock().unwrap().clear();
        cache.settle().unwrap();
        cache.release_idle(0).unwrap();
        check(&cache);
        assert_eq!(cache.stats().committed_bytes, 0);
        assert_eq!(cache.buffer().committed_bytes(), 0);
        drop((cache, tenant, victims));
        assert_eq!(machine.stats(0).elastic_bytes, 0);
        machine.end();
    }
}

fn run(seed: u64, order: Order, faulty: bool, steps: u32) {
    let mut model = Model::new(seed, order, faulty);
    for _ in 0..steps {
        model.step();
    }
    model.end();
}

/// Which seeds: those named in `VMM_KV_SEEDS`, as `first..end`, else a few.
fn runs(faulty: bool) {
    let named = std::env::var("VMM_KV_SEEDS").ok();
    let seeds = named.and_then(|text| {
        let (first, end) = text.split_once("..")?;
        Some(first.parse().ok()?..end.parse().ok()?)
    });
    for seed in seeds.unwrap_or(0..24u64) {
        for order in ORDERS {
            let outcome = std::panic::catch_unwind(|| run(seed, order, faulty, 120));
            assert!(outcome.is_ok(), "seed {seed}, {order:?}, faulty: {faulty}");
        }
    }
}

#[test]
fn runs_without_faults() {
    runs(false);
}

#[test]
fn runs_with_faults() {
    runs(true);
}
