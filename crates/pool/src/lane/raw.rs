//! Allocation by plain address, for callers that keep nothing else: no [`Buffer`], no hash.
//!
//! A raw block is found from its address by the directory, then by the heap's own tables, so
//! nothing is kept for it beyond what the heap keeps. A warm pair takes the lane's lock twice, makes
//! no driver call, allocates nothing on the host and writes nothing that two lanes share.
//!
//! Only the heap remembers a block's length, in whole granules: so a raw block counts as asked for
//! in whole granules, and a free whose length is off within the last one changes no figure.

use vmm_heap::GRANULE_BYTES;
use vmm_sys::object::Stream;
use vmm_sys::{DeviceId, StreamHandle, StreamId, process};

use super::marks::Mark;
use super::{Lane, LaneCell, LaneState, free_special, grow, retire};
use crate::buffer::Buffer;
use crate::capture;
use crate::directory;
use crate::error::Error;
use crate::request::Request;

/// What is known of a block from its address.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RawBlock {
    /// Its first address.
    pub address: u64,
    /// Its length in bytes: what was asked for, in whole granules of 512.
    pub bytes: u64,
    /// The device whose memory it is.
    pub device: DeviceId,
    /// The stream of its lane.
    pub stream: StreamId,
}

impl Lane {
    /// As [`Lane::alloc`], but gives the plain address: of memory that stays taken until
    /// [`free_raw`]. Zero bytes have the address 0.
    ///
    /// Who owns the physical memory: the lane. Is the address stable: yes, until it is freed. Who
    /// may access: the lane's own device.
    ///
    /// # Errors
    /// As [`Lane::alloc`]; [`Error::AddressTaken`] if another driver of this process has the lane's
    /// addresses too (two simulated machines).
    #[inline]
    pub fn alloc_raw(&self, bytes: u64) -> Result<u64, Error> {
        match self.alloc_raw_warm(bytes) {
            Some(address) => Ok(address),
            None => self.alloc_raw_cold(&Request::new(bytes)),
        }
    }

    /// The address of a mapped hole for `bytes`, or `None`: then nothing has happened, and
    /// [`Lane::alloc_raw`] brings memory or says what is wrong. For callers that keep errors out of
    /// their common path.
    #[inline]
    pub fn alloc_raw_warm(&self, bytes: u64) -> Option<u64> {
        self.alloc_raw_in_hole(&Request::new(bytes))
    }

    /// As [`Lane::alloc_raw`], with an alignment and other wishes.
    ///
    /// # Errors
    /// As [`Lane::alloc_raw`]; [`Error::BadAlignment`].
    pub fn alloc_raw_with(&self, request: &Request) -> Result<u64, Error> {
        request.check(&self.device.plan)?;
        match self.alloc_raw_in_hole(request) {
            Some(address) => Ok(address),
            None => self.alloc_raw_cold(request),
        }
    }

    /// A mapped hole, if one fits and nothing is out of the ordinary: no error is made here, so
    /// that the common case carries none about. Inlined, since the call would be a tenth of it.
    #[inline(always)]
    fn alloc_raw_in_hole(&self, request: &Request) -> Option<u64> {
        if process::is_forked_child() || request.bytes() == 0 {
            return None;
        }
        self.cell.with(|lane| {
            let state = lane.as_mut()?;
            if state.open_id != self.id || !state.is_listed {
                return None;
            }
            let block = state.heap.alloc(request.bytes(), request.align_bytes()).ok()?;
            Some(state.hand_out(self.cell, block, block.bytes).into_address())
        })
    }

    /// The same, and everything else, in the order of [`Lane::alloc_with`].
    #[cold]
    #[inline(never)]
    fn alloc_raw_cold(&self, request: &Request) -> Result<u64, Error> {
        request.check(&self.device.plan)?;
        if request.bytes() == 0 {
            return Ok(0);
        }
        if process::is_forked_child() {
            // Before any lock: another thread may have held it when the process forked.
            return Err(Error::DriverGone);
        }
        while let Some(private) = capture::diversion(self)? {
            match private.alloc_raw_with(request) {
                // As in `grow::alloc_cold`.
                Err(Error::LaneClosed) => {}
                answer => return answer,
            }
        }
        let request = {
            let mut guard = self.cell.lock();
            let state = self.state(&mut guard)?;
            state.list(self.cell)?;
            // The end of a guarded block is where it was asked for.
            if state.guards.is_some() { *request } else { request.in_granules() }
        };
        grow::alloc_cold(self, &request).map(Buffer::into_address)
    }
}

