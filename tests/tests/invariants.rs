//! docs/INVARIANTS.md is true to the names in the code.

#![expect(clippy::unwrap_used, reason = "a test fails by panic")]

use std::fs;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

fn sources(folder: &Path, into: &mut String) {
    for entry in fs::read_dir(folder).unwrap().map(Result::unwrap) {
        let path = entry.path();
        if path.is_dir() {
            sources(&path, into);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            into.push_str(&fs::read_to_string(&path).unwrap());
        }
    }
}

/// What stands between backticks.
fn quoted(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

fn page() -> String {
    fs::read_to_string(root().join("docs/INVARIANTS.md")).unwrap()
}

/// The numbers of the invariants, in the order of the page.
fn numbers(page: &str) -> Vec<u32> {
    let heads = page.lines().filter_map(|line| line.strip_prefix("**I"));
    heads.map(|rest| rest.split('.').next().unwrap().parse().unwrap()).collect()
}

#[test]
fn every_invariant_has_its_number_its_place_and_its_check() {
    let page = page();
    let found = numbers(&page);
    let expected: Vec<u32> = (1..=found.len() as u32).collect();
    assert!(found.len() > 20);
    assert_eq!(found, expected);
    for section in page.split("\n**I").skip(1) {
        assert!(section.contains("\n- Held: ") && section.contains("\n- Checked: "), "I{section}");
    }
}

#[test]
fn every_file_and_every_name_on_the_page_exists() {
    let page = page();
    let mut code = String::new();
    for folder in ["crates", "tests"] {
        sources(&root().join(folder), &mut code);
    }
    for name in quoted(&page) {
        if name.contains('/') || name.ends_with(".rs") {
            assert!(root().join(name).exists(), "no such path: {name}");
            continue;
        }
        let name = name.trim_end_matches("()");
        let last = name.rsplit("::").next().unwrap();
        let defined = ["fn", "struct", "enum", "mod"]
            .iter()
            .any(|kind| code.contains(&format!("{kind} {last}")));
        // Stories are listed by name, fields by their colon.
        let field = code.contains(&format!("{last}:"));
        assert!(defined || field || last == "Drop", "no such name: {name}");
    }
}

#[test]
fn the_walker_names_invariants_of_the_page() {
    let last = *numbers(&page()).last().unwrap();
    let mut walker = String::new();
    for file in ["verify.rs", "region.rs"] {
        walker += &fs::read_to_string(root().join("crates/pool/src").join(file)).unwrap();
    }
    let named: Vec<u32> = walker
        .split("\"I")
        .skip(1)
        .filter_map(|rest| rest.split(':').next().unwrap().parse().ok())
        .collect();
    assert!(named.len() >= 6, "the walker names hardly any: {named:?}");
    assert!(named.iter().all(|number| *number <= last), "{named:?}");
}
