//! Gates: the conditions after which memory is free of its last users.
//!
//! A gate is an event recorded after them. No event is recorded on a stream that is being captured:
//! it would become part of the graph and die with it. Then the gate waits unrecorded.

use std::sync::{Arc, OnceLock};

use vmm_sys::object::{Event, RelaxedCapture, Stream};
use vmm_sys::{CaptureStatus, DeviceId, DriverError, DriverResult, ResultCode, StreamId};

use crate::capture;
use crate::events::Events;
use crate::obstacle;

/// The condition after which memory is free of its last users on one stream.
#[derive(Clone, Debug)]
pub(crate) enum Gate {
    /// No event yet, or one that a capture took. Recorded at a later sweep, which only makes the
    /// gate stricter.
    Unrecorded(Stream),
    /// Passes with this event.
    Event(Arc<Recorded>),
    /// Somebody may still enqueue work; what stands for the end of it, once it is known.
    Open(Arc<OnceLock<Gate>>),
    /// Nothing to wait for.
    Passed,
}

/// What came of waiting for a gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Waited {
    /// What it stands for is done.
    Done,
    /// A capture is in the way: to wait would spoil it, and work from before it may be running.
    Captured,
}

impl Gate {
    /// The gate that stands for this one by now.
    fn now(&self) -> &Gate {
        match self {
            Gate::Open(closed) => closed.get().map_or(self, Gate::now),
            _ => self,
        }
    }

    /// Later work of `stream` waits for the gate, in stream order; the host waits only for what no
    /// event stands for.
    pub(crate) fn order(&self, stream: &Stream) -> DriverResult<Waited> {
        match self.now() {
            Gate::Event(recorded) => stream.wait_event(&recorded.event).map(|()| Waited::Done),
            gate => gate.wait(),
        }
    }

    /// The gate is not needed any more: its event can be recorded again, unless others wait for it.
    pub(crate) fn recycle(self, events: &Events) {
        if let Gate::Event(recorded) = self
            && let Some(recorded) = Arc::into_inner(recorded)
        {
            events.spare(recorded.event);
        }
    }

    /// Whether an event has still to be recorded for it on the stream of this identity.
    pub(crate) fn is_due_on(&self, id: StreamId) -> bool {
        matches!(self.now(), Gate::Unrecorded(stream) if stream.id() == id)
    }

    /// Whether memory of `lane`'s stream has to wait for it: not if it is of that very stream, in
    /// whose order the memory is, nor if it is another driver's.
    pub(crate) fn concerns(&self, lane: &Stream) -> bool {
        let stream = match self.now() {
            Gate::Unrecorded(stream) => stream,
            Gate::Event(recorded) => &recorded.stream,
            // Nobody knows yet on which streams.
            Gate::Open(_) => return true,
            Gate::Passed => return false,
        };
        let own = stream.id() == lane.id() && stream.device() == lane.device();
        let (theirs, ours) = (Arc::as_ptr(stream.driver()), Arc::as_ptr(lane.driver()));
        !own && std::ptr::addr_eq(theirs, ours)
    }

    /// Waits for what the gate stands for, in whatever way there is that harms no capture.
    pub(crate) fn wait(&self) -> DriverResult<Waited> {
        let stream = match self.now() {
            // Nobody can wait for an end that nobody has declared.
            Gate::Passed | Gate::Open(_) => return Ok(Waited::Done),
            // If the event cannot be waited for, its stream can, unless that may be gone.
            Gate::Event(recorded) => match recorded.event.wait() {
                Ok(()) => return Ok(Waited::Done),
                Err(error) if recorded.stream.is_borrowed() && !is_lost(&error) => {
                    return Err(error);
                }
                Err(_) => &recorded.stream,
            },
            Gate::Unrecorded(stream) => stream,
        };
        let captured = match stream.capture_info() {
            Ok(info) => info.status != CaptureStatus::None,
            // A stream that cannot say is waited for: better a capture lost than memory.
            Err(error) => is_implicit(&error),
        };
        if captured || capture::open().include(stream) {
            return Ok(Waited::Captured);
        }
        match stream.synchronize() {
            // One that began just now.
            Err(error) if error.code() == ResultCode::STREAM_CAPTURE_UNSUPPORTED => {
                Ok(Waited::Captured)
            }
            answer => answer.map(|()| Waited::Done),
        }
    }
}

/// Whether the legacy stream was asked about, and a stream that it is ordered with is captured.
fn is_implicit(error: &DriverError) -> bool {
    error.code() == ResultCode::STREAM_CAPTURE_IMPLICIT
}

/// An event and the stream that it was recorded on, which can be waited for in its place.
#[derive(Debug)]
pub(crate) struct Recorded {
    event: Event,
    stream: Stream,
}

/// Events that something waits for, each once.
#[derive(Default)]
pub(crate) struct Pending(Vec<Arc<Recorded>>);

