//! Work through a library with the driver's ABI: copies, allocators, streams, events, kernels, host
//! functions, graphs. Which call goes out, in which context, and what comes back.

#![allow(clippy::unwrap_used, reason = "helpers of tests are not seen as tests")]

mod fake;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use fake::{Fake, mapped};
use vmm_sys::{
    CaptureMode, CaptureStatus, DeviceId, Driver, IpcEventHandle, ProbeKernel, ResultCode,
    StreamHandle, StreamId, Transfer,
};

const G: u64 = 2 << 20;
const ZERO: DeviceId = DeviceId(0);
const ONE: DeviceId = DeviceId(1);

#[test]
fn copies_move_the_bytes_in_the_context_that_is_named() {
    let Some((fake, cuda)) = Fake::open("copies", &[]) else { return };
    let (a, b) = (mapped(&cuda, G), mapped(&cuda, G));
    let stream = cuda.stream_create(ONE).unwrap();
    let source = *b"bytes to move";
    let mut back = [0_u8; 13];
    let bytes = 13;
    let transfers = [
        Transfer::Fill8 { dst: a, value: 0xff, bytes: 64 },
        Transfer::HostToDevice { dst: a, src: source.as_ptr(), bytes },
        Transfer::DeviceToDevice { dst: b, src: a, bytes },
        Transfer::Peer { dst: b + 64, dst_device: ZERO, src: b, src_device: ONE, bytes },
        Transfer::DeviceToHost { dst: back.as_mut_ptr(), src: b + 64, bytes },
    ];
    fake.log();
    for transfer in &transfers {
        // SAFETY: both arrays live, the device addresses are mapped.
        unsafe { cuda.copy(ONE, transfer) }.unwrap();
    }
    assert_eq!(back, source);
    // Those that may return before the bytes are there wait for the legacy stream, where they run.
    let finished = "1 cuStreamSynchronize 1";
    let sync = [
        "1 cuMemsetD8_v2 255 64",
        finished,
        "1 cuMemcpyHtoD_v2 13",
        finished,
        "1 cuMemcpyDtoD_v2 13",
        finished,
        "1 cuDevicePrimaryCtxRetain 1000",
        "1 cuMemcpyPeer 13 0 from 1",
        finished,
        "1 cuMemcpyDtoH_v2 13",
    ];
    assert_eq!(fake.log_without_contexts(), sync);
    for transfer in &transfers {
        // SAFETY: as above; the fake copies at once.
        unsafe { cuda.copy_async(ONE, transfer, stream) }.unwrap();
    }
    let on_stream = [
        "1 cuMemsetD8Async 255 64 stream 10",
        "1 cuMemcpyHtoDAsync_v2 13 stream 10",
        "1 cuMemcpyDtoDAsync_v2 13 stream 10",
        "1 cuMemcpyPeerAsync 13 0 from 1 stream 10",
        "1 cuMemcpyDtoHAsync_v2 13 stream 10",
    ];
    assert_eq!(fake.log_without_contexts(), on_stream);
}

#[test]
fn the_drivers_own_allocators_and_pinned_memory() {
    let Some((fake, cuda)) = Fake::open("allocators", &[]) else { return };
    let stream = cuda.stream_create(ZERO).unwrap();
    fake.log();
    let address = cuda.mem_alloc(ONE, 100).unwrap();
    cuda.mem_free(ONE, address).unwrap();
    cuda.mem_pool_set_release_threshold(ONE, u64::MAX).unwrap();
    // SAFETY: the stream is live.
    unsafe {
        let address = cuda.mem_alloc_async(ZERO, 200, stream).unwrap();
        cuda.mem_free_async(ZERO, address, stream).unwrap();
    }
    let pinned = cuda.host_alloc(ZERO, 4096).unwrap();
    // SAFETY: 4096 bytes that nobody writes.
    let bytes = unsafe {
        std::slice::from_raw_parts(
            std::ptr::with_exposed_provenance::<u8>(usize::try_from(pinned.0).unwrap()),
            4096,
        )
    };
    assert!(bytes.iter().all(|&byte| byte == 0), "pinned memory is zeroed");
    // SAFETY: it came from `host_alloc`, and `bytes` is not used any more.
    unsafe { cuda.host_free(ZERO, pinned) }.unwrap();
    let expected = [
        "- cuDevicePrimaryCtxRetain 1001",
        "1 cuMemAlloc_v2 100",
        "1 cuMemFree_v2",
        "- cuDeviceGetDefaultMemPool 1001",
        "- cuMemPoolSetAttribute pool of 1: 4 18446744073709551615",
        "0 cuMemAllocAsync 200 stream 10",
        "0 cuMemFreeAsync stream 10",
        "0 cuMemHostAlloc 4096 3",
        "0 cuMemFreeHost",
    ];
    assert_eq!(fake.log_without_contexts(), expected);
}

