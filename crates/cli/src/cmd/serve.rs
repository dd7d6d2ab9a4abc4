//! `vmm-pool serve`: an owner process, which holds buffers for workers that come and go.

use std::io::{self, Write};
use std::time::Duration;

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use vmm_pool::text;
use vmm_pool_cli::driver_choice::{DriverChoice, DriverRequest, choose};
use vmm_share::{Address, Owner, PeerRule};
use vmm_sys::DeviceId;

use super::{Failure, say};

/// Hold named buffers for workers, which find their bytes again after a crash.
#[derive(Debug, clap::Args)]
#[command(after_long_help = HOW)]
pub(crate) struct Args {
    /// Where to listen: a path, or @ and a name without a file.
    #[arg(long, value_name = "PATH|@NAME")]
    socket: Address,
    /// Which driver: the GPU's, the simulated device's, or the GPU's if there is one.
    #[arg(long, value_enum, default_value = "auto")]
    driver: DriverRequest,
    /// The devices on which buffers are made.
    #[arg(long, value_name = "N", num_args = 1.., default_values_t = [0])]
    device: Vec<u32>,
    /// The most that one process may have created while it is connected: bytes, or 64M, 4GiB, ...
    #[arg(long, value_name = "SIZE", value_parser = text::bytes)]
    limit: Option<u64>,
    /// The most that all buffers may have.
    #[arg(long, value_name = "SIZE", value_parser = text::bytes)]
    total: Option<u64>,
    /// How long a buffer stays that nobody holds, in seconds. 0: until it is released.
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    lease: u64,
    /// The users whose processes are let in. Left out: the one it runs as.
    #[arg(long, value_name = "UID", num_args = 1..)]
    uid: Vec<u32>,
}

const HOW: &str = "\
Workers connect with vmm_share::OwnerClient. A buffer lives while a worker holds it, and for the lease
after that. `vmm-pool status` shows what is held.

It runs until SIGTERM or SIGINT, gives all memory back and removes its socket; workers keep what they
have mapped. A socket that a dead one left behind is replaced; one that listens is left alone.

Exit code: 0 it ended cleanly; 1 something was not given back; 2 bad usage, no such driver or device,
or the address is taken.";

/// Runs the command.
pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    // Before anything is there that a signal could leave behind.
    let mut signals = Signals::new([SIGTERM, SIGINT]).map_err(Failure::failed)?;
    let last = args.device.iter().copied().max().unwrap_or(0);
    let DriverChoice { driver, sim, why } =
        choose(args.driver, DeviceId(last)).map_err(Failure::refused)?;
    say(&why);
    let rule = match args.uid.is_empty() {
        true => PeerRule::SameUser,
        false => PeerRule::Users(args.uid.clone()),
    };
    let owner = Owner::builder(driver)
        .devices(args.device.iter().copied().map(DeviceId))
        .client_bytes_max(args.limit.unwrap_or(u64::MAX))
        .total_bytes_max(args.total.unwrap_or(u64::MAX))
        .lease(Duration::from_secs(args.lease))
        .rule(rule)
        .bind(args.socket.clone())
        .map_err(Failure::refused)?;
    announce(&owner);
    let _ = signals.forever().next();
    drop(owner);
    // Memory that workers still have mapped is theirs.
    let left = sim.map(|sim| sim.ledger_summary()).unwrap_or_default();
    match left.handles + left.mappings + left.ranges {
        0 => Ok(()),
        _ => Err(Failure::Failed(format!("not all was given back: {left:?}"))),
    }
}

/// For whoever waits for it to be there. It serves on where nobody reads that.
fn announce(owner: &Owner) {
    let mut out = io::stdout().lock();
    let _ = writeln!(out, "listening at {}", owner.address()).and_then(|()| out.flush());
}
