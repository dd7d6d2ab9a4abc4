//! The program `vmm-pool`. Each command is a file under `cmd`; the machinery is the library.

#![forbid(unsafe_code)]

mod cmd;

use std::process::ExitCode;

use clap::Parser;

/// A cross-GPU memory pool with stable addresses: replay allocator traces, examine the
/// machine, hold buffers for workers that come and go.
#[derive(Debug, Parser)]
#[command(name = "vmm-pool", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    Doctor(cmd::doctor::Args),
    Replay(cmd::replay::Args),
    Serve(cmd::serve::Args),
    Status(cmd::status::Args),
    Tour(cmd::tour::Args),
    #[command(hide = true)]
    TourPeer(cmd::tour_peer::Args),
}

fn main() -> ExitCode {
    // Wrong usage ends here, with exit code 2.
    let Cli { command } = Cli::parse();
    let result = match command {
        Command::Doctor(args) => return cmd::doctor::run(&args),
        Command::Replay(args) => cmd::replay::run(&args),
        Command::Serve(args) => cmd::serve::run(&args),
        Command::Status(args) => cmd::status::run(&args),
        Command::TourPeer(args) => cmd::tour_peer::run(&args),
        Command::Tour(args) => return cmd::tour::run(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}