#[test]
fn events_of_other_processes() {
    let Some((fake, cuda)) = Fake::open("ipc_events", &[]) else { return };
    for device in [ZERO, ONE] {
        cuda.mem_info(device).unwrap();
    }
    fake.log();
    let event = cuda.event_create_interprocess(ONE).unwrap();
    // SAFETY: both events are live until they are destroyed at the end.
    unsafe {
        let handle = cuda.ipc_event_handle(ONE, event).unwrap();
        assert_eq!((handle.0[0], handle.0[63]), (1, 64));
        // The 64 bytes are passed by value.
        let opened = cuda.ipc_event_open(ZERO, &handle).unwrap();
        cuda.event_destroy(ZERO, opened).unwrap();
        fake.fail("cuIpcOpenEventHandle", 1);
        let error = cuda.ipc_event_open(ZERO, &handle).unwrap_err();
        assert!(error.to_string().contains("another process made"), "{error}");
        fake.fail("cuIpcGetEventHandle", 1);
        let error = cuda.ipc_event_handle(ONE, event).unwrap_err();
        assert!(error.to_string().contains("created for other processes"), "{error}");
        cuda.event_destroy(ONE, event).unwrap();
    }
    let log = fake.log_without_contexts();
    let expected = [
        "1 cuEventCreate 6",
        "1 cuIpcGetEventHandle of 1",
        "0 cuIpcOpenEventHandle 1 64",
        "0 cuEventDestroy_v2",
        "0 cuIpcOpenEventHandle 1 64",
        "1 cuIpcGetEventHandle of 1",
        "1 cuEventDestroy_v2",
    ];
    assert_eq!(log, expected);
}

#[test]
fn a_driver_without_shared_events_or_dma_bufs_does_not_support_them() {
    let flags = [
        "-DcuIpcGetEventHandle=lacking_get",
        "-DcuIpcOpenEventHandle=lacking_open",
        "-DcuMemGetHandleForAddressRange=lacking_range",
    ];
    let Some((fake, cuda)) = Fake::open("no_ipc_events", &flags) else { return };
    assert_eq!(cuda.missing_calls().len(), 3);
    let refused = [
        cuda.event_create_interprocess(ONE).unwrap_err(),
        cuda.ipc_event_open(ONE, &IpcEventHandle([0; 64])).unwrap_err(),
        cuda.dma_buf(ONE, 0, 65536).unwrap_err(),
    ];
    for error in refused {
        assert_eq!(error.code(), ResultCode::NOT_SUPPORTED);
        assert!(error.to_string().contains("this driver lacks cu"), "{error}");
    }
    assert_eq!(fake.log(), Vec::<String>::new(), "the library was not called");
}

