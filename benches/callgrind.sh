#!/usr/bin/env bash
# Instructions per warm pair of one allocation and one free, counted by callgrind.
#
# usage: benches/callgrind.sh [SUBJECT...]     default: all of them
#   TOP=N   also prints the N functions that take the most
#
# Counts do not depend on how busy the machine is. They do depend on the compiler, and on the
# processor that valgrind shows to the program (AVX2, no AVX-512): compare within one run.
set -euo pipefail
cd "$(dirname "$0")/.."

command -v valgrind >/dev/null || { echo "valgrind is not installed" >&2; exit 2; }
export VMM_BENCH_DRIVER=sim # under valgrind there is no GPU
export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-target}"
cargo build --quiet --release -p vmm-pool-benches --bin instructions
program="$CARGO_TARGET_DIR/release/instructions"
work="$CARGO_TARGET_DIR/callgrind"
mkdir -p "$work"

# Pairs that the program counts.
PAIRS=100000
cases=(hot-64KiB replace-64KiB replace-mixed)
subjects=("$@")
[ $# -gt 0 ] || subjects=(pool-first-fit pool-buddy heap-first-fit heap-buddy)

# Prints the instructions counted for CASE SUBJECT.
count() {
    local out="$work/$1.$2"
    valgrind --tool=callgrind --toggle-collect='*countme*' --callgrind-out-file="$out" \
        "$program" count "$1" "$2" >"$out.log" 2>&1 || { cat "$out.log" >&2; return 1; }
    awk '/Collected/ { print $NF }' "$out.log"
}

# Prints the functions of CASE SUBJECT that take the most, per pair. callgrind lists a function once
# for each file that was inlined into it: here it is one line.
top() {
    callgrind_annotate --auto=no --threshold=100 "$work/$1.$2" |
        awk -v most="$TOP" -v pairs="$3" '
            /^[0-9 ,]+\(.*%\)/ && !/PROGRAM TOTALS/ {
                count = $1; gsub(",", "", count)
                sub(/^[^)]*\) +/, ""); sub(/ \[.*/, ""); sub(/^[^ :]*[\/?][^ :]*:/, "")
                sum[$0] += count
            }
            END {
                for (name in sum) printf "%10.1f  %s\n", sum[name] / pairs, name | "sort -rn"
            }' | awk -v most="$TOP" 'NR <= most'
}

printf '%-16s %-16s %14s %10s\n' case subject "instructions" "loop alone"
for case in "${cases[@]}"; do
    loop=$(count "$case" nothing)
    for subject in "${subjects[@]}"; do
        counted=$(count "$case" "$subject")
        "$program" record "$case" "$subject" "$counted" "$loop"
        if [ -n "${TOP:-}" ]; then
            top "$case" "$subject" "$PAIRS"
        fi
    done
done
