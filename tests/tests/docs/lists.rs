//! Which commands of the pages are run here, and why the others are not.

/// A command that is run as it stands, by the program that cargo has built already.
pub(crate) struct Run {
    pub(crate) command: &'static str,
    /// What is put behind it, so that it takes no longer than it must, and the simulated device.
    pub(crate) more: &'static str,
    /// What it has to print.
    pub(crate) prints: &'static str,
}

const fn run(command: &'static str, more: &'static str, prints: &'static str) -> Run {
    Run { command, more, prints }
}

pub(crate) const RUN: &[Run] = &[
    run(
        "cargo run --release -p vmm-pool-cli -- replay tests/traces/*.gz",
        "--driver sim --passes 1",
        "geometric mean of 5",
    ),
    run("vmm-pool doctor", "--driver sim", "verdict: usable on device 0, device 1"),
    run("cargo run --release -p vmm-pool-cli -- doctor", "--driver sim", "verdict: usable"),
    run("vmm-pool tour", "--driver sim", "tour: 16 steps done, every byte checked"),
    run(
        "cargo run --release -p vmm-server --bin vmm-serve-compare",
        "--driver sim --requests 40",
        "contiguous",
    ),
    run(
        "cargo run --release -p vmm-pool-tests --bin gpu_suite -- --driver sim f_a",
        "",
        " 0 failed, 0 skipped",
    ),
    run("cargo run -p vmm-sys --example conformance", "--driver sim --filter d_m", " 0 failed"),
    run("cargo run --release -p vmm-kv --example paged_step", "", "0 driver calls"),
    run("cargo run --release -p vmm-share --example handover", "--driver sim", "handover"),
    run("cargo run --release -p vmm-share --example readonly", "--driver sim", "\"goes_on\": true"),
    run("cargo run --release -p vmm-share --example weight_server", "--driver sim", "loader_again"),
    run(
        "cargo run --release -p vmm-pool-torch --example pairs -- rust",
        "hot 65536 1000",
        "rust hot 65536 bytes",
    ),
];

/// Commands that are not run, by the reason. A path in a reason must be there.
pub(crate) const NOT_RUN: &[(&str, &[&str])] = &[
    (
        "this test is a part of it",
        &["cargo test --workspace", "cargo test -p vmm-pool-tests", "cargo test"],
    ),
    (
        "run by tests/tests/docs/main.rs, the program and what asks it",
        &[
            "vmm-pool serve --socket /tmp/weights.sock --device 0 1 --limit 80GiB --lease 300",
            "vmm-pool status --socket /tmp/weights.sock",
            "vmm-pool serve",
            "vmm-pool status",
            "cargo run --release -p vmm-server --bin vmm-server",
            "cargo run --release -p vmm-server --bin vmm-load",
        ],
    ),
    (
        "run by crates/cli/tests/replay.rs and crates/cli/tests/record.rs, with other traces",
        &[
            "vmm-pool replay",
            "vmm-pool replay run-1234.trace --driver sim",
            "vmm-pool replay --compare cudaMalloc,cudaMallocAsync tests/traces/*.gz",
            "vmm-pool replay --late-us US",
            "vmm-pool replay --idle-lane-ms",
        ],
    ),
    (
        "run by benches/tests/programs.rs, with smaller loads",
        &[
            "cargo run --release -p vmm-pool-benches --bin growth",
            "cargo run --release -p vmm-pool-benches --bin cross",
            "cargo run --release -p vmm-pool-benches --bin threads",
            "cargo run --release -p vmm-pool-benches --bin overlap -- tests/traces/gnn.trace.gz",
        ],
    ),
    (
        "takes seconds, and says what this machine is like",
        &[
            "cargo run --release -p vmm-pool-benches --bin fidelity -- run --driver sim --devices 1 --out sim.jsonl tests/traces/*.gz",
            "cargo run --release -p vmm-pool-benches --bin fidelity -- compare sim.jsonl cuda.jsonl",
            "cargo run --release -p vmm-pool-benches --bin kv",
            "cargo run --release -p vmm-pool-torch --example pairs -- LIBRARY",
        ],
    ),
    (
        "takes minutes, and figures need a quiet machine",
        &["cargo bench -p vmm-pool-benches", "cargo bench"],
    ),
    (
        "tests of the workspace, which has them",
        &[
            "cargo test -p vmm-share",
            "cargo test -p vmm-sys --test conformance_sim",
            "cargo test --release -p vmm-pool-cli --test density -- --nocapture",
            "VMM_WRITE_MACHINES=1 cargo test -p vmm-pool-cli --test machines",
            "VMM_FAULTS=\"elastic::migrate k=37 code=800 all\" cargo test -p vmm-pool-tests --test faults",
        ],
    ),
    (
        "takes minutes; tests/tests/soak.rs and the stories of the ordinary tests are the short form",
        &[
            "cargo run --release -p vmm-pool-tests --bin soak -- --driver sim",
            "VMM_TEST_CREEP_ROUNDS=1000000 cargo run --release -p vmm-pool-tests --bin gpu_suite -- --driver sim f_x12",
        ],
    ),
    (
        "takes minutes, or a tool that most machines lack: docs/CHECKS.md",
        &[
            "tests/proofs.sh long",
            "tests/simulate.sh [RUNS] [SEED]",
            "tests/simulate.sh 10000",
            "tests/simulate.sh 1 SEED",
            "tests/fuzz.sh [TARGET] [SECONDS]",
            "TOP=10 benches/callgrind.sh",
            "benches/instructions.sh --record",
        ],
    ),
    (
        "needs a GPU",
        &[
            "cargo run --release -p vmm-pool-benches --bin fidelity -- run --driver cuda --out cuda.jsonl tests/traces/*.gz",
            "cargo run -p vmm-sys --features conformance --example conformance -- --driver cuda",
            "cargo run --release -p vmm-pool-cudarc --example kernel --features nvrtc,cublas",
            "cargo run --release -p vmm-pool-cudarc --example bench --features nvrtc",
        ],
    ),
    (
        "needs a GPU and PyTorch or CuPy",
        &[
            "cargo run --release -p vmm-share --example dlpack_exporter -- --socket /tmp/tensor.sock",
            "python3 crates/library/python/examples/import_tensor.py /tmp/tensor.sock",
            "python3 benches/torch/compare.py OUT.json",
            "python3 benches/torch/oom.py pluggable",
            "python3 benches/torch/graphs.py pluggable",
            "python3 benches/torch/streams.py pluggable",
            "python3 benches/torch/cupy_check.py python",
            "RECORD=1 python record_traces.py gnn OUTDIR",
        ],
    ),
    (
        "a build alone, of what cargo has built for the tests already",
        &[
            "cargo build --release -p vmm-pool-library",
            "cargo build --release -p vmm-pool-library --no-default-features --features torch",
            "cargo build -p vmm-standin",
            "cargo build --release -p vmm-pool-benches --bins --benches",
        ],
    ),
    (
        "run by crates/library/tests/install.rs, with a library that is built already",
        &[
            "crates/library/install.sh /opt/vmm-pool --release",
            "crates/library/install.sh ~/vmm-pool --release",
        ],
    ),
];

