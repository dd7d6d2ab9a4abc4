#!/usr/bin/env bash
# Which lines of vmm-sys, vmm-heap, vmm-lock and vmm-pool the tests reach, and whether docs/COVERAGE.md
# names the functions that have others.
#
# usage: tests/coverage.sh [--record]
#   --record   writes the figures in docs/COVERAGE.md anew
#
# Runs the tests of those packages, the tests across rooms and the programs on the stand-in libcuda,
# built with counters. Fails if a test fails, or if a function with lines that nothing reached is not
# named in docs/COVERAGE.md; says which are named there and reached all the same. Needs python3, and
# `llvm-profdata` and `llvm-cov` of the compiler's own LLVM version: in the directory LLVM_TOOLS, with
# the compiler (rustup's llvm-tools) or in the path. Without them the check is skipped, loudly.
set -euo pipefail
cd "$(dirname "$0")/.."

page=docs/COVERAGE.md
target="$PWD/target/coverage"
work="$target/work"
measured='^crates/(vmm-sys|heap|lock|pool)/src/'
packages=(-p vmm-sys -p vmm-heap -p vmm-lock -p vmm-pool -p vmm-pool-tests -p vmm-standin)

wanted=$(rustc -vV | sed -n 's/^LLVM version: \([0-9]*\).*/\1/p')
host=$(rustc -vV | sed -n 's/^host: //p')
tools=
for directory in "${LLVM_TOOLS:-}" "$(rustc --print sysroot)/lib/rustlib/$host/bin" \
    "$(dirname "$(command -v llvm-cov || echo /nowhere/)")"; do
    [ -x "$directory/llvm-profdata" ] && [ -x "$directory/llvm-cov" ] || continue
    if "$directory/llvm-cov" --version | grep -q "LLVM version $wanted\."; then
        tools=$directory
        break
    fi
done
if [ -z "$tools" ]; then
    printf '\n*** SKIPPED: coverage: no llvm-profdata and llvm-cov of LLVM %s (LLVM_TOOLS=their directory)\n*** skipped checks: 1\n\n' "$wanted" >&2
    exit 0
fi

rm -rf "$work"
mkdir -p "$work"
# Counters in the packages of this project and in nobody else's.
printf '#!/bin/sh\nexec "$@" -C instrument-coverage\n' >"$work/rustc"
chmod +x "$work/rustc"
export RUSTC_WORKSPACE_WRAPPER="$work/rustc"
# Counters make the model slow: the first seeds of each kind of run.
export VMM_TEST_RUNS="${VMM_TEST_RUNS:-200}"
export CARGO_INCREMENTAL=0 CARGO_PROFILE_DEV_DEBUG=0 CARGO_PROFILE_TEST_DEBUG=0
# Macros and build scripts of this project are not what is asked for.
export LLVM_PROFILE_FILE="$work/build-%m.unused"
cargo test --target-dir "$target" "${packages[@]}" --lib --bins --tests --no-run 2>&1 | tee "$work/build.log"
# Processes of one program add to one of four files.
export LLVM_PROFILE_FILE="$work/%4m.profraw"
cargo test --target-dir "$target" "${packages[@]}" --lib --bins --tests --no-fail-fast

"$tools/llvm-profdata" merge -sparse "$work"/*.profraw -o "$work/all.profdata"
# One program at a time: what a program has of a function that it never calls would hide what others
# count of it.
while read -r program; do
    if ! "$tools/llvm-cov" export -format=lcov -instr-profile="$work/all.profdata" "$program" 2>"$work/said"; then
        # The proofs are empty without their scheduler.
        grep -q "no coverage data found" "$work/said" || { cat "$work/said" >&2; exit 1; }
    fi
done < <(echo "$target/debug/deps/libvmm_standin.so"; sed -n 's/^ *Executable .*(\(.*\))$/\1/p' "$work/build.log") >"$work/lcov"
python3 tests/coverage.py "$work/lcov" "$page" "$PWD" "$measured" "${1:-}"
