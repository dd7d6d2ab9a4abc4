//! A slice that a second GPU uses.

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr, DeviceSlice, PushKernelArg};
use vmm_pool_cudarc::{CudaPool, Error, PoolSlice};
use vmm_sys::{Access, DeviceId};

use crate::common::{Kernels, StandIn, go, in_children};

const N: usize = 64;
const N_ARG: u64 = N as u64;

struct Gpu {
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    kernels: Kernels,
}

fn gpu(ordinal: usize, has_streams: bool) -> Gpu {
    let context = CudaContext::new(ordinal).unwrap();
    let stream = if has_streams { context.new_stream().unwrap() } else { context.default_stream() };
    let kernels = Kernels::load(&context);
    Gpu { context, stream, kernels }
}

impl Gpu {
    fn theirs(&self) -> CudaSlice<u32> {
        self.stream.alloc_zeros(N).unwrap()
    }

    fn bytes(&self, slice: &impl DevicePtr<u32>) -> Vec<u32> {
        let bytes = self.stream.clone_dtoh(slice).unwrap();
        self.stream.synchronize().unwrap();
        bytes
    }
}

/// Two GPUs that share, and a slice of ones on the first. With cudarc's events, or without.
fn scene(has_streams: bool) -> ([Gpu; 2], CudaPool, PoolSlice<u32>, StandIn) {
    let gpus = [gpu(0, has_streams), gpu(1, has_streams)];
    let builder = CudaPool::builder().context(&gpus[0].context).context(&gpus[1].context);
    let pool = builder.share().build().unwrap();
    let x = pool.clone_htod(&gpus[0].stream, &[1_u32; N]).unwrap();
    gpus[0].stream.synchronize().unwrap();
    (gpus, pool, x, StandIn::open())
}

fn fill(gpu: &Gpu, x: &mut PoolSlice<u32>, value: u32) {
    go(gpu.stream.launch_builder(&gpu.kernels.fill).arg(x).arg(&value).arg(&N_ARG)).unwrap();
}

fn copy_on(gpu: &Gpu, x: &PoolSlice<u32>, target: &mut CudaSlice<u32>) {
    let view = x.on(&gpu.stream).unwrap();
    assert_eq!((view.len(), view.stream().context().ordinal()), (N, 1));
    go(gpu.stream.launch_builder(&gpu.kernels.copy).arg(target).arg(&view).arg(&N_ARG)).unwrap();
}

