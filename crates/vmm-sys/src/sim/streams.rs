//! Streams: handles, identities, and waiting for them.
//!
//! Handle values are made from slots and come back as soon as a stream is destroyed; ids only ever
//! count up (row D-S1). So a stale handle either names nothing, which is an error here where the
//! real driver may crash, or it names somebody else's new stream, as it does there.
//!
//! The null handle and the legacy handle are one stream in each context, and the per-thread handle
//! is another one for each thread: both are resolved in the context of the device that the call
//! names.

use super::answer::{Answer, Refused};
use super::state::State;
use super::timeline::{LastRecord, Op, Stream, StreamKind};
use super::{Locked, Sim};
use crate::call::Call;
use crate::error::{DriverResult, ResultCode};
use crate::sync::thread;
use crate::types::{DeviceId, EventHandle, PinnedAddress, StreamHandle, StreamId};

/// Handle values look like pointers and are made from an index.
const HANDLE_BASE: u64 = 0x5712_0000_0000;
const HANDLE_STEP: u64 = 0x80;
/// How many more streams a context has room for each time that it ran out of it.
const STREAM_SLOTS_STEP: usize = 32;

fn handle_of(index: usize) -> StreamHandle {
    StreamHandle(HANDLE_BASE + index as u64 * HANDLE_STEP)
}

fn index_of(handle: StreamHandle) -> Option<usize> {
    let offset = handle.0.checked_sub(HANDLE_BASE)?;
    offset.is_multiple_of(HANDLE_STEP).then_some((offset / HANDLE_STEP) as usize)
}

impl State {
    fn add_stream(&mut self, device: DeviceId, kind: StreamKind, is_blocking: bool) -> u64 {
        self.timeline.last_stream_id += 1;
        let id = self.timeline.last_stream_id;
        let queue = std::collections::VecDeque::new();
        let stream = Stream { device, kind, is_blocking, queue, enqueued: 0, finished: 0 };
        self.timeline.streams.insert(id, stream);
        id
    }

    /// The stream that a handle names for a call in `device`'s context.
    pub(super) fn stream(&mut self, device: DeviceId, handle: StreamHandle) -> Answer<u64> {
        match handle {
            StreamHandle::NULL | StreamHandle::LEGACY => {
                if let Some(id) = self.timeline.legacy.get(&device) {
                    return Ok(*id);
                }
                let id = self.add_stream(device, StreamKind::Legacy, false);
                self.timeline.legacy.insert(device, id);
                Ok(id)
            }
            StreamHandle::PER_THREAD => {
                let thread = thread::current().id();
                let known = |entry: &&(DeviceId, _, u64)| (entry.0, entry.1) == (device, thread);
                if let Some((_, _, id)) = self.timeline.per_thread.iter().find(known) {
                    return Ok(*id);
                }
                let id = self.add_stream(device, StreamKind::PerThread(thread), true);
                self.timeline.per_thread.push((device, thread, id));
                Ok(id)
            }
            _ => {
                let index = index_of(handle);
                let id = index.and_then(|index| self.timeline.handles.get(index)).copied();
                id.ok_or_else(|| Refused::invalid_handle(format_args!("no stream {:#x}", handle.0)))
            }
        }
    }

    /// The same, for calls that want a stream of that very device.
    pub(super) fn own_stream(&mut self, device: DeviceId, handle: StreamHandle) -> Answer<u64> {
        let id = self.stream(device, handle)?;
        let home = self.timeline.streams[&id].device;
        if home == device {
            return Ok(id);
        }
        Err(Refused::invalid_handle(format_args!("the stream belongs to {home}, not to {device}")))
    }

    /// A stream that was created and not destroyed: its device, and whether it is a blocking one.
    pub(super) fn created_stream(&self, handle: StreamHandle) -> Option<(DeviceId, bool)> {
        let id = index_of(handle).and_then(|index| self.timeline.handles.get(index))?;
        let stream = self.timeline.streams.get(id)?;
        Some((stream.device, stream.is_blocking))
    }

    pub(super) fn stream_device(&self, id: u64) -> Option<DeviceId> {
        self.timeline.streams.get(&id).map(|stream| stream.device)
    }

    /// Streams of the device that were created and not destroyed.
    fn created_streams(&self, device: DeviceId) -> usize {
        let created = |stream: &&Stream| {
            stream.device == device && matches!(stream.kind, StreamKind::Created { .. })
        };
        self.timeline.streams.values().filter(created).count()
    }

