//! Opens the CUDA driver and says what it found, or what is missing.
//!
//! ```text
//! open_driver [LIBRARY]
//! ```
//!
//! Exit code 0 if there is a driver, 2 if not. Nothing here can panic, so it works as well in
//! programs built with `panic = "abort"`.

use std::process::ExitCode;

use vmm_sys::cuda::Cuda;
use vmm_sys::{DeviceId, Driver, DriverResult};

fn describe(cuda: &Cuda) -> DriverResult<()> {
    println!("{}: driver version {}", cuda.library(), cuda.driver_version()?);
    for ordinal in 0..cuda.device_count()? {
        let device = DeviceId(ordinal);
        let gib = cuda.device_total_bytes(device)? >> 30;
        println!("{device}: {}, {gib} GiB", cuda.device_name(device)?);
        match cuda.device_uuid(device) {
            Ok(uuid) => println!("{device}: {uuid}"),
            Err(error) => println!("{device}: {error}"),
        }
    }
    for call in cuda.missing_calls() {
        println!("too old for {call}");
    }
    Ok(())
}

fn main() -> ExitCode {
    let panics = if cfg!(panic = "abort") { "abort" } else { "unwind" };
    println!("panics {panics}");
    let opened = match std::env::args_os().nth(1) {
        Some(path) => Cuda::open_from(path),
        None => Cuda::open(),
    };
    let cuda = match opened {
        Ok(cuda) => cuda,
        Err(error) => {
            eprintln!("no driver: {error}");
            return ExitCode::from(2);
        }
    };
    match describe(&cuda) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("the driver does not answer: {error}");
            ExitCode::from(2)
        }
    }
}
