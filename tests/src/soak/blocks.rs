//! Blocks of lanes, and raw addresses.

use std::sync::Arc;

use vmm_pool::{Buffer, Error, Lane, Request, block_of, free_raw_on, record_stream_raw};
use vmm_sys::object::{Event, Stream};

use super::board::Words;
use super::trouble::{NOTHING, Step, Trouble};
use super::worker::Worker;
use super::world::{Track, lock};

/// Blocks that a thread holds, and that wait for another thread.
const KEPT: usize = 24;
const SENT: usize = 64;
const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// A block, and what it holds. The track keeps its stream.
pub(super) struct Block {
    buffer: Buffer,
    value: u32,
    /// All of it was written, and not three areas.
    all: bool,
    pub(super) track: Arc<Track>,
}

/// A block known by its address.
pub(super) struct RawBlock {
    address: u64,
    bytes: u64,
    value: u32,
    track: Arc<Track>,
}

impl Block {
    fn words(&self) -> impl Iterator<Item = Words> + use<> {
        Words::over(self.buffer.address(), self.buffer.bytes(), self.value).areas(self.all)
    }
}

pub(super) fn random_bytes(worker: &mut Worker<'_>) -> u64 {
    let most = (worker.world.options.memory_bytes / 64).clamp(4 * MIB, 256 * MIB);
    let rng = &mut worker.rng;
    match rng.below(100) {
        0..50 => 1 + rng.below(16 * KIB),
        50..80 => 1 + rng.below(MIB),
        80..98 => 1 + rng.below(6 * MIB),
        98 => 0,
        _ => 1 + rng.below(most),
    }
}

fn keep(worker: &mut Worker<'_>, track: Arc<Track>, buffer: Buffer) -> Step {
    let all = worker.rng.chance(60);
    let block = Block { buffer, value: worker.value(), all, track };
    for part in block.words() {
        part.fill(&block.track.stream)?;
    }
    worker.blocks.push(block);
    if worker.blocks.len() > KEPT { free(worker) } else { Ok(()) }
}

/// Makes room for what was refused.
fn or_free_some(worker: &mut Worker<'_>, got: Result<Buffer, Error>) -> Result<Buffer, Trouble> {
    if got.as_ref().is_err_and(Error::is_out_of_memory) {
        for _ in 0..4 {
            let _nothing_left = free(worker);
        }
    }
    Ok(got?)
}

pub(super) fn alloc(worker: &mut Worker<'_>) -> Step {
    let (track, pool) = (worker.track(), worker.pool());
    let bytes = random_bytes(worker);
    let lane: &Lane = &track.lanes[pool];
    let got = if worker.rng.chance(200) { lane.try_alloc(bytes) } else { lane.alloc(bytes) };
    let buffer = or_free_some(worker, got)?;
    if buffer.bytes() != bytes || buffer.device() != track.device() {
        return Err(Trouble::Wrong(format!("asked for {bytes} bytes, got {buffer:?}")));
    }
    keep(worker, track, buffer)
}

pub(super) fn alloc_with(worker: &mut Worker<'_>) -> Step {
    let (track, pool) = (worker.track(), worker.pool());
    let align = 1_u64 << worker.rng.below(22);
    let mut request = Request::new(random_bytes(worker)).align(align);
    if worker.rng.chance(300) {
        request = request.no_wait();
    } else if worker.rng.chance(300) {
        request = request.may_borrow();
    }
    let got = track.lanes[pool].alloc_with(&request);
    let buffer = or_free_some(worker, got)?;
    if !buffer.address().is_multiple_of(align) {
        return Err(Trouble::Wrong(format!("{buffer:?} is not aligned to {align}")));
    }
    keep(worker, track, buffer)
}

pub(super) fn check(worker: &mut Worker<'_>) -> Step {
    let Some(block) = Worker::take(&mut worker.rng, &mut worker.blocks) else { return NOTHING };
    for part in block.words() {
        worker.enqueue_check(&block.track.stream, part)?;
    }
    worker.blocks.push(block);
    Ok(())
}

pub(super) fn free(worker: &mut Worker<'_>) -> Step {
    let Some(block) = Worker::take(&mut worker.rng, &mut worker.blocks) else { return NOTHING };
    check_and_drop(worker, block)
}

