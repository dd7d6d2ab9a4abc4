//! KV caches of an inference server: a sequence that grows, forks and is parked at addresses that stay;
//! and blocks that are packed so that memory comes back.

use vmm_kv::{ContiguousCache, Dtype, KvShape, PagedCache, PagedSequence, Sequence};
use vmm_pool::Use;
use vmm_sys::ProbeKernel;

use super::bytes::{clear, judge, launch};
use super::stage::{Stage, StepResult};
use super::telling::{Told, Trouble, expect, mib};

/// The prompt, and what follows it, in tokens.
const PROMPT: u64 = 100;
const ANSWER: u64 = 200;
const MAX_TOKENS: u64 = 1 << 16;
const BLOCK_TOKENS: u32 = 16;
/// Sequences of the paged cache; one in so many lives on.
const SEQUENCES: u64 = 32;
const LIVES_ON: usize = 4;

/// 32 KiB a token.
fn shape() -> Result<KvShape, Trouble> {
    Ok(KvShape::new(8, 8, 128, Dtype::F16).map_err(vmm_kv::KvError::from)?)
}

pub(super) fn contiguous(stage: &mut Stage) -> StepResult {
    let builder = ContiguousCache::builder(&stage.pool, &stage.first.stream, shape()?);
    let cache = builder.max_tokens(MAX_TOKENS).max_sequences(16).build()?;
    let mut sequence = cache.open(PROMPT)?;
    let address = sequence.address();
    write(stage, &cache, &sequence, 0..PROMPT, 1)?;
    for _ in 0..ANSWER {
        sequence.append(1)?;
    }
    let end = PROMPT + ANSWER;
    write(stage, &cache, &sequence, PROMPT..end, 1)?;
    check(stage, &cache, &sequence, 0..end, 1)?;
    let mut fork = sequence.fork()?;
    let shared = cache.stats().shared_bytes;
    expect(shared > 0, "chunks in common", shared)?;
    // Each goes its own way.
    for (branch, value) in [(&mut fork, 2), (&mut sequence, 3)] {
        branch.append(1)?;
        write(stage, &cache, branch, end..end + 1, value)?;
    }
    for (branch, value) in [(&fork, 2), (&sequence, 3)] {
        check(stage, &cache, branch, 0..end, 1)?;
        check(stage, &cache, branch, end..end + 1, value)?;
    }
    let parked = park(stage, &cache, &mut sequence, end)?;
    expect(sequence.address() == address, format_args!("address {address:#x}"), sequence)?;
    cache.verify().map_err(Trouble::Wrong)?;
    stage.check_sound()?;
    Ok(Told::Done(format!(
        "a sequence grew from {PROMPT} to {end} tokens at {address:#x}; a fork had {} in common with it; \
         {parked}",
        mib(shared)
    )))
}

/// To the host and back, if there is memory.
fn park(
    stage: &Stage,
    cache: &ContiguousCache,
    sequence: &mut Sequence,
    end: u64,
) -> Result<String, Trouble> {
    let place = match &stage.host {
        Ok(place) => *place,
        Err(why) => return Ok(format!("it could not be parked: {why}")),
    };
    let bytes = sequence.park(place)?;
    expect(bytes > 0, "memory that moved", bytes)?;
    check(stage, cache, sequence, 0..end, 1)?;
    sequence.resume()?;
    check(stage, cache, sequence, 0..end, 1)?;
    check(stage, cache, sequence, end..end + 1, 3)?;
    Ok(format!("{} of it were parked on the host and came back", mib(bytes)))
}

