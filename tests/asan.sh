#!/usr/bin/env bash
# Tests under the address sanitizer: of the rooms that hold unsafe code, and of the pool above them.
#
# usage: tests/asan.sh [PACKAGE]...
#   without a package: all of `packages` below
#
# Finds reads and writes past an end or after a free, and what is never freed, in host memory; memory
# of the simulated device is plain numbers to it. Needs the nightly compiler. Without it the check is
# skipped, loudly.
set -euo pipefail
cd "$(dirname "$0")/.."

packages=(vmm-heap vmm-lock vmm-sys vmm-pool vmm-share vmm-pool-capi vmm-pool-torch vmm-pool-cupy
    vmm-standin)
[ "$#" = 0 ] || packages=("$@")
# It has cargo build a program, which would take the flags to build scripts and macros too. What it asks,
# whether an absent library is a value where panics abort, is no matter of memory.
skipped=(what_is_missing_is_a_value_in_programs_whose_panics_abort)
# They look at the memory of a process, of which the sanitizer keeps what was freed for a while.
skipped+=(two_hundred_workers_that_are_killed_leave_nothing rounds_of_connect_map_unmap_leave_nothing)

if ! version=$(rustc +nightly -vV 2>/dev/null); then
    printf '\n*** SKIPPED: address sanitizer: no nightly compiler\n*** skipped checks: 1\n\n' >&2
    exit 0
fi
# With a target named, flags do not reach build scripts and macros, which would not load.
host=$(sed -n 's/^host: //p' <<<"$version")
# The stand-in has the sanitizer's calls and no sanitizer: a program that loads it has to show its own.
export RUSTFLAGS="${RUSTFLAGS:-} -Zsanitizer=address -Clink-arg=-rdynamic"
# Enough for the lines in a report.
export CARGO_PROFILE_TEST_DEBUG=line-tables-only CARGO_PROFILE_DEV_DEBUG=line-tables-only
export CARGO_INCREMENTAL=0
# Without doctests: rustdoc takes flags of its own. A directory of its own, so that nothing else is
# built anew.
cargo +nightly test --target "$host" --target-dir target/asan --no-fail-fast --lib --tests \
    "${packages[@]/#/--package=}" -- "${skipped[@]/#/--skip=}"
