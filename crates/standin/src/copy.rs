//! Copies and fills.
//!
//! Pageable host memory is treated as the driver's documentation has it: what is sent from it is read
//! before an asynchronous call returns, and a copy into it is done when the call returns. Only
//! page-locked memory is read and written when the stream comes to the copy. Inside a capture the
//! pointer is kept, whatever it points to.

use vmm_sys::sim::Sim;
use vmm_sys::{CaptureMode, CaptureStatus, DeviceId, Driver, ResultCode, StreamHandle, Transfer};

use crate::context::device_of;
use crate::door::{Done, Refusal};
use crate::machine::current;

/// `CU_MEMORYTYPE_DEVICE`
const MEMORY_DEVICE: u32 = 2;

fn copy(transfer: &Transfer) -> Done {
    let (sim, device) = current()?;
    // SAFETY: the caller of the entry point vouches for host memory during the call; device addresses
    // are looked up by the simulated device.
    Ok(unsafe { sim.copy(device, transfer) }?)
}

fn is_captured(sim: &Sim, device: DeviceId, stream: StreamHandle) -> bool {
    // SAFETY: the simulated device checks the handle. A stream that cannot be asked about refuses the
    // copy as well, and with its own code.
    let info = unsafe { sim.capture_info(device, stream) };
    info.is_ok_and(|info| info.status != CaptureStatus::None)
}

fn copy_async(transfer: &Transfer, stream: u64) -> Done {
    let (sim, device) = current()?;
    let stream = StreamHandle(stream);
    let pageable = |host: u64, bytes: u64| {
        bytes > 0 && !sim.is_page_locked(host, bytes) && !is_captured(sim, device, stream)
    };
    match *transfer {
        Transfer::HostToDevice { dst, src, bytes }
            if pageable(src.expose_provenance() as u64, bytes) =>
        {
            if src.is_null() {
                return Err(Refusal::new(ResultCode::INVALID_VALUE, "null in the place of bytes"));
            }
            // SAFETY: the caller vouches for that many readable bytes during the call.
            let src = unsafe { std::slice::from_raw_parts(src, bytes as usize) };
            Ok(sim.upload_staged(device, dst, src, stream)?)
        }
        Transfer::DeviceToHost { dst, bytes, .. }
            if pageable(dst.expose_provenance() as u64, bytes) =>
        {
            // The driver's own wait, which harms no capture.
            let mode = sim.exchange_capture_mode(CaptureMode::Relaxed)?;
            // SAFETY: the bytes are written before this call returns, unless the wait was given up as
            // nothing lets the stream go, which the program is told; the handle is checked.
            let done = unsafe {
                let copied = sim.copy_async(device, transfer, stream);
                copied.and_then(|()| sim.stream_synchronize(device, stream))
            };
            sim.exchange_capture_mode(mode)?;
            Ok(done?)
        }
        // SAFETY: page-locked memory of this machine stays until it is freed, which the caller does
        // after the stream has passed; other host memory is kept by who captures it.
        _ => Ok(unsafe { sim.copy_async(device, transfer, stream) }?),
    }
}

/// Which way a copy between any two addresses goes.
fn unified(dst: u64, src: u64, bytes: u64) -> Result<Transfer, Refusal> {
    let (sim, _) = current()?;
    let on_device =
        |address| Ok::<_, Refusal>(sim.pointer_info(address)?.memory_type == MEMORY_DEVICE);
    let host = |address: u64| std::ptr::with_exposed_provenance_mut::<u8>(address as usize);
    match (on_device(dst)?, on_device(src)?) {
        (true, false) => Ok(Transfer::HostToDevice { dst, src: host(src), bytes }),
        (false, true) => Ok(Transfer::DeviceToHost { dst: host(dst), src, bytes }),
        (true, true) => Ok(Transfer::DeviceToDevice { dst, src, bytes }),
        (false, false) => {
            Err(Refusal::new(ResultCode::INVALID_VALUE, "neither address is a device's"))
        }
    }
}

