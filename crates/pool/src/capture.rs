//! Memory for captured graphs: [`CaptureScope`] and [`GraphMemory`].
//!
//! A graph has addresses baked into it, and uses them whenever it is launched. So memory that is
//! given out during a capture has to stay reserved, and mapped to the same chunks, until the graph
//! is gone, although the program that captured dropped its buffers long ago. The driver does not
//! tell the pool that a capture begins; the program does.

use std::sync::{Arc, Weak};

use vmm_sys::object::Stream;
use vmm_sys::{CaptureStatus, process};

use crate::buffer::Buffer;
use crate::error::Error;
use crate::lane::{Gate, Lane, undivert};
use crate::lanes::LaneRef;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::{Mutex, RwLock, RwLockReadGuard, global};

/// Memory of captured graphs, reserved for them until the last clone is dropped.
///
/// Drop it with the graphs, executables included. Their launches may still be running then, on the
/// streams that were captured and on those named by [`GraphMemory::launched_on`]: the memory is not
/// reused before what is enqueued on these streams until then is done.
///
/// While it lives, its addresses stay mapped to the same chunks: nothing in it is trimmed, moved or
/// given to anybody else. It counts as `private_bytes` in the statistics, apart from buffers that
/// are alive. Those stay what they are, and may outlive it.
///
/// It keeps its pool open, as a [`Lane`] does.
#[derive(Clone, Debug)]
pub struct GraphMemory(Arc<Graph>);

/// What the clones share.
#[derive(Debug, Default)]
struct Graph {
    /// The private lanes: one for each lane that took part.
    lanes: Mutex<Vec<Lane>>,
    launch_streams: Mutex<Vec<Stream>>,
    kept: Mutex<Vec<Buffer>>,
}

impl GraphMemory {
    /// Says that graphs with this memory are launched on `stream`, which must live as long as this
    /// memory. Streams that were captured in its scopes are known already.
    ///
    /// # Errors
    /// [`Error::UnknownDevice`] if the stream belongs to another driver.
    pub fn launched_on(&self, stream: &Stream) -> Result<(), Error> {
        if process::is_forked_child() {
            return Err(Error::DriverGone);
        }
        if !self.0.lanes.lock().iter().all(|lane| same_driver(lane.stream(), stream)) {
            return Err(Error::UnknownDevice { device: stream.device() });
        }
        let mut streams = self.0.launch_streams.lock();
        if !streams.iter().any(|s| s.id() == stream.id() && s.device() == stream.device()) {
            streams.push(stream.clone());
        }
        Ok(())
    }

    /// Keeps a buffer that was allocated outside of the scope and that a graph uses: it is dropped
    /// with this memory, behind the same streams. Of another driver, it is dropped as buffers are.
    pub fn keep(&self, buffer: Buffer) {
        if !process::is_forked_child() {
            self.0.kept.lock().push(buffer);
        }
    }

    /// Physical memory mapped for the graphs, in bytes, that of live buffers included. Kept buffers
    /// are not in it.
    pub fn mapped_bytes(&self) -> u64 {
        if process::is_forked_child() {
            return 0;
        }
        self.0.lanes.lock().iter().map(Lane::mapped_bytes).sum()
    }

    /// The private lane beside `lane`, made at the first call.
    fn lane_for(&self, lane: &Lane) -> Lane {
        let mut lanes = self.0.lanes.lock();
        if let Some(known) = lanes.iter().find(|known| known.is_beside(lane)) {
            return known.clone();
        }
        let private = lane.open_private();
        lanes.push(private.clone());
        private
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if process::is_forked_child() {
            return;
        }
        let lanes = std::mem::take(self.lanes.get_mut());
        let streams = std::mem::take(self.launch_streams.get_mut());
        let Some(first) = lanes.first() else { return };
        // A launch on any of these streams may use the memory of all lanes.
        let gates: Vec<Gate> = lanes
            .iter()
            .map(Lane::gate_of_its_stream)
            .chain(streams.iter().map(|stream| first.gate(stream)))
            .collect();
        for buffer in self.kept.get_mut().drain(..) {
            buffer.drop_behind(&gates);
        }
        for lane in &lanes {
            lane.close_private(&gates);
        }
    }
}

