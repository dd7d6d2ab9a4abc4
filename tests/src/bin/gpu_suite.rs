//! The suites that make sense on a GPU, in one program that needs no cargo: stories about edges and
//! threads, and seeded runs of the pool against the model.
//!
//! `gpu_suite [--driver cuda|sim] [--runs N] [--seed N] [WORDS…]`: only what has one of the words in
//! its name is run. The last line is `N passed, N failed, N skipped`, and a failure is exit code 1.

use std::any::Any;
use std::panic::catch_unwind;
use std::process::ExitCode;
use std::time::Instant;

use vmm_pool_tests::generate::Profile;
use vmm_pool_tests::many::runs;
use vmm_pool_tests::stories::{EDGES, Story, THREADS};
use vmm_pool_tests::{DriverChoice, Machine, MachineSpec, Skip};

struct Settings {
    choice: DriverChoice,
    runs: u64,
    seed: Option<u64>,
    words: Vec<String>,
}

/// Seeds of runs with elastic buffers that a GPU tries for one of the others: few of them ask for a
/// GPU's granularity and no more devices than there are, and the rest is skipped at once.
const ELASTIC_SEEDS: u64 = 4;

const USAGE: &str = "usage: gpu_suite [--driver cuda|sim] [--runs N] [--seed N] [WORDS…]";

impl Settings {
    fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Settings, String> {
        let mut settings =
            Settings { choice: DriverChoice::Cuda, runs: 40, seed: None, words: Vec::new() };
        while let Some(argument) = arguments.next() {
            let mut number = |name: &str| -> Result<u64, String> {
                let text = arguments.next().unwrap_or_default();
                text.parse().map_err(|_| format!("{name} {text}: expected a number"))
            };
            match argument.as_str() {
                "--runs" => settings.runs = number("--runs")?,
                "--seed" => settings.seed = Some(number("--seed")?),
                "--driver" => {
                    settings.choice = match arguments.next().as_deref() {
                        Some("cuda") => DriverChoice::Cuda,
                        Some("sim") => DriverChoice::Sim,
                        other => return Err(format!("--driver {other:?}: expected cuda or sim")),
                    };
                }
                option if option.starts_with('-') => return Err(format!("{option}: {USAGE}")),
                word => settings.words.push(word.to_owned()),
            }
        }
        Ok(settings)
    }

    /// How many seeds are tried.
    fn seeds(&self, profile: Profile) -> u64 {
        match self.choice {
            DriverChoice::Cuda if profile.is_elastic() => self.runs * ELASTIC_SEEDS,
            _ => self.runs,
        }
    }

    fn wants(&self, name: &str) -> bool {
        self.words.is_empty() || self.words.iter().any(|word| name.contains(word))
    }
}

#[derive(Default)]
struct Counts {
    passed: u64,
    failed: u64,
    skipped: u64,
    /// Why nothing more can be run.
    lost: Option<String>,
}

fn main() -> ExitCode {
    if std::env::args().skip(1).any(|argument| argument == "--help") {
        println!("{USAGE}");
        return ExitCode::SUCCESS;
    }
    let settings = match Settings::parse(std::env::args().skip(1)) {
        Ok(settings) => settings,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::from(2);
        }
    };
    let mut counts = Counts::default();
    for (name, story) in EDGES.iter().chain(THREADS).filter(|(name, _)| settings.wants(name)) {
        tell(&settings, &mut counts, name, *story);
    }
    for (name, profile) in [
        ("model_plain", Profile::Plain),
        ("model_background", Profile::Background),
        ("model_raw", Profile::Raw),
        ("model_guard", Profile::Guard),
        ("model_elastic", Profile::Elastic),
        ("model_elastic_faulty", Profile::ElasticFaulty),
        ("model_elastic_background", Profile::ElasticBackground),
    ] {
        if settings.wants(name) {
            model(&settings, &mut counts, name, profile);
        }
    }
    println!("{} passed, {} failed, {} skipped", counts.passed, counts.failed, counts.skipped);
    ExitCode::from(u8::from(counts.failed > 0))
}

