//! The general functions called from Rust, where the simulated device can be looked at.

#![allow(clippy::unwrap_used, reason = "a failure ends the test")]

use std::ffi::{CStr, c_void};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use vmm_pool::DeviceStats;
use vmm_pool_capi::*;
use vmm_sys::object::Stream;
use vmm_sys::sim::Sim;
use vmm_sys::{CaptureMode, DeviceId, Driver};

const MIB: u64 = 1 << 20;

/// One machine for all tests of this program, which take turns: a capture of one could spoil what
/// another does, and calls are counted.
fn machine() -> (MutexGuard<'static, ()>, Arc<Sim>) {
    static MACHINE: OnceLock<Arc<Sim>> = OnceLock::new();
    static ALONE: Mutex<()> = Mutex::new(());
    // A test that failed leaves nothing behind that harms the next.
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let machine = MACHINE.get_or_init(|| {
        let sim = Sim::builder().devices(4).build();
        use_driver(sim.clone()).unwrap();
        sim
    });
    (alone, machine.clone())
}

fn handle(stream: &Stream) -> *mut c_void {
    std::ptr::without_provenance_mut(stream.handle().0 as usize)
}

/// A pool of one device, without a thread of its own.
fn create(device: i32) -> *mut VmmPool {
    let options = VmmPoolOptions {
        struct_bytes: size_of::<VmmPoolOptions>() as u32,
        flags: VMM_POOL_NO_BACKGROUND,
        devices: &raw const device,
        device_count: 1,
        chunk_bytes: 0,
        limit_bytes: 0,
        stock_low_bytes: 0,
        stock_high_bytes: 0,
        host_bytes: 0,
        host_node: 0,
        reserved: 0,
    };
    let mut pool = std::ptr::null_mut();
    // SAFETY: live options, and a live place for the answer.
    assert_eq!(unsafe { vmm_pool_create(&raw const options, &raw mut pool) }, 0);
    pool
}

fn take(pool: *mut VmmPool, device: i32, bytes: u64, stream: &Stream) -> *mut c_void {
    let mut block = std::ptr::null_mut();
    // SAFETY: the stream is alive, and told when it is not any more.
    let answer = unsafe { vmm_pool_alloc(pool, device, bytes, handle(stream), &raw mut block) };
    assert_eq!(answer, 0, "{}", words());
    block
}

fn give(block: *mut c_void, bytes: u64, stream: &Stream) {
    // SAFETY: as above; the simulated device has no work that uses the block.
    assert_eq!(unsafe { vmm_pool_free(block, bytes, handle(stream)) }, 0, "{}", words());
}

fn gone(device: i32, stream: &Stream) -> i32 {
    // SAFETY: the stream is alive.
    unsafe { vmm_pool_stream_destroyed(device, handle(stream)) }
}

fn words() -> String {
    let words = vmm_pool_last_error();
    if words.is_null() {
        return String::new();
    }
    // SAFETY: a C string that stays until this thread's next failure.
    unsafe { CStr::from_ptr(words) }.to_str().unwrap().to_owned()
}

/// The figures of the process's own pool.
fn stats(device: u32) -> DeviceStats {
    pool(DeviceId(device)).unwrap().device_stats(DeviceId(device)).unwrap()
}

#[test]
fn a_stream_that_is_captured_is_neither_gone_nor_does_its_pool_end() {
    let (_alone, sim) = machine();
    let driver: Arc<dyn Driver> = sim.clone();
    let stream = Stream::create(&driver, DeviceId(0)).unwrap();
    let pool = create(0);
    give(take(pool, 0, MIB, &stream), MIB, &stream);
    // SAFETY: a live stream.
    unsafe { sim.capture_begin(DeviceId(0), stream.handle(), CaptureMode::Global) }.unwrap();
    let busy = vmm_pool_status::VMM_POOL_BUSY as i32;
    assert_eq!(vmm_pool_destroy(pool), busy);
    assert!(words().contains("being captured"), "{}", words());
    assert_eq!(gone(0, &stream), busy);
    // SAFETY: as above; the graph is not used afterwards.
    unsafe {
        let graph = sim.capture_end(DeviceId(0), stream.handle()).unwrap();
        sim.graph_destroy(DeviceId(0), graph).unwrap();
    }
    assert_eq!(gone(0, &stream), 0);
    assert_eq!(gone(0, &stream), 0, "once is enough");
    assert_eq!(vmm_pool_destroy(pool), 0);
    assert_eq!(vmm_pool_destroy(pool), vmm_pool_status::VMM_POOL_INVALID as i32);
}

