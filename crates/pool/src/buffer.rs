//! [`Buffer`]: what a caller holds.

use std::fmt;

use vmm_sys::object::Stream;
use vmm_sys::{DeviceId, process};

use crate::error::Error;
use crate::lane::{self, Gate, LaneCell};

/// Memory of one device at a stable address. Dropping it frees in stream order: work enqueued on
/// the lane's stream before the drop may still use it, and so may work on streams named by
/// [`Buffer::record_stream`]. It can be dropped in any thread. A buffer of a thread's own default
/// stream that is dropped in another thread is reused once everything that was enqueued on any
/// thread's default stream until then is done.
///
/// Who owns the physical memory: the buffer's lane, which shares chunks between its buffers.
/// Is the address stable: yes, until the drop. Who may access: the home device.
pub struct Buffer {
    /// None for zero bytes.
    cell: Option<&'static LaneCell>,
    address: u64,
    offset: u64,
    bytes: u64,
    home: Home,
    /// Streams other than the lane's own that use the memory. Boxed: most buffers have none.
    #[expect(clippy::box_collection, reason = "keeps the common buffer small")]
    crossed: Option<Box<Vec<Stream>>>,
}

/// Where a buffer lives, and whether dropping it takes more than giving the block back. One word,
/// so that a lane hands it out as such.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Home {
    pub(crate) device: DeviceId,
    /// Other streams use the memory, or the lane's stream is one thread's own.
    pub(crate) special: bool,
}

impl Buffer {
    #[inline]
    pub(crate) fn new(
        cell: &'static LaneCell,
        address: u64,
        offset: u64,
        bytes: u64,
        home: Home,
    ) -> Buffer {
        Buffer { cell: Some(cell), address, offset, bytes, home, crossed: None }
    }

    /// The same block without its first `bytes`, which nobody asked for.
    pub(crate) fn skip(mut self, bytes: u64) -> Buffer {
        self.address += bytes;
        self.offset += bytes;
        self
    }

    /// The one answer to a request of zero bytes.
    pub(crate) fn empty(device: DeviceId) -> Buffer {
        let home = Home { device, special: false };
        Buffer { cell: None, address: 0, offset: 0, bytes: 0, home, crossed: None }
    }

    /// Gives the block away by its address: nothing is freed when `self` is gone.
    #[inline]
    pub(crate) fn into_address(self) -> u64 {
        let address = self.address;
        std::mem::forget(self);
        address
    }

    /// Drops it: its memory is not reused before these gates have passed, too.
    pub(crate) fn drop_behind(mut self, gates: &[Gate]) {
        if let Some(cell) = self.cell.take_if(|_| !process::is_forked_child()) {
            self.free_special(cell, gates);
        }
    }

    fn free_special(&mut self, cell: &'static LaneCell, gates: &[Gate]) {
        let crossed = self.crossed.take().map_or_else(Vec::new, |crossed| *crossed);
        lane::free_special(cell, self.offset, self.bytes, crossed, gates);
    }

    /// The device address; 0 for an empty buffer.
    #[inline]
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Length in bytes, as asked for.
    #[inline]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether zero bytes were asked for.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// The device whose memory this is: its home.
    pub fn device(&self) -> DeviceId {
        self.home.device
    }

    /// Says that work on `stream` uses the memory. When the buffer is dropped, the memory is not
    /// reused before the work enqueued on `stream` until then is done.
    ///
    /// Recording the lane's own stream changes nothing; recording a stream twice counts once.
    ///
    /// # Errors
    /// [`Error::UnknownDevice`] if the stream belongs to another driver.
    pub fn record_stream(&mut self, stream: &Stream) -> Result<(), Error> {
        let Some(cell) = self.cell else { return Ok(()) };
        if process::is_forked_child() {
            return Err(Error::DriverGone);
        }
        {
            let guard = cell.lock();
            // The lane cannot retire while this buffer is alive.
            let Some(state) = guard.as_ref() else { return Ok(()) };
            if !state.is_crossed_by(stream)? {
                return Ok(());
            }
        }
        let crossed = self.crossed.get_or_insert_default();
        if !crossed.iter().any(|s| s.id() == stream.id() && s.device() == stream.device()) {
            crossed.push(stream.clone());
        }
        self.home.special = true;
        Ok(())
    }

    /// Copies `source` to `offset` in the buffer and waits. The caller orders it against work that
    /// is still running.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`] if the bytes do not lie in the buffer; [`Error::Broken`] if a thread panicked
    /// in its lane; else the driver's.
    pub fn write(&self, offset: u64, source: &[u8]) -> Result<(), Error> {
        let mut rest = source;
        for (range, at, bytes) in self.pieces(offset, source.len() as u64)? {
            let (now, later) = rest.split_at(bytes as usize);
            range.write(self.home.device, at, now)?;
            rest = later;
        }
        Ok(())
    }

    /// Copies from `offset` in the buffer into `target` and waits.
    ///
    /// # Errors
    /// As [`Buffer::write`].
    pub fn read(&self, offset: u64, target: &mut [u8]) -> Result<(), Error> {
        let mut rest = target;
        for (range, at, bytes) in self.pieces(offset, rest.len() as u64)? {
            let (now, later) = rest.split_at_mut(bytes as usize);
            range.read(self.home.device, at, now)?;
            rest = later;
        }
        Ok(())
    }

    fn pieces(
        &self,
        offset: u64,
        bytes: u64,
    ) -> Result<Vec<(vmm_sys::object::Range, u64, u64)>, Error> {
        if offset.checked_add(bytes).is_none_or(|end| end > self.bytes) {
            let buffer_bytes = self.bytes;
            return Err(Error::OutOfBounds { offset, bytes, buffer_bytes });
        }
        let Some(cell) = self.cell else { return Ok(Vec::new()) };
        if process::is_forked_child() {
            return Err(Error::DriverGone);
        }
        let guard = cell.lock();
        // The lane cannot retire while this buffer is alive.
        let Some(state) = guard.as_ref() else { return Err(cell.why_unknown(self.address)) };
        Ok(state.region.pieces(self.offset + offset, bytes))
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({} bytes at {:#x} of {})", self.bytes, self.address, self.home.device)
    }
}

impl Drop for Buffer {
    #[inline]
    fn drop(&mut self) {
        let Some(cell) = self.cell else { return };
        if process::is_forked_child() {
            return;
        }
        if self.home.special {
            self.free_special(cell, &[]);
            return;
        }
        let retire = cell.with(|lane| match lane {
            Some(state) => state.take_back(cell, self.offset, self.bytes),
            None => {
                cell.forget_buffer();
                false
            }
        });
        if retire {
            lane::retire(cell);
        }
    }
}
