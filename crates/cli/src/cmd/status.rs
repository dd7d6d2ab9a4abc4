//! `vmm-pool status`: what an owner process holds.

use std::io::{self, Write};
use std::time::Duration;

use serde_json::{Value, json};
use vmm_share::{Address, HeldBuffer, Holder, LeaseState, OwnerStatus};

use super::Failure;

/// How long the owner process may take for an answer.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Show what a `vmm-pool serve` holds, and for whom.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "Exit code: 0 it answered; 1 it did not; 2 bad usage.")]
pub(crate) struct Args {
    /// Where it listens: a path, or @ and a name without a file.
    #[arg(long, value_name = "PATH|@NAME")]
    socket: Address,
    /// One JSON object: bytes, total_bytes_max, clients, descriptors, and buffers with name, bytes,
    /// chunk_bytes, device, generation, descriptors, lease, lease_left_s, holders.
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let status = OwnerStatus::ask(&args.socket, TIMEOUT).map_err(Failure::failed)?;
    let mut out = io::stdout().lock();
    match args.json {
        true => writeln!(out, "{}", json(&status))?,
        false => write(&mut out, &status)?,
    }
    Ok(out.flush()?)
}

fn json(status: &OwnerStatus) -> Value {
    json!({
        "bytes": status.bytes(),
        "total_bytes_max": status.total_bytes_max,
        "clients": status.clients,
        "descriptors": status.descriptors(),
        "buffers": status.buffers.iter().map(json_buffer).collect::<Vec<_>>(),
    })
}

fn json_buffer(buffer: &HeldBuffer) -> Value {
    let holder = |it: &Holder| json!({ "pid": it.pid, "uid": it.uid, "writes": it.writes });
    let (lease, left_s) = match buffer.lease {
        LeaseState::Held => ("held", None),
        LeaseState::Ends(left) => ("ends", Some(left.as_secs_f64())),
        LeaseState::UntilReleased => ("until-released", None),
    };
    json!({
        "name": buffer.name,
        "bytes": buffer.bytes,
        "chunk_bytes": buffer.chunk_bytes,
        "device": buffer.device.to_string(),
        "generation": buffer.generation,
        "descriptors": buffer.descriptors,
        "lease": lease,
        "lease_left_s": left_s,
        "holders": buffer.holders.iter().map(holder).collect::<Vec<_>>(),
    })
}

fn write(out: &mut impl Write, status: &OwnerStatus) -> io::Result<()> {
    for buffer in &status.buffers {
        let lease = match buffer.lease {
            LeaseState::Held => "held".to_owned(),
            LeaseState::Ends(left) => format!("ends in {:.1} s", left.as_secs_f64()),
            LeaseState::UntilReleased => "until released".to_owned(),
        };
        let HeldBuffer { name, bytes, device, generation, descriptors, .. } = buffer;
        // A name may hold anything that is text; a terminal must not act on it.
        let name = name.escape_debug();
        writeln!(
            out,
            "{name}: {bytes} bytes on {device}, generation {generation}, {descriptors} descriptors; \
             {lease}"
        )?;
        for Holder { pid, uid, writes } in &buffer.holders {
            let access = if *writes { "writes" } else { "reads" };
            writeln!(out, "  process {pid} of user {uid} {access}")?;
        }
    }
    let max = status.total_bytes_max.map_or("no limit".to_owned(), |max| format!("at most {max}"));
    writeln!(
        out,
        "{} buffers, {} bytes ({max}), {} descriptors, {} clients",
        status.buffers.len(),
        status.bytes(),
        status.descriptors(),
        status.clients
    )
}
