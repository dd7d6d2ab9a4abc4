//! Passes over a plan: the loops that are measured, and nothing else inside them.

use super::{
    Cause, Clock, DriverTime, Extent, Latency, PassFigures, Plan, ReplayError, Step, Target,
    overlap,
};

/// In a timed pass, held memory is sampled each time this many steps have passed, and at the peak.
const SAMPLE_STEPS: usize = 1024;

/// Empty time stamps taken to learn what one costs.
const STAMP_TRIALS: usize = 1001;

/// Replays a plan `passes` times, counted, and as often again on a second allocator, timed (see
/// the [module page](super)). `make` makes an allocator; the first is gone before the second is
/// made, so that memory is needed once. `progress` is called after each pass, `2 * passes` times.
///
/// # Errors
/// The allocator failed, or gave out a wrong block. All blocks are freed then too.
pub fn replay<T: Target>(
    plan: &Plan<'_>,
    passes: u32,
    clock: &impl Clock,
    make: impl Fn() -> Result<T, Cause>,
    mut progress: impl FnMut(),
) -> Result<Vec<PassFigures>, ReplayError> {
    let mut figures = count(plan, passes, clock, &make, &mut progress)?;
    let mut blocks = Blocks::new(plan);
    let target = make().map_err(ReplayError::Start)?;
    let mut record = Record::new(plan, stamp_cost_ns(&target, clock));
    for pass in &mut figures {
        timed_pass(plan, &target, &mut blocks, clock, pass, &mut record)?;
        overlap::check(plan.trace, &record.extents, pass.pass)?;
        progress();
    }
    Ok(figures)
}

/// The counted run alone: latencies stay zero, and addresses are not checked.
///
/// # Errors
/// As [`replay`].
pub fn count<T: Target>(
    plan: &Plan<'_>,
    passes: u32,
    clock: &impl Clock,
    make: impl Fn() -> Result<T, Cause>,
    mut progress: impl FnMut(),
) -> Result<Vec<PassFigures>, ReplayError> {
    let mut blocks = Blocks::new(plan);
    let target = make().map_err(ReplayError::Start)?;
    (1..=passes)
        .map(|pass| {
            let figures = counted_pass(plan, &target, &mut blocks, clock, pass)?;
            progress();
            Ok(figures)
        })
        .collect()
}

/// One pass without a clock inside.
fn counted_pass<T: Target>(
    plan: &Plan<'_>,
    target: &T,
    blocks: &mut Blocks<T>,
    clock: &impl Clock,
    pass: u32,
) -> Result<PassFigures, ReplayError> {
    between(pass, "starting", target.begin_pass())?;
    let calls_before = target.driver_calls();
    let driver_before = target.driver_time();
    let start_ns = clock.now_ns();
    let mut stopped = Ok(());
    for (index, step) in plan.steps.iter().enumerate() {
        if let Err(cause) = blocks.step(target, *step) {
            stopped = Err(plan.failure(pass, index, cause));
            break;
        }
    }
    let wall_ns = clock.now_ns() - start_ns;
    let driver = target.driver_time().since(driver_before);
    let calls = target.driver_calls().since(&calls_before);
    let peak_held_bytes = finish_pass(target, blocks, pass, stopped)?;
    let ops = plan.trace.ops.len();
    debug_assert!(driver.spent_ns <= wall_ns, "time inside driver calls was measured twice");
    let host_ns = wall_ns.saturating_sub(driver.spent_ns);
    let (mine_ns, driver_ns) = if T::IS_DRIVER {
        // The driver call is the operation. Where its time is not taken apart (so as not to slow
        // it down), all of the pass counts as driver time.
        let whole_ns = host_ns + driver.charged_ns;
        (whole_ns, if driver.charged_ns == 0 { whole_ns } else { driver.charged_ns })
    } else {
        (host_ns, calls.total_nanos())
    };
    Ok(PassFigures {
        pass,
        ops,
        mean_ns: mine_ns as f64 / ops as f64,
        latency: Latency::default(),
        peak_held_bytes,
        calls,
        driver_ns,
    })
}

/// One pass with a time stamp around each operation; fills in the latency of `figures`.
fn timed_pass<T: Target>(
    plan: &Plan<'_>,
    target: &T,
    blocks: &mut Blocks<T>,
    clock: &impl Clock,
    figures: &mut PassFigures,
    record: &mut Record,
) -> Result<(), ReplayError> {
    let pass = figures.pass;
    between(pass, "starting", target.begin_pass())?;
    record.clear();
    let stopped = timed_steps(plan, target, blocks, clock, pass, record);
    let held = finish_pass(target, blocks, pass, stopped)?;
    // Two views of the same pass: for allocators that are sampled, this run is the one that saw.
    figures.peak_held_bytes = figures.peak_held_bytes.max(held);
    figures.latency = Latency::of(&mut record.samples_ns);
    Ok(())
}

fn timed_steps<T: Target>(
    plan: &Plan<'_>,
    target: &T,
    blocks: &mut Blocks<T>,
    clock: &impl Clock,
    pass: u32,
    record: &mut Record,
) -> Result<(), ReplayError> {
    for (index, step) in plan.steps.iter().enumerate() {
        let before = Stamp::take(target, clock);
        let result = blocks.step(target, *step);
        let took_ns = Stamp::take(target, clock).since(before);
        result.map_err(|cause| plan.failure(pass, index, cause))?;
        record.add(*step, took_ns);
        if let Step::Alloc { slot, .. } = *step {
            record.extents.extend(blocks.extent(target, slot));
        }
        if index.is_multiple_of(SAMPLE_STEPS) || index == plan.peak_step {
            between(pass, "asking for held memory", target.sample())?;
        }
    }
    Ok(())
}

