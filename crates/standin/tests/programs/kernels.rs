//! Modules, launches and graphs of cudarc.

use std::sync::{Arc, Mutex};

use cudarc::driver::sys::CUresult;
use cudarc::driver::{
    CudaContext, CudaModule, CudaSlice, DevicePtr, DriverError, LaunchConfig, PushKernelArg, sys,
};
use cudarc::nvrtc::Ptx;

use crate::control::{calls, live_bytes};

/// Only the entries count: what these bodies do is not looked at.
const PTX: &str = "
.version 8.0
.target sm_90
.address_size 64
.visible .entry fill_u32(.param .u64 dst, .param .u32 value, .param .u64 n) { ret; }
.visible .entry copy_u32(.param .u64 dst, .param .u64 src, .param .u64 n) { ret; }
.visible .entry add_one_u32(.param .u64 dst, .param .u64 n) { ret; }
.visible .entry add_u32(.param .u64 dst, .param .u64 a, .param .u64 b, .param .u64 n) { ret; }
.visible .entry sum_u32(.param .u64 src, .param .u64 n, .param .u64 out) { ret; }
.visible .entry matmul(.param .u64 dst, .param .f32 scale) { ret; }
";

const WORDS: usize = 10_000;

fn module(context: &Arc<CudaContext>) -> Arc<CudaModule> {
    context.load_module(Ptx::from_src(PTX)).unwrap()
}

fn shape() -> LaunchConfig {
    LaunchConfig::for_num_elems(WORDS as u32)
}

pub(crate) fn known() {
    let context = CudaContext::new(0).unwrap();
    let stream = context.new_stream().unwrap();
    let module = module(&context);
    let function = |name: &str| module.load_function(name).unwrap();
    let [mut a, mut b, mut c] = [0; 3].map(|_| stream.alloc_zeros::<u32>(WORDS).unwrap());
    let mut total: CudaSlice<u32> = stream.alloc_zeros(1).unwrap();
    // SAFETY: the arguments are those that the kernels take.
    unsafe {
        let fill = function("fill_u32");
        stream.launch_builder(&fill).arg(&mut a).arg(&5_u32).arg(&WORDS).launch(shape()).unwrap();
        let copy = function("copy_u32");
        stream.launch_builder(&copy).arg(&mut b).arg(&a).arg(&WORDS).launch(shape()).unwrap();
        let add_one = function("add_one_u32");
        stream.launch_builder(&add_one).arg(&mut b).arg(&(WORDS / 2)).launch(shape()).unwrap();
        let add = function("add_u32");
        let mut launch = stream.launch_builder(&add);
        launch.arg(&mut c).arg(&a).arg(&b).arg(&WORDS).launch(shape()).unwrap();
        let sum = function("sum_u32");
        stream.launch_builder(&sum).arg(&c).arg(&WORDS).arg(&mut total).launch(shape()).unwrap();
    }
    let words = stream.clone_dtoh(&c).unwrap();
    assert_eq!((words[0], words[WORDS / 2], words[WORDS - 1]), (11, 10, 10));
    assert_eq!(stream.clone_dtoh(&total).unwrap(), [(WORDS * 10 + WORDS / 2) as u32]);
    assert_eq!(calls("cuLaunchKernel"), 5);
    drop((a, b, c, total));
    stream.synchronize().unwrap();
    assert_eq!(live_bytes(), 0);
}

pub(crate) fn attributes() {
    let context = CudaContext::new(0).unwrap();
    let function = module(&context).load_function("sum_u32").unwrap();
    assert_eq!(
        (function.max_threads_per_block().unwrap(), function.num_regs().unwrap()),
        (1024, 0)
    );
    let shared = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    function.set_attribute(shared, 100_000).unwrap();
    assert_eq!(function.get_attribute(shared).unwrap(), 100_000);
    let refused = Err(DriverError(CUresult::CUDA_ERROR_INVALID_VALUE));
    assert_eq!(function.set_attribute(shared, 1 << 20), refused, "more than a block has");
    let threads = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK;
    assert_eq!(function.set_attribute(threads, 64), refused, "is no setting");
    // SAFETY: no argument is looked at, as the shape is refused first.
    let launched = unsafe {
        let stream = context.default_stream();
        let shape =
            LaunchConfig { grid_dim: (1, 1, 1), block_dim: (1025, 1, 1), shared_mem_bytes: 0 };
        stream.launch_builder(&function).launch(shape).map(drop)
    };
    assert_eq!(launched, refused, "too many threads");
}

pub(crate) fn unknown() {
    let context = CudaContext::new(0).unwrap();
    let module = module(&context);
    for name in ["matmul", "fill_u64"] {
        let DriverError(code) = module.load_function(name).unwrap_err();
        assert_eq!(code, CUresult::CUDA_ERROR_NOT_FOUND, "{name}");
    }
    let DriverError(code) = context.load_module(Ptx::from_src("int main() {}")).unwrap_err();
    assert_eq!(code, CUresult::CUDA_ERROR_INVALID_IMAGE);
}

pub(crate) fn ignored() {
    let context = CudaContext::new(0).unwrap();
    let stream = context.new_stream().unwrap();
    let module = module(&context);
    let DriverError(code) = module.load_function("not_in_it").unwrap_err();
    assert_eq!(code, CUresult::CUDA_ERROR_NOT_FOUND);
    let mut slice = stream.clone_htod(&[1_u32; WORDS]).unwrap();
    for (name, expected) in [("matmul", 1), ("add_one_u32", 2)] {
        let function = module.load_function(name).unwrap();
        // SAFETY: one takes these arguments, the other looks at none.
        unsafe { stream.launch_builder(&function).arg(&mut slice).arg(&WORDS).launch(shape()) }
            .unwrap();
        assert_eq!(stream.clone_dtoh(&slice).unwrap(), [expected; WORDS], "{name}");
    }
}

