//! A C program, compiled here, that loads the library as PyTorch does.

#![allow(clippy::unwrap_used, reason = "a failure ends the test")]

use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Output};
use std::sync::atomic::{AtomicU32, Ordering};

static SKIPPED: AtomicU32 = AtomicU32::new(0);

/// The program; `None`, with a counted line on the terminal, where there is no C compiler.
fn program(story: &str) -> Option<PathBuf> {
    let source = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixture/program.c");
    // A process id in the name: the same test may run twice at a time.
    let name = format!("torch-{story}-{}", std::process::id());
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    let result = Command::new("cc")
        .args(["-O1", "-Wall", "-Wextra", "-Werror", "-pthread", "-o"])
        .arg(&path)
        .arg(source)
        .arg("-ldl")
        .output();
    let output = match result {
        Ok(output) => output,
        Err(error) => {
            let count = SKIPPED.fetch_add(1, Ordering::Relaxed) + 1;
            // Not `eprintln`: the test runner would swallow the line of a test that passes.
            let line = format!("skipped ({count} so far): {story}: no C compiler: {error}");
            let mut terminal = std::io::stderr();
            writeln!(terminal, "{line}").unwrap();
            return None;
        }
    };
    assert!(output.status.success(), "cc: {}", String::from_utf8_lossy(&output.stderr));
    Some(path)
}

/// The library that cargo built beside this test.
fn library() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let path = test.with_file_name("libvmm_pool_torch.so");
    assert!(path.exists(), "{}", path.display());
    path
}

fn run(story: &str, driver: &str) -> Option<Output> {
    let program = program(story)?;
    let mut command = Command::new(&program);
    let output = command.arg(library()).arg(story).env("VMM_POOL_DRIVER", driver).output();
    std::fs::remove_file(&program).unwrap();
    output.ok()
}

/// The story ends well and says nothing.
fn quiet(story: &str) {
    let Some(output) = run(story, "sim") else { return };
    let words = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{story}: {}: {words}", output.status);
    assert_eq!((words.as_ref(), output.stdout.as_slice()), ("", &b""[..]), "{story}");
}

#[test]
fn threads_share_streams_and_free_what_others_allocated() {
    quiet("threads");
}

#[test]
fn wrong_arguments_are_told_and_change_nothing() {
    quiet("wrong");
}

#[test]
fn a_forked_child_gets_nothing_and_breaks_nothing() {
    quiet("fork");
}

#[test]
fn a_process_that_ends_while_blocks_live_is_silent() {
    for _ in 0..5 {
        quiet("exit");
    }
}

#[test]
fn without_a_driver_the_reason_is_said_once() {
    let Some(output) = run("no_driver", "gpu") else { return };
    let (said, kept) = (String::from_utf8(output.stderr), String::from_utf8(output.stdout));
    let (said, kept) = (said.unwrap(), kept.unwrap());
    assert!(output.status.success(), "{}: {said}", output.status);
    assert_eq!(said.lines().count(), 1, "{said}");
    assert_eq!(kept, "VMM_POOL_DRIVER = gpu: expected auto, cuda or sim\n");
    assert!(said.contains(kept.trim()), "{said}");
}
