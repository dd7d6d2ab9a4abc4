//! A GPU: kernels that write and read a cache as a decode step does, compiled at run time (NVRTC), by
//! way of cudarc. Attention's arithmetic is real, its inputs are patterns: see
//! [`pattern`](crate::pattern).

mod program;
mod upload;

use std::ffi::c_void;
use std::sync::Arc;
use std::time::Instant;

use cudarc::driver::{CudaContext, result};
use vmm_kv::{KvShape, Part};
use vmm_pool::{Buffer, ElasticBuffer, Lane, Pool};
use vmm_sys::object::Stream;

use super::{Backend, BackendError, Batch, Layout, StepDone};
use program::{Grid, Kernel, Program, driver, raw};
use upload::Upload;

/// Tokens that one block of threads attends over. Short parts keep all processors busy.
const PART_TOKENS: u32 = 256;
const ATTEND_THREADS: u32 = 128;
const WRITE_THREADS: u32 = 256;
/// Scratch memory that is there from the start: for 256 sequences of 8192 tokens, 8 heads.
const SCRATCH_BYTES: u64 = 64 << 20;
/// How the weights are streamed.
const WEIGHT_GRID: Grid = Grid { blocks: (2048, 1, 1), threads: 512 };

/// The strides that kernels.cu takes, as it declares them.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Strides {
    token_stride: u64,
    layer_stride: u64,
    value_offset: u64,
    block_bytes: u64,
    block_tokens: u32,
}

/// Where a step's scratch memory has what, as addresses.
#[derive(Clone, Copy, Debug)]
struct Scratch {
    upload: u64,
    /// The checks; behind them the weights' sum.
    checks: u64,
    /// What attention gives.
    outputs: u64,
}

/// One device, for caches of one shape on one stream.
#[derive(Debug)]
pub struct Gpu {
    context: Arc<CudaContext>,
    stream: Stream,
    lane: Lane,
    program: Program,
    shape: KvShape,
    /// Longer if a step needs more.
    scratch: Buffer,
    /// What the words of the loaded weights add up to.
    weights_sum: Option<u32>,
}

impl Gpu {
    /// Compiles the kernels for `shape`, of a model with `model_heads`, for work on `stream`.
    ///
    /// # Errors
    /// No NVRTC; heads that the kernels cannot take; the driver's, the pool's.
    pub fn new(
        pool: &Pool,
        stream: &Stream,
        shape: &KvShape,
        model_heads: u32,
    ) -> Result<Gpu, BackendError> {
        let context = CudaContext::new(stream.device().0 as usize).map_err(driver)?;
        let program = Program::compile(&context, shape, model_heads)?;
        let lane = pool.lane(stream)?;
        let (stream, shape) = (stream.clone(), *shape);
        let scratch = lane.alloc(SCRATCH_BYTES)?;
        let gpu = Gpu { context, stream, lane, program, shape, scratch, weights_sum: None };
        // The first copy and launches make the driver take what it keeps.
        gpu.clear(gpu.scratch.address(), SCRATCH_BYTES)?;
        gpu.stream.synchronize()?;
        Ok(gpu)
    }

    /// Enqueues a kernel: see [`Program::launch`].
    ///
    /// # Safety
    /// As there.
    unsafe fn launch(
        &self,
        kernel: Kernel,
        grid: Grid,
        arguments: &mut [*mut c_void],
    ) -> Result<(), BackendError> {
        // SAFETY: the caller's word.
        unsafe { self.program.launch(kernel, &self.stream, grid, arguments) }
    }

    fn read_weights(&self, weights: &ElasticBuffer, sum_at: u64) -> Result<(), BackendError> {
        let (address, quads) = (weights.address(), weights.committed_bytes() / 16);
        let mut arguments = [argument(&address), argument(&quads), argument(&sum_at)];
        // SAFETY: committed from their address on, and the caller holds a guard; the sum is scratch.
        unsafe { self.launch(Kernel::ReadWeights, WEIGHT_GRID, &mut arguments) }
    }

