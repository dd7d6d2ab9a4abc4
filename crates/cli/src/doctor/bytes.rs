//! Scratch memory, and bytes that are known: what is written, copied and compared.

use std::sync::Arc;

use vmm_sys::object::{Chunk, Mapping, Range, Stream};
use vmm_sys::{
    AccessGrant, ChunkProps, DeviceId, Driver, DriverError, DriverResult, GranularityKind,
    ProbeKernel,
};

use super::finding::Finding;

/// A finding, and whether bytes came back wrong.
pub(super) struct Outcome {
    pub(super) finding: Finding,
    pub(super) wrong_bytes: bool,
}

impl From<Finding> for Outcome {
    fn from(finding: Finding) -> Outcome {
        Outcome { finding, wrong_bytes: false }
    }
}

/// Why bytes were not seen to arrive.
#[derive(Debug)]
pub(super) enum Trouble {
    /// The driver refused a step.
    Refused(DriverError),
    /// Something else arrived.
    Wrong(String),
}

impl From<DriverError> for Trouble {
    fn from(error: DriverError) -> Trouble {
        Trouble::Refused(error)
    }
}

/// Granules of half a GiB exist; the rest of one tells nothing new.
const TRIED_BYTES: u64 = 4 << 20;

/// One granule of a device's memory, mapped.
pub(super) struct Scratch {
    mapping: Mapping,
    range: Range,
}

impl Scratch {
    /// Maps a granule of `owner`, for `users` to read and write.
    pub(super) fn map(
        driver: &Arc<dyn Driver>,
        owner: DeviceId,
        users: &[DeviceId],
    ) -> DriverResult<Scratch> {
        let props = ChunkProps::on_device(owner);
        let bytes = driver.granularity(&props, GranularityKind::Minimum)?;
        let range = Range::reserve(driver, bytes, bytes, 0)?;
        let chunk = Chunk::create(driver, bytes, &props)?;
        let mapping = Mapping::map(&range, 0, Arc::new(chunk))?;
        let grants: Vec<_> = users.iter().map(|user| AccessGrant::read_write(*user)).collect();
        mapping.set_access(&grants)?;
        Ok(Scratch { mapping, range })
    }

    pub(super) fn address(&self) -> u64 {
        self.range.address()
    }

    /// The words that are tried; the one behind them is left for a counter.
    pub(super) fn words(&self) -> u64 {
        self.range.bytes().min(TRIED_BYTES) / 4 - 1
    }

    pub(super) fn counter(&self) -> u64 {
        self.address() + self.words() * 4
    }

    /// Words that count up from `value`, copied from the host through `device`.
    pub(super) fn write(&self, device: DeviceId, value: u32) -> DriverResult<()> {
        self.range.write(device, 0, &pattern(self.words(), value))
    }

    /// The same words, copied back through `device` and compared.
    pub(super) fn check(&self, device: DeviceId, value: u32) -> Result<(), Trouble> {
        let expected = pattern(self.words(), value);
        let mut found = vec![0; expected.len()];
        self.range.read(device, 0, &mut found)?;
        same(&found, &expected)
    }

    /// Gives it back. Not left to the drop: a refusal to unmap is a finding.
    pub(super) fn end(self) -> DriverResult<()> {
        self.mapping.unmap().map(drop).map_err(|(_, error)| error)
    }
}

/// A kernel on `device` compares words that count up from `value`, and counts the wrong ones in the
/// last word of `counter`, which is memory of its own.
pub(super) fn kernel_check(
    device: DeviceId,
    stream: &Stream,
    source: &Scratch,
    counter: &Scratch,
    value: u32,
) -> Result<(), Trouble> {
    let offset = counter.words() * 4;
    counter.range.fill(device, offset, 4, 0)?;
    let (src, words, errors) = (source.address(), source.words(), counter.counter());
    launch(device, stream, &ProbeKernel::CheckWords { src, words, value, errors })?;
    stream.synchronize()?;
    let mut wrong = [0; 4];
    counter.range.read(device, offset, &mut wrong)?;
    match u32::from_le_bytes(wrong) {
        0 => Ok(()),
        wrong => Err(Trouble::Wrong(format!("a kernel found {wrong} of {words} words wrong"))),
    }
}

/// A kernel on `device` writes words that count up from `value`.
pub(super) fn kernel_fill(
    device: DeviceId,
    stream: &Stream,
    target: &Scratch,
    value: u32,
) -> DriverResult<()> {
    let (dst, words) = (target.address(), target.words());
    launch(device, stream, &ProbeKernel::FillWords { dst, words, value })?;
    stream.synchronize()
}

#[allow(unsafe_code)] // the contract's launch takes a handle
fn launch(device: DeviceId, stream: &Stream, kernel: &ProbeKernel) -> DriverResult<()> {
    // SAFETY: `stream` owns a live handle; the addresses are those of scratch memory of this
    // driver, which the callers keep mapped until the stream was synchronised.
    unsafe { stream.driver().launch(device, kernel, stream.handle()) }
}

/// 32-bit words that count up, as the probe kernels write and expect them.
fn pattern(words: u64, value: u32) -> Vec<u8> {
    // The truncation is the wrap that the kernels do too.
    (0..words).flat_map(|index| value.wrapping_add(index as u32).to_le_bytes()).collect()
}

pub(super) fn same(found: &[u8], expected: &[u8]) -> Result<(), Trouble> {
    let differs = |(_, (found, expected)): &(usize, (&u8, &u8))| found != expected;
    let mut wrong = found.iter().zip(expected).enumerate().filter(differs);
    let Some((offset, (first, wanted))) = wrong.next() else { return Ok(()) };
    let count = 1 + wrong.count();
    Err(Trouble::Wrong(format!(
        "{count} of {} bytes came back wrong, the first at offset {offset}: {first:#04x} in place \
         of {wanted:#04x}",
        expected.len()
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_difference_is_counted_and_placed() {
        let expected = pattern(3, u32::MAX);
        assert_eq!(expected, [255, 255, 255, 255, 0, 0, 0, 0, 1, 0, 0, 0]);
        assert!(same(&expected, &expected).is_ok());
        let mut found = expected.clone();
        (found[4], found[9]) = (7, 1);
        let Err(Trouble::Wrong(text)) = same(&found, &expected) else { panic!("the same?") };
        let parts = "2 of 12 bytes came back wrong, the first at offset 4: 0x07 in place of 0x00";
        assert_eq!(text, parts);
    }
}