impl Pending {
    pub(crate) fn of<'a>(gates: impl Iterator<Item = &'a Gate>) -> Pending {
        let mut pending: Vec<Arc<Recorded>> = Vec::new();
        for gate in gates {
            if let Gate::Event(recorded) = gate.now()
                && !pending.iter().any(|known| Arc::ptr_eq(known, recorded))
            {
                pending.push(recorded.clone());
            }
        }
        Pending(pending)
    }

    /// Waits for all of them. Returns whether there was anything to wait for.
    pub(crate) fn wait(&self, events: &Events) -> bool {
        if self.0.is_empty() {
            return false;
        }
        let Ok(_relaxed) = RelaxedCapture::enter(&events.driver).inspect_err(obstacle::note) else {
            return false;
        };
        for recorded in &self.0 {
            if let Err(error) = recorded.event.wait() {
                vmm_sys::say!(debug, %error, "a gate could not be waited for; its memory stays");
                obstacle::note(&error);
            }
        }
        true
    }
}

/// A gate behind what is enqueued on `stream` now.
pub(crate) fn record(events: &Events, stream: Stream) -> Gate {
    match events.gate(&stream) {
        Ok(Some(event)) => Gate::Event(Arc::new(Recorded { event, stream })),
        Ok(None) => Gate::Unrecorded(stream),
        Err(error) => {
            vmm_sys::say!(debug, %error, ?stream, "a gate could not be recorded; tried again later");
            obstacle::note_of(&error);
            Gate::Unrecorded(stream)
        }
    }
}

/// Whether a stream is being captured, as far as this thread can tell.
pub(crate) fn is_captured(stream: &Stream) -> bool {
    match stream.capture_info() {
        Ok(info) => info.status != CaptureStatus::None,
        // Of another thread's own stream it can only be told that some such stream is captured.
        Err(error) => is_implicit(&error) && stream.is_per_thread(),
    }
}

/// One pass over gates, in relaxed capture mode: records once a stream, asks each event once.
pub(crate) struct Asker<'a> {
    events: &'a Events,
    recorded: Vec<((DeviceId, StreamId), Gate)>,
    /// Answers, with the events themselves: an event that is kept cannot leave its place in
    /// memory to a younger one, which would then inherit the answer.
    asked: Vec<(Arc<Recorded>, Answer)>,
}

/// What an event says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answer {
    Passed,
    Pending,
    /// The event stands for nothing: a capture began on its stream as it was recorded, and took it.
    Lost,
}

/// Whether an event says that it was recorded in a capture, which is going on or over.
fn is_lost(error: &DriverError) -> bool {
    [ResultCode::CAPTURED_EVENT, ResultCode::INVALID_VALUE].contains(&error.code())
}

impl<'a> Asker<'a> {
    pub(crate) fn new(events: &'a Events) -> Asker<'a> {
        Asker { events, recorded: Vec::new(), asked: Vec::new() }
    }

    /// Whether the gate has passed, after recording it if that was still to be done.
    pub(crate) fn ask(&mut self, gate: &mut Gate) -> bool {
        if matches!(gate, Gate::Open(_)) {
            *gate = gate.now().clone();
        }
        if let Gate::Unrecorded(stream) = gate {
            // Legacy streams of two devices may share an identity.
            let key = (stream.device(), stream.id());
            let known = self.recorded.iter().find(|(known, _)| *known == key);
            let now = match known {
                Some((_, gate)) => gate.clone(),
                None => {
                    let now = record(self.events, stream.clone());
                    self.recorded.push((key, now.clone()));
                    now
                }
            };
            *gate = now;
        }
        let answer = match gate {
            Gate::Passed => Answer::Passed,
            Gate::Unrecorded(_) | Gate::Open(_) => Answer::Pending,
            Gate::Event(recorded) => self.answer(recorded),
        };
        match (answer, &*gate) {
            (Answer::Passed, _) => *gate = Gate::Passed,
            (Answer::Lost, Gate::Event(it)) => *gate = Gate::Unrecorded(it.stream.clone()),
            _ => {}
        }
        answer == Answer::Passed
    }

    fn answer(&mut self, recorded: &Arc<Recorded>) -> Answer {
        let known = self.asked.iter().find(|(known, _)| Arc::ptr_eq(known, recorded));
        if let Some((_, answer)) = known {
            return *answer;
        }
        let answer = match recorded.event.passed() {
            Ok(true) => Answer::Passed,
            Ok(false) => Answer::Pending,
            Err(error) => {
                vmm_sys::say!(debug, %error, "a gate could not be asked; its memory stays in limbo");
                obstacle::note(&error);
                if is_lost(&error) { Answer::Lost } else { Answer::Pending }
            }
        };
        self.asked.push((recorded.clone(), answer));
        answer
    }

    /// Events that nobody waits for any more can be recorded again.
    pub(crate) fn finish(mut self) {
        self.recorded.clear();
        for (recorded, answer) in self.asked {
            if answer == Answer::Passed
                && let Some(recorded) = Arc::into_inner(recorded)
            {
                self.events.spare(recorded.event);
            }
        }
    }
}
