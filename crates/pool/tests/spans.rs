//! Slow operations are spans with stable names; the warm path opens none.

#![allow(clippy::unwrap_used, reason = "a failure ends the test")]

mod common;

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::elastic::machine;
use common::{HOME, MIB, Rig};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};
use vmm_sys::DeviceId;

/// Keeps the names of the pool's spans.
#[derive(Clone, Default)]
struct Names(Arc<Mutex<Vec<&'static str>>>);

impl Names {
    fn take(&self) -> BTreeSet<&'static str> {
        std::mem::take(&mut *self.0.lock().unwrap()).into_iter().collect()
    }
}

impl Subscriber for Names {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_span() && metadata.name().starts_with("vmm_pool.")
    }
    fn new_span(&self, span: &Attributes<'_>) -> Id {
        self.0.lock().unwrap().push(span.metadata().name());
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, _: &Event<'_>) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

#[test]
fn each_slow_operation_has_its_span_and_the_page_lists_them() {
    let names = Names::default();
    let mut all = BTreeSet::new();
    let mut seen = |expected: &[&'static str]| {
        let found = names.take();
        assert_eq!(found, expected.iter().copied().collect());
        all.extend(found);
    };
    tracing::subscriber::with_default(names.clone(), || {
        let rig = Rig::new(|b| b.limit_bytes(64 * MIB).stock_marks(2 * MIB, 64 * MIB));
        seen(&["vmm_pool.build", "vmm_pool.stock"]);
        drop(rig.lane.alloc(MIB).unwrap());
        seen(&["vmm_pool.grow"]);
        drop(rig.lane.alloc(MIB).unwrap());
        seen(&[]);
        rig.pool.trim(HOME).unwrap();
        seen(&["vmm_pool.trim"]);
        assert!(rig.lane.alloc(100 * MIB).unwrap_err().is_out_of_memory());
        seen(&["vmm_pool.grow", "vmm_pool.reclaim"]);
        rig.end();
        seen(&["vmm_pool.lane_close"]);
        let two = machine(2, |sim| sim, |pool| pool);
        let buffer = two.buffer(0, 2 * MIB);
        buffer.grow_to(2 * MIB).unwrap();
        seen(&["vmm_pool.build"]);
        buffer.migrate(DeviceId(1)).unwrap();
        seen(&["vmm_pool.move", "vmm_pool.peer"]);
        two.pool.recall(DeviceId(1), u64::MAX, Duration::ZERO).unwrap();
        seen(&["vmm_pool.recall"]);
        drop(buffer);
        two.end();
        seen(&[]);
    });
    let page = include_str!("../../../docs/CONFIGURATION.md");
    let listed = page.lines().filter_map(|line| line.strip_prefix("| `vmm_pool.")).count();
    assert_eq!(listed, all.len());
    for name in all {
        assert!(page.contains(&format!("| `{name}` |")), "{name}");
    }
}
