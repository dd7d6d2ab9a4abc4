//! Ends in every order: threads, handles, forks, exits; and errors that wait in a context.

use std::sync::OnceLock;

use cudarc::driver::{CudaContext, DevicePtr, DriverError, PushKernelArg, sys};
use vmm_pool_cudarc::{CudaPool, PoolSlice};

use crate::common::{Kernels, StandIn, go, in_children};

const N: usize = 64;

/// Still there when the process ends.
static LEFT: OnceLock<(PoolSlice<u32>, CudaPool)> = OnceLock::new();

std::thread_local! {
    /// Dropped when its thread ends, the main one's at exit among them.
    static LATE: std::cell::RefCell<Option<PoolSlice<u32>>> = const { std::cell::RefCell::new(None) };
}

in_children! {
    fn every_order_of_drops_is_fine() {
        for order in 0..6 {
            let context = CudaContext::new(0).unwrap();
            let stream = context.new_stream().unwrap();
            let pool = CudaPool::new(&context).unwrap();
            let slice = pool.clone_htod(&stream, &[1_u32; N]).unwrap();
            let view = slice.on(&stream).unwrap();
            assert_eq!(stream.clone_dtoh(&view).unwrap(), [1; N]);
            drop(view);
            let watch = context.clone();
            match order {
                0 => drop((slice, pool, stream, context)),
                1 => drop((pool, slice, stream, context)),
                2 => drop((context, stream, pool, slice)),
                3 => drop((stream, context, slice, pool)),
                4 => drop((pool, context, stream, slice)),
                _ => drop((stream, pool, context, slice)),
            }
            assert!(watch.check_err().is_ok());
            assert_eq!(std::sync::Arc::strong_count(&watch), 1, "everything is let go of");
        }
    }

    fn slices_end_in_any_thread_with_any_context() {
        let contexts = [CudaContext::new(0).unwrap(), CudaContext::new(1).unwrap()];
        let stream = contexts[0].new_stream().unwrap();
        let pool = CudaPool::new(&contexts[0]).unwrap();
        let new = || pool.clone_htod(&stream, &[1_u32; N]).unwrap();
        let (one, two, three) = (new(), new(), new());
        std::thread::spawn(move || drop(one)).join().unwrap();
        contexts[1].bind_to_thread().unwrap();
        drop(two);
        // SAFETY: no context is one that may be set.
        unsafe { cudarc::driver::result::ctx::set_current(std::ptr::null_mut()) }.unwrap();
        drop(three);
        assert!(contexts.iter().all(|context| context.check_err().is_ok()));
        let threads: Vec<_> = (0..4_u32)
            .map(|number| {
                let (pool, stream) = (pool.clone(), stream.clone());
                std::thread::spawn(move || {
                    for round in 0..50 {
                        let value = 100 * number + round;
                        let slice = pool.clone_htod(&stream, &[value; N]).unwrap();
                        let copy = slice.try_clone().unwrap();
                        drop(slice);
                        assert_eq!(stream.clone_dtoh(&copy).unwrap(), [value; N]);
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(pool.pool().stats().devices[0].1.live_bytes, 0);
    }

    fn default_streams_of_threads_have_lanes_of_their_own() {
        let context = CudaContext::new(0).unwrap();
        let pool = CudaPool::new(&context).unwrap();
        let stream = context.per_thread_stream();
        let mine = pool.clone_htod(&stream, &[1_u32; N]).unwrap();
        let theirs = {
            let (pool, context) = (pool.clone(), context.clone());
            let work = move || {
                let stream = context.per_thread_stream();
                let slice = pool.clone_htod(&stream, &[2_u32; N]).unwrap();
                stream.synchronize().unwrap();
                slice
            };
            std::thread::spawn(work).join().unwrap()
        };
        assert_eq!(stream.clone_dtoh(&mine).unwrap(), [1; N]);
        assert_eq!(stream.clone_dtoh(&theirs).unwrap(), [2; N]);
        let pages = [&mine, &theirs].map(|slice| slice.device_ptr(&stream).0 >> 21);
        assert_ne!(pages[0], pages[1], "no chunk in common");
        drop((mine, theirs));
        assert!(context.check_err().is_ok());
        assert_eq!(pool.pool().stats().devices[0].1.live_bytes, 0);
    }

    fn a_forked_child_lets_go_of_all_in_silence() {
        let contexts = [CudaContext::new(0).unwrap(), CudaContext::new(1).unwrap()];
        let [own, guest] = [0, 1].map(|at: usize| contexts[at].new_stream().unwrap());
        let builder = CudaPool::builder().context(&contexts[0]).context(&contexts[1]);
        let pool = builder.share().build().unwrap();
        let slice = pool.clone_htod(&own, &[1_u32; N]).unwrap();
        drop(slice.on(&guest).unwrap());
        let other = contexts[0].new_stream().unwrap();
        for stream in [&own, &other] {
            assert_eq!(stream.clone_dtoh(&slice).unwrap(), [1; N]);
        }
        // SAFETY: the child ends by `_exit`, and does nothing before but drop.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let refused = pool.alloc_zeros::<u32>(&own, N).is_err();
            let count = std::sync::Arc::strong_count(&own);
            drop((slice, pool));
            // What would call the driver when it is dropped is not dropped.
            let is_kept = std::sync::Arc::strong_count(&own) == count;
            // SAFETY: ends this process only.
            unsafe { libc::_exit(if refused && is_kept { 0 } else { 1 }) };
        }
        let mut status = -1;
        // SAFETY: the place is a number of this frame.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0);
        assert_eq!(own.clone_dtoh(&slice).unwrap(), [1; N], "the parent goes on");
    }

    fn what_is_left_at_exit_ends_with_the_process() {
        let context = CudaContext::new(0).unwrap();
        let stream = context.new_stream().unwrap();
        let pool = CudaPool::new(&context).unwrap();
        let new = || pool.clone_htod(&stream, &[1_u32; N]).unwrap();
        let late = new();
        LATE.with(|place| *place.borrow_mut() = Some(late));
        assert!(LEFT.set((new(), pool.clone())).is_ok());
        // The test harness exits the process after this.
    }

    fn an_error_that_waits_in_a_context_stays_there_and_stops_no_wait() {
        let context = CudaContext::new(0).unwrap();
        let [own, reader] = [0, 1].map(|_| context.new_stream().unwrap());
        let (kernels, standin) = (Kernels::load(&context), StandIn::open());
        let pool = CudaPool::new(&context).unwrap();
        let mut copy = own.alloc_zeros::<u32>(N).unwrap();
        let x = pool.clone_htod(&own, &[1_u32; N]).unwrap();
        let address = x.device_ptr(&own).0;
        own.synchronize().unwrap();
        standin.hold(&reader);
        let n = N as u64;
        go(reader.launch_builder(&kernels.copy).arg(&mut copy).arg(&x).arg(&n)).unwrap();
        let earlier = DriverError(sys::CUresult::CUDA_ERROR_NOT_READY);
        context.record_err::<()>(Err(earlier));
        drop(x);
        assert_eq!(context.check_err(), Err(earlier));
        // SAFETY: it is written before it is read.
        let mut y = unsafe { pool.alloc::<u32>(&own, N) }.unwrap();
        assert_eq!(y.device_ptr(&own).0, address);
        own.memset_zeros(&mut y).unwrap();
        standin.release(&reader);
        context.synchronize().unwrap();
        assert_eq!(own.clone_dtoh(&copy).unwrap(), [1; N]);
    }

    fn a_pool_that_somebody_else_has_goes_on() {
        let context = CudaContext::new(0).unwrap();
        let stream = context.new_stream().unwrap();
        let first = CudaPool::new(&context).unwrap();
        let pool = first.pool().clone();
        let slice = first.clone_htod(&stream, &[1_u32; N]).unwrap();
        drop((first, slice));
        let second = CudaPool::over(pool.clone());
        let slice = second.clone_htod(&stream, &[2_u32; N]).unwrap();
        assert_eq!(stream.clone_dtoh(&slice).unwrap(), [2; N]);
        // Closed behind its back, the lane is made anew.
        assert!(CudaPool::over(pool.clone()).close(&stream));
        let lane = second.lane(&stream).unwrap();
        assert!(pool.close_lane(lane.stream()));
        let slice = second.clone_htod(&stream, &[3_u32; N]).unwrap();
        assert_eq!(stream.clone_dtoh(&slice).unwrap(), [3; N]);
    }
}
