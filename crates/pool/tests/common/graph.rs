//! Captures and graphs on a pool of the stories, and what disturbs them.

use std::sync::Arc;

use vmm_pool::{Buffer, ChunkSize, Lane};
use vmm_sys::object::{Event, Stream};
use vmm_sys::{CaptureMode, CaptureStatus, Driver, GraphExecHandle, ProbeKernel};

use super::{HOME, MIB, Rig};

pub(crate) const MODES: [CaptureMode; 3] =
    [CaptureMode::Global, CaptureMode::ThreadLocal, CaptureMode::Relaxed];

/// Words that a story writes at each place.
pub(crate) const WORDS: u64 = 64;

pub(crate) fn begin(rig: &Rig, stream: &Stream, mode: CaptureMode) {
    // SAFETY: a live stream.
    unsafe { rig.driver.capture_begin(HOME, stream.handle(), mode) }.unwrap();
}

pub(crate) fn is_active(stream: &Stream) -> bool {
    stream.capture_info().unwrap().status == CaptureStatus::Active
}

/// A captured graph, ready to launch; destroyed at the end of the story.
pub(crate) struct Graph {
    driver: Arc<dyn Driver>,
    exec: GraphExecHandle,
}

impl Graph {
    /// Ends the capture, which must be sound.
    pub(crate) fn end(rig: &Rig, stream: &Stream) -> Graph {
        let driver = rig.driver.clone();
        // SAFETY: live handles; the graph is not used afterwards.
        let exec = unsafe {
            let graph = driver.capture_end(HOME, stream.handle()).unwrap();
            let exec = driver.graph_instantiate(HOME, graph).unwrap();
            driver.graph_destroy(HOME, graph).unwrap();
            exec
        };
        Graph { driver, exec }
    }

    pub(crate) fn launch(&self, stream: &Stream) {
        // SAFETY: live handles.
        unsafe { self.driver.graph_launch(HOME, self.exec, stream.handle()) }.unwrap();
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: a live handle, not used afterwards. It fails only after a fault.
        let _ended = unsafe { self.driver.graph_exec_destroy(HOME, self.exec) };
    }
}

pub(crate) fn launch(rig: &Rig, stream: &Stream, kernel: ProbeKernel) {
    // SAFETY: a live stream, and addresses of the pool.
    unsafe { rig.driver.launch(HOME, &kernel, stream.handle()) }.unwrap();
}

pub(crate) fn fill(rig: &Rig, stream: &Stream, at: &Buffer, value: u32) {
    launch(rig, stream, ProbeKernel::FillWords { dst: at.address(), words: WORDS, value });
}

pub(crate) fn copy(rig: &Rig, stream: &Stream, to: &Buffer, from: &Buffer) {
    let (dst, src) = (to.address(), from.address());
    launch(rig, stream, ProbeKernel::CopyWords { dst, src, words: WORDS });
}

/// Whether a buffer starts with words that count up from `value`.
pub(crate) fn holds(at: &Buffer, value: u32) -> bool {
    let mut bytes = vec![0; 4 * WORDS as usize];
    at.read(0, &mut bytes).unwrap();
    let words = bytes.chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().unwrap()));
    words.zip(value..).all(|(word, wanted)| word == wanted)
}

/// A pool that moves chunks whenever it can, and has every kind of leftover.
pub(crate) fn busy_rig(background: bool) -> Rig {
    Rig::new(|b| b.chunk(ChunkSize::Fixed(2 * MIB)).soft_limit(Some(0.0)).background(background))
}

/// Everything that makes a pool query, record, move, trim and grow, on a lane of its own.
pub(crate) fn churn(rig: &Rig, lane: &Lane, other: &Stream, seed: u64) {
    let mut state = seed | 1;
    let mut live = Vec::new();
    for turn in 0..120_u64 {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963);
        let bytes = 1 + (state >> 40) % (1 << (12 + (state >> 20) % 12));
        let mut buffer = lane.alloc(bytes.max(4 * WORDS)).unwrap();
        if turn % 3 == 0 {
            buffer.record_stream(other).unwrap();
        }
        fill(rig, lane.stream(), &buffer, 0xDEAD_0000);
        live.push(buffer);
        if live.len() > 12 {
            live.swap_remove((state >> 33) as usize % live.len());
        }
        if turn % 40 == 39 {
            rig.pool.trim(HOME).unwrap();
        }
    }
}

/// Captures: scratch memory is written, handed on within the graph, and ends up in `out`.
pub(crate) fn capture_chain(rig: &Rig, out: &Buffer, value: u32) -> Graph {
    begin(rig, &rig.stream, CaptureMode::ThreadLocal);
    let first = rig.lane.alloc(3 * MIB).unwrap();
    fill(rig, &rig.stream, &first, value);
    let second = rig.lane.alloc(50_000).unwrap();
    copy(rig, &rig.stream, &second, &first);
    drop(first);
    let third = rig.lane.alloc(3 * MIB).unwrap(); // where the first was
    fill(rig, &rig.stream, &third, 0);
    copy(rig, &rig.stream, out, &second);
    drop((second, third));
    Graph::end(rig, &rig.stream)
}

/// Lets `to` wait for what `from` has now, as programs spread a capture.
pub(crate) fn order(rig: &Rig, from: &Stream, to: &Stream) {
    let event = Event::create(&rig.driver, HOME).unwrap();
    event.record(from).unwrap();
    to.wait_event(&event).unwrap();
}
