//! The words in which kernels count what they found wrong: memory of the driver's, not of a pool's.

use std::sync::Arc;

use vmm_sys::object::{Chunk, Mapping, Range, Stream};
use vmm_sys::{
    AccessGrant, ChunkProps, DeviceId, Driver, DriverResult, GranularityKind, ProbeKernel,
};

/// Checks of a thread on one device that can be under way.
pub(super) const WORDS: usize = 128;
const WORD_BYTES: u64 = 4;
const ROW_BYTES: u64 = WORDS as u64 * WORD_BYTES;
/// A longer buffer is written and checked at three places, unless all of it is asked for.
const AREA_BYTES: u64 = 16 << 10;

/// A row of words for each thread, on each device.
pub(super) struct Board {
    /// The mapping goes before its range.
    devices: Vec<(Mapping, Range)>,
}

impl Board {
    pub(super) fn new(driver: &Arc<dyn Driver>, devices: u32, rows: u32) -> DriverResult<Board> {
        let one = |device| -> DriverResult<(Mapping, Range)> {
            let props = ChunkProps::on_device(device);
            let granule = driver.granularity(&props, GranularityKind::Minimum)?;
            let bytes = (u64::from(rows) * ROW_BYTES).next_multiple_of(granule);
            let range = Range::reserve(driver, bytes, 0, 0)?;
            let mapping = Mapping::map(&range, 0, Arc::new(Chunk::create(driver, bytes, &props)?))?;
            mapping.set_access(&[AccessGrant::read_write(device)])?;
            // A chunk is all zero (row D-C5), so the words are.
            Ok((mapping, range))
        };
        let devices = (0..devices).map(|device| one(DeviceId(device)));
        Ok(Board { devices: devices.collect::<DriverResult<_>>()? })
    }

    /// The address of a word.
    pub(super) fn address(&self, device: DeviceId, row: u32, word: usize) -> u64 {
        let (_, range) = &self.devices[device.0 as usize];
        range.address() + u64::from(row) * ROW_BYTES + word as u64 * WORD_BYTES
    }

    /// A row as it is now. The caller has waited for its checks.
    pub(super) fn read(&self, device: DeviceId, row: u32) -> DriverResult<Vec<u32>> {
        let (_, range) = &self.devices[device.0 as usize];
        let mut bytes = vec![0; ROW_BYTES as usize];
        range.read(device, u64::from(row) * ROW_BYTES, &mut bytes)?;
        let words = bytes.chunks_exact(WORD_BYTES as usize);
        Ok(words.map(|word| u32::from_le_bytes(word.try_into().expect("four bytes"))).collect())
    }
}

/// Enqueues a kernel.
pub(super) fn launch(stream: &Stream, kernel: &ProbeKernel) -> DriverResult<()> {
    // SAFETY: the stream owns a live handle. The addresses are of memory that its device may use and
    // that stays until the kernel is done: a buffer that is freed behind it in stream order, an
    // elastic buffer under a guard, or a word of the board.
    unsafe { stream.driver().launch(stream.device(), kernel, stream.handle()) }
}

/// Words at an address that count up from a value: what a buffer must hold.
#[derive(Clone, Copy, Debug)]
pub(super) struct Words {
    pub(super) address: u64,
    pub(super) words: u64,
    pub(super) value: u32,
}

impl Words {
    pub(super) fn over(address: u64, bytes: u64, value: u32) -> Words {
        Words { address, words: bytes / WORD_BYTES, value }
    }

    /// All of it, if it is short or `all` is said; else its start, middle and end.
    pub(super) fn areas(self, all: bool) -> impl Iterator<Item = Words> {
        let area = AREA_BYTES / WORD_BYTES;
        let starts = if all || self.words <= 4 * area {
            vec![0]
        } else {
            vec![0, (self.words - area) / 2, self.words - area]
        };
        let length = if starts.len() == 1 { self.words } else { area };
        starts.into_iter().map(move |start| Words {
            address: self.address + start * WORD_BYTES,
            words: length,
            // The middle of a buffer is not like its start.
            value: self.value.wrapping_add(start as u32),
        })
    }

    pub(super) fn fill(self, stream: &Stream) -> DriverResult<()> {
        let Words { address: dst, words, value } = self;
        launch(stream, &ProbeKernel::FillWords { dst, words, value })
    }

    /// What is wrong is added to the word at `errors`.
    pub(super) fn check(self, stream: &Stream, errors: u64) -> DriverResult<()> {
        let Words { address: src, words, value } = self;
        launch(stream, &ProbeKernel::CheckWords { src, words, value, errors })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn areas_are_parts_of_what_is_filled_as_a_whole() {
        for bytes in [0, 4, 512, 64 << 10, (64 << 10) + 512, 5 << 20] {
            let whole = Words::over(1 << 40, bytes, 7);
            for part in whole.areas(false) {
                let start = (part.address - whole.address) / WORD_BYTES;
                assert!(start + part.words <= whole.words, "{part:?}");
                assert_eq!(part.value, 7 + start as u32, "{part:?}");
            }
            assert_eq!(whole.areas(true).count(), 1);
        }
    }
}
