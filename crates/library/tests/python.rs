//! The Python module's own tests, on the simulated device: crates/library/python/tests.

#![allow(clippy::unwrap_used, reason = "a failure ends the test")]

mod support;

use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use vmm_pool::Pool;
use vmm_share::{Address, Exporter, Offer, Offered};
use vmm_sys::DeviceId;
use vmm_sys::sim::Sim;

/// Fewer would mean that they were not found.
const TESTS_MIN: u32 = 48;

/// The number behind a word, as in `Ran 45 tests` and `OK (skipped=3)`.
fn number_behind(text: &str, word: &str) -> Option<u32> {
    let rest = text.rsplit_once(word)?.1;
    rest.split(|it: char| !it.is_ascii_digit()).next()?.parse().ok()
}

/// What the tests import: this process offers it. The device of the simulated machine has the same
/// identity in every process.
fn offers(address: Address) -> (Exporter, Vec<Offer>) {
    const BYTES: u64 = 2 << 20;
    let pool = Pool::builder(Sim::builder().build()).build().unwrap();
    let exporter = Exporter::builder().bind(address).unwrap();
    let offer = |(name, bytes, offered)| {
        let builder = pool.elastic(DeviceId(0)).capacity_bytes(bytes).chunk_bytes(BYTES);
        let buffer = Arc::new(builder.exportable(true).build().unwrap());
        buffer.grow_to(bytes).unwrap();
        exporter.offer(name, &buffer, offered).unwrap()
    };
    let offered =
        [("tensor", 2 * BYTES, Offered::ReadWrite), ("frozen", BYTES, Offered::Read)].map(offer);
    (exporter, offered.into())
}

#[test]
fn the_module_passes_its_own_tests() {
    let python = Path::new(env!("CARGO_MANIFEST_DIR")).join("python");
    let address = format!("@vmm-pool-python-{}", std::process::id());
    let _offers = offers(address.parse().unwrap());
    let mut command = Command::new("python3");
    command
        .args(["-B", "-m", "unittest", "discover", "--start-directory"])
        .arg(python.join("tests"))
        .env("VMM_POOL_LIBRARY", support::library())
        .env("VMM_POOL_DRIVER", "sim")
        .env("VMM_POOL_TEST_OFFERS", address);
    let Some(output) = support::run("the Python module", &mut command) else { return };
    let words = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{words}\n{}", String::from_utf8_lossy(&output.stdout));
    let ran = number_behind(&words, "Ran ").unwrap();
    assert!(ran >= TESTS_MIN, "{ran} tests: {words}");
    let skipped = number_behind(&words, "skipped=").unwrap_or(0);
    // Not `eprintln`: the test runner would swallow the line of a test that passes.
    let mut terminal = std::io::stderr();
    writeln!(terminal, "the Python module: {ran} tests, of which {skipped} skipped").unwrap();
}
