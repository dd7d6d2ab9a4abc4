//! Work on device memory that a benchmark owns: its few unsafe calls, in one place.
//!
//! An [`Area`] is made from what owns its addresses, so every address here was given out by the driver.
//! Whether the memory behind it is there when the GPU comes to it is the benchmark's business: a wrong
//! one faults the context and ends the run.

use std::marker::PhantomData;
use std::sync::Arc;

use vmm_pool::ElasticBuffer;
use vmm_pool_cli::replay::Cause;
use vmm_sys::object::{Range, Stream};
use vmm_sys::{DeviceId, Driver, DriverResult, ProbeKernel, Transfer};

/// Bytes of one word of a kernel.
const WORD: u64 = 4;

/// Device addresses of somebody who is alive.
#[derive(Clone, Copy, Debug)]
pub struct Area<'a> {
    address: u64,
    bytes: u64,
    _owner: PhantomData<&'a ()>,
}

impl<'a> Area<'a> {
    /// All of a range.
    pub fn of_range(range: &'a Range) -> Area<'a> {
        Area { address: range.address(), bytes: range.bytes(), _owner: PhantomData }
    }

    /// All of an elastic buffer.
    pub fn of_buffer(buffer: &'a ElasticBuffer) -> Area<'a> {
        let (address, bytes) = (buffer.address(), buffer.capacity_bytes());
        Area { address, bytes, _owner: PhantomData }
    }

    /// All of an allocation.
    pub fn of_alloc(alloc: &'a Alloc) -> Area<'a> {
        Area { address: alloc.address, bytes: alloc.bytes, _owner: PhantomData }
    }

    /// A part of it, of a length.
    ///
    /// # Errors
    /// It does not lie within.
    pub fn part(self, offset: u64, bytes: u64) -> Result<Area<'a>, Cause> {
        match offset.checked_add(bytes) {
            Some(end) if end <= self.bytes => {
                Ok(Area { address: self.address + offset, bytes, ..self })
            }
            _ => Err(format!("{bytes} bytes at {offset} are not within {}", self.bytes).into()),
        }
    }

    /// Length in bytes.
    pub fn bytes(self) -> u64 {
        self.bytes
    }

    fn words(self) -> u64 {
        self.bytes / WORD
    }
}

/// Memory from `cuMemAlloc`.
#[derive(Debug)]
pub struct Alloc {
    driver: Arc<dyn Driver>,
    device: DeviceId,
    address: u64,
    bytes: u64,
}

impl Alloc {
    /// Takes `bytes` of `device`.
    ///
    /// # Errors
    /// The driver's.
    pub fn new(driver: &Arc<dyn Driver>, device: DeviceId, bytes: u64) -> DriverResult<Alloc> {
        let address = driver.mem_alloc(device, bytes)?;
        Ok(Alloc { driver: driver.clone(), device, address, bytes })
    }
}

impl Drop for Alloc {
    fn drop(&mut self) {
        if let Err(error) = self.driver.mem_free(self.device, self.address) {
            // Nothing more can be done; the process gives it back when it ends.
            eprintln!("{} bytes were not given back: {error}", self.bytes);
        }
    }
}

/// Enqueues a copy of all of `src` to the beginning of `dst`, by the engines of the stream's device.
///
/// # Errors
/// `dst` is shorter; the driver's.
#[allow(unsafe_code, reason = "a copy takes plain addresses")]
pub fn copy(stream: &Stream, dst: Area<'_>, src: Area<'_>) -> Result<(), Cause> {
    let dst = dst.part(0, src.bytes)?;
    // SAFETY: an `Area` has addresses that the driver gave out, and both are as long as the copy.
    unsafe { stream.copy(dst.address, src.address, src.bytes)? };
    Ok(())
}

/// Enqueues a fill of all of `dst`.
///
/// # Errors
/// The driver's.
#[allow(unsafe_code, reason = "a fill takes a plain address")]
pub fn fill(stream: &Stream, dst: Area<'_>, value: u8) -> Result<(), Cause> {
    // SAFETY: an `Area` has addresses that the driver gave out.
    unsafe { stream.fill(dst.address, dst.bytes, value)? };
    Ok(())
}

/// Enqueues a kernel that writes `value`, `value + 1`, … to all words of `dst`.
///
/// # Errors
/// The driver's.
pub fn write_words(stream: &Stream, dst: Area<'_>, value: u32) -> Result<(), Cause> {
    let kernel = ProbeKernel::FillWords { dst: dst.address, words: dst.words(), value };
    launch(stream, &kernel)
}

/// Enqueues a kernel that copies all words of `src` to the beginning of `dst`.
///
/// # Errors
/// `dst` is shorter; the driver's.
pub fn copy_words(stream: &Stream, dst: Area<'_>, src: Area<'_>) -> Result<(), Cause> {
    let dst = dst.part(0, src.bytes)?;
    let (dst, words) = (dst.address, src.words());
    launch(stream, &ProbeKernel::CopyWords { dst, src: src.address, words })
}

/// How many words of `src` are not `value`, `value + 1`, …, as a kernel sees it behind the stream's work.
/// The count goes through the first word of `scratch`.
///
/// # Errors
/// `scratch` has no word; the driver's.
pub fn wrong_words(
    stream: &Stream,
    src: Area<'_>,
    value: u32,
    scratch: Area<'_>,
) -> Result<u32, Cause> {
    let errors = scratch.part(0, WORD)?;
    fill(stream, errors, 0)?;
    let (src, words) = (src.address, src.words());
    launch(stream, &ProbeKernel::CheckWords { src, words, value, errors: errors.address })?;
    stream.synchronize()?;
    let mut count = [0; WORD as usize];
    read(stream, &mut count, errors)?;
    Ok(u32::from_le_bytes(count))
}

/// Copies the beginning of `src` to the host and waits, whatever the stream does meanwhile.
///
/// # Errors
/// `src` is shorter than `target`; the driver's.
#[allow(unsafe_code, reason = "a copy takes plain addresses")]
pub fn read(stream: &Stream, target: &mut [u8], src: Area<'_>) -> Result<(), Cause> {
    let src = src.part(0, target.len() as u64)?;
    let transfer =
        Transfer::DeviceToHost { dst: target.as_mut_ptr(), src: src.address, bytes: src.bytes };
    // SAFETY: an `Area` has addresses that the driver gave out, and `target` is writable for as long
    // during this synchronous call.
    unsafe { stream.driver().copy(stream.device(), &transfer)? };
    Ok(())
}

/// Only for kernels whose addresses are those of areas.
#[allow(unsafe_code, reason = "the contract's launch takes a stream as a handle")]
fn launch(stream: &Stream, kernel: &ProbeKernel) -> Result<(), Cause> {
    // SAFETY: the stream is live, as it is borrowed; the three callers above take the kernel's
    // addresses and lengths from areas.
    unsafe { stream.driver().launch(stream.device(), kernel, stream.handle())? };
    Ok(())
}
