//! The Python module's own tests, on the simulated device: crates/library/python/tests.

#![allow(clippy::unwrap_used, reason = "a failure ends the test")]

use std::io::Write;
use std::path::Path;
use std::process::Command;

/// Fewer would mean that they were not found.
const TESTS_MIN: u32 = 40;

/// Not `eprintln`: the test runner would swallow the line of a test that passes.
fn tell(line: &str) {
    writeln!(std::io::stderr(), "{line}").unwrap();
}

/// The number behind a word, as in `Ran 45 tests` and `OK (skipped=3)`.
fn number_behind(text: &str, word: &str) -> Option<u32> {
    let rest = text.rsplit_once(word)?.1;
    rest.split(|it: char| !it.is_ascii_digit()).next()?.parse().ok()
}

#[test]
fn the_module_passes_its_own_tests() {
    let python = Path::new(env!("CARGO_MANIFEST_DIR")).join("python");
    let library = std::env::current_exe().unwrap().with_file_name("libvmm_pool.so");
    assert!(library.exists(), "{}", library.display());
    let output = Command::new("python3")
        .args(["-B", "-m", "unittest", "discover", "--start-directory"])
        .arg(python.join("tests"))
        .env("VMM_POOL_LIBRARY", &library)
        .env("VMM_POOL_DRIVER", "sim")
        .output();
    let output = match output {
        Ok(output) => output,
        Err(error) => return tell(&format!("skipped (1): the Python module: no python3: {error}")),
    };
    let words = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{words}\n{}", String::from_utf8_lossy(&output.stdout));
    let ran = number_behind(&words, "Ran ").unwrap();
    assert!(ran >= TESTS_MIN, "{ran} tests: {words}");
    let skipped = number_behind(&words, "skipped=").unwrap_or(0);
    tell(&format!("the Python module: {ran} tests, of which {skipped} skipped"));
}
