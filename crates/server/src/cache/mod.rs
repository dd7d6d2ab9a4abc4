//! [`Cache`]: the forms of a KV cache behind one interface, so that the same engine runs on each.

mod fixed;
mod growing;
mod room;
mod seq;

use serde::Serialize;
use vmm_kv::{BlockTables, ContiguousCache, KvError, KvRoom, KvShape, PagedCache, PagedSequence};
use vmm_pool::{ElasticBuffer, Error, Place, Pool, Use};
use vmm_sys::object::Stream;

pub use fixed::{FixedCache, FixedSequence};
pub use room::{CacheFigures, Room};
pub use seq::Seq;

use crate::backend::{Layout, ReadBytes};
use crate::model::ModelSpec;

/// Where parked sequences, and weights that sleep, lie.
pub const HOST: Place = Place::HostNuma(0);

/// What a cache without requests keeps for the next.
const REST_BYTES: u64 = 64 << 20;

/// The forms.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Form {
    /// Slots of the longest context, all of their memory committed at the start.
    Fixed,
    /// Each sequence at addresses in a row, which memory grows into.
    Contiguous,
    /// Blocks of tokens and a table; memory comes and goes by chunks of blocks.
    Paged,
}

/// Settings of a cache.
#[derive(Clone, Debug)]
pub struct CacheSettings {
    /// Its form.
    pub form: Form,
    /// The longest context.
    pub max_tokens: u32,
    /// Sequences at a time, at most.
    pub max_sequences: u32,
    /// The label of its memory.
    pub tag: String,
    /// The length of a chunk.
    pub chunk_bytes: u64,
    /// Tokens of a block, in the paged form.
    pub block_tokens: u32,
    /// Whether others may lend memory.
    pub borrows: bool,
    /// Memory without tokens that is kept for the next sequences. By default all of it in the paged form,
    /// where it is anybody's. In the contiguous form it stays where a sequence was, and the next is
    /// longer or shorter: a sixteenth of what the pool may have of the device.
    pub keep_idle_bytes: Option<u64>,
    /// Memory of the host for parked sequences; 0 if they are not parked but written anew.
    pub host_bytes: u64,
    /// Whether memory grows in a thread of its own. Otherwise it does in the engine's, and a run of
    /// one engine is the same every time.
    pub background: bool,
}

impl CacheSettings {
    /// The settings for a model, with the defaults of the server.
    pub fn new(form: Form, spec: &ModelSpec, chunk_bytes: u64) -> CacheSettings {
        CacheSettings {
            form,
            max_tokens: spec.max_tokens,
            max_sequences: 1024,
            tag: format!("{}/kv", spec.name),
            chunk_bytes,
            block_tokens: spec.block_tokens,
            borrows: false,
            host_bytes: 0,
            // Whoever is short gets it back; without requests it goes ([`Cache::rest`]).
            keep_idle_bytes: None,
            background: true,
        }
    }
}

/// A cache of one of the forms.
#[derive(Debug)]
pub struct Cache {
    kind: Kind,
    token_bytes: u64,
    borrows: bool,
    parks: bool,
    max_tokens: u64,
    max_sequences: u32,
    /// Of the batch that was laid out last.
    places: Vec<u64>,
    away: Away,
}

#[derive(Debug)]
enum Kind {
    Fixed(FixedCache),
    Contiguous(ContiguousCache),
    Paged(PagedCache, BlockTables),
}

/// Which part of the memory lies elsewhere.
#[derive(Clone, Copy, Debug, Default)]
struct Away {
    generation: u64,
    neighbour: f64,
    host: f64,
}

impl Cache {
    /// Makes a cache.
    ///
    /// # Errors
    /// Settings that cannot be; for the fixed form, no memory for one slot.
    pub fn build(
        pool: &Pool,
        stream: &Stream,
        shape: KvShape,
        settings: &CacheSettings,
    ) -> Result<Cache, KvError> {
        let kind = match settings.form {
            Form::Fixed => Kind::Fixed(FixedCache::build(pool, stream, shape, settings)?),
            Form::Contiguous => {
                Kind::Contiguous(growing::contiguous(pool, stream, shape, settings)?)
            }
            Form::Paged => {
                let (cache, tables) = growing::paged(pool, stream, shape, settings)?;
                Kind::Paged(cache, tables)
            }
        };
        let token_bytes = shape.token_bytes();
        Ok(Cache {
            kind,
            token_bytes,
            borrows: settings.borrows,
            parks: settings.host_bytes > 0,
            max_tokens: u64::from(settings.max_tokens),
            max_sequences: settings.max_sequences,
            places: Vec::new(),
            away: Away::default(),
        })
    }

