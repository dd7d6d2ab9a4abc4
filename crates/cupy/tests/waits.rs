//! What CuPy frees is used again once the device has done all work, and not before.

#![allow(clippy::unwrap_used, reason = "a failure ends the test")]

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use vmm_pool_capi::{pool, use_driver};
use vmm_pool_cupy::{vmm_pool_cupy_free, vmm_pool_cupy_malloc, vmm_pool_cupy_synchronize};
use vmm_sys::object::Stream;
use vmm_sys::sim::Sim;
use vmm_sys::{CaptureMode, CaptureStatus, DeviceId, Driver, StreamHandle};

const BYTES: usize = 30 << 20;

/// One machine for all tests of this program; each takes a device of its own.
fn machine() -> Arc<Sim> {
    static MACHINE: OnceLock<Arc<Sim>> = OnceLock::new();
    let machine = MACHINE.get_or_init(|| {
        let sim = Sim::builder().devices(4).build();
        // Two blocks and no more, so that lanes have to take from one another.
        // SAFETY: no other thread is reading the environment: all of this program's wait here first.
        unsafe { std::env::set_var("VMM_POOL_LIMIT", "64M") };
        use_driver(sim.clone()).unwrap();
        sim
    });
    machine.clone()
}

fn take(device: DeviceId) -> *mut c_void {
    let block = vmm_pool_cupy_malloc(std::ptr::null_mut(), BYTES, device.0 as i32);
    assert!(!block.is_null());
    block
}

fn give(block: *mut c_void, device: DeviceId) {
    vmm_pool_cupy_free(std::ptr::null_mut(), block, device.0 as i32);
}

#[test]
fn memory_is_used_again_after_the_work_of_a_stream_that_nobody_named() {
    let (sim, device) = (machine(), DeviceId(0));
    let driver: Arc<dyn Driver> = sim.clone();
    // Not ordered with the legacy stream.
    let stream = Stream::create(&driver, device).unwrap();
    let block = take(device);
    let hold = sim.hold(device, stream.handle()).unwrap();
    give(block, device);
    let is_released = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let address = block.addr();
        let is_released = &is_released;
        scope.spawn(move || {
            let again = take(device);
            assert_eq!(again.addr(), address, "no more memory is made");
            assert!(is_released.load(Ordering::Acquire), "work may still use it");
            give(again, device);
        });
        // Time for the thread to come to its wait, or past it if it makes none.
        std::thread::sleep(Duration::from_millis(50));
        is_released.store(true, Ordering::Release);
        sim.release_hold(hold);
    });
    assert_eq!(vmm_pool_cupy_synchronize(0), 0);
    let stats = pool(device).unwrap().device_stats(device).unwrap();
    assert_eq!((stats.buffers, stats.limbo_buffers), (0, 0));
    assert!(stats.held_bytes < 2 * BYTES as u64);
}

#[test]
fn a_capture_is_not_harmed_and_memory_is_made_meanwhile() {
    let (sim, device) = (machine(), DeviceId(1));
    for mode in [CaptureMode::Global, CaptureMode::ThreadLocal, CaptureMode::Relaxed] {
        let block = take(device);
        give(block, device);
        let handle: StreamHandle = sim.stream_create_blocking(device).unwrap();
        // SAFETY: a live stream, here and below.
        unsafe { sim.capture_begin(device, handle, mode) }.unwrap();
        let other = take(device);
        assert_ne!(other, block, "{mode:?}");
        assert_eq!(vmm_pool_cupy_synchronize(1), 0);
        // SAFETY: as above.
        let status = unsafe { sim.capture_info(device, handle) }.unwrap().status;
        assert_eq!(status, CaptureStatus::Active, "{mode:?}");
        // SAFETY: as above; the graph is not used afterwards.
        unsafe {
            let graph = sim.capture_end(device, handle).unwrap();
            sim.graph_destroy(device, graph).unwrap();
            sim.stream_destroy(device, handle).unwrap();
        }
        give(other, device);
        assert_eq!(vmm_pool_cupy_synchronize(1), 0);
        let stats = pool(device).unwrap().device_stats(device).unwrap();
        assert_eq!(stats.buffers, 0, "{mode:?}");
    }
}

#[test]
fn what_another_lane_freed_is_given_out_after_the_work_of_that_lane() {
    let (sim, device) = (machine(), DeviceId(2));
    let driver: Arc<dyn Driver> = sim.clone();
    let stream = Stream::create(&driver, device).unwrap();
    let lane = pool(device).unwrap().lane(&stream).unwrap();
    let blocks = [lane.alloc(BYTES as u64).unwrap(), lane.alloc(BYTES as u64).unwrap()];
    let hold = sim.hold(device, stream.handle()).unwrap();
    drop(blocks);
    let is_released = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let is_released = &is_released;
        scope.spawn(move || {
            let block = take(device);
            assert!(is_released.load(Ordering::Acquire), "work of the other lane may still use it");
            give(block, device);
        });
        std::thread::sleep(Duration::from_millis(50));
        is_released.store(true, Ordering::Release);
        sim.release_hold(hold);
    });
    assert_eq!(vmm_pool_cupy_synchronize(2), 0);
    assert!(pool(device).unwrap().verify().is_ok());
}
