//! Blocks, by plain address.

use std::ptr;

use vmm_pool_capi::*;

use super::{Border, created, raw, told};
use crate::engine::Case;
use crate::stage::G;

/// Two blocks of the first stream.
fn two() -> Border {
    let mut it = created();
    it.alloc(0, 3 * G).unwrap();
    it.alloc(0, 2 * G).unwrap();
    it
}

pub(super) fn cases() -> Vec<Case> {
    vec![
        Case::new(
            "c::alloc",
            &["vmm_pool_alloc", "vmm_pool_block"],
            || {
                let mut it = created();
                it.stage.keeps = true;
                it
            },
            |it| it.alloc(0, 3 * G),
            |it| {
                let (address, bytes) = it.stage.raw[0];
                let mut info =
                    VmmPoolBlockInfo { struct_bytes: 24, device: -1, address: 0, bytes: 0 };
                let block = ptr::without_provenance(address as usize);
                // SAFETY: a live place of the length that it says.
                told(unsafe { vmm_pool_block(block, &raw mut info) }).unwrap();
                assert_eq!((info.address, info.bytes, info.device), (address, bytes, 0));
            },
        ),
        Case::new(
            "c::alloc_more",
            &["vmm_pool_alloc"],
            two,
            |it| it.alloc(0, 5 * G),
            |it| assert_eq!(it.stage.raw.len(), 3),
        ),
        Case::silent("c::free", &["vmm_pool_free"], two, |it| {
            it.free(0)?;
            it.free(0)
        }),
        Case::new(
            "c::free_elsewhere",
            &["vmm_pool_free"],
            two,
            |it| it.free(1),
            |it| assert_eq!(it.stage.raw.len(), 1),
        ),
        Case::new(
            "c::record_stream",
            &["vmm_pool_record_stream"],
            two,
            |it| {
                let block = ptr::without_provenance_mut(it.stage.raw[0].0 as usize);
                // SAFETY: the stream is alive, and said to be gone at the end.
                told(unsafe { vmm_pool_record_stream(block, raw(&it.stage.streams[1])) })
            },
            |_| {},
        ),
        Case::new(
            "c::stream_destroyed",
            &["vmm_pool_stream_destroyed"],
            || {
                let mut it = two();
                it.free(1).unwrap();
                it
            },
            |it| {
                for stream in 0..2 {
                    // SAFETY: the stream is alive.
                    told(unsafe { vmm_pool_stream_destroyed(0, raw(&it.stage.streams[stream])) })?;
                }
                Ok(())
            },
            |it| assert_eq!(it.stage.raw.len(), 1),
        ),
    ]
}
