//! [`Lane`]: the heap of one (device, stream).
//!
//! Memory freed in a lane may be reused in that lane at once, in stream order. A warm alloc or
//! free takes the lane's lock, once, and nothing that another lane writes to.
//!
//! A lane's shell ([`LaneCell`]) is never freed, only reused by a later lane: so a buffer can refer
//! to its lane by a plain `&'static`, which costs no reference count. What is behind the shell is
//! dropped when the lane retires; how many buffers are alive is a count under the lane's lock.

mod claim;
mod close;
mod divert;
mod figures;
mod gate;
mod grow;
mod guard;
mod limbo;
mod marks;
pub(crate) mod raw;
mod report;
mod shell;
mod survey;
mod thrift;
mod window;
mod wreck;

use std::fmt;
use std::sync::Arc;

use vmm_heap::Heap;
use vmm_sys::object::Stream;
use vmm_sys::{DeviceId, process};

pub(crate) use close::{close, gate_for_good, idle_bytes, retire, trim, trim_if_idle};
pub(crate) use divert::undivert;
pub(crate) use figures::Figures;
pub(crate) use gate::{Asker, Gate, Pending, Waited, is_captured, record};
pub(crate) use limbo::{Wait, free_special, sweep};
pub(crate) use shell::LaneCell;
pub(crate) use wreck::{LaneGuard, Wrecks};

use crate::buffer::{Buffer, Home};
use crate::config::Plan;
use crate::device::Device;
use crate::error::Error;
use crate::idle::Seen;
use crate::lanes::LaneRef;
use crate::pool::PoolInner;
use crate::region::Region;
use crate::request::Request;
use crate::trace::LaneTrace;
use guard::Guards;
use limbo::Limbo;
use marks::Marks;
use thrift::Mark;

/// Operations between two emptyings of the magazines of a lane that falls idle, so that a lone
/// buffer made and dropped in a loop still finds its magazine.
const IDLE_DRAIN_TICKS: u64 = 1024;

/// What a lane is made of, behind its lock.
pub(crate) struct LaneState {
    pub(crate) id: u64,
    pub(crate) heap: Heap,
    pub(crate) region: Region,
    pub(crate) live: Live,
    /// The peak of live bytes before the statistics began a new one.
    pub(crate) earlier_peak_bytes: u64,
    /// What the lane's stream had to do when it was last asked, for [`thrift`].
    mark: Option<Mark>,
    /// Where the lane's requests are recorded, if they are.
    trace: Option<LaneTrace>,
    pub(crate) limbo: Limbo,
    /// Keeps the device's pool alive while the lane holds memory of it.
    pub(crate) device: Arc<Device>,
    pub(crate) stream: Stream,
    /// What its buffers are handed out with.
    home: Home,
    /// The end of the stream's work, once a borrowed stream was declared gone: its handle is not
    /// used any more.
    pub(crate) last: Option<Gate>,
    /// When an idle lane last emptied its magazines, in the heap's ticks.
    drained_tick: u64,
    /// What looks for idle lanes know of it.
    pub(crate) seen: Seen,
    /// No further allocations; the lane retires with its last buffer.
    pub(crate) closing: bool,
    /// The lane's number while its heap serves requests: 0 once it is closing, and while a capture
    /// scope diverts them. The one thing that a warm request looks at.
    open_id: u64,
    /// The private lane that a capture scope sends the requests to.
    diverted: Option<LaneRef>,
    /// The memory is kept for captured graphs: it stays where it is until they are gone.
    pub(crate) is_private: bool,
    /// What memory waits for beside the lane's stream: launches of graphs that are gone.
    pub(crate) launches: Vec<Gate>,
    /// Threads that are at the driver for this lane, its lock released meanwhile.
    pub(crate) busy: u32,
    /// Blocks that a free by address must not take as they are.
    marks: Marks,
    /// Of a lane in guard mode. Its frees are special.
    pub(crate) guards: Option<Box<Guards>>,
    /// Whether the directory has the lane: since its first raw allocation.
    is_listed: bool,
}

/// The live buffers of a lane.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Live {
    pub(crate) buffers: u64,
    pub(crate) asked_bytes: u64,
    pub(crate) block_bytes: u64,
    pub(crate) peak_asked_bytes: u64,
}

