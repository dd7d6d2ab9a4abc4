//! Runs what is queued: starts and finishes items as the clock and their conditions allow.
//!
//! Work on memory is looked at twice. When it starts, each address must be mapped with access; when
//! it ends, the very same mappings must still be there, and only then are bytes changed. So a swap
//! *before* the start is what later work should see (rows D-V1, D-V5), and a swap *under* running
//! work is a fault even if the address is mapped again at the end: on a GPU it would depend on who
//! is faster. After a fault nothing of that device's queues runs any more, and waits for it end.

use std::cell::Cell;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use super::builder::TimeMode;
use super::graphs::Node;
use super::state::State;
use super::timeline::{Op, Phase, StreamKind};
use super::{Locked, Sim};
use crate::call::Call;
use crate::caught::thrown;
use crate::error::{DriverResult, ResultCode};
use crate::sync::{thread, thread_local};
use crate::types::{DeviceId, StreamHandle};

thread_local! {
    static IN_HOST_FUNCTION: Cell<bool> = const { Cell::new(false) };
}

/// Whether the calling thread is running a host function.
pub(super) fn in_host_function() -> bool {
    IN_HOST_FUNCTION.with(Cell::get)
}

/// Why work could not be done: becomes the sticky error of the context.
struct WorkFault {
    code: ResultCode,
    why: String,
}

impl WorkFault {
    fn new(code: ResultCode, why: impl std::fmt::Display) -> WorkFault {
        WorkFault { code, why: why.to_string() }
    }
}

impl Sim {
    /// Starts and finishes everything that can be, at the present time.
    pub(super) fn pump(&self, state: &mut Locked<'_>) {
        loop {
            let mut progress = false;
            let mut next = state.timeline.busy.first().copied();
            while let Some(id) = next {
                while self.step(state, id) {
                    progress = true;
                }
                // A step may have taken the stream itself, or others, off the list.
                next = state.timeline.busy.range(id + 1..).next().copied();
            }
            // What ran may have let an earlier stream go.
            if !progress {
                return;
            }
        }
    }

    /// Moves the clock to a time, through every completion on the way.
    pub(super) fn advance_to(&self, state: &mut Locked<'_>, until_ns: u64) {
        self.pump(state);
        while let Some(next_ns) = state.next_completion_ns().filter(|next| *next <= until_ns) {
            state.now_ns = state.now_ns.max(next_ns);
            self.pump(state);
        }
        if until_ns > state.now_ns {
            state.now_ns = until_ns;
            self.pump(state);
        }
    }

    /// Moves a stream's first item one phase on; false if it cannot move now.
    fn step(&self, state: &mut Locked<'_>, id: u64) -> bool {
        let Some(stream) = state.timeline.streams.get(&id) else {
            state.timeline.busy.remove(&id);
            return false;
        };
        let device = stream.device;
        let Some(head) = stream.queue.front() else {
            let destroyed = stream.kind == StreamKind::Destroyed;
            state.timeline.busy.remove(&id);
            if destroyed {
                state.timeline.streams.remove(&id);
            }
            return false;
        };
        match head.phase {
            Phase::OnHost { token } => {
                if state.timeline.on_host.contains(&token) {
                    return false;
                }
                state.finish_head(id);
                true
            }
            // On a faulted device nothing runs any more.
            _ if state.fault(device).is_some() => {
                if let Some(op) = state.finish_head(id) {
                    state.discard(op);
                }
                true
            }
            Phase::Running { ends_ns, .. } => {
                if ends_ns > state.now_ns {
                    return false;
                }
                state.complete_head(id, device);
                true
            }
            Phase::Waiting => {
                if !state.head_ready(id, device) {
                    return false;
                }
                self.start_head(state, id, device)
            }
        }
    }

    /// Starts an item that is ready. Returns whether the stream can move on at once.
    fn start_head(&self, state: &mut Locked<'_>, id: u64, device: DeviceId) -> bool {
        if let Some(function) = state.take_host_function(id) {
            let started = self.start_host_function(state, id, function);
            if !started {
                let why = "no thread for a host function".to_owned();
                state.raise_fault(device, ResultCode::LAUNCH_FAILED, why);
            }
            return !started;
        }
        match state.begin_work(id) {
            Err(fault) => {
                state.raise_fault(device, fault.code, fault.why);
                true
            }
            Ok(None) => {
                state.complete_head(id, device);
                true
            }
            Ok(Some(phase)) => {
                state.set_head_phase(id, phase);
                false
            }
        }
    }

