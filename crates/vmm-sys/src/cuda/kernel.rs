//! The probe kernels: PTX text that the driver compiles for its GPU at the first launch.

use std::ffi::CStr;

use super::{Cuda, have};
use crate::call::Call;
use crate::error::{DriverError, DriverResult, ResultCode};
use crate::types::{CaptureMode, DeviceId, ProbeKernel, StreamHandle};

const PTX_BYTES: &[u8] = concat!(include_str!("probe.ptx"), "\0").as_bytes();
const PTX: &CStr = match CStr::from_bytes_with_nul(PTX_BYTES) {
    Ok(text) => text,
    Err(_) => panic!("the PTX text holds a nul byte"), // at compile time
};

/// The entry names of the PTX text, in the order of [`Probes::functions`].
const NAMES: [&CStr; 5] = [c"fill_words", c"copy_words", c"check_words", c"spin", c"copy_quads"];

const THREADS: u32 = 256;
/// A few blocks for each multiprocessor of any GPU; the loops stride over the rest.
const BLOCKS_MAX: u64 = 1024;
/// What [`ProbeKernel::Spin`] promises: a mistaken argument must not hang a GPU.
const BUSY_US_MAX: u64 = 2_000_000;

/// The loaded module of one device.
#[derive(Debug, Clone, Copy)]
pub(super) struct Probes {
    module: u64,
    functions: [u64; NAMES.len()],
}

/// A launch, spelled out: which function, how many blocks and threads, and its arguments.
struct Launch {
    function: usize,
    blocks: u32,
    threads: u32,
    /// One for each parameter, in order. The driver reads as many bytes of each as its PTX type
    /// has: the low ones, on the little-endian hosts that CUDA runs on.
    arguments: [u64; 4],
}

impl From<&ProbeKernel> for Launch {
    fn from(kernel: &ProbeKernel) -> Launch {
        let over = |words: u64| {
            let blocks = words.div_ceil(u64::from(THREADS)).clamp(1, BLOCKS_MAX);
            u32::try_from(blocks).unwrap_or(1)
        };
        match *kernel {
            ProbeKernel::FillWords { dst, words, value } => Launch {
                function: 0,
                blocks: over(words),
                threads: THREADS,
                arguments: [dst, words, value.into(), 0],
            },
            ProbeKernel::CopyWords { dst, src, words }
                if (dst | src).is_multiple_of(16) && words.is_multiple_of(4) =>
            {
                Launch {
                    function: 4,
                    blocks: over(words / 4),
                    threads: THREADS,
                    arguments: [dst, src, words / 4, 0],
                }
            }
            ProbeKernel::CopyWords { dst, src, words } => Launch {
                function: 1,
                blocks: over(words),
                threads: THREADS,
                arguments: [dst, src, words, 0],
            },
            ProbeKernel::CheckWords { src, words, value, errors } => Launch {
                function: 2,
                blocks: over(words),
                threads: THREADS,
                arguments: [src, words, value.into(), errors],
            },
            ProbeKernel::Spin { busy_us, done } => Launch {
                function: 3,
                blocks: 1,
                threads: 1,
                arguments: [busy_us.min(BUSY_US_MAX) * 1000, done, 0, 0],
            },
        }
    }
}

impl Cuda {
    /// # Safety
    /// As [`crate::Driver::launch`].
    pub(super) unsafe fn launch(
        &self,
        device: DeviceId,
        kernel: &ProbeKernel,
        stream: StreamHandle,
    ) -> DriverResult<()> {
        let launch_kernel = have(Call::LaunchKernel, self.entry.launch_kernel)?;
        let _scope = self.enter(device)?;
        let probes = self.probes_of(device)?;
        let mut launch = Launch::from(kernel);
        let function = probes.functions[launch.function];
        let (blocks, threads) = (launch.blocks, launch.threads);
        let arguments = launch.arguments.each_mut().map(|place| (place as *mut u64).cast());
        self.door(Call::LaunchKernel, Some(device), || {
            // SAFETY: the function belongs to a module that lives as long as `self`; there is a
            // place for each of its parameters, read before the call returns; the caller vouches
            // for the stream and the device addresses.
            unsafe {
                launch_kernel(
                    function,
                    blocks,
                    1,
                    1,
                    threads,
                    1,
                    1,
                    0,
                    stream.0,
                    arguments.as_ptr(),
                    std::ptr::null_mut(),
                )
            }
        })
    }

