//! KV caches that all threads use: contiguous and paged, each on a stream of its own.

use std::ops::Range;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};

use vmm_kv::{ContiguousCache, Dtype, KvShape, Lending, PagedCache, PagedSequence, Part, Sequence};
use vmm_sys::DeviceId;
use vmm_sys::object::Stream;

use super::board::Words;
use super::trouble::{NOTHING, Step, Trouble};
use super::worker::Worker;
use super::world::{KEPT, NODE, World, lock};

/// Sequences that a thread holds.
const SEQUENCES: usize = 5;
const MAX_TOKENS: u64 = 1 << 14;
const BLOCK_TOKENS: u32 = 64;
const PAGED_TOKENS: u64 = 600;
const LAYERS: u32 = 1;

/// The caches of one device.
pub(super) struct Caches {
    contiguous: ContiguousCache,
    paged: PagedCache,
    /// Who packs writes: where a block lies is not asked meanwhile, nor used.
    places: RwLock<()>,
}

/// A sequence, and what it holds.
pub(super) struct Held {
    caches: Arc<Caches>,
    form: Form,
    parts: Vec<Written>,
}

enum Form {
    Contiguous(Sequence),
    Paged(PagedSequence),
}

/// Tokens that were written together, by this sequence or the one that it was forked from.
#[derive(Clone, Debug)]
struct Written {
    tokens: Range<u64>,
    value: u32,
}

/// Makes the caches of each device. They are dropped with all else at a quiet point.
pub(super) fn make(world: &World) -> Result<Vec<Arc<Caches>>, Trouble> {
    world.machine.devices().map(|device| caches(world, device)).collect()
}

fn caches(world: &World, device: DeviceId) -> Result<Arc<Caches>, Trouble> {
    let pool = &world.pools[KEPT];
    let stream = Stream::create(world.driver(), device)?;
    let shape = KvShape::new(LAYERS, 1, 64, Dtype::F16).map_err(Trouble::wrong)?;
    let contiguous = ContiguousCache::builder(pool, &stream, shape)
        .max_tokens(MAX_TOKENS)
        .max_sequences(96)
        .keep_idle_bytes(16 << 20)
        .lenders(Lending::Any)
        .build()?;
    let paged = PagedCache::builder(pool, &stream, shape)
        .block_tokens(BLOCK_TOKENS)
        .max_blocks(4096)
        .host_blocks(NODE, 1024)
        .lenders(Lending::Any)
        .build()?;
    Ok(Arc::new(Caches { contiguous, paged, places: RwLock::new(()) }))
}

impl Caches {
    fn places(&self) -> RwLockReadGuard<'_, ()> {
        self.places.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn verify(&self) -> Result<(), String> {
        self.contiguous.verify()?;
        self.paged.verify()?;
        let sound = self.contiguous.stats().adds_up() && self.paged.stats().adds_up();
        if sound { Ok(()) } else { Err("the figures of a cache do not add up".to_owned()) }
    }

    fn stream(&self) -> &Stream {
        self.contiguous.stream()
    }
}

impl Held {
    fn tokens(&self) -> u64 {
        match &self.form {
            Form::Contiguous(sequence) => sequence.tokens(),
            Form::Paged(sequence) => sequence.tokens(),
        }
    }

    fn is_parked(&self) -> bool {
        match &self.form {
            Form::Contiguous(sequence) => sequence.is_parked(),
            Form::Paged(sequence) => sequence.is_parked(),
        }
    }

    fn max_tokens(&self) -> u64 {
        match &self.form {
            Form::Contiguous(_) => MAX_TOKENS,
            Form::Paged(_) => PAGED_TOKENS,
        }
    }

