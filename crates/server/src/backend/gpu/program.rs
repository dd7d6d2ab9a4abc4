//! The kernels of [`kernels.cu`](super), compiled for one shape of a cache and one device.

use std::ffi::{CString, c_void};
use std::sync::Arc;

use cudarc::driver::{CudaContext, DriverError, result, sys};
use cudarc::nvrtc::{CompileOptions, compile_ptx_with_opts};
use vmm_kv::KvShape;
use vmm_sys::object::Stream;

use crate::backend::BackendError;
use crate::pattern::WORD_BYTES;

/// Most words of a head: what a warp holds in registers, 8 a lane.
const HEAD_WORDS_MAX: u64 = 256;

/// A kernel.
#[derive(Clone, Copy, Debug)]
pub(super) enum Kernel {
    WriteTokens,
    Attend,
    ReadWeights,
    FillWeights,
}

/// Their names, in the order of [`Kernel`].
const NAMES: [&str; 4] = ["write_tokens", "attend", "read_weights", "fill_weights"];

/// The kernels, ready to be launched.
#[derive(Debug)]
pub(super) struct Program {
    context: Arc<CudaContext>,
    module: sys::CUmodule,
    functions: [sys::CUfunction; 4],
    /// Words of a head that a lane of a warp has.
    pub(super) lane_words: u32,
}

// SAFETY: handles of a module, which any thread may use with the context current.
unsafe impl Send for Program {}

/// How many threads a kernel gets.
#[derive(Clone, Copy, Debug)]
pub(super) struct Grid {
    pub(super) blocks: (u32, u32, u32),
    pub(super) threads: u32,
}

impl Program {
    /// Compiles them (NVRTC), for heads that are part of a model with `model_heads`.
    pub(super) fn compile(
        context: &Arc<CudaContext>,
        shape: &KvShape,
        model_heads: u32,
    ) -> Result<Program, BackendError> {
        let head_words = shape.head_bytes() / WORD_BYTES;
        if !shape.head_bytes().is_multiple_of(WORD_BYTES) || head_words > HEAD_WORDS_MAX {
            return Err(BackendError::Unsupported {
                what: format!("heads of {} bytes", shape.head_bytes()),
                expected: format!("a multiple of 4, at most {}", HEAD_WORDS_MAX * WORD_BYTES),
            });
        }
        // SAFETY: it only tries to open the library.
        if !unsafe { cudarc::nvrtc::sys::is_culib_present() } {
            return Err(BackendError::Unsupported {
                what: "no libnvrtc".to_owned(),
                expected: "NVRTC of CUDA 12 or later in the library path".to_owned(),
            });
        }
        let (major, minor) = context.compute_capability().map_err(driver)?;
        let define = |name: &str, value: u64| format!("-D{name}={value}");
        let options = vec![
            format!("--gpu-architecture=compute_{major}{minor}"),
            define("LAYERS", shape.layers().into()),
            define("HEADS", shape.kv_heads().into()),
            define("FIRST_HEAD", shape.first_head().into()),
            define("MODEL_HEADS", model_heads.into()),
            define("HEAD_WORDS", head_words),
        ];
        let options = CompileOptions { options, ..CompileOptions::default() };
        let source = include_str!("kernels.cu");
        let ptx = compile_ptx_with_opts(source, options)
            .map_err(|error| BackendError::Kernels { what: error.to_string() })?;
        // At most 8.
        let lane_words = head_words.div_ceil(32) as u32;
        Program::load(context, ptx.as_bytes().unwrap_or_default(), lane_words)
    }

    fn load(
        context: &Arc<CudaContext>,
        ptx: &[u8],
        lane_words: u32,
    ) -> Result<Program, BackendError> {
        context.bind_to_thread().map_err(driver)?;
        if ptx.last() != Some(&0) {
            return Err(BackendError::Kernels { what: "NVRTC gave no text".to_owned() });
        }
        // SAFETY: text that ends with a zero, as was seen.
        let module = unsafe { result::module::load_data(ptx.as_ptr().cast()) }.map_err(driver)?;
        let functions = [std::ptr::null_mut(); 4];
        // From here on its drop unloads the module.
        let mut program = Program { context: context.clone(), module, functions, lane_words };
        for (function, name) in program.functions.iter_mut().zip(NAMES) {
            let name = CString::new(name).unwrap_or_default(); // no zero in any of them
            // SAFETY: the module was loaded just now.
            *function = unsafe { result::module::get_function(module, name) }.map_err(driver)?;
        }
        Ok(program)
    }

    /// Enqueues a kernel.
    ///
    /// # Safety
    /// `arguments` are those that kernels.cu declares for it, and all memory that they name is there
    /// until the stream has done the work.
    pub(super) unsafe fn launch(
        &self,
        kernel: Kernel,
        stream: &Stream,
        grid: Grid,
        arguments: &mut [*mut c_void],
    ) -> Result<(), BackendError> {
        self.context.bind_to_thread().map_err(driver)?;
        let function = self.functions[kernel as usize];
        let threads = (grid.threads, 1, 1);
        // SAFETY: a function of the module that `self` keeps; the rest is the caller's word. The stream
        // is alive, since it is here.
        unsafe { result::launch_kernel(function, grid.blocks, threads, 0, raw(stream), arguments) }
            .map_err(driver)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: loaded by `load`, and unloaded nowhere else. Whoever launched has waited.
        let unloaded = self
            .context
            .bind_to_thread()
            .and_then(|()| unsafe { result::module::unload(self.module) });
        if let Err(error) = unloaded {
            tracing::debug!(%error, "kernels could not be unloaded");
        }
    }
}

/// A stream as cudarc names it.
pub(super) fn raw(stream: &Stream) -> sys::CUstream {
    std::ptr::with_exposed_provenance_mut(stream.handle().0 as usize)
}

pub(super) fn driver(error: DriverError) -> BackendError {
    BackendError::Kernels { what: error.to_string() }
}