    /// In a thread of its own, as a function may block (row D-V7) while calls go on.
    fn start_host_function(
        &self,
        state: &mut Locked<'_>,
        id: u64,
        function: Box<dyn FnOnce() + Send>,
    ) -> bool {
        state.timeline.last_token += 1;
        let token = state.timeline.last_token;
        let me = self.me.clone();
        let thread = thread::Builder::new().name("sim-host-function".to_owned());
        let started = thread.spawn(move || {
            IN_HOST_FUNCTION.with(|it| it.set(true));
            // A panic ends the function, not the simulated driver.
            let _ = thrown(function);
            if let Some(sim) = me.upgrade() {
                let mut state = sim.state.lock();
                state.timeline.on_host.remove(&token);
                sim.pump(&mut state);
                drop(state);
                sim.wake.notify_all();
            }
        });
        if started.is_err() {
            return false;
        }
        state.timeline.on_host.insert(token);
        state.timeline.just_started.push(token);
        state.set_head_phase(id, Phase::OnHost { token });
        true
    }

    /// Gives host functions that a call started a little real time, so that quick ones are done
    /// when the call returns and a program's outcome does not depend on thread scheduling.
    pub(super) fn settle_host_functions(&self, state: &mut Locked<'_>) {
        if state.timeline.just_started.is_empty() {
            return;
        }
        let deadline = Instant::now() + state.config.host_function_grace;
        while !state.timeline.just_started.is_empty() {
            let timeline = &mut state.timeline;
            let on_host = &timeline.on_host;
            timeline.just_started.retain(|token| on_host.contains(token));
            if timeline.just_started.is_empty() {
                // The next items may start further functions.
                self.pump(state);
            } else if self.wake.wait_until(state, deadline).timed_out() {
                state.timeline.just_started.clear();
            }
        }
    }

    /// The function runs when its turn comes, in another thread.
    pub(super) fn do_launch_host_function(
        &self,
        device: DeviceId,
        stream: StreamHandle,
        function: Box<dyn FnOnce() + Send>,
    ) -> DriverResult<()> {
        self.call_on(Call::LaunchHostFunc, device, |state| {
            let stream = state.stream(device, stream)?;
            state.submit(stream, Op::HostFunction(Some(function)))
        })
    }
}

impl State {
    /// When the next running item is done.
    pub(super) fn next_completion_ns(&self) -> Option<u64> {
        let head = |id: &u64| self.timeline.streams.get(id)?.queue.front();
        self.timeline
            .busy
            .iter()
            .filter_map(|id| match head(id)?.phase {
                Phase::Running { ends_ns, .. } => Some(ends_ns),
                _ => None,
            })
            .min()
    }

    /// Moves the first item on.
    fn set_head_phase(&mut self, id: u64, phase: Phase) {
        let head = self.timeline.streams.get_mut(&id).and_then(|stream| stream.queue.front_mut());
        if let Some(head) = head {
            head.phase = phase;
        }
    }

    /// Takes the function out of the first item, if it is one.
    fn take_host_function(&mut self, id: u64) -> Option<Box<dyn FnOnce() + Send>> {
        match &mut self.timeline.streams.get_mut(&id)?.queue.front_mut()?.op {
            Op::HostFunction(function) => function.take(),
            _ => None,
        }
    }

    /// Takes the first item off a queue: it is done.
    fn finish_head(&mut self, id: u64) -> Option<Op> {
        let stream = self.timeline.streams.get_mut(&id)?;
        let item = stream.queue.pop_front()?;
        stream.finished = item.ticket;
        Some(item.op)
    }

    /// Whether what the first item waits for has happened.
    fn head_ready(&mut self, id: u64, device: DeviceId) -> bool {
        let timeline = &self.timeline;
        let Some(head) = timeline.streams.get(&id).and_then(|stream| stream.queue.front()) else {
            return false;
        };
        if !head.after.iter().all(|(id, ticket)| timeline.passed(*id, *ticket)) {
            return false;
        }
        match head.op {
            Op::WaitRecord(record) => timeline.record_passed(record),
            Op::Hold(hold) => !timeline.holds.contains(&hold),
            Op::WaitValue { address, value } => {
                if !self.is_pinned(address, 4) {
                    let why = format!("the word at {address:#x} was freed under a wait");
                    self.raise_fault(device, ResultCode::ILLEGAL_ADDRESS, why);
                    return false;
                }
                let word = std::ptr::with_exposed_provenance_mut::<u32>(address as usize);
                // SAFETY: the word is aligned (checked when the wait was enqueued) and lies in
                // page-locked memory of this driver that is still allocated (checked above, under
                // the lock that freeing takes). Others write it with plain or atomic stores.
                let seen = unsafe { AtomicU32::from_ptr(word) }.load(Ordering::Acquire);
                // Cyclic, as the hardware compares.
                (seen.wrapping_sub(value) as i32) >= 0
            }
            _ => true,
        }
    }