/// A capture in progress: while it is open, what its lanes give out is kept for the graph.
///
/// Made by [`Lane::capture`] **before** the capture begins, and finished after it has ended. In
/// between:
///
/// - Requests of the lane, from any thread, are served from memory that is kept for the graph, made
///   for it or taken from the stock. What is freed of it may be reused inside the same capture.
/// - A request that cannot be served is an error, and harms no capture.
/// - Memory that the lane gave out before stays outside: if the graph uses it, hold its buffers as
///   long as the graph lives, or give them to [`GraphMemory::keep`]. The same goes for buffers of
///   lanes that do not take part.
/// - No event is recorded on the streams of the scope; frees that wait for them wait until the
///   capture is over.
///
/// A capture that spreads to other streams by events: call [`CaptureScope::join`] with each of
/// their lanes **before** their first allocation in the capture. A lane that was not joined is
/// found out only when a request misses, and takes part from then on; what it gave out warm before
/// is ordinary memory.
///
/// ```
/// # use vmm_pool::Pool;
/// # use vmm_sys::{CaptureMode, DeviceId, object::Stream, sim::Sim};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let driver: std::sync::Arc<dyn vmm_sys::Driver> = Sim::builder().build();
/// # let pool = Pool::builder(driver.clone()).build()?;
/// # let stream = Stream::create(&driver, DeviceId(0))?;
/// # let lane = pool.lane(&stream)?;
/// let scope = lane.capture()?; // before cuStreamBeginCapture
/// # // SAFETY: the stream is live.
/// # unsafe { driver.capture_begin(DeviceId(0), stream.handle(), CaptureMode::Global)? };
/// let scratch = lane.alloc(1 << 20)?; // for the graph
/// // … capture work that uses `scratch` …
/// drop(scratch); // later work of the same capture may have the memory
/// # // SAFETY: the stream is live.
/// # let graph = unsafe { driver.capture_end(DeviceId(0), stream.handle())? };
/// let memory = scope.finish(); // after cuStreamEndCapture: nobody else gets it now
/// // … launch the graph, again and again …
/// # // SAFETY: the graph is live, and not used afterwards.
/// # unsafe { driver.graph_destroy(DeviceId(0), graph)? };
/// drop(memory); // with the graph
/// # Ok(())
/// # }
/// ```
///
/// Dropping the scope without [`finish`](CaptureScope::finish) gives its memory up at once: do so
/// if the capture failed, and there is no graph.
#[derive(Debug)]
pub struct CaptureScope(Arc<Scope>);

#[derive(Debug)]
struct Scope {
    number: u64,
    /// The stream in which the capture begins.
    origin: Stream,
    memory: GraphMemory,
    /// The lanes whose requests are diverted; none any more once the scope has ended.
    joined: Mutex<Option<Vec<LaneRef>>>,
}

global! {
    /// Tells scopes apart.
    static NEXT_SCOPE: AtomicU64 = AtomicU64::new(1);
}

impl Lane {
    /// Opens a scope for a capture that begins in this lane's stream: see [`CaptureScope`].
    ///
    /// # Errors
    /// [`Error::CaptureOpen`] if the lane takes part in another scope, [`Error::LaneClosed`],
    /// [`Error::DriverGone`].
    pub fn capture(&self) -> Result<CaptureScope, Error> {
        self.capture_into(&GraphMemory(Arc::default()))
    }

    /// As [`Lane::capture`], but the capture reuses the memory of earlier ones that is free: for
    /// graphs that never run at the same time, and need nothing of what the others left there. All
    /// their launches, and other work that uses their buffers, must be ordered one after another.
    ///
    /// # Errors
    /// As [`Lane::capture`].
    pub fn capture_into(&self, memory: &GraphMemory) -> Result<CaptureScope, Error> {
        if process::is_forked_child() {
            return Err(Error::DriverGone);
        }
        let scope = Arc::new(Scope {
            number: NEXT_SCOPE.fetch_add(1, Ordering::Relaxed),
            origin: self.stream().clone(),
            memory: memory.clone(),
            joined: Mutex::new(Some(Vec::new())),
        });
        scope.join(self)?;
        OPEN.write().scopes.push(Arc::downgrade(&scope));
        Ok(CaptureScope(scope))
    }
}

impl CaptureScope {
    /// Lets the lane of another stream take part, to which the capture spreads. Joining twice
    /// counts once.
    ///
    /// # Errors
    /// As [`Lane::capture`].
    pub fn join(&self, lane: &Lane) -> Result<(), Error> {
        if process::is_forked_child() {
            return Err(Error::DriverGone);
        }
        self.0.join(lane)
    }

