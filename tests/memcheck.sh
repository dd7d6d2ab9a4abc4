#!/usr/bin/env bash
# Tests of the rooms that hold unsafe code, and of the pool above them, under valgrind's memcheck.
#
# usage: tests/memcheck.sh [PACKAGE]...
#   without a package: all of `packages` below
#
# Finds uses of host memory that was never written, reads and writes past an end or after a free, and
# what is lost for good. What can still be reached at the end is no loss: statics, and the shells of
# lanes, which are made once, used again and never given back. One thread runs at a time, some thirty
# times slower than by itself: tests that take long are left out by name. The builds are those of
# `cargo test`. Without valgrind the check is skipped, loudly.
set -euo pipefail
cd "$(dirname "$0")/.."

packages=(vmm-heap vmm-lock vmm-sys vmm-pool vmm-share vmm-pool-capi)
[ "$#" = 0 ] || packages=("$@")
# Names of tests, or parts of them.
left_out=(
    # Thousands of random operations, against a model.
    without_slabs with_slabs with_default_settings places_the_trace the_window_with_the_fewest
    alike brute_force in_many_states
    # Threads that spin against each other, which take turns here.
    never_inside_together several_intruders
    # A hundred thousand operations of up to sixteen lanes.
    a_look_into_another_lane
    # Each operation again and again, with a panic at each of its calls.
    at_any_call
    # About a deadline; and about what cargo builds.
    whoever_records_waits_for_a_slow_writer panics_abort
)

if ! command -v valgrind >/dev/null; then
    printf '\n*** SKIPPED: memcheck: valgrind is not installed\n*** skipped checks: 1\n\n' >&2
    exit 0
fi
host=$(rustc -vV | sed -n 's/^host: //p')
# Programs that a test starts run by themselves; a fork goes on under valgrind.
valgrind=(valgrind --quiet --error-exitcode=9 --leak-check=full --errors-for-leak-kinds=definite
    --show-leak-kinds=definite --fair-sched=yes "--suppressions=$PWD/tests/memcheck.supp")
export "CARGO_TARGET_$(tr 'a-z-' 'A-Z_' <<<"$host")_RUNNER=${valgrind[*]}"
cargo test --no-fail-fast --lib --tests "${packages[@]/#/--package=}" -- --test-threads=1 "${left_out[@]/#/--skip=}"