pub(super) fn paged(stage: &mut Stage) -> StepResult {
    let builder = PagedCache::builder(&stage.pool, &stage.first.stream, shape()?);
    let builder = builder.block_tokens(BLOCK_TOKENS).max_blocks(4096).ahead_blocks(0);
    let cache = builder.build()?;
    let mut sequences = Vec::new();
    for number in 0..SEQUENCES {
        sequences.push(cache.open(u64::from(BLOCK_TOKENS) * (1 + number % 5))?);
    }
    for (number, sequence) in (1..).zip(&sequences) {
        each_block(&cache, sequence, |dst, words, block| {
            launch(
                &stage.first.stream,
                &ProbeKernel::FillWords { dst, words, value: number << 16 | block },
            )
        })?;
    }
    let before = cache.stats().committed_bytes;
    let mut number = 0;
    sequences.retain(|_| {
        number += 1;
        number % LIVES_ON == 0
    });
    let packed = cache.pack(u64::MAX)?;
    cache.release_idle(0)?;
    clear(&stage.first)?;
    let mut words_in_all = 0;
    let numbers = (1..).map(|number| number * LIVES_ON as u32);
    for (number, sequence) in numbers.zip(&sequences) {
        each_block(&cache, sequence, |src, words, block| {
            words_in_all += words;
            let (value, errors) = (number << 16 | block, stage.first.counter.address());
            launch(&stage.first.stream, &ProbeKernel::CheckWords { src, words, value, errors })
        })?;
    }
    stage.first.stream.synchronize()?;
    judge(&stage.first, words_in_all)?;
    let (after, live) = (cache.stats().committed_bytes, cache.stats().live_bytes);
    let most = live + cache.buffer().chunk_bytes();
    expect(after <= most, format_args!("at most {most} bytes for {live} of tokens"), after)?;
    cache.verify().map_err(Trouble::Wrong)?;
    stage.check_sound()?;
    Ok(Told::Done(format!(
        "{SEQUENCES} sequences took {}; of {} that live on {} blocks were moved, and {} are left",
        mib(before),
        sequences.len(),
        packed.blocks,
        mib(after)
    )))
}

/// Under a guard: address, words and number of each block of a sequence.
fn each_block(
    cache: &PagedCache,
    sequence: &PagedSequence,
    mut work: impl FnMut(u64, u64, u32) -> vmm_sys::DriverResult<()>,
) -> Result<(), Trouble> {
    let _using = cache.use_now()?;
    let words = cache.layout().block_bytes() / 4;
    for (number, block) in (0..).zip(sequence.blocks()) {
        work(cache.address() + cache.layout().bytes_of(block).start, words, number)?;
    }
    Ok(())
}

/// The words of some tokens, as a guard, an address, a number and the first value: words count up
/// from the sequence's first token on.
fn words(
    cache: &ContiguousCache,
    sequence: &Sequence,
    tokens: std::ops::Range<u64>,
    value: u32,
) -> Result<(Use, u64, u64, u32), Trouble> {
    let token_bytes = cache.layout().shape().token_bytes();
    let first_word = tokens.start * token_bytes / 4;
    let address = sequence.address() + tokens.start * token_bytes;
    let count = (tokens.end - tokens.start) * token_bytes / 4;
    // Some millions at most.
    Ok((cache.use_now()?, address, count, (value << 24).wrapping_add(first_word as u32)))
}

fn write(
    stage: &Stage,
    cache: &ContiguousCache,
    sequence: &Sequence,
    tokens: std::ops::Range<u64>,
    value: u32,
) -> Result<(), Trouble> {
    let (_using, dst, words, value) = words(cache, sequence, tokens, value)?;
    Ok(launch(&stage.first.stream, &ProbeKernel::FillWords { dst, words, value })?)
}

fn check(
    stage: &Stage,
    cache: &ContiguousCache,
    sequence: &Sequence,
    tokens: std::ops::Range<u64>,
    value: u32,
) -> Result<(), Trouble> {
    let by = &stage.first;
    clear(by)?;
    let (using, src, words, value) = words(cache, sequence, tokens, value)?;
    let errors = by.counter.address();
    launch(&by.stream, &ProbeKernel::CheckWords { src, words, value, errors })?;
    drop(using);
    by.stream.synchronize()?;
    judge(by, words)
}
