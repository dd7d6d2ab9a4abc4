//! The real driver: [`Cuda`] puts `libcuda` behind the [`Driver`] contract.
//!
//! It adds nothing to what the driver does: no checks, no caching of answers, no policy. It adds
//! what a C interface leaves out: errors that carry their numbers, the right context on the calling
//! thread, a count of every call, and silence once the driver is gone.
//!
//! | file | what it holds |
//! |---|---|
//! | `load`, `entry`, `ffi` | the library, its entry points, its structs |
//! | `context` | primary contexts, and making one current for a call |
//! | `machine`, `vmm`, `share`, `memory`, `transfer`, `kernel`, `stream`, `graph` | the calls |
//! | `forward` | the contract, spelled once |
//! | `explain` | what the numbers of a refused call mean |
//!
//! **One door**: every call into the library goes through `Cuda::code`, which books it and keeps
//! quiet in a forked child (row D-K1) and while the process exits. The switching of contexts that a
//! call needs is booked too: the ledger counts what the driver was asked, not what was meant.

mod context;
mod entry;
mod explain;
mod ffi;
mod forward;
mod graph;
mod host_function;
#[cfg(feature = "cudarc")]
pub mod interop;
mod kernel;
#[cfg(all(test, feature = "cudarc"))]
mod layout_tests;
mod load;
mod machine;
mod memory;
mod share;
mod stream;
mod transfer;
mod vmm;

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::call::{Call, CallLedger};
use crate::driver::Driver;
use crate::error::{DriverError, DriverResult, ResultCode};
use crate::process;
use crate::types::{ChunkProps, DeviceId};
use context::DeviceSlot;
use entry::EntryPoints;

pub use load::LoadError;

/// `libcuda` of this process.
///
/// Opening it makes no context: those are made one by one, for the devices that calls name, and
/// given back when the last [`Arc`] is dropped.
pub struct Cuda {
    entry: EntryPoints,
    library: String,
    ledger: CallLedger,
    /// One for each device the process sees.
    devices: Vec<DeviceSlot>,
    /// Granularities that were asked for, so that an error can name one without another call.
    granularities: Mutex<Vec<(ChunkProps, u64)>>,
}

impl fmt::Debug for Cuda {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Cuda({}, {} devices)", self.library, self.devices.len())
    }
}

impl Cuda {
    /// Opens the driver: `libcuda.so.1`, else `libcuda.so`, by the loader's search path.
    ///
    /// # Errors
    /// What is missing: library, entry point, device; or why the driver does not start.
    pub fn open() -> Result<Arc<Cuda>, LoadError> {
        Cuda::start(load::load()?)
    }

    /// Opens one library by its path.
    ///
    /// # Errors
    /// As [`Cuda::open`].
    pub fn open_from(path: impl AsRef<Path>) -> Result<Arc<Cuda>, LoadError> {
        Cuda::start(load::load_first(&[&path.as_ref().to_string_lossy()])?)
    }

    fn start(loaded: load::Loaded) -> Result<Arc<Cuda>, LoadError> {
        process::install_hooks();
        let load::Loaded { entry, path } = loaded;
        let mut cuda = Cuda {
            entry,
            library: path,
            ledger: CallLedger::default(),
            devices: Vec::new(),
            granularities: Mutex::default(),
        };
        let devices = cuda.init().map_err(|error| LoadError::starting(&cuda.library, error))?;
        if devices.is_empty() {
            return Err(LoadError::NoDevice { library: cuda.library.clone() });
        }
        cuda.devices = devices;
        tracing::debug!(library = cuda.library, devices = cuda.devices.len(), "CUDA driver opened");
        Ok(Arc::new(cuda))
    }

    fn init(&self) -> DriverResult<Vec<DeviceSlot>> {
        self.door(Call::Init, None, || (self.entry.init)(0))?;
        let mut count = 0;
        self.door(Call::DeviceGetCount, None, || (self.entry.device_get_count)(&mut count))?;
        let ordinals = 0..u32::try_from(count).unwrap_or(0);
        ordinals.map(|ordinal| Ok(DeviceSlot::new(self.device_get(DeviceId(ordinal))?))).collect()
    }

    /// The file that the driver was loaded from.
    pub fn library(&self) -> &str {
        &self.library
    }

    /// The door: makes one call and books it.
    ///
    /// # Errors
    /// Only that the driver is gone; then the library is not called.
    fn code(&self, call: Call, make: impl FnOnce() -> u32) -> DriverResult<ResultCode> {
        // The codes are those that the driver itself would answer.
        if process::is_forked_child() {
            return Err(DriverError::new(call, ResultCode::NOT_INITIALIZED)
                .because("this process is a fork of the one that opened the driver"));
        }
        if process::is_exiting() {
            return Err(
                DriverError::new(call, ResultCode::DEINITIALIZED).because("the process is exiting")
            );
        }
        let watch = self.ledger.stopwatch();
        let code = make();
        self.ledger.book(call, watch.stop());
        Ok(ResultCode(code))
    }

    /// Makes one call; any code but success is an error that names call and device.
    fn door(
        &self,
        call: Call,
        device: Option<DeviceId>,
        make: impl FnOnce() -> u32,
    ) -> DriverResult<()> {
        match self.code(call, make)? {
            ResultCode::SUCCESS => Ok(()),
            code => Err(self.refused(call, device, code)),
        }
    }

    /// Makes one call that asks whether something is over: "not ready" is an answer, not an error.
    fn door_query(
        &self,
        call: Call,
        device: DeviceId,
        make: impl FnOnce() -> u32,
    ) -> DriverResult<bool> {
        match self.code(call, make)? {
            ResultCode::SUCCESS => Ok(true),
            ResultCode::NOT_READY => Ok(false),
            code => Err(self.refused(call, Some(device), code)),
        }
    }
}

/// An optional entry point whose absence is to the caller what a device without the ability is.
fn supported<F: Copy>(call: Call, entry: Option<F>) -> DriverResult<F> {
    entry.ok_or_else(|| {
        DriverError::new(call, ResultCode::NOT_SUPPORTED)
            .because(format_args!("this driver lacks {call}"))
    })
}

/// An optional entry point, or the error that says that this driver has none.
fn have<F: Copy>(call: Call, entry: Option<F>) -> DriverResult<F> {
    entry.ok_or_else(|| {
        DriverError::new(call, ResultCode::NOT_FOUND)
            .because(format_args!("this driver lacks {call}"))
    })
}

impl Drop for Cuda {
    fn drop(&mut self) {
        if self.is_gone() {
            return;
        }
        for (ordinal, slot) in (0..).zip(&self.devices) {
            self.give_back(DeviceId(ordinal), slot);
        }
    }
}
