//! The pool against the model: thousands of random runs, each repeatable by its seed.
//!
//! `VMM_TEST_SEED=N` runs one seed, `VMM_TEST_RUNS=N` the first N; `VMM_TEST_SCRIPT=FILE` runs a
//! script as a failing test prints it; `VMM_TEST_DRIVER=cuda` runs fewer on a GPU.

use vmm_pool_tests::generate::Profile;
use vmm_pool_tests::many::{Outcome, on_new_machine, runs, seeds};
use vmm_pool_tests::script::Script;
use vmm_pool_tests::{DriverChoice, any_driver};

fn all(test: &str, profile: Profile, on_sim: u64, on_gpu: u64) -> Option<Outcome> {
    let choice = any_driver();
    let count = if choice == DriverChoice::Sim { on_sim } else { on_gpu };
    let seeds = seeds(count);
    let one = seeds.end - seeds.start == 1;
    let repeat = format!("cargo test -p vmm-pool-tests --test model {test}");
    let outcome = runs(choice, profile, seeds, &repeat);
    println!("{test}: {} skipped, {:?}", outcome.skipped, outcome.tally);
    if let Some(failure) = &outcome.failure {
        panic!("{failure}");
    }
    // One seed, or a GPU, need not show every case.
    (!one && choice == DriverChoice::Sim).then_some(outcome)
}

#[test]
fn plain_runs() {
    let Some(Outcome { tally, .. }) = all("plain_runs", Profile::Plain, 800, 40) else { return };
    let seen =
        [tally.served, tally.short, tally.refused, tally.checked, tally.limbo, tally.retired];
    assert!(tally.idled > 20, "hardly a lane was idle: {tally:?}");
    assert!(seen.iter().all(|count| *count > 100), "hardly anything was tested: {tally:?}");
    assert_eq!((tally.failed, tally.faults), (0, 0));
}

#[test]
fn faulty_runs() {
    let Some(Outcome { tally, .. }) = all("faulty_runs", Profile::Faulty, 800, 0) else { return };
    let seen =
        [tally.served, tally.failed, tally.checked, tally.limbo, tally.retired, tally.faults];
    assert!(seen.iter().all(|count| *count > 100), "hardly anything was tested: {tally:?}");
}

#[test]
fn background_runs() {
    let outcome = all("background_runs", Profile::Background, 100, 10);
    let Some(Outcome { tally, .. }) = outcome else { return };
    assert!(tally.served > 100 && tally.checked > 100, "hardly anything was tested: {tally:?}");
}

/// The only test here that asks for plain addresses: the pool finds them in a table of the process,
/// where the addresses of two simulated machines would meet. Half of the runs are in guard mode.
#[test]
fn raw_runs() {
    for (profile, on_sim) in [(Profile::Raw, 800), (Profile::Guard, 500)] {
        let outcome = all("raw_runs", profile, on_sim, 20);
        let Some(Outcome { tally, .. }) = outcome else { continue };
        let seen = [tally.served, tally.short, tally.refused, tally.checked, tally.limbo];
        assert!(seen.iter().all(|count| *count > 100), "hardly anything was tested: {tally:?}");
    }
}

/// Captures in every mode, whose graphs are launched and checked whatever comes between. A thread's
/// own stream is held here, which on a GPU holds every copy of the host.
#[test]
fn capture_runs() {
    let Some(Outcome { tally, .. }) = all("capture_runs", Profile::Capture, 800, 0) else {
        return;
    };
    let seen = [
        tally.served,
        tally.short,
        tally.checked,
        tally.limbo,
        tally.retired,
        tally.captures,
        tally.launches,
    ];
    assert!(seen.iter().all(|count| *count > 100), "hardly anything was tested: {tally:?}");
    assert_eq!((tally.failed, tally.faults), (0, 0));
}

/// Elastic buffers over two to four devices: memory comes from anywhere, moves, sleeps and wakes
/// under kernels that use it.
#[test]
fn elastic_runs() {
    let Some(Outcome { tally, .. }) = all("elastic_runs", Profile::Elastic, 200, 0) else { return };
    let seen = [
        tally.served,
        tally.limbo,
        tally.moves,
        tally.waited,
        tally.sleeps,
        tally.elastic_refused,
        tally.elastic_failed,
        tally.elastic_checked,
        tally.shared,
        tally.copied,
    ];
    assert!(seen.iter().all(|count| *count > 40), "hardly anything was tested: {tally:?}");
    assert_eq!((tally.failed, tally.faults), (0, 0));
}

#[test]
fn elastic_faulty_runs() {
    let outcome = all("elastic_faulty_runs", Profile::ElasticFaulty, 200, 0);
    let Some(Outcome { tally, .. }) = outcome else { return };
    let seen =
        [tally.moves, tally.sleeps, tally.elastic_failed, tally.elastic_checked, tally.faults];
    assert!(tally.shared > 40 && tally.copied > 40, "hardly anything was shared: {tally:?}");
    assert!(seen.iter().all(|count| *count > 100), "hardly anything was tested: {tally:?}");
}

#[test]
fn elastic_background_runs() {
    let outcome = all("elastic_background_runs", Profile::ElasticBackground, 30, 0);
    let Some(Outcome { tally, .. }) = outcome else { return };
    let seen = [tally.moves, tally.sleeps, tally.elastic_checked];
    assert!(seen.iter().all(|count| *count > 30), "hardly anything was tested: {tally:?}");
}

/// What a failing seed says can be repeated: moves in the background do not change what a run does.
#[test]
fn the_same_seed_is_the_same_run() {
    for profile in [Profile::Elastic, Profile::ElasticFaulty] {
        for seed in 0..12 {
            let script = vmm_pool_tests::generate::script(profile, seed);
            let run = || on_new_machine(DriverChoice::Sim, &script).map(Result::ok);
            assert_eq!(run(), run(), "{profile:?}, seed {seed}");
        }
    }
}

#[test]
fn a_script_from_a_file() {
    let Ok(path) = std::env::var("VMM_TEST_SCRIPT") else {
        println!("a_script_from_a_file: VMM_TEST_SCRIPT names none");
        return;
    };
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
    let script: Script = text.parse().unwrap_or_else(|error| panic!("{path}: {error}"));
    match on_new_machine(any_driver(), &script) {
        None => println!("a_script_from_a_file: skipped: no such machine here"),
        Some(outcome) => println!("{:?}", outcome.unwrap_or_else(|failure| panic!("{failure}"))),
    }
}
