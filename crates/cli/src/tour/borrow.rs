//! A home that is short borrows from its neighbour, and gives back when it is asked to: in a pool of
//! its own, whose limit makes it short.

use vmm_pool::{ChunkSize, ElasticBuffer, Growth, Place, Pool};
use vmm_sys::ProbeKernel;

use super::bytes::{LONG, clear, judge, launch};
use super::stage::{Actor, Stage, StepResult};
use super::telling::{Told, Trouble, expect, mib};

/// What the home may have, and what is asked of it.
const HOME_CHUNKS: u64 = 4;
const ALL_CHUNKS: u64 = 6;
/// The first of the words.
const VALUE: u32 = 0x0b0f_f0b0;

pub(super) fn and_give_back(stage: &mut Stage) -> StepResult {
    let second = match &stage.second {
        Ok(second) => second,
        Err(why) => return Ok(Told::LeftOut(why.clone())),
    };
    let first = &stage.first;
    let (home, lender) = (Place::Device(first.device), Place::Device(second.device));
    let chunk = stage.buffer.chunk_bytes();
    let (all, lacking) = (ALL_CHUNKS * chunk, (ALL_CHUNKS - HOME_CHUNKS) * chunk);
    let pool = short_pool(stage, second, chunk)?;
    let buffer = pool.elastic(first.device).capacity_bytes(all).chunk_bytes(chunk).build()?;
    let refused = buffer.grow_to(all);
    expect(refused.is_err(), "growth beyond the limit to be refused", refused)?;
    let grown = buffer.grow(Growth::to(all).borrow_from_any())?;
    let told = [(lender, lacking)];
    expect(grown.borrowed == told, format_args!("to borrow {told:?}"), &grown)?;
    let figures = |actor: &Actor| pool.device_stats(actor.device).unwrap_or_default();
    let sides = (figures(first).borrowed_bytes, figures(second).lent_bytes);
    expect(sides == (lacking, lacking), format_args!("{lacking} bytes on both sides"), sides)?;
    {
        let _using = buffer.use_on(&first.stream)?;
        let words = all / 4;
        let kernel = ProbeKernel::FillWords { dst: buffer.address(), words, value: VALUE };
        launch(&first.stream, &kernel)?;
    }
    check(first, &buffer, 0, all)?;
    // The home has room again, and the lender wants its memory.
    buffer.decommit(0..lacking)?;
    let recall = pool.recall(second.device, u64::MAX, LONG)?;
    let back = recall.moved_bytes == lacking && recall.refused.is_empty();
    expect(back, format_args!("{lacking} bytes back"), &recall)?;
    let places = buffer.stats().by_place;
    expect(places == [(home, all - lacking)], format_args!("all on {home}"), &places)?;
    check(first, &buffer, lacking, all)?;
    pool.verify().map_err(Trouble::Wrong)?;
    Ok(Told::Done(format!(
        "{home}, held to {}, borrowed {} of {lender}, and they came home under their address when they \
         were called back",
        mib(HOME_CHUNKS * chunk),
        mib(lacking)
    )))
}

/// A pool whose devices have room for some chunks; the lender for the anchor of the pair too.
fn short_pool(stage: &Stage, second: &Actor, chunk: u64) -> Result<Pool, Trouble> {
    let builder = Pool::builder(stage.driver.clone())
        .device(stage.first.device)
        .device(second.device)
        .chunk(ChunkSize::Fixed(chunk))
        .limit_bytes(HOME_CHUNKS * chunk)
        .return_home(false)
        .lend(second.device, HOME_CHUNKS * chunk);
    Ok(builder.build()?)
}

/// Compares the words of a part of the buffer.
fn check(by: &Actor, buffer: &ElasticBuffer, from: u64, to: u64) -> Result<(), Trouble> {
    clear(by)?;
    let words = (to - from) / 4;
    {
        let _using = buffer.use_on(&by.stream)?;
        let (src, errors) = (buffer.address() + from, by.counter.address());
        let value = VALUE.wrapping_add((from / 4) as u32); // words count around
        launch(&by.stream, &ProbeKernel::CheckWords { src, words, value, errors })?;
    }
    by.stream.synchronize()?;
    judge(by, words)
}
