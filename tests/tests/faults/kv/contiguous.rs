//! Contiguous caches and their sequences.

use vmm_kv::Order;

use super::{Scenery, T, TOKENS, bare, contiguous, contiguous_builder, contiguous_of, forked};
use crate::engine::{Case, Done, done};
use crate::stage::{G, HOST, NEXT, stage, usual};

fn by_layers() -> Scenery {
    contiguous_of(Order::LayerMajor)
}

pub(super) fn cases() -> Vec<Case> {
    [append_and_fork(), memory()].into_iter().flatten().collect()
}

fn opened(scenery: &mut Scenery, tokens: u64) -> Done {
    let sequence = scenery.cache().open(tokens)?;
    scenery.sequences.push(sequence);
    Ok(())
}

fn append_and_fork() -> Vec<Case> {
    vec![
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
            |it| done(it.sequences[0].append(3 * T)),
            Scenery::check,
        ),
        Case::new(
            "kv::append_by_layers",
            &["Sequence::append"],
            by_layers,
            |it| done(it.sequences[0].append(3 * T)),
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
            |it| done(it.sequences[2].append(1)),
            Scenery::check,
        ),
        Case::new(
            "kv::append_after_fork_by_layers",
            &["Sequence::append"],
            || forked(by_layers()),
            |it| done(it.sequences[2].append(1)),
            Scenery::check,
        ),
        Case::new(
            "kv::truncate",
            &["Sequence::truncate", "Sequence::drop", "ContiguousCache::settle"],
            || forked(contiguous()),
            truncate,
            check_truncated,
        )
        .quiet(),
        Case::new(
            "kv::truncate_by_layers",
            &["Sequence::truncate", "Sequence::drop"],
            || forked(by_layers()),
            truncate,
            check_truncated,
        )
        .quiet(),
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
            |it| done(it.sequences[0].park(HOST)),
            Scenery::check,
        ),
        Case::new(
            "kv::park",
            &["Sequence::park"],
            || forked(contiguous()),
            |it| done(it.sequences[0].park(HOST)),
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
            |it| done(it.sequences[0].resume()),
            Scenery::check,
        ),
        Case::new(
            "kv::migrate",
            &["Sequence::migrate"],
            contiguous,
            |it| done(it.sequences[0].migrate(NEXT)),
            |it| {
                assert_eq!(it.sequences[0].places(), [(NEXT.into(), 2 * G)]);
                it.check();
            },
        ),
        Case::new(
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
            |it| done(it.cache().release_idle(0)),
            |it| {
                it.cache().settle().unwrap();
                it.cache().release_idle(0).unwrap();
                assert_eq!(it.cache().stats().idle_bytes, 0);
                it.check();
            },
        )
        .quiet(),
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
    ]
}
