//! The second process of `vmm-pool tour`: the program once more. Not for users.

use std::io;

use vmm_pool_cli::driver_choice::{DriverRequest, choose_all};
use vmm_pool_cli::tour::peer;
use vmm_share::Address;

use super::Failure;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Where the first process listens.
    #[arg(long)]
    socket: Address,
    #[arg(long, value_enum)]
    driver: DriverRequest,
    /// How many simulated devices there are.
    #[arg(long)]
    devices: usize,
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let choice = choose_all(args.driver, args.devices).map_err(Failure::refused)?;
    peer(&choice.driver, &args.socket, io::stdin().lock(), io::stdout().lock())
        .map_err(Failure::failed)
}
