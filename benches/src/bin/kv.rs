//! What a server's step costs on the host: room for one token more in each of 256 sequences, in both
//! forms of a KV cache; for the paged one the tables too. Once with memory that is there, where no
//! driver call may happen, and once while the caches grow in the background.
//! See docs/BENCHMARKS.md.

#![forbid(unsafe_code)]

use std::fmt;
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde::Serialize;
use vmm_kv::{BlockTables, ContiguousCache, Dtype, KvShape, PagedCache, PagedSequence, Sequence};
use vmm_pool::Pool;
use vmm_pool_benches::setup::{Setup, fail, no_arguments};
use vmm_pool_cli::replay::Cause;
use vmm_sys::object::Stream;

const SEQUENCES: usize = 256;
const STEPS: usize = 512;
/// Lengths at the start, spread so that chunks and blocks are full at different steps.
const PROMPT_TOKENS: u64 = 64;
const MAX_TOKENS: u64 = 1024;
/// What the device does meanwhile: a step of a small model.
const PAUSE: Duration = Duration::from_millis(4);
/// What all appends of a step are meant to stay under.
const AIM_US: f64 = 20.0;

/// Where the memory comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Memory {
    /// It is there before.
    Ahead,
    /// It comes while the steps go on.
    Growing,
}

impl fmt::Display for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Memory::Ahead => "memory is there",
            Memory::Growing => "grows in the background",
        })
    }
}

/// A step's work, and what the cache says at the end.
trait Subject {
    fn step(&mut self) -> Result<(), Cause>;
    /// Growths that a step waited for.
    fn foreground_growths(&self) -> u64;
    /// Growths in the background.
    fn background_growths(&self) -> u64;
}

struct Contiguous {
    cache: ContiguousCache,
    sequences: Vec<Sequence>,
}

fn prompt(index: usize) -> u64 {
    PROMPT_TOKENS + index as u64 % 16
}

/// Llama 3 8B: a token has 128 KiB, a chunk of 2 MiB has 16 tokens.
fn shape() -> Result<KvShape, Cause> {
    Ok(KvShape::new(32, 8, 128, Dtype::Bf16)?)
}

impl Contiguous {
    fn new(pool: &Pool, stream: &Stream, memory: Memory) -> Result<Contiguous, Cause> {
        let builder = ContiguousCache::builder(pool, stream, shape()?).max_tokens(MAX_TOKENS);
        let builder = builder.max_sequences(SEQUENCES as u32);
        let cache = match memory {
            // All of a sequence's memory, so that nothing is asked for later.
            Memory::Ahead => builder.ahead_tokens(MAX_TOKENS).build()?,
            Memory::Growing => builder.build()?,
        };
        let open = |index| Ok(cache.open(prompt(index))?);
        let mut sequences = (0..SEQUENCES).map(open).collect::<Result<Vec<_>, Cause>>()?;
        // Asks for what is ahead of each.
        cache.append_all(&mut sequences, 1).map_err(|(_, error)| error)?;
        cache.settle()?;
        Ok(Contiguous { cache, sequences })
    }
}

impl Subject for Contiguous {
    fn step(&mut self) -> Result<(), Cause> {
        Ok(self.cache.append_all(&mut self.sequences, 1).map_err(|(_, error)| error)?)
    }

    fn foreground_growths(&self) -> u64 {
        self.cache.stats().foreground_growths
    }

    fn background_growths(&self) -> u64 {
        self.cache.stats().background_growths
    }
}

struct Paged {
    cache: PagedCache,
    sequences: Vec<PagedSequence>,
    tables: BlockTables,
}

impl Paged {
    fn new(pool: &Pool, stream: &Stream, memory: Memory) -> Result<Paged, Cause> {
        let builder = PagedCache::builder(pool, stream, shape()?).max_blocks(1 << 15);
        let cache = match memory {
            Memory::Ahead => {
                let cache = builder.keep_idle_bytes(u64::MAX).build()?;
                // Blocks that lie idle are there for all.
                for _ in 0..SEQUENCES {
                    drop(cache.open(0)?);
                }
                let tokens = PROMPT_TOKENS + 16 + STEPS as u64 + 1;
                let whole = |_| Ok(cache.open(tokens)?);
                drop((0..SEQUENCES).map(whole).collect::<Result<Vec<_>, Cause>>()?);
                cache
            }
            Memory::Growing => builder.build()?,
        };
        let open = |index| Ok(cache.open(prompt(index))?);
        let sequences = (0..SEQUENCES).map(open).collect::<Result<Vec<_>, Cause>>()?;
        let blocks = cache.layout().blocks_for(MAX_TOKENS) as usize;
        Ok(Paged { cache, sequences, tables: BlockTables::new(SEQUENCES, blocks) })
    }
}

