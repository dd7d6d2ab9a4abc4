//! [`GrowAhead`]: growth that is asked for now and done in the background.

use std::sync::Arc;
use std::time::Duration;

use super::body::Body;
use super::commit::How;
use super::error::ElasticError;
use super::growth::Lenders;
use super::progress::Progress;
use crate::error::Error;
use crate::lane::Wait;
use crate::place::Place;
use crate::sync::Mutex;
use crate::turn::Turn;

/// What became of growth that was asked for ahead.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum AheadState {
    /// Not begun.
    Waiting,
    /// Under way.
    Growing,
    /// The memory is there.
    Done,
    /// The buffer is as it was before.
    Failed(Error),
}

/// Growth that was asked for ahead: see
/// [`ElasticBuffer::grow_ahead`](super::ElasticBuffer::grow_ahead). Dropping it changes nothing.
#[derive(Clone, Debug)]
pub struct GrowAhead(Arc<Request>);

type Request = Progress<Order>;

#[derive(Clone, Debug)]
struct Order {
    target_bytes: u64,
    state: AheadState,
}

/// The one request of a buffer that has not begun: a later one joins it.
#[derive(Debug, Default)]
pub(crate) struct Ahead(Mutex<Option<Arc<Request>>>);

impl GrowAhead {
    /// What has become of it by now. Never waits.
    pub fn state(&self) -> AheadState {
        if vmm_sys::process::is_forked_child() {
            return AheadState::Failed(Error::DriverGone);
        }
        self.0.get().state
    }

    /// How far the buffer is to grow, in bytes: the most that was asked for.
    pub fn target_bytes(&self) -> u64 {
        if vmm_sys::process::is_forked_child() {
            return 0;
        }
        self.0.get().target_bytes
    }

    /// Whether it has ended, well or not.
    pub fn is_finished(&self) -> bool {
        self.state().is_finished()
    }

    /// Waits for the end, `timeout` at most.
    pub fn wait(&self, timeout: Duration) -> AheadState {
        if vmm_sys::process::is_forked_child() {
            return self.state();
        }
        self.0.wait_while(|order| !order.state.is_finished(), timeout).state
    }
}

impl AheadState {
    fn is_finished(&self) -> bool {
        matches!(self, AheadState::Done | AheadState::Failed(_))
    }
}

impl Request {
    fn become_(&self, state: AheadState) -> u64 {
        self.update(|order| order.state = state).target_bytes
    }
}

impl Ahead {
    /// Asks for growth to `bytes`; joins the request that has not begun, if there is one.
    pub(crate) fn ask(&self, bytes: u64) -> GrowAhead {
        let mut waiting = self.0.lock();
        let request = waiting.get_or_insert_with(|| {
            Arc::new(Progress::new(Order { target_bytes: 0, state: AheadState::Waiting }))
        });
        request.update(|order| order.target_bytes = order.target_bytes.max(bytes));
        GrowAhead(request.clone())
    }

    /// The buffer ends: nobody does what was asked for.
    pub(crate) fn end(&self) {
        let waiting = self.0.lock().take();
        if let Some(request) = waiting {
            request.become_(AheadState::Failed(ElasticError::Ended.into()));
        }
    }

    pub(crate) fn is_waiting(&self) -> bool {
        !vmm_sys::process::is_forked_child() && self.0.lock().is_some()
    }
}

/// Does what was asked for ahead, if anything was.
pub(crate) fn serve(body: &Body, turn: Turn) {
    let request = body.ahead.0.lock().take();
    let Some(request) = request.map(Begun) else { return };
    // Whoever asks from now on makes a request of its own.
    let target_bytes = request.0.become_(AheadState::Growing);
    // The background thread has other work than to wait for the GPU.
    let how = How { place: Place::Device(body.home()), turn, wait: Wait::No };
    let grown = body.slots_over(0, target_bytes).and_then(|slots| {
        let operation = body.operate()?;
        body.check_awake()?;
        operation.commit(slots, how, &Lenders::Nobody).map(drop)
    });
    request.0.become_(match grown {
        Ok(()) => AheadState::Done,
        Err(error) => AheadState::Failed(error),
    });
}

/// A request under way: whatever becomes of the thread, nobody waits for it for ever.
struct Begun(Arc<Request>);

impl Drop for Begun {
    fn drop(&mut self) {
        if !self.0.get().state.is_finished() {
            self.0.become_(AheadState::Failed(ElasticError::Ended.into()));
        }
    }
}
