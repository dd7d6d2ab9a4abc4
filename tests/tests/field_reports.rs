//! docs/FIELD-REPORTS.md names every report, and tests that are there and run.

#![expect(clippy::unwrap_used, reason = "a test fails by panic")]

use std::fs;
use std::path::{Path, PathBuf};

use vmm_pool_tests::stories::{EDGES, THREADS};

const IDS: [&str; 53] = [
    "A1", "A4", "A5", "A6", "B1", "B3", "B5", "C2", "C3", "C4", "C5", "D3", "D4", "E1", "E2", "E3",
    "E5", "E6", "F1", "F2", "F4", "F5", "F6", "G1", "G2", "G3", "H1", "H2", "H3", "H4", "H5", "I1",
    "I2", "J1", "J2", "K1", "K2", "X1", "X2", "X3", "X4", "X5", "X6", "X7", "X8", "X9", "X10",
    "X11", "X12", "X13", "X14", "X15", "X16",
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

/// What stands in a row's cells.
fn rows(page: &str) -> Vec<Vec<&str>> {
    let rows = page.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| id |"));
    rows.map(|row| row.trim_matches('|').split(" | ").map(str::trim).collect()).collect()
}

/// Whether `name` is a test that runs: one of the list of stories, or a function behind `#[test]`
/// that is not ignored.
fn runs(path: &str, source: &str, name: &str) -> bool {
    if path.starts_with("tests/src/stories/") {
        let defined = source.contains(&format!("fn {name}("));
        return defined && EDGES.iter().chain(THREADS).any(|(story, _)| *story == name);
    }
    let lines: Vec<&str> = source.lines().map(str::trim).collect();
    let Some(at) = lines.iter().position(|line| line.starts_with(&format!("fn {name}("))) else {
        return false;
    };
    let above =
        lines[..at].iter().rev().take_while(|line| line.starts_with('#') || line.starts_with("//"));
    let attributes: Vec<_> = above.collect();
    attributes.contains(&&"#[test]") && !attributes.iter().any(|line| line.contains("ignore"))
}

#[test]
fn every_report_has_tests_that_run() {
    let page = fs::read_to_string(root().join("docs/FIELD-REPORTS.md")).unwrap();
    let rows = rows(&page);
    let ids: Vec<&str> = rows.iter().map(|row| row[0]).collect();
    assert_eq!(ids, IDS);
    for row in &rows {
        let [id, source, here, tests, verdict] = row[..] else { panic!("five cells: {row:?}") };
        assert!(source.contains('#') && !here.is_empty(), "{id}");
        let known = ["passed", "not applicable, "].iter().any(|word| verdict.starts_with(word));
        assert!(known, "{id}: {verdict}");
        let own = format!("f_{}_", id.to_lowercase());
        let mut named_by_id = 0;
        for file in tests.split("<br>") {
            let mut names = file.split('`').skip(1).step_by(2);
            let path = names.next().unwrap();
            let source = fs::read_to_string(root().join(path)).unwrap();
            for name in names {
                assert!(runs(path, &source, name), "{id}: no test {name} runs in {path}");
                named_by_id += u32::from(name.starts_with(&own));
            }
        }
        assert!(named_by_id > 0, "{id}: no test is called {own}…");
    }
}
