//! Events: the only clock of stream order.
//!
//! An event is a name; each record of it is a point of its own in a queue. A wait refers to the
//! record that was the last when it was enqueued, and a later record does not move it. An event
//! that was never recorded counts as passed. One that was last recorded in a capture stands for a
//! point of that capture: other streams join the capture by waiting for it, nobody can ask whether
//! it has passed, and once the capture is over it stands for nothing until it is recorded again.

use super::Sim;
use super::answer::{Answer, Refused};
use super::state::State;
use super::timeline::{Event, LastRecord, Op};
use crate::call::Call;
use crate::error::{DriverResult, ResultCode};
use crate::types::{DeviceId, EventHandle, StreamHandle};

const HANDLE_BASE: u64 = 0xE7E7_0000_0000;
const HANDLE_STEP: u64 = 0x40;

impl State {
    fn event_index(&self, handle: EventHandle) -> Answer<usize> {
        let offset = handle.0.checked_sub(HANDLE_BASE);
        let index = offset
            .filter(|offset| offset.is_multiple_of(HANDLE_STEP))
            .map(|offset| (offset / HANDLE_STEP) as usize)
            .filter(|index| self.timeline.events.contains(*index));
        index.ok_or_else(|| Refused::invalid_handle(format_args!("no event {:#x}", handle.0)))
    }

    /// Makes a stream wait for what an event stands for now.
    pub(super) fn wait_event(&mut self, stream: u64, event: EventHandle) -> Answer<()> {
        let index = self.event_index(event)?;
        match self.timeline.events[index].last.clone() {
            LastRecord::Captured(captured) => self.capture_join(stream, &captured),
            LastRecord::Never => Ok(()),
            LastRecord::Live(record) => {
                if self.capturing(stream)? {
                    return Err(self.isolate_capture(stream));
                }
                if !self.timeline.record_passed(record) {
                    self.submit(stream, Op::WaitRecord(record))?;
                }
                Ok(())
            }
        }
    }
}

impl Sim {
    /// Belongs to the device that is named.
    pub(super) fn do_event_create(&self, device: DeviceId) -> DriverResult<EventHandle> {
        self.call_on(Call::EventCreate, device, |state| {
            let index = state.timeline.events.insert(Event { device, last: LastRecord::Never });
            Ok(EventHandle(HANDLE_BASE + index as u64 * HANDLE_STEP))
        })
    }

    /// Each simulator has a clock of its own, so an event means nothing in another one (row D-X7).
    pub(super) fn do_event_shared<T>(&self, call: Call, device: DeviceId) -> DriverResult<T> {
        self.call_on(call, device, |_| {
            Err(Refused::new(ResultCode::NOT_SUPPORTED)
                .because("the simulated device shares no events between processes"))
        })
    }

    /// The handle value may come back for a new event.
    pub(super) fn do_event_destroy(
        &self,
        device: DeviceId,
        event: EventHandle,
    ) -> DriverResult<()> {
        self.call_on(Call::EventDestroy, device, |state| {
            let index = state.event_index(event)?;
            // A record that was enqueued still runs; nobody can ask for it any more.
            state.timeline.events.remove(index);
            Ok(())
        })
    }

    /// On a stream of the event's own device. In a captured stream it marks a point of the graph.
    pub(super) fn do_event_record(
        &self,
        device: DeviceId,
        event: EventHandle,
        stream: StreamHandle,
    ) -> DriverResult<()> {
        self.call_on(Call::EventRecord, device, |state| {
            let index = state.event_index(event)?;
            let id = state.stream(device, stream)?;
            let (home, of) = (state.timeline.events[index].device, state.stream_device(id));
            if of != Some(home) {
                return Err(Refused::invalid_handle(format_args!(
                    "the event belongs to {home}, the stream does not"
                )));
            }
            if state.capturing(id)? {
                let captured = state.capture_point(id);
                state.timeline.events[index].last = LastRecord::Captured(captured);
                return Ok(());
            }
            let record = state.timeline.new_record();
            if let Err(refused) = state.submit(id, Op::Record(record)) {
                state.timeline.pending_records.remove(&record);
                return Err(refused);
            }
            state.timeline.events[index].last = LastRecord::Live(record);
            Ok(())
        })
    }

    /// Refused during captures that forbid it (rows D-G2 to D-G4). Reports faults.
    pub(super) fn do_event_query(
        &self,
        device: DeviceId,
        event: EventHandle,
    ) -> DriverResult<bool> {
        self.call_on(Call::EventQuery, device, |state| {
            let index = state.event_index(event)?;
            state.refuse_unsafe_in_capture()?;
            let home = state.timeline.events[index].device;
            state.report_fault(home)?;
            match &state.timeline.events[index].last {
                LastRecord::Never => Ok(true),
                LastRecord::Live(record) => Ok(state.timeline.record_passed(*record)),
                LastRecord::Captured(captured) => Err(state.captured_event(captured)),
            }
        })
    }

    /// Refused where a query is. Reports faults.
    pub(super) fn do_event_synchronize(
        &self,
        device: DeviceId,
        event: EventHandle,
    ) -> DriverResult<()> {
        self.call_on(Call::EventSynchronize, device, |state| {
            let index = state.event_index(event)?;
            state.refuse_unsafe_in_capture()?;
            let home = state.timeline.events[index].device;
            match state.timeline.events[index].last.clone() {
                LastRecord::Never => {}
                LastRecord::Live(record) => {
                    self.wait_until(state, |state| state.timeline.record_passed(record))?;
                }
                LastRecord::Captured(captured) => return Err(state.captured_event(&captured)),
            }
            state.trim_pool(home);
            state.report_fault(home)
        })
    }
}
