//! A `PoolSlice` in the place of a `CudaSlice`: bytes, kernels, views, copies, errors, and what it
//! costs.

use cudarc::driver::{CudaContext, DevicePtr, DeviceSlice, PushKernelArg, sys};
use vmm_pool_cudarc::{CudaPool, Error, PoolSlice};

use crate::common::{Kernels, StandIn, go, in_children};

/// Calls that allocate and free.
const MEMORY: [&str; 8] = [
    "cuMemAlloc_v2",
    "cuMemAllocAsync",
    "cuMemFree_v2",
    "cuMemFreeAsync",
    "cuMemCreate",
    "cuMemMap",
    "cuMemUnmap",
    "cuMemRelease",
];
/// Calls that order.
const ORDER: [&str; 5] = [
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventRecord",
    "cuStreamWaitEvent",
    "cuStreamSynchronize",
];

in_children! {
    fn bytes_go_in_and_out_by_every_way() {
        let context = CudaContext::new(0).unwrap();
        let (stream, kernels) = (context.default_stream(), Kernels::load(&context));
        let pool = CudaPool::new(&context).unwrap();
        let numbers: Vec<u32> = (0..1000).collect();

        let zeros = pool.alloc_zeros::<u32>(&stream, 1000).unwrap();
        assert_eq!(stream.clone_dtoh(&zeros).unwrap(), vec![0; 1000]);
        let a = pool.clone_htod(&stream, &numbers).unwrap();
        assert_eq!((a.len(), a.num_bytes(), a.ordinal()), (1000, 4000, 0));
        let b = a.try_clone().unwrap();
        assert_ne!(a.device_ptr(&stream).0, b.device_ptr(&stream).0);
        let mut c = zeros;
        let n = 1000_u64;
        let mut launch = stream.launch_builder(&kernels.add);
        go(launch.arg(&mut c).arg(&a).arg(&b).arg(&n)).unwrap();
        let doubled: Vec<u32> = numbers.iter().map(|number| 2 * number).collect();
        assert_eq!(stream.clone_dtoh(&c).unwrap(), doubled);

        // Views, in both roles and of both kinds of slices.
        let mut theirs = stream.alloc_zeros::<u32>(1000).unwrap();
        stream.memcpy_dtod(&a.slice(500..), &mut theirs.slice_mut(..500)).unwrap();
        stream.memcpy_dtod(&theirs.slice(..500), &mut c.slice_mut(500..)).unwrap();
        let (first, mut second) = c.split_at_mut(500);
        stream.memset_zeros(&mut second.slice_mut(499..)).unwrap();
        let half = 500_u64;
        let mut launch = stream.launch_builder(&kernels.add);
        go(launch.arg(&mut second).arg(&first.as_view()).arg(&a.slice(..500)).arg(&half)).unwrap();
        let tripled: Vec<u32> = (0..500).map(|number| 3 * number).collect();
        assert_eq!(stream.clone_dtoh(&c.slice(500..)).unwrap(), tripled);
        stream.memset_zeros(&mut c).unwrap();
        assert_eq!(stream.clone_dtoh(&c.as_view()).unwrap(), vec![0; 1000]);
        assert_eq!(stream.clone_dtoh(&c.clone()).unwrap(), vec![0; 1000]);
        assert!(c.try_slice_mut(..1001).is_none() && c.try_split_at_mut(1001).is_none());
        // SAFETY: any bits are bytes.
        assert_eq!(unsafe { c.transmute_mut::<u8>(4000) }.unwrap().len(), 4000);
    }

    fn nothing_takes_no_memory() {
        let context = CudaContext::new(0).unwrap();
        let stream = context.default_stream();
        let pool = CudaPool::new(&context).unwrap();
        let empty: Vec<PoolSlice<u32>> = vec![
            pool.null(&stream).unwrap(),
            pool.alloc_zeros(&stream, 0).unwrap(),
            pool.clone_htod(&stream, &Vec::new()).unwrap(),
        ];
        for slice in &empty {
            assert!(slice.is_empty() && slice.try_clone().unwrap().is_empty());
        }
        assert_eq!(pool.pool().stats().devices[0].1.held_bytes, 0);
    }

    fn errors_say_what_was_expected_and_change_nothing() {
        let context = CudaContext::new(0).unwrap();
        let stream = context.default_stream();
        let pool = CudaPool::new(&context).unwrap();
        let error = pool.alloc_zeros::<u64>(&stream, usize::MAX / 4).unwrap_err();
        assert!(matches!(error, Error::TooManyElements { element_bytes: 8, .. }), "{error}");
        let error = pool.alloc_zeros::<u8>(&stream, 1 << 50).unwrap_err();
        assert!(matches!(error, Error::Pool(vmm_pool::Error::TooLarge { .. })), "{error}");
        let error = pool.alloc_zeros::<u8>(&stream, 200 << 30).unwrap_err();
        assert!(error.is_out_of_memory(), "{error}");
        let error = CudaPool::builder().build().unwrap_err();
        assert!(matches!(error, Error::NoContext), "{error}");

        let neighbour = CudaContext::new(1).unwrap();
        let error = pool.alloc_zeros::<u8>(&neighbour.default_stream(), 1).unwrap_err();
        assert!(matches!(error, Error::Pool(vmm_pool::Error::UnknownDevice { .. })), "{error}");

        // SAFETY: the device's context is live; what cudarc does to it at its drop is prevented.
        let foreign = unsafe {
            CudaContext::from_raw_context(0, context.cu_device(), context.cu_ctx())
        };
        let foreign = foreign.unwrap();
        let error = CudaPool::new(&foreign).unwrap_err();
        assert!(matches!(error, Error::NotPrimary { .. }), "{error}");
        std::mem::forget(foreign);

        // An earlier error comes out as cudarc gives it, and once.
        let earlier = cudarc::driver::DriverError(sys::CUresult::CUDA_ERROR_NOT_READY);
        context.record_err::<()>(Err(earlier));
        let error = pool.alloc_zeros::<u8>(&stream, 1).unwrap_err();
        assert!(matches!(error, Error::Cudarc(error) if error == earlier), "{error}");
        assert!(pool.alloc_zeros::<u8>(&stream, 1).is_ok());
    }

    fn one_stream_costs_no_call_more_than_with_cudarc() {
        let context = CudaContext::new(0).unwrap();
        let kernels = Kernels::load(&context);
        let pool = CudaPool::new(&context).unwrap();
        let standin = StandIn::open();
        // Without cudarc's events, then with them.
        for stream in [context.default_stream(), context.new_stream().unwrap()] {
            let n = 256_u64;
            let launch = |x: &mut _, y: &mut PoolSlice<u32>, theirs: bool| -> [u64; 5] {
                let _: &mut cudarc::driver::CudaSlice<u32> = x;
                let before = standin.calls(ORDER);
                let mut launch = stream.launch_builder(&kernels.add);
                match theirs {
                    true => go(launch.arg(&mut *x).arg(&*y).arg(&*y).arg(&n)).unwrap(),
                    false => go(launch.arg(&mut *y).arg(&*x).arg(&*x).arg(&n)).unwrap(),
                }
                let after = standin.calls(ORDER);
                std::array::from_fn(|at| after[at] - before[at])
            };
            let mut stock = stream.alloc_zeros::<u32>(256).unwrap();
            let mut ours = pool.alloc_zeros::<u32>(&stream, 256).unwrap();
            // Either as what is written, and as what is read twice.
            let (theirs, mine) =
                (launch(&mut stock, &mut ours, true), launch(&mut stock, &mut ours, false));
            assert_eq!(theirs, mine);

            let before = (standin.calls(MEMORY), standin.calls(ORDER));
            drop(stream.alloc_zeros::<u32>(256).unwrap());
            let between = (standin.calls(MEMORY), standin.calls(ORDER));
            drop(pool.alloc_zeros::<u32>(&stream, 256).unwrap());
            let after = (standin.calls(MEMORY), standin.calls(ORDER));
            assert_ne!(before.0, between.0, "the harness sees allocations");
            assert_eq!(between.0, after.0, "a warm slice takes no call for memory");
            let theirs: [u64; 5] = std::array::from_fn(|at| between.1[at] - before.1[at]);
            let mine: [u64; 5] = std::array::from_fn(|at| after.1[at] - between.1[at]);
            assert_eq!(theirs, mine, "{ORDER:?}");
        }
    }
}