impl LaneState {
    /// Enters the lane in the directory, so that its blocks are found by address.
    fn list(&mut self, cell: &'static LaneCell) -> Result<(), Error> {
        if self.is_listed {
            return Ok(());
        }
        for (nth, (address, bytes)) in self.region.ranges().enumerate() {
            if let Err(address) = directory::enter(address, bytes, cell) {
                for (address, bytes) in self.region.ranges().take(nth) {
                    directory::leave(address, bytes, cell);
                }
                return Err(Error::AddressTaken { address });
            }
        }
        self.is_listed = true;
        Ok(())
    }

    /// Enters a further range, before it becomes part of a lane that is in the directory.
    pub(super) fn list_range(
        &self,
        cell: &'static LaneCell,
        address: u64,
        bytes: u64,
    ) -> Result<(), Error> {
        if !self.is_listed {
            return Ok(());
        }
        directory::enter(address, bytes, cell).map_err(|address| Error::AddressTaken { address })
    }

    /// Takes the lane out of the directory, before its ranges are given back.
    pub(super) fn unlist(&mut self, cell: &'static LaneCell) {
        if self.is_listed {
            for (address, bytes) in self.region.ranges() {
                directory::leave(address, bytes, cell);
            }
            self.is_listed = false;
        }
    }

    /// Whether the directory finds this lane where it should, and only then.
    pub(crate) fn is_listed_right(&self, cell: &'static LaneCell) -> bool {
        let found = |address| directory::lane_at(address).is_some_and(|c| std::ptr::eq(c, cell));
        self.region.ranges().all(|(address, bytes)| {
            found(address) == self.is_listed && found(address + bytes - 1) == self.is_listed
        })
    }

    /// The offset of an address, if the directory may have said so. It was read without the lock:
    /// the shell may hold a later lane by now.
    #[inline]
    fn listed_offset(&self, address: u64) -> Option<u64> {
        if self.is_listed { self.region.offset_of(address) } else { None }
    }

    /// Offset and length of the block that somebody holds at exactly `address`.
    fn held_block_at(&self, address: u64) -> Result<(u64, u64), Error> {
        let offset = self.listed_offset(address).ok_or(Error::UnknownAddress { address })?;
        let bytes = self.held_block_bytes(offset).ok_or(Error::NotAllocated { address })?;
        match self.marks.at(offset) {
            Some(Mark::Withheld) => Err(Error::NotAllocated { address }),
            Some(Mark::Crossed(_)) | None => Ok((offset, bytes)),
        }
    }
}

/// The lane that may hold `address`.
#[inline]
fn lane_at(address: u64) -> Result<&'static LaneCell, Error> {
    if process::is_forked_child() {
        return Err(Error::DriverGone);
    }
    directory::lane_at(address).ok_or(Error::UnknownAddress { address })
}

/// Frees a block of [`Lane::alloc_raw`], whichever pool and lane of this process it came from, in
/// the order of its lane's stream, as dropping a [`Buffer`] does. The address 0 is nothing to free.
///
/// `bytes` is what was asked for. It is a check, not a figure that is kept: it must be the block's
/// length when it is rounded up to 512 bytes.
///
/// Do not give it the address of a [`Buffer`]: the pool cannot tell, and would free under the
/// buffer's feet.
///
/// # Errors
/// Nothing is changed, and the answer is [`Error::UnknownAddress`] if no lane that hands out raw
/// addresses has this one, [`Error::NotAllocated`] if no block starts there (a second free, the
/// inside of a block), [`Error::WrongBytes`] if `bytes` is not its length, [`Error::Broken`] if a thread
/// panicked in its lane, [`Error::DriverGone`] in a forked child.
#[inline]
pub fn free_raw(address: u64, bytes: u64) -> Result<(), Error> {
    free(address, bytes, None)
}

