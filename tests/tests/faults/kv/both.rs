//! What both forms have.

use vmm_kv::Part;

use super::{Scenery, T, bare, contiguous, contiguous_builder, paged_builder};
use crate::engine::Case;
use crate::stage::usual;

pub(super) fn cases() -> Vec<Case> {
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
        Case::new(
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
        )
        .quiet(),
    ]
}
