//! A lane during a capture: its requests go to a private lane, whose memory is kept for the graph.
//!
//! The private lane has the same stream, so memory that is freed in it during the capture is reused
//! in the capture's own order. It starts empty and grows from the stock or by new memory: so
//! nothing that work outside of the graph may still use is ever baked into it.

use vmm_sys::object::Stream;

use super::{Gate, Lane, LaneCell, Wait, close, trim};
use crate::error::Error;
use crate::lanes::LaneRef;
use crate::turn::Turn;

impl Lane {
    /// A new, empty private lane beside this one.
    pub(crate) fn open_private(&self) -> Lane {
        let (device, stream) = (self.device.clone(), self.stream.clone());
        let lane = LaneCell::open(device.clone(), stream.clone(), self.pool.recorder());
        if let Some(mut state) = lane.lock() {
            state.is_private = true;
            // What is freed during a capture is baked into the graph: it must stay mapped.
            state.leave_guard_mode();
        }
        device.lanes.lock().add_private(lane);
        Lane::new(lane, device, stream, self.pool.clone())
    }

    /// Whether `other` is a lane of the same device's pool and of the same stream.
    pub(crate) fn is_beside(&self, other: &Lane) -> bool {
        std::sync::Arc::ptr_eq(&self.device, &other.device) && self.stream.id() == other.stream.id()
    }

    /// Sends requests to the private lane from now on.
    pub(crate) fn divert(&self, to: LaneRef) -> Result<(), Error> {
        let mut guard = self.cell.lock();
        let state = self.state(&mut guard)?;
        if state.diverted.is_some() {
            return Err(Error::CaptureOpen);
        }
        state.diverted = Some(to);
        state.open_id = 0;
        Ok(())
    }

    /// Where requests go instead, if they are diverted.
    pub(crate) fn diverted(&self) -> Result<Option<Lane>, Error> {
        let mut guard = self.cell.lock();
        let Some(to) = self.state(&mut guard)?.diverted else { return Ok(None) };
        drop(guard);
        Ok(Some(Lane::new(to, self.device.clone(), self.stream.clone(), self.pool.clone())))
    }

    /// Whether this is a private lane.
    pub(crate) fn is_private(&self) -> bool {
        self.reference().lock().is_some_and(|state| state.is_private)
    }

    /// Bytes of the chunks mapped in the lane.
    pub(crate) fn mapped_bytes(&self) -> u64 {
        self.reference().lock().map_or(0, |state| state.region.mapped_bytes())
    }

    /// Ends a private lane: what it holds leaves behind its stream and `launches`, except what
    /// buffers that are alive still need.
    pub(crate) fn close_private(&self, launches: &[Gate]) {
        let lane = self.reference();
        if let Some(mut state) = lane.lock() {
            state.is_private = false;
            state.launches.extend_from_slice(launches);
        }
        close(lane, false);
        trim(lane, Wait::No, Turn::Requester);
    }

    /// A gate behind what is enqueued on the lane's stream now, or was before it went.
    pub(crate) fn gate_of_its_stream(&self) -> Gate {
        let last = self.reference().lock().and_then(|state| state.last.clone());
        last.unwrap_or_else(|| self.gate(&self.stream))
    }

    /// A gate behind what is enqueued on `stream` now.
    pub(crate) fn gate(&self, stream: &Stream) -> Gate {
        super::gate::record(&self.device.events, stream.clone())
    }
}

/// Serves requests from the lane's own heap again.
pub(crate) fn undivert(lane: LaneRef) {
    // A lane that was closed meanwhile has nothing to serve.
    if let Some(mut state) = lane.lock() {
        state.diverted = None;
        state.open_id = if state.closing { 0 } else { state.id };
    }
}