/// Memory of a lost context.
static LOST: Mutex<Option<CudaSlice<u32>>> = Mutex::new(None);

pub(crate) fn no_access() {
    let contexts = [CudaContext::new(0).unwrap(), CudaContext::new(1).unwrap()];
    let streams = contexts.each_ref().map(|context| context.new_stream().unwrap());
    let add_one = module(&contexts[1]).load_function("add_one_u32").unwrap();
    let slice: CudaSlice<u32> = streams[0].alloc_zeros(WORDS).unwrap();
    let (address, guard) = slice.device_ptr(&streams[0]);
    // SAFETY: the address is given out, but not to this device: that is what is tried.
    unsafe { streams[1].launch_builder(&add_one).arg(&address).arg(&WORDS).launch(shape()) }
        .unwrap();
    drop(guard);
    let lost = CUresult::CUDA_ERROR_ILLEGAL_ADDRESS;
    assert_eq!(streams[1].synchronize(), Err(DriverError(lost)));
    assert_eq!(contexts[1].synchronize(), Err(DriverError(lost)), "for good");
    let again = streams[1].clone_htod(&[0_u32]).err().map(|DriverError(code)| code);
    assert_eq!(again, Some(lost));
    // As on the machine that was measured, the other contexts of the process are lost too.
    assert_eq!(contexts[0].synchronize(), Err(DriverError(lost)));
    // Nothing can be freed any more, and nothing should be tried. Kept and not forgotten: whoever looks
    // for lost memory finds it.
    *LOST.lock().unwrap() = Some(slice);
}

pub(crate) fn peer_access() {
    let contexts = [CudaContext::new(0).unwrap(), CudaContext::new(1).unwrap()];
    let stream = contexts[1].new_stream().unwrap();
    let add_one = module(&contexts[1]).load_function("add_one_u32").unwrap();
    let mut address = 0;
    contexts[0].bind_to_thread().unwrap();
    // SAFETY: the place is live, and the memory as long as each fill is.
    unsafe {
        sys::cuMemAlloc_v2(&raw mut address, WORDS * 4).result().unwrap();
        sys::cuMemsetD32_v2(address, 6, WORDS).result().unwrap();
    }
    contexts[1].bind_to_thread().unwrap();
    let enable = || {
        // SAFETY: the context is live.
        unsafe { sys::cuCtxEnablePeerAccess(contexts[0].cu_ctx(), 0) }
    };
    assert_eq!(enable(), CUresult::CUDA_SUCCESS);
    assert_eq!(enable(), CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED);
    // SAFETY: the memory is there, and peers may use it now.
    unsafe { stream.launch_builder(&add_one).arg(&address).arg(&WORDS).launch(shape()) }.unwrap();
    stream.synchronize().unwrap();
    let mut words = [0_u32; WORDS];
    // SAFETY: there is room for the words; the allocation is freed once.
    unsafe {
        let into = words.as_mut_ptr().cast();
        sys::cuMemcpyDtoH_v2(into, address, WORDS * 4).result().unwrap();
        sys::cuCtxDisablePeerAccess(contexts[0].cu_ctx()).result().unwrap();
        let again = sys::cuCtxDisablePeerAccess(contexts[0].cu_ctx());
        assert_eq!(again, CUresult::CUDA_ERROR_PEER_ACCESS_NOT_ENABLED);
        contexts[0].bind_to_thread().unwrap();
        sys::cuMemFree_v2(address).result().unwrap();
    }
    assert_eq!(words, [7; WORDS]);
    assert_eq!(live_bytes(), 0);
}

pub(crate) fn graphs() {
    let context = CudaContext::new(0).unwrap();
    // Events from outside would end the capture, on a GPU too.
    // SAFETY: one stream does everything.
    unsafe { context.disable_event_tracking() };
    let stream = context.new_stream().unwrap();
    let module = module(&context);
    let [add_one, copy] = ["add_one_u32", "copy_u32"].map(|it| module.load_function(it).unwrap());
    let mut a = stream.clone_htod(&[1_u32; WORDS]).unwrap();
    let mut b: CudaSlice<u32> = stream.alloc_zeros(WORDS).unwrap();
    stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    let active = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE;
    assert_eq!(stream.capture_status().unwrap(), active);
    // SAFETY: the arguments are those that the kernels take.
    unsafe {
        stream.launch_builder(&add_one).arg(&mut a).arg(&WORDS).launch(shape()).unwrap();
        stream.launch_builder(&copy).arg(&mut b).arg(&a).arg(&WORDS).launch(shape()).unwrap();
    }
    let graph = stream.end_capture(sys::CUgraphInstantiate_flags(0)).unwrap().unwrap();
    assert_eq!(stream.clone_dtoh(&b).unwrap(), [0; WORDS], "captured, not run");
    for expected in 2..5 {
        graph.launch().unwrap();
        assert_eq!(stream.clone_dtoh(&b).unwrap(), [expected; WORDS]);
    }
    drop((graph, a, b));
    stream.synchronize().unwrap();
    assert_eq!(live_bytes(), 0);
    let destroyed = calls("cuGraphDestroy") + calls("cuGraphExecDestroy");
    assert_eq!(destroyed, 2, "the graph and what was made of it");
}
