//! The load program: docs/SERVER.md.

use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};
use vmm_server::load::{LoadPlan, LoadReport, run};

/// Asks a server on this machine so many times, and compares every answer with what it has to be.
#[derive(Debug, Parser)]
#[command(name = "vmm-load", version)]
struct Args {
    /// Where the server listens: a loopback address.
    #[arg(long, default_value = "http://127.0.0.1:8077", value_parser = parse_url)]
    url: SocketAddr,
    /// Which model. Left out: the first.
    #[arg(long)]
    model: Option<String>,
    /// Requests in all.
    #[arg(long, value_name = "N", default_value_t = 200)]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    requests: u64,
    /// Requests at a time.
    #[arg(long, value_name = "N", default_value_t = 32)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=4096))]
    concurrency: u32,
    /// Median length of prompts, in tokens.
    #[arg(long, value_name = "MEDIAN", default_value_t = 128)]
    prompt_tokens: u32,
    /// Median length of answers, in tokens.
    #[arg(long, value_name = "MEDIAN", default_value_t = 64)]
    output_tokens: u32,
    /// Deviation of the logarithm of both lengths.
    #[arg(long, default_value_t = 0.8)]
    sigma: f64,
    /// Tells prompts and lengths.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// After so many seconds nothing new is asked, and what runs is broken off.
    #[arg(long, value_name = "SECONDS", default_value_t = 120)]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=86_400))]
    timeout_s: u64,
}

/// `http://ADDRESS:PORT`.
fn parse_url(text: &str) -> Result<SocketAddr, String> {
    let address = text.strip_prefix("http://").unwrap_or(text).trim_end_matches('/');
    let address = address.replace("localhost", "127.0.0.1");
    let address: SocketAddr =
        address.parse().map_err(|_| "expected http://127.0.0.1:PORT".to_owned())?;
    match address.ip().is_loopback() {
        true => Ok(address),
        false => Err(format!("{address} is not this machine: expected a loopback address")),
    }
}

fn main() -> ExitCode {
    let args = Args::parse();
    println!("seed {}", args.seed);
    match load(args) {
        Ok(report) => {
            print!("{report}");
            if report.is_good() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
        }
        Err(error) => {
            eprintln!("vmm-load: {error}");
            ExitCode::FAILURE
        }
    }
}

fn load(args: Args) -> Result<LoadReport, Box<dyn std::error::Error>> {
    // Hidden by itself where there is no terminal.
    let bar = ProgressBar::new(args.requests);
    bar.set_style(ProgressStyle::with_template("{bar:40} {pos}/{len} {elapsed}")?);
    let plan = LoadPlan {
        address: args.url,
        model: args.model,
        requests: args.requests,
        concurrency: args.concurrency as usize,
        prompt_tokens: args.prompt_tokens,
        output_tokens: args.output_tokens,
        sigma: args.sigma,
        seed: args.seed,
        timeout: Duration::from_secs(args.timeout_s),
    };
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(WORKERS).enable_all().build()?;
    let ended = bar.clone();
    let report = runtime.block_on(run(plan, move || ended.inc(1)))?;
    bar.finish_and_clear();
    Ok(report)
}

const WORKERS: usize = 2;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_this_machine_is_asked() {
        assert_eq!(parse_url("http://127.0.0.1:8077/").unwrap().port(), 8077);
        assert_eq!(parse_url("http://localhost:1").unwrap().port(), 1);
        assert!(parse_url("http://[::1]:9").is_ok());
        assert!(parse_url("http://10.0.0.1:8077").unwrap_err().contains("loopback"));
        assert!(parse_url("http://example.com:80").is_err());
    }
}
