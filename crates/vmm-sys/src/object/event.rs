//! [`Event`]: a point in a stream.

use std::sync::Arc;

use super::Stream;
use super::drops::{Leftover, give_back_or_keep};
use crate::call::Call;
use crate::caught::caught;
use crate::driver::Driver;
use crate::error::DriverResult;
use crate::types::{DeviceId, EventHandle, IpcEventHandle};

/// A point in the work of a stream, recorded and asked for. The only clock of stream order.
#[derive(Debug)]
pub struct Event {
    driver: Arc<dyn Driver>,
    device: DeviceId,
    handle: EventHandle,
}

impl Event {
    /// Makes an event without timing for streams of `device` (`cuEventCreate`).
    ///
    /// # Errors
    /// The driver's.
    pub fn create(driver: &Arc<dyn Driver>, device: DeviceId) -> DriverResult<Event> {
        let handle = caught(Call::EventCreate, || driver.event_create(device))?;
        Ok(Event { driver: driver.clone(), device, handle })
    }

    /// Makes an event that other processes can open (`cuEventCreate(CU_EVENT_INTERPROCESS)`).
    ///
    /// # Errors
    /// The driver's: not supported where it shares no events (row D-X7).
    pub fn create_interprocess(driver: &Arc<dyn Driver>, device: DeviceId) -> DriverResult<Event> {
        let handle = caught(Call::EventCreate, || driver.event_create_interprocess(device))?;
        Ok(Event { driver: driver.clone(), device, handle })
    }

    /// The name of this event in other processes (`cuIpcGetEventHandle`). It is good for as long as
    /// this event lives: NVIDIA leaves undefined what an opened event says afterwards.
    ///
    /// # Errors
    /// The driver's; an event of [`Event::create`] has no name.
    pub fn export(&self) -> DriverResult<IpcEventHandle> {
        // SAFETY: `self` owns a live handle.
        let export = || unsafe { self.driver.ipc_event_handle(self.device, self.handle) };
        caught(Call::IpcGetEventHandle, export)
    }

    /// Opens an event of another process (`cuIpcOpenEventHandle`), to be waited for and asked here:
    /// what its maker records is seen. It begins as the maker left it, and dropping it leaves the
    /// maker's alone.
    ///
    /// # Errors
    /// The driver's: not supported where it shares no events, invalid value for what names no live
    /// event.
    pub fn open(
        driver: &Arc<dyn Driver>,
        device: DeviceId,
        exported: &IpcEventHandle,
    ) -> DriverResult<Event> {
        let handle = caught(Call::IpcOpenEventHandle, || driver.ipc_event_open(device, exported))?;
        Ok(Event { driver: driver.clone(), device, handle })
    }

    /// Marks the work enqueued on `stream` so far (`cuEventRecord`). A later record moves the mark.
    /// For another thread's per-thread stream the mark is set in the legacy stream (row D-S2).
    ///
    /// # Errors
    /// The driver's: an invalid handle if the stream is of another device.
    pub fn record(&self, stream: &Stream) -> DriverResult<()> {
        // SAFETY: both objects own live handles.
        let record =
            || unsafe { self.driver.event_record(self.device, self.handle, stream.handle_here()) };
        caught(Call::EventRecord, record)
    }

    /// Whether the marked work is done (`cuEventQuery`); never waits. True if never recorded.
    /// Call it in relaxed capture mode ([`super::RelaxedCapture`]).
    ///
    /// # Errors
    /// The driver's: a sticky context error shows up here.
    pub fn passed(&self) -> DriverResult<bool> {
        // SAFETY: `self` owns a live handle.
        caught(Call::EventQuery, || unsafe { self.driver.event_query(self.device, self.handle) })
    }

    /// Waits on the host until the marked work is done (`cuEventSynchronize`).
    ///
    /// # Errors
    /// The driver's.
    pub fn wait(&self) -> DriverResult<()> {
        // SAFETY: `self` owns a live handle.
        let wait = || unsafe { self.driver.event_synchronize(self.device, self.handle) };
        caught(Call::EventSynchronize, wait)
    }

    /// The device whose streams can record it.
    pub fn device(&self) -> DeviceId {
        self.device
    }

    pub(super) fn handle(&self) -> EventHandle {
        self.handle
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        give_back_or_keep(&self.driver, Leftover::Event(self.device, self.handle));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ResultCode;
    use crate::sim::Sim;

    #[test]
    fn a_driver_that_shares_no_events_says_so_and_keeps_none() {
        let sim = Sim::builder().build();
        let driver: Arc<dyn Driver> = sim.clone();
        let home = DeviceId(0);
        let own = Event::create(&driver, home).unwrap();
        let refusals = [
            (Call::EventCreate, Event::create_interprocess(&driver, home).map(drop)),
            (Call::IpcGetEventHandle, own.export().map(drop)),
            (
                Call::IpcOpenEventHandle,
                Event::open(&driver, home, &IpcEventHandle([7; 64])).map(drop),
            ),
        ];
        for (call, refused) in refusals {
            let error = refused.unwrap_err();
            assert_eq!((error.call(), error.code()), (call, ResultCode::NOT_SUPPORTED));
        }
        drop(own);
        sim.check_clean().unwrap();
    }
}
