//! [`Events`]: the events of a device's gates: recorded, asked for later, and used again.

use std::sync::Arc;

use vmm_sys::object::{Event, RelaxedCapture, Stream};
use vmm_sys::{CaptureStatus, DeviceId, Driver};

use crate::capture;
use crate::error::Error;
use crate::sync::Mutex;

/// Events kept for reuse: making one costs more than recording it.
const SPARE_EVENTS_MAX: usize = 64;

/// Where the gates of one device's memory get their events.
#[derive(Debug)]
pub(crate) struct Events {
    pub(crate) driver: Arc<dyn Driver>,
    device: DeviceId,
    spare: Mutex<Vec<Event>>,
}

impl Events {
    pub(crate) fn new(driver: Arc<dyn Driver>, device: DeviceId) -> Arc<Events> {
        Arc::new(Events { driver, device, spare: Mutex::default() })
    }

    /// An event recorded on `stream` now, or `None` while the stream is being captured: an event
    /// recorded there would become part of the graph and die with it. For the default stream of
    /// another thread it is recorded on the legacy stream, which stands for it (row D-S2).
    pub(crate) fn gate(&self, stream: &Stream) -> Result<Option<Event>, Error> {
        // Held until the record is made: no capture scope opens on the stream meanwhile.
        let captures = capture::open();
        if captures.include(stream) {
            return Ok(None);
        }
        let _relaxed = RelaxedCapture::enter(&self.driver)?;
        if stream.capture_info()?.status != CaptureStatus::None {
            return Ok(None);
        }
        // An event is of one device, and records only streams of it.
        let home = stream.device() == self.device;
        let spare = if home { self.spare.lock().pop() } else { None };
        let event = match spare {
            Some(event) => event,
            None => Event::create(&self.driver, stream.device())?,
        };
        event.record(stream)?;
        Ok(Some(event))
    }

    /// Takes an event back whose gate has passed.
    pub(crate) fn spare(&self, event: Event) {
        if event.device() != self.device {
            return;
        }
        let mut spare = self.spare.lock();
        if spare.len() < SPARE_EVENTS_MAX {
            spare.push(event);
        }
    }
}
