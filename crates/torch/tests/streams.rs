//! The C functions called from Rust, where the simulated device can be looked at.

#![allow(clippy::unwrap_used, reason = "a failure ends the test")]

use std::ffi::{CStr, c_int, c_void};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use vmm_pool::DeviceStats;
use vmm_pool_torch::{
    pool, use_driver, vmm_pool_torch_alloc, vmm_pool_torch_empty_cache, vmm_pool_torch_free,
    vmm_pool_torch_last_error, vmm_pool_torch_record_stream, vmm_pool_torch_stream_destroyed,
};
use vmm_sys::object::Stream;
use vmm_sys::sim::Sim;
use vmm_sys::{DeviceId, Driver};

const MIB: isize = 1 << 20;

/// One machine for all tests of this program; each takes a device of its own.
fn machine() -> (Arc<Sim>, Arc<dyn Driver>) {
    static MACHINE: OnceLock<Arc<Sim>> = OnceLock::new();
    let sim = MACHINE.get_or_init(|| {
        let sim = Sim::builder().devices(8).build();
        use_driver(sim.clone()).unwrap();
        sim
    });
    (sim.clone(), sim.clone())
}

fn handle(stream: &Stream) -> *mut c_void {
    std::ptr::without_provenance_mut(stream.handle().0 as usize)
}

fn take(bytes: isize, device: c_int, stream: &Stream) -> *mut c_void {
    // SAFETY: the stream is alive, and told when it is not any more.
    unsafe { vmm_pool_torch_alloc(bytes, device, handle(stream)) }
}

fn give(block: *mut c_void, bytes: isize, device: c_int, stream: &Stream) {
    // SAFETY: as above; the simulated device has no work that uses the block.
    unsafe { vmm_pool_torch_free(block, bytes, device, handle(stream)) }
}

fn gone(device: c_int, stream: &Stream) {
    // SAFETY: the stream is alive.
    unsafe { vmm_pool_torch_stream_destroyed(device, handle(stream)) }
}

fn last_error() -> Option<String> {
    let words = vmm_pool_torch_last_error();
    // SAFETY: a C string that stays until this thread's next failure.
    (!words.is_null()).then(|| unsafe { CStr::from_ptr(words) }.to_str().unwrap().to_owned())
}

fn stats(device: u32) -> DeviceStats {
    pool(DeviceId(device)).unwrap().device_stats(DeviceId(device)).unwrap()
}

/// Waits for what the background thread may have in its hands just now.
fn soon(what: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !what() {
        assert!(Instant::now() < deadline, "not in 20 s");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_stream_has_one_lane_whichever_thread_asks() {
    let (_, driver) = machine();
    let streams: Vec<_> = (0..6).map(|_| Stream::create(&driver, DeviceId(0)).unwrap()).collect();
    // More streams than a thread remembers, so that all are looked up again.
    let used = || {
        let blocks: Vec<_> = streams.iter().map(|stream| take(MIB, 0, stream)).collect();
        for (block, stream) in blocks.into_iter().zip(&streams) {
            assert!(!block.is_null());
            give(block, MIB, 0, stream);
        }
    };
    for _ in 0..3 {
        used();
        std::thread::scope(|scope| scope.spawn(used).join().unwrap());
    }
    assert_eq!((stats(0).lanes, stats(0).buffers), (6, 0));
    for stream in &streams {
        gone(0, stream);
    }
    soon(|| stats(0).lanes == 0);
    assert_eq!(last_error(), None);
}

#[test]
fn a_handle_that_comes_back_is_another_stream_with_another_lane() {
    let (_, driver) = machine();
    let first = Stream::create(&driver, DeviceId(1)).unwrap();
    let (kept, first_handle) = (take(MIB, 1, &first), handle(&first));
    gone(1, &first);
    gone(1, &first); // once is enough
    drop(first);
    let second = Stream::create(&driver, DeviceId(1)).unwrap();
    assert_eq!(handle(&second), first_handle, "the driver gives it out again");
    // The thread still remembers the lane that was closed.
    let block = take(MIB, 1, &second);
    assert!(!block.is_null() && block != kept);
    assert_eq!((stats(1).lanes, stats(1).buffers), (2, 2));
    give(kept, MIB, 1, &second);
    soon(|| (stats(1).lanes, stats(1).buffers) == (1, 1));
    give(block, MIB, 1, &second);
    gone(1, &second);
    soon(|| stats(1).lanes == 0);
    assert_eq!(last_error(), None);
}

#[test]
fn a_free_on_another_stream_waits_for_that_stream() {
    let (sim, driver) = machine();
    let home = Stream::create(&driver, DeviceId(2)).unwrap();
    let other = Stream::create(&driver, DeviceId(2)).unwrap();
    let (freed, recorded) = (take(MIB, 2, &home), take(MIB, 2, &home));
    let hold = sim.hold(DeviceId(2), other.handle()).unwrap();
    give(freed, MIB, 2, &other);
    // SAFETY: both streams are alive.
    unsafe { vmm_pool_torch_record_stream(recorded, handle(&other)) };
    give(recorded, MIB, 2, &home);
    assert_eq!((stats(2).limbo_buffers, stats(2).buffers), (2, 0));
    sim.release_hold(hold);
    soon(|| {
        vmm_pool_torch_empty_cache();
        (stats(2).limbo_buffers, stats(2).held_bytes) == (0, 0)
    });
    gone(2, &home);
    gone(2, &other);
    soon(|| stats(2).lanes == 0);
    assert_eq!(last_error(), None);
}