/// Commands that name nothing of this repository.
pub(crate) const FOREIGN: &[(&str, &[&str])] = &[
    (
        "run by crates/library/tests/install.rs, with a prefix of its own",
        &[
            "export PKG_CONFIG_PATH=/opt/vmm-pool/lib/pkgconfig LD_LIBRARY_PATH=/opt/vmm-pool/lib",
            "cc example.c $(pkg-config --cflags --libs vmm_pool) -o example",
            "VMM_POOL_DRIVER=sim ./example",
            "export PYTHONPATH=~/vmm-pool/lib/python",
            "VMM_POOL_DRIVER=sim python3 -c 'import vmm_pool; print(vmm_pool.Pool(devices=[0]).alloc(1 << 20))'",
        ],
    ),
    (
        "crates/cudarc/tests/standin runs cudarc programs so, with a folder of its own",
        &[
            "mkdir -p target/libcuda",
            "ln -sf ../debug/libvmm_standin.so target/libcuda/libcuda.so.1",
            "LD_LIBRARY_PATH=…/target/libcuda cargo run",
        ],
    ),
    (
        "for a machine with a GPU and without cargo",
        &[
            "ls target/release/{growth,threads} target/release/deps/alloc-* | grep -v '[.]d$'",
            "export VMM_BENCH_DRIVER=cuda VMM_BENCH_OUT=bench.jsonl VMM_BENCH_COMMIT=...",
            "./alloc-* --bench && ./growth && ./threads",
        ],
    ),
    (
        "asks the server, as crates/server/tests/http.rs does; tests/tests/docs/main.rs does it where curl is",
        &[
            "curl http://127.0.0.1:8077/v1/completions -H 'Content-Type: application/json' -d '{\"model\": \"tiny\", \"prompt\": \"Hello\", \"max_tokens\": 8}'",
            "curl http://127.0.0.1:8077/metrics",
        ],
    ),
    (
        "needs a compiler with other components",
        &["cargo +nightly miri test -p vmm-heap --lib", "rustup component add llvm-tools"],
    ),
];

/// Rust of the pages that no compiler sees.
pub(crate) const IGNORED_RUST: &[(&str, &str)] =
    &[("docs/integrations/cudarc.md", "a change of cudarc that is proposed there")];
