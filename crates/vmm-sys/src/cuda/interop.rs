//! Contexts and streams of cudarc, taken as they are.
//!
//! Only what cudarc has in every loading mode is used here, so that a graph in which somebody links
//! `libcuda` builds too.

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaStream};

use crate::call::Call;
use crate::error::{DriverError, DriverResult, ResultCode};
use crate::types::{DeviceId, StreamHandle};

/// The device of a cudarc context.
///
/// # Errors
/// `CUDA_ERROR_INVALID_CONTEXT` for a context that cudarc made apart from the device's primary one:
/// streams and events of the two do not mix.
pub fn device_of(context: &Arc<CudaContext>) -> DriverResult<DeviceId> {
    let ordinal = u32::try_from(context.ordinal()).map_err(|_| {
        DriverError::new(Call::DeviceGet, ResultCode::INVALID_DEVICE)
            .because(format_args!("ordinal {}", context.ordinal()))
    })?;
    let device = DeviceId(ordinal);
    if context.is_primary() {
        return Ok(device);
    }
    Err(DriverError::new(Call::CtxSetCurrent, ResultCode::INVALID_CONTEXT)
        .on(device)
        .because("the context is not the device's primary one: use CudaContext::new"))
}

/// The device and the handle of a cudarc stream. The handle is live as long as a clone of the
/// [`Arc`] is kept.
///
/// # Errors
/// As [`device_of`] for the stream's context.
pub fn stream_of(stream: &Arc<CudaStream>) -> DriverResult<(DeviceId, StreamHandle)> {
    let device = device_of(stream.context())?;
    let handle = stream.cu_stream().expose_provenance() as u64;
    Ok((device, StreamHandle(handle)))
}