#[test]
fn streams_and_events() {
    let Some((fake, cuda)) = Fake::open("streams", &[]) else { return };
    let (stream, other) = (cuda.stream_create(ONE).unwrap(), cuda.stream_create(ZERO).unwrap());
    let event = cuda.event_create(ONE).unwrap();
    let gate = cuda.host_alloc(ONE, 4).unwrap();
    let log = fake.log_without_contexts();
    assert!(log.contains(&"1 cuStreamCreate 1".to_owned()), "non-blocking: {log:?}");
    assert!(log.contains(&"1 cuEventCreate 2".to_owned()), "without timing: {log:?}");
    // SAFETY: all handles are live until they are destroyed at the end.
    unsafe {
        assert_eq!(cuda.stream_id(ONE, stream), Ok(StreamId(10)));
        assert_eq!(cuda.stream_id(ONE, StreamHandle::PER_THREAD), Ok(StreamId(2)));
        cuda.event_record(ONE, event, stream).unwrap();
        fake.pending(true);
        assert_eq!(cuda.event_query(ONE, event), Ok(false), "not ready is no error");
        assert_eq!(cuda.stream_query(ONE, stream), Ok(false));
        fake.pending(false);
        assert_eq!(cuda.event_query(ONE, event), Ok(true));
        assert_eq!(cuda.stream_query(ONE, stream), Ok(true));
        fake.fail("cuEventQuery", 700);
        assert!(cuda.event_query(ONE, event).unwrap_err().is_sticky());
        let error = cuda.event_record(ZERO, event, other).unwrap_err();
        assert_eq!(error.code(), ResultCode::INVALID_HANDLE);
        fake.log();
        cuda.stream_wait_event(ZERO, other, event).unwrap();
        cuda.stream_wait_value32(ONE, stream, gate, 7).unwrap();
        cuda.event_synchronize(ONE, event).unwrap();
        cuda.stream_synchronize(ONE, stream).unwrap();
        cuda.event_destroy(ONE, event).unwrap();
        cuda.stream_destroy(ONE, stream).unwrap();
    }
    let expected = [
        "0 cuStreamWaitEvent 11 event of 1, 0",
        "1 cuStreamWaitValue32_v2 10 value 7, 0",
        "1 cuEventSynchronize of 1",
        "1 cuStreamSynchronize 10",
        "1 cuEventDestroy_v2",
        "1 cuStreamDestroy_v2 10",
    ];
    assert_eq!(fake.log_without_contexts(), expected);
}

#[test]
fn kernels_load_once_a_device_and_get_their_arguments() {
    let Some((fake, cuda)) = Fake::open("kernels", &[]) else { return };
    let (a, b, done) = (mapped(&cuda, G), mapped(&cuda, G), mapped(&cuda, G));
    let stream = cuda.stream_create(ZERO).unwrap();
    fake.log();
    let (words, value) = (1000, u32::MAX - 3);
    let kernels = [
        ProbeKernel::FillWords { dst: a, words, value },
        ProbeKernel::CopyWords { dst: b, src: a, words },
        ProbeKernel::CheckWords { src: b, words, value, errors: done },
        ProbeKernel::CheckWords { src: b, words, value: value + 1, errors: done + 4 },
        ProbeKernel::Spin { busy_us: 7, done: done + 8 },
    ];
    for kernel in &kernels {
        // SAFETY: stream and memory are live.
        unsafe { cuda.launch(ZERO, kernel, stream) }.unwrap();
    }
    let mut counters = [0_u32; 3];
    let dst = counters.as_mut_ptr().cast();
    // SAFETY: 12 bytes on both sides.
    unsafe { cuda.copy(ZERO, &Transfer::DeviceToHost { dst, src: done, bytes: 12 }) }.unwrap();
    assert_eq!(counters, [0, 1000, 1]);
    let line = |name, blocks, threads| {
        format!("0 cuLaunchKernel {name} grid {blocks} 1 1 block {threads} 1 1 shared 0 stream 10")
    };
    let expected = [
        "0 cuThreadExchangeStreamCaptureMode 2".to_owned(), // captures are not harmed by loading
        "0 cuModuleLoadData ptx, capture mode 2".to_owned(),
        "0 cuModuleGetFunction fill_words".to_owned(),
        "0 cuModuleGetFunction copy_words".to_owned(),
        "0 cuModuleGetFunction check_words".to_owned(),
        "0 cuModuleGetFunction spin".to_owned(),
        "0 cuModuleGetFunction copy_quads".to_owned(),
        "0 cuThreadExchangeStreamCaptureMode 0".to_owned(),
        line("fill_words", 4, 256),
        line("copy_quads", 1, 256),
        line("check_words", 4, 256),
        line("check_words", 4, 256),
        line("spin", 1, 1),
        "0 cuMemcpyDtoH_v2 12".to_owned(),
    ];
    assert_eq!(fake.log_without_contexts(), expected);
}

