//! KV caches and their sequences, of both forms.

use std::fmt::Write as _;
use std::sync::Arc;

use vmm_kv::{
    BlockTables, ContiguousBuilder, ContiguousCache, Dtype, KvShape, KvStats, Order, PagedBuilder,
    PagedCache, PagedSequence, Part, Sequence,
};
use vmm_sys::sim::Sim;

use crate::engine::{Case, Done, Scene};
use crate::stage::{G, HOST, NEXT, Stage, stage, usual};

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

fn by_layers() -> Scenery {
    contiguous_of(Order::LayerMajor)
}

/// A paged cache with two sequences that have grown in turns.
fn paged() -> Scenery {
    let mut scenery = bare(usual());
    let cache = paged_builder(&scenery.stage).build().unwrap();
    let mut pages = [TOKENS, 2 * T].map(|tokens| cache.open(tokens).unwrap());
    pages[0].append(T).unwrap();
    scenery.pages = pages.into();
    scenery.paged = Some(cache);
    scenery.mark();
    scenery
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

fn opened(scenery: &mut Scenery, tokens: u64) -> Done {
    let sequence = scenery.cache().open(tokens)?;
    scenery.sequences.push(sequence);
    Ok(())
}

fn append_and_fork() -> Vec<Case> {
    vec![
        Case::new(
            "kv::build",
            &["ContiguousBuilder::build", "PagedBuilder::build"],
            || bare(usual()),
            |it| {
                let contiguous = contiguous_builder(&it.stage).ahead_tokens(T).build()?;
                it.paged = Some(paged_builder(&it.stage).build()?);
                it.contiguous = Some(contiguous);
                Ok(())
            },
            |it| assert_eq!(it.cache().stats().sequences + it.pages().stats().sequences, 0),
        ),
        Case::silent(
            "kv::figures_of_their_own",
            &[
                "ContiguousCache::address",
                "ContiguousCache::buffer",
                "ContiguousCache::layout",
                "ContiguousCache::on_shortage",
                "ContiguousCache::stats",
                "ContiguousCache::stream",
                "ContiguousCache::verify",
                "Sequence::address",
                "Sequence::committed_tokens",
                "Sequence::is_parked",
                "Sequence::is_ready",
                "Sequence::layer_address",
                "Sequence::places",
                "Sequence::tokens",
                "PagedCache::address",
                "PagedCache::buffer",
                "PagedCache::layout",
                "PagedCache::max_tokens",
                "PagedCache::on_shortage",
                "PagedCache::stats",
                "PagedCache::stream",
                "PagedCache::verify",
                "PagedSequence::blocks",
                "PagedSequence::committed_tokens",
                "PagedSequence::is_parked",
                "PagedSequence::is_ready",
                "PagedSequence::offset",
                "PagedSequence::tokens",
            ],
            || {
                let mut it = contiguous();
                let cache = paged_builder(&it.stage).build().unwrap();
                it.pages.push(cache.open(T).unwrap());
                it.paged = Some(cache);
                it
            },
            |it| {
                let (cache, sequence) = (it.cache(), &it.sequences[0]);
                cache.verify()?;
                drop(cache.on_shortage(|_| false));
                assert_eq!(cache.buffer().address(), cache.address());
                assert_eq!(cache.stream().id(), it.stage.streams[0].id());
                assert_eq!(cache.stats().sequences, 2);
                assert_eq!(sequence.layer_address(0, Part::Key), sequence.address());
                assert!(sequence.is_ready(1) && !sequence.is_parked());
                assert!(sequence.committed_tokens() >= sequence.tokens());
                assert_eq!(sequence.places().len(), 1);
                assert_eq!(cache.layout().max_tokens(), 8 * T);
                let (cache, sequence) = (it.pages(), &it.pages[0]);
                cache.verify()?;
                drop(cache.on_shortage(|_| false));
                assert_eq!(cache.buffer().address(), cache.address());
                assert_eq!(cache.stream().id(), it.stage.streams[0].id());
                assert_eq!((cache.stats().sequences, cache.layout().block_tokens()), (1, 4));
                assert!(cache.max_tokens() >= T && !sequence.is_parked());
                assert_eq!(sequence.blocks().len() as u64, sequence.tokens() / 4);
                assert!(sequence.committed_tokens() >= T && !sequence.is_ready(2 * T));
                assert!(sequence.offset(0, Part::Key, 0, 0).is_some());
                Ok(())
            },
        ),
        Case::new(
            "kv::open",
            &["ContiguousCache::open"],
            contiguous,
            |it| opened(it, 3 * T),
            Scenery::check,
        ),
        Case::new(
            "kv::open_by_layers",
            &["ContiguousCache::open"],
            by_layers,
            |it| opened(it, 3 * T),
            Scenery::check,
        ),
        Case::new(
            "kv::open_ahead",
            &["ContiguousCache::open_ahead"],
            contiguous,
            |it| {
                let sequence = it.cache().open_ahead(3 * T)?;
                it.sequences.push(sequence);
                Ok(())
            },
            Scenery::check,
        ),
        Case::new(
            "kv::append",
            &["Sequence::append"],
            contiguous,
            |it| it.sequences[0].append(3 * T).map(drop).map_err(Into::into),
            Scenery::check,
        ),
        Case::new(
            "kv::append_by_layers",
            &["Sequence::append"],
            by_layers,
            |it| it.sequences[0].append(3 * T).map(drop).map_err(Into::into),
            Scenery::check,
        ),
        Case::new(
            "kv::append_all",
            &["ContiguousCache::append_all"],
            contiguous,
            |it| {
                // The second has its memory already.
                let cache = it.contiguous.as_ref().unwrap();
                let appended = cache.append_all(it.sequences.iter_mut().take(1), 3 * T);
                appended.map_err(|(_, error)| error.into())
            },
            Scenery::check,
        ),
        Case::new(
            "kv::fork",
            &["Sequence::fork"],
            contiguous,
            |it| {
                let fork = it.sequences[0].fork()?;
                it.sequences.push(fork);
                Ok(())
            },
            Scenery::check,
        ),
        Case::new(
            "kv::fork_at",
            &["Sequence::fork_at"],
            by_layers,
            |it| {
                let fork = it.sequences[0].fork_at(T)?;
                it.sequences.push(fork);
                Ok(())
            },
            Scenery::check,
        ),
        Case::new(
            "kv::append_after_fork",
            &["Sequence::append"],
            || forked(contiguous()),
            |it| it.sequences[2].append(1).map(drop).map_err(Into::into),
            Scenery::check,
        ),
        Case::new(
            "kv::append_after_fork_by_layers",
            &["Sequence::append"],
            || forked(by_layers()),
            |it| it.sequences[2].append(1).map(drop).map_err(Into::into),
            Scenery::check,
        ),
        Case::quiet(
            "kv::truncate",
            &["Sequence::truncate", "Sequence::drop", "ContiguousCache::settle"],
            || forked(contiguous()),
            truncate,
            check_truncated,
        ),
        Case::quiet(
            "kv::truncate_by_layers",
            &["Sequence::truncate", "Sequence::drop"],
            || forked(by_layers()),
            truncate,
            check_truncated,
        ),
    ]
}

/// What the driver refuses is taken away later, and nobody gets what is another's meanwhile.
fn check_truncated(it: &Scenery) {
    let again = it.cache().open(2 * T).unwrap();
    it.check();
    drop(again);
    it.cache().settle().unwrap();
    it.cache().release_idle(0).unwrap();
    assert_eq!(it.cache().stats().idle_bytes, 0);
    it.check();
}

fn truncate(it: &mut Scenery) -> Done {
    it.sequences.truncate(2);
    it.sequences[1].truncate(TOKENS);
    Ok(())
}

fn memory() -> Vec<Case> {
    vec![
        Case::new(
            "kv::park_by_layers",
            &["Sequence::park"],
            || forked(by_layers()),
            |it| it.sequences[0].park(HOST).map(drop).map_err(Into::into),
            Scenery::check,
        ),
        Case::new(
            "kv::park",
            &["Sequence::park"],
            || forked(contiguous()),
            |it| it.sequences[0].park(HOST).map(drop).map_err(Into::into),
            Scenery::check,
        ),
        Case::new(
            "kv::resume",
            &["Sequence::resume"],
            || {
                let mut it = by_layers();
                it.sequences[0].park(HOST).unwrap();
                it
            },
            |it| it.sequences[0].resume().map(drop).map_err(Into::into),
            Scenery::check,
        ),
        Case::new(
            "kv::migrate",
            &["Sequence::migrate"],
            contiguous,
            |it| it.sequences[0].migrate(NEXT).map(drop).map_err(Into::into),
            |it| {
                assert_eq!(it.sequences[0].places(), [(NEXT.into(), 2 * G)]);
                it.check();
            },
        ),
        Case::quiet(
            "kv::release_idle",
            &["ContiguousCache::release_idle"],
            || {
                let mut it = bare(usual());
                let builder = contiguous_builder(&it.stage).keep_idle_bytes(u64::MAX);
                let cache = builder.build().unwrap();
                it.sequences = [TOKENS, 2 * T, 3 * T].map(|n| cache.open(n).unwrap()).into();
                it.contiguous = Some(cache);
                it.mark();
                it.sequences.truncate(2);
                it
            },
            |it| it.cache().release_idle(0).map(drop).map_err(Into::into),
            |it| {
                it.cache().settle().unwrap();
                it.cache().release_idle(0).unwrap();
                assert_eq!(it.cache().stats().idle_bytes, 0);
                it.check();
            },
        ),
        Case::new(
            "kv::open_when_full",
            &["ContiguousCache::open"],
            || {
                let small = stage(|sim| sim.device_bytes_of(0, 4 * G), |pool| pool);
                let mut it = bare(small);
                let cache = contiguous_builder(&it.stage).build().unwrap();
                it.sequences = [TOKENS, T].map(|tokens| cache.open(tokens).unwrap()).into();
                it.contiguous = Some(cache);
                it.mark();
                it
            },
            |it| opened(it, T),
            Scenery::check,
        ),
        Case::new(
            "kv::use_now",
            &["ContiguousCache::use_now", "PagedCache::use_now"],
            || {
                let mut it = contiguous();
                let cache = paged_builder(&it.stage).build().unwrap();
                it.paged = Some(cache);
                it
            },
            |it| {
                drop(it.cache().use_now()?);
                drop(it.pages().use_now()?);
                Ok(())
            },
            Scenery::check,
        ),
        Case::quiet(
            "kv::figures",
            &["ContiguousCache::room", "ContiguousCache::capacity", "PagedCache::room"],
            || {
                let mut it = contiguous();
                let cache = paged_builder(&it.stage).build().unwrap();
                it.paged = Some(cache);
                it
            },
            |it| {
                it.cache().room();
                it.cache().capacity(T);
                it.pages().room();
                Ok(())
            },
            Scenery::check,
        ),
    ]
}

fn pages() -> Vec<Case> {
    vec![
        Case::new(
            "paged::open",
            &["PagedCache::open"],
            paged,
            |it| {
                let sequence = it.pages().open(3 * T)?;
                it.pages.push(sequence);
                Ok(())
            },
            Scenery::check,
        ),
        Case::new(
            "paged::open_ahead",
            &["PagedCache::open_ahead"],
            paged,
            |it| {
                let sequence = it.pages().open_ahead(3 * T)?;
                it.pages.push(sequence);
                Ok(())
            },
            Scenery::check,
        ),
        Case::new(
            "paged::append",
            &["PagedSequence::append"],
            paged,
            |it| it.pages[0].append(3 * T).map(drop).map_err(Into::into),
            Scenery::check,
        ),
        Case::silent(
            "paged::fork",
            &["PagedSequence::fork", "PagedSequence::fork_at", "BlockTables::update"],
            paged,
            |it| {
                let forks = [it.pages[0].fork()?, it.pages[0].fork_at(T)?];
                it.pages.extend(forks);
                let all: Vec<&PagedSequence> = it.pages.iter().collect();
                BlockTables::new(8, 64).update(&all)?;
                Ok(())
            },
        ),
        Case::new(
            "paged::append_after_fork",
            &["PagedSequence::append"],
            || forked(paged()),
            |it| it.pages[2].append(1).map(drop).map_err(Into::into),
            Scenery::check,
        ),
        // What has no token any more is given back by the next operation that changes memory.
        Case::silent(
            "paged::truncate",
            &["PagedSequence::truncate", "PagedSequence::drop"],
            || forked(paged()),
            |it| {
                it.pages.truncate(2);
                it.pages[1].truncate(TOKENS);
                Ok(())
            },
        ),
        Case::new(
            "paged::park",
            &["PagedSequence::park"],
            paged,
            |it| it.pages[0].park().map(drop).map_err(Into::into),
            |it| {
                assert!(it.pages[0].is_parked());
                it.check();
            },
        ),
        Case::new(
            "paged::resume",
            &["PagedSequence::resume"],
            || {
                let mut it = paged();
                it.pages[0].park().unwrap();
                it
            },
            |it| it.pages[0].resume().map(drop).map_err(Into::into),
            Scenery::check,
        ),
        Case::new(
            "paged::pack",
            &["PagedCache::pack"],
            || {
                let mut it = paged();
                let cache = it.paged.as_ref().unwrap();
                let holes: Vec<_> = (0..6).map(|_| cache.open(9).unwrap()).collect();
                let last = cache.open(TOKENS).unwrap();
                drop(holes);
                it.pages.insert(0, last);
                it.mark();
                it
            },
            |it| it.pages().pack(u64::MAX).map(drop).map_err(Into::into),
            Scenery::check,
        ),
        Case::quiet(
            "paged::release_idle",
            &["PagedCache::release_idle"],
            || {
                let mut it = bare(usual());
                let builder = paged_builder(&it.stage).keep_idle_bytes(u64::MAX);
                let cache = builder.build().unwrap();
                it.pages = [TOKENS, 2 * T, 4 * T].map(|n| cache.open(n).unwrap()).into();
                it.paged = Some(cache);
                it.mark();
                it.pages.truncate(2);
                it
            },
            |it| it.pages().release_idle(0).map(drop).map_err(Into::into),
            |it| {
                it.pages().release_idle(0).unwrap();
                it.check();
            },
        ),
    ]
}

pub(crate) fn cases() -> Vec<Case> {
    [append_and_fork(), memory(), pages()].into_iter().flatten().collect()
}