    fn destroy_stream(&mut self, handle: StreamHandle) -> Answer<()> {
        let index = index_of(handle).filter(|index| self.timeline.handles.contains(*index));
        let Some(index) = index else {
            return Err(Refused::invalid_handle(format_args!("no stream {:#x}", handle.0)));
        };
        let id = self.timeline.handles.remove(index);
        self.abandon_capture(id);
        // Work left goes on; the queue leaves when it is empty.
        if let Some(stream) = self.timeline.streams.get_mut(&id) {
            stream.kind = StreamKind::Destroyed;
            if stream.queue.is_empty() {
                self.timeline.streams.remove(&id);
            }
        }
        Ok(())
    }

    /// The end of a context: its streams and events are gone, and what was queued never runs.
    pub(super) fn drop_streams_of(&mut self, device: DeviceId) {
        let timeline = &mut self.timeline;
        let gone: Vec<u64> = timeline
            .streams
            .iter()
            .filter(|(_, stream)| stream.device == device)
            .map(|(id, _)| *id)
            .collect();
        for id in gone {
            self.abandon_capture(id);
            let Some(stream) = self.timeline.streams.remove(&id) else { continue };
            if let StreamKind::Created { handle } = stream.kind
                && let Some(index) = index_of(handle)
            {
                self.timeline.handles.try_remove(index);
            }
            for item in stream.queue {
                self.discard(item.op);
            }
            self.timeline.busy.remove(&id);
        }
        self.timeline.legacy.remove(&device);
        self.timeline.per_thread.retain(|(of, _, _)| *of != device);
        let timeline = &mut self.timeline;
        let timed = &mut timeline.timed_records;
        timeline.events.retain(|_, event| {
            if let (LastRecord::Live(record), true) = (&event.last, event.device == device) {
                timed.remove(record);
            }
            event.device != device
        });
    }

    /// Enqueues, or adds to the capture if the stream is being captured.
    pub(super) fn submit(&mut self, stream: u64, op: Op) -> Answer<()> {
        if self.capturing(stream)? {
            return self.capture_op(stream, op);
        }
        self.refuse_implicit_capture(stream)?;
        let after = self.timeline.implicit_order(stream);
        self.timeline.push(stream, op, after);
        Ok(())
    }

    /// Which queues are stuck, and on what: for the message of a wait that was given up.
    pub(super) fn describe_blocked(&self) -> String {
        let mut text = String::new();
        for id in &self.timeline.busy {
            let Some(stream) = self.timeline.streams.get(id) else { continue };
            let Some(head) = stream.queue.front() else { continue };
            let name = match stream.kind {
                StreamKind::Created { handle } => format!("stream {:#x}", handle.0),
                StreamKind::Legacy => "the legacy stream".to_owned(),
                StreamKind::PerThread(_) => "a per-thread stream".to_owned(),
                StreamKind::Destroyed => "a destroyed stream".to_owned(),
            };
            if !text.is_empty() {
                text.push_str(", ");
            }
            text.push_str(&format!(
                "{name} (id {id}) of {} is at {}, {} items queued",
                stream.device,
                head.op.name(),
                stream.queue.len()
            ));
        }
        text
    }
}

impl Sim {
    /// A blocking one is ordered with the legacy stream. The handle of the stream that was
    /// destroyed last comes back first (row D-S1).
    pub(super) fn do_stream_create(
        &self,
        device: DeviceId,
        is_blocking: bool,
    ) -> DriverResult<StreamHandle> {
        self.call_on(Call::StreamCreate, device, |state| {
            self.make_room_for_stream(state, device)?;
            let index = state.timeline.handles.vacant_key();
            let handle = handle_of(index);
            let id = state.add_stream(device, StreamKind::Created { handle }, is_blocking);
            state.timeline.handles.insert(id);
            Ok(handle)
        })
    }

    /// A context that has no room for one more stream waits for all work of its device before it
    /// makes some (row D-N2); the room stays when streams are destroyed.
    fn make_room_for_stream(&self, state: &mut Locked<'_>, device: DeviceId) -> Answer<()> {
        let slots = |state: &State| {
            let context = state.devices.get(device.0 as usize)?.context.as_ref()?;
            Some(context.stream_slots)
        };
        if slots(state).is_none_or(|slots| state.created_streams(device) < slots) {
            return Ok(());
        }
        self.drain_device_alone(state, device)?;
        if let Some(context) = &mut state.device_mut(device)?.context {
            context.stream_slots += STREAM_SLOTS_STEP;
        }
        Ok(())
    }