/// The check comes before the drop in the stream's order, and so before whoever gets the memory.
pub(super) fn check_and_drop(worker: &mut Worker<'_>, block: Block) -> Step {
    for part in block.words() {
        worker.enqueue_check(&block.track.stream, part)?;
    }
    Ok(())
}

/// Lets work of `to` come after what `from` has now.
pub(super) fn order(from: &Stream, to: &Stream) -> Result<(), Trouble> {
    let event = Event::create(from.driver(), from.device())?;
    event.record(from)?;
    Ok(to.wait_event(&event)?)
}

/// Another stream, of this or another device, uses a block, which may be freed before it is done.
pub(super) fn use_across(worker: &mut Worker<'_>) -> Step {
    let other = worker.track();
    let Some(mut block) = Worker::take(&mut worker.rng, &mut worker.blocks) else {
        return NOTHING;
    };
    order(&block.track.stream, &other.stream)?;
    for part in block.words() {
        worker.enqueue_check(&other.stream, part)?;
    }
    block.buffer.record_stream(&other.stream)?;
    if worker.rng.chance(500) {
        worker.blocks.push(block);
        return Ok(());
    }
    check_and_drop(worker, block)
}

pub(super) fn send(worker: &mut Worker<'_>) -> Step {
    let Some(block) = Worker::take(&mut worker.rng, &mut worker.blocks) else { return NOTHING };
    let mut mail = lock(&worker.world.mail);
    if mail.len() < SENT {
        mail.push(block);
        return Ok(());
    }
    drop(mail);
    worker.blocks.push(block);
    NOTHING
}

/// Takes a block of another thread: to keep, or to free.
pub(super) fn receive(worker: &mut Worker<'_>) -> Step {
    let taken = Worker::take(&mut worker.rng, &mut lock(&worker.world.mail));
    let Some(block) = taken else { return NOTHING };
    if worker.rng.chance(500) && worker.blocks.len() < KEPT {
        worker.blocks.push(block);
        return Ok(());
    }
    check_and_drop(worker, block)
}

// ---- raw addresses ----

impl RawBlock {
    fn words(&self) -> impl Iterator<Item = Words> + use<> {
        Words::over(self.address, self.bytes, self.value).areas(false)
    }
}

pub(super) fn alloc_raw(worker: &mut Worker<'_>) -> Step {
    let (track, pool) = (worker.track(), worker.pool());
    let bytes = 1 + random_bytes(worker);
    let lane = &track.lanes[pool];
    let warm = if worker.rng.chance(500) { lane.alloc_raw_warm(bytes) } else { None };
    let address = match warm {
        Some(address) => address,
        None => lane.alloc_raw(bytes)?,
    };
    let raw = RawBlock { address, bytes, value: worker.value(), track };
    let found = block_of(address)?;
    if found.address != address || found.stream != raw.track.stream.id() {
        return Err(Trouble::Wrong(format!("{address:#x} is said to be {found:?}")));
    }
    for part in raw.words() {
        part.fill(&raw.track.stream)?;
    }
    worker.raws.push(raw);
    if worker.raws.len() > KEPT { free_raw(worker) } else { Ok(()) }
}

pub(super) fn free_raw(worker: &mut Worker<'_>) -> Step {
    let Some(raw) = Worker::take(&mut worker.rng, &mut worker.raws) else { return NOTHING };
    check_and_free(worker, raw)
}

pub(super) fn check_and_free(worker: &mut Worker<'_>, raw: RawBlock) -> Step {
    let across = worker.track();
    let way = worker.rng.below(4);
    if way == 0 {
        order(&raw.track.stream, &across.stream)?;
        for part in raw.words() {
            worker.enqueue_check(&across.stream, part)?;
        }
        record_stream_raw(raw.address, &across.stream)?;
    }
    for part in raw.words() {
        worker.enqueue_check(&raw.track.stream, part)?;
    }
    if way == 1 {
        // A wrong length changes nothing.
        match vmm_pool::free_raw(raw.address, raw.bytes + 4096) {
            Err(Error::WrongBytes { .. }) => {}
            other => return Err(Trouble::Wrong(format!("a wrong length was taken: {other:?}"))),
        }
    }
    if way == 2 {
        return Ok(free_raw_on(raw.address, raw.bytes, raw.track.stream.handle())?);
    }
    Ok(vmm_pool::free_raw(raw.address, raw.bytes)?)
}
