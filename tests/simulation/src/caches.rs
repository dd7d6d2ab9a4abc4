//! KV caches: sequences that grow, are forked, cut, parked and dropped, with contents in their tokens.

use vmm_kv::{ContiguousCache, Dtype, KvError, KvShape, PagedCache, PagedSequence, Part, Sequence};
use vmm_pool::{Error, Pool};
use vmm_sys::object::Stream;
use vmm_sys::{DeviceId, Driver};

use crate::actor::Actor;
use crate::coverage::Outcome;
use crate::judge::Kind;
use crate::kernels::Contents;
use crate::rng::Rng;
use crate::setup::Setup;

/// 2 layers, one head of 64 elements, 16 bits: 512 bytes a token.
const TOKEN_BYTES: u64 = 512;
const HEAD_BYTES: u64 = 128;
const BLOCK_TOKENS: u32 = 4;
/// Sequences of an actor.
const SEQUENCES_MAX: usize = 4;

/// One of each kind, each with a stream of its own.
pub(crate) struct Caches {
    contiguous: ContiguousCache,
    paged: PagedCache,
    max_tokens: u64,
}

impl Caches {
    pub(crate) fn new(
        setup: &Setup,
        pool: &Pool,
        driver: &std::sync::Arc<dyn Driver>,
        rng: &mut Rng,
    ) -> Caches {
        let shape = KvShape::new(2, 1, 64, Dtype::F16).expect("a shape");
        let mut stream = || {
            let device = DeviceId(rng.below(setup.devices.into()) as u32);
            Stream::create(driver, device).expect("a stream is made")
        };
        let (one, two) = (stream(), stream());
        let max_tokens = 4 * setup.slot_bytes / TOKEN_BYTES;
        let keep_bytes = rng.pick(&[0, setup.slot_bytes]);
        let contiguous = ContiguousCache::builder(pool, &one, shape)
            .chunk_bytes(setup.slot_bytes)
            .max_tokens(max_tokens)
            .max_sequences(8)
            .ahead_tokens(rng.pick(&[0, 8, 64]))
            .keep_idle_bytes(keep_bytes)
            .movable(rng.chance(500))
            .background(setup.background);
        let paged = PagedCache::builder(pool, &two, shape)
            .chunk_bytes(setup.slot_bytes)
            .block_tokens(BLOCK_TOKENS)
            .max_blocks((8 * max_tokens / u64::from(BLOCK_TOKENS)) as u32)
            .ahead_blocks(rng.pick(&[0, 2]))
            .keep_idle_bytes(keep_bytes)
            .background(setup.background);
        let contiguous = contiguous.build().expect("a cache is built");
        Caches { contiguous, paged: paged.build().expect("a cache is built"), max_tokens }
    }

    pub(crate) fn verify(&self) -> Result<(), String> {
        self.contiguous.verify()?;
        self.paged.verify()
    }
}

enum Line {
    Contiguous(Sequence),
    Paged(PagedSequence),
}

/// A sequence, and which tokens were written: position and version.
pub(crate) struct Held {
    line: Line,
    written: Vec<(u64, u32)>,
}

impl Held {
    fn tokens(&self) -> u64 {
        match &self.line {
            Line::Contiguous(line) => line.tokens(),
            Line::Paged(line) => line.tokens(),
        }
    }

    fn is_parked(&self) -> bool {
        match &self.line {
            Line::Contiguous(line) => line.is_parked(),
            Line::Paged(line) => line.is_parked(),
        }
    }
}

impl Actor {
    fn judge_cache<T>(&self, operation: &'static str, outcome: Result<T, KvError>) -> Option<T> {
        let may = [Kind::InUse, Kind::StillUsed, Kind::Stuck, Kind::Busy];
        let error = match outcome {
            Ok(answer) => return self.judge(operation, Ok(answer), &may),
            Err(KvError::NoMemory { cause, .. } | KvError::Pool(cause)) => cause,
            Err(KvError::Driver(cause)) => Error::Driver(cause),
            Err(KvError::TooManySequences { .. }) => {
                self.came_out(operation, Outcome::Refused, "all sequences are open");
                return None;
            }
            Err(error) => panic!("actor {}: {operation}: {error}", self.number),
        };
        self.judge(operation, Err(error), &may)
    }

