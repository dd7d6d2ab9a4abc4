//! A C program, compiled here, that loads the library as PyTorch does.

#![allow(clippy::unwrap_used, reason = "a failure ends the test")]

use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Output};
use std::sync::atomic::{AtomicU32, Ordering};

static SKIPPED: AtomicU32 = AtomicU32::new(0);

/// The program; `None`, with a counted line on the terminal, where there is no C compiler.
fn program(story: &str) -> Option<PathBuf> {
    let source = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixture/torch.c");
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
    let path = test.with_file_name("libvmm_pool.so");
    assert!(path.exists(), "{}", path.display());
    path
}

fn run(story: &str, environment: &[(&str, &str)]) -> Option<Output> {
    let program = program(story)?;
    let mut command = Command::new(&program);
    command.arg(library()).arg(story).envs(environment.iter().copied());
    let output = command.output().unwrap();
    std::fs::remove_file(&program).unwrap();
    Some(output)
}

/// The story ends well and says nothing.
fn quiet(story: &str, environment: &[(&str, &str)]) {
    let environment = [&[("VMM_POOL_DRIVER", "sim")], environment].concat();
    let Some(output) = run(story, &environment) else { return };
    let words = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{story}: {}: {words}", output.status);
    assert_eq!((words.as_ref(), output.stdout.as_slice()), ("", &b""[..]), "{story}");
}

#[test]
fn threads_share_streams_and_free_what_others_allocated() {
    quiet("threads", &[]);
}

#[test]
fn wrong_arguments_are_told_and_change_nothing() {
    quiet("wrong", &[]);
}

#[test]
fn a_forked_child_gets_nothing_and_breaks_nothing() {
    quiet("fork", &[]);
}

#[test]
fn a_process_that_ends_while_blocks_live_is_silent() {
    for _ in 0..5 {
        quiet("exit", &[]);
    }
}

#[test]
fn settings_come_from_the_environment() {
    quiet("limit", &[("VMM_POOL_LIMIT", "64M")]);
}

/// No memory can be had: the reason is kept for each call, and said once.
fn refused(environment: &[(&str, &str)], reason: &str) {
    let Some(output) = run("refused", environment) else { return };
    let said = String::from_utf8(output.stderr).unwrap();
    let kept = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{}: {said}", output.status);
    assert_eq!(said.lines().count(), 1, "{said}");
    assert!(kept.starts_with(reason), "{kept}");
    assert!(said.contains(kept.trim()), "{said}");
}

#[test]
fn without_a_driver_or_with_a_wrong_setting_the_reason_is_said_once() {
    let reason = "VMM_POOL_DRIVER = gpu: expected auto, cuda or sim";
    refused(&[("VMM_POOL_DRIVER", "gpu")], reason);
    let reason = "VMM_POOL_CHUNK = 3M: expected a power of two";
    refused(&[("VMM_POOL_DRIVER", "sim"), ("VMM_POOL_CHUNK", "3M")], reason);
    if let Err(error) = vmm_sys::cuda::Cuda::open() {
        refused(&[("VMM_POOL_DRIVER", "auto")], &format!("no usable GPU: {error}"));
    }
}
