#!/usr/bin/env bash
# Tests under the address sanitizer: of the rooms that hold unsafe code, and of the pool above them.
#
# usage: tests/asan.sh [ARGUMENT FOR cargo test]...
#
# Finds reads and writes past an end or after a free, and what is never freed, in host memory; memory
# of the simulated device is plain numbers to it. Needs the nightly compiler. Without it the check is
# skipped, loudly.
set -euo pipefail
cd "$(dirname "$0")/.."

if ! version=$(rustc +nightly -vV 2>/dev/null); then
    printf '\n*** SKIPPED: address sanitizer: no nightly compiler\n*** skipped checks: 1\n\n' >&2
    exit 0
fi
# With a target named, flags do not reach build scripts and macros, which would not load.
host=$(sed -n 's/^host: //p' <<<"$version")
export RUSTFLAGS="${RUSTFLAGS:-} -Zsanitizer=address"
# Enough for the lines in a report.
export CARGO_PROFILE_TEST_DEBUG=line-tables-only CARGO_PROFILE_DEV_DEBUG=line-tables-only
# Without doctests: rustdoc takes flags of its own. A directory of its own, so that nothing else is
# built anew.
cargo +nightly test --target "$host" --target-dir target/asan --no-fail-fast --lib --tests \
    -p vmm-heap -p vmm-lock -p vmm-sys -p vmm-pool "$@"
