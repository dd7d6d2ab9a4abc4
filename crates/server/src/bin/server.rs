//! The inference server: docs/SERVER.md.

use std::process::ExitCode;

use clap::Parser;
use vmm_server::serve::{ServeArgs, ServeError, grace, start};

/// An inference server whose KV caches grow by mapping. Decode steps are simulated; memory is real,
/// and checked.
#[derive(Debug, Parser)]
#[command(name = "vmm-server", version)]
struct Args {
    #[command(flatten)]
    serve: ServeArgs,
}

fn main() -> ExitCode {
    match run(&Args::parse().serve) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("vmm-server: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Serves until a signal. Whether everything was given back.
fn run(args: &ServeArgs) -> Result<bool, ServeError> {
    let grace = grace(args)?;
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(WORKERS).enable_all().build()?;
    let stopped = runtime.block_on(async {
        let (server, why) = start(args).await?;
        println!("{why}");
        println!("listening on http://{}", server.address()?);
        let ender = server.ender();
        let mut terminate = signal()?;
        tokio::spawn(async move {
            told(&mut terminate).await;
            let grace_s = grace.as_secs_f64();
            eprintln!(
                "ending: requests that run may go on for {grace_s:.1} s, or until told again"
            );
            ender.end();
            told(&mut terminate).await;
            ender.hurry();
        });
        Ok::<_, ServeError>(server.run(grace).await?)
    })?;
    for (model, counts) in &stopped.counts {
        println!(
            "{model}: {} finished, {} refused, {} failed, {} cancelled; {} tokens",
            counts.finished,
            counts.refused,
            counts.failed,
            counts.cancelled,
            counts.answered_tokens
        );
    }
    match &stopped.verdict {
        Ok(()) => println!("everything was given back, and the pool is whole"),
        Err(what) => eprintln!("vmm-server: {what}"),
    }
    Ok(stopped.verdict.is_ok())
}

/// Models have threads of their own.
const WORKERS: usize = 2;

async fn told(terminate: &mut tokio::signal::unix::Signal) {
    tokio::select! {
        _ = tokio::signal::ctrl_c() => {}
        _ = terminate.recv() => {}
    }
}

fn signal() -> std::io::Result<tokio::signal::unix::Signal> {
    tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())
}
