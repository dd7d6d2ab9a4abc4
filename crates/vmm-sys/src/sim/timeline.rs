//! Streams as queues on a virtual clock.
//!
//! A stream runs its items one at a time, in order; an item starts when its predecessor is done,
//! what it waits for has happened and the clock has reached that moment. `Sim::pump` starts and
//! finishes whatever can be, at the present time; `Sim::advance_to` steps the clock from one
//! completion to the next, so that a long jump ends in the same state as many short ones.
//!
//! The legacy stream of a context is ordered in both directions with its blocking streams, which
//! per-thread streams are, and not with others (row D-S2). That order is a list of (stream, ticket)
//! that an item waits for.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use slab::Slab;

use super::capture::EventCapture;
use super::graphs::{Graph, Node};
use crate::sync::thread::ThreadId;
use crate::types::{DeviceId, StreamHandle};

/// Names a hold of [`super::Sim::hold`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HoldId(pub(super) u64);

/// A piece of work of a stream.
pub(super) enum Op {
    /// Work on memory.
    Work(Node),
    /// A launched graph: its nodes one after another.
    Graph(Arc<Graph>),
    HostFunction(Option<Box<dyn FnOnce() + Send>>),
    /// Passes when the word at a host address has reached a value.
    WaitValue {
        address: u64,
        value: u32,
    },
    /// Marks a record as passed.
    Record(u64),
    /// Passes when the record has.
    WaitRecord(u64),
    /// Passes when the test lets it.
    Hold(HoldId),
    /// Takes time and does nothing.
    Busy {
        nanos: u64,
    },
    /// The same, until a time.
    BusyUntil {
        ends_ns: u64,
    },
    /// Gives memory of the stream-ordered pool back.
    PoolFree {
        address: u64,
    },
}

impl Op {
    /// A word for messages.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Op::Work(_) => "work",
            Op::Graph(_) => "a graph",
            Op::HostFunction(_) => "a host function",
            Op::WaitValue { .. } => "a wait for a host word",
            Op::Record(_) => "an event record",
            Op::WaitRecord(_) => "a wait for an event",
            Op::Hold(_) => "a hold",
            Op::Busy { .. } | Op::BusyUntil { .. } => "busy work",
            Op::PoolFree { .. } => "a stream-ordered free",
        }
    }
}

impl std::fmt::Debug for Op {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// Where an item is in its life.
#[derive(Debug)]
pub(super) enum Phase {
    Waiting,
    /// On the GPU until a time; the mappings that it found there when it started.
    Running {
        ends_ns: u64,
        regions: Vec<u64>,
    },
    /// A host function in its own thread.
    OnHost {
        token: u64,
    },
}

/// One entry of a queue.
#[derive(Debug)]
pub(super) struct Item {
    pub(super) ticket: u64,
    pub(super) op: Op,
    /// (stream, ticket) pairs that must be done first.
    pub(super) after: Vec<(u64, u64)>,
    pub(super) phase: Phase,
}

/// Which stream this is to the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StreamKind {
    /// Made by `cuStreamCreate`.
    Created { handle: StreamHandle },
    /// The null stream of a context.
    Legacy,
    /// Stream 2 of one thread.
    PerThread(ThreadId),
    /// Destroyed, with work left.
    Destroyed,
}

/// A queue. Its id is what `cuStreamGetId` says, and is never given out twice.
#[derive(Debug)]
pub(super) struct Stream {
    pub(super) device: DeviceId,
    pub(super) kind: StreamKind,
    /// Ordered with the legacy stream of its device.
    pub(super) is_blocking: bool,
    pub(super) queue: VecDeque<Item>,
    /// Tickets given out and finished.
    pub(super) enqueued: u64,
    pub(super) finished: u64,
}

/// An event. `last` is what a query or a wait refers to.
#[derive(Debug)]
pub(super) struct Event {
    pub(super) device: DeviceId,
    pub(super) last: LastRecord,
    /// Whether it keeps the time of its last record.
    pub(super) timed: bool,
}

/// The last thing recorded in an event.
#[derive(Clone, Debug)]
pub(super) enum LastRecord {
    Never,
    /// A record in stream order.
    Live(u64),
    /// A record in a capture.
    Captured(EventCapture),
}

