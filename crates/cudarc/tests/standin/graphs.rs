//! Memory of captured graphs.

use cudarc::driver::{CudaContext, DevicePtr, PushKernelArg, sys};
use vmm_pool_cudarc::CudaPool;

use crate::common::{Kernels, go, in_children};

const N: usize = 64;
const N_ARG: u64 = N as u64;

in_children! {
    fn memory_of_a_capture_is_the_graphs_until_it_is_gone() {
        let context = CudaContext::new(0).unwrap();
        // Events of earlier uses cannot be waited for in a capture, with cudarc's own slices neither.
        // SAFETY: one stream is used at a time, and waited for in between.
        unsafe { context.disable_event_tracking() };
        let stream = context.new_stream().unwrap();
        let kernels = Kernels::load(&context);
        let pool = CudaPool::new(&context).unwrap();
        let source = pool.clone_htod(&stream, &[7_u32; N]).unwrap();
        let mut target = pool.alloc_zeros::<u32>(&stream, N).unwrap();
        drop(pool.alloc_zeros::<u32>(&stream, N).unwrap()); // a warm hole, that the capture must not get
        stream.synchronize().unwrap();

        let scope = pool.capture(&stream).unwrap();
        stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
        // SAFETY: it is written before it is read.
        let mut scratch = unsafe { pool.alloc::<u32>(&stream, N) }.unwrap();
        let address = scratch.device_ptr(&stream).0;
        let mut launch = stream.launch_builder(&kernels.copy);
        go(launch.arg(&mut scratch).arg(&source).arg(&N_ARG)).unwrap();
        let mut launch = stream.launch_builder(&kernels.add);
        go(launch.arg(&mut target).arg(&scratch).arg(&source).arg(&N_ARG)).unwrap();
        drop(scratch);
        let graph = stream.end_capture(sys::CUgraphInstantiate_flags(0)).unwrap().unwrap();
        let memory = scope.finish();
        memory.keep(source.into_buffer());
        assert!(memory.mapped_bytes() > 0);

        // Nobody else gets the scratch memory, so a launch harms nobody.
        let others: Vec<_> =
            (0..16).map(|_| pool.clone_htod(&stream, &[1_u32; N]).unwrap()).collect();
        assert!(others.iter().all(|other| other.device_ptr(&stream).0 != address));
        for _ in 0..2 {
            stream.memset_zeros(&mut target).unwrap();
            graph.launch().unwrap();
            assert_eq!(stream.clone_dtoh(&target).unwrap(), [14; N]);
        }
        for other in &others {
            assert_eq!(stream.clone_dtoh(other).unwrap(), [1; N]);
        }
        drop((graph, memory));
        assert_eq!(pool.pool().stats().devices[0].1.private_bytes, 0);
    }

    fn without_a_scope_a_capture_is_not_harmed() {
        let context = CudaContext::new(0).unwrap();
        // SAFETY: one stream is used at a time, and waited for in between.
        unsafe { context.disable_event_tracking() };
        let stream = context.new_stream().unwrap();
        let pool = CudaPool::new(&context).unwrap();
        stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL).unwrap();
        let mut cold = pool.alloc_zeros::<u32>(&stream, N).unwrap();
        drop(pool.alloc_zeros::<u32>(&stream, N).unwrap());
        stream.memset_zeros(&mut cold).unwrap();
        let graph = stream.end_capture(sys::CUgraphInstantiate_flags(0)).unwrap().unwrap();
        stream.memcpy_htod(&[3; N], &mut cold).unwrap();
        graph.launch().unwrap();
        assert_eq!(stream.clone_dtoh(&cold).unwrap(), [0; N]);
    }
}
