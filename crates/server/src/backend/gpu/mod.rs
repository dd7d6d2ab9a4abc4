//! A GPU: kernels that write and read a cache as a decode step does, compiled at run time (NVRTC), by
//! way of cudarc. Attention's arithmetic is real, its inputs are patterns: see
//! [`pattern`](crate::pattern).

mod program;
mod upload;

use std::sync::Arc;
use std::time::Instant;

use cudarc::driver::{CudaContext, CudaStream, LaunchConfig, PushKernelArg, result};
use vmm_kv::{KvShape, Part};
use vmm_pool::{Buffer, ElasticBuffer, Lane, Pool};
use vmm_sys::cuda::interop::stream_of;
use vmm_sys::object::Stream;
use vmm_sys::{DeviceId, Driver};

use super::{Backend, BackendError, Batch, Layout, StepDone};
use program::{Program, driver};
use upload::Upload;

/// Tokens that one block of threads attends over. Short parts keep all processors busy.
const PART_TOKENS: u32 = 256;
const ATTEND_THREADS: u32 = 128;
const WRITE_THREADS: u32 = 256;
/// Blocks of threads that stream the weights.
const WEIGHT_BLOCKS: u32 = 2048;
const WEIGHT_THREADS: u32 = 512;

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

// SAFETY: plain numbers, laid out as the kernel's `Layout` is: four of 64 bits, one of 32.
unsafe impl cudarc::driver::DeviceRepr for Strides {}

/// One device, for caches of one shape.
#[derive(Debug)]
pub struct Gpu {
    stream: Arc<CudaStream>,
    /// The same, as the pool knows it.
    own: Stream,
    lane: Lane,
    program: Program,
    shape: KvShape,
    /// Descriptions, checks and what attention gives: scratch memory, longer as needed.
    scratch: Option<Buffer>,
}

impl Gpu {
    /// Compiles the kernels for `shape`, of a model with `model_heads`, and makes a stream for the
    /// cache and the steps: see [`Gpu::stream`].
    ///
    /// # Errors
    /// No NVRTC; heads that the kernels cannot take; the driver's, the pool's.
    pub fn new(
        pool: &Pool,
        device: DeviceId,
        shape: &KvShape,
        model_heads: u32,
    ) -> Result<Gpu, BackendError> {
        let context = CudaContext::new(device.0 as usize).map_err(driver)?;
        let program = Program::compile(&context, shape, model_heads)?;
        let stream = context.new_stream().map_err(driver)?;
        let (device, handle) = stream_of(&stream)?;
        let pool_driver: &Arc<dyn Driver> = pool.driver();
        // SAFETY: the handle lives as long as the stream, which the object keeps.
        let own = unsafe {
            Stream::from_raw(pool_driver, device, handle, Some(Box::new(stream.clone())))?
        };
        let lane = pool.lane(&own)?;
        Ok(Gpu { stream, own, lane, program, shape: *shape, scratch: None })
    }

    /// The stream that caches of this backend belong to.
    pub fn stream(&self) -> &Stream {
        &self.own
    }

    /// Fills a model's weights with a pattern of its own, and gives the sum of their words, which
    /// each step finds again.
    ///
    /// # Errors
    /// The driver's, the pool's.
    pub fn load_weights(
        &mut self,
        weights: &ElasticBuffer,
        salt: u32,
    ) -> Result<u32, BackendError> {
        let using = weights.use_on(&self.own)?;
        let sum_at = self.scratch(4)?;
        let (address, count) = (weights.address(), weights.committed_bytes() / 16);
        let config = grid((WEIGHT_BLOCKS, 1, 1), WEIGHT_THREADS);
        let mut builder = self.stream.launch_builder(&self.program.fill_weights);
        builder.arg(&address).arg(&count).arg(&salt);
        // SAFETY: the weights are committed from their address on, and the guard keeps them there.
        unsafe { builder.launch(config) }.map_err(driver)?;
        self.clear(sum_at, 4)?;
        self.read_weights(weights, sum_at)?;
        drop(using);
        let mut sum = [0u32];
        self.fetch(&mut sum, sum_at)?;
        Ok(sum[0])
    }

    fn read_weights(&self, weights: &ElasticBuffer, sum_at: u64) -> Result<(), BackendError> {
        let (address, count) = (weights.address(), weights.committed_bytes() / 16);
        let mut builder = self.stream.launch_builder(&self.program.read_weights);
        builder.arg(&address).arg(&count).arg(&sum_at);
        let config = grid((WEIGHT_BLOCKS, 1, 1), WEIGHT_THREADS);
        // SAFETY: committed from their address on; the caller holds a guard; `sum_at` is scratch.
        unsafe { builder.launch(config) }.map_err(driver)?;
        Ok(())
    }

    /// Scratch memory of at least so many bytes.
    fn scratch(&mut self, bytes: u64) -> Result<u64, BackendError> {
        match &self.scratch {
            Some(scratch) if scratch.bytes() >= bytes => Ok(scratch.address()),
            _ => {
                let scratch = self.lane.alloc(bytes.next_power_of_two())?;
                let address = scratch.address();
                // The old one goes behind the work of the stream.
                self.scratch = Some(scratch);
                Ok(address)
            }
        }
    }