fn tell(settings: &Settings, counts: &mut Counts, name: &str, story: Story) {
    if let Some(why) = &counts.lost {
        counts.skipped += 1;
        println!("skip  {name}: {why}");
        return;
    }
    let begun = Instant::now();
    let outcome = catch_unwind(|| story(settings.choice));
    let ms = begun.elapsed().as_millis();
    match outcome {
        Ok(Ok(())) => {
            counts.passed += 1;
            println!("ok    {name} ({ms} ms)");
        }
        Ok(Err(reason)) => {
            counts.skipped += 1;
            println!("skip  {name}: {reason}");
        }
        Err(panic) => {
            counts.failed += 1;
            println!("FAIL  {name} ({ms} ms): {}", text_of(&*panic));
            counts.lost = device_is_lost(settings.choice);
        }
    }
}

fn model(settings: &Settings, counts: &mut Counts, name: &str, profile: Profile) {
    if let Some(why) = &counts.lost {
        counts.skipped += 1;
        println!("skip  {name}: {why}");
        return;
    }
    if settings.choice == DriverChoice::Cuda && profile == Profile::ElasticFaulty {
        counts.skipped += 1;
        println!("skip  {name}: needs the simulated device, whose calls fail on request");
        return;
    }
    let seeds = match settings.seed {
        Some(seed) => seed..seed + 1,
        None => 0..settings.seeds(profile),
    };
    let begun = Instant::now();
    let repeat = format!("as the seed of: gpu_suite {name} --seed");
    let outcome = runs(settings.choice, profile, seeds, &repeat);
    counts.passed += outcome.tally.runs;
    counts.skipped += outcome.skipped;
    println!(
        "{}  {name}: {} runs, {} skipped, {} requests served, {} contents checked ({} ms)",
        if outcome.failure.is_some() { "FAIL" } else { "ok  " },
        outcome.tally.runs,
        outcome.skipped,
        outcome.tally.served,
        outcome.tally.checked,
        begun.elapsed().as_millis()
    );
    if let Some(failure) = outcome.failure {
        counts.failed += 1;
        println!("{failure}");
        counts.lost = device_is_lost(settings.choice);
    }
}

fn text_of(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no text")
}

/// A context that a fault has ended fails everything after it: that says nothing more.
fn device_is_lost(choice: DriverChoice) -> Option<String> {
    if choice == DriverChoice::Sim {
        return None;
    }
    let lost: Result<Machine, Skip> = Machine::new(choice, MachineSpec::default());
    lost.err().map(|reason| format!("the device is lost: {reason}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(arguments: &[&str]) -> Result<Settings, String> {
        Settings::parse(arguments.iter().map(|argument| (*argument).to_owned()))
    }

    #[test]
    fn arguments_are_read_and_wrong_ones_refused() {
        let settings = parse(&["--driver", "sim", "--runs", "7", "gates", "f_g1"]).unwrap();
        assert_eq!((settings.choice, settings.runs, settings.seed), (DriverChoice::Sim, 7, None));
        assert!(settings.wants("f_g1_a_pending") && !settings.wants("f_a1_sizes"));
        assert!(parse(&[]).unwrap().wants("anything"));
        let (sim, gpu) = (settings, parse(&["--runs", "7"]).unwrap());
        assert_eq!((sim.seeds(Profile::Elastic), gpu.seeds(Profile::Raw)), (7, 7));
        assert_eq!(gpu.seeds(Profile::Elastic), 7 * ELASTIC_SEEDS);
        for wrong in [&["--runs"][..], &["--driver", "fpga"], &["--fast"], &["--seed", "x"]] {
            assert!(parse(wrong).is_err(), "{wrong:?}");
        }
    }
}
