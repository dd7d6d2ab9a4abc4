//! Streams and events.

use super::ffi::{
    EVENT_DISABLE_TIMING, EVENT_INTERPROCESS, IpcEvent, STREAM_DEFAULT, STREAM_NON_BLOCKING,
    WAIT_VALUE_GEQ,
};
use super::{Cuda, have, supported};
use crate::call::Call;
use crate::error::DriverResult;
use crate::types::{DeviceId, EventHandle, IpcEventHandle, PinnedAddress, StreamHandle, StreamId};

impl Cuda {
    pub(super) fn stream_create(&self, device: DeviceId) -> DriverResult<StreamHandle> {
        self.new_stream(device, STREAM_NON_BLOCKING)
    }

    pub(super) fn stream_create_blocking(&self, device: DeviceId) -> DriverResult<StreamHandle> {
        self.new_stream(device, STREAM_DEFAULT)
    }

    fn new_stream(&self, device: DeviceId, flags: u32) -> DriverResult<StreamHandle> {
        let _scope = self.enter(device)?;
        let mut stream = 0;
        self.door(Call::StreamCreate, Some(device), || {
            (self.entry.stream_create)(&mut stream, flags)
        })?;
        Ok(StreamHandle(stream))
    }

    /// # Safety
    /// As [`crate::Driver::stream_destroy`].
    pub(super) unsafe fn stream_destroy(
        &self,
        device: DeviceId,
        stream: StreamHandle,
    ) -> DriverResult<()> {
        let _scope = self.enter(device)?;
        self.door(Call::StreamDestroy, Some(device), || {
            // SAFETY: the caller owns the live stream and gives it up.
            unsafe { (self.entry.stream_destroy)(stream.0) }
        })
    }

    /// # Safety
    /// As [`crate::Driver::stream_id`].
    pub(super) unsafe fn stream_id(
        &self,
        device: DeviceId,
        stream: StreamHandle,
    ) -> DriverResult<StreamId> {
        let get = have(Call::StreamGetId, self.entry.stream_get_id)?;
        let _scope = self.enter(device)?;
        let mut id = 0;
        self.door(Call::StreamGetId, Some(device), || {
            // SAFETY: the caller says that the stream is live.
            unsafe { get(stream.0, &mut id) }
        })?;
        Ok(StreamId(id))
    }

    /// # Safety
    /// As [`crate::Driver::stream_query`].
    pub(super) unsafe fn stream_query(
        &self,
        device: DeviceId,
        stream: StreamHandle,
    ) -> DriverResult<bool> {
        let _scope = self.enter(device)?;
        self.door_query(Call::StreamQuery, device, || {
            // SAFETY: the caller says that the stream is live.
            unsafe { (self.entry.stream_query)(stream.0) }
        })
    }

    /// # Safety
    /// As [`crate::Driver::stream_synchronize`].
    pub(super) unsafe fn stream_synchronize(
        &self,
        device: DeviceId,
        stream: StreamHandle,
    ) -> DriverResult<()> {
        let _scope = self.enter(device)?;
        self.door(Call::StreamSynchronize, Some(device), || {
            // SAFETY: the caller says that the stream is live.
            unsafe { (self.entry.stream_synchronize)(stream.0) }
        })
    }

    /// # Safety
    /// As [`crate::Driver::stream_wait_event`].
    pub(super) unsafe fn stream_wait_event(
        &self,
        device: DeviceId,
        stream: StreamHandle,
        event: EventHandle,
    ) -> DriverResult<()> {
        let _scope = self.enter(device)?;
        self.door(Call::StreamWaitEvent, Some(device), || {
            // SAFETY: the caller says that both are live.
            unsafe { (self.entry.stream_wait_event)(stream.0, event.0, 0) }
        })
    }

    /// # Safety
    /// As [`crate::Driver::stream_wait_value32`].
    pub(super) unsafe fn stream_wait_value32(
        &self,
        device: DeviceId,
        stream: StreamHandle,
        address: PinnedAddress,
        value: u32,
    ) -> DriverResult<()> {
        let wait = have(Call::StreamWaitValue32, self.entry.stream_wait_value32)?;
        let _scope = self.enter(device)?;
        self.door(Call::StreamWaitValue32, Some(device), || {
            // SAFETY: the caller says that the stream is live and that the word stays. With unified
            // addressing, mapped host memory has the same address on the device.
            unsafe { wait(stream.0, address.0, value, WAIT_VALUE_GEQ) }
        })
    }