    /// Where tokens that were written together lie, and what they hold. With the right to ask.
    fn words(&self, written: &Written) -> Result<Vec<Words>, Trouble> {
        let Written { tokens, value } = written;
        match &self.form {
            Form::Contiguous(sequence) => {
                let of = |range: Range<u64>| {
                    let value = value.wrapping_add(range.start as u32);
                    Words::over(sequence.address() + range.start, range.end - range.start, value)
                };
                Ok(self.caches.contiguous.layout().ranges(tokens.clone()).map(of).collect())
            }
            Form::Paged(sequence) => {
                let row_bytes = self.caches.paged.layout().token_stride_bytes();
                let mut all = Vec::new();
                let mut at = tokens.start;
                while at < tokens.end {
                    let end = (at + 1).next_multiple_of(BLOCK_TOKENS.into()).min(tokens.end);
                    for part in [Part::Key, Part::Value] {
                        let offset = sequence.offset(0, part, at, 0);
                        let offset = offset.ok_or_else(|| Trouble::wrong("a token is nowhere"))?;
                        let address = self.caches.paged.address() + offset;
                        let value = value.wrapping_add(at as u32 * 64 + part.index() as u32);
                        all.push(Words::over(address, (end - at) * row_bytes, value));
                    }
                    at = end;
                }
                Ok(all)
            }
        }
    }

    /// Writes tokens that were appended just now. With the right to ask where they lie.
    fn write(&mut self, worker: &mut Worker<'_>, tokens: Range<u64>) -> Step {
        if tokens.is_empty() {
            return Ok(());
        }
        let written = Written { tokens, value: worker.value() };
        let using = self.caches.contiguous.use_now()?;
        let paged = self.caches.paged.use_now()?;
        for words in self.words(&written)? {
            words.fill(self.caches.stream())?;
        }
        drop((using, paged));
        self.parts.push(written);
        Ok(())
    }

    fn check(&self, worker: &mut Worker<'_>) -> Step {
        let caches = self.caches.clone();
        let _still = caches.places();
        if self.is_parked() {
            return Ok(());
        }
        let _using = (caches.contiguous.use_now()?, caches.paged.use_now()?);
        for written in &self.parts {
            for words in self.words(written)? {
                worker.enqueue_check(caches.stream(), words)?;
            }
        }
        Ok(())
    }
}

fn take(worker: &mut Worker<'_>) -> Option<Held> {
    Worker::take(&mut worker.rng, &mut worker.sequences)
}

/// Does something with a sequence, which stays the thread's.
fn with_one(worker: &mut Worker<'_>, act: impl FnOnce(&mut Worker<'_>, &mut Held) -> Step) -> Step {
    let Some(mut held) = take(worker) else { return NOTHING };
    let outcome = act(worker, &mut held);
    worker.sequences.push(held);
    outcome
}

pub(super) fn open(worker: &mut Worker<'_>) -> Step {
    if worker.sequences.len() >= SEQUENCES {
        return NOTHING;
    }
    let caches = lock(&worker.world.caches).clone();
    if caches.is_empty() {
        return NOTHING;
    }
    let caches = caches[worker.rng.below(caches.len() as u64) as usize].clone();
    let ahead = worker.rng.chance(300);
    let still = caches.places();
    let (tokens, form) = if worker.rng.chance(500) {
        let tokens = worker.rng.below(3000);
        let cache = &caches.contiguous;
        let opened = if ahead { cache.open_ahead(tokens) } else { cache.open(tokens) };
        (tokens, Form::Contiguous(opened?))
    } else {
        let tokens = worker.rng.below(PAGED_TOKENS / 2);
        let cache = &caches.paged;
        let opened = if ahead { cache.open_ahead(tokens) } else { cache.open(tokens) };
        (tokens, Form::Paged(opened?))
    };
    let mut held = Held { caches: caches.clone(), form, parts: Vec::new() };
    let has = if ahead { 0 } else { tokens };
    if held.tokens() != has {
        return Err(Trouble::Wrong(format!("{has} tokens opened, {} there", held.tokens())));
    }
    held.write(worker, 0..has)?;
    drop(still);
    worker.sequences.push(held);
    Ok(())
}

