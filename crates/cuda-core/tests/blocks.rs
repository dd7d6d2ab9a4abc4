//! Blocks of a simulated device under cuda-core's books; and, where there is a GPU, under its calls.

#![allow(clippy::unwrap_used, reason = "a failure ends the test")]

use std::sync::Arc;

use cuda_core::{Context, DeviceBuffer};
use vmm_pool::{Lane, Pool};
use vmm_pool_cuda_core::{Failure, PoolBlock, lane_of};
use vmm_sys::cuda::Cuda;
use vmm_sys::object::Stream;
use vmm_sys::sim::Sim;
use vmm_sys::{DeviceId, Driver};

/// A pool of a simulated device, and a context that is only counted.
fn simulated() -> (Pool, Lane, Arc<Context>) {
    let driver: Arc<dyn Driver> = Sim::builder().build();
    let pool = Pool::builder(driver.clone()).build().unwrap();
    let lane = pool.lane(&Stream::create(&driver, DeviceId(0)).unwrap()).unwrap();
    (pool, lane, context(0))
}

fn context(ordinal: usize) -> Arc<Context> {
    // SAFETY: never handed to the driver; borrowed, so not released either.
    unsafe { Context::borrow_raw(std::ptr::without_provenance_mut(0x1000), 0, ordinal) }
}

fn live_bytes(pool: &Pool) -> u64 {
    pool.device_stats(DeviceId(0)).unwrap().live_bytes
}

#[test]
fn a_block_lives_as_long_as_views_and_accesses() {
    let (pool, lane, context) = simulated();
    let block = PoolBlock::alloc(&lane, &context, 4000).unwrap();
    let storage = block.into_storage();
    assert_eq!(storage.len_bytes(), 4000);
    assert_eq!(storage.cu_deviceptr() % 256, 0);
    let held = live_bytes(&pool);
    assert!(held >= 4000);
    let part = storage.slice_bytes(1000, 500).unwrap();
    let access = storage.acquire_on_stream(7, true, false).unwrap();
    drop(storage);
    assert_eq!(live_bytes(&pool), held);
    drop(part);
    assert_eq!(live_bytes(&pool), held, "work is under way");
    drop(access);
    assert_eq!(live_bytes(&pool), 0);
}

#[test]
fn a_context_of_another_device_is_refused() {
    let (pool, lane, _) = simulated();
    let refused = PoolBlock::alloc(&lane, &context(3), 4000).unwrap_err();
    assert!(matches!(refused, Failure::OtherDevice { context: 3, memory: 0 }), "{refused}");
    assert_eq!(live_bytes(&pool), 0);
}

#[test]
fn no_bytes_are_an_empty_view() {
    let (_pool, lane, context) = simulated();
    let storage = PoolBlock::alloc(&lane, &context, 0).unwrap().into_storage();
    assert!(storage.is_empty());
    assert_eq!(storage.cu_deviceptr(), 0);
}

#[test]
fn numbers_go_to_a_gpu_and_back() {
    let Ok(driver) = Cuda::open() else {
        println!("skipped: no GPU");
        return;
    };
    let context = Context::new(0).unwrap();
    let (first, second) = (context.new_stream().unwrap(), context.new_stream().unwrap());
    let pool = Pool::builder(driver).build().unwrap();
    let lane = lane_of(&pool, &first).unwrap();
    for round in 0..50_u32 {
        let host: Vec<u32> = (0..1000 + 37 * round).map(|n| n ^ round).collect();
        let storage =
            PoolBlock::alloc(&lane, &context, 4 * host.len() as u64).unwrap().into_storage();
        // SAFETY: written before it is read, and by this view only.
        let mut numbers =
            unsafe { DeviceBuffer::<u32>::from_storage_copy(storage, host.len()).unwrap() };
        numbers.copy_from_host(&first, &host).unwrap();
        assert_eq!(numbers.to_host_vec(&second).unwrap(), host);
    }
    context.synchronize().unwrap();
}
