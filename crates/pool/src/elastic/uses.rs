//! [`Use`]: the streams that use an elastic buffer, and what its memory waits for because of them.
//!
//! The pool cannot see kernels. A guard says that work of a stream uses the buffer; when it is
//! dropped an event is recorded, and that event, the youngest of its stream, is what memory that is
//! taken from the buffer waits for. A guard that is still alive then is waited for first.

use std::fmt;
use std::sync::{Arc, OnceLock};

use vmm_sys::object::{RelaxedCapture, Stream};
use vmm_sys::process;

use super::body::{Body, Holder};
use super::door::Door;
use super::error::ElasticError;
use crate::device::Device;
use crate::error::Error;
use crate::lane::{Asker, Gate, Waited, is_captured, record};
use crate::sync::thread::{self, ThreadId};
use crate::sync::{Condvar, Mutex, MutexGuard};

/// How many streams are remembered before those whose work is done are looked for.
const STREAMS_MIN: usize = 16;

/// While it lives, work that is enqueued on its stream, graph launches included, may use the
/// buffer. Drop it once all such work is enqueued: the buffer's memory stays mapped until that work
/// is done, however the buffer shrinks, moves or ends meanwhile.
///
/// Made by [`ElasticBuffer::use_on`](super::ElasticBuffer::use_on). It keeps the buffer's memory,
/// and can be dropped in any thread.
pub struct Use {
    body: Holder,
    open: Arc<OpenUse>,
}

/// A guard that is alive: what its drop recorded, once it is dropped.
#[derive(Debug)]
struct OpenUse {
    stream: Stream,
    closed: Arc<OnceLock<Gate>>,
    begun_by: ThreadId,
}

/// The uses of one buffer.
#[derive(Debug, Default)]
pub(crate) struct Uses {
    state: Mutex<State>,
    /// A guard ended, or the door opened.
    pub(super) changed: Condvar,
}

#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) door: Door,
    open: Vec<Arc<OpenUse>>,
    /// Threads that read or write from the host now.
    host: Vec<ThreadId>,
    /// The youngest use of each stream that has used the buffer.
    last: Vec<LastUse>,
    /// Length of `last` at which it is next looked through.
    prune_at: usize,
    /// Users of memory that came back before they were done: later users wait for them.
    before: Vec<(u64, Gate)>,
    begun: u64,
    /// Tells entries apart; never given twice.
    last_number: u64,
    /// When a use last began or ended, in milliseconds of the pool's clock.
    used_ms: u64,
}

impl State {
    fn number(&mut self) -> u64 {
        self.last_number += 1;
        self.last_number
    }

    /// Guards that are alive, and reads and writes from the host.
    pub(super) fn open_count(&self) -> usize {
        self.open.len() + self.host.len()
    }

    /// Whether the calling thread has one of them.
    pub(super) fn is_open_here(&self) -> bool {
        let here = thread::current().id();
        self.open.iter().any(|it| it.begun_by == here) || self.host.contains(&here)
    }

    /// What memory waits for that is taken from the buffer now: everything enqueued by the guards
    /// until now, and whatever those that are alive are going to enqueue.
    pub(super) fn gates(&self) -> Vec<Gate> {
        let last = self.last.iter().map(|it| it.gate.clone());
        let open = self.open.iter().map(|open| Gate::Open(open.closed.clone()));
        last.chain(open).chain(self.before.iter().map(|(_, gate)| gate.clone())).collect()
    }
}

/// The youngest use of a stream that has ended.
#[derive(Clone, Debug)]
struct LastUse {
    number: u64,
    stream: Stream,
    gate: Gate,
}

/// How a buffer is used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct UseCounts {
    /// Guards that are alive.
    pub(crate) open: u64,
    /// Guards that were ever made.
    pub(crate) begun: u64,
}