pub(super) fn append(worker: &mut Worker<'_>) -> Step {
    with_one(worker, |worker, held| {
        let most = if worker.rng.chance(800) { 40 } else { 2000 };
        let count = (1 + worker.rng.below(most)).min(held.max_tokens() - held.tokens());
        if held.is_parked() || count == 0 || held.parts.len() > 12 {
            return NOTHING;
        }
        let caches = held.caches.clone();
        let _still = caches.places();
        let first = match &mut held.form {
            Form::Contiguous(sequence) => sequence.append(count)?,
            Form::Paged(sequence) => sequence.append(count)?,
        };
        held.write(worker, first..first + count)
    })
}

/// A second sequence with the first tokens of one.
pub(super) fn fork(worker: &mut Worker<'_>) -> Step {
    if worker.sequences.len() >= SEQUENCES {
        return NOTHING;
    }
    let Some(mut held) = take(worker) else { return NOTHING };
    let at = worker.rng.below(held.tokens() + 1);
    if held.parts.is_empty() || held.is_parked() {
        worker.sequences.push(held);
        return NOTHING;
    }
    let forked = match &mut held.form {
        Form::Contiguous(sequence) => sequence.fork_at(at).map(Form::Contiguous),
        Form::Paged(sequence) => sequence.fork_at(at).map(Form::Paged),
    };
    let forked =
        forked.map(|form| Held { caches: held.caches.clone(), form, parts: cut(&held.parts, at) });
    worker.sequences.push(held);
    worker.sequences.push(forked?);
    Ok(())
}

fn cut(parts: &[Written], at: u64) -> Vec<Written> {
    let kept = parts.iter().map(|part| Written {
        tokens: part.tokens.start..part.tokens.end.min(at),
        value: part.value,
    });
    kept.filter(|part| !part.tokens.is_empty()).collect()
}

pub(super) fn truncate(worker: &mut Worker<'_>) -> Step {
    with_one(worker, |worker, held| {
        let at = worker.rng.below(held.tokens() + 1);
        if held.is_parked() {
            return NOTHING;
        }
        match &mut held.form {
            Form::Contiguous(sequence) => sequence.truncate(at),
            Form::Paged(sequence) => sequence.truncate(at),
        }
        held.parts = cut(&held.parts, at);
        Ok(())
    })
}

pub(super) fn check(worker: &mut Worker<'_>) -> Step {
    with_one(worker, |worker, held| held.check(worker))
}

/// To the host, or back.
pub(super) fn park(worker: &mut Worker<'_>) -> Step {
    with_one(worker, |worker, held| {
        let caches = held.caches.clone();
        let still = caches.places();
        match &mut held.form {
            Form::Contiguous(sequence) if sequence.is_parked() => sequence.resume()?,
            Form::Contiguous(sequence) => sequence.park(NODE)?,
            Form::Paged(sequence) if sequence.is_parked() => sequence.resume()?,
            Form::Paged(sequence) => sequence.park()?,
        };
        drop(still);
        held.check(worker)
    })
}

pub(super) fn drop_one(worker: &mut Worker<'_>) -> Step {
    let Some(held) = take(worker) else { return NOTHING };
    check_and_drop(worker, held)
}

pub(super) fn check_and_drop(worker: &mut Worker<'_>, held: Held) -> Step {
    held.check(worker)
}

/// Packs blocks, while nobody uses any; or gives back what is idle.
pub(super) fn pack(worker: &mut Worker<'_>) -> Step {
    let caches = lock(&worker.world.caches).clone();
    for caches in caches {
        if worker.rng.chance(500) {
            let _alone = caches.places.write().unwrap_or_else(PoisonError::into_inner);
            caches.paged.pack(64)?;
        } else {
            caches.contiguous.release_idle(0)?;
            caches.paged.release_idle(0)?;
        }
    }
    Ok(())
}
