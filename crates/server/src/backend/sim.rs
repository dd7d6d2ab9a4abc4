//! The simulated device: bytes through the buffer, or none; time from a model.

use std::iter;
use std::ops::Range;
use std::sync::Arc;

use vmm_pool::ElasticBuffer;

use super::runs::{Run, runs};
use super::{Backend, BackendError, Batch, ReadBytes, SequenceStep, StepDone};
use crate::pattern::{Pattern, WORD_BYTES, token_base};

/// What is done with bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Bytes {
    /// New tokens are written. Each step reads the new tokens and some others of a long sequence, all
    /// of a short one, and all of any in its last step.
    Checked,
    /// None is written or read: the host computes the check.
    Modelled,
}

/// Up to how many tokens a sequence is read whole in each step.
const WHOLE_TOKENS: usize = 128;
/// How many earlier tokens of a longer one are read in each step.
const SAMPLE_TOKENS: usize = 4;

/// How long a step takes, in microseconds a byte and a step.
///
/// A decode step is bound by memory: the weights are read once, and each sequence's keys and values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TimeModel {
    /// What a step costs in any case: launches, and the host between steps.
    pub launch_us: f64,
    /// Memory of the device itself.
    pub home_us_per_byte: f64,
    /// Memory of another device, over NVLink.
    pub neighbour_us_per_byte: f64,
    /// Memory of the host.
    pub host_us_per_byte: f64,
}

impl TimeModel {
    /// An H200: kernels read 4 TB/s at home, 0.37 TB/s of a neighbour, 0.05 TB/s of the host
    /// (measured with the probe kernels of `vmm-sys`; the launch cost is a round guess).
    pub const H200: TimeModel = TimeModel {
        launch_us: 300.0,
        home_us_per_byte: 1.0 / 4.0e6,
        neighbour_us_per_byte: 1.0 / 0.37e6,
        host_us_per_byte: 1.0 / 0.05e6,
    };

    /// The time of a step that reads so much, the weights beside.
    pub fn step_us(&self, weights_bytes: u64, read: ReadBytes) -> f64 {
        self.launch_us
            + (weights_bytes + read.home) as f64 * self.home_us_per_byte
            + read.neighbour as f64 * self.neighbour_us_per_byte
            + read.host as f64 * self.host_us_per_byte
    }
}

/// The simulated device.
#[derive(Debug)]
pub struct SimBackend {
    pattern: Arc<Pattern>,
    weights_bytes: u64,
    bytes: Bytes,
    time: TimeModel,
    /// The bytes of one run, kept from one to the next.
    scratch: Vec<u8>,
    /// Where the next sample is taken: moves through all positions.
    sample: usize,
}

impl SimBackend {
    /// A device that runs a model of these weights.
    pub fn new(pattern: Arc<Pattern>, weights_bytes: u64, bytes: Bytes) -> SimBackend {
        let time = TimeModel::H200;
        SimBackend { pattern, weights_bytes, bytes, time, scratch: Vec::new(), sample: 0 }
    }

    /// Writes the new tokens of a sequence.
    fn write(&mut self, batch: &Batch<'_>, step: &SequenceStep<'_>) -> Result<(), BackendError> {
        for run in runs(batch, step.place, step.new_from..step.tokens.len())? {
            let bytes = run_bytes(&self.pattern, &run);
            self.scratch.resize(bytes, 0);
            let tokens = step.tokens.get(run.tokens.clone()).unwrap_or(&[]);
            let bases = run.bases(&self.pattern);
            let mut out = self.scratch.chunks_exact_mut(WORD_BYTES as usize);
            for (position, id) in run.tokens.clone().zip(tokens) {
                let base = token_base(*id, position as u32);
                for (word, slot) in bases.iter().zip(&mut out) {
                    slot.copy_from_slice(&base.wrapping_add(*word).to_le_bytes());
                }
            }
            batch.buffer.write(run.offset, &self.scratch)?;
        }
        Ok(())
    }

    /// Whether these tokens' words are what was written.
    fn is_right(
        &mut self,
        buffer: &ElasticBuffer,
        step: &SequenceStep<'_>,
        run: &Run,
    ) -> Result<bool, BackendError> {
        let bytes = run_bytes(&self.pattern, run);
        self.scratch.resize(bytes, 0);
        buffer.read(run.offset, &mut self.scratch)?;
        let tokens = step.tokens.get(run.tokens.clone()).unwrap_or(&[]);
        let bases = run.bases(&self.pattern);
        let mut words = self.scratch.chunks_exact(WORD_BYTES as usize);
        Ok(run.tokens.clone().zip(tokens).all(|(position, id)| {
            let base = token_base(*id, position as u32);
            let expected = bases.iter().map(|word| base.wrapping_add(*word).to_le_bytes());
            expected.zip(&mut words).all(|(expected, found)| expected == found)
        }))
    }

    /// Reads a sequence, or a sample of it. What is wrong in it changes the check.
    fn read(&mut self, batch: &Batch<'_>, step: &SequenceStep<'_>) -> Result<u32, BackendError> {
        let mut wrong = 0u32;
        for tokens in self.looked_at(step) {
            for run in runs(batch, step.place, tokens)? {
                let is_right = self.is_right(batch.buffer, step, &run)?;
                wrong = wrong.wrapping_add(u32::from(!is_right));
            }
        }
        Ok(step.expected.wrapping_add(wrong))
    }

    /// Which tokens of a sequence a step reads.
    fn looked_at(&mut self, step: &SequenceStep<'_>) -> Vec<Range<usize>> {
        let count = step.tokens.len();
        if step.whole || count <= WHOLE_TOKENS {
            return iter::once(0..count).collect();
        }
        let mut looked_at: Vec<_> = iter::once(step.new_from..count).collect();
        for _ in 0..SAMPLE_TOKENS {
            // A prime step: samples of successive steps come to every position.
            self.sample = self.sample.wrapping_add(7919);
            let token = self.sample % count;
            looked_at.push(token..token + 1);
        }
        looked_at
    }
}

impl Backend for SimBackend {
    fn is_modelled(&self) -> bool {
        true
    }

    fn step(&mut self, batch: &Batch<'_>) -> Result<StepDone, BackendError> {
        let mut checks = Vec::with_capacity(batch.sequences.len());
        if self.bytes == Bytes::Checked {
            // The host reads and writes: copies that the cache has enqueued come first.
            batch.stream.synchronize()?;
            for step in batch.sequences {
                self.write(batch, step)?;
            }
        }
        for step in batch.sequences {
            checks.push(match self.bytes {
                Bytes::Checked => self.read(batch, step)?,
                Bytes::Modelled => step.expected,
            });
        }
        let step_us = self.time.step_us(self.weights_bytes, batch.read);
        Ok(StepDone { checks, step_us, is_modelled: true })
    }
}

fn run_bytes(pattern: &Pattern, run: &Run) -> usize {
    run.bases(pattern).len() * run.tokens.len() * WORD_BYTES as usize
}
