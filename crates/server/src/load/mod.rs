//! The load program: so many requests, so many at a time, every answer compared with what it has to
//! be.

mod client;
mod report;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

pub use client::{Client, ClientError, Ended};
pub use report::LoadReport;

use crate::http::{CompletionRequest, Prompt};
use crate::lengths::{BadLengths, Lengths};
use crate::model::{ModelError, ModelSpec, VOCABULARY};
use crate::pattern::Pattern;

/// What a load consists of.
#[derive(Clone, Debug)]
pub struct LoadPlan {
    /// Where the server is.
    pub address: SocketAddr,
    /// Which model; the first that the server lists if none.
    pub model: Option<String>,
    /// Requests in all.
    pub requests: u64,
    /// Requests at a time, a connection each.
    pub concurrency: usize,
    /// Median length of prompts.
    pub prompt_tokens: u32,
    /// Median length of answers.
    pub output_tokens: u32,
    /// Deviation of the logarithm of both.
    pub sigma: f64,
    /// Tells prompts and lengths.
    pub seed: u64,
    /// After this nothing new is asked, and what runs is broken off.
    pub timeout: Duration,
}

/// A load that could not begin.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The server is elsewhere.
    #[error("{0} is not this machine: expected a loopback address")]
    NotLoopback(SocketAddr),
    /// Somebody listens there, and does not answer.
    #[error("no answer from {address} within {timeout:?}")]
    Silent {
        /// Where.
        address: SocketAddr,
        /// How long it was waited for.
        timeout: Duration,
    },
    /// The server cannot be reached.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// The server has no such model.
    #[error("the server has no model {wanted:?}: expected one of {known}")]
    NoModel {
        /// Asked for.
        wanted: String,
        /// What there are.
        known: String,
    },
    /// The server's model makes no sense.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The lengths.
    #[error(transparent)]
    Lengths(#[from] BadLengths),
}

/// What the connections share.
struct Load {
    plan: LoadPlan,
    spec: ModelSpec,
    pattern: Pattern,
    lengths: Lengths,
    begun: Instant,
    next: AtomicU64,
    report: Mutex<LoadReport>,
}

/// Runs a load; `on_end` is called when a request has ended.
///
/// # Errors
/// The server cannot be reached, or has no such model.
pub async fn run(
    plan: LoadPlan,
    on_end: impl Fn() + Clone + Send + 'static,
) -> Result<LoadReport, LoadError> {
    if !plan.address.ip().is_loopback() {
        return Err(LoadError::NotLoopback(plan.address));
    }
    let (address, timeout) = (plan.address, plan.timeout);
    let models =
        tokio::time::timeout(timeout, async { Client::connect(address).await?.models().await });
    let models = models.await.map_err(|_| LoadError::Silent { address, timeout })??;
    let found = match &plan.model {
        Some(wanted) => models.iter().find(|model| model.id == *wanted),
        None => models.first(),
    };
    let Some(found) = found else {
        let known: Vec<&str> = models.iter().map(|model| model.id.as_str()).collect();
        let wanted = plan.model.clone().unwrap_or_default();
        return Err(LoadError::NoModel { wanted, known: known.join(", ") });
    };
    let spec = found.spec.clone();
    let (prompt, output) = (plan.prompt_tokens, plan.output_tokens);
    let lengths = Lengths::new(plan.seed, prompt, output, plan.sigma, spec.max_tokens)?;
    let (pattern, begun) = (spec.pattern()?, Instant::now());
    let report = Mutex::new(LoadReport::default());
    let connections = plan.concurrency.clamp(1, 4096);
    let next = AtomicU64::new(0);
    let load = Arc::new(Load { plan, spec, pattern, lengths, begun, next, report });
    let workers: Vec<_> =
        (0..connections).map(|_| tokio::spawn(work(load.clone(), on_end.clone()))).collect();
    for worker in workers {
        if let Err(error) = worker.await {
            load.report.lock().fail(error.to_string());
        }
    }
    let mut report = std::mem::take(&mut *load.report.lock());
    report.elapsed = load.begun.elapsed();
    Ok(report)
}

/// One connection, until no request is left.
async fn work(load: Arc<Load>, on_end: impl Fn()) {
    let mut client = None;
    loop {
        let number = load.next.fetch_add(1, Ordering::Relaxed);
        let left = load.plan.timeout.checked_sub(load.begun.elapsed());
        let Some(left) = left.filter(|_| number < load.plan.requests) else { return };
        load.report.lock().asked += 1;
        match tokio::time::timeout(left, load.ask(&mut client, number)).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                client = None;
                load.report.lock().fail(error.to_string());
            }
            Err(_) => {
                client = None;
                load.report.lock().fail("it took too long".to_owned());
            }
        }
        on_end();
    }
}

impl Load {
    /// Makes a request and compares its answer.
    async fn ask(&self, client: &mut Option<Client>, number: u64) -> Result<(), ClientError> {
        let wanted = self.lengths.nth(number);
        let request = CompletionRequest {
            model: self.spec.name.clone(),
            prompt: Prompt::Tokens(wanted.prompt.clone()),
            max_tokens: wanted.max_tokens,
            stream: true,
        };
        let client = match client {
            Some(client) => client,
            None => client.insert(Client::connect(self.plan.address).await?),
        };
        let (mut tokens, mut times) = (Vec::new(), vec![Instant::now()]);
        let ended = client.stream(&request, |token| {
            tokens.push(token);
            times.push(Instant::now());
        });
        let ended = ended.await?;
        let right = self.pattern.answer(&wanted.prompt, tokens.len(), VOCABULARY);
        let is_whole = tokens.len() == wanted.max_tokens as usize || ended != Ended::Done;
        let mut report = self.report.lock();
        report.tokens += tokens.len() as u64;
        report.time(&times);
        if tokens != right || !is_whole {
            report.wrong += 1;
        }
        match ended {
            Ended::Done => report.done += 1,
            Ended::Refused(..) => report.refused += 1,
            Ended::Failed(reason) => report.fail(reason),
        }
        Ok(())
    }
}