impl Uses {
    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        if process::is_forked_child() {
            // As for the buffer's own.
            return Box::leak(Box::<Mutex<State>>::default()).lock();
        }
        self.state.lock()
    }

    pub(crate) fn counts(&self) -> UseCounts {
        let state = self.state();
        UseCounts { open: state.open.len() as u64, begun: state.begun }
    }

    /// How long the buffer has not been used, in milliseconds. `None` while a guard is alive.
    pub(crate) fn idle_ms(&self, now_ms: u64) -> Option<u64> {
        let state = self.state();
        (state.open_count() == 0).then(|| now_ms.saturating_sub(state.used_ms))
    }

    /// Notes that the buffer is as good as used now.
    pub(crate) fn touch(&self, now_ms: u64) {
        self.state().used_ms = now_ms;
    }

    /// Whether a guard is alive, or a read or write from the host is under way.
    pub(crate) fn is_in_use(&self) -> bool {
        self.state().open_count() > 0
    }

    /// See [`State::gates`].
    pub(crate) fn gates(&self) -> Vec<Gate> {
        self.state().gates()
    }

    /// Memory came back to the buffer before these had passed: whoever uses it waits for them.
    pub(crate) fn come_after(&self, gates: impl IntoIterator<Item = Gate>) {
        let mut state = self.state();
        for gate in gates {
            let number = state.number();
            state.before.push((number, gate));
        }
    }

    /// Begins a use of `body` on `stream`.
    pub(crate) fn begin(body: &Holder, stream: &Stream) -> Result<Use, Error> {
        Uses::begin_unless(body, stream, || is_captured(stream))
    }

    /// The same for work that the driver checks when it is enqueued, as it does copies: the thread
    /// waits for a change that holds users, for the memory may not be mapped meanwhile.
    pub(super) fn begin_checked(body: &Holder, stream: &Stream) -> Result<Use, Error> {
        Uses::begin_unless(body, stream, || true)
    }

    /// The thread waits for a change that holds users, if `must_wait` says so; else its stream does.
    fn begin_unless(
        body: &Holder,
        stream: &Stream,
        must_wait: impl Fn() -> bool,
    ) -> Result<Use, Error> {
        if process::is_forked_child() {
            return Err(Error::DriverGone);
        }
        let device = body.keeper();
        if !std::ptr::addr_eq(Arc::as_ptr(stream.driver()), Arc::as_ptr(&device.driver)) {
            return Err(Error::UnknownDevice { device: stream.device() });
        }
        if !body.may_access(stream.device()) {
            return Err(ElasticError::NoAccess { device: stream.device() }.into());
        }
        body.mend()?;
        let closed = Arc::new(OnceLock::new());
        let begun_by = thread::current().id();
        let open = Arc::new(OpenUse { stream: stream.clone(), closed, begun_by });
        let (before, held) = {
            let (mut state, held) = body.uses.pass(must_wait);
            // From here on, memory that is taken away waits for the guard.
            state.open.push(open.clone());
            state.begun += 1;
            state.used_ms = device.watch.now_ms();
            (state.before.clone(), held)
        };
        if let Err(error) = body.check_awake() {
            body.uses.cancel(&open);
            return Err(error);
        }
        let guard = Use { body: body.clone(), open };
        if let Some(held) = held {
            held.hold(stream)?;
        }
        if !before.is_empty() {
            body.uses.order(device, stream, before)?;
        }
        Ok(guard)
    }

    /// Begins a read or a write from the host.
    pub(crate) fn begin_on_host(body: &Body) -> Result<HostUse<'_>, Error> {
        body.mend()?;
        let (mut state, _) = body.uses.pass(|| true);
        state.host.push(thread::current().id());
        state.used_ms = body.keeper().watch.now_ms();
        drop(state);
        let guard = HostUse(&body.uses);
        body.check_awake()?;
        Ok(guard)
    }

    /// Lets `stream` wait for the gates that have not passed. The host waits in its place while it
    /// is being captured: an event from outside would spoil the capture.
    fn order(
        &self,
        device: &Device,
        stream: &Stream,
        mut before: Vec<(u64, Gate)>,
    ) -> Result<(), Error> {
        let numbers: Vec<u64> = before.iter().map(|(number, _)| *number).collect();
        retain_pending(device, &mut before, |(_, gate)| gate);
        let pending = |number: &u64| before.iter().any(|(it, _)| it == number);
        let passed = |(it, _): &mut (u64, Gate)| numbers.contains(it) && !pending(it);
        let passed: Vec<_> = self.state().before.extract_if(.., passed).collect();
        drop(passed); // may destroy an event: not under the lock
        if before.is_empty() {
            return Ok(());
        }
        let captured = is_captured(stream);
        // Its own work comes before in any case, captured or not.
        for (_, gate) in before.iter().filter(|(_, gate)| gate.concerns(stream)) {
            let waited = if captured { gate.wait()? } else { gate.order(stream)? };
            if waited == Waited::Captured {
                return Err(ElasticError::StillUsed { offset: 0 }.into());
            }
        }
        Ok(())
    }

    /// A use that was refused: nobody has enqueued anything, and nobody waits for it.
    fn cancel(&self, open: &Arc<OpenUse>) {
        let _first = open.closed.set(Gate::Passed);
        let mut state = self.state();
        state.open.retain(|other| !Arc::ptr_eq(other, open));
        state.begun -= 1;
        self.changed.notify_all();
    }

    /// Ends a use: what was enqueued until now is what its stream waits for.
    fn end(&self, device: &Device, open: &Arc<OpenUse>) {
        let gate = record(&device.events, open.stream.clone());
        // Whoever waits for the guard now waits for the event. Only a guard's drop comes here.
        let _first = open.closed.set(gate.clone());
        let (old, crowded) = {
            let mut state = self.state();
            state.open.retain(|other| !Arc::ptr_eq(other, open));
            state.used_ms = device.watch.now_ms();
            self.changed.notify_all();
            let number = state.number();
            let new = LastUse { number, stream: open.stream.clone(), gate };
            let same = |it: &&mut LastUse| {
                it.stream.id() == new.stream.id() && it.stream.device() == new.stream.device()
            };
            let old = match state.last.iter_mut().find(same) {
                Some(last) => Some(std::mem::replace(last, new)),
                None => {
                    state.last.push(new);
                    None
                }
            };
            (old, state.last.len() > state.prune_at.max(STREAMS_MIN))
        };
        if let Some(old) = old {
            old.gate.recycle(&device.events);
        }
        if crowded {
            self.prune(device);
        }
    }

    /// Forgets streams whose work is done, so that streams which come and go do not add up.
    fn prune(&self, device: &Device) {
        // Asked in copies: who asks for the gates meanwhile must find them all.
        let known = self.state().last.clone();
        let mut pending = known.clone();
        retain_pending(device, &mut pending, |it| &mut it.gate);
        let is_pending = |number: u64| pending.iter().any(|it| it.number == number);
        let done: Vec<u64> =
            known.iter().map(|it| it.number).filter(|number| !is_pending(*number)).collect();
        let mut state = self.state();
        state.last.retain(|it| !done.contains(&it.number));
        state.prune_at = 2 * state.last.len();
    }
}

