//! [`Memory`]: what a test holds of the pool: a buffer, or a plain address.

use std::fmt;
use std::sync::Arc;

use vmm_pool::{Buffer, Error, Lane, Request, free_raw, record_stream_raw};
use vmm_sys::object::Stream;
use vmm_sys::{DeviceId, Driver, Transfer};

/// Memory of a pool. Dropping it frees.
pub enum Memory {
    /// A buffer.
    Buffer(Buffer),
    /// A plain address.
    Raw(Raw),
}

/// A block that the pool knows by its address only.
pub struct Raw {
    driver: Arc<dyn Driver>,
    device: DeviceId,
    address: u64,
    bytes: u64,
}

impl Memory {
    /// Asks a lane.
    ///
    /// # Errors
    /// The pool's.
    pub fn alloc(lane: &Lane, request: &Request, raw: bool) -> Result<Memory, Error> {
        if !raw {
            return lane.alloc_with(request).map(Memory::Buffer);
        }
        let (driver, device) = (lane.stream().driver().clone(), lane.device());
        let address = lane.alloc_raw_with(request)?;
        Ok(Memory::Raw(Raw { driver, device, address, bytes: request.bytes() }))
    }

    /// First address; 0 if it is empty.
    pub fn address(&self) -> u64 {
        match self {
            Memory::Buffer(buffer) => buffer.address(),
            Memory::Raw(raw) => raw.address,
        }
    }

    /// Length, as asked for.
    pub fn bytes(&self) -> u64 {
        match self {
            Memory::Buffer(buffer) => buffer.bytes(),
            Memory::Raw(raw) => raw.bytes,
        }
    }

    /// Home.
    pub fn device(&self) -> DeviceId {
        match self {
            Memory::Buffer(buffer) => buffer.device(),
            Memory::Raw(raw) => raw.device,
        }
    }

    /// Tells the pool that a stream uses it.
    ///
    /// # Errors
    /// The pool's.
    pub fn record_stream(&mut self, stream: &Stream) -> Result<(), Error> {
        match self {
            Memory::Buffer(buffer) => buffer.record_stream(stream),
            Memory::Raw(raw) if raw.bytes == 0 => Ok(()),
            Memory::Raw(raw) => record_stream_raw(raw.address, stream),
        }
    }

    /// Copies `source` to `offset`, which must lie inside, and waits.
    ///
    /// # Errors
    /// The pool's or the driver's.
    pub fn write(&self, offset: u64, source: &[u8]) -> Result<(), Error> {
        let (src, bytes) = (source.as_ptr(), source.len() as u64);
        match self {
            Memory::Buffer(buffer) => buffer.write(offset, source),
            Memory::Raw(raw) => {
                raw.copy(&Transfer::HostToDevice { dst: raw.inside(offset, bytes), src, bytes })
            }
        }
    }

    /// Copies from `offset`, which must lie inside, into `target`, and waits.
    ///
    /// # Errors
    /// The pool's or the driver's.
    pub fn read(&self, offset: u64, target: &mut [u8]) -> Result<(), Error> {
        let (dst, bytes) = (target.as_mut_ptr(), target.len() as u64);
        match self {
            Memory::Buffer(buffer) => buffer.read(offset, target),
            Memory::Raw(raw) => {
                raw.copy(&Transfer::DeviceToHost { dst, src: raw.inside(offset, bytes), bytes })
            }
        }
    }

    /// Frees it. A plain address is refused the second time, and so are wrong ways to name it.
    ///
    /// # Errors
    /// In words, what the pool answered.
    pub fn free(self) -> Result<(), String> {
        let Memory::Raw(raw) = self else { return Ok(()) };
        let (address, bytes) = (raw.address, raw.bytes);
        // Its own drop is this.
        std::mem::forget(raw);
        if address == 0 {
            return free_raw(0, 0).map_err(|error| error.to_string());
        }
        for (address, bytes) in [(address + 1, bytes), (address, bytes + 512)] {
            match free_raw(address, bytes) {
                Err(Error::NotAllocated { .. } | Error::WrongBytes { .. }) => {}
                other => return Err(format!("{bytes} bytes at {address:#x}: {other:?}")),
            }
        }
        free_raw(address, bytes).map_err(|error| format!("{address:#x} is not freed: {error}"))?;
        match free_raw(address, bytes) {
            Err(Error::NotAllocated { .. } | Error::UnknownAddress { .. }) => Ok(()),
            other => Err(format!("{address:#x} was freed twice: {other:?}")),
        }
    }
}

impl Raw {
    fn inside(&self, offset: u64, bytes: u64) -> u64 {
        assert!(offset.checked_add(bytes).is_some_and(|end| end <= self.bytes));
        self.address + offset
    }

    fn copy(&self, transfer: &Transfer) -> Result<(), Error> {
        // SAFETY: the device bytes lie in a block that the pool gave out; the host bytes are a
        // slice that the caller borrows during this synchronous call.
        unsafe { self.driver.copy(self.device, transfer) }.map_err(Error::Driver)
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        // Dropped without `Memory::free`, at the end of a failed run: nothing more is asserted.
        let _unchecked = free_raw(self.address, self.bytes);
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Memory::Buffer(buffer) => buffer.fmt(f),
            Memory::Raw(raw) => write!(f, "Raw({} bytes at {:#x})", raw.bytes, raw.address),
        }
    }
}
