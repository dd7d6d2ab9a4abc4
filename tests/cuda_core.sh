#!/usr/bin/env bash
# Checks and tests crates/cuda-core, the adapter for NVIDIA's cuda-core. Not part of CI: it downloads.
#
# usage: tests/cuda_core.sh
#
# cuda-core is built by bindgen, which needs the headers of CUDA 13 and libclang. CUDA_HOME and LIBCLANG_PATH
# say where they are; what is not said is brought by Python wheels into target/cuda-core. No GPU is needed:
# the test that wants one says so and is skipped.
set -euo pipefail
cd "$(dirname "$0")/.."

place="$PWD/target/cuda-core"
wheels=()
[[ -n "${CUDA_HOME:-}" ]] || wheels+=("nvidia-cuda-runtime==13.0.*" "nvidia-curand==10.4.*" "nvidia-cuda-crt==13.0.*")
[[ -n "${LIBCLANG_PATH:-}" ]] || wheels+=("libclang==18.*")
if ((${#wheels[@]})); then
    [[ -x "$place/venv/bin/python" ]] || python3 -m venv "$place/venv"
    "$place/venv/bin/python" -m pip install --quiet "${wheels[@]}"
    packages=$("$place/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    export CUDA_HOME="${CUDA_HOME:-$packages/nvidia/cu13}"
    export LIBCLANG_PATH="${LIBCLANG_PATH:-$packages/clang/native}"
fi
# The wheel of libclang has no headers of its own.
export BINDGEN_EXTRA_CLANG_ARGS="${BINDGEN_EXTRA_CLANG_ARGS:-"-I$(cc -print-file-name=include)"}"
export CARGO_TARGET_DIR="$place/target"
cargo clippy --manifest-path crates/cuda-core/Cargo.toml --all-targets -- -D warnings
cargo test --manifest-path crates/cuda-core/Cargo.toml -- --nocapture