    /// Opens a sequence of so many tokens.
    ///
    /// # Errors
    /// As the form's `open`.
    pub fn open(&self, tokens: u64) -> Result<Seq, KvError> {
        match &self.kind {
            Kind::Fixed(cache) => cache.open(tokens).map(Seq::Fixed),
            Kind::Contiguous(cache) => cache.open(tokens).map(Seq::Contiguous),
            Kind::Paged(cache, _) => cache.open(tokens).map(Seq::Paged),
        }
    }

    /// Opens a sequence without tokens, whose memory for so many comes meanwhile: [`Seq::is_ready`]
    /// says when. The fixed form has it, and all its tokens, at once.
    ///
    /// # Errors
    /// As the form's `open_ahead`.
    pub fn open_ahead(&self, tokens: u64) -> Result<Seq, KvError> {
        match &self.kind {
            Kind::Fixed(cache) => cache.open(tokens).map(Seq::Fixed),
            Kind::Contiguous(cache) => cache.open_ahead(tokens).map(Seq::Contiguous),
            Kind::Paged(cache, _) => cache.open_ahead(tokens).map(Seq::Paged),
        }
    }

    /// Whether its sequences may be parked.
    pub fn parks(&self) -> bool {
        self.parks
    }

    /// The memory.
    pub fn buffer(&self) -> &ElasticBuffer {
        match &self.kind {
            Kind::Fixed(cache) => cache.buffer(),
            Kind::Contiguous(cache) => cache.buffer(),
            Kind::Paged(cache, _) => cache.buffer(),
        }
    }

    /// Whose order the memory is in.
    pub fn stream(&self) -> &Stream {
        match &self.kind {
            Kind::Fixed(cache) => cache.stream(),
            Kind::Contiguous(cache) => cache.stream(),
            Kind::Paged(cache, _) => cache.stream(),
        }
    }

    /// Says that work of the stream is going to use the memory.
    ///
    /// # Errors
    /// As [`ElasticBuffer::use_on`].
    pub fn use_now(&self) -> Result<Use, KvError> {
        match &self.kind {
            Kind::Fixed(cache) => Ok(cache.buffer().use_on(cache.stream())?),
            Kind::Contiguous(cache) => cache.use_now(),
            Kind::Paged(cache, _) => cache.use_now(),
        }
    }

    /// How much more it could take now.
    pub fn room(&self) -> Room {
        match &self.kind {
            Kind::Fixed(cache) => Room {
                here_tokens: u64::from(cache.free_slots()) * cache.layout().max_tokens(),
                sequences: u64::from(cache.free_slots()),
                ..Room::default()
            },
            // It knows the most sequences itself; its other figures wait for growth that is under way.
            Kind::Contiguous(cache) => room_of(cache.room(), u64::MAX),
            Kind::Paged(cache, _) => {
                let left = u64::from(self.max_sequences).saturating_sub(cache.stats().sequences);
                room_of(cache.room(), left)
            }
        }
    }

    /// The figures. `tokens` are those that the engine has in it: the fixed form cannot know.
    pub fn figures(&self, tokens: u64) -> CacheFigures {
        let stats = self.buffer().stats();
        let borrowed_bytes = stats.borrowed.iter().map(|(_, bytes)| bytes).sum();
        match &self.kind {
            Kind::Fixed(cache) => {
                let live_bytes = tokens * self.token_bytes;
                CacheFigures {
                    committed_bytes: stats.committed_bytes,
                    live_bytes,
                    slack_bytes: stats.committed_bytes.saturating_sub(live_bytes),
                    borrowed_bytes,
                    sequences: u64::from(cache.slots() - cache.free_slots()),
                    ..CacheFigures::default()
                }
            }
            Kind::Contiguous(cache) => CacheFigures::of(cache.stats(), borrowed_bytes),
            Kind::Paged(cache, _) => CacheFigures::of(cache.stats(), borrowed_bytes),
        }
    }