/// Ends a pass, finished or stopped: nothing stays live. Returns the peak of held memory.
fn finish_pass<T: Target>(
    target: &T,
    blocks: &mut Blocks<T>,
    pass: u32,
    stopped: Result<(), ReplayError>,
) -> Result<u64, ReplayError> {
    let held = target.peak_held_bytes();
    let freed = blocks.free_all(target);
    let settled = target.settle();
    // The first failure is the one to report: what follows it may follow from it.
    stopped?;
    between(pass, "freeing what the trace left live", freed)?;
    between(pass, "waiting for the GPU", settled)?;
    between(pass, "asking for held memory", held)
}

fn between<V>(pass: u32, what: &'static str, result: Result<V, Cause>) -> Result<V, ReplayError> {
    result.map_err(|cause| ReplayError::Between { pass, what, cause })
}

/// The live blocks of a pass, by slot.
struct Blocks<T: Target>(Vec<Option<T::Block>>);

impl<T: Target> Blocks<T> {
    fn new(plan: &Plan<'_>) -> Blocks<T> {
        Blocks((0..plan.trace.slots).map(|_| None).collect())
    }

    /// The measured step. A plan frees and crosses only live slots, so a slot that is empty then
    /// has nothing to be done for.
    #[inline]
    fn step(&mut self, target: &T, step: Step) -> Result<(), Cause> {
        match step {
            Step::Alloc { bytes, slot, stream } => {
                self.0[slot as usize] = Some(target.alloc(bytes, stream.into())?);
                Ok(())
            }
            Step::Cross { slot, stream } => match &mut self.0[slot as usize] {
                Some(block) => target.cross(block, stream.into()),
                None => Ok(()),
            },
            Step::Free { slot } => match self.0[slot as usize].take() {
                Some(block) => target.free(block),
                None => Ok(()),
            },
        }
    }

    fn extent(&self, target: &T, slot: u32) -> Option<Extent> {
        self.0[slot as usize].as_ref().map(|block| target.extent(block))
    }

    /// Frees what is live. Tries all of them, and reports the first failure.
    fn free_all(&mut self, target: &T) -> Result<(), Cause> {
        let mut result = Ok(());
        for block in self.0.iter_mut().filter_map(Option::take) {
            result = result.and(target.free(block));
        }
        result
    }
}

/// A moment: the host's clock, and what of it was the driver's.
struct Stamp {
    now_ns: u64,
    driver: DriverTime,
}

impl Stamp {
    #[inline]
    fn take<T: Target>(target: &T, clock: &impl Clock) -> Stamp {
        Stamp { driver: target.driver_time(), now_ns: clock.now_ns() }
    }

    /// What passed for a caller on the real device: simulating a call costs nothing, the call
    /// costs what it is charged with. On a GPU the two cancel out.
    fn since(self, earlier: Stamp) -> u64 {
        let driver = self.driver.since(earlier.driver);
        (self.now_ns - earlier.now_ns).saturating_sub(driver.spent_ns) + driver.charged_ns
    }
}

/// What two time stamps with nothing between them show: the median of many.
fn stamp_cost_ns<T: Target>(target: &T, clock: &impl Clock) -> u64 {
    let mut trials: Vec<u64> = (0..STAMP_TRIALS)
        .map(|_| {
            let before = Stamp::take(target, clock);
            Stamp::take(target, clock).since(before)
        })
        .collect();
    Latency::of(&mut trials).median_ns
}

/// What a timed pass writes down. Its memory is there before the pass starts.
struct Record {
    samples_ns: Vec<u64>,
    extents: Vec<Extent>,
    stamp_cost_ns: u64,
}

impl Record {
    fn new(plan: &Plan<'_>, stamp_cost_ns: u64) -> Record {
        Record {
            samples_ns: Vec::with_capacity(plan.trace.ops.len()),
            extents: Vec::with_capacity(plan.trace.blocks.len()),
            stamp_cost_ns,
        }
    }

    fn clear(&mut self) {
        self.samples_ns.clear();
        self.extents.clear();
    }

    fn add(&mut self, step: Step, took_ns: u64) {
        let took_ns = took_ns.saturating_sub(self.stamp_cost_ns);
        match (step, self.samples_ns.last_mut()) {
            // A crossing belongs to the allocation just before it.
            (Step::Cross { .. }, Some(alloc_ns)) => *alloc_ns += took_ns,
            _ => self.samples_ns.push(took_ns),
        }
    }
}

impl Plan<'_> {
    /// The failure of a step, in the words of the trace.
    fn failure(&self, pass: u32, step: usize, cause: Cause) -> ReplayError {
        let (slot, what) = match self.steps[step] {
            Step::Alloc { slot, .. } => (slot, "alloc"),
            Step::Cross { slot, .. } => (slot, "record_stream"),
            Step::Free { slot } => (slot, "free"),
        };
        let done = &self.steps[..=step];
        let ops = done.iter().filter(|step| !matches!(step, Step::Cross { .. })).count();
        // The block in the slot is the last one allocated into it.
        let mut allocs = 0;
        let mut block = None;
        for step in done {
            if let Step::Alloc { slot: into, .. } = step {
                if *into == slot {
                    block = self.trace.blocks.get(allocs);
                }
                allocs += 1;
            }
        }
        let (id, bytes) = block.map_or((0, 0), |block| (block.id, block.bytes));
        ReplayError::Operation { pass, op: ops, what, id, bytes, cause }
    }
}
