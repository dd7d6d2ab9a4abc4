#!/usr/bin/env bash
# Whether programs can have the pool for cudarc beside others who use cudarc: it is built for several CUDA versions,
# and in one graph with cubecl-cuda (tests/compose). Nothing is linked and nothing runs, so no toolkit is needed.
#
# usage: tests/compose.sh
#
# Not checked: candle. It links the toolkit's libraries, so its graph builds only where there is one
# (docs/integrations/cudarc.md).
set -euo pipefail
cd "$(dirname "$0")/compose"

# Checked once and thrown away. One directory for all: versions differ in cudarc and what stands on it only.
export CARGO_INCREMENTAL=0 CARGO_PROFILE_DEV_DEBUG=0
target=../../target/compose

check() {
    local version=$1 begun=$SECONDS
    shift
    printf '== CUDA %s: cargo check %s\n' "$version" "$*"
    CUDARC_CUDA_VERSION=$version cargo check --quiet --locked --target-dir "$target" "$@"
    printf '   passed in %s s\n' $((SECONDS - begun))
}

check 12020 -p vmm-pool-cudarc
check 13040 -p vmm-pool-cudarc
check 13000
printf 'composed: vmm-pool-cudarc alone for 12020 and 13040, with cubecl-cuda for 13000; left out: candle\n'