impl Subject for Paged {
    fn step(&mut self) -> Result<(), Cause> {
        for sequence in &mut self.sequences {
            sequence.append(1)?;
        }
        let rows: Vec<&PagedSequence> = self.sequences.iter().collect();
        self.tables.update(&rows)?;
        Ok(())
    }

    fn foreground_growths(&self) -> u64 {
        self.cache.stats().foreground_growths
    }

    fn background_growths(&self) -> u64 {
        self.cache.stats().background_growths
    }
}

#[derive(Serialize)]
struct Row {
    form: &'static str,
    memory: String,
    sequences: usize,
    steps: usize,
    /// Host time of a step.
    median_us: f64,
    p99_us: f64,
    p999_us: f64,
    max_us: f64,
    /// Driver calls of all threads during the steps.
    driver_calls: u64,
    /// Growths that a step waited for.
    foreground_growths: u64,
    background_growths: u64,
}

fn measure(
    setup: &Setup,
    form: &'static str,
    memory: Memory,
    subject: &mut dyn Subject,
) -> Result<Row, Cause> {
    let pause = if memory == Memory::Growing { PAUSE } else { Duration::ZERO };
    let (foreground, background) = (subject.foreground_growths(), subject.background_growths());
    let before = setup.driver.ledger().snapshot();
    let mut us = Vec::with_capacity(STEPS);
    for _ in 0..STEPS {
        let begun = Instant::now();
        subject.step()?;
        us.push(begun.elapsed().as_secs_f64() * 1e6);
        sleep(pause);
    }
    let driver_calls = setup.driver.ledger().snapshot().since(&before).total();
    us.sort_by(f64::total_cmp);
    let at = |part: f64| us[((us.len() - 1) as f64 * part) as usize];
    Ok(Row {
        form,
        memory: memory.to_string(),
        sequences: SEQUENCES,
        steps: STEPS,
        median_us: at(0.5),
        p99_us: at(0.99),
        p999_us: at(0.999),
        max_us: at(1.0),
        driver_calls,
        foreground_growths: subject.foreground_growths() - foreground,
        background_growths: subject.background_growths() - background,
    })
}

fn run() -> Result<(), Cause> {
    no_arguments()?;
    let mut setup = Setup::start("kv")?;
    for memory in [Memory::Ahead, Memory::Growing] {
        for form in ["contiguous", "paged"] {
            let pool = Pool::builder(setup.driver.clone()).device(setup.device).build()?;
            let stream = Stream::create(&setup.driver, setup.device)?;
            let row = match form {
                "contiguous" => {
                    let mut subject = Contiguous::new(&pool, &stream, memory)?;
                    measure(&setup, form, memory, &mut subject)?
                }
                _ => measure(&setup, form, memory, &mut Paged::new(&pool, &stream, memory)?)?,
            };
            let verdict = if row.median_us <= AIM_US { "within" } else { "beyond" };
            println!(
                "{form}, {memory}: a step of {SEQUENCES} sequences {:.1} us (p99 {:.1}, p99.9 {:.1}, most {:.1}), \
                 {verdict} the aim of {AIM_US}; {} driver calls, growths {} waited for, {} ahead",
                row.median_us,
                row.p99_us,
                row.p999_us,
                row.max_us,
                row.driver_calls,
                row.foreground_growths,
                row.background_growths
            );
            if memory == Memory::Ahead && row.driver_calls > 0 {
                return Err(format!("{} driver calls: expected none", row.driver_calls).into());
            }
            setup.record(&row)?;
        }
    }
    setup.say_where();
    Ok(())
}

fn main() {
    if let Err(error) = run() {
        fail("kv", error);
    }
}
