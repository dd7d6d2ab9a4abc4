//! An owner process.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use vmm_share::{Address, Owner};
use vmm_sys::DeviceId;

use super::machine;
use super::second::Answers;

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// What the second process does as an owner process. Its lease is counted by a clock that is set, if
/// `VMM_SHARE_TEST_LEASE_MS` is not given.
pub(crate) fn answers(address: Address) -> Answers {
    let (sim, driver) = machine(2);
    let clock = Arc::new(AtomicU64::new(0));
    let mut builder = Owner::builder(driver).devices([DeviceId(0), DeviceId(1)]);
    match number("VMM_SHARE_TEST_LEASE_MS") {
        Some(ms) => builder = builder.lease(Duration::from_millis(ms)),
        None => {
            let now = clock.clone();
            builder = builder.lease(Duration::from_secs(60));
            builder = builder.clock(move || Duration::from_secs(now.load(Ordering::SeqCst)));
        }
    }
    if let Some(bytes) = number("VMM_SHARE_TEST_CLIENT_BYTES") {
        builder = builder.client_bytes_max(bytes);
    }
    if let Some(bytes) = number("VMM_SHARE_TEST_TOTAL_BYTES") {
        builder = builder.total_bytes_max(bytes);
    }
    let mut owner = Some(builder.bind(address).unwrap());
    Box::new(move |words| match words {
        ["end"] => {
            drop(owner.take());
            Some(
                sim.check_clean().err().map_or("clean".to_owned(), |left| left.replace("\n", "; ")),
            )
        }
        ["advance", seconds] => {
            clock.fetch_add(seconds.parse().unwrap(), Ordering::SeqCst);
            Some("later".to_owned())
        }
        // Chunks that the driver has given.
        ["memory"] => Some(sim.ledger_summary().chunks.to_string()),
        other => panic!("no such order: {other:?}"),
    })
}
