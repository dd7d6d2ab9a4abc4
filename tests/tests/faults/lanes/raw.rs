//! Blocks by plain address.

use vmm_pool::{Request, block_of, free_raw, free_raw_on, record_stream_raw};
use vmm_sys::StreamHandle;

use super::lanes;
use crate::engine::Case;
use crate::stage::{G, HOME};

pub(super) fn cases() -> Vec<Case> {
    let filled = || {
        let mut stage = lanes();
        for bytes in [3 * G, 2 * G] {
            let address = stage.lanes[0].alloc_raw(bytes).unwrap();
            stage.mark(address);
            stage.raw.push((address, bytes));
        }
        stage
    };
    let cases = vec![
        Case::new(
            "raw::alloc",
            &["Lane::alloc_raw", "Lane::alloc_raw_with"],
            lanes,
            |stage| {
                let first = stage.lanes[0].alloc_raw(3 * G)?;
                let second = stage.lanes[0].alloc_raw_with(&Request::new(5 * G));
                let second = second.inspect_err(|_| free_raw(first, 3 * G).unwrap())?;
                for (address, bytes) in [(first, 3 * G), (second, 5 * G)] {
                    stage.mark(address);
                    stage.raw.push((address, bytes));
                }
                Ok(())
            },
            |stage| assert!(stage.raw.iter().all(|(address, _)| block_of(*address).is_ok())),
        ),
        Case::new(
            "raw::free",
            &["free_raw", "free_raw_on", "record_stream_raw", "block_of"],
            filled,
            |stage| {
                let (address, bytes) = stage.raw.pop().unwrap();
                record_stream_raw(address, &stage.streams[2])?;
                free_raw(address, bytes)?;
                let (address, bytes) = stage.raw.pop().unwrap();
                record_stream_raw(address, &stage.streams[1])?;
                let handle: StreamHandle = stage.streams[0].handle();
                free_raw_on(address, bytes, handle)?;
                Ok(())
            },
            |stage| {
                stage.pool().trim(HOME).unwrap();
                let stats = stage.pool().device_stats(HOME).unwrap();
                assert_eq!((stats.held_bytes, stats.buffers), (0, 0), "{stats:?}");
            },
        )
        .quiet(),
    ];
    cases.into_iter().map(Case::alone).collect()
}