/// Drops the entries whose gates have passed.
fn retain_pending<T>(device: &Device, entries: &mut Vec<T>, gate: impl Fn(&mut T) -> &mut Gate) {
    // Without the relaxed mode a query could end somebody's capture: nothing is asked.
    let Ok(_relaxed) = RelaxedCapture::enter(&device.driver) else { return };
    let mut asker = Asker::new(&device.events);
    entries.retain_mut(|entry| !asker.ask(gate(entry)));
    asker.finish();
}

/// A read or a write from the host that is under way.
pub(crate) struct HostUse<'a>(&'a Uses);

impl Drop for HostUse<'_> {
    fn drop(&mut self) {
        let here = thread::current().id();
        let mut state = self.0.state();
        if let Some(at) = state.host.iter().position(|thread| *thread == here) {
            state.host.swap_remove(at);
        }
        self.0.changed.notify_all();
    }
}

impl Use {
    /// The stream.
    pub fn stream(&self) -> &Stream {
        &self.open.stream
    }
}

impl fmt::Debug for Use {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Use({:#x} on {:?})", self.body.address(), self.open.stream)
    }
}

impl Drop for Use {
    fn drop(&mut self) {
        if !process::is_forked_child() {
            self.body.uses.end(self.body.keeper(), &self.open);
        }
    }
}
