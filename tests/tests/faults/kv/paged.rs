//! Paged caches and their sequences.

use vmm_kv::{BlockTables, PagedSequence};

use super::{Scenery, T, TOKENS, bare, forked, paged_builder};
use crate::engine::{Case, done};
use crate::stage::usual;

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

pub(super) fn cases() -> Vec<Case> {
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
            |it| done(it.pages[0].append(3 * T)),
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
            |it| done(it.pages[2].append(1)),
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
            || {
                // The memory of the host that it was to go to stays in stock.
                let mut it = paged();
                it.stage.keeps = true;
                it
            },
            |it| done(it.pages[0].park()),
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
            |it| done(it.pages[0].resume()),
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
            |it| done(it.pages().pack(u64::MAX)),
            Scenery::check,
        ),
        Case::new(
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
            |it| done(it.pages().release_idle(0)),
            |it| {
                it.pages().release_idle(0).unwrap();
                it.check();
            },
        )
        .quiet(),
    ]
}