    /// What the first item needs: nothing but its end (`None`), or a time on the GPU.
    fn begin_work(&mut self, id: u64) -> Result<Option<Phase>, WorkFault> {
        let Some(head) = self.timeline.streams.get(&id).and_then(|stream| stream.queue.front())
        else {
            return Ok(None);
        };
        let modelled = self.config.time == TimeMode::Modelled;
        let nodes: &[Node] = match &head.op {
            Op::Work(node) => std::slice::from_ref(node),
            Op::Graph(graph) => &graph.nodes,
            Op::Busy { nanos } if *nanos > 0 => {
                let ends_ns = self.now_ns.saturating_add(*nanos);
                return Ok(Some(Phase::Running { ends_ns, regions: Vec::new() }));
            }
            Op::BusyUntil { ends_ns } if *ends_ns > self.now_ns => {
                return Ok(Some(Phase::Running { ends_ns: *ends_ns, regions: Vec::new() }));
            }
            _ => return Ok(None),
        };
        let takes_time = |node: &&Node| modelled || node.touches_at_end_only();
        let nanos: u64 = nodes.iter().filter(takes_time).map(|node| self.node_ns(node)).sum();
        if nanos == 0 {
            return Ok(None);
        }
        let regions = self.regions_found(nodes)?;
        let ends_ns = self.now_ns.saturating_add(nanos);
        Ok(Some(Phase::Running { ends_ns, regions }))
    }

    /// The mappings that nodes find at their addresses, in order.
    fn regions_found(&self, nodes: &[Node]) -> Result<Vec<u64>, WorkFault> {
        let mut found = Vec::new();
        for node in nodes.iter().filter(|node| !node.touches_at_end_only()) {
            let pieces = self
                .touch(node)
                .map_err(|error| WorkFault::new(ResultCode::ILLEGAL_ADDRESS, error))?;
            found.extend(Self::region_ids(&pieces));
        }
        Ok(found)
    }

    /// The first item's time is over: does what it does, and takes it off the queue.
    fn complete_head(&mut self, id: u64, device: DeviceId) {
        let Some(stream) = self.timeline.streams.get_mut(&id) else { return };
        let Some(item) = stream.queue.pop_front() else { return };
        stream.finished = item.ticket;
        let done = match &item.op {
            Op::Work(node) => self.run_nodes(std::slice::from_ref(node), &item.phase),
            Op::Graph(graph) => self.run_nodes(&graph.nodes, &item.phase),
            _ => {
                self.discard(item.op);
                Ok(())
            }
        };
        if let Err(fault) = done {
            self.raise_fault(device, fault.code, fault.why);
        }
    }

    /// The bookkeeping of an item that touches no memory, or that will not run.
    pub(super) fn discard(&mut self, op: Op) {
        match op {
            Op::Record(record) => self.timeline.pass_record(record, self.now_ns),
            Op::PoolFree { address } => self.pool_free(address),
            _ => {}
        }
    }

    /// Runs nodes whose time is over. Mappings must be the ones found at the start: a page that was
    /// unmapped meanwhile, even if mapped again, may have been missed by the GPU (row D-U4).
    fn run_nodes(&mut self, nodes: &[Node], phase: &Phase) -> Result<(), WorkFault> {
        if let Phase::Running { regions, .. } = phase
            && self.regions_found(nodes)? != *regions
        {
            return Err(WorkFault::new(
                ResultCode::ILLEGAL_ADDRESS,
                "memory was unmapped while work that uses it was running",
            ));
        }
        nodes.iter().try_for_each(|node| self.run_node(node))
    }

    /// Looks everything up once more, and then does it: all or nothing.
    fn run_node(&mut self, node: &Node) -> Result<(), WorkFault> {
        if let Node::Kernel { .. } | Node::Bytes { .. } = node
            && let Some(span) = node.spans().iter().find(|span| !span.address.is_multiple_of(4))
        {
            let why = format!("words at {:#x}", span.address);
            return Err(WorkFault::new(ResultCode::MISALIGNED_ADDRESS, why));
        }
        let pieces =
            self.touch(node).map_err(|error| WorkFault::new(ResultCode::ILLEGAL_ADDRESS, error))?;
        let done = match node {
            Node::Kernel { kernel, .. } => self.run_kernel(*kernel, &pieces),
            Node::Bytes { kernel, .. } => self.run_byte_kernel(kernel, &pieces),
            _ => self.run_transfer(node, &pieces),
        };
        done.map_err(|error| WorkFault::new(ResultCode::UNKNOWN, error))
    }
}