    /// The loaded kernels of a device; its context is current.
    fn probes_of(&self, device: DeviceId) -> DriverResult<Probes> {
        let slot = self.slot(device).ok_or_else(|| {
            self.refused(Call::LaunchKernel, Some(device), ResultCode::INVALID_DEVICE)
        })?;
        let mut loaded = slot.probes.lock();
        if let Some(probes) = *loaded {
            return Ok(probes);
        }
        // Loading allocates, which breaks captures unless the thread is in the relaxed mode.
        let mode = self.exchange_capture_mode(CaptureMode::Relaxed);
        let probes = self.load_probes(device);
        if let Ok(mode) = mode {
            self.exchange_capture_mode(mode)?;
        }
        let probes = probes?;
        *loaded = Some(probes);
        Ok(probes)
    }

    fn load_probes(&self, device: DeviceId) -> DriverResult<Probes> {
        let load = have(Call::ModuleLoadData, self.entry.module_load_data)?;
        let get = have(Call::ModuleGetFunction, self.entry.module_get_function)?;
        let mut probes = Probes { module: 0, functions: [0; NAMES.len()] };
        self.door(Call::ModuleLoadData, Some(device), || {
            // SAFETY: the image is nul-terminated PTX.
            unsafe { load(&mut probes.module, PTX.as_ptr().cast()) }
        })
        .map_err(|error| error.because("the driver could not compile the probe kernels"))?;
        // All of them now: the driver loads code lazily, at this call, and a first load while a
        // kernel spins may wait for that kernel.
        for (function, name) in probes.functions.iter_mut().zip(NAMES) {
            let result = self.door(Call::ModuleGetFunction, Some(device), || {
                // SAFETY: the module was loaded just now; the name is nul-terminated.
                unsafe { get(function, probes.module, name.as_ptr().cast()) }
            });
            if let Err(error) = result {
                self.unload_probes(device, probes);
                return Err(named(error, name));
            }
        }
        Ok(probes)
    }

    /// Unloads the kernels, as far as the driver can.
    pub(super) fn unload_probes(&self, device: DeviceId, probes: Probes) {
        let Some(unload) = self.entry.module_unload else { return };
        let result = self.enter(device).and_then(|_scope| {
            self.door(Call::ModuleUnload, Some(device), || {
                // SAFETY: the module is live, and the caller took it out of its slot, so nothing
                // launches from it any more.
                unsafe { unload(probes.module) }
            })
        });
        if let Err(error) = result {
            tracing::debug!(%error, "the probe kernels could not be unloaded");
        }
    }
}

fn named(error: DriverError, name: &CStr) -> DriverError {
    error.because(format_args!("kernel {}", name.to_string_lossy()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kernel_is_an_entry_of_the_text() {
        let text = PTX.to_str().unwrap();
        for name in NAMES {
            let entry = format!(".entry {}(", name.to_str().unwrap());
            assert_eq!(text.matches(&entry).count(), 1, "{entry}");
        }
    }

    #[test]
    fn launches_are_small_and_spins_are_capped() {
        let fill = |words| Launch::from(&ProbeKernel::FillWords { dst: 0, words, value: 0 }).blocks;
        assert_eq!([fill(0), fill(1), fill(256), fill(257)], [1, 1, 1, 2]);
        assert_eq!(fill(u64::MAX), 1024);
        let copy = |dst, src, words| Launch::from(&ProbeKernel::CopyWords { dst, src, words });
        for (dst, src, words) in [(16, 32, 6), (8, 32, 8), (16, 4, 8)] {
            assert_eq!(copy(dst, src, words).function, 1, "no whole quads");
        }
        let quads = copy(16, 32, 8);
        assert_eq!((quads.function, quads.arguments), (4, [16, 32, 2, 0]));
        let spin = |busy_us| Launch::from(&ProbeKernel::Spin { busy_us, done: 0 }).arguments[0];
        assert_eq!([spin(5), spin(u64::MAX)], [5_000, 2_000_000_000]);
    }
}
