#!/usr/bin/env bash
# The fault matrix: every operation, while the k-th driver call fails (docs/CHECKS.md).
#
# usage: tests/faults.sh [CASE]
#   without a name   every case, every k, code and mode; then those of cudarc programs and of the server
#   CASE             those whose names begin so, as: tests/faults.sh elastic::migrate
#
# A cell that fails prints the line that repeats it.
set -euo pipefail
cd "$(dirname "$0")/.."

# Without line tables: it builds faster, and what fails says where.
export CARGO_PROFILE_TEST_DEBUG=0 CARGO_PROFILE_DEV_DEBUG=0
VMM_FAULTS="${1:-all}" cargo test -p vmm-pool-tests --test faults -- --nocapture whatever_call_fails
if [ $# = 0 ]; then
  VMM_FAULTS=all cargo test -p vmm-pool-cudarc --test standin -- --nocapture whatever_call_fails
  VMM_FAULTS=all cargo test -p vmm-server --test fleet -- --nocapture whatever_call_fails
fi
