//! Captures and their graphs, by numbers: C has no scopes.

use std::collections::BTreeMap;

use parking_lot::Mutex;
use vmm_pool::{CaptureScope, GraphMemory};
use vmm_pool_capi::Failure;
use vmm_pool_capi::border::not_forked;
use vmm_pool_capi::lanes::{self, Key};

/// What the numbers stand for.
struct Graphs {
    last: u64,
    known: BTreeMap<u64, Graph>,
}

/// A graph's memory, and its capture while that is open.
struct Graph {
    memory: GraphMemory,
    scope: Option<CaptureScope>,
}

static GRAPHS: Mutex<Graphs> = Mutex::new(Graphs { last: 0, known: BTreeMap::new() });

/// Finds a graph, and does `work` with it.
fn with<T>(number: u64, work: impl FnOnce(&mut Graph) -> T) -> Result<T, Failure> {
    not_forked()?;
    let mut graphs = GRAPHS.lock();
    graphs.known.get_mut(&number).map(work).ok_or(Failure::UnknownGraph(number))
}

/// Opens a capture that begins in a stream, into memory of its own or into that of an earlier one.
/// Returns its number.
///
/// # Safety
/// As [`lanes::lane`].
pub(crate) unsafe fn begin(key: Key, shared: u64) -> Result<u64, Failure> {
    // SAFETY: the caller's own condition.
    let lane = unsafe { lanes::lane(key)? };
    let scope = match shared {
        0 => lane.capture()?,
        number => lane.capture_into(&with(number, |graph| graph.memory.clone())?)?,
    };
    let graph = Graph { memory: scope.memory().clone(), scope: Some(scope) };
    let mut graphs = GRAPHS.lock();
    graphs.last += 1;
    let number = graphs.last;
    graphs.known.insert(number, graph);
    Ok(number)
}

/// Lets a stream's lane take part in an open capture.
///
/// # Safety
/// As [`lanes::lane`].
pub(crate) unsafe fn join(number: u64, key: Key) -> Result<(), Failure> {
    // SAFETY: the caller's own condition.
    let lane = unsafe { lanes::lane(key)? };
    let join = |graph: &mut Graph| Some(graph.scope.as_ref()?.join(&lane));
    with(number, join)?.ok_or(Failure::CaptureEnded(number))?.map_err(Failure::Pool)
}

/// Ends a capture: its memory is kept.
pub(crate) fn end(number: u64) -> Result<(), Failure> {
    let scope = with(number, |graph| graph.scope.take())?;
    scope.ok_or(Failure::CaptureEnded(number))?.finish();
    Ok(())
}

/// Notes a stream on which a graph is launched.
///
/// # Safety
/// As [`lanes::lane`].
pub(crate) unsafe fn launched_on(number: u64, key: Key) -> Result<(), Failure> {
    // SAFETY: the caller's own condition.
    let lane = unsafe { lanes::lane(key)? };
    Ok(with(number, |graph| graph.memory.launched_on(lane.stream()))??)
}

/// Gives a graph's memory up; and its capture, if that is open.
pub(crate) fn destroyed(number: u64) -> Result<(), Failure> {
    with(number, |_| ())?;
    let graph = GRAPHS.lock().known.remove(&number);
    // Dropped without the lock: events are recorded, and memory goes back.
    drop(graph.ok_or(Failure::UnknownGraph(number))?);
    Ok(())
}