#[test]
fn kernels_that_do_not_load_leave_nothing_behind() {
    let Some((fake, cuda)) = Fake::open("no_kernels", &[]) else { return };
    let stream = cuda.stream_create(ZERO).unwrap();
    let spin = ProbeKernel::Spin { busy_us: 0, done: 0 };
    // SAFETY: the stream lives as long as the driver object.
    let launch = || unsafe { cuda.launch(ZERO, &spin, stream) };
    fake.fail("cuModuleLoadData", 222);
    let error = launch().unwrap_err();
    assert_eq!(error.code(), ResultCode::UNSUPPORTED_PTX_VERSION);
    assert!(error.to_string().contains("could not compile the probe kernels"), "{error}");
    fake.fail("cuModuleGetFunction", 500);
    fake.log();
    let error = launch().unwrap_err();
    assert!(error.to_string().contains("kernel fill_words"), "{error}");
    assert!(fake.log().contains(&"0 cuModuleUnload".to_owned()));
    launch().unwrap(); // and the next launch tries again
}

#[test]
fn a_host_function_runs_once_and_cannot_take_the_process_down() {
    let Some((fake, cuda)) = Fake::open("host_function", &[]) else { return };
    let stream = cuda.stream_create(ONE).unwrap();
    let count = Arc::new(AtomicU32::new(0));
    let add = || {
        let count = count.clone();
        Box::new(move || {
            count.fetch_add(1, Ordering::Relaxed);
        })
    };
    // SAFETY: the stream is live.
    unsafe { cuda.launch_host_function(ONE, stream, add()) }.unwrap();
    assert_eq!(count.load(Ordering::Relaxed), 1, "the fake calls twice, the function runs once");
    // SAFETY: as above.
    unsafe { cuda.launch_host_function(ONE, stream, Box::new(|| panic!("on purpose"))) }.unwrap();
    fake.fail("cuLaunchHostFunc", 400);
    // SAFETY: as above.
    unsafe { cuda.launch_host_function(ONE, stream, add()) }.unwrap_err();
    assert_eq!(count.load(Ordering::Relaxed), 1);
    assert_eq!(Arc::strong_count(&count), 1, "a refused function is dropped");
}

#[test]
fn capture_and_graphs() {
    let Some((fake, cuda)) = Fake::open("graphs", &[]) else { return };
    let stream = cuda.stream_create(ONE).unwrap();
    assert_eq!(cuda.exchange_capture_mode(CaptureMode::Relaxed), Ok(CaptureMode::Global));
    assert_eq!(cuda.exchange_capture_mode(CaptureMode::ThreadLocal), Ok(CaptureMode::Relaxed));
    fake.log();
    // SAFETY: stream and graphs are live.
    unsafe {
        let info = cuda.capture_info(ONE, stream).unwrap();
        assert_eq!((info.status, info.id), (CaptureStatus::None, 0), "no id unless active");
        cuda.capture_begin(ONE, stream, CaptureMode::ThreadLocal).unwrap();
        let info = cuda.capture_info(ONE, stream).unwrap();
        assert_eq!((info.status, info.id), (CaptureStatus::Active, 77));
        let graph = cuda.capture_end(ONE, stream).unwrap();
        let exec = cuda.graph_instantiate(ONE, graph).unwrap();
        cuda.graph_launch(ONE, exec, stream).unwrap();
        cuda.graph_exec_destroy(ONE, exec).unwrap();
        cuda.graph_destroy(ONE, graph).unwrap();
        let error = cuda.capture_end(ONE, stream).unwrap_err();
        assert_eq!(error.code(), ResultCode::STREAM_CAPTURE_UNMATCHED);
        fake.fail("cuEventCreate", 900);
        let error = cuda.event_create(ONE).unwrap_err();
        assert!(error.to_string().contains("relaxed capture mode"), "{error}");
    }
    let expected = [
        "1 cuStreamGetCaptureInfo_v2 10",
        "1 cuStreamBeginCapture_v2 10 mode 1",
        "1 cuStreamGetCaptureInfo_v2 10",
        "1 cuStreamEndCapture 10",
        "1 cuGraphInstantiateWithFlags 9a 0",
        "1 cuGraphLaunch 9b stream 10",
        "1 cuGraphExecDestroy 9b",
        "1 cuGraphDestroy 9a",
        "1 cuStreamEndCapture 10",
        "1 cuEventCreate 2",
    ];
    assert_eq!(fake.log_without_contexts(), expected);
}
