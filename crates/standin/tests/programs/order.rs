//! Stream order: what a missing wait looks like, and when the bytes of a copy are read.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use cudarc::driver::sys::CUresult;
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DriverError, sys};

use crate::control::{hold, live_bytes, release};

/// Two streams of a context that leaves their order to the program.
fn two_streams() -> (Arc<CudaContext>, [Arc<CudaStream>; 2]) {
    let context = CudaContext::new(0).unwrap();
    // SAFETY: what is missing is what is tried; nothing is freed under work.
    unsafe { context.disable_event_tracking() };
    let streams = [(); 2].map(|()| context.new_stream().unwrap());
    (context, streams)
}

pub(crate) fn held() {
    let (_context, [writer, reader]) = two_streams();
    let mut slice: CudaSlice<u32> = writer.alloc_zeros(1000).unwrap();
    writer.synchronize().unwrap();
    let locked = {
        // SAFETY: written before it is read.
        let mut locked = unsafe { writer.context().alloc_pinned::<u32>(1000) }.unwrap();
        locked.as_mut_slice().unwrap().fill(9);
        locked
    };
    hold(&writer);
    writer.memcpy_htod(&locked, &mut slice).unwrap();
    let event = writer.record_event(None).unwrap();
    assert_eq!(reader.clone_dtoh(&slice).unwrap(), [0; 1000], "nobody waited");
    assert!(!event.is_complete());
    reader.wait(&event).unwrap();
    // The rest in its turn: from another thread, as this one waits.
    let copy = std::thread::scope(|scope| {
        let copy = scope.spawn(|| reader.clone_dtoh(&slice).unwrap());
        release(&writer);
        copy.join().unwrap()
    });
    assert_eq!(copy, [9; 1000]);
    assert!(event.is_complete());
    drop(slice);
    writer.synchronize().unwrap();
    assert_eq!(live_bytes(), 0);
}

pub(crate) fn given_up() {
    let (_context, [stream, _]) = two_streams();
    hold(&stream);
    assert_eq!(stream.synchronize(), Err(DriverError(CUresult::CUDA_ERROR_LAUNCH_TIMEOUT)));
    release(&stream);
    stream.synchronize().unwrap();
}

pub(crate) fn modelled() {
    let (_context, [writer, reader]) = two_streams();
    const BYTES: usize = 256 << 20;
    let mut slice: CudaSlice<u8> = writer.alloc_zeros(BYTES).unwrap();
    let (mut first, mut last) = slice.split_at_mut(BYTES / 2);
    writer.memset_zeros(&mut first).unwrap();
    writer.synchronize().unwrap();
    let ones = reader.clone_htod(&[1_u8; 64]).unwrap();
    reader.synchronize().unwrap();
    writer.memcpy_dtod(&first, &mut last).unwrap();
    writer.memcpy_dtod(&ones, &mut first.slice_mut(..64)).unwrap();
    let event = writer.record_event(None).unwrap();
    assert_eq!(reader.clone_dtoh(&first.slice(..64)).unwrap(), [0; 64], "nobody waited");
    reader.wait(&event).unwrap();
    assert_eq!(reader.clone_dtoh(&first.slice(..64)).unwrap(), [1; 64]);
}

pub(crate) fn pageable() {
    let (_context, [stream, other]) = two_streams();
    let mut slice: CudaSlice<u32> = stream.alloc_zeros(50_000).unwrap();
    hold(&stream);
    {
        let mut numbers: Vec<u32> = (0..50_000).collect();
        stream.memcpy_htod(&numbers, &mut slice).unwrap();
        // The call has read them: what becomes of them is nobody's business.
        numbers.fill(0);
    }
    assert_eq!(other.clone_dtoh(&slice.slice(..10)).unwrap(), [0; 10], "still held");
    release(&stream);
    let expected: Vec<u32> = (0..50_000).collect();
    // The wait that a download into pageable memory has in it does not harm a capture elsewhere.
    let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
    other.begin_capture(mode).unwrap();
    let copy = std::thread::scope(|scope| {
        scope.spawn(|| stream.clone_dtoh(&slice).unwrap()).join().unwrap()
    });
    assert_eq!(copy, expected);
    assert!(other.end_capture(sys::CUgraphInstantiate_flags(0)).is_ok());
}

pub(crate) fn timed() {
    let (context, [stream, _]) = two_streams();
    let flags = Some(sys::CUevent_flags::CU_EVENT_DEFAULT);
    let [start, end] = [(); 2].map(|()| context.new_event(flags).unwrap());
    let plain = context.new_event(None).unwrap();
    let mut slice: CudaSlice<u8> = stream.alloc_zeros(1 << 30).unwrap();
    start.record(&stream).unwrap();
    stream.memset_zeros(&mut slice).unwrap();
    end.record(&stream).unwrap();
    plain.record(&stream).unwrap();
    let elapsed_ms = start.elapsed_ms(&end).unwrap();
    // 1 GiB at the measured 3.66 TB/s.
    assert!((0.25..0.35).contains(&elapsed_ms), "{elapsed_ms} ms");
    let refused = start.elapsed_ms(&plain).err();
    assert_eq!(refused, Some(DriverError(CUresult::CUDA_ERROR_INVALID_HANDLE)));
}

static SEEN: AtomicU32 = AtomicU32::new(0);

extern "C" fn append(digit: *mut c_void) {
    SEEN.store(SEEN.load(Ordering::Relaxed) * 10 + digit.addr() as u32, Ordering::Relaxed);
}

pub(crate) fn host_functions() {
    let (_context, [stream, _]) = two_streams();
    hold(&stream);
    for digit in 1..=3 {
        let argument = std::ptr::without_provenance_mut(digit);
        // SAFETY: the stream is live; the function takes a number in the place of a pointer.
        unsafe { sys::cuLaunchHostFunc(stream.cu_stream(), Some(append), argument) }
            .result()
            .unwrap();
    }
    assert_eq!(SEEN.load(Ordering::Relaxed), 0, "held");
    release(&stream);
    stream.synchronize().unwrap();
    assert_eq!(SEEN.load(Ordering::Relaxed), 123);
}
