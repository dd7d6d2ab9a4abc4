//! What two H200s said to every row, as it was recorded, beside what the simulated device must say.

use std::collections::BTreeMap;

use vmm_sys::conformance::{ROWS, RowKind};

/// The newest record of the whole suite. A row that it does not have needs a new one.
const RECORD: &str =
    include_str!("../../../benches/results/2026-11-30-h200x2-adapters/conformance.txt");

/// A later one, of one H200, for the rows that have come since and need no second.
const LATER: &str = include_str!("../../../benches/results/2026-12-01-h200-c/conformance.txt");
const SINCE: [&str; 1] = ["D-X13"];

/// The outcome of each row: `D-R1   passed   title [7 ms]`.
fn outcomes(record: &'static str) -> BTreeMap<&'static str, &'static str> {
    let rows = record.lines().filter(|line| line.starts_with("D-") && line.ends_with(" ms]"));
    rows.filter_map(|line| {
        let mut words = line.split_whitespace();
        Some((words.next()?, words.next()?))
    })
    .collect()
}

fn recorded() -> BTreeMap<&'static str, &'static str> {
    let mut all = outcomes(RECORD);
    all.extend(outcomes(LATER).into_iter().filter(|(row, _)| SINCE.contains(row)));
    all
}

/// The simulated device passes every row that has an answer (`conformance_sim`), so where the record
/// says the same, both gave the answer of the table.
#[test]
fn every_row_was_answered_on_gpus_as_the_table_says() {
    let recorded = recorded();
    for row in ROWS {
        let expected = match row.kind {
            RowKind::Check => "passed",
            RowKind::Observe => "observed",
        };
        assert_eq!(recorded.get(row.id), Some(&expected), "{}: {}", row.id, row.title);
    }
    assert_eq!(recorded.len(), ROWS.len(), "rows of the record that the suite has no more");
}
