//! Elastic buffers and their uses.

use vmm_pool_capi::*;

use super::{Border, Place, UNTOUCHED, created, number, raw, told};
use crate::engine::{Case, Done};
use crate::stage::G;

fn reserve(it: &mut Border) -> Done {
    let options = VmmElasticOptions {
        struct_bytes: size_of::<VmmElasticOptions>() as u32,
        device: 0,
        capacity_bytes: 16 * G,
        chunk_bytes: G,
        tag: c"kv".as_ptr(),
        quota_bytes: 0,
        flags: 0,
        reserved: 0,
    };
    let mut place = Place::new();
    // SAFETY: live options with a text, and a live place for the answer.
    let answer =
        told(unsafe { vmm_elastic_reserve(it.pool, &raw const options, &raw mut place.0) });
    it.elastic.push(place.of(answer)?);
    Ok(())
}

fn grow(it: &Border, chunks: u64, new: u64) -> Done {
    let mut committed = UNTOUCHED;
    // SAFETY: a live place for the answer.
    let answer = told(unsafe { vmm_elastic_grow(first(it), chunks * G, &raw mut committed) });
    number(answer, committed).map(|bytes| assert_eq!(bytes, new * G))
}

fn shrink(it: &Border, chunks: u64, less: u64) -> Done {
    let mut freed = UNTOUCHED;
    // SAFETY: as above.
    let answer = told(unsafe { vmm_elastic_shrink(first(it), chunks * G, &raw mut freed) });
    number(answer, freed).map(|bytes| assert_eq!(bytes, less * G))
}

fn migrate(it: &Border, kind: i32, index: u32) -> Done {
    let mut moved = UNTOUCHED;
    // SAFETY: as above.
    let answer = told(unsafe { vmm_elastic_migrate(first(it), kind, index, 0, &raw mut moved) });
    // What an earlier try has moved is not moved again.
    number(answer, moved).map(|bytes| assert!(bytes <= 4 * G))
}

pub(super) fn first(it: &Border) -> *mut VmmElastic {
    it.elastic[0]
}

/// A buffer of four chunks, with bytes of its own.
pub(super) fn filled() -> Border {
    let mut it = created();
    reserve(&mut it).unwrap();
    grow(&it, 4, 4).unwrap();
    let address = it.info(first(&it)).address;
    (0..4).for_each(|chunk| it.stage.mark(address + chunk * G));
    it
}

/// The four chunks hold what was written there.
pub(super) fn check_marks(it: &Border) {
    let address = it.info(first(it)).address;
    for at in (0..4).map(|chunk| address + chunk * G) {
        assert_eq!(it.stage.sim.peek(at, 1).unwrap(), [(at / G) as u8], "the bytes at {at:#x}");
    }
}

fn use_on(it: &mut Border, stream: usize) -> Done {
    let (stream, mut place) = (&it.stage.streams[stream], Place::new());
    let device = stream.device().0 as i32;
    // SAFETY: the stream is alive, and said to be gone at the end; a live place for the answer.
    let answer =
        told(unsafe { vmm_elastic_use_on(first(it), device, raw(stream), &raw mut place.0) });
    it.uses.push(place.of(answer)?);
    Ok(())
}

pub(super) fn cases() -> Vec<Case> {
    [memory(), places(), uses()].into_iter().flatten().collect()
}

fn memory() -> Vec<Case> {
    vec![
        Case::new("c::reserve", &["vmm_elastic_reserve"], created, reserve, |it| {
            assert_eq!(it.info(first(it)).capacity_bytes, 16 * G);
        }),
        Case::new(
            "c::grow",
            &["vmm_elastic_grow", "vmm_elastic_info"],
            filled,
            |it| grow(it, 7, 3),
            |it| {
                assert_eq!(it.info(first(it)).committed_bytes, 7 * G);
                check_marks(it);
            },
        ),
        Case::new(
            "c::shrink",
            &["vmm_elastic_shrink"],
            filled,
            |it| shrink(it, 1, 3),
            |it| assert_eq!(it.info(first(it)).committed_bytes, G),
        ),
        Case::new(
            "c::release",
            &["vmm_elastic_release"],
            || {
                let mut it = filled();
                use_on(&mut it, 0).unwrap();
                told(vmm_use_end(it.uses.pop().unwrap())).unwrap();
                it
            },
            |it| {
                told(vmm_elastic_release(first(it)))?;
                it.elastic.clear();
                Ok(())
            },
            |it| {
                it.stage.pool().trim(crate::stage::HOME).unwrap();
                assert!(it.stage.pool().elastic_stats().is_empty());
            },
        )
        .quiet(),
    ]
}

fn places() -> Vec<Case> {
    vec![
        Case::new(
            "c::migrate",
            &["vmm_elastic_migrate"],
            filled,
            |it| migrate(it, VMM_PLACE_DEVICE, 1),
            |it| {
                assert_eq!(it.info(first(it)).device, 1);
                check_marks(it);
            },
        ),
        Case::new(
            "c::migrate_to_the_host",
            &["vmm_elastic_migrate"],
            filled,
            |it| migrate(it, VMM_PLACE_HOST_NODE, 0),
            |it| {
                assert_eq!(it.info(first(it)).host_bytes, 4 * G);
                check_marks(it);
            },
        ),
        Case::new(
            "c::grant",
            &["vmm_elastic_grant"],
            filled,
            |it| told(vmm_elastic_grant(first(it), 1, VMM_ACCESS_READ)),
            |it| {
                let access = it.stage.access_at(it.info(first(it)).address);
                assert!(access.contains("Some(Read)"), "{access}");
            },
        ),
        Case::new(
            "c::revoke",
            &["vmm_elastic_revoke"],
            || {
                let it = filled();
                told(vmm_elastic_grant(first(&it), 1, VMM_ACCESS_READ_WRITE)).unwrap();
                it
            },
            |it| told(vmm_elastic_revoke(first(it), 1)),
            |it| {
                let access = it.stage.access_at(it.info(first(it)).address);
                assert!(access.contains("Some(None)"), "{access}");
            },
        ),
    ]
}

fn uses() -> Vec<Case> {
    vec![
        Case::new(
            "c::use_on",
            &["vmm_elastic_use_on"],
            filled,
            |it| use_on(it, 0),
            |it| assert_eq!(it.info(first(it)).open_uses, 1),
        ),
        Case::new(
            "c::use_end",
            &["vmm_use_end"],
            || {
                let mut it = filled();
                use_on(&mut it, 0).unwrap();
                it
            },
            |it| {
                told(vmm_use_end(it.uses[0]))?;
                it.uses.clear();
                Ok(())
            },
            |it| assert_eq!(it.info(first(it)).open_uses, 0),
        )
        .quiet(),
    ]
}
