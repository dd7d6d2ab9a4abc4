#!/usr/bin/env bash
# What comes from outside, under libFuzzer with the address sanitizer.
#
# usage: tests/fuzz.sh [TARGET] [SECONDS]
#   TARGET   trace, environment, wire, peer or c_abi; all of them by default
#   SECONDS  for each (60)
#
# Needs the nightly compiler and cargo-fuzz (`cargo install cargo-fuzz`); without them the check is skipped,
# loudly. What is found lies in tests/fuzz/libfuzzer/artifacts: mend it, and put the input into
# tests/fuzz/corpus, which the ordinary tests run. New inputs are kept beside the corpus, not in it.
set -euo pipefail
cd "$(dirname "$0")/fuzz"

if ! rustc +nightly -vV >/dev/null 2>&1 || ! cargo +nightly fuzz --version >/dev/null 2>&1; then
    printf '\n*** SKIPPED: fuzzing: no nightly compiler, or no cargo-fuzz\n*** skipped checks: 1\n\n' >&2
    exit 0
fi
targets="${1:-trace environment wire peer c_abi}"
for target in $targets; do
    mkdir -p "libfuzzer/found/$target"
    # Shells of lanes and the process's own state are never freed, by design.
    cargo +nightly fuzz run --fuzz-dir libfuzzer "$target" "libfuzzer/found/$target" "corpus/$target" -- \
        -max_total_time="${2:-60}" -max_len=2048 -timeout=30 -detect_leaks=0 -print_final_stats=1
done
