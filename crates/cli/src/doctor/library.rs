//! The driver library: which file, which version, or why there is none.

use std::sync::Arc;

use serde_json::Value;
use vmm_sys::cuda::{Cuda, LoadError};
use vmm_sys::{Call, Driver};

use super::finding::Finding;
use super::remedy;

const ID: &str = "library";

/// Newer drivers lack nothing that a pool needs.
const ENOUGH_VERSION: u32 = 12_000;

/// The library that was opened.
pub fn opened(cuda: &Cuda) -> Finding {
    let missing: Vec<_> = cuda.missing_calls().into_iter().map(Call::name).collect();
    let library = cuda.library();
    let finding = if missing.is_empty() {
        Finding::ok(ID, ID, format!("{library} was opened, and has every call"))
    } else {
        let text = format!("{library} was opened, and lacks {}", missing.join(", "));
        Finding::warn(ID, ID, text).advise(remedy::UPDATE)
    };
    finding.with("library", library).with("missing_calls", missing)
}

/// The simulated device has none.
pub fn simulated() -> Finding {
    Finding::ok(ID, ID, "none: this is the simulated device").with("library", Value::Null)
}

/// Why there is no driver.
pub fn no_driver(error: &LoadError) -> Finding {
    let (id, advice) = match error {
        LoadError::NoLibrary { .. } => (
            ID,
            "install the NVIDIA driver, or in a container mount it (--gpus all); \
             --driver sim examines a simulated machine",
        ),
        LoadError::StubLibrary { .. } => {
            (ID, "let the loader find the driver's own libcuda.so.1 first")
        }
        LoadError::TooOld { .. } | LoadError::MissingSymbol { .. } => (ID, remedy::UPDATE),
        LoadError::Init { source, .. } => (ID, remedy::of(source)),
        LoadError::NoDevice { .. } => ("devices", remedy::NO_DEVICE),
        _ => (ID, "report it, with this output"),
    };
    Finding::fail(id, id, error.to_string()).advise(advice)
}

/// `cuDriverGetVersion`.
pub(super) fn version(driver: &Arc<dyn Driver>) -> Finding {
    let (id, what) = ("driver_version", "driver version");
    match driver.driver_version() {
        Ok(version) => {
            let (major, minor) = (version / 1000, version % 1000 / 10);
            let text = format!("{} driver for CUDA {major}.{minor}", driver.kind());
            let finding = if version >= ENOUGH_VERSION {
                Finding::ok(id, what, text)
            } else {
                let text = format!("{text}: older than 12.0, and lacks calls");
                Finding::warn(id, what, text).advise(remedy::UPDATE)
            };
            finding.with("version", version)
        }
        Err(error) => Finding::warn(id, what, format!("unknown: {error}")).refused_by(&error),
    }
}
