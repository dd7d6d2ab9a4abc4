#!/usr/bin/env bash
# Instructions of warm operations, held to what benches/instructions.txt says.
#
# usage: benches/instructions.sh [--record]
#   --record   writes the file anew, after a change that was meant
#
# Counted by callgrind, so neighbours, clocks and address layouts do not matter: one build, one
# count. Fails if an operation takes more than MARGIN percent over its record; says so if it takes as
# much less, for the record to be written anew. What cannot be compared is skipped, loudly: no
# valgrind, another compiler than the record's, a processor without AVX2.
set -euo pipefail
cd "$(dirname "$0")/.."

MARGIN=3
record=benches/instructions.txt
target="${CARGO_TARGET_DIR:-target}"
work="$target/instructions"
compiler=$(rustc --version)

skip() {
    printf '\n*** SKIPPED: instruction counts: %s\n*** skipped checks: 1\n\n' "$1" >&2
    exit 0
}

command -v valgrind >/dev/null || skip "valgrind is not installed"
grep -qw avx2 /proc/cpuinfo || skip "this processor has no AVX2"
recorded=$(sed -n 's/^# compiler: //p' "$record" 2>/dev/null || true)
if [ "${1:-}" != --record ] && [ "$recorded" != "$compiler" ]; then
    skip "recorded with ${recorded:-nothing}, this is $compiler; run benches/instructions.sh --record"
fi

# No line tables: this builds faster, and the code is the same.
export CARGO_PROFILE_RELEASE_DEBUG=0 CARGO_PROFILE_RELEASE_STRIP=none
cargo build --quiet --release -p vmm-pool-benches --bin counted
cargo build --quiet --release -p vmm-pool-library --lib
cargo build --quiet --release -p vmm-pool-torch --example pairs
mkdir -p "$work"

# Runs a program under callgrind; its output is $work/NAME.log, the profile $work/NAME.
profile() {
    local name="$1"
    shift
    # Without compression, so that a line can be read without those before it.
    valgrind --tool=callgrind --compress-strings=no --compress-pos=no \
        --callgrind-out-file="$work/$name" "$@" >"$work/$name.log" 2>&1 ||
        { cat "$work/$name.log" >&2; return 1; }
}

# Prints the instructions of a function and all that it calls: its own lines, and the second number
# of each line behind a "calls=".
inclusive() {
    awk -v wanted="$2" '
        /^fn=/ { inside = $0 ~ "(=|::)" wanted "($|::h[0-9a-f]+$)" }
        inside && /^[0-9]+ [0-9]+$/ { sum += $2 }
        END { print sum + 0 }' "$work/$1"
}

# "CASE TOTAL OPERATIONS", a line each.
measure() {
    profile counted "$target/release/counted"
    grep -q '^fn=.*vector::alloc::with_avx2' "$work/counted" ||
        { echo "valgrind did not run the AVX2 form of first fit" >&2; return 1; }
    sed -n 's/^counted \(countme[^ ]*\) \([0-9]*\)$/\1 \2/p' "$work/counted.log" |
        while read -r function operations; do
            echo "${function#countme_} $(inclusive counted "$function") $operations"
        done
    local pairs=2000 library="$target/release/libvmm_pool.so" case kind bytes
    for case in hot_small:hot:65536 replace_small:replace:65536 hot_large:hot:4194304 general_small:general:65536; do
        IFS=: read -r case kind bytes <<<"$case"
        VMM_POOL_DRIVER=sim VMM_POOL_BACKGROUND=0 \
            profile "c_$case" "$target/release/examples/pairs" "$library" "$kind" "$bytes" "$pairs"
        echo "c_$case $(inclusive "c_$case" "countme_$kind") $pairs"
    done
}

measure >"$work/now"
awk '$2 == 0 { print "no instruction was counted for " $1 > "/dev/stderr"; exit 1 }' "$work/now"

if [ "${1:-}" = --record ]; then
    {
        echo "# Instructions per warm operation (a pair of an allocation and a free; in traces, each of"
        echo "# both), the loop included. Written by benches/instructions.sh --record."
        echo "# compiler: $compiler"
        awk '{ printf "%-24s %9.1f\n", $1, $2 / $3 }' "$work/now"
    } >"$record"
    cat "$record"
    exit
fi

awk -v margin="$MARGIN" '
    NR == FNR { if ($0 !~ /^#/) { before[$1] = $2 } next }
    {
        now = $2 / $3; seen[$1] = 1
        if (!($1 in before)) { verdict = "NOT RECORDED"; bad = 1 }
        else if (now > before[$1] * (1 + margin / 100)) { verdict = "MORE"; bad = 1 }
        else if (now < before[$1] * (1 - margin / 100)) { verdict = "less: record it"; less = 1 }
        else verdict = ""
        printf "%-24s %9.1f, recorded %9.1f  %s\n", $1, now, before[$1], verdict
    }
    END {
        for (name in before) if (!(name in seen)) { print name " was not counted"; bad = 1 }
        if (bad) print "a count is more than " margin " % over its record: if that is meant, run benches/instructions.sh --record"
        else if (less) print "faster than recorded: run benches/instructions.sh --record"
        exit bad
    }' "$record" "$work/now"