    /// Works out where the tokens of a batch lie: [`Cache::layout`] and [`Cache::places`] answer for
    /// it.
    ///
    /// # Errors
    /// Sequences of another cache.
    pub fn lay_out<'a>(&mut self, sequences: impl Iterator<Item = &'a Seq>) -> Result<(), KvError> {
        self.places.clear();
        match &mut self.kind {
            Kind::Fixed(_) | Kind::Contiguous(_) => {
                self.places.extend(sequences.filter_map(Seq::address));
            }
            Kind::Paged(_, tables) => {
                let paged: Vec<&PagedSequence> = sequences.filter_map(Seq::paged).collect();
                tables.update(&paged)?;
                self.places.extend(0..paged.len() as u64);
            }
        }
        Ok(())
    }

    /// Where tokens of the batch that was laid out lie.
    pub fn layout(&self) -> Layout<'_> {
        match &self.kind {
            Kind::Fixed(cache) => Layout::Contiguous(cache.layout()),
            Kind::Contiguous(cache) => Layout::Contiguous(cache.layout()),
            Kind::Paged(cache, tables) => Layout::Paged {
                layout: cache.layout(),
                address: cache.address(),
                table: tables.as_slice(),
                row_entries: tables.max_blocks_per_row(),
            },
        }
    }

    /// The place of each sequence of the batch that was laid out.
    pub fn places(&self) -> &[u64] {
        &self.places
    }

    /// What a step reads of so many tokens, by where memory lies: the parts of the whole cache that
    /// do are taken for those of the tokens.
    pub fn read_bytes(&mut self, tokens: u64) -> ReadBytes {
        let generation = self.buffer().generation();
        // All memory is the device's own unless somebody may lend some.
        if (self.borrows || self.parks) && generation != self.away.generation {
            let stats = self.buffer().stats();
            let part = |is_device: bool| {
                let of = stats
                    .borrowed
                    .iter()
                    .filter(|(place, _)| matches!(place, Place::Device(_)) == is_device);
                let bytes: u64 = of.map(|(_, bytes)| bytes).sum();
                bytes as f64 / stats.committed_bytes.max(1) as f64
            };
            self.away = Away { generation, neighbour: part(true), host: part(false) };
        }
        let bytes = tokens * self.token_bytes;
        let neighbour = (bytes as f64 * self.away.neighbour) as u64;
        let host = (bytes as f64 * self.away.host) as u64;
        ReadBytes { home: bytes.saturating_sub(neighbour + host), neighbour, host }
    }

    /// Gives back what no sequence has, but for a little, since there are no requests.
    ///
    /// # Errors
    /// The pool's.
    pub fn rest(&self) -> Result<u64, KvError> {
        self.release_idle(REST_BYTES)
    }

    /// Gives back what no sequence has. Returns the bytes.
    ///
    /// # Errors
    /// The pool's.
    pub fn sleep(&self) -> Result<u64, KvError> {
        match &self.kind {
            Kind::Fixed(cache) => Ok(cache.sleep()?),
            Kind::Contiguous(_) | Kind::Paged(..) => self.release_idle(0),
        }
    }

    /// Gives back memory of no sequence until so much of it is left. Slots are never idle.
    fn release_idle(&self, keep_bytes: u64) -> Result<u64, KvError> {
        match &self.kind {
            Kind::Fixed(_) => Ok(0),
            Kind::Contiguous(cache) => cache.release_idle(keep_bytes),
            Kind::Paged(cache, _) => cache.release_idle(keep_bytes),
        }
    }

    /// Takes what a sequence needs to begin with.
    ///
    /// # Errors
    /// Out of memory; the pool's.
    pub fn wake(&self) -> Result<u64, Error> {
        match &self.kind {
            Kind::Fixed(cache) => cache.wake(),
            Kind::Contiguous(_) | Kind::Paged(..) => Ok(0),
        }
    }

    /// Commits all the memory that there is, for the sequences to come, if it may keep as much idle:
    /// what a cache that does not grow does.
    ///
    /// # Errors
    /// The pool's, shortages apart.
    pub fn warm(&self) -> Result<(), KvError> {
        let mut open = Vec::new();
        let mut tokens = self.max_tokens;
        while tokens > 0 && open.len() < self.max_sequences as usize {
            match self.open(tokens) {
                Ok(sequence) => open.push(sequence),
                Err(error) if error.is_shortage() => tokens /= 2,
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Checks what the form knows of itself.
    ///
    /// # Errors
    /// The first thing that is wrong, in words.
    pub fn verify(&self) -> Result<(), String> {
        match &self.kind {
            Kind::Fixed(_) => Ok(()),
            Kind::Contiguous(cache) => cache.verify(),
            Kind::Paged(cache, _) => cache.verify(),
        }
    }
}

/// The same for `left` sequences at most.
fn room_of(room: KvRoom, left: u64) -> Room {
    Room {
        here_tokens: room.here_tokens,
        borrowed_tokens: room.borrowed_tokens,
        host_tokens: room.host_tokens,
        sequences: left.min(room.sequences),
    }
}
