//! Programs on the stand-in, most of them unmodified cudarc: each runs in a process of its own, whose
//! library path begins with a directory in which the stand-in is called `libcuda`.
//!
//! This program is both sides: without a story's name in the environment it starts itself once for
//! each story, with one it is that story.

#![allow(clippy::unwrap_used, reason = "a failure ends the story")]

mod control;
mod copies;
mod kernels;
mod library;
mod order;

use std::process::{Command, ExitCode, Output};

use vmm_standin_directory::{LibraryDirectory, library_directory};

const STORY: &str = "VMM_STANDIN_TEST_STORY";

/// A story: its name, the settings that it runs with, and what it does.
type Story = (&'static str, &'static [(&'static str, &'static str)], fn());

const STORIES: &[Story] = &[
    ("slices_are_copied_filled_and_freed", &[], copies::slices),
    ("fills_of_every_width", &[], copies::fills),
    ("two_devices_copy_to_each_other", &[], copies::peers),
    ("without_pools_memory_is_plain", &[("VMM_STANDIN_DEVICE_BYTES", "67108864")], copies::limits),
    ("host_memory_is_registered", &[], copies::registered),
    ("known_kernels_run", &[], kernels::known),
    ("functions_have_attributes", &[], kernels::attributes),
    ("other_kernels_are_not_found", &[], kernels::unknown),
    ("other_kernels_do_nothing_if_asked", &[("VMM_STANDIN_KERNELS", "ignore")], kernels::ignored),
    ("a_kernel_without_access_loses_the_context", &[], kernels::no_access),
    ("peer_access_opens_allocations_to_kernels", &[], kernels::peer_access),
    ("graphs_are_replayed", &[], kernels::graphs),
    ("a_missing_wait_shows_on_a_held_stream", &[], order::held),
    ("a_held_stream_is_given_up", &[("VMM_STANDIN_BLOCKED_MS", "50")], order::given_up),
    ("a_missing_wait_shows_in_modelled_time", &[("VMM_STANDIN_TIME", "modelled")], order::modelled),
    ("pageable_memory_is_staged", &[], order::pageable),
    ("events_tell_the_time", &[("VMM_STANDIN_TIME", "modelled")], order::timed),
    ("host_functions_run_in_order", &[], order::host_functions),
    ("contexts_stack_and_end", &[], library::contexts),
    ("symbols_are_there_or_missing", &[], library::symbols),
    ("functions_are_looked_up_by_version", &[], library::look_up),
    ("errors_have_names", &[], library::errors),
    ("calls_are_counted_and_logged", &[], library::counted),
    ("no_device", &[("VMM_STANDIN_DEVICES", "0")], library::no_device),
    ("a_wrong_setting", &[("VMM_STANDIN_TIME", "real")], library::wrong_setting),
    ("sixteen_devices", &[("VMM_STANDIN_DEVICES", "16")], library::many_devices),
];

fn main() -> ExitCode {
    if let Ok(name) = std::env::var(STORY) {
        let (_, _, run) = STORIES.iter().find(|(story, ..)| *story == name).unwrap();
        run();
        return ExitCode::SUCCESS;
    }
    let directory = library_directory().unwrap();
    // As the test runner's: names that hold the first plain argument.
    let filter = std::env::args().skip(1).find(|text| !text.starts_with('-')).unwrap_or_default();
    let chosen = STORIES.iter().filter(|(name, ..)| name.contains(&filter));
    let failed: Vec<_> = chosen.clone().filter(|story| !passes(&directory, story)).collect();
    println!("{} stories, {} failed", chosen.count(), failed.len());
    if failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn passes(directory: &LibraryDirectory, (name, settings, _): &Story) -> bool {
    let Output { status, stdout, stderr } = Command::new(std::env::current_exe().unwrap())
        .env(STORY, name)
        .env("LD_LIBRARY_PATH", directory.search_path())
        .envs(settings.iter().copied())
        .output()
        .unwrap();
    if status.success() {
        println!("story {name} ... ok");
    } else {
        let words = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        println!("story {name} ... FAILED, {status}\n{}{}", words(&stdout), words(&stderr));
    }
    status.success()
}
