//! KV caches and their sequences, of both forms.

mod both;
mod contiguous;
mod paged;

use std::fmt::Write as _;
use std::sync::Arc;

use vmm_kv::{
    ContiguousBuilder, ContiguousCache, Dtype, KvShape, KvStats, Order, PagedBuilder, PagedCache,
    PagedSequence, Part, Sequence,
};
use vmm_sys::sim::Sim;

use crate::engine::{Case, Scene};
use crate::stage::{HOST, Stage, usual};

/// Tokens of a chunk: one takes 128 KiB.
const T: u64 = 16;
const TOKENS: u64 = T + 3;

/// A cache of one form, and its sequences. Fields drop in this order.
struct Scenery {
    sequences: Vec<Sequence>,
    pages: Vec<PagedSequence>,
    contiguous: Option<ContiguousCache>,
    paged: Option<PagedCache>,
    stage: Stage,
}

fn shape() -> KvShape {
    KvShape::new(2, 2, 8192, Dtype::F16).unwrap()
}

fn contiguous_builder(stage: &Stage) -> ContiguousBuilder {
    ContiguousCache::builder(stage.pool(), &stage.streams[0], shape())
        .max_tokens(8 * T)
        .max_sequences(8)
        .keep_idle_bytes(0)
        .ahead_tokens(0)
        .background(false)
}

fn paged_builder(stage: &Stage) -> PagedBuilder {
    PagedCache::builder(stage.pool(), &stage.streams[0], shape())
        .block_tokens(4)
        .max_blocks(128)
        .ahead_blocks(0)
        .host_blocks(HOST, 64)
        .keep_idle_bytes(0)
        .background(false)
}

fn bare(stage: Stage) -> Scenery {
    Scenery { sequences: Vec::new(), pages: Vec::new(), contiguous: None, paged: None, stage }
}

/// A contiguous cache with two sequences.
fn contiguous_of(order: Order) -> Scenery {
    let mut scenery = bare(usual());
    let cache = contiguous_builder(&scenery.stage).order(order).build().unwrap();
    scenery.sequences = [TOKENS, 2 * T].map(|tokens| cache.open(tokens).unwrap()).into();
    scenery.contiguous = Some(cache);
    scenery.mark();
    scenery
}

fn contiguous() -> Scenery {
    contiguous_of(Order::TokenMajor)
}

/// A third sequence that has all in common with the first.
fn forked(mut scenery: Scenery) -> Scenery {
    if let Some(first) = scenery.sequences.first_mut() {
        let fork = first.fork().unwrap();
        scenery.sequences.push(fork);
    }
    if let Some(first) = scenery.pages.first_mut() {
        let fork = first.fork().unwrap();
        scenery.pages.push(fork);
    }
    scenery
}

fn parts() -> impl Iterator<Item = (u32, Part)> {
    (0..shape().layers()).flat_map(|layer| [(layer, Part::Key), (layer, Part::Value)])
}

impl Scenery {
    fn cache(&self) -> &ContiguousCache {
        self.contiguous.as_ref().unwrap()
    }

    fn pages(&self) -> &PagedCache {
        self.paged.as_ref().unwrap()
    }

    /// Where each token of each sequence lies, by layers and parts: nowhere what is parked.
    fn places(&self) -> Vec<(String, u64)> {
        let mut places = Vec::new();
        for (at, sequence) in self.sequences.iter().enumerate() {
            let stride = self.cache().layout().token_stride_bytes();
            for (token, (layer, part)) in
                (0..sequence.tokens()).flat_map(|token| parts().map(move |part| (token, part)))
            {
                let address = sequence.layer_address(layer, part) + token * stride;
                places.push((format!("{at} {token} {layer} {part:?}"), address));
            }
        }
        for (at, sequence) in self.pages.iter().enumerate().filter(|(_, it)| !it.is_parked()) {
            for (token, (layer, part)) in
                (0..sequence.tokens()).flat_map(|token| parts().map(move |part| (token, part)))
            {
                let offset = sequence.offset(layer, part, token, 0).unwrap();
                let address = self.pages().address() + offset;
                places.push((format!("{at} {token} {layer} {part:?}"), address));
            }
        }
        places
    }