    fn clear(&self, address: u64, bytes: u64) -> Result<(), BackendError> {
        // SAFETY: scratch memory of this backend, used on this stream alone.
        unsafe { self.own.fill(address, bytes, 0) }?;
        Ok(())
    }

    /// Waits for the stream, and gives the words at an address.
    fn fetch(&self, words: &mut [u32], address: u64) -> Result<(), BackendError> {
        self.stream.context().bind_to_thread().map_err(driver)?;
        // SAFETY: scratch memory that is long enough; `words` stay until the stream has been waited for.
        unsafe { result::memcpy_dtoh_async(words, address, self.stream.cu_stream()) }
            .map_err(driver)?;
        Ok(self.own.synchronize()?)
    }

    fn strides(layout: &Layout<'_>) -> Strides {
        match layout {
            Layout::Contiguous(layout) => Strides {
                token_stride: layout.token_stride_bytes(),
                layer_stride: 2 * layout.layer_offset(0, Part::Value),
                value_offset: layout.layer_offset(0, Part::Value),
                block_bytes: 0,
                block_tokens: 0,
            },
            Layout::Paged { layout, .. } => Strides {
                token_stride: layout.token_stride_bytes(),
                layer_stride: 2 * layout.layer_offset(0, Part::Value),
                value_offset: layout.layer_offset(0, Part::Value),
                block_bytes: layout.block_bytes(),
                block_tokens: layout.block_tokens(),
            },
        }
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
        if batch.stream.id() != self.own.id() {
            return Err(BackendError::Unsupported {
                what: format!("a cache of {:?}", batch.stream),
                expected: format!("one of {:?}, the backend's stream", self.own),
            });
        }
        Ok(())
    }

    /// Enqueues a step. `at` is where its upload lies, `checks_at` where the checks and, behind
    /// them, the weights' sum go; what attention gives goes behind these.
    fn enqueue(
        &self,
        batch: &Batch<'_>,
        upload: &Upload,
        at: u64,
        checks_at: u64,
        outputs_at: u64,
    ) -> Result<(), BackendError> {
        let count = batch.sequences.len() as u32;
        let strides = Gpu::strides(&batch.layout);
        // SAFETY: scratch memory as long as the upload, which lives until the stream is waited for.
        unsafe { result::memcpy_htod_async(at, &upload.bytes, self.stream.cu_stream()) }
            .map_err(driver)?;
        self.clear(checks_at, 4 * (u64::from(count) + 1))?;
        if upload.new_tokens > 0 {
            let [sequences, positions, tokens] =
                [upload.sequences_at, upload.positions_at, upload.tokens_at].map(|it| at + it);
            let mut builder = self.stream.launch_builder(&self.program.write_tokens);
            builder.arg(&at).arg(&sequences).arg(&positions).arg(&tokens).arg(&strides);
            // SAFETY: the batch's caller sees to it that memory for all tokens is there.
            unsafe { builder.launch(grid((upload.new_tokens, 1, 1), WRITE_THREADS)) }
                .map_err(driver)?;
        }
        if let Some(weights) = batch.weights {
            self.read_weights(weights, checks_at + 4 * u64::from(count))?;
        }
        let parts = upload.longest.div_ceil(PART_TOKENS);
        let config = grid((self.shape.kv_heads(), count, parts), ATTEND_THREADS);
        let lengths = at + upload.lengths_at;
        for layer in 0..self.shape.layers() {
            let mut builder = self.stream.launch_builder(&self.program.attend);
            builder.arg(&at).arg(&lengths).arg(&PART_TOKENS).arg(&layer).arg(&strides);
            builder.arg(&checks_at).arg(&outputs_at);
            // SAFETY: as above; the outputs are as long as `outputs_bytes` says.
            unsafe { builder.launch(config) }.map_err(driver)?;
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
    fn step(&mut self, batch: &Batch<'_>) -> Result<StepDone, BackendError> {
        self.check(batch)?;
        let begun = Instant::now();
        let count = batch.sequences.len();
        if count == 0 {
            let weights_sum = None;
            return Ok(StepDone {
                checks: Vec::new(),
                step_us: 0.0,
                is_modelled: false,
                weights_sum,
            });
        }
        let mut upload = Upload::of(batch)?;
        let checks_at = (upload.bytes.len() as u64).next_multiple_of(256);
        let outputs_at = (checks_at + 4 * (count as u64 + 1)).next_multiple_of(256);
        let bytes = outputs_at + self.outputs_bytes(count as u64, upload.longest);
        let at = self.scratch(bytes)?;
        upload.settle(batch, at);
        self.stream.context().bind_to_thread().map_err(driver)?;
        let enqueued = self.enqueue(batch, &upload, at, at + checks_at, at + outputs_at);
        let mut checks = vec![0; count + 1];
        // What was enqueued reads the upload: it is waited for, whatever else happened.
        let fetched = self.fetch(&mut checks, at + checks_at);
        enqueued.and(fetched)?;
        let sum = checks.pop();
        let step_us = begun.elapsed().as_secs_f64() * 1e6;
        let weights_sum = batch.weights.and(sum);
        Ok(StepDone { checks, step_us, is_modelled: false, weights_sum })
    }
}

fn grid(grid_dim: (u32, u32, u32), threads: u32) -> LaunchConfig {
    LaunchConfig { grid_dim, block_dim: (threads, 1, 1), shared_mem_bytes: 0 }
}