    pub(crate) fn cache(&mut self) {
        let world = self.world.clone();
        let Some(caches) = &world.caches else { return };
        let choice = self.rng.below(10);
        if self.sequences.is_empty() || choice == 0 && self.sequences.len() < SEQUENCES_MAX {
            return self.open_sequence(caches);
        }
        let at = self.rng.below(self.sequences.len() as u64) as usize;
        let mut held = self.sequences.swap_remove(at);
        match choice {
            1..5 => self.append(caches, &mut held),
            5 | 6 => self.compare_sequence(caches, &held),
            7 => self.fork(&mut held),
            8 => self.cut(&mut held),
            _ => {
                self.compare_sequence(caches, &held);
                drop(held);
                self.came_out("drop a sequence", Outcome::Done, "done");
                return;
            }
        }
        self.sequences.push(held);
    }

    fn open_sequence(&mut self, caches: &Caches) {
        let line = match self.rng.chance(500) {
            true => caches.contiguous.open(0).map(Line::Contiguous),
            false => caches.paged.open(0).map(Line::Paged),
        };
        if let Some(line) = self.judge_cache("open a sequence", line) {
            self.sequences.push(Held { line, written: Vec::new() });
        }
    }

    /// Appends tokens, and writes the first and the last of them.
    fn append(&mut self, caches: &Caches, held: &mut Held) {
        let room = caches.max_tokens - held.tokens();
        let tokens = (1 + self.rng.below(caches.max_tokens / 2)).min(room);
        if tokens == 0 || held.is_parked() {
            return;
        }
        let first = match &mut held.line {
            Line::Contiguous(line) => line.append(tokens),
            Line::Paged(line) => line.append(tokens),
        };
        let Some(first) = self.judge_cache("append tokens", first) else { return };
        for token in [first, first + tokens - 1] {
            held.written.retain(|(known, _)| *known != token);
            let version = self.world.next_version();
            let wrote = self.with_token(caches, held, token, |actor, stream, address| {
                let contents = Contents { address, bytes: HEAD_BYTES, version };
                actor.drive("a write", actor.world.write(stream, contents)).is_some()
            });
            if wrote == Some(true) {
                held.written.push((token, version));
            }
        }
    }

    fn compare_sequence(&self, caches: &Caches, held: &Held) {
        if held.is_parked() {
            return;
        }
        for &(token, version) in &held.written {
            self.with_token(caches, held, token, |actor, stream, address| {
                let contents = Contents { address, bytes: HEAD_BYTES, version };
                let what = format!("actor {}, token {token} of a sequence", actor.number);
                actor.drive("a check", actor.world.check(stream, contents, what));
                actor.feature("tokens compared");
            });
        }
    }

    /// Does something with a token's address, in a use of its cache.
    fn with_token<T>(
        &self,
        caches: &Caches,
        held: &Held,
        token: u64,
        work: impl FnOnce(&Actor, &Stream, u64) -> T,
    ) -> Option<T> {
        let (using, stream) = match &held.line {
            Line::Contiguous(_) => (caches.contiguous.use_now(), caches.contiguous.stream()),
            Line::Paged(_) => (caches.paged.use_now(), caches.paged.stream()),
        };
        let _using = self.judge_cache("use a cache", using)?;
        let address = match &held.line {
            Line::Contiguous(line) => {
                let stride = caches.contiguous.layout().token_stride_bytes();
                line.layer_address(1, Part::Value) + token * stride
            }
            Line::Paged(line) => {
                caches.paged.address() + line.offset(1, Part::Value, token, 0).expect("it is there")
            }
        };
        Some(work(self, stream, address))
    }

    fn fork(&mut self, held: &mut Held) {
        if held.is_parked() || self.sequences.len() >= SEQUENCES_MAX {
            return;
        }
        let line = match &mut held.line {
            Line::Contiguous(line) => line.fork().map(Line::Contiguous),
            Line::Paged(line) => line.fork().map(Line::Paged),
        };
        if let Some(line) = self.judge_cache("fork a sequence", line) {
            self.sequences.push(Held { line, written: held.written.clone() });
        }
    }

    /// Takes tokens off the end.
    fn cut(&mut self, held: &mut Held) {
        if held.is_parked() {
            return;
        }
        let tokens = self.rng.below(held.tokens() + 1);
        match &mut held.line {
            Line::Contiguous(line) => line.truncate(tokens),
            Line::Paged(line) => line.truncate(tokens),
        }
        held.written.retain(|(token, _)| *token < tokens);
        self.came_out("cut a sequence", Outcome::Done, "done");
    }

    pub(crate) fn end_sequences(&mut self) {
        let world = self.world.clone();
        if let Some(caches) = &world.caches {
            self.sequences.iter().for_each(|held| self.compare_sequence(caches, held));
        }
        self.sequences.clear();
    }
}
