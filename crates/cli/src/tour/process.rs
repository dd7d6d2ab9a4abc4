//! A second process maps a buffer, cannot write to it, and follows its changes.

use std::io::{BufRead, BufReader, Lines, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use vmm_pool::{ElasticBuffer, Place};
use vmm_share::{Address, Exporter, Offered};
use vmm_sys::ProbeKernel;

use super::bytes::launch;
use super::peer::NAME;
use super::stage::{Stage, StepResult};
use super::telling::{Told, Trouble, expect, mib};

/// What is shared, of the stage's length: a part that is quickly read by the host.
const BYTES_MAX: u64 = 64 << 20;

pub(super) fn share(stage: &mut Stage) -> StepResult {
    let Some(program) = stage.program.clone() else {
        return Ok(Told::LeftOut("no program for a second process is given".into()));
    };
    let home = stage.first.device;
    let chunk_bytes = stage.buffer.chunk_bytes();
    let half = (stage.bytes.min(BYTES_MAX) / 2).next_multiple_of(chunk_bytes);
    let builder = stage.pool.elastic(home).capacity_bytes(2 * half).chunk_bytes(chunk_bytes);
    let builder = match &stage.second {
        Ok(second) => builder.access([(second.device, vmm_sys::Access::Read)]),
        Err(_) => builder,
    };
    let buffer = Arc::new(builder.exportable(true).build()?);
    buffer.grow_to(half)?;
    let value = stage.value ^ 0x5ead;
    fill(stage, &buffer, value)?;
    let exporter = Exporter::builder().bind(address())?;
    let offer = exporter.offer(NAME, &buffer, Offered::Read)?;
    let mut peer = Peer::start(&program, stage, exporter.address())?;
    let expected = |bytes: u64| format!("ok {bytes}");
    peer.ask(&format!("check {value}"), &expected(half))?;
    peer.ask("write", "ok ")?;
    // Twice as long, and elsewhere if there is an elsewhere.
    buffer.grow_to(2 * half)?;
    let moved = match &stage.second {
        Ok(second) => {
            buffer.migrate(Place::Device(second.device))?;
            format!(" and moved to {}", second.device)
        }
        Err(_) => String::new(),
    };
    let value = value.wrapping_mul(31);
    fill(stage, &buffer, value)?;
    peer.ask(&format!("changed {value}"), &expected(2 * half))?;
    drop(offer);
    peer.ask("withdrawn", "ok ")?;
    peer.end()?;
    drop((exporter, buffer));
    stage.check_sound()?;
    Ok(Told::Done(format!(
        "another process read all of {} at an address of its own and could not write; when the \
         buffer had grown to {}{moved} it was told, and read all of that",
        mib(half),
        mib(2 * half)
    )))
}

/// An address that no other tour has.
fn address() -> Address {
    static TOURS: AtomicU64 = AtomicU64::new(0);
    let tour = TOURS.fetch_add(1, Ordering::Relaxed);
    Address::Abstract(format!("vmm-pool-tour-{}-{tour}", std::process::id()))
}

/// Words that count up from `value` in all of the buffer, written before this returns.
fn fill(stage: &Stage, buffer: &ElasticBuffer, value: u32) -> Result<(), Trouble> {
    let stream = &stage.first.stream;
    let _using = buffer.use_on(stream)?;
    let words = buffer.committed_bytes() / 4;
    launch(stream, &ProbeKernel::FillWords { dst: buffer.address(), words, value })?;
    Ok(stream.synchronize()?)
}

/// The second process. Dropped while it runs, it is ended.
struct Peer {
    child: Child,
    orders: Option<ChildStdin>,
    answers: Lines<BufReader<ChildStdout>>,
}

impl Peer {
    fn start(program: &Path, stage: &Stage, address: &Address) -> Result<Peer, Trouble> {
        let mut command = Command::new(program);
        let driver = if stage.sim.is_some() { "sim" } else { "cuda" };
        let devices = stage.driver.device_count()?.to_string();
        command.args(["tour-peer", "--driver", driver, "--devices", &devices]);
        command.arg("--socket").arg(address.to_string());
        let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut child = child.map_err(|error| {
            Trouble::wrong(format!("expected {} to start, found {error}", program.display()))
        })?;
        let orders = child.stdin.take();
        let Some(stdout) = child.stdout.take() else {
            return Err(Trouble::wrong("expected the output of the second process, found none"));
        };
        Ok(Peer { child, orders, answers: BufReader::new(stdout).lines() })
    }

    fn ask(&mut self, order: &str, expected: &str) -> Result<(), Trouble> {
        // One that has ended takes no order, and gives no answer.
        if let Some(orders) = &mut self.orders {
            let _ = writeln!(orders, "{order}");
        }
        match self.answers.next() {
            Some(Ok(answer)) if answer == expected => Ok(()),
            Some(Ok(answer)) => {
                Err(Trouble::Wrong(format!("expected {expected:?} of {order:?}, found: {answer}")))
            }
            _ => Err(Trouble::Wrong(format!("expected an answer to {order:?}: the process ended"))),
        }
    }

    fn end(mut self) -> Result<(), Trouble> {
        self.orders = None;
        match self.child.wait() {
            Ok(status) => expect(status.success(), "the second process to end well", status),
            Err(error) => Err(Trouble::wrong(format!("the second process: {error}"))),
        }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // Both fail only if it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
