//! The order between the owner's work and that of importers.

use std::sync::Arc;

use parking_lot::Mutex;
use vmm_pool::ElasticBuffer;
use vmm_sys::object::{Event, Stream};
use vmm_sys::{CaptureStatus, DriverError};

use crate::error::{AtStep, ShareError};
use crate::page::NoticeBoard;
use crate::wire::Ordering;

const STEP: &str = "publishing";

/// Numbers what is published, and has each number told in the order of the work.
#[derive(Debug)]
pub(super) struct Publisher {
    board: Arc<NoticeBoard>,
    /// An event that importers have too, where the driver shares events.
    shared: Option<Event>,
    /// What importers are told of it.
    pub(super) ordering: Ordering,
    state: Mutex<Published>,
}

#[derive(Debug, Default)]
struct Published {
    sequence: u64,
    /// Stands behind the work of the last sequence, where no event is shared.
    last: Option<Event>,
    /// Records the shared event for streams of other devices.
    helper: Option<Stream>,
}

impl Publisher {
    pub(super) fn new(
        board: Arc<NoticeBoard>,
        buffer: &ElasticBuffer,
    ) -> Result<Publisher, ShareError> {
        let state = Mutex::default();
        let (shared, ordering) = match share_event(buffer) {
            Ok((event, name)) => {
                let device = buffer.driver().device_uuid(event.device()).at("naming a GPU")?;
                (Some(event), Ordering::Event { device, handle: name })
            }
            Err(error) => {
                vmm_sys::say!(debug, %error, "the driver shares no events; the host tells the order");
                (None, Ordering::Host)
            }
        };
        Ok(Publisher { board, shared, ordering, state })
    }

    pub(super) fn publish(&self, stream: &Stream) -> Result<u64, ShareError> {
        let info = stream.capture_info().at(STEP)?;
        if info.status != CaptureStatus::None {
            return Err(ShareError::BadArgument {
                what: "stream",
                value: format!("{stream:?}, which is being captured"),
                expected: "a stream outside of captures: a graph would publish one number for ever"
                    .to_owned(),
            });
        }
        let mut state = self.state.lock();
        let sequence = state.sequence + 1;
        match &self.shared {
            Some(event) => state.record(event, stream).at(STEP)?,
            None => {
                let board = self.board.clone();
                state.tell(stream, move || board.done(sequence)).at(STEP)?;
            }
        }
        state.sequence = sequence;
        if self.shared.is_some() {
            self.board.recorded(sequence);
        }
        Ok(sequence)
    }
}

/// An event of the buffer's home for other processes, and its name.
fn share_event(buffer: &ElasticBuffer) -> Result<(Event, [u8; 64]), DriverError> {
    let event = Event::create_interprocess(buffer.driver(), buffer.device())?;
    let name = event.export()?;
    Ok((event, name.0))
}

impl Published {
    /// Puts the event behind the work of the stream, and behind all that it stood behind before: a
    /// number stands for all before it, whichever streams they were on.
    fn record(&mut self, event: &Event, stream: &Stream) -> Result<(), DriverError> {
        if stream.device() == event.device() {
            stream.wait_event(event)?;
            return event.record(stream);
        }
        // An event is recorded on streams of its own device only.
        let mark = Event::create(stream.driver(), stream.device())?;
        mark.record(stream)?;
        let helper = match self.helper.take() {
            Some(helper) => helper,
            None => Stream::create(stream.driver(), event.device())?,
        };
        let helper = self.helper.insert(helper);
        helper.wait_event(event)?;
        helper.wait_event(&mark)?;
        event.record(helper)
    }

    /// Has the host tell the number once the work of the stream, and that of all numbers before, is
    /// done.
    fn tell(
        &mut self,
        stream: &Stream,
        tell: impl FnOnce() + Send + 'static,
    ) -> Result<(), DriverError> {
        if let Some(last) = &self.last {
            stream.wait_event(last)?;
        }
        let event = Event::create(stream.driver(), stream.device())?;
        stream.call_on_host(tell)?;
        event.record(stream)?;
        self.last = Some(event);
        Ok(())
    }
}
