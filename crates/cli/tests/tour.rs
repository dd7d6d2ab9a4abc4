//! `vmm-pool tour`, run as a user runs it, and as a function on machines that are not as they should
//! be.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::path::PathBuf;
use std::process::{Command, Output};
use std::sync::Arc;

use serde_json::Value;
use vmm_pool_cli::tour::{Outcome, Plan, Telling, tour};
use vmm_sys::sim::{FaultPlan, Link, Property, Sim, SimBuilder, TimeMode};
use vmm_sys::{Call, DeviceId, ResultCode};

const MIB: u64 = 1 << 20;

fn program() -> Option<PathBuf> {
    Some(env!("CARGO_BIN_EXE_vmm-pool").into())
}

fn run(options: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_vmm-pool")).arg("tour").args(options).output().unwrap()
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn plan(sim: &Arc<Sim>, devices: u32) -> Plan {
    Plan {
        driver: sim.clone(),
        sim: Some(sim.clone()),
        devices: (0..devices).map(DeviceId).collect(),
        bytes: 8 * MIB,
        program: program(),
    }
}

/// The tour on a simulated machine; whether it went well, and what was told.
fn on(sim: &Arc<Sim>, devices: u32) -> (bool, Vec<Telling>) {
    let plan = plan(sim, devices);
    let mut told = Vec::new();
    let well = tour(&plan, &mut |telling| told.push(telling.clone()));
    (well, told)
}

fn machine(settings: impl FnOnce(SimBuilder) -> SimBuilder) -> Arc<Sim> {
    settings(Sim::builder().devices(2).time(TimeMode::Modelled)).build()
}

fn of<'a>(told: &'a [Telling], step: &str) -> &'a Telling {
    told.iter().find(|telling| telling.step == step).unwrap_or_else(|| panic!("{step}: {told:?}"))
}

fn left_out(told: &[Telling]) -> Vec<&str> {
    let left_out = told.iter().filter(|telling| telling.outcome == Outcome::LeftOut);
    left_out.map(|telling| telling.step.as_str()).collect()
}

#[test]
fn on_two_devices_every_step_goes_well() {
    let output = run(&["--driver", "sim"]);
    let text = stdout(&output);
    assert_eq!(output.status.code(), Some(0), "{text}");
    assert!(
        text.lines().all(|line| line.starts_with("ok ") && line.ends_with("modelled)")),
        "{text}"
    );
    assert!(text.contains("went to device 1"), "{text}");
    assert!(text.contains("40 streams of device 0 did their work"), "{text}");
    assert!(text.lines().last().unwrap().contains("16 steps done, every byte checked"), "{text}");
    assert!(String::from_utf8_lossy(&output.stderr).contains("driver: sim"));
}

#[test]
fn json_lines_say_the_same_and_the_size_can_be_chosen() {
    let output = run(&["--driver", "sim", "--json", "--bytes", "5MiB"]);
    assert_eq!(output.status.code(), Some(0));
    let lines: Vec<Value> =
        stdout(&output).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(lines.iter().all(|line| line["outcome"] == "ok" && line["modelled"] == true));
    let ahead = lines.iter().find(|line| line["step"] == "grow ahead").unwrap();
    // Four chunks of 2 MiB.
    assert!(ahead["text"].as_str().unwrap().contains("8 MiB"), "{ahead}");
    let times: Vec<u64> = lines.iter().map(|line| line["us"].as_u64().unwrap()).collect();
    assert!(times.iter().all(|us| *us > 0), "{times:?}");
    // The last line is the sum.
    let (whole, steps) = times.split_last().unwrap();
    assert!(*whole >= steps.iter().sum(), "{times:?}");
}

#[test]
fn on_one_device_the_steps_that_need_two_are_left_out_by_name() {
    let output = run(&["--driver", "sim", "--devices", "1"]);
    let text = stdout(&output);
    assert_eq!(output.status.code(), Some(0), "{text}");
    for step in ["access", "neighbour", "borrow", "move", "move ahead"] {
        assert!(text.contains(&format!("left out  {step}: there is one device\n")), "{text}");
    }
    let last = text.lines().last().unwrap();
    assert!(last.contains("11 steps done"), "{last}");
    assert!(last.contains("left out: access; neighbour; borrow; move; move ahead"), "{last}");
}

#[test]
fn without_memory_of_the_host_its_steps_are_left_out() {
    let code = ResultCode::NOT_SUPPORTED;
    let sim = machine(|sim| sim.refuse(Property::HostNuma, Call::MemCreate, code));
    let (well, told) = on(&sim, 2);
    assert!(well, "{told:?}");
    assert_eq!(left_out(&told), ["host", "sleep, kept"]);
    let why = &of(&told, "host").text;
    assert!(why.contains("host NUMA node 0 cannot give memory"), "{why}");
    sim.check_clean().unwrap();
}

