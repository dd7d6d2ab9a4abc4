//! What the library exports: all that the headers declare, and no more of that prefix.

#![allow(clippy::unwrap_used, reason = "a failure ends the test")]

mod support;

use std::collections::BTreeSet;
use std::process::Command;

/// Names of functions: what stands before an opening parenthesis outside of comments.
fn declared(header: &str) -> BTreeSet<String> {
    let mut code = String::new();
    for (nth, part) in header.split("/*").enumerate() {
        code.push_str(if nth == 0 { part } else { part.split_once("*/").unwrap().1 });
    }
    let is_name = |it: char| it.is_ascii_alphanumeric() || it == '_';
    let before = code.split('(').map(|part| part.rsplit(|it| !is_name(it)).next().unwrap());
    let names = before.filter(|name| name.starts_with("vmm_"));
    names.map(str::to_owned).collect()
}

#[test]
fn the_library_exports_exactly_what_the_headers_declare() {
    let mut headers = BTreeSet::new();
    for directory in support::include_directories() {
        for entry in std::fs::read_dir(directory).unwrap() {
            headers.extend(declared(&std::fs::read_to_string(entry.unwrap().path()).unwrap()));
        }
    }
    assert!(headers.contains("vmm_pool_alloc") && headers.contains("vmm_pool_torch_alloc"));
    let mut nm = Command::new("nm");
    nm.args(["-D", "--defined-only", "--format=posix"]).arg(support::library());
    let Some(listed) = support::good("symbols", &mut nm) else { return };
    let names = listed.lines().filter_map(|line| line.split(' ').next());
    let exported: BTreeSet<String> =
        names.filter(|name| name.starts_with("vmm_")).map(str::to_owned).collect();
    assert_eq!(exported, headers);
}
