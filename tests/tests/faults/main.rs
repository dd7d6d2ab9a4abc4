//! The fault matrix: every operation, while the k-th driver call fails, for every k, with the codes that
//! the call may answer, once and for ever.
//!
//! Nothing leaks, an error names the call and the code, a failure leaves all as it was, the retry works,
//! nothing panics and nothing hangs. An ordinary run takes each call with one code; `tests/faults.sh` runs
//! the whole (docs/CHECKS.md).
#![allow(clippy::unwrap_used, reason = "helpers of tests are not seen as tests")]

mod capi;
mod codes;
mod elastic;
mod engine;
mod kv;
mod lanes;
mod list;
mod objects;
mod runner;
mod share;
mod stage;

use std::time::Instant;

use engine::Case;
use runner::Choice;

fn cases() -> Vec<Case> {
    [objects::cases(), lanes::cases(), elastic::cases(), kv::cases(), share::cases(), capi::cases()]
        .into_iter()
        .flatten()
        .collect()
}

#[test]
fn whatever_call_fails_nothing_is_lost() {
    let choice = Choice::of_environment();
    let began = Instant::now();
    let report = runner::run(&cases(), &choice);
    report.print(began.elapsed());
    assert!(report.cases > 0, "no case is called so: {choice:?}");
    let failures = report.failures;
    assert!(failures.is_empty(), "{} failures:\n{}", failures.len(), failures.join("\n"));
    if matches!(choice, Choice::Short | Choice::Whole) {
        list::check_calls(&report.hit.into_keys().collect());
    }
}

#[test]
fn every_operation_has_a_case_or_a_reason() {
    list::check_operations(&cases());
}