#[test]
fn devices_that_do_not_work_together_are_as_good_as_one() {
    let sim = machine(|sim| sim.links(Link::None));
    let (well, told) = on(&sim, 2);
    assert!(well, "{told:?}");
    assert_eq!(left_out(&told), ["access", "neighbour", "borrow", "move", "move ahead"]);
    let why = &of(&told, "move").text;
    assert!(why.contains("device 1 cannot use memory of device 0"), "{why}");
}

#[test]
fn a_step_that_fails_says_what_was_refused_and_ends_the_tour() {
    let sim = machine(|sim| sim);
    sim.inject(FaultPlan::fail(ResultCode::UNKNOWN).on(Call::MemcpyDtoDAsync).at(2).once());
    let (well, told) = on(&sim, 2);
    assert!(!well);
    let [.., failed, last] = told.as_slice() else { panic!("{told:?}") };
    assert_eq!((failed.step.as_str(), failed.outcome), ("host", Outcome::Failed));
    assert!(failed.text.contains("cuMemcpyDtoDAsync"), "{}", failed.text);
    assert_eq!((last.step.as_str(), last.outcome), ("tour", Outcome::Failed));
    assert_eq!(last.text, "9 steps done before the one that failed");
    sim.check_clean().unwrap();
}

#[test]
fn a_second_process_maps_what_is_shared_and_one_that_fails_is_told() {
    let sim = machine(|sim| sim);
    let (well, told) = on(&sim, 2);
    assert!(well, "{told:?}");
    let text = &of(&told, "another process").text;
    assert!(text.contains("read all of 4 MiB"), "{text}");
    assert!(text.contains("grown to 8 MiB and moved to device 1"), "{text}");
    let (well, told) = on(&machine(|sim| sim.links(Link::None)), 2);
    assert!(well && of(&told, "another process").outcome == Outcome::Ok, "{told:?}");
    for (program, outcome, expected) in [
        (None, Outcome::LeftOut, "no program"),
        (Some("/bin/true".into()), Outcome::Failed, "the process ended"),
        (Some("/no/such/program".into()), Outcome::Failed, "expected /no/such/program to start"),
    ] {
        let sim = machine(|sim| sim);
        let devices = vec![DeviceId(0), DeviceId(1)];
        let driver = sim.clone();
        let plan = Plan { driver, sim: Some(sim.clone()), devices, bytes: 8 * MIB, program };
        let mut told = Vec::new();
        let well = tour(&plan, &mut |telling| told.push(telling.clone()));
        let step = of(&told, "another process");
        assert_eq!((well, step.outcome), (outcome == Outcome::LeftOut, outcome));
        assert!(step.text.contains(expected), "{}", step.text);
        sim.check_clean().unwrap();
    }
}

/// No sampling: one byte that is not as it was written is found wherever it is.
#[test]
fn a_single_wrong_byte_is_found() {
    for offset in [0, 3 * MIB + 77, 8 * MIB - 1] {
        let sim = machine(|sim| sim);
        let plan = plan(&sim, 2);
        let (mut told, mut address) = (Vec::new(), 0);
        let well = tour(&plan, &mut |telling: &Telling| {
            if let Some((_, text)) = telling.text.split_once("addresses at 0x") {
                address = u64::from_str_radix(text, 16).unwrap();
            }
            if telling.step == "graph" {
                let byte = sim.peek(address + offset, 1).unwrap()[0];
                sim.poke(address + offset, &[!byte]).unwrap();
            }
            told.push(telling.clone());
        });
        assert!(!well, "{told:?}");
        let failed = told.iter().find(|telling| telling.outcome == Outcome::Failed).unwrap();
        assert_eq!(failed.step, "access");
        let text =
            "expected 2097152 words as they were written, found 1 wrong, as device 1 reads them";
        assert_eq!(failed.text, text);
        sim.check_clean().unwrap();
    }
}

#[test]
fn bad_usage_is_refused() {
    for (options, expected) in [
        (&["--driver", "none"][..], "auto, cuda, sim"),
        (&["--bytes", "0"], "expected 1 to"),
        (&["--bytes", "1T"], "expected a number of bytes"),
        (&["--devices", "3"], "1..=2"),
    ] {
        let output = run(options);
        assert_eq!(output.status.code(), Some(2), "{options:?}");
        assert!(output.stdout.is_empty());
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(errors.contains(expected), "{errors}");
    }
}
