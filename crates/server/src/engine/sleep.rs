//! The weights, and how a model makes room for others: sleep and wake.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use vmm_pool::{Contents, ElasticBuffer, Error, Pool, Use};
use vmm_sys::DeviceId;
use vmm_sys::object::Stream;

use super::{Engine, EngineError};
use crate::model::ModelSpec;

/// What becomes of weights that sleep.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum SleepMode {
    /// They are dropped, and loaded again.
    Drop,
    /// They are kept in memory of the host.
    Host,
}

/// The node of the host that weights go to.
const HOST_NODE: u32 = 0;

/// How fast weights that were dropped come from a disk, in microseconds a byte: 5 GB/s, a round
/// figure for one NVMe drive.
const LOAD_US_PER_BYTE: f64 = 1.0 / 5e3;
/// How fast they come from the host: 55 GB/s, measured on an H200.
const COPY_US_PER_BYTE: f64 = 1.0 / 55e3;
/// A weights buffer is never in use when the engine puts it to sleep.
const NO_PATIENCE: Duration = Duration::ZERO;
/// Chunks of this many bytes, or of the granularity if that is longer: weights come and go whole.
const CHUNK_BYTES: u64 = 32 << 20;

/// The memory of a model's weights: nothing is in it, but it is there.
#[derive(Debug)]
pub struct Weights {
    buffer: ElasticBuffer,
    bytes: u64,
}

impl Weights {
    /// Commits the memory.
    ///
    /// # Errors
    /// Out of memory; the pool's.
    pub fn build(pool: &Pool, device: DeviceId, spec: &ModelSpec) -> Result<Weights, Error> {
        let bytes = spec.weights_bytes;
        let mut builder = pool.elastic(device).capacity_bytes(bytes).tag(&spec.name);
        if bytes >= CHUNK_BYTES {
            builder = builder.chunk_bytes(CHUNK_BYTES);
        }
        let buffer = builder.build()?;
        buffer.grow_to(bytes)?;
        Ok(Weights { buffer, bytes })
    }

    /// Whether they sleep.
    pub fn is_asleep(&self) -> bool {
        self.buffer.asleep().is_some()
    }

    /// Whether they sleep, and lie on the host meanwhile.
    fn are_kept(&self) -> bool {
        matches!(self.buffer.asleep(), Some(Contents::Kept { .. }))
    }

    /// What a step streams, if there are any.
    pub(super) fn to_stream(&self) -> Option<&ElasticBuffer> {
        (self.bytes > 0).then_some(&self.buffer)
    }

    /// Work of the stream is going to use them.
    pub(super) fn use_on(&self, stream: &Stream) -> Result<Use, Error> {
        self.buffer.use_on(stream)
    }

    /// Their memory on the device, in bytes.
    pub fn device_bytes(&self) -> u64 {
        if self.is_asleep() { 0 } else { self.buffer.committed_bytes() }
    }
}

impl Engine {
    /// Whether the model sleeps.
    pub fn is_asleep(&self) -> bool {
        self.weights.is_asleep()
    }

    /// Gives the memory of the weights back, and what the cache has. Returns the bytes. Does nothing
    /// to a model that sleeps.
    ///
    /// # Errors
    /// [`EngineError::Busy`] with requests; no room on the host for the weights. The model is awake
    /// then.
    pub fn sleep(&mut self) -> Result<u64, EngineError> {
        if self.is_asleep() {
            return Ok(0);
        }
        if self.requests() > 0 {
            let model = self.spec.name.clone();
            return Err(EngineError::Busy { model, requests: self.requests() });
        }
        let contents = match self.settings.sleep_mode {
            SleepMode::Drop => Contents::Dropped,
            SleepMode::Host => Contents::Kept { node: HOST_NODE },
        };
        let bytes = self.weights.buffer.sleep(contents, NO_PATIENCE)?;
        let idle_bytes = self.cache.sleep()?;
        if self.settings.sleep_mode == SleepMode::Host {
            self.pass_modelled(COPY_US_PER_BYTE);
        }
        self.counts.sleeps += 1;
        Ok(bytes + idle_bytes)
    }

    /// Takes the memory again, which takes the time of loading. Does nothing to a model that is
    /// awake.
    ///
    /// # Errors
    /// Out of memory: it sleeps on.
    pub fn wake(&mut self) -> Result<(), EngineError> {
        if !self.is_asleep() {
            return Ok(());
        }
        // By what they fell asleep with: a waking that failed has lost what was kept.
        let are_kept = self.weights.are_kept();
        self.weights.buffer.wake()?;
        if let Err(error) = self.fill_woken(are_kept) {
            // As before, but that contents are lost: the next waking loads them.
            self.weights.buffer.sleep(Contents::Dropped, NO_PATIENCE)?;
            self.cache.sleep()?;
            return Err(error);
        }
        self.counts.wakes += 1;
        Ok(())
    }

    /// What is in the memory of a model that wakes.
    fn fill_woken(&mut self, are_kept: bool) -> Result<(), EngineError> {
        self.cache.wake()?;
        let us_per_byte = if are_kept {
            COPY_US_PER_BYTE
        } else {
            self.load_weights()?;
            LOAD_US_PER_BYTE
        };
        self.pass_modelled(us_per_byte);
        Ok(())
    }

    /// The time that the weights take where nothing really comes or goes.
    fn pass_modelled(&self, us_per_byte: f64) {
        if self.backend.is_modelled() {
            self.clock.pass(self.weights.bytes as f64 * us_per_byte);
        }
    }

    /// Brings the weights into their memory.
    pub(super) fn load_weights(&mut self) -> Result<(), EngineError> {
        match self.weights.to_stream() {
            Some(weights) => Ok(self.backend.load_weights(weights)?),
            None => Ok(()),
        }
    }

    /// Before a step: the weights have to be there.
    pub(super) fn wake_up(&mut self) -> Result<(), EngineError> {
        if self.is_asleep() { self.wake() } else { Ok(()) }
    }
}
