//! A move in the background: a stream goes on using the buffer, and forty others work as if nothing
//! happened.

use vmm_pool::{Buffer, MigrationState, Place};
use vmm_sys::object::{Event, Latch, Stream};
use vmm_sys::{DeviceId, ProbeKernel};

use super::bytes::{self, LONG, check_all, clear, enqueue_check, judge, launch, wait_for};
use super::graph::replay;
use super::migrate;
use super::stage::{Stage, StepResult};
use super::telling::{Told, Trouble, expect};

/// Streams that have nothing to do with the buffer.
pub(super) const OTHERS: usize = 40;
/// Words that each of them writes.
const WORDS: u64 = 1024;

/// A latch that is open at the latest when a step ends, well or not.
struct Opened<'a>(&'a Latch);

impl Drop for Opened<'_> {
    fn drop(&mut self) {
        self.0.open(1);
    }
}

pub(super) fn while_others_work(stage: &mut Stage) -> StepResult {
    let second = match &stage.second {
        Ok(second) => second.device,
        Err(why) => return Ok(Told::LeftOut(why.clone())),
    };
    let home = stage.first.device;
    let others = Others::new(stage)?;
    let latch = Latch::create(&stage.driver, home)?;
    let outcome = hold_and_move(stage, second, &others, &latch);
    // No stream may be on its way to the latch when it goes.
    for actor in stage.actors() {
        actor.stream.synchronize()?;
    }
    drop(latch);
    outcome?;
    stage.check_place(Place::Device(second))?;
    check_all(stage)?;
    replay(stage)?;
    migrate::to(stage, Place::Device(home))?;
    drop(others);
    Ok(Told::Done(format!(
        "while the memory was on its way to {second}, {OTHERS} streams of {home} did their work; the \
         stream that went on using the buffer found every byte"
    )))
}

/// A move that cannot end before the latch opens, as a stream has yet to write to the buffer.
fn hold_and_move(
    stage: &mut Stage,
    second: DeviceId,
    others: &Others,
    latch: &Latch,
) -> Result<(), Trouble> {
    let opened = Opened(latch);
    let (bytes, value) = (stage.bytes, stage.value.wrapping_mul(31));
    clear(&stage.first)?;
    latch.hold(&stage.first.stream, 1)?;
    bytes::write(stage, &stage.first, bytes, value)?;
    stage.value = value;
    let migration = stage.buffer.migrate_async(second)?;
    enqueue_check(stage, &stage.first, bytes, value)?;
    let unfinished = others.work()?;
    expect(unfinished == 0, "the other streams to do their work meanwhile", unfinished)?;
    let state = migration.state();
    let under_way = matches!(state, MigrationState::Waiting | MigrationState::Moving);
    expect(under_way, "a move that waits for the work before it", state)?;
    drop(opened);
    match migration.wait(LONG) {
        MigrationState::Done(moved) => {
            expect(moved.bytes == bytes, format_args!("{bytes} bytes to move"), moved)?;
        }
        MigrationState::Failed(error) => return Err(error.into()),
        state => expect(false, "a move that ends", state)?,
    }
    stage.first.stream.synchronize()?;
    judge(&stage.first, bytes / 4)
}

/// The streams, and memory that each has a part of. All made before anything is held.
struct Others {
    buffer: Buffer,
    streams: Vec<(Stream, Event)>,
}

impl Others {
    fn new(stage: &Stage) -> Result<Others, Trouble> {
        let device = stage.first.device;
        let lane = stage.pool.lane(&stage.first.stream)?;
        let mut buffer = lane.alloc(4 * WORDS * OTHERS as u64)?;
        let other = |_| {
            let stream = Stream::create(&stage.driver, device)?;
            buffer.record_stream(&stream)?;
            Ok((stream, Event::create(&stage.driver, device)?))
        };
        let streams = (0..OTHERS).map(other).collect::<Result<_, Trouble>>()?;
        Ok(Others { buffer, streams })
    }

    /// Has each of them do something. How many are not done in time.
    fn work(&self) -> Result<usize, Trouble> {
        for (index, (stream, event)) in (0..).zip(&self.streams) {
            let dst = self.buffer.address() + 4 * WORDS * index;
            launch(stream, &ProbeKernel::FillWords { dst, words: WORDS, value: 7 })?;
            event.record(stream)?;
        }
        Ok(wait_for(self.streams.iter().map(|(_, event)| event))?)
    }
}
