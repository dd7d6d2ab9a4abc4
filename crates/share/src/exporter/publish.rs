//! The order between the owner's work and that of importers.

use std::sync::Arc;

use parking_lot::Mutex;
use vmm_sys::CaptureStatus;
use vmm_sys::object::{Event, Stream};

use crate::error::{AtStep, ShareError};
use crate::page::NoticeBoard;

const STEP: &str = "publishing";

/// Numbers what is published, and has each number told once its work is done.
#[derive(Debug)]
pub(super) struct Publisher {
    board: Arc<NoticeBoard>,
    state: Mutex<Published>,
}

#[derive(Debug, Default)]
struct Published {
    sequence: u64,
    /// Stands behind the work of the last sequence.
    last: Option<Event>,
}

impl Publisher {
    pub(super) fn new(board: Arc<NoticeBoard>) -> Publisher {
        Publisher { board, state: Mutex::default() }
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
        // A number stands for all before it, whichever streams they were on.
        if let Some(last) = &state.last {
            stream.wait_event(last).at(STEP)?;
        }
        let event = Event::create(stream.driver(), stream.device()).at(STEP)?;
        let sequence = state.sequence + 1;
        let board = self.board.clone();
        stream.call_on_host(move || board.done(sequence)).at(STEP)?;
        state.sequence = sequence;
        event.record(stream).at(STEP)?;
        state.last = Some(event);
        Ok(sequence)
    }
}
