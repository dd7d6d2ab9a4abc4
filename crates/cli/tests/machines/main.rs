//! Machines that are old, small, partial, or that lie: what a pool does on each, feature by feature,
//! and what it says where it does not. `docs/MACHINES.md` is the table that comes out;
//! `VMM_WRITE_MACHINES=1` writes it anew.

mod features;
mod kinds;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::Arc;

use vmm_pool::{ElasticError, Error, Pool};
use vmm_pool_cli::doctor::{Status, examine};
use vmm_sys::object::retry_failed_drops;
use vmm_sys::sim::{FaultPlan, Sim};
use vmm_sys::{DeviceId, Driver};

use features::{FEATURES, Outcome};
use kinds::{MACHINES, Machine};

/// What came out on one machine.
struct Report {
    /// Why no pool was built, if none was.
    refused: Option<String>,
    /// By feature.
    outcomes: BTreeMap<&'static str, Outcome>,
    /// What the doctor finds fault with.
    findings: Vec<String>,
}

fn driver_of(sim: &Arc<Sim>) -> Arc<dyn Driver> {
    sim.clone()
}

fn settle(name: &str, sim: &Arc<Sim>) {
    assert_eq!(retry_failed_drops(&driver_of(sim)), 0, "{name}");
    sim.check_clean().unwrap_or_else(|left| panic!("{name}: left behind: {left}"));
}

/// A pool over all devices of the machine, and memory of the host; without that, and why, where the host
/// gives none.
fn pool(sim: &Arc<Sim>) -> Result<(Pool, Option<String>), Error> {
    let devices = sim.device_count().unwrap_or(0);
    let builder = || {
        let builder = Pool::builder(driver_of(sim)).background(false);
        (0..devices).fold(builder, |builder, device| builder.device(DeviceId(device)))
    };
    match builder().host_memory(0, 1 << 40, 0).build() {
        Ok(pool) => Ok((pool, None)),
        Err(error @ Error::Elastic(ElasticError::NoHostMemory { .. })) => {
            Ok((builder().build()?, Some(error.to_string())))
        }
        Err(error) => Err(error),
    }
}

fn report(name: &str, machine: &Machine) -> Report {
    let build = || -> Arc<Sim> {
        let sim = (machine.build)(Sim::builder()).build();
        for (call, code) in machine.fails {
            sim.inject(FaultPlan::fail(*code).on(*call));
        }
        sim
    };
    let sim = build();
    let mut findings = Vec::new();
    let verdict = examine(&driver_of(&sim), &mut |finding| {
        if finding.status() != Status::Ok && finding.id() != "verdict" {
            findings.push(finding.id().to_owned());
        }
    });
    findings.dedup();
    settle(name, &sim);
    let sim = build();
    let built = pool(&sim);
    // The doctor and the pool are of one mind.
    let is_whole = verdict.is_usable() && verdict.reasons.is_empty();
    assert_eq!(built.is_ok(), is_whole, "{name}: {:?} and {:?}", built.as_ref().err(), verdict);
    let (pool, no_host) = match built {
        Ok(built) => built,
        Err(error) => {
            settle(name, &sim);
            let typed = matches!(error, Error::Unsupported { .. } | Error::OutOfAddresses { .. });
            assert!(typed, "{name}: no reason that has a type: {error:?}");
            return Report {
                refused: Some(error.to_string()),
                outcomes: BTreeMap::new(),
                findings,
            };
        }
    };
    let mut outcomes = BTreeMap::new();
    for (feature, work) in FEATURES {
        let outcome = match (Outcome::of(work(&pool, &sim)), &no_host) {
            (Outcome::Says(_), Some(why)) if *feature == "host memory" => {
                Outcome::Says(why.clone())
            }
            (outcome, _) => outcome,
        };
        pool.verify().unwrap_or_else(|wrong| panic!("{name}, {feature}: {wrong}"));
        // What does not work costs nothing of what does.
        let stats = pool.stats();
        let live: u64 = stats.devices.iter().map(|(_, it)| it.live_bytes + it.elastic_bytes).sum();
        assert_eq!(live, 0, "{name}, {feature}");
        outcomes.insert(*feature, outcome);
    }
    drop(pool);
    settle(name, &sim);
    Report { refused: None, outcomes, findings }
}

fn cell(text: &str) -> String {
    text.replace('|', "\\|").replace('\n', " ")
}

fn row(name: &str, machine: &Machine) -> String {
    let report = report(name, machine);
    let mut works = Vec::new();
    let mut lacks = Vec::new();
    for (feature, _) in FEATURES {
        match report.outcomes.get(feature) {
            Some(Outcome::Works) => works.push(*feature),
            Some(Outcome::Says(why)) => lacks.push(format!("{feature}: *{}*", cell(why))),
            Some(Outcome::NotHere) | None => {}
        }
    }
    let (verdict, reasons) = match &report.refused {
        Some(why) => ("refused when it is built".to_owned(), format!("*{}*", cell(why))),
        None if lacks.is_empty() => ("works".to_owned(), String::new()),
        None => {
            let without: Vec<_> = lacks.iter().filter_map(|it| it.split(':').next()).collect();
            (format!("works without {}", without.join(", ")), lacks.join("; "))
        }
    };
    for expected in machine.expected {
        let all = format!("{verdict} {reasons}");
        assert!(all.contains(expected), "{name}: expected \"{expected}\" in: {all}");
    }
    let doctor = report.findings.join(", ");
    // What the pool goes without, somebody is told who asks the doctor.
    let flaws = report.findings.iter().filter(|id| *id != "fabric").count();
    assert!(verdict == "works" || flaws > 0, "{name}: nobody is told");
    assert!(!works.is_empty() || report.refused.is_some(), "{name}: nothing works");
    format!("| {name} | {verdict} | {reasons} | {doctor} |\n")
}

const HEAD: &str = "\
# Machines

What a pool does on machines that are old, small, partial, or that advertise what they refuse. Each line is a
simulated machine on which every feature was tried: FEATURES.
Nothing is left behind on any of them, and what is refused costs nothing of what works.

This page is written by the test `crates/cli/tests/machines`, which fails when it is not true:
`VMM_WRITE_MACHINES=1 cargo test -p vmm-pool-cli --test machines` writes it anew. The doctor points at fabric
handles everywhere, since the machine that was measured refuses them.

| machine | a pool | what is said | `vmm-pool doctor` points at |
|---|---|---|---|
";

fn page() -> String {
    let features: Vec<_> = FEATURES.iter().map(|(name, _)| *name).collect();
    let mut page = HEAD.replace("FEATURES", &features.join(", "));
    for (name, machine) in MACHINES {
        let _ = write!(page, "{}", row(name, machine));
    }
    page
}

#[test]
fn every_machine_works_or_says_why_not() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/MACHINES.md");
    let page = page();
    if std::env::var_os("VMM_WRITE_MACHINES").is_some() {
        std::fs::write(path, &page).unwrap();
    }
    let written = std::fs::read_to_string(path).unwrap_or_default();
    for (line, (is, was)) in page.lines().zip(written.lines()).enumerate() {
        assert_eq!(is, was, "docs/MACHINES.md, line {}", line + 1);
    }
    assert_eq!(page.lines().count(), written.lines().count(), "docs/MACHINES.md");
}