/// As [`free_raw`], if the block's lane is that of the stream with this handle.
///
/// # Errors
/// As [`free_raw`]; [`Error::OtherStream`] if the block belongs to another stream: then say so to
/// [`record_stream_raw`] first, if work of this one uses it.
#[inline]
pub fn free_raw_on(address: u64, bytes: u64, stream: StreamHandle) -> Result<(), Error> {
    free(address, bytes, Some(stream))
}

#[inline]
fn free(address: u64, bytes: u64, on: Option<StreamHandle>) -> Result<(), Error> {
    if free_warm(address, bytes, on) { Ok(()) } else { free_cold(address, bytes, on) }
}

/// Frees a block of which nothing out of the ordinary is known. As in an allocation, no error is
/// made here. Returns whether that was so.
#[inline]
fn free_warm(address: u64, bytes: u64, on: Option<StreamHandle>) -> bool {
    if process::is_forked_child() || bytes == 0 {
        return false;
    }
    let Some(cell) = directory::lane_at(address) else { return false };
    let should_retire = cell.with(|lane| {
        let state = lane.as_mut()?;
        let offset = state.listed_offset(address)?;
        if on.is_some_and(|handle| handle != state.stream.handle()) {
            return None;
        }
        if !state.marks.is_empty()
            && (state.marks.at(offset).is_some() || state.stream.is_elsewhere())
        {
            return None;
        }
        let block_bytes = state.heap.free_exact(offset, bytes).ok()?;
        Some(state.count_taken_back(cell, (offset, block_bytes), block_bytes))
    });
    if should_retire == Some(true) {
        retire(cell);
    }
    should_retire.is_some()
}

/// The same, if it is a block after all; else what it is instead.
#[cold]
#[inline(never)]
fn free_cold(address: u64, bytes: u64, on: Option<StreamHandle>) -> Result<(), Error> {
    if address == 0 {
        return Ok(());
    }
    let cell = lane_at(address)?;
    let should_retire = {
        let mut guard = cell.lock();
        let Some(state) = guard.as_mut() else { return Err(cell.why_unknown(address)) };
        let (offset, block_bytes) = state.held_block_at(address)?;
        if bytes > block_bytes || block_bytes - bytes >= GRANULE_BYTES {
            return Err(Error::WrongBytes { address, bytes, block_bytes });
        }
        if on.is_some_and(|handle| !state.stream.is_named_by(handle)) {
            return Err(Error::OtherStream { address });
        }
        if state.marks.at(offset).is_some() || state.stream.is_elsewhere() {
            let streams = state.marks.withhold(offset);
            drop(guard);
            free_special(cell, offset, block_bytes, streams, &[]);
            return Ok(());
        }
        state.take_back(cell, offset, block_bytes)
    };
    if should_retire {
        retire(cell);
    }
    Ok(())
}

/// Says that work on `stream` uses the raw block at `address`: once freed, its memory is not reused
/// before the work enqueued on `stream` until then is done.
///
/// Recording the lane's own stream changes nothing; recording a stream twice counts once.
///
/// # Errors
/// As [`free_raw`] for the address; [`Error::UnknownDevice`] if the stream belongs to another
/// driver.
pub fn record_stream_raw(address: u64, stream: &Stream) -> Result<(), Error> {
    let cell = lane_at(address)?;
    let mut guard = cell.lock();
    let Some(state) = guard.as_mut() else { return Err(cell.why_unknown(address)) };
    let (offset, _) = state.held_block_at(address)?;
    if state.is_crossed_by(stream)? {
        state.marks.cross(offset, stream);
    }
    Ok(())
}

/// What is known of the raw block that starts at `address`.
///
/// # Errors
/// As [`free_raw`] for the address.
pub fn block_of(address: u64) -> Result<RawBlock, Error> {
    let cell = lane_at(address)?;
    let guard = cell.lock();
    let Some(state) = guard.as_ref() else { return Err(cell.why_unknown(address)) };
    let (_, bytes) = state.held_block_at(address)?;
    let (device, stream) = (state.device.plan.device, state.stream.id());
    Ok(RawBlock { address, bytes, device, stream })
}