    /// Scratch memory of at least so many bytes.
    fn scratch(&mut self, bytes: u64) -> Result<u64, BackendError> {
        if self.scratch.bytes() < bytes {
            // The old one goes behind the work of the stream.
            self.scratch = self.lane.alloc(bytes.next_power_of_two())?;
        }
        Ok(self.scratch.address())
    }

    fn clear(&self, address: u64, bytes: u64) -> Result<(), BackendError> {
        // SAFETY: scratch memory of this backend, used on this stream alone.
        unsafe { self.stream.fill(address, bytes, 0) }?;
        Ok(())
    }

    /// Waits for the stream, and gives the words at an address.
    fn fetch(&self, words: &mut [u32], address: u64) -> Result<(), BackendError> {
        self.context.bind_to_thread().map_err(driver)?;
        // SAFETY: scratch memory that is long enough; `words` stay until the stream was waited for.
        let copied = unsafe { result::memcpy_dtoh_async(words, address, raw(&self.stream)) };
        // Whatever came of the copy: earlier work of the step is waited for too.
        self.stream.synchronize()?;
        copied.map_err(driver)
    }

    fn check(&self, batch: &Batch<'_>) -> Result<(), BackendError> {
        let shape = match &batch.layout {
            Layout::Contiguous(layout) => layout.shape(),
            Layout::Paged { layout, .. } => layout.shape(),
        };
        if *shape != self.shape {
            return Err(BackendError::Unsupported {
                what: format!("a cache of {shape:?}"),
                expected: format!("{:?}, which the kernels were compiled for", self.shape),
            });
        }
        if batch.stream.id() != self.stream.id() {
            return Err(BackendError::Unsupported {
                what: format!("a cache of {:?}", batch.stream),
                expected: format!("one of {:?}", self.stream),
            });
        }
        Ok(())
    }

    /// Enqueues a step.
    fn enqueue(&self, batch: &Batch<'_>, upload: &Upload, at: Scratch) -> Result<(), BackendError> {
        let count = batch.sequences.len() as u32;
        let strides = strides(&batch.layout);
        let places = at.upload;
        self.context.bind_to_thread().map_err(driver)?;
        // SAFETY: scratch as long as the upload, which lives until the stream has been waited for.
        unsafe { result::memcpy_htod_async(places, &upload.bytes, raw(&self.stream)) }
            .map_err(driver)?;
        self.clear(at.checks, 4 * (u64::from(count) + 1))?;
        if upload.new_tokens > 0 {
            let [sequences, positions, tokens] =
                [upload.sequences_at, upload.positions_at, upload.tokens_at].map(|it| places + it);
            let mut arguments = [
                argument(&places),
                argument(&sequences),
                argument(&positions),
                argument(&tokens),
                argument(&strides),
            ];
            let grid = Grid { blocks: (upload.new_tokens, 1, 1), threads: WRITE_THREADS };
            // SAFETY: the batch's caller sees to it that memory for all tokens is there.
            unsafe { self.launch(Kernel::WriteTokens, grid, &mut arguments) }?;
        }
        if let Some(weights) = batch.weights {
            self.read_weights(weights, at.checks + 4 * u64::from(count))?;
        }
        let parts = upload.longest.div_ceil(PART_TOKENS);
        let blocks = (self.shape.kv_heads(), count, parts);
        let lengths = places + upload.lengths_at;
        for layer in 0..self.shape.layers() {
            let mut arguments = [
                argument(&places),
                argument(&lengths),
                argument(&PART_TOKENS),
                argument(&layer),
                argument(&strides),
                argument(&at.checks),
                argument(&at.outputs),
            ];
            let grid = Grid { blocks, threads: ATTEND_THREADS };
            // SAFETY: as above; the outputs are as long as `outputs_bytes` says.
            unsafe { self.launch(Kernel::Attend, grid, &mut arguments) }?;
        }
        Ok(())
    }