in_children! {
    fn reads_there_hold_up_writes_here() {
        for has_streams in [false, true] {
            let ([home, guest], _pool, mut x, standin) = scene(has_streams);
            let mut copy = guest.theirs();
            guest.stream.synchronize().unwrap();
            for value in [1, 2] {
                standin.hold(&guest.stream);
                copy_on(&guest, &x, &mut copy);
                fill(&home, &mut x, value + 1);
                standin.release(&guest.stream);
                home.stream.synchronize().unwrap();
                assert_eq!(guest.bytes(&copy), [value; N]);
                assert_eq!(home.bytes(&x), [value + 1; N]);
            }
            assert!(home.context.check_err().is_ok() && guest.context.check_err().is_ok());
        }
    }

    fn reads_there_hold_up_the_memory_after_the_drop() {
        for has_streams in [false, true] {
            let ([home, guest], pool, x, standin) = scene(has_streams);
            let (mut copy, address) = (guest.theirs(), x.device_ptr(&home.stream).0);
            guest.stream.synchronize().unwrap();
            standin.hold(&guest.stream);
            copy_on(&guest, &x, &mut copy);
            drop(x);
            // SAFETY: it is written before it is read.
            let mut y = unsafe { pool.alloc::<u32>(&home.stream, N) }.unwrap();
            assert_eq!(y.device_ptr(&home.stream).0, address);
            fill(&home, &mut y, 9);
            standin.release(&guest.stream);
            home.stream.synchronize().unwrap();
            assert_eq!(guest.bytes(&copy), [1; N]);
        }
    }

    fn writes_here_come_before_reads_there() {
        for has_streams in [false, true] {
            let ([home, guest], _pool, mut x, standin) = scene(has_streams);
            let mut copy = guest.theirs();
            standin.hold(&home.stream);
            fill(&home, &mut x, 2);
            copy_on(&guest, &x, &mut copy);
            standin.release(&home.stream);
            home.stream.synchronize().unwrap();
            assert_eq!(guest.bytes(&copy), [2; N]);
        }
    }

    fn writes_there_come_before_reads_here() {
        for has_streams in [false, true] {
            let ([home, guest], _pool, mut x, standin) = scene(has_streams);
            standin.hold(&guest.stream);
            {
                let mut view = x.on_mut(&guest.stream).unwrap();
                let value = 5_u32;
                let mut launch = guest.stream.launch_builder(&guest.kernels.fill);
                go(launch.arg(&mut view).arg(&value).arg(&N_ARG)).unwrap();
                guest.stream.memset_zeros(&mut view.try_slice_mut(1..).unwrap()).unwrap();
            }
            let mut copy = home.theirs();
            let mut launch = home.stream.launch_builder(&home.kernels.copy);
            go(launch.arg(&mut copy).arg(&x).arg(&N_ARG)).unwrap();
            standin.release(&guest.stream);
            guest.stream.synchronize().unwrap();
            let mut written = vec![0; N];
            written[0] = 5;
            assert_eq!(home.bytes(&copy), written);
        }
    }

    fn writes_there_wait_for_reads_here() {
        for has_streams in [false, true] {
            let ([home, guest], _pool, mut x, standin) = scene(has_streams);
            let mut copy = home.theirs();
            home.stream.synchronize().unwrap();
            standin.hold(&home.stream);
            let mut launch = home.stream.launch_builder(&home.kernels.copy);
            go(launch.arg(&mut copy).arg(&x).arg(&N_ARG)).unwrap();
            guest.stream.memset_zeros(&mut x.on_mut(&guest.stream).unwrap()).unwrap();
            standin.release(&home.stream);
            guest.stream.synchronize().unwrap();
            assert_eq!(home.bytes(&copy), [1; N]);
            assert_eq!(home.bytes(&x), [0; N]);
        }
    }

    fn copies_there_without_a_view_are_right_and_wait() {
        for has_streams in [false, true] {
            let ([home, guest], _pool, mut x, _) = scene(has_streams);
            assert_eq!(guest.stream.clone_dtoh(&x).unwrap(), [1; N]);
            guest.stream.memcpy_htod(&[3; N], &mut x).unwrap();
            assert_eq!(home.bytes(&x), [3; N]);
            let mut theirs = guest.theirs();
            guest.stream.memcpy_dtod(&x, &mut theirs).unwrap();
            assert_eq!(guest.bytes(&theirs), [3; N]);
            assert!(home.context.check_err().is_ok() && guest.context.check_err().is_ok());
        }
    }

    fn streams_of_the_neighbour_that_come_and_go_are_destroyed_and_waited_for() {
        let ([home, guest], _pool, mut x, standin) = scene(true);
        let (mut copy, mut others) = (guest.theirs(), guest.theirs());
        guest.stream.synchronize().unwrap();
        standin.hold(&guest.stream);
        let before = standin.calls(["cuStreamDestroy_v2"])[0];
        for number in 0..10 {
            let stream = guest.context.new_stream().unwrap();
            if number == 1 {
                stream.join(&guest.stream).unwrap();
            }
            let target = if number == 1 { &mut copy } else { &mut others };
            let view = x.on(&stream).unwrap();
            let mut launch = stream.launch_builder(&guest.kernels.copy);
            go(launch.arg(target).arg(&view).arg(&N_ARG)).unwrap();
        }
        assert_eq!(standin.calls(["cuStreamDestroy_v2"])[0], before + 9);
        fill(&home, &mut x, 2);
        standin.release(&guest.stream);
        home.stream.synchronize().unwrap();
        assert_eq!(guest.bytes(&copy), [1; N]);
    }

    fn a_forgotten_view_is_waited_for_on_the_host() {
        let ([home, guest], _pool, mut x, standin) = scene(true);
        let view = x.on(&guest.stream).unwrap();
        let mut copy = guest.theirs();
        go(guest.stream.launch_builder(&guest.kernels.copy).arg(&mut copy).arg(&view).arg(&N_ARG))
            .unwrap();
        std::mem::forget(view);
        let before = standin.calls(["cuStreamSynchronize"])[0];
        fill(&home, &mut x, 2);
        assert_eq!(standin.calls(["cuStreamSynchronize"])[0], before + 1);
        assert_eq!(guest.bytes(&copy), [1; N]);
    }

    fn who_has_no_access_is_refused_before_anything_is_enqueued() {
        let gpus = [gpu(0, false), gpu(1, false)];
        let builder = CudaPool::builder().context(&gpus[0].context).context(&gpus[1].context);
        let (home, guest) = (DeviceId(0), DeviceId(1));
        let pool = builder.build().unwrap();
        let mut x = pool.clone_htod(&gpus[0].stream, &[1_u32; N]).unwrap();
        let refused = x.on(&gpus[1].stream).unwrap_err();
        let Error::NoAccess { owner, accessor, access, wanted } = refused else {
            panic!("{refused}")
        };
        assert_eq!((owner, accessor), (home, guest));
        assert_eq!((access, wanted), (Access::None, Access::Read));
        pool.pool().grant(home, guest, Access::Read).unwrap();
        let mut copy = gpus[1].theirs();
        copy_on(&gpus[1], &x, &mut copy);
        assert_eq!(gpus[1].bytes(&copy), [1; N]);
        let refused = x.on_mut(&gpus[1].stream).unwrap_err();
        assert!(matches!(refused, Error::NoAccess { access: Access::Read, .. }), "{refused}");
        pool.pool().grant(home, guest, Access::None).unwrap();
        assert!(x.on(&gpus[1].stream).is_err());
    }
}
