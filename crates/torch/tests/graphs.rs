//! Captures through the C functions, told of and not.

#![allow(clippy::unwrap_used, reason = "a failure ends the test")]

use std::ffi::{CStr, c_int, c_void};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use vmm_pool::DeviceStats;
use vmm_pool_torch::{
    pool, use_driver, vmm_pool_torch_alloc, vmm_pool_torch_capture_begin,
    vmm_pool_torch_capture_end, vmm_pool_torch_capture_join, vmm_pool_torch_empty_cache,
    vmm_pool_torch_free, vmm_pool_torch_graph_destroyed, vmm_pool_torch_graph_launched_on,
    vmm_pool_torch_last_error, vmm_pool_torch_record_stream, vmm_pool_torch_stream_destroyed,
};
use vmm_sys::object::{Event, Stream};
use vmm_sys::sim::Sim;
use vmm_sys::{
    CaptureMode, CaptureStatus, DeviceId, Driver, GraphExecHandle, ProbeKernel, Transfer,
};

const MIB: isize = 1 << 20;
const MODES: [CaptureMode; 3] =
    [CaptureMode::Global, CaptureMode::ThreadLocal, CaptureMode::Relaxed];
const WORDS: u64 = 64;

/// One machine for all tests of this program; each takes a device of its own, and the whole process
/// as long as the guard lives: what one does beside another's capture could spoil it.
fn machine() -> (MutexGuard<'static, ()>, Arc<dyn Driver>) {
    static MACHINE: OnceLock<Arc<Sim>> = OnceLock::new();
    static ALONE: Mutex<()> = Mutex::new(());
    // A test that failed leaves nothing behind that harms the next.
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let sim = MACHINE.get_or_init(|| {
        let sim = Sim::builder().devices(8).build();
        use_driver(sim.clone()).unwrap();
        sim
    });
    (alone, sim.clone())
}

fn handle(stream: &Stream) -> *mut c_void {
    std::ptr::without_provenance_mut(stream.handle().0 as usize)
}

fn device(stream: &Stream) -> c_int {
    stream.device().0 as c_int
}

fn take(bytes: isize, stream: &Stream) -> *mut c_void {
    // SAFETY: the stream is alive, and told when it is not any more.
    let block = unsafe { vmm_pool_torch_alloc(bytes, device(stream), handle(stream)) };
    assert!(!block.is_null(), "{:?}", last_error());
    block
}

fn give(block: *mut c_void, bytes: isize, stream: &Stream) {
    // SAFETY: as above.
    unsafe { vmm_pool_torch_free(block, bytes, device(stream), handle(stream)) }
}

fn last_error() -> Option<String> {
    let words = vmm_pool_torch_last_error();
    // SAFETY: a C string that stays until this thread's next failure.
    (!words.is_null()).then(|| unsafe { CStr::from_ptr(words) }.to_str().unwrap().to_owned())
}

fn stats(stream: &Stream) -> DeviceStats {
    let device = DeviceId(stream.device().0);
    pool(device).unwrap().device_stats(device).unwrap()
}

fn launch(stream: &Stream, kernel: ProbeKernel) {
    // SAFETY: a live stream, and addresses of the pool.
    unsafe { stream.driver().launch(stream.device(), &kernel, stream.handle()) }.unwrap();
}

fn fill(stream: &Stream, at: *mut c_void, value: u32) {
    launch(stream, ProbeKernel::FillWords { dst: at.addr() as u64, words: WORDS, value });
}

fn copy(stream: &Stream, to: *mut c_void, from: *mut c_void) {
    let (dst, src) = (to.addr() as u64, from.addr() as u64);
    launch(stream, ProbeKernel::CopyWords { dst, src, words: WORDS });
}

fn first_word(stream: &Stream, at: *mut c_void) -> u32 {
    stream.synchronize().unwrap();
    let mut bytes = [0; 4];
    let (dst, src) = (bytes.as_mut_ptr(), at.addr() as u64);
    // SAFETY: four live bytes, and an address of the pool.
    unsafe {
        let transfer = Transfer::DeviceToHost { dst, src, bytes: 4 };
        stream.driver().copy(stream.device(), &transfer).unwrap();
    }
    u32::from_le_bytes(bytes)
}

fn begin(stream: &Stream, mode: CaptureMode) {
    // SAFETY: a live stream.
    unsafe { stream.driver().capture_begin(stream.device(), stream.handle(), mode) }.unwrap();
}

/// Ends the capture, which must be sound.
fn end(stream: &Stream) -> GraphExecHandle {
    assert_eq!(stream.capture_info().unwrap().status, CaptureStatus::Active);
    let (driver, device) = (stream.driver(), stream.device());
    // SAFETY: live handles; the graph is not used afterwards.
    unsafe {
        let graph = driver.capture_end(device, stream.handle()).unwrap();
        let exec = driver.graph_instantiate(device, graph).unwrap();
        driver.graph_destroy(device, graph).unwrap();
        exec
    }
}

fn replay(stream: &Stream, exec: GraphExecHandle) {
    // SAFETY: live handles.
    unsafe { stream.driver().graph_launch(stream.device(), exec, stream.handle()) }.unwrap();
}

