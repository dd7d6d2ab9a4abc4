//! Slices of cudarc: made, copied, filled, freed.

use cudarc::driver::sys::CUresult;
use cudarc::driver::{CudaContext, CudaSlice, DevicePtrMut, DriverError, sys};

use crate::control::{calls, hold, live_bytes, release};

pub(crate) fn slices() {
    let context = CudaContext::new(0).unwrap();
    assert_eq!(context.compute_capability().unwrap(), (9, 0));
    assert!(context.name().unwrap().contains("Simulated"));
    for stream in [
        context.default_stream(),
        context.per_thread_stream(),
        context.new_stream().unwrap(),
        context.new_stream().unwrap().fork().unwrap(),
    ] {
        let numbers: Vec<u32> = (0..100_000).collect();
        let first = stream.clone_htod(&numbers).unwrap();
        let mut second: CudaSlice<u32> = stream.alloc_zeros(numbers.len()).unwrap();
        assert!(live_bytes() >= 800_000, "{}", live_bytes());
        assert_eq!(stream.clone_dtoh(&second).unwrap(), vec![0; numbers.len()]);
        stream.memcpy_dtod(&first, &mut second).unwrap();
        let (head, tail) = second.split_at(1000);
        assert_eq!(stream.clone_dtoh(&head).unwrap(), numbers[..1000]);
        assert_eq!(stream.clone_dtoh(&tail).unwrap(), numbers[1000..]);
        stream.memset_zeros(&mut second.slice_mut(10..20)).unwrap();
        let mut into = vec![7; numbers.len()];
        stream.memcpy_dtoh(&second, &mut into).unwrap();
        assert_eq!((into[9], into[10], into[19], into[20]), (9, 0, 0, 20));
        let third = second.try_clone().unwrap();
        assert_eq!(stream.clone_dtoh(&third).unwrap(), into);
        // SAFETY: written before it is read.
        let mut locked = unsafe { context.alloc_pinned::<u32>(1000) }.unwrap();
        locked.as_mut_slice().unwrap().fill(3);
        stream.memcpy_htod(&locked, &mut second.slice_mut(0..1000)).unwrap();
        assert_eq!(stream.clone_dtoh(&second.slice(0..1001)).unwrap()[999..], [3, 1000]);
        let empty: CudaSlice<u32> = stream.null().unwrap();
        assert!(empty.is_empty());
        drop((first, second, third, locked, empty));
        stream.synchronize().unwrap();
        assert_eq!(live_bytes(), 0);
    }
    context.check_err().unwrap();
    assert_eq!(calls("cuMemAllocAsync"), calls("cuMemFreeAsync"), "each was freed");
    assert_eq!(calls("cuMemHostAlloc"), calls("cuMemFreeHost"));
}

pub(crate) fn fills() {
    let context = CudaContext::new(0).unwrap();
    let stream = context.new_stream().unwrap();
    let raw = stream.cu_stream();
    let mut bytes: CudaSlice<u8> = stream.alloc_zeros(64).unwrap();
    let (at, _guard) = bytes.device_ptr_mut(&stream);
    // SAFETY: the stream is live, and each fill lies within the 64 bytes, but for the last.
    unsafe {
        let ok = CUresult::CUDA_SUCCESS;
        assert_eq!(sys::cuMemsetD8Async(at, 1, 16, raw), ok);
        assert_eq!(sys::cuMemsetD16Async(at + 16, 0x0302, 8, raw), ok);
        assert_eq!(sys::cuMemsetD32Async(at + 32, 0x0706_0504, 4, raw), ok);
        assert_eq!(sys::cuStreamSynchronize(raw), ok);
        assert_eq!(sys::cuMemsetD8_v2(at + 48, 8, 4), ok);
        assert_eq!(sys::cuMemsetD16_v2(at + 52, 0x0A09, 2), ok);
        assert_eq!(sys::cuMemsetD32_v2(at + 56, 0x0E0D_0C0B, 2), ok);
        let wrong = CUresult::CUDA_ERROR_INVALID_VALUE;
        assert_eq!(sys::cuMemsetD16_v2(at + 1, 0, 1), wrong, "not aligned");
        assert_eq!(sys::cuMemsetD32_v2(at + 2, 0, 1), wrong, "not aligned");
        assert_eq!(sys::cuMemsetD32_v2(at, 0, u64::MAX as usize), wrong, "longer than memory");
    }
    drop(_guard);
    let expected: Vec<u8> = [
        [1; 16].to_vec(),
        [2, 3].repeat(8),
        [4, 5, 6, 7].repeat(4),
        vec![8; 4],
        [9, 10].repeat(2),
        [11, 12, 13, 14].repeat(2),
    ]
    .concat();
    assert_eq!(stream.clone_dtoh(&bytes).unwrap(), expected);
}