/// A handle that CUDA gives out again is another stream, to every pool.
#[test]
fn a_stream_that_is_gone_is_gone_for_every_pool() {
    let (_alone, sim) = machine();
    let driver: Arc<dyn Driver> = sim.clone();
    let first = Stream::create(&driver, DeviceId(1)).unwrap();
    let (mut own, pool) = (std::ptr::null_mut(), create(1));
    // SAFETY: a live place for the answer.
    assert_eq!(unsafe { vmm_pool_default(1, &raw mut own) }, 0);
    let kept = [own, pool].map(|pool| take(pool, 1, MIB, &first));
    let first_handle = handle(&first);
    assert_eq!(gone(1, &first), 0);
    drop(first);
    let second = Stream::create(&driver, DeviceId(1)).unwrap();
    assert_eq!(handle(&second), first_handle, "the driver gives it out again");
    for (pool, kept) in [own, pool].into_iter().zip(kept) {
        // The thread still remembers the lane that was closed.
        let block = take(pool, 1, MIB, &second);
        assert_ne!(block, kept);
        give(kept, MIB, &second);
        give(block, MIB, &second);
    }
    assert_eq!(gone(1, &second), 0);
    assert_eq!(vmm_pool_destroy(pool), 0);
}

#[test]
fn a_recorded_stream_is_waited_for() {
    let (_alone, sim) = machine();
    let driver: Arc<dyn Driver> = sim.clone();
    let [home, other] = [(); 2].map(|()| Stream::create(&driver, DeviceId(2)).unwrap());
    let mut own = std::ptr::null_mut();
    // SAFETY: a live place for the answer.
    assert_eq!(unsafe { vmm_pool_default(2, &raw mut own) }, 0);
    let (freed, recorded) = (take(own, 2, MIB, &home), take(own, 2, MIB, &home));
    let hold = sim.hold(DeviceId(2), other.handle()).unwrap();
    give(freed, MIB, &other);
    // SAFETY: both streams are alive.
    assert_eq!(unsafe { vmm_pool_record_stream(recorded, handle(&other)) }, 0);
    give(recorded, MIB, &home);
    assert_eq!((stats(2).limbo_buffers, stats(2).buffers), (2, 0));
    sim.release_hold(hold);
    // What the background thread has in its hands just now.
    let deadline = Instant::now() + Duration::from_secs(20);
    while stats(2).held_bytes > 0 {
        assert!(Instant::now() < deadline, "not in 20 s");
        // SAFETY: nobody asks for the bytes.
        assert_eq!(unsafe { vmm_pool_trim(own, 2, std::ptr::null_mut()) }, 0);
    }
    assert_eq!((gone(2, &home), gone(2, &other)), (0, 0));
}

#[test]
fn warm_pairs_of_several_pools_and_streams_make_no_driver_call() {
    let (_alone, sim) = machine();
    let driver: Arc<dyn Driver> = sim.clone();
    let streams = [(); 2].map(|()| Stream::create(&driver, DeviceId(3)).unwrap());
    let pools = [create(3), create(3)];
    // A pool that never had much alive moves its few chunks to the stream that needs them.
    for pool in pools {
        give(take(pool, 3, 64 * MIB, &streams[0]), 64 * MIB, &streams[0]);
    }
    let pairs = || {
        for (pool, stream) in pools.iter().flat_map(|pool| streams.iter().map(move |it| (pool, it)))
        {
            give(take(*pool, 3, 700, stream), 700, stream);
        }
    };
    pairs();
    // What growth has left at second addresses is unmapped when somebody looks.
    for pool in pools {
        // SAFETY: nobody asks for the bytes.
        assert_eq!(unsafe { vmm_pool_trim(pool, 3, std::ptr::null_mut()) }, 0);
    }
    pairs();
    pairs();
    let before = driver.ledger().snapshot();
    (0..100).for_each(|_| pairs());
    let calls = driver.ledger().snapshot().since(&before);
    assert_eq!(calls.total(), 0, "{calls}");
    for stream in &streams {
        assert_eq!(gone(3, stream), 0);
    }
    for pool in pools {
        assert_eq!(vmm_pool_destroy(pool), 0);
    }
}
