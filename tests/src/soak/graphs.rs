//! Captures with memory of their own, and graphs that are launched again and again while the memory of
//! the elastic buffer that they use moves.

use vmm_pool::{
    Buffer, CaptureScope, ElasticBuffer, GraphMemory, Lane, Migration, MigrationState, Move,
};
use vmm_sys::object::{Event, Stream};
use vmm_sys::{CaptureMode, CaptureStatus, DeviceId, GraphExecHandle, ProbeKernel};

use super::blocks::order;
use super::board::{Words, launch as launch_kernel};
use super::elastic::{PATIENCE, place};
use super::trouble::{NOTHING, Step, Trouble};
use super::worker::Worker;
use super::world::{KEPT, lock};

/// Graphs that a thread has.
const GRAPHS: usize = 2;
const OUT_BYTES: u64 = 48 << 10;

/// A graph: it fills memory of its capture, and copies that to `out` and to elastic memory.
pub(super) struct Graph {
    exec: GraphExecHandle,
    memory: GraphMemory,
    out: Buffer,
    elastic: ElasticBuffer,
    value: u32,
    device: DeviceId,
    /// After its last launch.
    last: Event,
    moving: Option<Migration>,
}

pub(super) fn capture(worker: &mut Worker<'_>) -> Step {
    if worker.graphs.len() >= GRAPHS {
        return NOTHING;
    }
    let (device, pool) = (worker.device(), worker.pool());
    let Some(track) = worker.track_of(device) else { return NOTHING };
    let out = track.lanes[pool].alloc(OUT_BYTES)?;
    let granule = worker.world.machine.granularity_bytes();
    let elastic = worker.world.pools[KEPT].elastic(device).capacity_bytes(2 * granule).build()?;
    elastic.grow_to(2 * granule)?;
    let value = worker.value();
    let modes = [CaptureMode::ThreadLocal, CaptureMode::Relaxed];
    let mode = worker.rng.pick(&modes);
    // Nobody else enqueues anything on this stream meanwhile, nor asks its lanes.
    let captured = lock(&worker.world.captured[device.0 as usize]);
    let (stream, lane) = (&captured.stream, &captured.lanes[pool]);
    order(&track.stream, stream)?;
    let scope = lane.capture()?;
    let driver = worker.world.driver();
    // SAFETY: the stream is live, and kept until the capture is ended.
    unsafe { driver.capture_begin(device, stream.handle(), mode)? };
    let written = write(&scope, lane, stream, &out, &elastic, value);
    let status = stream.capture_info().map(|info| info.status);
    // SAFETY: the stream is live, and its capture is open; the graph is not used afterwards.
    let exec = unsafe {
        let graph = driver.capture_end(device, stream.handle())?;
        let exec = driver.graph_instantiate(device, graph);
        driver.graph_destroy(device, graph)?;
        exec?
    };
    let memory = scope.finish();
    let last = Event::create(driver, device)?;
    let moving = None;
    drop(captured);
    let graph = Graph { exec, memory, out, elastic, value, device, last, moving };
    if let Err(trouble) = written {
        // Refused for want of memory: there is nothing to launch.
        end_unlaunched(worker, graph)?;
        return Err(trouble);
    }
    if status? != CaptureStatus::Active {
        return Err(Trouble::wrong("a capture was harmed"));
    }
    worker.graphs.push(graph);
    launch(worker)
}

/// What the graph does.
fn write(
    scope: &CaptureScope,
    lane: &Lane,
    stream: &Stream,
    out: &Buffer,
    elastic: &ElasticBuffer,
    value: u32,
) -> Step {
    let first = lane.alloc(OUT_BYTES)?;
    let second = lane.alloc(OUT_BYTES)?;
    if scope.memory().mapped_bytes() < 2 * OUT_BYTES {
        return Err(Trouble::wrong("memory of a capture is not the graph's"));
    }
    let words = OUT_BYTES / 4;
    Words::over(first.address(), OUT_BYTES, value).fill(stream)?;
    let targets = [second.address(), out.address(), elastic.address()];
    for (dst, src) in targets.into_iter().zip([first.address(), second.address(), out.address()]) {
        launch_kernel(stream, &ProbeKernel::CopyWords { dst, src, words })?;
    }
    Ok(())
}

/// Launches a graph on some stream, behind its earlier launches, and checks what it wrote.
pub(super) fn launch(worker: &mut Worker<'_>) -> Step {
    let Some(mut graph) = Worker::take(&mut worker.rng, &mut worker.graphs) else {
        return NOTHING;
    };
    let outcome = launch_one(worker, &mut graph);
    worker.graphs.push(graph);
    outcome
}

fn launch_one(worker: &mut Worker<'_>, graph: &mut Graph) -> Step {
    let Some(track) = worker.track_of(graph.device) else { return NOTHING };
    let stream = &track.stream;
    if graph.moving.is_none() && worker.rng.chance(300) {
        let to = Move::to(place(worker)).patience(PATIENCE);
        graph.moving = Some(graph.elastic.migrate_async(to)?);
    }
    graph.memory.launched_on(stream)?;
    graph.out.record_stream(stream)?;
    let using = graph.elastic.use_on(stream)?;
    stream.wait_event(&graph.last)?;
    // So that it is the launch that writes what is found.
    let stale = !graph.value;
    let (out, moved) = (graph.out.address(), graph.elastic.address());
    for address in [out, moved] {
        Words::over(address, OUT_BYTES, stale).fill(stream)?;
    }
    let driver = worker.world.driver();
    // SAFETY: both are live.
    unsafe { driver.graph_launch(graph.device, graph.exec, stream.handle())? };
    for address in [out, moved] {
        worker.enqueue_check(stream, Words::over(address, OUT_BYTES, graph.value))?;
    }
    graph.last.record(stream)?;
    drop(using);
    settle_move(graph, std::time::Duration::ZERO)
}

/// Looks how the move of the graph's elastic memory went.
fn settle_move(graph: &mut Graph, patience: std::time::Duration) -> Step {
    let Some(moving) = graph.moving.take() else { return Ok(()) };
    match moving.wait(patience) {
        MigrationState::Done(_) => Ok(()),
        MigrationState::Failed(error) => match error.into() {
            Trouble::Refused(_) => Ok(()),
            trouble => Err(trouble),
        },
        _ => {
            graph.moving = Some(moving);
            Ok(())
        }
    }
}

pub(super) fn drop_one(worker: &mut Worker<'_>) -> Step {
    let Some(graph) = Worker::take(&mut worker.rng, &mut worker.graphs) else { return NOTHING };
    end(worker, graph)
}

/// Drops a graph with its memory, launches in flight or not.
pub(super) fn end(worker: &mut Worker<'_>, mut graph: Graph) -> Step {
    settle_move(&mut graph, super::HANG)?;
    if graph.moving.is_some() {
        return Err(Trouble::wrong("a move under a graph has not ended"));
    }
    end_unlaunched(worker, graph)
}

fn end_unlaunched(worker: &mut Worker<'_>, graph: Graph) -> Step {
    let driver = worker.world.driver();
    // SAFETY: the graph is live, and not used afterwards.
    unsafe { driver.graph_exec_destroy(graph.device, graph.exec)? };
    graph.memory.keep(graph.out);
    Ok(())
}
