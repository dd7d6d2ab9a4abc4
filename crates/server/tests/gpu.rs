//! Steps on a GPU: every word that is written is read again, in each layout, and a wrong one is
//! noticed. Says so and passes where there is no GPU, or no NVRTC.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::sync::Arc;

use vmm_kv::{BlockLayout, Dtype, KvShape, Order, SequenceLayout};
use vmm_pool::{ElasticBuffer, Pool};
use vmm_server::backend::gpu::Gpu;
use vmm_server::backend::{Backend, BackendError, Batch, Layout, ReadBytes, SequenceStep};
use vmm_server::pattern::Pattern;
use vmm_sys::cuda::Cuda;
use vmm_sys::object::Stream;
use vmm_sys::{DeviceId, Driver};

const DEVICE: DeviceId = DeviceId(0);
const MODEL_HEADS: u32 = 8;

fn open(shape: &KvShape) -> Option<(Pool, Stream, Gpu)> {
    let driver: Arc<dyn Driver> = match Cuda::open() {
        Ok(driver) if driver.device_count().is_ok_and(|count| count > 0) => driver,
        Ok(_) => return skip("no device"),
        Err(error) => return skip(error),
    };
    let pool = Pool::builder(driver).build().unwrap();
    let stream = Stream::create(pool.driver(), DEVICE).unwrap();
    match Gpu::new(&pool, &stream, shape, MODEL_HEADS) {
        Ok(gpu) => Some((pool, stream, gpu)),
        Err(error @ BackendError::Unsupported { .. }) => skip(error),
        Err(error) => panic!("{error}"),
    }
}

fn skip<T>(why: impl std::fmt::Display) -> Option<T> {
    println!("skipped: {why}");
    None
}

/// A sequence whose last `new` tokens a step writes.
fn step(place: u64, tokens: &[u32], new: usize) -> SequenceStep<'_> {
    let new_from = tokens.len() - new;
    SequenceStep { place, tokens, new_from, expected: 0, whole: false }
}

fn tokens(count: usize, seed: u32) -> Vec<u32> {
    (0..count as u32).map(|i| i.wrapping_mul(2_654_435_761) ^ seed).collect()
}

/// A cache's memory, and a byte of its first sequence.
struct Ground<'a> {
    stream: Stream,
    buffer: ElasticBuffer,
    weights: ElasticBuffer,
    layout: Layout<'a>,
    places: [u64; 3],
    pattern: Pattern,
    spoilt_at: u64,
}

impl Ground<'_> {
    /// The checks that a step gives.
    fn step(
        &self,
        gpu: &mut Gpu,
        sequences: &[SequenceStep<'_>],
    ) -> Result<Vec<u32>, BackendError> {
        let _using = self.buffer.use_on(&self.stream)?;
        let done = gpu.step(&Batch {
            buffer: &self.buffer,
            stream: &self.stream,
            layout: self.layout,
            sequences,
            read: ReadBytes::default(),
            weights: Some(&self.weights),
        });
        Ok(done?.checks)
    }

    /// A prefill and a decode step; then weights and a word of the cache are spoilt.
    fn check(&self, gpu: &mut Gpu) -> Result<(), BackendError> {
        gpu.load_weights(&self.weights)?;
        let all = [tokens(701, 1), tokens(1, 2), tokens(256, 3)];
        let expected = |steps: &[SequenceStep<'_>]| -> Vec<u32> {
            steps.iter().map(|it| self.pattern.check(it.tokens)).collect()
        };
        let parts = |lengths: [usize; 3], new: [usize; 3]| -> Vec<SequenceStep<'_>> {
            (0..3).map(|i| step(self.places[i], &all[i][..lengths[i]], new[i])).collect()
        };
        let prefill = parts([700, 1, 255], [700, 1, 255]);
        assert_eq!(self.step(gpu, &prefill)?, expected(&prefill), "prefill");
        let decode = parts([701, 1, 256], [1, 0, 1]);
        assert_eq!(self.step(gpu, &decode)?, expected(&decode), "decode");

        self.weights.write(1 << 20, &[0xaa])?;
        let read = parts([701, 1, 256], [0; 3]);
        let refused = self.step(gpu, &read);
        assert!(matches!(refused, Err(BackendError::Weights { .. })), "{refused:?}");
        gpu.load_weights(&self.weights)?;
        self.buffer.write(self.spoilt_at, &[0xaa])?;
        let (found, expected) = (self.step(gpu, &read)?, expected(&read));
        assert_ne!(found[0], expected[0], "a wrong byte was not noticed");
        assert_eq!(found[1..], expected[1..]);
        Ok(())
    }
}

fn committed(pool: &Pool, bytes: u64) -> Result<ElasticBuffer, vmm_pool::Error> {
    let buffer = pool.elastic(DEVICE).capacity_bytes(bytes).build()?;
    buffer.grow_to(bytes)?;
    Ok(buffer)
}

fn contiguous(order: Order) {
    // Half of a model's heads, each of 24 words: no multiple of a warp.
    let shape = KvShape::new(3, MODEL_HEADS, 48, Dtype::F16).unwrap().shard(1, 2).unwrap();
    let Some((pool, stream, mut gpu)) = open(&shape) else { return };
    let pattern = Pattern::new(&shape, MODEL_HEADS).unwrap();
    let layout = SequenceLayout::aligned(shape, 1000, order, 2 << 20).unwrap();
    let span = layout.span_bytes();
    let buffer = committed(&pool, 3 * span).unwrap();
    let weights = committed(&pool, 64 << 20).unwrap();
    let places = [0, span, 2 * span].map(|offset| buffer.address() + offset);
    let spoilt_at = layout.offset(2, vmm_kv::Part::Value, 300, 3);
    let layout = Layout::Contiguous(&layout);
    let ground = Ground { stream, buffer, weights, layout, places, pattern, spoilt_at };
    ground.check(&mut gpu).unwrap();
}

#[test]
fn steps_on_sequences_that_lie_token_by_token() {
    contiguous(Order::TokenMajor);
}

#[test]
fn steps_on_sequences_that_lie_layer_by_layer() {
    contiguous(Order::LayerMajor);
}

#[test]
fn steps_on_blocks_in_any_order() {
    let shape = KvShape::new(4, MODEL_HEADS, 128, Dtype::Bf16).unwrap();
    let Some((pool, stream, mut gpu)) = open(&shape) else { return };
    let pattern = Pattern::new(&shape, MODEL_HEADS).unwrap();
    let layout = BlockLayout::new(shape, 16).unwrap();
    let (rows, row_entries) = (3, 50);
    let blocks = rows * row_entries;
    let buffer = committed(&pool, layout.blocks_bytes(blocks as u64).unwrap()).unwrap();
    let weights = committed(&pool, 64 << 20).unwrap();
    // 7 and 150 have no common divisor: every block once.
    let table: Vec<i32> = (0..blocks).map(|i| (i * 7 % blocks) as i32).collect();
    let (block, in_block) = layout.locate(300);
    let spoilt_at = layout.bytes_of(table[block as usize] as u32).start
        + layout.offset_in_block(1, vmm_kv::Part::Key, in_block, 5);
    let address = buffer.address();
    let layout = Layout::Paged { layout: &layout, address, table: &table, row_entries };
    let places = [0, 1, 2];
    let ground = Ground { stream, buffer, weights, layout, places, pattern, spoilt_at };
    ground.check(&mut gpu).unwrap();
}
