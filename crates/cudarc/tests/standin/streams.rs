//! Several streams of one context. Streams are held, so that a wait that is missing shows in the bytes.

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr, PushKernelArg, result};
use vmm_pool_cudarc::{CudaPool, PoolSlice};

use crate::common::{Kernels, StandIn, go, in_children};

const N: usize = 64;
const N_ARG: u64 = N as u64;

/// A context, streams of its own, and what tests need.
struct Scene {
    context: Arc<CudaContext>,
    own: Arc<CudaStream>,
    readers: [Arc<CudaStream>; 2],
    /// Which reader goes on first, and which then.
    order: [usize; 2],
    kernels: Kernels,
    pool: CudaPool,
    standin: StandIn,
}

/// Either reader may be the one that is not waited for.
const ORDERS: [[usize; 2]; 2] = [[1, 0], [0, 1]];

fn scene(order: [usize; 2]) -> Scene {
    let context = CudaContext::new(0).unwrap();
    let new = || context.new_stream().unwrap();
    let (own, readers) = (new(), [new(), new()]);
    let pool = CudaPool::new(&context).unwrap();
    let (kernels, standin) = (Kernels::load(&context), StandIn::open());
    Scene { context, own, readers, order, kernels, pool, standin }
}

impl Scene {
    fn ours(&self, value: u32) -> PoolSlice<u32> {
        self.pool.clone_htod(&self.own, &[value; N]).unwrap()
    }

    fn theirs(&self, value: u32) -> CudaSlice<u32> {
        self.own.clone_htod(&[value; N]).unwrap()
    }

    /// Both readers are held, and what they are to do with it.
    fn hold(&self) {
        self.own.synchronize().unwrap();
        self.readers.iter().for_each(|stream| self.standin.hold(stream));
    }

    /// One reader goes on, and whoever waits for it only; then the other.
    fn release(&self) {
        for reader in self.order.map(|at| &self.readers[at]) {
            self.standin.release(reader);
            reader.synchronize().unwrap();
        }
        self.context.synchronize().unwrap();
    }

    fn bytes(&self, slice: &impl DevicePtr<u32>) -> Vec<u32> {
        let bytes = self.own.clone_dtoh(slice).unwrap();
        self.own.synchronize().unwrap();
        bytes
    }
}

/// Copies `x` to slices of cudarc by a kernel on each of two held streams.
macro_rules! read_twice {
    ($scene:ident, $x:expr) => {{
        let mut copies = [$scene.theirs(0), $scene.theirs(0)];
        $scene.hold();
        for (stream, copy) in $scene.readers.iter().zip(&mut copies) {
            let mut launch = stream.launch_builder(&$scene.kernels.copy);
            go(launch.arg(copy).arg($x).arg(&N_ARG)).unwrap();
        }
        copies
    }};
}

macro_rules! overwrite {
    ($scene:ident, $x:expr, $value:expr) => {{
        let value: u32 = $value;
        let mut launch = $scene.own.launch_builder(&$scene.kernels.fill);
        go(launch.arg($x).arg(&value).arg(&N_ARG)).unwrap();
    }};
}

