//! Pools: made, looked at, put to sleep, given back.

use std::ffi::c_char;
use std::ptr;

use vmm_pool_capi::*;

use super::elastic::{filled, first};
use super::{Border, Place, UNTOUCHED, created, nothing, number, told};
use crate::engine::{Case, Done};
use crate::stage::{G, HOME};

/// What functions that give a text gave.
fn text(
    give: impl Fn(*mut c_char, usize, *mut usize) -> i32,
) -> Result<String, Box<dyn std::error::Error>> {
    let (mut bytes, mut needed) = (vec![1_u8; 1 << 16], UNTOUCHED as usize);
    let answer = told(give(bytes.as_mut_ptr().cast(), bytes.len(), &raw mut needed));
    bytes.truncate(number(answer, needed as u64)? as usize);
    Ok(String::from_utf8(bytes)?)
}

fn trim(it: &mut Border) -> Done {
    let mut freed = UNTOUCHED;
    // SAFETY: a live place for the answer.
    let answer = told(unsafe { vmm_pool_trim(it.pool, 0, &raw mut freed) });
    number(answer, freed).map(drop)
}

fn sleep(it: &Border, contents: i32) -> Done {
    let mut bytes = UNTOUCHED;
    // SAFETY: a text, and a live place for the answer.
    let answer =
        told(unsafe { vmm_pool_sleep(it.pool, c"kv".as_ptr(), contents, 0, &raw mut bytes) });
    // What an earlier try has moved is not moved again.
    number(answer, bytes).map(|bytes| assert!(bytes <= 4 * G))
}

fn wake(it: &mut Border) -> Done {
    let mut bytes = UNTOUCHED;
    // SAFETY: as above.
    let answer = told(unsafe { vmm_pool_wake(it.pool, c"kv".as_ptr(), &raw mut bytes) });
    number(answer, bytes).map(|bytes| assert!(bytes <= 4 * G))
}

pub(super) fn cases() -> Vec<Case> {
    vec![
        Case::new("c::create", &["vmm_pool_create"], nothing, Border::create, |it| {
            assert!(!it.pool.is_null())
        }),
        Case::new(
            "c::default",
            &["vmm_pool_default"],
            nothing,
            |it| {
                let mut place = Place::new();
                // SAFETY: a live place for the answer.
                let answer = told(unsafe { vmm_pool_default(0, &raw mut place.0) });
                let pool = place.of(answer)?;
                it.stage.pool = Some(inside::pool_of(pool)?);
                Ok(())
            },
            |it| assert_eq!(it.stage.pool().devices().collect::<Vec<_>>(), [HOME]),
        ),
        Case::new(
            "c::texts",
            &["vmm_pool_stats_json", "vmm_pool_report"],
            created,
            |it| {
                // SAFETY: `text` gives as much room as it says.
                let json = text(|to, room, needed| unsafe {
                    vmm_pool_stats_json(it.pool, to, room, needed)
                })?;
                assert!(json.contains("held_bytes"));
                // SAFETY: as above.
                let report = text(|to, room, needed| unsafe {
                    vmm_pool_report(it.pool, 0, to, room, needed)
                })?;
                assert!(report.starts_with("device 0"), "{report}");
                Ok(())
            },
            |_| {},
        ),
        Case::new(
            "c::trim",
            &["vmm_pool_trim"],
            || {
                let mut it = created();
                it.alloc(0, 3 * G).unwrap();
                it.free(0).unwrap();
                it
            },
            trim,
            |_| {},
        ),
        Case::new(
            "c::sleep",
            &["vmm_pool_sleep"],
            filled,
            |it| sleep(it, VMM_POOL_KEEP),
            |it| assert_eq!(it.info(first(it)).asleep, 1),
        ),
        Case::new(
            "c::sleep_and_lose",
            &["vmm_pool_sleep"],
            filled,
            |it| sleep(it, VMM_POOL_DROP),
            |it| assert_eq!(it.info(first(it)).asleep, 2),
        ),
        Case::new(
            "c::wake",
            &["vmm_pool_wake"],
            || {
                let it = filled();
                sleep(&it, VMM_POOL_KEEP).unwrap();
                it
            },
            wake,
            super::elastic::check_marks,
        ),
        Case::new(
            "c::destroy",
            &["vmm_pool_destroy"],
            || {
                let mut it = created();
                it.alloc(0, 3 * G).unwrap();
                it.alloc(2, 2 * G).unwrap();
                it
            },
            |it| {
                told(vmm_pool_destroy(it.pool))?;
                it.pool = ptr::null_mut();
                Ok(())
            },
            |it| assert_eq!(it.stage.raw.len(), 2),
        )
        .quiet(),
    ]
}
