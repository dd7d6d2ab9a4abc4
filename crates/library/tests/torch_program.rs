//! A C program, compiled here, that loads the library as PyTorch does.

#![allow(clippy::unwrap_used, reason = "a failure ends the test")]

mod support;

use std::process::{Command, Output};

fn run(story: &str, environment: &[(&str, &str)]) -> Option<Output> {
    let directory = support::directory(&format!("torch-{story}"));
    let program = directory.join("program");
    let mut compiler = support::compiler("cc", "-std=gnu11");
    compiler.arg("-o").arg(&program).args(support::sources(&["torch.c"])).arg("-ldl");
    let output = support::good(story, &mut compiler).and_then(|_| {
        let mut command = Command::new(&program);
        command.arg(support::library()).arg(story).envs(environment.iter().copied());
        support::run(story, &mut command)
    });
    std::fs::remove_dir_all(&directory).unwrap();
    output
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
