//! The soak: many threads do random operations of all kinds at once, for minutes, over shared pools on
//! shared streams; kernels check every buffer's contents, and nothing may creep.
//!
//! Each thread has a seeded generator, so a seed is the operations of each thread; how they interleave
//! is the machine's. What a thread is not given for want of memory, or since somebody else is changing
//! the same buffer, is a refusal and counted; any other error ends the run with the thread's last
//! operations.
//!
//! Now and then there is a quiet point: every thread drops what it holds, and what is left must be what
//! was left at the first one (`quiet`).

mod blocks;
mod board;
mod child;
mod elastic;
mod gate;
mod graphs;
mod item;
mod kv;
mod os;
mod pools;
mod quiet;
mod sharing;
mod sleep;
mod telling;
mod trouble;
mod worker;
mod world;

use std::path::PathBuf;
use std::time::{Duration, Instant};

pub use child::serve as serve_child;
pub use telling::Report;

use crate::machine::{DriverChoice, Skip};
use quiet::Marks;
use worker::Worker;
use world::World;

/// How long a run is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Length {
    /// By the clock.
    Time(Duration),
    /// So many operations of each thread.
    Operations(u64),
}

/// What is run.
#[derive(Clone, Debug)]
pub struct Options {
    /// On which driver.
    pub choice: DriverChoice,
    /// Devices.
    pub devices: u32,
    /// How long.
    pub length: Length,
    /// How far quiet points are apart: in time, or in operations of each thread.
    pub quiet: Length,
    /// Threads.
    pub threads: u32,
    /// Streams that the threads share, spread over the devices.
    pub streams: u32,
    /// Where the generators start.
    pub seed: u64,
    /// What all pools together may own of each device.
    pub memory_bytes: u64,
    /// Host memory that may come after the second quiet point: allocators keep what threads had at
    /// most, and on the simulated device the contents of all memory are host memory.
    pub allowance_bytes: u64,
    /// This program, which shares memory with a child that it starts as `PROGRAM --child ADDRESS`.
    pub program: Option<PathBuf>,
}

/// How often somebody looks whether the run goes on.
const LOOK: Duration = Duration::from_millis(50);
/// A line of progress each.
const PROGRESS: Duration = Duration::from_secs(10);
/// A thread that has not ended an operation for so long hangs.
pub(crate) const HANG: Duration = Duration::from_secs(60);

/// Runs the soak, and tells how it went. Prints a line of progress every ten seconds.
///
/// # Errors
/// [`Skip`] where this machine cannot be the one that was asked for.
pub fn run(options: Options) -> Result<Report, Skip> {
    let world = World::new(options)?;
    let begun = Instant::now();
    println!("{}", telling::opening(&world));
    if let Err(text) = quiet::begin(&world) {
        world.fail(text);
    }
    let mut marks = Marks::default();
    std::thread::scope(|scope| {
        for number in 0..world.options.threads {
            let world = &world;
            scope.spawn(move || Worker::new(world, number).run());
        }
        coordinate(&world, &mut marks, begun);
    });
    if world.failure().is_none() && marks.points() == 0 {
        world.fail("there was no quiet point".to_owned());
    }
    let mut report = telling::report(&world, &marks, begun);
    if report.failure.is_some() {
        // What is left may be what the fault is about: dropping it could hang or fault again.
        std::mem::forget(world);
        return Ok(report);
    }
    report.failure = world.end().err();
    Ok(report)
}

/// Tells of progress, lets quiet points happen, and watches for threads that hang.
fn coordinate(world: &World, marks: &mut Marks, begun: Instant) {
    let mut told = begun;
    let mut quiet_since = begun;
    loop {
        let ending = match world.options.length {
            Length::Time(time) => begun.elapsed() >= time,
            Length::Operations(_) => false,
        };
        let due = match world.options.quiet {
            Length::Time(time) => quiet_since.elapsed() >= time,
            Length::Operations(_) => false,
        };
        if ending || due {
            world.gate.close();
        }
        if world.gate.wait_all(LOOK) {
            let ended = ending || world.gate.ended();
            let mut outcome = match world.failure() {
                Some(_) => Ok(()), // told already
                None => quiet::point(world, marks),
            };
            if !ended && world.failure().is_none() {
                outcome = outcome.and_then(|()| quiet::begin(world));
            }
            if let Err(text) = outcome {
                world.fail(text);
            }
            if ended || world.failure().is_some() {
                world.gate.end();
                return;
            }
            quiet_since = Instant::now();
            world.gate.open();
        }
        if told.elapsed() >= PROGRESS {
            told = Instant::now();
            println!("{}", telling::progress(world, begun));
        }
        world.watch();
    }
}
