//! The kernels of [`kernels.cu`](super), compiled for one shape of a cache and one device.

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaFunction, DriverError};
use cudarc::nvrtc::{CompileOptions, compile_ptx_with_opts};
use vmm_kv::KvShape;

use crate::backend::BackendError;
use crate::pattern::WORD_BYTES;

/// Most words of a head: what a warp holds in registers, 8 a lane.
const HEAD_WORDS_MAX: u64 = 256;

/// The kernels, ready to be launched.
#[derive(Debug)]
pub(super) struct Program {
    pub(super) write_tokens: CudaFunction,
    pub(super) attend: CudaFunction,
    pub(super) read_weights: CudaFunction,
    pub(super) fill_weights: CudaFunction,
    /// Words of a head that a lane of a warp has.
    pub(super) lane_words: u32,
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
        let module = context.load_module(ptx).map_err(driver)?;
        let function = |name: &str| module.load_function(name).map_err(driver);
        Ok(Program {
            write_tokens: function("write_tokens")?,
            attend: function("attend")?,
            read_weights: function("read_weights")?,
            fill_weights: function("fill_weights")?,
            // At most 8.
            lane_words: head_words.div_ceil(32) as u32,
        })
    }
}

pub(super) fn driver(error: DriverError) -> BackendError {
    BackendError::Kernels { what: error.to_string() }
}