impl fmt::Debug for LaneState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The heap is left out: its tables are long.
        f.debug_struct("LaneState")
            .field("id", &self.id)
            .field("stream", &self.stream)
            .field("live", &self.live)
            .field("closing", &self.closing)
            .finish_non_exhaustive()
    }
}

impl LaneState {
    /// Counts a block as live and makes the buffer for it.
    #[inline(always)]
    fn hand_out(&mut self, cell: &'static LaneCell, block: vmm_heap::Block, bytes: u64) -> Buffer {
        let live = &mut self.live;
        live.buffers += 1;
        live.asked_bytes += bytes;
        live.block_bytes += block.bytes;
        live.peak_asked_bytes = live.peak_asked_bytes.max(live.asked_bytes);
        cell.figures.tell_live(live.asked_bytes);
        if let Some(trace) = &self.trace {
            trace.alloc(block.offset, bytes);
        }
        let address = self.region.address(block.offset);
        Buffer::new(cell, address, block.offset, bytes, self.home)
    }

    /// Takes a buffer's block out of the live ones; it is reusable at once. Returns whether the
    /// lane should retire.
    #[inline]
    pub(crate) fn take_back(&mut self, cell: &LaneCell, offset: u64, bytes: u64) -> bool {
        match self.heap.free(offset) {
            Ok(block_bytes) => self.count_taken_back(cell, (offset, bytes), block_bytes),
            Err(error) => Self::nothing_to_take_back(error),
        }
    }

    /// Counts a block that the heap has taken back. Returns whether the lane should retire.
    #[inline(always)]
    fn count_taken_back(
        &mut self,
        cell: &LaneCell,
        (offset, bytes): (u64, u64),
        block_bytes: u64,
    ) -> bool {
        self.live.block_bytes -= block_bytes;
        self.uncount(cell, offset, bytes);
        self.live.buffers == 0 && self.fall_idle()
    }

    /// A buffer is the only owner of its block, unless somebody freed its address.
    #[cold]
    fn nothing_to_take_back(error: vmm_heap::NotAllocated) -> bool {
        vmm_sys::say!(error, %error, "a buffer's block was freed by its address");
        false
    }

    /// Nothing is alive any more: empties the magazines, which would pin slabs and so chunks, and
    /// leaves the heap as it was before its first block. Returns whether the lane should retire.
    #[cold]
    fn fall_idle(&mut self) -> bool {
        let tick = self.heap.tick();
        if tick - self.drained_tick >= IDLE_DRAIN_TICKS {
            self.heap.drain();
            self.drained_tick = tick;
        }
        self.should_retire()
    }

    #[inline(always)]
    pub(crate) fn uncount(&mut self, cell: &LaneCell, offset: u64, bytes: u64) {
        if let Some(trace) = &self.trace {
            trace.free(offset);
        }
        self.live.buffers -= 1;
        // Less is counted only if a buffer's address was freed as if it were a raw block's.
        self.live.asked_bytes = self.live.asked_bytes.saturating_sub(bytes);
        cell.figures.tell_live(self.live.asked_bytes);
    }

    /// Whether `stream` is another one than the lane's, so that memory it uses has to wait for it.
    pub(crate) fn is_crossed_by(&self, stream: &Stream) -> Result<bool, Error> {
        let (own, other) = (self.stream.driver(), stream.driver());
        if !std::ptr::addr_eq(Arc::as_ptr(own), Arc::as_ptr(other)) {
            return Err(Error::UnknownDevice { device: stream.device() });
        }
        Ok(self.stream.id() != stream.id() || self.stream.device() != stream.device())
    }

    /// Whether the stream was gated for good: its handle must not be used any more.
    pub(crate) fn is_gone(&self) -> bool {
        matches!(self.last, Some(Gate::Event(_) | Gate::Passed))
    }

    /// Whether the handle of the lane's stream may still be used, although its owner says that it
    /// is gone.
    pub(crate) fn needs_handle(&self) -> bool {
        self.stream.is_borrowed() && !self.is_gone()
    }