    /// The memory so far, to keep buffers in it.
    pub fn memory(&self) -> &GraphMemory {
        &self.0.memory
    }

    /// Ends the scope, after `cuStreamEndCapture`: the lanes serve requests from their own memory
    /// again. The answer belongs to the graph's owner.
    pub fn finish(self) -> GraphMemory {
        if !process::is_forked_child() {
            self.0.end();
        }
        self.0.memory.clone()
    }
}

impl Scope {
    fn join(&self, lane: &Lane) -> Result<(), Error> {
        let mut joined = self.joined.lock();
        let Some(joined) = joined.as_mut() else { return Ok(()) };
        if joined.iter().any(|known| known.id == lane.reference().id) {
            return Ok(());
        }
        let private = self.memory.lane_for(lane);
        // First of all no event is recorded on the stream any more.
        OPEN.write().streams.push((self.number, lane.stream().clone()));
        if let Err(error) = lane.divert(private.reference()) {
            let mut open = OPEN.write();
            let last = open.streams.iter().rposition(|(number, _)| *number == self.number);
            last.map(|last| open.streams.remove(last));
            return Err(error);
        }
        joined.push(lane.reference());
        Ok(())
    }

    fn end(&self) {
        let joined = self.joined.lock().take();
        for lane in joined.into_iter().flatten() {
            undivert(lane);
        }
        let mut open = OPEN.write();
        let mine = |(number, _): &mut (u64, Stream)| *number == self.number;
        let streams: Vec<_> = open.streams.extract_if(.., mine).collect();
        open.scopes.retain(|scope| !std::ptr::eq(scope.as_ptr(), self));
        drop(open);
        drop(streams); // may destroy one: not under the lock
    }

    /// Whether the capture has spread to `stream`, whose capture has this id.
    fn includes(&self, capture_id: u64) -> bool {
        self.origin
            .capture_info()
            .is_ok_and(|info| info.status == CaptureStatus::Active && info.id == capture_id)
    }
}

impl Drop for Scope {
    fn drop(&mut self) {
        if !process::is_forked_child() {
            self.end();
        }
    }
}

/// The scopes that are open in this process, of all pools.
#[derive(Debug)]
pub(crate) struct Open {
    scopes: Vec<Weak<Scope>>,
    /// The streams that take part, with their scope's number.
    streams: Vec<(u64, Stream)>,
}

global! {
    static OPEN: RwLock<Open> = RwLock::new(Open { scopes: Vec::new(), streams: Vec::new() });
}

/// The scopes that are open. None opens or ends while the answer is held.
pub(crate) fn open() -> RwLockReadGuard<'static, Open> {
    OPEN.read()
}

impl Open {
    /// Whether an event that is recorded on `stream` in this thread could end in an open scope's
    /// capture, or spoil it: the stream takes part, or the legacy stream is named, which would have
    /// to wait for a captured one.
    pub(crate) fn include(&self, stream: &Stream) -> bool {
        let as_legacy = stream.is_legacy() || stream.is_elsewhere();
        self.streams.iter().any(|(_, captured)| {
            same_driver(captured, stream)
                && captured.device() == stream.device()
                && (captured.id() == stream.id() || as_legacy && captured.may_follow_legacy())
        })
    }
}

fn same_driver(one: &Stream, other: &Stream) -> bool {
    std::ptr::addr_eq(Arc::as_ptr(one.driver()), Arc::as_ptr(other.driver()))
}

/// The private lane that serves `lane`'s requests while it takes part in a capture.
///
/// A lane that was not told of, but whose stream is found in the capture of an open scope, joins
/// it.
pub(crate) fn diversion(lane: &Lane) -> Result<Option<Lane>, Error> {
    let private = lane.diverted()?;
    if private.is_some() || OPEN.read().scopes.is_empty() || lane.is_private() {
        return Ok(private);
    }
    let Some(scope) = scope_around(lane.stream()) else { return Ok(None) };
    scope.join(lane)?;
    lane.diverted()
}

/// The open scope whose capture has spread to `stream`.
fn scope_around(stream: &Stream) -> Option<Arc<Scope>> {
    // What the driver cannot be asked about now is not known to be captured.
    let info = stream.capture_info().ok()?;
    if info.status != CaptureStatus::Active {
        return None;
    }
    let scopes: Vec<_> = OPEN.read().scopes.iter().filter_map(Weak::upgrade).collect();
    scopes.into_iter().find(|it| same_driver(&it.origin, stream) && it.includes(info.id))
}
