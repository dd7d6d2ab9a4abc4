#!/usr/bin/env bash
# Seeded runs of everything at once: tests/simulation.
#
# usage: tests/simulate.sh [RUNS] [SEED]
#   RUNS  how many (300), of the seeds from SEED (1) on; from 200 runs on everything must have happened
#
# A run that fails shows what its actors did, and repeats by its seed: tests/simulate.sh 1 SEED, which runs
# it twice and compares. VMM_SIMULATE_LINES=N shows more of the story. It shares its target directory, and
# what is built in it, with tests/proofs.sh.
set -euo pipefail
cd "$(dirname "$0")/.."
export RUSTFLAGS="--cfg shuttle" CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-target}/proofs"
# Without line tables: it builds faster, and what fails says where.
export CARGO_PROFILE_TEST_DEBUG=0 CARGO_PROFILE_DEV_DEBUG=0
exec cargo run -q --profile test -p vmm-pool-simulation -- "$@"
