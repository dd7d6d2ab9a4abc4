//! The recorded traces of this repository, and what their page says of them.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::path::{Path, PathBuf};

use vmm_pool_cli::trace::Trace;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/traces")
}

/// All traces, by name.
fn traces() -> Vec<Trace> {
    let mut files: Vec<PathBuf> = std::fs::read_dir(folder())
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.to_string_lossy().ends_with(".trace.gz"))
        .collect();
    files.sort();
    files.iter().map(|file| Trace::open(file).unwrap_or_else(|error| panic!("{error}"))).collect()
}

#[test]
fn the_page_of_the_traces_says_what_is_in_them() {
    let page = std::fs::read_to_string(folder().join("README.md")).unwrap();
    let found: Vec<String> = traces()
        .iter()
        .map(|trace| {
            let Trace { name, ops, blocks, streams, peak_live_bytes, left_live, .. } = trace;
            let (ops, blocks) = (ops.len(), blocks.len());
            format!("| {name} | {ops} | {blocks} | {left_live} | {peak_live_bytes} | {streams} |")
        })
        .collect();
    let head = page
        .lines()
        .position(|line| line.starts_with("| trace | ops |"))
        .expect("the page has the table");
    let said: Vec<&str> =
        page.lines().skip(head + 2).take_while(|line| line.starts_with('|')).collect();
    assert_eq!(said, found);
}

#[test]
fn recorded_blocks_are_ordered_and_never_empty() {
    for trace in traces() {
        assert!(trace.blocks.windows(2).all(|pair| pair[0].id < pair[1].id), "{}", trace.name);
        assert!(trace.blocks.iter().all(|block| block.bytes > 0), "{}", trace.name);
        assert!(trace.slots < 2000, "{}: slots are used again", trace.name);
    }
}
