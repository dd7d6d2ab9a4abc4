//! A C program, compiled here and linked with the library, that uses all of the general functions.

#![allow(clippy::unwrap_used, reason = "a failure ends the test")]

mod support;

use serde_json::Value;
use support::Program;

/// The story ends well, and prints to its output alone.
fn told(story: &str, environment: &[(&str, &str)]) -> Option<String> {
    let program = Program::general(story)?;
    let mut command = program.command(story);
    let output = support::run(story, command.envs(environment.iter().copied()))?;
    let words = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{story}: {}: {words}", output.status);
    assert_eq!(words, "", "{story}");
    Some(String::from_utf8(output.stdout).unwrap())
}

/// The story ends well and says nothing.
fn quiet(story: &str) {
    if let Some(output) = told(story, &[]) {
        assert_eq!(output, "", "{story}");
    }
}

/// Those that need no setting of the simulated device.
const STANDIN_STORIES: [&str; 12] = [
    "blocks",
    "destroy",
    "threads",
    "thread_end",
    "fork",
    "wrong_pools",
    "wrong_blocks",
    "elastic",
    "sleep",
    "own",
    "fraction",
    "cupy",
];

macro_rules! quiet_stories {
    ($($test:ident: $story:literal,)*) => { $(
        #[test]
        fn $test() {
            quiet($story);
        }
    )* };
}

quiet_stories! {
    blocks_come_and_go_on_two_streams_of_two_devices: "blocks",
    blocks_outlive_their_pool_and_handles_do_not: "destroy",
    threads_share_a_pool_and_have_words_of_their_own: "threads",
    a_thread_that_drops_its_values_is_served: "thread_end",
    a_forked_child_is_told_so_by_every_function: "fork",
    wrong_options_and_handles_are_refused: "wrong_pools",
    wrong_blocks_are_refused_and_nothing_is_freed: "wrong_blocks",
    wrong_requests_of_elastic_buffers_are_refused: "wrong_elastic",
    elastic_buffers_grow_shrink_and_are_used_and_shared: "elastic",
    elastic_buffers_move_to_the_host_and_to_another_device: "migrate",
    elastic_buffers_sleep_and_wake_by_tag: "sleep",
    the_processes_own_pools_are_those_of_the_other_entry_points: "own",
    a_fraction_of_the_memory_is_a_limit_that_can_change: "fraction",
    memory_of_cupy_waits_for_the_device_and_is_used_again: "cupy",
}

/// By the driver object that a GPU has, on a `libcuda` that stands in for the real one.
#[test]
fn the_stories_are_the_same_on_the_real_drivers_calls() {
    let standin = vmm_standin_directory::library_directory().unwrap();
    for story in STANDIN_STORIES {
        let Some(program) = Program::general(story) else { return };
        let mut command = program.command(story);
        let mut path = program.directory().as_os_str().to_owned();
        path.push(":");
        path.push(standin.path());
        // As many devices as `sim` has.
        command.env("LD_LIBRARY_PATH", path).env("VMM_STANDIN_DEVICES", "8");
        command.env("VMM_POOL_DRIVER", "cuda");
        let Some(output) = support::run(story, &mut command) else { return };
        let words = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{story}: {}: {words}", output.status);
        assert_eq!((words.as_ref(), output.stdout.as_slice()), ("", &b""[..]), "{story}");
    }
}

#[test]
fn a_process_that_ends_while_everything_lives_is_silent() {
    for _ in 0..5 {
        quiet("exit");
    }
}

#[test]
fn settings_come_from_the_options_and_from_the_environment() {
    if let Some(output) = told("settings", &[("VMM_POOL_LIMIT", "64M")]) {
        assert_eq!(output, "");
    }
}

#[test]
fn an_error_says_what_was_asked_what_is_held_and_what_may_help() {
    let Some(output) = told("short", &[]) else { return };
    let (error, report) = output.split_once('\n').unwrap();
    for words in [
        "out of memory on device 0: asked 52428800 bytes",
        "held 41943040 = live 41943040",
        "limit 67108864",
        "largest piece that would succeed 25165824",
        "raise the pool's limit of 67108864 (VMM_POOL_LIMIT)",
    ] {
        assert!(error.contains(words), "{words}: {error}");
    }
    for words in [
        "device 0: the pool holds 41943040 bytes of a limit of 67108864; the driver says that",
        "\n  41943040 are asked for by blocks that are alive\n",
        "blocks: 1; streams: 1; requests without memory: 1\n",
    ] {
        assert!(report.contains(words), "{words}: {report}");
    }
}

#[test]
fn the_figures_are_json_and_add_up() {
    let Some(output) = told("stats", &[]) else { return };
    let stats: Value = serde_json::from_str(&output).unwrap();
    let devices = stats["devices"].as_array().unwrap();
    assert_eq!(devices.len(), 2);
    for device in devices {
        let bytes = |name: &str| device[name].as_u64().unwrap();
        let parts = [
            "live_bytes",
            "rounding_bytes",
            "idle_bytes",
            "limbo_bytes",
            "private_bytes",
            "elastic_bytes",
            "anchor_bytes",
            "stock_bytes",
        ];
        assert_eq!(parts.into_iter().map(bytes).sum::<u64>(), bytes("held_bytes"));
        assert_eq!(bytes("limit_bytes"), 256 << 20);
        assert_eq!(device["ladder"]["failed"], 0);
    }
    assert_eq!((&devices[1]["live_bytes"], &devices[1]["buffers"]), (&(3 << 20).into(), &1.into()));
    let elastic = &stats["elastic"][0];
    assert_eq!(elastic["tag"], "a \"tag\"\\");
    assert_eq!(elastic["by_place"][0]["bytes"], 8 << 20);
    assert!(elastic["quota_bytes"].is_null() && elastic["asleep"].is_null());
    assert_eq!(stats["hosts"][0]["limit_bytes"], 64 << 20);
}