    /// Returns at once; queued work goes on.
    pub(super) fn do_stream_destroy(
        &self,
        device: DeviceId,
        stream: StreamHandle,
    ) -> DriverResult<()> {
        self.call_on(Call::StreamDestroy, device, |state| state.destroy_stream(stream))
    }

    /// Rows D-S1, never given out twice, and D-N20: a captured stream does not tell, and is spoilt.
    pub(super) fn do_stream_id(
        &self,
        device: DeviceId,
        stream: StreamHandle,
    ) -> DriverResult<StreamId> {
        self.call_on(Call::StreamGetId, device, |state| {
            let id = state.stream(device, stream)?;
            state.refuse_captured_stream(id)?;
            state.refuse_implicit_capture(id)?;
            Ok(StreamId(id))
        })
    }

    /// Whether all that was enqueued is done. An observation: it reports faults.
    pub(super) fn do_stream_query(
        &self,
        device: DeviceId,
        stream: StreamHandle,
    ) -> DriverResult<bool> {
        self.call_on(Call::StreamQuery, device, |state| {
            let id = state.stream(device, stream)?;
            state.refuse_captured_stream(id)?;
            state.refuse_unsafe_in_capture()?;
            let home = state.stream_device(id).unwrap_or(device);
            state.report_fault(home)?;
            let timeline = &state.timeline;
            let order = timeline.implicit_order(id);
            Ok(timeline.passed(id, timeline.tail(id)) && order.is_empty())
        })
    }

    /// Waits, and reports faults.
    pub(super) fn do_stream_synchronize(
        &self,
        device: DeviceId,
        stream: StreamHandle,
    ) -> DriverResult<()> {
        self.call_on(Call::StreamSynchronize, device, |state| {
            let id = state.stream(device, stream)?;
            state.refuse_captured_stream(id)?;
            state.refuse_unsafe_in_capture()?;
            let home = state.stream_device(id).unwrap_or(device);
            self.drain_stream(state, id)?;
            state.trim_pool(home);
            state.report_fault(home)
        })
    }

    /// Waits until a stream is done with what it has now.
    pub(super) fn drain_stream(&self, state: &mut Locked<'_>, id: u64) -> Answer<()> {
        // The legacy stream also stands for the blocking streams that it is ordered after.
        let mut until = state.timeline.implicit_order(id);
        until.push((id, state.timeline.tail(id)));
        self.wait_until(state, |state| {
            until.iter().all(|(id, ticket)| state.timeline.passed(*id, *ticket))
        })
    }

    /// Waits until all streams of a device are done with what they have now.
    pub(super) fn drain_device(&self, state: &mut Locked<'_>, device: DeviceId) -> Answer<()> {
        let timeline = &state.timeline;
        let until: Vec<(u64, u64)> = timeline
            .busy
            .iter()
            .filter(|id| timeline.streams.get(id).is_some_and(|stream| stream.device == device))
            .map(|id| (*id, timeline.tail(*id)))
            .collect();
        self.wait_until(state, |state| {
            until.iter().all(|(id, ticket)| state.timeline.passed(*id, *ticket))
        })
    }

    /// Across devices too. An event that has passed costs the queue nothing.
    pub(super) fn do_stream_wait_event(
        &self,
        device: DeviceId,
        stream: StreamHandle,
        event: EventHandle,
    ) -> DriverResult<()> {
        self.call_on(Call::StreamWaitEvent, device, |state| {
            let id = state.stream(device, stream)?;
            state.wait_event(id, event)
        })
    }

    /// The gate of row D-V5: a real word of host memory, which any thread may write.
    pub(super) fn do_stream_wait_value32(
        &self,
        device: DeviceId,
        stream: StreamHandle,
        address: PinnedAddress,
        value: u32,
    ) -> DriverResult<()> {
        self.call_on(Call::StreamWaitValue32, device, |state| {
            let id = state.own_stream(device, stream)?;
            if !address.0.is_multiple_of(4) || !state.is_pinned(address.0, 4) {
                return Err(Refused::new(ResultCode::INVALID_VALUE).because(format_args!(
                    "{:#x} is no aligned word of page-locked memory",
                    address.0
                )));
            }
            state.submit(id, Op::WaitValue { address: address.0, value })
        })
    }
}
