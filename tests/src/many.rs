//! Many seeded runs, and the report of the first that fails: its seed, the line that repeats it,
//! and the shortest script that still fails.

use std::ops::Range;
use std::time::{Duration, Instant};

use vmm_pool::{ElasticError, Error};

use crate::generate::{self, Profile};
use crate::machine::{DriverChoice, Machine};
use crate::run::{Failure, Tally, run};
use crate::script::Script;
use crate::setup::RunClock;
use crate::shrink::shrink;

/// The environment variable that names the one seed to run.
pub const SEED_VARIABLE: &str = "VMM_TEST_SEED";

/// What many runs did.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// Sums over all runs.
    pub tally: Tally,
    /// Runs left out, as this host's GPUs cannot be their machine.
    pub skipped: u64,
    /// The first failure, ready to print.
    pub failure: Option<String>,
}

/// The environment variable that says how many seeds to run.
pub const RUNS_VARIABLE: &str = "VMM_TEST_RUNS";

/// The seeds to run: the first `count`, or as many as the environment says, or the one it names.
///
/// # Panics
/// If a variable holds no number.
pub fn seeds(count: u64) -> Range<u64> {
    match (number(SEED_VARIABLE), number(RUNS_VARIABLE)) {
        (Some(seed), _) => seed..seed + 1,
        (None, runs) => 0..runs.unwrap_or(count),
    }
}

fn number(variable: &str) -> Option<u64> {
    let text = std::env::var(variable).ok()?;
    let number = text.parse();
    Some(number.unwrap_or_else(|_| panic!("{variable}={text}: expected a number")))
}

/// Runs the scripts of some seeds until one fails. `repeat` is the command that runs the same
/// profile again.
pub fn runs(choice: DriverChoice, profile: Profile, seeds: Range<u64>, repeat: &str) -> Outcome {
    let mut outcome = Outcome::default();
    for seed in seeds {
        let script = generate::script(profile, seed);
        match on_new_machine(choice, &script) {
            None => outcome.skipped += 1,
            Some(Ok(tally)) => outcome.tally += tally,
            Some(Err(failure)) => {
                let repeat = format!("{SEED_VARIABLE}={seed} {repeat}");
                outcome.failure = Some(report(choice, &script, &failure, &repeat));
                return outcome;
            }
        }
    }
    outcome
}

/// Runs a script on a machine of its own; `None` if there is none that fits.
pub fn on_new_machine(choice: DriverChoice, script: &Script) -> Option<Result<Tally, Failure>> {
    let machine = Machine::new(choice, script.setup.machine()).ok()?;
    // Not every host has memory that its GPUs can map.
    let has_memory = script.setup.host_bytes.is_none()
        || !matches!(
            script.setup.build_pool(&machine, &RunClock::default()),
            Err(Error::Elastic(ElasticError::NoHostMemory { .. }))
        );
    has_memory.then(|| run(script, &machine))
}

/// How long a failing script is shortened: one that blocks takes long each time.
const SHRINK_TIME: Duration = Duration::from_secs(60);

/// What a failure says before its first colon: no numbers that differ from script to script.
fn kind(failure: &Failure) -> &str {
    failure.text.split(':').next().unwrap_or_default()
}

fn report(choice: DriverChoice, script: &Script, failure: &Failure, repeat: &str) -> String {
    let mut text = format!("{failure}\nrepeat it by: {repeat}\n");
    // A GPU that was left in a strange state says nothing about shorter scripts; nor does a run
    // beside a thread.
    if choice == DriverChoice::Cuda || script.setup.background {
        return text + &format!("the script:\n{script}");
    }
    let shorter = |actions: &[_]| Script { actions: actions.to_vec(), ..script.clone() };
    let mut last = failure.clone();
    let begun = Instant::now();
    let actions = shrink(&script.actions, |actions| {
        begun.elapsed() < SHRINK_TIME
            && match on_new_machine(choice, &shorter(actions)) {
                // Another fault met on the way is another story.
                Some(Err(other)) if kind(&other) == kind(failure) => {
                    last = other;
                    true
                }
                _ => false,
            }
    });
    let script = shorter(&actions);
    text += &format!("the shortest script found that fails, at {last}\n{script}");
    text
}