/// Both contexts are named by the call.
fn peer(
    dst: u64,
    dst_context: u64,
    src: u64,
    src_context: u64,
    bytes: u64,
) -> Result<Transfer, Refusal> {
    let (dst_device, src_device) = (device_of(dst_context)?, device_of(src_context)?);
    Ok(Transfer::Peer { dst, dst_device, src, src_device, bytes })
}

/// A fill with words of `width` bytes, of which `pattern` has as many as fit into four bytes.
fn fill(dst: u64, pattern: [u8; 4], width: u64, count: u64, stream: Option<u64>) -> Done {
    let (sim, device) = current()?;
    let Some(bytes) = count.checked_mul(width).filter(|_| dst.is_multiple_of(width)) else {
        let why = format_args!("{count} words of {width} bytes at {dst:#x}");
        return Err(Refusal::new(ResultCode::INVALID_VALUE, why));
    };
    Ok(sim.fill_pattern(device, dst, pattern, bytes, stream.map(StreamHandle))?)
}

fn halves(value: u16) -> [u8; 4] {
    let [low, high] = value.to_le_bytes();
    [low, high, low, high]
}

entries! {
    fn cuMemcpyHtoD_v2(dst: u64, src: *const u8, bytes: u64) {
        copy(&Transfer::HostToDevice { dst, src, bytes })
    }

    fn cuMemcpyDtoH_v2(dst: *mut u8, src: u64, bytes: u64) {
        copy(&Transfer::DeviceToHost { dst, src, bytes })
    }

    fn cuMemcpyDtoD_v2(dst: u64, src: u64, bytes: u64) {
        copy(&Transfer::DeviceToDevice { dst, src, bytes })
    }

    fn cuMemcpyPeer(dst: u64, dst_context: u64, src: u64, src_context: u64, bytes: u64) {
        copy(&peer(dst, dst_context, src, src_context, bytes)?)
    }

    fn cuMemcpy(dst: u64, src: u64, bytes: u64) {
        copy(&unified(dst, src, bytes)?)
    }

    fn cuMemcpyHtoDAsync_v2(dst: u64, src: *const u8, bytes: u64, stream: u64) {
        copy_async(&Transfer::HostToDevice { dst, src, bytes }, stream)
    }

    fn cuMemcpyDtoHAsync_v2(dst: *mut u8, src: u64, bytes: u64, stream: u64) {
        copy_async(&Transfer::DeviceToHost { dst, src, bytes }, stream)
    }

    fn cuMemcpyDtoDAsync_v2(dst: u64, src: u64, bytes: u64, stream: u64) {
        copy_async(&Transfer::DeviceToDevice { dst, src, bytes }, stream)
    }

    fn cuMemcpyPeerAsync(dst: u64, dst_context: u64, src: u64, src_context: u64, bytes: u64, stream: u64) {
        copy_async(&peer(dst, dst_context, src, src_context, bytes)?, stream)
    }

    fn cuMemcpyAsync(dst: u64, src: u64, bytes: u64, stream: u64) {
        copy_async(&unified(dst, src, bytes)?, stream)
    }

    fn cuMemsetD8_v2(dst: u64, value: u8, count: u64) {
        fill(dst, [value; 4], 1, count, None)
    }

    fn cuMemsetD16_v2(dst: u64, value: u16, count: u64) {
        fill(dst, halves(value), 2, count, None)
    }

    fn cuMemsetD32_v2(dst: u64, value: u32, count: u64) {
        fill(dst, value.to_le_bytes(), 4, count, None)
    }

    fn cuMemsetD8Async(dst: u64, value: u8, count: u64, stream: u64) {
        fill(dst, [value; 4], 1, count, Some(stream))
    }

    fn cuMemsetD16Async(dst: u64, value: u16, count: u64, stream: u64) {
        fill(dst, halves(value), 2, count, Some(stream))
    }

    fn cuMemsetD32Async(dst: u64, value: u32, count: u64, stream: u64) {
        fill(dst, value.to_le_bytes(), 4, count, Some(stream))
    }
}