    /// What attention gives for each part, in bytes.
    fn outputs_bytes(&self, sequences: u64, longest: u32) -> u64 {
        let parts = u64::from(longest.div_ceil(PART_TOKENS));
        let heads = u64::from(self.shape.kv_heads());
        sequences * parts * heads * 32 * u64::from(self.program.lane_words) * 2 * 4
    }
}

impl Backend for Gpu {
    fn is_modelled(&self) -> bool {
        false
    }

    fn step(&mut self, batch: &Batch<'_>) -> Result<StepDone, BackendError> {
        self.check(batch)?;
        let begun = Instant::now();
        let count = batch.sequences.len();
        if count == 0 {
            return Ok(StepDone { checks: Vec::new(), step_us: 0.0, is_modelled: false });
        }
        let mut upload = Upload::of(batch)?;
        let checks_at = (upload.bytes.len() as u64).next_multiple_of(256);
        let outputs_at = (checks_at + 4 * (count as u64 + 1)).next_multiple_of(256);
        let bytes = outputs_at + self.outputs_bytes(count as u64, upload.longest);
        let start = self.scratch(bytes)?;
        upload.settle(batch, start);
        let at = Scratch { upload: start, checks: start + checks_at, outputs: start + outputs_at };
        let enqueued = self.enqueue(batch, &upload, at);
        let mut checks = vec![0; count + 1];
        // What was enqueued reads the upload: it is waited for, whatever else happened.
        let fetched = self.fetch(&mut checks, at.checks);
        enqueued.and(fetched)?;
        let sum = checks.pop();
        if batch.weights.is_some() && sum != self.weights_sum {
            return Err(BackendError::Weights { found: sum, expected: self.weights_sum });
        }
        let step_us = begun.elapsed().as_secs_f64() * 1e6;
        Ok(StepDone { checks, step_us, is_modelled: false })
    }

    fn load_weights(&mut self, weights: &ElasticBuffer) -> Result<(), BackendError> {
        let using = weights.use_on(&self.stream)?;
        let sum_at = self.scratch(4)?;
        let (address, quads) = (weights.address(), weights.committed_bytes() / 16);
        // Each buffer's words are its own.
        let salt = (address >> 21) as u32;
        let mut arguments = [argument(&address), argument(&quads), argument(&salt)];
        // SAFETY: the weights are committed from their address on, and the guard keeps them there.
        unsafe { self.launch(Kernel::FillWeights, WEIGHT_GRID, &mut arguments) }?;
        self.clear(sum_at, 4)?;
        self.read_weights(weights, sum_at)?;
        drop(using);
        let mut sum = [0u32];
        self.fetch(&mut sum, sum_at)?;
        self.weights_sum = Some(sum[0]);
        Ok(())
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        // Kernels may still run if a step failed half-way, and they are about to be unloaded.
        if let Err(error) = self.stream.synchronize() {
            tracing::debug!(%error, "the stream could not be waited for");
        }
    }
}

fn strides(layout: &Layout<'_>) -> Strides {
    let (token_stride, value_offset, block_bytes, block_tokens) = match layout {
        Layout::Contiguous(layout) => {
            (layout.token_stride_bytes(), layout.layer_offset(0, Part::Value), 0, 0)
        }
        Layout::Paged { layout, .. } => (
            layout.token_stride_bytes(),
            layout.layer_offset(0, Part::Value),
            layout.block_bytes(),
            layout.block_tokens(),
        ),
    };
    Strides {
        token_stride,
        layer_stride: 2 * value_offset,
        value_offset,
        block_bytes,
        block_tokens,
    }
}

/// An argument of a kernel: the launch copies what it points to.
fn argument<T>(value: &T) -> *mut c_void {
    std::ptr::from_ref(value).cast_mut().cast()
}