    pub(super) fn event_create(&self, device: DeviceId) -> DriverResult<EventHandle> {
        self.new_event(device, EVENT_DISABLE_TIMING)
    }

    pub(super) fn event_create_interprocess(&self, device: DeviceId) -> DriverResult<EventHandle> {
        // Of no use without a name for others, so that a driver without names refuses here.
        supported(Call::IpcGetEventHandle, self.entry.ipc_get_event_handle)?;
        self.new_event(device, EVENT_DISABLE_TIMING | EVENT_INTERPROCESS)
    }

    fn new_event(&self, device: DeviceId, flags: u32) -> DriverResult<EventHandle> {
        let _scope = self.enter(device)?;
        let mut event = 0;
        self.door(Call::EventCreate, Some(device), || {
            (self.entry.event_create)(&mut event, flags)
        })?;
        Ok(EventHandle(event))
    }

    /// # Safety
    /// As [`crate::Driver::ipc_event_handle`].
    pub(super) unsafe fn ipc_event_handle(
        &self,
        device: DeviceId,
        event: EventHandle,
    ) -> DriverResult<IpcEventHandle> {
        let get = supported(Call::IpcGetEventHandle, self.entry.ipc_get_event_handle)?;
        let _scope = self.enter(device)?;
        let mut handle = IpcEvent { reserved: [0; 64] };
        self.door(Call::IpcGetEventHandle, Some(device), || {
            // SAFETY: the caller says that the event is live; the driver writes 64 bytes.
            unsafe { get(&mut handle, event.0) }
        })
        .map_err(|error| error.because("was the event created for other processes?"))?;
        Ok(IpcEventHandle(handle.reserved))
    }

    pub(super) fn ipc_event_open(
        &self,
        device: DeviceId,
        handle: &IpcEventHandle,
    ) -> DriverResult<EventHandle> {
        let open = supported(Call::IpcOpenEventHandle, self.entry.ipc_open_event_handle)?;
        let _scope = self.enter(device)?;
        let mut event = 0;
        self.door(Call::IpcOpenEventHandle, Some(device), || {
            open(&mut event, IpcEvent { reserved: handle.0 })
        })
        .map_err(|error| {
            error.because("expected the handle of a live event that another process made")
        })?;
        Ok(EventHandle(event))
    }

    /// # Safety
    /// As [`crate::Driver::event_destroy`].
    pub(super) unsafe fn event_destroy(
        &self,
        device: DeviceId,
        event: EventHandle,
    ) -> DriverResult<()> {
        let _scope = self.enter(device)?;
        self.door(Call::EventDestroy, Some(device), || {
            // SAFETY: the caller owns the live event and gives it up.
            unsafe { (self.entry.event_destroy)(event.0) }
        })
    }

    /// # Safety
    /// As [`crate::Driver::event_record`].
    pub(super) unsafe fn event_record(
        &self,
        device: DeviceId,
        event: EventHandle,
        stream: StreamHandle,
    ) -> DriverResult<()> {
        let _scope = self.enter(device)?;
        self.door(Call::EventRecord, Some(device), || {
            // SAFETY: the caller says that both are live.
            unsafe { (self.entry.event_record)(event.0, stream.0) }
        })
    }

    /// # Safety
    /// As [`crate::Driver::event_query`].
    pub(super) unsafe fn event_query(
        &self,
        device: DeviceId,
        event: EventHandle,
    ) -> DriverResult<bool> {
        let _scope = self.enter(device)?;
        self.door_query(Call::EventQuery, device, || {
            // SAFETY: the caller says that the event is live.
            unsafe { (self.entry.event_query)(event.0) }
        })
    }

    /// # Safety
    /// As [`crate::Driver::event_synchronize`].
    pub(super) unsafe fn event_synchronize(
        &self,
        device: DeviceId,
        event: EventHandle,
    ) -> DriverResult<()> {
        let _scope = self.enter(device)?;
        self.door(Call::EventSynchronize, Some(device), || {
            // SAFETY: the caller says that the event is live.
            unsafe { (self.entry.event_synchronize)(event.0) }
        })
    }
}