in_children! {
    fn the_harness_sees_the_wait_that_cudarc_lacks() {
        let scene = scene(ORDERS[0]);
        let mut x = scene.theirs(1);
        let copies = read_twice!(scene, &x);
        overwrite!(scene, &mut x, 2);
        scene.release();
        // The first reader was overtaken by the write.
        assert_eq!(copies.map(|copy| scene.bytes(&copy)), [[2; N], [1; N]]);
    }

    fn a_write_waits_for_two_readers() {
        for scene in ORDERS.map(scene) {
        let mut x = scene.ours(1);
        for value in [1, 2, 3] {
            let copies = read_twice!(scene, &x);
            overwrite!(scene, &mut x, value + 1);
            scene.release();
            assert_eq!(copies.map(|copy| scene.bytes(&copy)), [[value; N], [value; N]]);
            assert_eq!(scene.bytes(&x), [value + 1; N]);
        }
        }
    }

    fn a_copy_into_it_waits_for_two_readers() {
        for scene in ORDERS.map(scene) {
        let mut x = scene.ours(1);
        let copies = read_twice!(scene, &x);
        scene.own.memcpy_htod(&[2; N], &mut x).unwrap();
        scene.release();
        assert_eq!(copies.map(|copy| scene.bytes(&copy)), [[1; N], [1; N]]);
        assert_eq!(scene.bytes(&x), [2; N]);
        }
    }

    fn a_view_to_write_waits_for_two_readers() {
        for scene in ORDERS.map(scene) {
        let mut x = scene.ours(1);
        let copies = read_twice!(scene, &x);
        scene.own.memset_zeros(&mut x.slice_mut(..N / 2)).unwrap();
        scene.release();
        assert_eq!(copies.map(|copy| scene.bytes(&copy)), [[1; N], [1; N]]);
        }
    }

    fn the_drop_waits_for_two_readers() {
        for scene in ORDERS.map(scene) {
        let x = scene.ours(1);
        let address = x.device_ptr(&scene.own).0;
        let copies = read_twice!(scene, &x);
        drop(x);
        let mut y = unsafe_alloc(&scene);
        assert_eq!(y.device_ptr(&scene.own).0, address, "the same memory, at once");
        overwrite!(scene, &mut y, 2);
        scene.release();
        assert_eq!(copies.map(|copy| scene.bytes(&copy)), [[1; N], [1; N]]);
        }
    }

    fn copies_are_readers_too() {
        for scene in ORDERS.map(scene) {
        let mut x = scene.ours(1);
        let mut copies = [scene.theirs(0), scene.theirs(0)];
        scene.hold();
        for (stream, copy) in scene.readers.iter().zip(&mut copies) {
            stream.memcpy_dtod(&x, copy).unwrap();
        }
        overwrite!(scene, &mut x, 2);
        scene.release();
        assert_eq!(copies.map(|copy| scene.bytes(&copy)), [[1; N], [1; N]]);
        }
    }

    fn views_for_streams_are_readers_too() {
        for scene in ORDERS.map(scene) {
        let mut x = scene.ours(1);
        let mut copies = [scene.theirs(0), scene.theirs(0)];
        scene.hold();
        for (stream, copy) in scene.readers.iter().zip(&mut copies) {
            let view = x.on(stream).unwrap();
            stream.memcpy_dtod(&view.slice(..), copy).unwrap();
        }
        {
            let mut view = x.on_mut(&scene.own).unwrap();
            overwrite!(scene, &mut view, 2);
        }
        scene.release();
        assert_eq!(copies.map(|copy| scene.bytes(&copy)), [[1; N], [1; N]]);
        assert_eq!(scene.bytes(&x), [2; N]);
        }
    }

    fn launches_that_are_built_before_others_are_submitted_are_told_apart() {
        for scene in ORDERS.map(scene) {
        let mut x = scene.ours(1);
        let mut copies = [scene.theirs(0), scene.theirs(0)];
        scene.hold();
        {
            let [first, second] = &mut copies;
            let mut one = scene.readers[0].launch_builder(&scene.kernels.copy);
            one.arg(first).arg(&x).arg(&N_ARG);
            let mut other = scene.readers[1].launch_builder(&scene.kernels.copy);
            other.arg(second).arg(&x).arg(&N_ARG);
            go(&mut one).unwrap();
            go(&mut other).unwrap();
        }
        overwrite!(scene, &mut x, 2);
        scene.release();
        assert_eq!(copies.map(|copy| scene.bytes(&copy)), [[1; N], [1; N]]);
        }
    }

    fn a_write_that_never_came_loses_no_reader() {
        for scene in ORDERS.map(scene) {
        let mut x = scene.ours(1);
        let copies = read_twice!(scene, &x);
        // An argument to write, and no launch.
        scene.own.launch_builder(&scene.kernels.fill).arg(&mut x);
        let mut third = scene.theirs(0);
        let mut launch = scene.own.launch_builder(&scene.kernels.copy);
        go(launch.arg(&mut third).arg(&x).arg(&N_ARG)).unwrap();
        overwrite!(scene, &mut x, 2);
        scene.release();
        assert_eq!(copies.map(|copy| scene.bytes(&copy)), [[1; N], [1; N]]);
        assert_eq!(scene.bytes(&third), [1; N]);
        }
    }

    fn readers_see_what_was_written_on_another_stream() {
        let scene = scene(ORDERS[0]);
        let mut x = scene.ours(1);
        drop(read_twice!(scene, &x)); // both streams have read it once
        scene.release();
        scene.standin.hold(&scene.own);
        overwrite!(scene, &mut x, 2);
        let mut copies = [scene.pool.alloc_zeros::<u32>(&scene.readers[0], N).unwrap(),
            scene.pool.alloc_zeros::<u32>(&scene.readers[1], N).unwrap()];
        for (stream, copy) in scene.readers.iter().zip(&mut copies) {
            let mut launch = stream.launch_builder(&scene.kernels.copy);
            go(launch.arg(copy).arg(&x).arg(&N_ARG)).unwrap();
        }
        scene.standin.release(&scene.own);
        scene.context.synchronize().unwrap();
        assert_eq!(copies.map(|copy| scene.bytes(&copy)), [[2; N], [2; N]]);
    }

    fn two_readers_run_side_by_side() {
        let scene = scene(ORDERS[0]);
        let x = scene.ours(1);
        let copies = read_twice!(scene, &x);
        // Held, the first keeps nobody from reading.
        scene.standin.release(&scene.readers[1]);
        scene.readers[1].synchronize().unwrap();
        assert_eq!(scene.readers[1].clone_dtoh(&copies[1]).unwrap(), [1; N]);
        scene.release();
    }

    fn further_reads_of_known_streams_make_no_more_events() {
        let scene = scene(ORDERS[0]);
        let mut x = scene.ours(1);
        let mut copies = [scene.theirs(0), scene.theirs(0)];
        let mut calls = Vec::new();
        for round in 0..4 {
            let before = scene.standin.calls(["cuEventCreate", "cuEventRecord", "cuStreamWaitEvent"]);
            for _ in 0..10 {
                for (stream, copy) in scene.readers.iter().zip(&mut copies) {
                    stream.memcpy_dtod(&x, copy).unwrap();
                }
            }
            let after = scene.standin.calls(["cuEventCreate", "cuEventRecord", "cuStreamWaitEvent"]);
            calls.push([0, 1, 2].map(|at| after[at] - before[at]));
            if round == 2 {
                overwrite!(scene, &mut x, 2);
            }
        }
        // 20 copies: each waits for 3 events and records 2. The second stream has a shell made once: 2
        // events, which wait for the write and tell it on. After the write it is told again.
        let [first, second, third, fourth] = calls[..] else { panic!("{calls:?}") };
        assert_eq!(second, [0, 40, 60]);
        assert_eq!((third, first[0]), (second, 2));
        assert_eq!(fourth, [0, 41, 61]);
    }

    fn a_stream_with_the_handle_of_one_that_is_gone_is_another_reader() {
        let scene = scene(ORDERS[0]);
        let mut x = scene.ours(1);
        let mut copies = [scene.theirs(0), scene.theirs(0)];
        scene.own.synchronize().unwrap();
        let gate = &scene.readers[0];
        scene.standin.hold(gate);
        let (mut handles, [first, second]) = (Vec::new(), &mut copies);
        for (copy, waits) in [(first, true), (second, false)] {
            let reader = scene.context.new_stream().unwrap();
            handles.push(reader.cu_stream());
            if waits {
                reader.join(gate).unwrap();
            }
            go(reader.launch_builder(&scene.kernels.copy).arg(copy).arg(&x).arg(&N_ARG)).unwrap();
        }
        assert_eq!(handles[0], handles[1], "the driver gives handles out again");
        overwrite!(scene, &mut x, 2);
        scene.standin.release(gate);
        scene.context.synchronize().unwrap();
        assert_eq!(copies.map(|copy| scene.bytes(&copy)), [[1; N], [1; N]]);
    }

    fn a_slice_that_ever_new_streams_read_keeps_few_events_and_loses_no_reader() {
        for held in [0, 10, 70] {
            let scene = scene(ORDERS[0]);
            let mut x = scene.ours(1);
            let mut copy = scene.theirs(0);
            let mut others = scene.theirs(0);
            scene.own.synchronize().unwrap();
            let gate = &scene.readers[0];
            scene.standin.hold(gate);
            let before = scene.standin.calls(["cuEventCreate"])[0];
            for number in 0..80 {
                let reader = scene.context.new_stream().unwrap();
                let target = if number == held { &mut copy } else { &mut others };
                if number == held {
                    reader.join(gate).unwrap();
                }
                let mut launch = reader.launch_builder(&scene.kernels.copy);
                go(launch.arg(target).arg(&x).arg(&N_ARG)).unwrap();
            }
            // Two for each shell, and one that `join` makes.
            assert_eq!(scene.standin.calls(["cuEventCreate"])[0] - before, 2 * 32 + 1);
            overwrite!(scene, &mut x, 2);
            scene.standin.release(gate);
            scene.context.synchronize().unwrap();
            assert_eq!(scene.bytes(&copy), [1; N], "{held}");
        }
    }

    fn work_of_streams_that_are_gone_is_waited_for() {
        let context = CudaContext::new(0).unwrap();
        let (own, kernels) = (context.default_stream(), Kernels::load(&context));
        let pool = CudaPool::new(&context).unwrap();
        let standin = StandIn::open();
        // Not one that cudarc counts, so that it orders nothing once the reader is gone.
        let handle = result::stream::create(result::stream::StreamKind::NonBlocking).unwrap();
        // SAFETY: made just now, and never destroyed.
        let gate = unsafe { context.wrap_borrowed_stream(handle) };
        let mut copy = own.alloc_zeros::<u32>(N).unwrap();
        let mut x = pool.clone_htod(&own, &[1_u32; N]).unwrap();
        {
            let reader = context.new_stream().unwrap();
            standin.hold(&gate);
            reader.join(&gate).unwrap();
            go(reader.launch_builder(&kernels.copy).arg(&mut copy).arg(&x).arg(&N_ARG)).unwrap();
        }
        assert!(!context.is_managing_stream_synchronization());
        let address = x.device_ptr(&own).0;
        drop(x);
        // SAFETY: it is written before it is read.
        x = unsafe { pool.alloc::<u32>(&own, N) }.unwrap();
        assert_eq!(x.device_ptr(&own).0, address);
        let value = 2_u32;
        go(own.launch_builder(&kernels.fill).arg(&mut x).arg(&value).arg(&N_ARG)).unwrap();
        standin.release(&gate);
        context.synchronize().unwrap();
        assert_eq!(own.clone_dtoh(&copy).unwrap(), [1; N]);
    }

    fn streams_that_come_and_go_are_destroyed_and_leave_their_memory() {
        let context = CudaContext::new(0).unwrap();
        let pool = CudaPool::new(&context).unwrap();
        let standin = StandIn::open();
        let before = standin.calls(["cuStreamCreate", "cuStreamDestroy_v2"]);
        for round in 0..20_u32 {
            let stream = context.new_stream().unwrap();
            let slice = pool.clone_htod(&stream, &[round; N]).unwrap();
            assert_eq!(stream.clone_dtoh(&slice).unwrap(), [round; N]);
        }
        let after = standin.calls(["cuStreamCreate", "cuStreamDestroy_v2"]);
        assert_eq!([0, 1].map(|at| after[at] - before[at]), [20, 19]);
        // One chunk went from lane to lane.
        let held_bytes = pool.pool().stats().devices[0].1.held_bytes;
        assert!(held_bytes <= 3 * (2 << 20), "{held_bytes}");
    }

    fn a_stream_that_lives_keeps_its_lane() {
        let context = CudaContext::new(0).unwrap();
        let own = context.new_stream().unwrap();
        let standin = StandIn::open();
        let mapped = || standin.calls(["cuMemMap"]);
        // Free chunks stay where they are.
        let builder = CudaPool::builder().context(&context);
        let pool = builder.configure(|settings| settings.soft_limit(None)).build().unwrap();
        let new = |stream: &_, value| pool.clone_htod(stream, &[value; N]).unwrap();
        drop(new(&own, 1_u32));
        // Nobody has the second stream but its slice.
        let slice = new(&context.new_stream().unwrap(), 7);
        for _ in 0..3 {
            drop(new(&context.new_stream().unwrap(), 2));
        }
        assert_eq!(own.clone_dtoh(&slice).unwrap(), [7; N]);
        let before = mapped();
        drop((new(&own, 1), slice.try_clone().unwrap()));
        assert_eq!(mapped(), before, "both lanes have their memory");
        // Closed by hand, the stream has a new one.
        assert!(pool.close(&own));
        drop(new(&own, 1));
        assert_ne!(mapped(), before);
    }
}

fn unsafe_alloc(scene: &Scene) -> PoolSlice<u32> {
    // SAFETY: it is written before it is read.
    unsafe { scene.pool.alloc(&scene.own, N) }.unwrap()
}
