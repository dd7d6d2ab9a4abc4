//! What a row makes, so that it is given back however the row ends.
//!
//! Every call that makes or unmakes something goes through here and keeps the driver's own answer;
//! what the driver gave out is on record until it is given back. A call that succeeds where the
//! table says it must not is on record too, so one wrong answer does not spoil the next row.
//!
//! The record is also what makes the unsafe calls of the contract sound: handles, streams and
//! addresses are checked against it first, and an unknown one is a bug of the row (a panic, which
//! the bench reports as a failure).

mod clean;
mod graph;
mod memory;
mod work;

pub(crate) use work::WORD;

use std::fmt;
use std::thread::JoinHandle;

use parking_lot::Mutex;

use crate::driver::Driver;
use crate::types::{
    ChunkHandle, ChunkProps, DeviceId, EventHandle, GraphExecHandle, GraphHandle, PinnedAddress,
    StreamHandle,
};

use super::bench::Bench;
use super::outcome::{Step, Stop};

/// The record of one row, and the calls that write to it.
pub(crate) struct Scratch<'b> {
    bench: &'b Bench,
    /// Locked for bookkeeping only, never across a driver call.
    made: Mutex<Made>,
}

/// Everything that a row still owes.
#[derive(Default)]
struct Made {
    ranges: Vec<(u64, u64)>,
    mappings: Vec<MappingRecord>,
    /// One entry a reference.
    references: Vec<ChunkHandle>,
    allocations: Vec<(DeviceId, u64, u64)>,
    pinned: Vec<(DeviceId, PinnedAddress)>,
    openers: Vec<JoinHandle<()>>,
    streams: Vec<(DeviceId, StreamHandle)>,
    /// Streams that wait, or waited, for a pinned word: some are not the row's own.
    held: Vec<(DeviceId, StreamHandle)>,
    events: Vec<(DeviceId, EventHandle)>,
    captures: Vec<(DeviceId, StreamHandle)>,
    graphs: Vec<(DeviceId, GraphHandle)>,
    execs: Vec<(DeviceId, GraphExecHandle)>,
}

#[derive(Clone, Copy)]
struct MappingRecord {
    address: u64,
    bytes: u64,
    chunk: ChunkHandle,
}

impl<'b> Scratch<'b> {
    pub(crate) fn new(bench: &'b Bench) -> Scratch<'b> {
        Scratch { bench, made: Mutex::new(Made::default()) }
    }

    /// The driver, for calls that make nothing.
    pub(crate) fn driver(&self) -> &'b dyn Driver {
        &**self.bench.driver()
    }

    /// The granularity in bytes: every size of a row is a multiple of it, or wrong on purpose.
    pub(crate) fn g(&self) -> u64 {
        self.bench.granularity()
    }

    /// The device under test.
    pub(crate) fn device(&self) -> DeviceId {
        self.bench.device()
    }

    /// The second device; rows that use it say so in their needs.
    pub(crate) fn peer(&self) -> Step<DeviceId> {
        self.bench.second_device().ok_or_else(|| Stop::Skipped("there is one device".into()))
    }

    /// The device under test, and the second one where there is one.
    pub(crate) fn devices(&self) -> Vec<DeviceId> {
        [Some(self.device()), self.bench.second_device()].into_iter().flatten().collect()
    }

    /// Plain memory of the device under test.
    pub(crate) fn props(&self) -> ChunkProps {
        ChunkProps::on_device(self.device())
    }

    /// Panics unless `address .. address + bytes` was given out to this row, in one piece or in
    /// several that touch (row D-R5): what makes a copy or a kernel through it a matter of the
    /// device alone.
    fn must_own(&self, address: u64, bytes: u64) {
        let made = self.made.lock();
        let allocations = made.allocations.iter().map(|&(_, start, length)| (start, length));
        let mut pieces: Vec<_> = made.ranges.iter().copied().chain(allocations).collect();
        pieces.sort_unstable();
        let end = address.checked_add(bytes).expect("rows stay within the address space");
        let mut owned_to = address;
        for (start, length) in pieces {
            if start <= owned_to {
                owned_to = owned_to.max(start + length);
            }
        }
        assert!(owned_to >= end, "{address:#x} + {bytes} is not of this row");
    }

    /// Panics unless the handle still names something of this row: a reference that it owns, or
    /// the memory behind one of its mappings (row D-H2).
    fn must_know(&self, chunk: ChunkHandle) {
        let made = self.made.lock();
        let known = made.references.contains(&chunk)
            || made.mappings.iter().any(|mapping| mapping.chunk == chunk);
        assert!(known, "{chunk:?} names nothing of this row");
    }

    /// Panics unless the stream is of this row, or always there.
    fn must_run(&self, stream: StreamHandle) {
        const ALWAYS: [StreamHandle; 3] =
            [StreamHandle::NULL, StreamHandle::LEGACY, StreamHandle::PER_THREAD];
        let known = ALWAYS.contains(&stream)
            || self.made.lock().streams.iter().any(|&(_, made)| made == stream);
        assert!(known, "{stream:?} is not of this row");
    }

    /// Panics unless the event is of this row.
    fn must_mark(&self, event: EventHandle) {
        let known = self.made.lock().events.iter().any(|&(_, made)| made == event);
        assert!(known, "{event:?} is not of this row");
    }
}

impl fmt::Debug for Scratch<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scratch").field("bench", &self.bench).finish_non_exhaustive()
    }
}

impl Drop for Scratch<'_> {
    fn drop(&mut self) {
        // The row has failed already: its own text matters more than what follows from it.
        let _ = self.give_back();
    }
}
