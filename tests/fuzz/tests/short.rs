//! The corpora, and seeded changes of them, through every target.
#![allow(clippy::unwrap_used, reason = "helpers of tests are not seen as tests")]

use std::path::Path;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use vmm_pool_fuzz_targets::TARGETS;

/// Changed inputs of each target; `VMM_FUZZ_RUNS` says otherwise. Of the two that make a pool or a
/// connection for each, fewer.
const RUNS: usize = 3000;

fn corpus(target: &str) -> Vec<Vec<u8>> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target);
    let entries = std::fs::read_dir(&directory).unwrap_or_else(|error| panic!("{target}: {error}"));
    let mut paths: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    paths.into_iter().map(|path| std::fs::read(path).unwrap()).collect()
}

/// A piece cut out, doubled, or taken from another input; bytes and numbers changed.
fn change(random: &mut StdRng, seeds: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = seeds[random.random_range(0..seeds.len())].clone();
    for _ in 0..random.random_range(1..5) {
        if bytes.is_empty() {
            bytes.push(random.random());
        }
        let at = random.random_range(0..bytes.len());
        match random.random_range(0..7) {
            0 => bytes[at] = random.random(),
            1 => bytes[at] ^= 1 << random.random_range(0..8),
            2 => bytes.truncate(at),
            3 => bytes.insert(at, random.random()),
            4 => drop(bytes.drain(at..(at + random.random_range(1..9)).min(bytes.len()))),
            5 => {
                let piece = bytes[at..(at + random.random_range(1..40)).min(bytes.len())].to_vec();
                bytes.splice(at..at, piece);
            }
            _ => {
                let other = &seeds[random.random_range(0..seeds.len())];
                let from = random.random_range(0..=other.len());
                bytes.truncate(at);
                bytes.extend_from_slice(&other[from..]);
            }
        }
    }
    bytes
}

fn run(name: &str) {
    let (_, target) = TARGETS.iter().find(|(known, _)| *known == name).unwrap();
    let runs = std::env::var("VMM_FUZZ_RUNS").ok().map(|text| text.parse().unwrap());
    let runs = runs.unwrap_or(match name {
        "environment" | "peer" => RUNS / 10,
        _ => RUNS,
    });
    let seeds = corpus(name);
    assert!(seeds.len() >= 3, "{name}: a corpus of {}", seeds.len());
    let mut taken = seeds.iter().filter(|bytes| target(bytes)).count();
    assert!(taken > 0, "{name}: nothing of the corpus is taken");
    for seed in 0..runs as u64 {
        let bytes = change(&mut StdRng::seed_from_u64(seed), &seeds);
        let outcome = std::panic::catch_unwind(|| target(&bytes));
        let text = String::from_utf8_lossy(&bytes);
        taken += usize::from(outcome.unwrap_or_else(|_| panic!("{name}, seed {seed}: {text:?}")));
    }
    println!("{name}: {taken} of {runs} taken");
    // Neither all nor nothing: otherwise hardly anything was tried.
    assert!((runs / 50..runs).contains(&taken), "{name}: {taken} of {runs} taken");
}

#[test]
fn traces() {
    run("trace");
}

#[test]
fn environments() {
    run("environment");
}

#[test]
fn messages() {
    run("wire");
}

#[test]
fn peers() {
    run("peer");
}

#[test]
fn calls_of_c_functions() {
    run("c_abi");
}