pub(crate) fn peers() {
    let contexts = [CudaContext::new(0).unwrap(), CudaContext::new(1).unwrap()];
    assert_eq!(CudaContext::device_count().unwrap(), 2);
    assert_ne!(contexts[0].uuid().unwrap().bytes, contexts[1].uuid().unwrap().bytes);
    let streams = contexts.each_ref().map(|context| context.new_stream().unwrap());
    let numbers: Vec<u32> = (0..5000).collect();
    let here = streams[0].clone_htod(&numbers).unwrap();
    let mut there: CudaSlice<u32> = streams[1].alloc_zeros(5000).unwrap();
    // What one stream made, the other waits for.
    streams[1].wait(&streams[0].record_event(None).unwrap()).unwrap();
    streams[1].memcpy_dtod(&here, &mut there).unwrap();
    assert_eq!(streams[1].clone_dtoh(&there).unwrap(), numbers);
    assert_eq!(calls("cuMemcpyPeerAsync"), 1);
    drop((here, there));
    for context in &contexts {
        context.synchronize().unwrap();
        context.check_err().unwrap();
    }
    assert_eq!(live_bytes(), 0);
}

pub(crate) fn limits() {
    let context = CudaContext::new(0).unwrap();
    let stream = context.default_stream();
    let (free, total) = context.mem_get_info().unwrap();
    assert_eq!((free, total, context.total_mem().unwrap()), (64 << 20, 64 << 20, 64 << 20));
    // SAFETY: nothing reads it.
    let result = unsafe { stream.alloc::<u8>(65 << 20) };
    let Err(DriverError(code)) = result else { panic!("more than there is") };
    assert_eq!(code, CUresult::CUDA_ERROR_OUT_OF_MEMORY);
    context.bind_to_thread().unwrap();
    let mut address = 0;
    // SAFETY: the place is live.
    unsafe {
        assert_eq!(sys::cuMemAlloc_v2(&raw mut address, 32 << 20), CUresult::CUDA_SUCCESS);
        assert_eq!(live_bytes(), 32 << 20);
        let (mut kind, mut owner) = (0_u32, std::ptr::null_mut::<sys::CUctx_st>());
        let attribute = sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE;
        sys::cuPointerGetAttribute((&raw mut kind).cast(), attribute, address).result().unwrap();
        let attribute = sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_CONTEXT;
        let place = &raw mut owner;
        sys::cuPointerGetAttribute(place.cast(), attribute, address).result().unwrap();
        assert_eq!((kind, owner), (2, stream.context().cu_ctx()));
        assert_eq!(sys::cuMemFree_v2(address), CUresult::CUDA_SUCCESS);
        assert_eq!(sys::cuMemFree_v2(address), CUresult::CUDA_ERROR_INVALID_VALUE, "twice");
    }
    assert_eq!(live_bytes(), 0);
}

pub(crate) fn registered() {
    let context = CudaContext::new(0).unwrap();
    let stream = context.new_stream().unwrap();
    let slice = stream.clone_htod(&[5_u8; 4096]).unwrap();
    stream.synchronize().unwrap();
    let mut memory = vec![0_u8; 4096];
    let place = memory.as_mut_ptr();
    // SAFETY: the vector outlives its registration and the copy.
    unsafe {
        sys::cuMemHostRegister_v2(place.cast(), 4096, 0).result().unwrap();
        let again = sys::cuMemHostRegister_v2(place.cast(), 1, 0);
        assert_eq!(again, CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
        let mut address = 0;
        sys::cuMemHostGetDevicePointer_v2(&raw mut address, place.cast(), 0).result().unwrap();
        assert_eq!(address, place.expose_provenance() as u64);
    }
    // Page-locked: the call does not wait for the stream.
    hold(&stream);
    stream.memcpy_dtoh(&slice, &mut memory).unwrap();
    assert_eq!(memory, [0; 4096], "held");
    release(&stream);
    stream.synchronize().unwrap();
    assert_eq!(memory, [5; 4096]);
    // SAFETY: nothing uses it any more.
    unsafe {
        sys::cuMemHostUnregister(place.cast()).result().unwrap();
        let again = sys::cuMemHostUnregister(place.cast());
        assert_eq!(again, CUresult::CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
    }
}
