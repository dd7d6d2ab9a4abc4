//! The conformance suite on the simulated device: one test a row, each on a machine of its own.

use std::collections::BTreeSet;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vmm_sys::conformance::{Bench, Outcome, ROWS, RowKind, select, serve_second_process};
use vmm_sys::error::explain;
use vmm_sys::sim::{FaultPlan, Sim};
use vmm_sys::{DeviceId, Driver, ResultCode};

/// Set in the second process of the export rows, which is this test program again.
const SECOND_PROCESS: &str = "VMM_SYS_CONFORMANCE_SECOND_PROCESS";

fn machine() -> Arc<Sim> {
    Sim::builder().devices(2).build()
}

/// A bench on a machine, with all that a row can need.
fn bench(machine: &Arc<Sim>) -> Bench {
    let program = std::env::current_exe().expect("a running test knows its program");
    Bench::new(Arc::clone(machine) as Arc<dyn Driver>, DeviceId(0))
        .expect("the simulated machine has a device 0")
        .with_fresh(|| Ok(machine_of_its_own()))
        .with_second_process(move || {
            let mut command = Command::new(&program);
            command.args(["--exact", "second_process", "--nocapture"]).env(SECOND_PROCESS, "1");
            command
        })
}

fn machine_of_its_own() -> Arc<dyn Driver> {
    machine()
}

/// Runs one row. The simulated device has all that a row can need: a skip here is a failure.
fn run(name: &str) {
    let rows = select(name);
    assert_eq!(rows.len(), 1, "{name} names one row");
    let row = rows[0];
    let machine = machine();
    let bench = bench(&machine);
    let outcome = bench.run(row);
    println!("{} {outcome}", row.id);
    assert!(
        matches!(outcome, Outcome::Passed(_) | Outcome::Observed(_)),
        "{} ({}): {outcome}",
        row.id,
        row.title
    );
    drop(bench);
    must_become_clean(&machine, row.id);
}

/// A row gives back all that it made. A process that another test forks meanwhile has a copy of
/// every open descriptor for some milliseconds, so an exported chunk may go a little later.
fn must_become_clean(machine: &Sim, what: &str) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while let Err(left) = machine.check_clean() {
        assert!(Instant::now() < deadline, "{what}: {left}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The second process of the export rows. In an ordinary run there is nobody to serve, and then it
/// must not touch standard input.
#[test]
fn second_process() {
    if std::env::var_os(SECOND_PROCESS).is_some() {
        serve_second_process(&machine_of_its_own()).unwrap();
    }
}

macro_rules! rows {
    ($($name:ident)*) => {
        $(#[test] fn $name() { run(stringify!($name)); })*

        /// Every row of `docs/DRIVER.md`, written out once more: a row that is lost from the suite
        /// or from the table is noticed.
        const ALL: &[&str] = &[$(stringify!($name)),*];
    };
}

rows! {
    d_r1 d_r2 d_r3 d_r4 d_r5 d_r6 d_r7
    d_c1 d_c2 d_c3 d_c4 d_c5 d_c6 d_c7 d_c8
    d_m1 d_m2 d_m3 d_m4 d_m5 d_m6
    d_a1 d_a2 d_a3 d_a4 d_a5 d_a6 d_a7 d_a8 d_a9
    d_u1 d_u2 d_u3 d_u4
    d_h1 d_h2 d_h3
    d_f1
    d_p1 d_p2 d_p3
    d_x1 d_x2 d_x3 d_x4 d_x5 d_x6 d_x7 d_x8 d_x9 d_x10 d_x11 d_x12 d_x13
    d_g1 d_g2 d_g3 d_g4 d_g5
    d_s1 d_s2 d_s3
    d_v1 d_v2 d_v3 d_v4 d_v5 d_v6 d_v7
    d_k1
    d_n1 d_n2 d_n3 d_n4 d_n5 d_n6 d_n7 d_n8
    d_n9 d_n10 d_n11 d_n12 d_n13 d_n14 d_n15 d_n16 d_n17 d_n18 d_n19 d_n20
}

#[test]
fn every_row_exists_exactly_once() {
    let names: Vec<String> = ROWS.iter().map(|row| row.name()).collect();
    assert_eq!(names, ALL, "the suite has the rows of the list, once each, in its order");
    let ids: BTreeSet<&str> = ROWS.iter().map(|row| row.id).collect();
    assert_eq!(ids.len(), ROWS.len(), "ids are unique");
}

const DOCUMENT: &str = include_str!("../../../docs/DRIVER.md");

#[test]
fn the_document_quotes_the_errors_as_they_are() {
    // Quotations are wrapped, and each of their lines begins with a mark.
    let words: Vec<_> = DOCUMENT.split_whitespace().filter(|word| *word != ">").collect();
    let text = words.join(" ");
    let alignment = explain::alignment(Some(0x7f00_0000_1000), 2 << 20, 2 << 20);
    for quoted in
        [alignment.as_str(), explain::HANDLE_LIFE, explain::MISSING_GRANT, explain::MISSING_SUPPORT]
    {
        assert!(text.contains(quoted), "docs/DRIVER.md does not say: {quoted}");
    }
}

#[test]
fn the_document_has_every_row() {
    for row in ROWS {
        let cells = DOCUMENT.lines().filter(|line| line.starts_with(&format!("| {} |", row.id)));
        assert_eq!(cells.count(), 1, "docs/DRIVER.md has one line for {}", row.id);
    }
}

/// A row that still passes when a call of it goes wrong checks nothing there; one that leaves
/// something behind then spoils the next.
#[test]
fn a_call_that_goes_wrong_fails_its_row_and_leaves_nothing() {
    // No row expects this code.
    let wrong = ResultCode::ILLEGAL_STATE;
    for row in ROWS.iter().filter(|row| row.kind == RowKind::Check && !row.needs.own_driver) {
        for k in [1, 2, 3, 5, 8, 13, 21, 34] {
            let machine = machine();
            let bench = bench(&machine);
            machine.inject(FaultPlan::fail(wrong).at(k).once());
            let outcome = bench.run(row);
            if machine.faults_fired() == 0 {
                break;
            }
            let Outcome::Failed(text) = &outcome else {
                panic!("{}, call {k} wrong: {outcome}", row.id);
            };
            assert!(text.contains("CUDA_ERROR_ILLEGAL_STATE"), "{}, call {k}: {text}", row.id);
            drop(bench);
            // What cannot be given back because giving back went wrong is no fault of the row.
            if !text.contains("cleaning up") {
                must_become_clean(&machine, &format!("{}, call {k} wrong: {outcome}", row.id));
            }
        }
    }
}