fn destroy(stream: &Stream, exec: GraphExecHandle) {
    // SAFETY: a live handle, not used afterwards.
    unsafe { stream.driver().graph_exec_destroy(stream.device(), exec) }.unwrap();
}

/// Lets `to` wait for what `from` has now.
fn order(from: &Stream, to: &Stream) {
    let event = Event::create(from.driver(), from.device()).unwrap();
    event.record(from).unwrap();
    to.wait_event(&event).unwrap();
}

/// What a program does to an allocator between launches, and beside captures.
fn churn(stream: &Stream, other: &Stream) {
    for turn in 0..12 {
        let blocks: Vec<_> = (1..6).map(|i| (take(i * MIB / 3, stream), i * MIB / 3)).collect();
        for &(block, bytes) in &blocks {
            if stream.capture_info().unwrap().status == CaptureStatus::None {
                fill(stream, block, 0xDEAD_0000);
            }
            if bytes % 2 == 0 {
                // SAFETY: a live stream.
                unsafe { vmm_pool_torch_record_stream(block, handle(other)) };
            }
            give(block, bytes, if turn % 2 == 0 { stream } else { other });
        }
        vmm_pool_torch_empty_cache();
    }
}

/// Waits for what the background thread may have in its hands just now.
fn soon(what: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !what() {
        assert!(Instant::now() < deadline, "not in 20 s");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn gone(stream: &Stream) {
    // SAFETY: the stream is alive.
    unsafe { vmm_pool_torch_stream_destroyed(device(stream), handle(stream)) }
}

/// Declares the two streams of a story gone; their lanes end.
fn both_gone(home: &Stream, other: &Stream) {
    gone(home);
    gone(other);
    soon(|| stats(home).lanes == 0);
}

#[test]
fn what_a_told_capture_was_given_is_the_graphs() {
    let (_alone, driver) = machine();
    let (home, other) = streams(&driver, 0);
    for mode in MODES {
        let out = take(MIB, &home);
        // SAFETY: live streams, here and below.
        let graph = unsafe { vmm_pool_torch_capture_begin(0, handle(&home), 0) };
        assert_ne!(graph, 0, "{:?}", last_error());
        begin(&home, mode);
        let scratch = take(3 * MIB, &home);
        fill(&home, scratch, 7);
        order(&home, &other);
        // SAFETY: as above.
        assert_eq!(unsafe { vmm_pool_torch_capture_join(graph, 0, handle(&other)) }, 0);
        let branch = take(2 * MIB, &other);
        copy(&other, branch, scratch);
        order(&other, &home);
        copy(&home, out, branch);
        // As PyTorch does: temporary tensors are gone while the capture goes on.
        give(branch, 2 * MIB, &other);
        give(scratch, 3 * MIB, &home);
        let exec = end(&home);
        assert_eq!(vmm_pool_torch_capture_end(graph), 0);
        let private_bytes = stats(&home).private_bytes;
        assert!(private_bytes >= 5 * MIB as u64, "{mode:?}");
        for _ in 0..3 {
            churn(&home, &other);
            let hoard: Vec<_> = (0..8).map(|_| take(MIB, &other)).collect();
            hoard.iter().for_each(|block| fill(&other, *block, 0xBAD));
            other.synchronize().unwrap();
            replay(&home, exec);
            assert_eq!(first_word(&home, out), 7, "{mode:?}");
            for block in hoard {
                assert_eq!(first_word(&other, block), 0xBAD, "the graph wrote where it must not");
                give(block, MIB, &other);
            }
            fill(&home, out, 0);
        }
        assert_eq!(stats(&home).private_bytes, private_bytes);
        // SAFETY: as above.
        assert_eq!(unsafe { vmm_pool_torch_graph_launched_on(graph, 0, handle(&other)) }, 0);
        replay(&other, exec);
        destroy(&home, exec);
        assert_eq!(vmm_pool_torch_graph_destroyed(graph), 0);
        assert_eq!(stats(&home).private_bytes, 0);
        give(out, MIB, &home);
    }
    assert_eq!(last_error(), None);
    both_gone(&home, &other);
}

#[test]
fn a_capture_that_nobody_told_of_is_not_harmed_and_its_memory_is_ordinary() {
    let (_alone, driver) = machine();
    let (home, other) = streams(&driver, 1);
    for mode in MODES {
        let out = take(MIB, &home);
        begin(&home, mode);
        let kept = take(3 * MIB, &home);
        fill(&home, kept, 9);
        copy(&home, out, kept);
        churn(&other, &home);
        churn(&home, &other); // temporary tensors of the capture
        std::thread::scope(|scope| {
            scope.spawn(|| churn(&other, &home));
        });
        let exec = end(&home); // sound
        // What is held is nobody else's, so this graph is right.
        churn(&home, &other);
        churn(&other, &home);
        replay(&home, exec);
        assert_eq!(first_word(&home, out), 9, "{mode:?}");
        assert_eq!(stats(&home).private_bytes, 0);
        // What is freed is reused: as documented.
        give(kept, 3 * MIB, &home);
        let next = take(3 * MIB, &home);
        assert_eq!(next, kept);
        give(next, 3 * MIB, &home);
        destroy(&home, exec);
        give(out, MIB, &home);
    }
    assert_eq!(last_error(), None);
    both_gone(&home, &other);
}

#[test]
fn graphs_may_share_memory_and_wrong_numbers_are_refused() {
    let (_alone, driver) = machine();
    let (home, other) = streams(&driver, 2);
    // SAFETY: live streams, here and below.
    let open = |stream: &Stream, shared| unsafe {
        vmm_pool_torch_capture_begin(device(stream), handle(stream), shared)
    };
    let mut graphs = Vec::new();
    for nth in 0..2 {
        let graph = open(&home, graphs.first().copied().unwrap_or(0));
        assert_ne!(graph, 0);
        if nth == 0 {
            assert_eq!(open(&home, 0), 0, "the stream's lane takes part already");
            assert!(last_error().unwrap().contains("capture"), "{:?}", last_error());
        }
        give(take(3 * MIB, &home), 3 * MIB, &home);
        assert_eq!(vmm_pool_torch_capture_end(graph), 0);
        graphs.push(graph);
    }
    let private_bytes = stats(&home).private_bytes;
    assert!((3 * MIB as u64..6 * MIB as u64).contains(&private_bytes), "{private_bytes}");
    assert_eq!(vmm_pool_torch_capture_end(graphs[0]), -1);
    assert!(last_error().unwrap().contains("has ended"), "{:?}", last_error());
    // SAFETY: as above.
    assert_eq!(unsafe { vmm_pool_torch_capture_join(graphs[0], 2, handle(&other)) }, -1);
    assert_eq!(vmm_pool_torch_graph_destroyed(graphs[0]), 0);
    assert_eq!(stats(&home).private_bytes, private_bytes, "the second has it");
    assert_eq!(vmm_pool_torch_graph_destroyed(graphs[1]), 0);
    assert_eq!(stats(&home).private_bytes, 0);
    for number in [graphs[0], 0, u64::MAX] {
        assert_eq!(vmm_pool_torch_graph_destroyed(number), -1);
        assert_eq!(vmm_pool_torch_capture_end(number), -1);
        // SAFETY: as above.
        assert_eq!(unsafe { vmm_pool_torch_graph_launched_on(number, 2, handle(&home)) }, -1);
        assert!(last_error().unwrap().contains(&format!("graph {number}:")), "{:?}", last_error());
    }
    assert_eq!(open(&home, graphs[0]), 0, "its memory is gone");
    // A capture that failed is given up as a whole.
    let graph = open(&home, 0);
    give(take(MIB, &home), MIB, &home);
    assert_eq!(vmm_pool_torch_graph_destroyed(graph), 0);
    assert_eq!(stats(&home).private_bytes, 0);
    both_gone(&home, &other);
}

#[test]
fn a_stream_is_not_gone_while_it_is_captured() {
    let (_alone, driver) = machine();
    let (home, _) = streams(&driver, 3);
    give(take(MIB, &home), MIB, &home);
    begin(&home, CaptureMode::Global);
    gone(&home);
    assert!(last_error().unwrap().contains("being captured"), "{:?}", last_error());
    let exec = end(&home);
    destroy(&home, exec);
    gone(&home);
    gone(&home); // once is enough
    soon(|| stats(&home).lanes == 0);
    assert_eq!(stats(&home).limbo_bytes, 0);
}

fn streams(driver: &Arc<dyn Driver>, device: u32) -> (Stream, Stream) {
    let stream = || Stream::create(driver, DeviceId(device)).unwrap();
    (stream(), stream())
}

/// PyTorch captures on a stream of its own, which nobody may have allocated on before.
#[test]
fn a_stream_that_is_first_seen_while_it_is_captured_gets_memory() {
    let (_alone, driver) = machine();
    for mode in MODES {
        for told in [false, true] {
            let stream = Stream::create(&driver, DeviceId(7)).unwrap();
            begin(&stream, mode);
            // SAFETY: a live stream.
            let number = told.then(|| unsafe {
                vmm_pool_torch_capture_begin(device(&stream), handle(&stream), 0)
            });
            assert_ne!(number, Some(0), "{:?}", last_error());
            let (from, to) = (take(MIB, &stream), take(MIB, &stream));
            fill(&stream, from, 7);
            copy(&stream, to, from);
            let exec = end(&stream);
            if let Some(number) = number {
                assert_eq!(vmm_pool_torch_capture_end(number), 0);
            }
            replay(&stream, exec);
            assert_eq!(first_word(&stream, to), 7, "{mode:?}");
            give(from, MIB, &stream);
            give(to, MIB, &stream);
            destroy(&stream, exec);
            if let Some(number) = number {
                assert_eq!(vmm_pool_torch_graph_destroyed(number), 0);
            }
            // SAFETY: a live stream.
            unsafe { vmm_pool_torch_stream_destroyed(device(&stream), handle(&stream)) };
        }
    }
    vmm_pool_torch_empty_cache();
}
