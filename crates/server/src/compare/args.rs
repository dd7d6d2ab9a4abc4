//! The settings of a comparison.

use serde::Serialize;
use vmm_pool::text;
use vmm_pool_cli::driver_choice::{ChoiceError, DriverRequest};

use crate::backend::sim::Bytes;
use crate::cache::Form;
use crate::engine::EngineError;
use crate::lengths::BadLengths;
use crate::model::{ModelError, ModelSpec};
use crate::serve::ServeError;

/// Whether memory comes when it is needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Growth {
    /// It does.
    On,
    /// All of it is mapped before the first request. The fixed form is so in any case; the contiguous
    /// one cannot be.
    Off,
}

/// Settings of a comparison.
#[derive(Clone, Debug, clap::Args)]
pub struct CompareArgs {
    /// Which driver: the GPU's, the simulated device's, or the GPU's if there is one.
    #[arg(long, value_enum, default_value = "auto")]
    pub driver: DriverRequest,
    /// The model: tiny, qwen-0.5b, llama-8b, or a JSON file.
    #[arg(long, default_value = "llama-8b")]
    pub model: String,
    /// The longest context, if not the model's.
    #[arg(long, value_name = "N", default_value_t = 8192)]
    pub max_tokens: u32,
    /// Memory of the device, weights included.
    #[arg(long, value_name = "BYTES", value_parser = text::bytes, default_value = "32GiB")]
    pub memory: u64,
    /// Which forms. Left out: all.
    #[arg(long = "form", value_enum)]
    pub forms: Vec<Form>,
    /// Whether memory grows. Left out: with growth, then without.
    #[arg(long, value_enum)]
    pub growth: Option<Growth>,
    /// What a second device lends, in runs beside those without.
    #[arg(long, value_name = "BYTES", value_parser = text::bytes, default_value = "0")]
    pub lend: u64,
    /// Memory of the host for parked sequences.
    #[arg(long, value_name = "BYTES", value_parser = text::bytes, default_value = "0")]
    pub host_memory: u64,
    /// Requests in all.
    #[arg(long, value_name = "N", default_value_t = 400)]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    pub requests: u64,
    /// Requests that are with the engine at a time.
    #[arg(long, value_name = "N", default_value_t = 256)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub concurrency: u32,
    /// Median length of prompts, in tokens.
    #[arg(long, value_name = "MEDIAN", default_value_t = 512)]
    pub prompt_tokens: u32,
    /// Median length of answers, in tokens.
    #[arg(long, value_name = "MEDIAN", default_value_t = 128)]
    pub output_tokens: u32,
    /// Deviation of the logarithm of both lengths.
    #[arg(long, default_value_t = 0.8)]
    pub sigma: f64,
    /// Tells prompts and lengths.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// What the simulated device does with bytes of KV caches.
    #[arg(long, value_enum, default_value = "modelled")]
    pub bytes: Bytes,
    /// One JSON object a line in place of the table.
    #[arg(long)]
    pub json: bool,
}

impl CompareArgs {
    /// The model, with the context of the comparison.
    ///
    /// # Errors
    /// As [`ModelSpec::parse`].
    pub fn spec(&self) -> Result<ModelSpec, ModelError> {
        let mut spec = ModelSpec::parse(&self.model)?;
        spec.max_tokens = spec.max_tokens.min(self.max_tokens.max(2));
        Ok(spec)
    }

    /// The runs: form, growth, what is lent.
    pub fn runs(&self) -> Vec<(Form, Growth, u64)> {
        let forms = match self.forms.as_slice() {
            [] => vec![Form::Fixed, Form::Contiguous, Form::Paged],
            forms => forms.to_vec(),
        };
        let (grows, stays) = (self.growth != Some(Growth::Off), self.growth != Some(Growth::On));
        let mut runs = Vec::new();
        for form in forms {
            if form == Form::Fixed {
                runs.push((form, Growth::Off, 0));
                continue;
            }
            if grows {
                runs.push((form, Growth::On, 0));
            }
            if grows && self.lend > 0 {
                runs.push((form, Growth::On, self.lend));
            }
            if stays && form == Form::Paged {
                runs.push((form, Growth::Off, 0));
            }
        }
        runs
    }
}

/// A comparison that could not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CompareError {
    /// The driver.
    #[error(transparent)]
    Choice(#[from] ChoiceError),
    /// The driver's answer.
    #[error(transparent)]
    Driver(#[from] vmm_sys::DriverError),
    /// The pool.
    #[error(transparent)]
    Serve(#[from] ServeError),
    /// The engine.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The cache.
    #[error(transparent)]
    Kv(#[from] vmm_kv::KvError),
    /// The model.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The lengths.
    #[error(transparent)]
    Lengths(#[from] BadLengths),
    /// The histogram.
    #[error("the histogram of step times: {0}")]
    Histogram(#[from] hdrhistogram::CreationError),
    /// An invariant of the pool does not hold.
    #[error("the pool is not whole: {0}")]
    Broken(String),
}
