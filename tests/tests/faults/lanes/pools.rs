//! Pools.

use std::time::Duration;

use vmm_sys::{Access, Location};

use super::{check_blocks, filled};
use crate::engine::{Case, done};
use crate::stage::{G, HOME, HOST, NEXT, Stage, bare, usual};

pub(super) fn cases() -> Vec<Case> {
    vec![
        Case::new(
            "pool::build",
            &["PoolBuilder::build", "Pool::builder"],
            || bare(|sim| sim),
            |stage| {
                let builder = stage.builder().stock_marks(3 * G, 8 * G);
                stage.pool = Some(builder.access(HOME, NEXT, Access::ReadWrite).build()?);
                Ok(())
            },
            |stage| assert_eq!(stage.pool().device_stats(NEXT).unwrap().stock_bytes, 3 * G),
        ),
        Case::new(
            "pool::grant",
            &["Pool::grant"],
            || filled().with_elastic(3),
            |stage| done(stage.pool().grant(HOME, NEXT, Access::ReadWrite)),
            |stage| {
                let pair = stage.pool().access_matrix();
                assert_eq!(pair.pair(HOME, NEXT).unwrap().policy, Access::ReadWrite);
                let address = stage.buffers[0].address();
                let location = Location::Device(NEXT);
                let access = stage.driver.get_access(address, location).unwrap();
                assert_eq!(access, Access::ReadWrite);
                assert_eq!(stage.elastic[0].access(NEXT), Access::ReadWrite);
            },
        ),
        Case::new(
            "pool::grant_none",
            &["Pool::grant"],
            || {
                let stage = filled().with_elastic(3);
                stage.pool().grant(HOME, NEXT, Access::ReadWrite).unwrap();
                stage
            },
            |stage| done(stage.pool().grant(HOME, NEXT, Access::None)),
            |stage| assert_eq!(stage.elastic[0].access(NEXT), Access::None),
        ),
        Case::new(
            "pool::figures",
            &["Pool::room", "Pool::access", "Pool::access_matrix", "ElasticBuffer::room"],
            || filled().with_elastic(2),
            |stage| {
                stage.pool().room(HOME)?;
                stage.elastic[0].room();
                stage.pool().access_matrix();
                assert_eq!(stage.pool().access(HOME, NEXT)?, Access::None);
                Ok(())
            },
            check_blocks,
        )
        .quiet(),
        Case::new(
            "pool::prefill",
            &["Pool::prefill"],
            || Stage { keeps: true, ..usual() },
            |stage| done(stage.pool().prefill(HOME, 4 * G)),
            |stage| assert_eq!(stage.pool().device_stats(HOME).unwrap().stock_bytes, 4 * G),
        ),
        Case::new(
            "pool::prefill_host",
            &["Pool::prefill"],
            || Stage { keeps: true, ..usual() },
            |stage| done(stage.pool().prefill(HOST, 4 * G)),
            |stage| assert_eq!(stage.pool().stats().hosts[0].stock_bytes, 4 * G),
        ),
        Case::new(
            "pool::trim",
            &["Pool::trim"],
            || {
                let mut stage = filled();
                let other = stage.streams[1].clone();
                stage.buffers[1].record_stream(&other).unwrap();
                drop(stage.buffers.remove(1));
                stage.pool().prefill(HOME, 2 * G).unwrap();
                stage
            },
            |stage| done(stage.pool().trim(HOME)),
            |stage| {
                // What could not go goes at the next trim.
                stage.pool().trim(HOME).unwrap();
                let stats = stage.pool().device_stats(HOME).unwrap();
                assert_eq!((stats.idle_bytes, stats.stock_bytes), (0, 0), "{stats:?}");
                check_blocks(stage);
            },
        ),
        Case::new(
            "pool::trim_idle",
            &["Pool::trim_idle"],
            || {
                let stage = filled();
                stage.pool().prefill(HOME, 2 * G).unwrap();
                stage.pool().trim_idle(HOME, Duration::from_secs(1)).unwrap();
                stage.pass(5000);
                stage
            },
            |stage| {
                stage.pool().trim_idle(HOME, Duration::from_secs(1))?;
                Ok(())
            },
            |stage| {
                for _ in 0..3 {
                    stage.pass(5000);
                    stage.pool().trim_idle(HOME, Duration::from_secs(1)).unwrap();
                }
                let stats = stage.pool().device_stats(HOME).unwrap();
                assert_eq!((stats.idle_bytes, stats.stock_bytes), (0, 0), "{stats:?}");
                check_blocks(stage);
            },
        ),
        Case::new(
            "pool::drop",
            &["Pool::drop"],
            || {
                let mut stage = filled().with_elastic(2);
                stage.pool().grant(HOME, NEXT, Access::Read).unwrap();
                stage.pool().prefill(HOST, 2 * G).unwrap();
                stage.elastic.clear();
                stage.buffers.clear();
                stage.lanes.clear();
                stage
            },
            |stage| {
                stage.pool = None;
                Ok(())
            },
            |_| {},
        )
        .quiet(),
    ]
}
