//! What executes a step: a GPU, or the simulated device.
//!
//! A step writes the keys and values of new tokens and reads those of whole sequences. What is
//! written and what the reading gives is laid down in [`pattern`](crate::pattern), so any backend
//! can be checked by the host.

#[allow(unsafe_code, reason = "kernels take plain addresses")]
pub mod gpu;
mod runs;
pub mod sim;

use std::sync::Arc;

use vmm_kv::{BlockLayout, SequenceLayout};
use vmm_pool::{ElasticBuffer, Pool};
use vmm_sys::object::Stream;

use crate::model::ModelSpec;
use crate::pattern::Pattern;
use gpu::Gpu;
use sim::{Bytes, SimBackend};

/// Executes steps, one at a time.
pub trait Backend: Send {
    /// Writes the new tokens of each sequence, then reads each sequence from its first token to its
    /// last, and waits for the result. The caller holds a use of the batch's buffer on its stream,
    /// and memory for all tokens is there.
    ///
    /// # Errors
    /// The work could not be done: what the memory of the batch's sequences holds is not known.
    fn step(&mut self, batch: &Batch<'_>) -> Result<StepDone, BackendError>;

    /// Whether times are a model's: then memory that comes and goes takes none of its own.
    fn is_modelled(&self) -> bool;

    /// Brings a model's weights into their memory, which holds anything. What is in it then is found
    /// again by each step that streams them.
    ///
    /// # Errors
    /// The work could not be done.
    fn load_weights(&mut self, _weights: &ElasticBuffer) -> Result<(), BackendError> {
        Ok(())
    }
}

/// What a step is to do.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a> {
    /// The cache's memory.
    pub buffer: &'a ElasticBuffer,
    /// The cache's stream: all work is enqueued here.
    pub stream: &'a Stream,
    /// Where tokens lie.
    pub layout: Layout<'a>,
    /// The sequences, new tokens or not.
    pub sequences: &'a [SequenceStep<'a>],
    /// What the step reads, by distance: what a model of its time needs.
    pub read: ReadBytes,
    /// The model's weights, which each step streams; `None` leaves that out.
    pub weights: Option<&'a ElasticBuffer>,
}

/// Where the tokens of sequences lie.
#[derive(Clone, Copy, Debug)]
pub enum Layout<'a> {
    /// Each sequence at addresses in a row; [`SequenceStep::place`] is the address of its start.
    Contiguous(&'a SequenceLayout),
    /// In blocks; [`SequenceStep::place`] is a row of the table.
    Paged {
        /// Within a block.
        layout: &'a BlockLayout,
        /// The address of block 0.
        address: u64,
        /// Block numbers, row after row. Entries beyond a sequence's last block mean nothing.
        table: &'a [i32],
        /// Entries of a row.
        row_entries: usize,
    },
}

/// One sequence of a step.
#[derive(Clone, Copy, Debug)]
pub struct SequenceStep<'a> {
    /// Where it lies: see [`Layout`].
    pub place: u64,
    /// The tokens whose keys and values it has at the end of the step. Never empty.
    pub tokens: &'a [u32],
    /// The first that this step writes: those before were written by earlier steps.
    pub new_from: usize,
    /// The check that follows from `tokens`. A backend that reads all words has no use for it; the
    /// simulated device takes it for what it does not read.
    pub expected: u32,
    /// The simulated device reads all of it, however long: it is the sequence's last step.
    pub whole: bool,
}

/// Bytes by where they lie.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReadBytes {
    /// On the device itself.
    pub home: u64,
    /// On other devices.
    pub neighbour: u64,
    /// On the host.
    pub host: u64,
}

/// What a step gave.
#[derive(Clone, Debug, PartialEq)]
pub struct StepDone {
    /// The check of each sequence, in the order of the batch.
    pub checks: Vec<u32>,
    /// How long the step took, in microseconds, measured on the device or modelled.
    pub step_us: f64,
    /// The time is a model's, and has not passed yet.
    pub is_modelled: bool,
}

/// A step that could not be done.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BackendError {
    /// The pool's answer.
    #[error(transparent)]
    Pool(#[from] vmm_pool::Error),
    /// The driver's answer.
    #[error(transparent)]
    Driver(#[from] vmm_sys::DriverError),
    /// Kernels could not be compiled, loaded or launched.
    #[error("{what}")]
    Kernels {
        /// What the compiler or the driver says.
        what: String,
    },
    /// The weights are not what was loaded.
    #[error("the weights add up to {found:x?}: expected {expected:x?}, as they were loaded")]
    Weights {
        /// What a step read.
        found: Option<u32>,
        /// What was loaded, if anything was.
        expected: Option<u32>,
    },
    /// The backend cannot take such a batch.
    #[error("{what}: expected {expected}")]
    Unsupported {
        /// What was found.
        what: String,
        /// What would be accepted.
        expected: String,
    },
}

/// How the backend of an engine is made: kernels on a GPU, or the simulated device, which does with
/// bytes what is said.
pub fn maker(
    pool: &Pool,
    is_simulated: bool,
    bytes: Bytes,
) -> impl Fn(&ModelSpec, &Arc<Pattern>, &Stream) -> Result<Box<dyn Backend>, BackendError> {
    let pool = pool.clone();
    move |spec, pattern, stream| match is_simulated {
        true => Ok(Box::new(SimBackend::new(pattern.clone(), spec.weights_bytes, bytes))),
        false => {
            let shape = spec.shape().map_err(|error| BackendError::Unsupported {
                what: error.to_string(),
                expected: "a model whose layout exists".to_owned(),
            })?;
            Ok(Box::new(Gpu::new(&pool, stream, &shape, spec.kv_heads)?))
        }
    }
}
