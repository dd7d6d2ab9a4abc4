//! Elastic slices.

use cudarc::driver::{CudaContext, DevicePtr, DeviceSlice, PushKernelArg};
use vmm_pool::{Move, Place};
use vmm_pool_cudarc::{CudaPool, Error};
use vmm_sys::DeviceId;

use crate::common::{Kernels, StandIn, go, in_children};

const N: usize = 64;
const N_ARG: u64 = N as u64;
const CHUNK: usize = (2 << 20) / 4;

in_children! {
    fn it_grows_shrinks_and_keeps_its_address() {
        let context = CudaContext::new(0).unwrap();
        let (stream, kernels) = (context.default_stream(), Kernels::load(&context));
        let pool = CudaPool::new(&context).unwrap();
        let buffer = pool.pool().elastic(DeviceId(0)).chunk_bytes(4 * CHUNK as u64);
        let buffer = buffer.capacity_bytes(4 << 30).build().unwrap();
        let mut x = pool.elastic_over::<u32>(&stream, buffer).unwrap();
        assert!(x.is_empty() && x.capacity() == 1 << 30);
        x.grow_zeros(N).unwrap();
        let address = x.view(&stream).unwrap().device_ptr(&stream).0;
        {
            let mut view = x.view_mut(&stream).unwrap();
            assert_eq!(view.len(), N);
            let value = 3_u32;
            go(stream.launch_builder(&kernels.fill).arg(&mut view).arg(&value).arg(&N_ARG)).unwrap();
            stream.memset_zeros(&mut view.try_slice_mut(..1).unwrap()).unwrap();
            assert!(view.try_slice_mut(..=N).is_none() && view.try_slice_mut(N + 1..).is_none());
        }
        x.grow_zeros(8 * CHUNK).unwrap();
        assert_eq!((x.len(), x.buffer().committed_bytes()), (8 * CHUNK, 32 * CHUNK as u64));
        {
            let view = x.view(&stream).unwrap();
            assert_eq!(view.device_ptr(&stream).0, address);
            let bytes = stream.clone_dtoh(&view).unwrap();
            assert_eq!((bytes.len(), bytes[0], bytes[1], bytes[N]), (8 * CHUNK, 0, 3, 0));
            assert_eq!(stream.clone_dtoh(&view.try_slice(1..3).unwrap()).unwrap(), [3, 3]);
            assert!(view.try_slice(..8 * CHUNK + 1).is_none());
            let mut copy = pool.alloc_zeros::<u32>(&stream, N).unwrap();
            go(stream.launch_builder(&kernels.copy).arg(&mut copy).arg(&view).arg(&N_ARG)).unwrap();
            assert_eq!(stream.clone_dtoh(&copy).unwrap()[1..], [3; N - 1]);
            assert_eq!(stream.clone_dtoh(&view.as_view()).unwrap().len(), 8 * CHUNK);
        }
        x.shrink(CHUNK).unwrap();
        assert_eq!((x.len(), x.buffer().committed_bytes()), (CHUNK, 4 * CHUNK as u64));
        assert_eq!(x.view(&stream).unwrap().len(), CHUNK);
        // SAFETY: nothing is read.
        let beyond = unsafe { x.grow(2 << 30) }.unwrap_err();
        assert!(matches!(beyond, Error::Pool(vmm_pool::Error::Elastic(_))), "{beyond}");
        assert_eq!(x.len(), CHUNK);
        let error = pool.elastic::<u64>(&stream, usize::MAX / 4).unwrap_err();
        assert!(matches!(error, Error::TooManyElements { .. }), "{error}");
    }

    fn readers_on_two_streams_hold_up_writes_and_memory_that_leaves() {
        for first in [false, true] {
        let context = CudaContext::new(0).unwrap();
        let [own, one, two] = [0; 3].map(|_| context.new_stream().unwrap());
        let (kernels, standin) = (Kernels::load(&context), StandIn::open());
        let pool = CudaPool::new(&context).unwrap();
        let mut x = pool.elastic::<u32>(&own, CHUNK).unwrap();
        x.grow_zeros(N).unwrap();
        let mut copies = [0, 1].map(|_| own.clone_htod(&[9_u32; N]).unwrap());
        own.synchronize().unwrap();
        for (stream, copy) in [&one, &two].into_iter().zip(&mut copies) {
            standin.hold(stream);
            let view = x.view(stream).unwrap();
            go(stream.launch_builder(&kernels.copy).arg(copy).arg(&view).arg(&N_ARG)).unwrap();
        }
        own.memcpy_htod(&[1; N], &mut x.view_mut(&own).unwrap()).unwrap();
        x.shrink(0).unwrap();
        drop(x);
        for stream in if first { [&one, &two] } else { [&two, &one] } {
            standin.release(stream);
            stream.synchronize().unwrap();
        }
        context.synchronize().unwrap();
        for copy in &copies {
            assert_eq!(own.clone_dtoh(copy).unwrap(), [0; N]);
        }
        }
    }

    fn it_moves_to_a_second_gpu_and_is_used_from_both() {
        let contexts = [CudaContext::new(0).unwrap(), CudaContext::new(1).unwrap()];
        let builder = CudaPool::builder().context(&contexts[0]).context(&contexts[1]);
        let pool = builder.share().build().unwrap();
        let [home, guest] = [0, 1].map(|at: usize| contexts[at].default_stream());
        let mut x = pool.elastic::<u32>(&home, CHUNK).unwrap();
        x.grow_zeros(N).unwrap();
        home.memcpy_htod(&[4; N], &mut x.view_mut(&home).unwrap()).unwrap();
        home.synchronize().unwrap();
        x.buffer().migrate(Move::to(Place::Device(DeviceId(1)))).unwrap();
        for stream in [&home, &guest] {
            assert_eq!(stream.clone_dtoh(&x.view(stream).unwrap()).unwrap(), [4; N]);
        }
        guest.memset_zeros(&mut x.view_mut(&guest).unwrap()).unwrap();
        assert_eq!(home.clone_dtoh(&x.view(&home).unwrap()).unwrap(), [0; N]);

        let buffer = pool.pool().elastic(DeviceId(0)).access([]).capacity_bytes(4 << 20);
        let y = pool.elastic_over::<u32>(&home, buffer.build().unwrap()).unwrap();
        assert!(matches!(y.view(&guest), Err(Error::NoAccess { .. })));
    }

    fn a_stream_that_is_gone_is_not_destroyed_while_a_view_is_alive() {
        let context = CudaContext::new(0).unwrap();
        let own = context.default_stream();
        let pool = CudaPool::new(&context).unwrap();
        let standin = StandIn::open();
        let mut x = pool.elastic::<u32>(&own, CHUNK).unwrap();
        x.grow_zeros(N).unwrap();
        let view = x.view(&context.new_stream().unwrap()).unwrap();
        let destroyed = || standin.calls(["cuStreamDestroy_v2"]);
        let before = destroyed();
        // Lanes of streams that are gone are looked for.
        drop(pool.alloc_zeros::<u32>(&context.new_stream().unwrap(), N).unwrap());
        drop(pool.alloc_zeros::<u32>(&context.new_stream().unwrap(), N).unwrap());
        assert_eq!(destroyed()[0], before[0] + 1, "of the three streams one that nobody uses");
        drop(view);
        x.shrink(0).unwrap();
        drop((x, pool));
        assert!(context.check_err().is_ok());
        assert_eq!(destroyed()[0], before[0] + 3);
    }
}