    /// The gates behind all that may use the lane's free memory until they are recorded.
    pub(crate) fn own_gates(&self) -> Vec<Gate> {
        let last = self.last.clone();
        let own = last.unwrap_or_else(|| Gate::Unrecorded(self.stream.clone()));
        std::iter::once(own).chain(self.launches.iter().cloned()).collect()
    }

    #[inline]
    pub(crate) fn should_retire(&self) -> bool {
        self.closing && self.live.buffers == 0 && self.busy == 0
    }
}

/// The heap of one (device, stream). Clones share it.
///
/// Who owns the physical memory: the lane. Are addresses stable: yes, until the buffer is dropped.
/// Who may access: the lane's own device.
#[derive(Clone, Debug)]
pub struct Lane {
    cell: &'static LaneCell,
    id: u64,
    device: Arc<Device>,
    stream: Stream,
    /// Keeps the pool, and so the lane, open.
    pool: Arc<PoolInner>,
}

impl Lane {
    pub(crate) fn new(
        LaneRef { cell, id }: LaneRef,
        device: Arc<Device>,
        stream: Stream,
        pool: Arc<PoolInner>,
    ) -> Lane {
        Lane { cell, id, device, stream, pool }
    }

    /// `bytes` of memory of the lane's device, usable by work enqueued on the lane's stream from
    /// now on, aligned to 512 bytes.
    ///
    /// Zero bytes have one answer: an empty buffer with address 0 that counts nowhere. A warm
    /// request (a mapped hole fits) makes no driver call.
    ///
    /// # Errors
    /// [`Error::TooLarge`] before anything is touched; [`Error::OutOfMemory`] with the facts once
    /// every way to find memory was tried; the driver's own errors. The lane is then as before.
    /// [`Error::LaneClosed`]; [`Error::Broken`] if a thread panicked in it.
    #[inline]
    pub fn alloc(&self, bytes: u64) -> Result<Buffer, Error> {
        self.alloc_with(&Request::new(bytes))
    }

    /// As [`Lane::alloc`], but never waits for the GPU: memory that is only held up by unfinished
    /// work is not waited for.
    ///
    /// # Errors
    /// As [`Lane::alloc`].
    pub fn try_alloc(&self, bytes: u64) -> Result<Buffer, Error> {
        self.alloc_with(&Request::new(bytes).no_wait())
    }

    /// As [`Lane::alloc`], with an alignment and other wishes.
    ///
    /// # Errors
    /// As [`Lane::alloc`]; [`Error::BadAlignment`].
    #[inline]
    pub fn alloc_with(&self, request: &Request) -> Result<Buffer, Error> {
        let plan: &Plan = &self.device.plan;
        request.check(plan)?;
        if request.bytes() == 0 {
            return Ok(Buffer::empty(plan.device));
        }
        if process::is_forked_child() {
            // Before any lock: another thread may have held it when the process forked.
            return Err(Error::DriverGone);
        }
        let served = self.cell.with(|lane| {
            let state = lane.as_mut().filter(|state| state.open_id == self.id)?;
            let block = state.heap.alloc(request.bytes(), request.align_bytes()).ok()?;
            Some(state.hand_out(self.cell, block, request.bytes()))
        });
        match served {
            Some(buffer) => Ok(buffer),
            None => grow::alloc_cold(self, request),
        }
    }

    /// This lane in its shell, unless it was closed. Requests of a lane that is diverted do not
    /// come here, unless they began before.
    #[inline]
    fn state<'a>(&self, guard: &'a mut LaneGuard) -> Result<&'a mut LaneState, Error> {
        match guard.as_mut() {
            Some(state) if state.id == self.id && !state.closing => Ok(state),
            Some(_) => Err(Error::LaneClosed),
            None => Err(self.cell.why_gone(self.id)),
        }
    }

    /// The device whose memory this lane hands out.
    pub fn device(&self) -> DeviceId {
        self.device.plan.device
    }

    /// The stream in whose order memory is reused.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// The length of the largest request that would succeed now without new memory, in bytes.
    pub fn largest_free_bytes(&self) -> u64 {
        if process::is_forked_child() {
            return 0;
        }
        self.reference().lock().map_or(0, |state| state.heap.largest_free_bytes())
    }

    pub(crate) fn reference(&self) -> LaneRef {
        LaneRef { cell: self.cell, id: self.id }
    }
}
