//! What both programs need: a driver, a second process, and words at known places.

use std::error::Error;
use std::io::{BufRead, BufReader, Lines, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;

use vmm_sys::Driver;
use vmm_sys::cuda::Cuda;
use vmm_sys::sim::Sim;

pub(crate) type Outcome<T> = Result<T, Box<dyn Error>>;

/// Which driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum DriverRequest {
    /// The GPU if there is one, else the simulated device.
    Auto,
    /// The GPU.
    Cuda,
    /// The simulated device.
    Sim,
}

impl DriverRequest {
    pub(crate) fn open(self) -> Outcome<Arc<dyn Driver>> {
        let sim = || Sim::builder().build() as Arc<dyn Driver>;
        let cuda = || -> Outcome<Arc<dyn Driver>> {
            let driver = Cuda::open()?;
            match driver.device_count()? {
                0 => Err("the driver sees no GPU".into()),
                _ => Ok(driver),
            }
        };
        match self {
            DriverRequest::Cuda => cuda(),
            DriverRequest::Sim => Ok(sim()),
            DriverRequest::Auto => Ok(cuda().unwrap_or_else(|_| sim())),
        }
    }
}

/// A path for a socket.
pub(crate) fn socket_path(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("vmm-share-{name}-{}.sock", std::process::id()))
}

/// This program once more, as the other process.
pub(crate) struct Second {
    child: Child,
    orders: Option<ChildStdin>,
    answers: Lines<BufReader<ChildStdout>>,
}

impl Second {
    pub(crate) fn start(arguments: &[&str]) -> Outcome<Second> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn()?;
        let orders = child.stdin.take();
        let stdout = child.stdout.take().ok_or("the other process has no output")?;
        Ok(Second { child, orders, answers: BufReader::new(stdout).lines() })
    }

    pub(crate) fn order(&mut self, order: &str) -> Outcome<()> {
        let orders = self.orders.as_mut().ok_or("the other process takes no orders any more")?;
        Ok(writeln!(orders, "{order}")?)
    }

    pub(crate) fn answer(&mut self) -> Outcome<String> {
        Ok(self.answers.next().ok_or("the other process has ended")??)
    }

    /// Lets it end; an error if it ended badly.
    pub(crate) fn end(mut self) -> Outcome<()> {
        self.orders = None;
        match self.child.wait()? {
            status if status.success() => Ok(()),
            status => Err(format!("the other process: {status}").into()),
        }
    }
}

impl Drop for Second {
    fn drop(&mut self) {
        // Both fail only if it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
