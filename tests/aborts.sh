#!/usr/bin/env bash
# Programs of the pool whose panics abort (docs/CHECKS.md).
#
# usage: tests/aborts.sh
set -euo pipefail
cd "$(dirname "$0")/.."

cargo rustc -p vmm-pool-tests --example aborts -- -C panic=abort
"${CARGO_TARGET_DIR:-target}/debug/examples/aborts"