    /// Writes each token, as kernels would: the same to both of those that have it in common.
    fn mark(&self) {
        for (name, address) in self.places() {
            let bytes: u64 = name.bytes().fold(7, |sum, byte| sum * 31 + u64::from(byte));
            self.stage.sim.poke(address, &bytes.to_le_bytes()).unwrap();
        }
    }

    /// The first tokens of the first two sequences are there.
    fn check(&self) {
        let mut found = 0;
        for (name, address) in self.places() {
            let mut words = name.split(' ');
            let numbers: [u64; 2] = [(); 2].map(|()| words.next().unwrap().parse().unwrap());
            if numbers[0] > 1 || numbers[1] >= TOKENS {
                continue;
            }
            let wanted: u64 = name.bytes().fold(7, |sum, byte| sum * 31 + u64::from(byte));
            let bytes = self.stage.sim.peek(address, 8).unwrap();
            assert_eq!(bytes, wanted.to_le_bytes(), "{name}");
            found += 1;
        }
        assert!(found > 0);
    }

    fn lines(&self, text: &mut String) {
        for sequence in &self.sequences {
            let (address, tokens) = (sequence.address(), sequence.tokens());
            let parked = sequence.is_parked();
            let _ = writeln!(text, "sequence {address:#x} {tokens} tokens, parked {parked}");
        }
        for sequence in &self.pages {
            let (tokens, parked) = (sequence.tokens(), sequence.is_parked());
            let blocks = sequence.blocks();
            let _ = writeln!(text, "sequence {tokens} tokens, parked {parked} {blocks:?}");
        }
        for (name, address) in self.places() {
            let _ = writeln!(text, "{name} {:?}", self.stage.sim.peek(address, 8));
        }
    }
}

/// Without what only counts events.
fn books(mut stats: KvStats) -> KvStats {
    stats.background_growths = 0;
    stats.foreground_growths = 0;
    stats
}

impl Scene for Scenery {
    fn sim(&self) -> Arc<Sim> {
        self.stage.sim()
    }

    fn settle(&self) {
        if let Some(cache) = &self.contiguous {
            cache.settle().unwrap();
            let buffer = cache.buffer();
            buffer.shrink_to(buffer.capacity_bytes()).unwrap();
        }
        if let Some(cache) = &self.paged {
            let buffer = cache.buffer();
            buffer.shrink_to(buffer.capacity_bytes()).unwrap();
        }
        self.stage.settle();
    }

    fn picture(&self, exact: bool) -> String {
        let mut text = self.stage.picture(exact);
        let contiguous = self.contiguous.iter().map(ContiguousCache::stats);
        for stats in contiguous.chain(self.paged.iter().map(PagedCache::stats)) {
            let _ = match exact {
                true => writeln!(text, "{:?}", books(stats)),
                false => writeln!(text, "{} tokens, {} live", stats.tokens, stats.live_bytes),
            };
        }
        self.lines(&mut text);
        text
    }

    fn laws(&self) -> Result<(), String> {
        let mut stats = Vec::new();
        if let Some(cache) = &self.contiguous {
            cache.verify()?;
            stats.push(cache.stats());
        }
        if let Some(cache) = &self.paged {
            cache.verify()?;
            stats.push(cache.stats());
        }
        match stats.iter().find(|stats| !stats.adds_up()) {
            Some(stats) => Err(format!("{stats:?}")),
            None => self.stage.laws(),
        }
    }

    fn end(self) -> Result<(), String> {
        let Scenery { sequences, pages, contiguous, paged, stage } = self;
        drop((sequences, pages));
        drop((contiguous, paged));
        stage.laws()?;
        stage.end()
    }
}

pub(crate) fn cases() -> Vec<Case> {
    [both::cases(), contiguous::cases(), paged::cases()].into_iter().flatten().collect()
}
