//! What is tried on each device, beyond the bare memory calls.

use std::sync::Arc;

use vmm_pool::Pool;
use vmm_sys::object::{Event, Range, RelaxedCapture, Stream};
use vmm_sys::topology::DeviceFacts;
use vmm_sys::{DeviceId, Driver, DriverError, DriverResult, ResultCode};

use super::ability::meaning;
use super::bytes::{Outcome, Scratch, Trouble, kernel_check, kernel_fill, same};
use super::finding::Finding;
use super::identity::gibibytes;
use super::remedy;

/// Two patterns that share no byte at most places.
const BY_COPY: u32 = 0x5EED_0001;
const BY_KERNEL: u32 = 0xA11C_0007;

/// How many addresses can be had in one piece: enough for all of the device, or how much less.
pub(super) fn addresses(driver: &Arc<dyn Driver>, facts: &DeviceFacts) -> Finding {
    let (id, what) = ("addresses", "addresses");
    let granule_bytes = facts.plain.as_ref().map_or(1 << 21, |plain| plain.minimum_bytes.max(1));
    // Not above what any device has: odd figures were seen.
    let wanted_bytes =
        facts.total_bytes.min(1 << 46).max(granule_bytes).next_multiple_of(granule_bytes);
    let mut bytes = wanted_bytes;
    let finding = loop {
        match Range::reserve(driver, bytes, granule_bytes, 0) {
            Ok(_) if bytes == wanted_bytes => {
                let text = format!("{} can be reserved in one piece", gibibytes(bytes));
                break Finding::ok(id, what, text);
            }
            Ok(_) => {
                let text = format!(
                    "only {} can be reserved in one piece, and no buffer can be longer",
                    gibibytes(bytes)
                );
                let advice = "lift limits on address space (ulimit -v, the container's)";
                break Finding::warn(id, what, text).advise(advice);
            }
            Err(_) if bytes > granule_bytes => {
                bytes = (bytes / 2).next_multiple_of(granule_bytes);
            }
            Err(error) => break Finding::warn(id, what, meaning(&error)).refused_by(&error),
        }
    };
    finding.with("reserved_bytes", bytes).on(facts.device)
}

/// Streams with an identity, events, and the relaxed capture mode: what frees in stream order need.
pub(super) fn streams(driver: &Arc<dyn Driver>, device: DeviceId) -> Outcome {
    let (id, what) = ("streams", "streams");
    let tried = || -> DriverResult<()> {
        let stream = Stream::create(driver, device)?;
        let _relaxed = RelaxedCapture::enter(driver)?;
        stream.capture_info()?;
        let event = Event::create(driver, device)?;
        event.record(&stream)?;
        event.wait()?;
        stream.synchronize()
    };
    let finding = match tried() {
        Ok(()) => Finding::ok(id, what, "a stream was made, and an event on it passed"),
        Err(error) => Finding::fail(id, what, meaning(&error)).refused_by(&error),
    };
    finding.on(device).into()
}

/// Bytes from the host to the device and back.
pub(super) fn copies(driver: &Arc<dyn Driver>, device: DeviceId) -> Outcome {
    let (id, what) = ("copy", "copies");
    let tried = || -> Result<u64, Trouble> {
        let scratch = Scratch::map(driver, device, &[device])?;
        scratch.write(device, BY_COPY)?;
        scratch.check(device, BY_COPY)?;
        let words = scratch.words();
        scratch.end()?;
        Ok(words * 4)
    };
    match tried() {
        Ok(bytes) => {
            let text = format!("{bytes} bytes went to the device and came back the same");
            Finding::ok(id, what, text).with("bytes", bytes).on(device).into()
        }
        Err(trouble) => trouble_on(device, id, what, &trouble),
    }
}

/// Bytes that kernels of the device write and read.
pub(super) fn kernels(driver: &Arc<dyn Driver>, device: DeviceId) -> Outcome {
    let (id, what) = ("kernel", "kernels");
    let tried = || -> Result<(), Trouble> {
        let scratch = Scratch::map(driver, device, &[device])?;
        let stream = Stream::create(driver, device)?;
        kernel_fill(device, &stream, &scratch, BY_KERNEL)?;
        scratch.check(device, BY_KERNEL)?;
        kernel_check(device, &stream, &scratch, &scratch, BY_KERNEL)?;
        Ok(scratch.end()?)
    };
    match tried() {
        Ok(()) => {
            let text = "a kernel wrote mapped memory, and a second one read it right";
            Finding::ok(id, what, text).on(device).into()
        }
        Err(Trouble::Refused(error)) if is_about_the_kernel(&error) => {
            let text = format!("this program's test kernels do not run here: {error}");
            let advice = "a pool needs no kernel of its own; yours may need a newer driver";
            Finding::warn(id, what, text).advise(advice).refused_by(&error).on(device).into()
        }
        Err(trouble) => trouble_on(device, id, what, &trouble),
    }
}

/// The compiler in the driver refused, which says nothing about memory.
pub(super) fn is_about_the_kernel(error: &DriverError) -> bool {
    matches!(
        error.code(),
        ResultCode::INVALID_PTX | ResultCode::UNSUPPORTED_PTX_VERSION | ResultCode::NOT_FOUND
    )
}

/// A pool as a user would have it.
pub(super) fn pool(driver: &Arc<dyn Driver>, device: DeviceId) -> Outcome {
    let (id, what) = ("pool", "pool");
    // Over the border of any chunk that `Auto` starts with, and no multiple of anything.
    let text: Vec<u8> = (0..=250).cycle().take((2 << 20) + 4097).collect();
    let tried = || -> Result<Result<(), Trouble>, vmm_pool::Error> {
        let pool = Pool::builder(driver.clone()).device(device).background(false).build()?;
        let lane = pool.lane(&Stream::create(driver, device)?)?;
        let buffer = lane.alloc(text.len() as u64)?;
        buffer.write(0, &text)?;
        let mut back = vec![0; text.len()];
        buffer.read(0, &mut back)?;
        Ok(same(&back, &text))
    };
    match tried() {
        Ok(Ok(())) => {
            let text = "built, asked for a buffer, and its bytes were right";
            Finding::ok(id, what, text).on(device).into()
        }
        Ok(Err(trouble)) => trouble_on(device, id, what, &trouble),
        Err(error) => {
            let advice = match &error {
                vmm_pool::Error::Driver(cause)
                | vmm_pool::Error::Unsupported { cause, .. }
                | vmm_pool::Error::OutOfAddresses { cause, .. } => remedy::of(cause),
                _ => "see the text: it names the numbers",
            };
            Finding::fail(id, what, error.to_string()).advise(advice).on(device).into()
        }
    }
}

fn trouble_on(device: DeviceId, id: &'static str, what: &str, trouble: &Trouble) -> Outcome {
    match trouble {
        Trouble::Refused(error) => {
            Finding::fail(id, what, meaning(error)).refused_by(error).on(device).into()
        }
        Trouble::Wrong(text) => {
            let advice = "do not use this device: look for Xid and ECC lines in dmesg";
            let finding = Finding::fail(id, what, text.as_str()).advise(advice).on(device);
            Outcome { finding, wrong_bytes: true }
        }
    }
}
