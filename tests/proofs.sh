#!/usr/bin/env bash
# Proofs of the hand-overs between threads: each runs in many interleavings of its threads.
#
# usage: tests/proofs.sh [short|long] [FILTER]
#   short (default)  the same interleavings each time, within a minute once it is built
#   long             more of them, from a seed of the day's
#
# The pool, the caches and the simulated device are built with the locks, atomics and threads of a scheduler
# (crates/vmm-sys/src/sync.rs), in a target directory of their own. A failed execution prints its
# seed; SHUTTLE_RANDOM_SEED=THAT tests/proofs.sh short NAME repeats it.
set -euo pipefail
cd "$(dirname "$0")/.."

length="${1:-short}"
filter="${2:-}"
case "$length" in
    short) runs=150 seed=1 ;;
    long) runs=5000 seed=$(date +%s) ;;
    *) echo "usage: tests/proofs.sh [short|long] [FILTER]" >&2; exit 2 ;;
esac
export VMM_PROOFS_RUNS="${VMM_PROOFS_RUNS:-$runs}" VMM_PROOFS_SEED="${VMM_PROOFS_SEED:-$seed}"
export RUSTFLAGS="--cfg shuttle" CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-target}/proofs"
# Without line tables: it builds faster, and what fails says where.
export CARGO_PROFILE_TEST_DEBUG=0 CARGO_PROFILE_DEV_DEBUG=0
echo "proofs: $length, VMM_PROOFS_RUNS=$VMM_PROOFS_RUNS VMM_PROOFS_SEED=$VMM_PROOFS_SEED"
cargo test -q -p vmm-pool -p vmm-kv --test proofs -- --nocapture "$filter"
