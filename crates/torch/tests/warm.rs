//! Warm pairs through the C functions. Alone in its program: the driver's calls are counted.

#![allow(clippy::unwrap_used, reason = "a failure ends the test")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use vmm_pool_torch::{pool, use_driver, vmm_pool_torch_alloc, vmm_pool_torch_free};
use vmm_sys::sim::Sim;
use vmm_sys::{DeviceId, Driver};

fn pairs() {
    for bytes in [1, 700, 64 << 10, 2 << 20, 40 << 20] {
        // SAFETY: the legacy stream, and no work that uses the block.
        unsafe {
            let block = vmm_pool_torch_alloc(bytes, 0, std::ptr::null_mut());
            assert!(!block.is_null());
            vmm_pool_torch_free(block, bytes, 0, std::ptr::null_mut());
        }
    }
}

#[test]
fn warm_pairs_make_no_driver_call() {
    let driver: Arc<dyn Driver> = Sim::builder().build();
    use_driver(driver.clone()).unwrap();
    pairs();
    // The background thread unmaps what growth left behind.
    let pool = pool(DeviceId(0)).unwrap();
    let deadline = Instant::now() + Duration::from_secs(20);
    while pool.device_stats(DeviceId(0)).unwrap().retired_mappings > 0 {
        assert!(Instant::now() < deadline);
        std::thread::sleep(Duration::from_millis(1));
    }
    let before = driver.ledger().snapshot();
    for _ in 0..100 {
        pairs();
    }
    let calls = driver.ledger().snapshot().since(&before);
    assert_eq!(calls.total(), 0, "{calls}");
}