/// All streams and events.
#[derive(Debug, Default)]
pub(super) struct Timeline {
    pub(super) streams: BTreeMap<u64, Stream>,
    pub(super) last_stream_id: u64,
    /// Handle values of created streams, as indices: freed ones come back first (row D-S1).
    pub(super) handles: Slab<u64>,
    /// Legacy stream of each device.
    pub(super) legacy: BTreeMap<DeviceId, u64>,
    pub(super) per_thread: Vec<(DeviceId, ThreadId, u64)>,
    /// Streams with something in their queue.
    pub(super) busy: BTreeSet<u64>,
    pub(super) events: Slab<Event>,
    /// Records that have not passed.
    pub(super) pending_records: BTreeSet<u64>,
    pub(super) last_record: u64,
    /// The last records of timed events, with when they passed.
    pub(super) timed_records: BTreeMap<u64, Option<u64>>,
    /// Holds that the test has not let go.
    pub(super) holds: BTreeSet<HoldId>,
    pub(super) last_hold: u64,
    /// Host functions in flight: started by a call that has not yet returned, or running on.
    pub(super) on_host: BTreeSet<u64>,
    /// Those started since the door last settled.
    pub(super) just_started: Vec<u64>,
    pub(super) last_token: u64,
}

impl Timeline {
    /// Appends an item.
    pub(super) fn push(&mut self, stream_id: u64, op: Op, after: Vec<(u64, u64)>) {
        let Some(stream) = self.streams.get_mut(&stream_id) else { return };
        stream.enqueued += 1;
        let ticket = stream.enqueued;
        stream.queue.push_back(Item { ticket, op, after, phase: Phase::Waiting });
        self.busy.insert(stream_id);
    }

    /// Whether the last item of a stream keeps it busy until then anyway.
    pub(super) fn is_busy_until(&self, stream_id: u64, until_ns: u64) -> bool {
        let last = self.streams.get(&stream_id).and_then(|stream| stream.queue.back());
        last.is_some_and(|item| matches!(item.op, Op::BusyUntil { ends_ns } if ends_ns >= until_ns))
    }

    /// Whether a stream is done with everything up to a ticket. Streams that are gone are done.
    pub(super) fn passed(&self, stream_id: u64, ticket: u64) -> bool {
        self.streams.get(&stream_id).is_none_or(|stream| stream.finished >= ticket)
    }

    /// The ticket of a stream's last item.
    pub(super) fn tail(&self, stream_id: u64) -> u64 {
        self.streams.get(&stream_id).map_or(0, |stream| stream.enqueued)
    }

    /// Whether the legacy stream of `device` is ordered with this stream.
    pub(super) fn is_blocking_on(&self, stream_id: u64, device: DeviceId) -> bool {
        let stream = self.streams.get(&stream_id);
        stream.is_some_and(|stream| stream.is_blocking && stream.device == device)
    }

    /// What an item of this stream must wait for in other streams, by the rule of the legacy
    /// stream: only what is not done yet.
    pub(super) fn implicit_order(&self, stream_id: u64) -> Vec<(u64, u64)> {
        let Some(stream) = self.streams.get(&stream_id) else { return Vec::new() };
        let others: Vec<u64> = if stream.kind == StreamKind::Legacy {
            // Those that are not busy have nothing to wait for.
            let blocking = |id: &&u64| self.is_blocking_on(**id, stream.device);
            self.busy.iter().filter(blocking).copied().collect()
        } else if stream.is_blocking {
            self.legacy.get(&stream.device).copied().into_iter().collect()
        } else {
            Vec::new()
        };
        others
            .into_iter()
            .map(|id| (id, self.tail(id)))
            .filter(|(id, ticket)| !self.passed(*id, *ticket))
            .collect()
    }

    /// A new record id, not passed yet.
    pub(super) fn new_record(&mut self) -> u64 {
        self.last_record += 1;
        self.pending_records.insert(self.last_record);
        self.last_record
    }

    /// Nobody can ask for the time of this record any more.
    pub(super) fn forget_time(&mut self, last: &LastRecord) {
        if let LastRecord::Live(record) = last {
            self.timed_records.remove(record);
        }
    }

    /// A record has passed, or never will.
    pub(super) fn pass_record(&mut self, record: u64, now_ns: u64) {
        self.pending_records.remove(&record);
        if let Some(passed_ns) = self.timed_records.get_mut(&record) {
            *passed_ns = Some(now_ns);
        }
    }

    pub(super) fn record_passed(&self, record: u64) -> bool {
        !self.pending_records.contains(&record)
    }
}
