//! Work on streams that writes and compares contents.
//!
//! Contents are the first and the last words of a stretch of memory, made from a number, its version.

use std::sync::Arc;

use vmm_sys::DriverResult;
use vmm_sys::object::{Event, Stream};
use vmm_sys::sim::{ByteKernel, ByteSpan};

use crate::notes::Notes;
use crate::world::World;

/// Written and compared at each end, in bytes.
const EDGE_BYTES: u64 = 64;

/// A stretch of device memory and what it must hold.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Contents {
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    pub(crate) version: u32,
}

/// The words of a version, from the start of an edge.
fn words(version: u32, edge: usize) -> impl Iterator<Item = [u8; 4]> {
    let first = version.wrapping_mul(0x9E37_79B1) ^ edge as u32;
    (0u32..).map(move |at| first.wrapping_add(at.wrapping_mul(0x85EB_CA6B)).to_le_bytes())
}

fn fill(version: u32, edge: usize, bytes: &mut [u8]) {
    bytes.chunks_mut(4).zip(words(version, edge)).for_each(|(to, word)| {
        to.copy_from_slice(&word[..to.len()]);
    });
}

impl Contents {
    /// Offsets and lengths of what is looked at, multiples of 4.
    pub(crate) fn edges(&self) -> Vec<(u64, u64)> {
        let whole = self.bytes & !3;
        let length = EDGE_BYTES.min(whole / 2 & !3).max(whole.min(4));
        match whole {
            0 => Vec::new(),
            _ if whole < 2 * length => vec![(0, length)],
            _ => vec![(0, length), (whole - length, length)],
        }
    }

    fn spans(&self, write: bool) -> Vec<ByteSpan> {
        let span = |(offset, bytes)| ByteSpan { address: self.address + offset, bytes, write };
        self.edges().into_iter().map(span).collect()
    }

    /// Whether `found`, edge by edge, is this; else what is wrong.
    pub(crate) fn compare(&self, found: &[Vec<u8>]) -> Result<(), String> {
        for (edge, found) in found.iter().enumerate() {
            let mut wanted = vec![0; found.len()];
            fill(self.version, edge, &mut wanted);
            if wanted != *found {
                let first = |bytes: &[u8]| bytes[..bytes.len().min(8)].to_vec();
                return Err(format!(
                    "{:#x}, {} bytes, edge {edge}: {:x?} is there, not {:x?} of version {}",
                    self.address,
                    self.bytes,
                    first(found),
                    first(&wanted),
                    self.version
                ));
            }
        }
        Ok(())
    }

    /// A kernel that writes it, and says so.
    pub(crate) fn writer(self, done: impl Fn() + Send + Sync + 'static) -> ByteKernel {
        ByteKernel::new(self.spans(true), move |found| {
            found.iter_mut().enumerate().for_each(|(edge, bytes)| fill(self.version, edge, bytes));
            done();
        })
    }

    /// A kernel that finds it, or the same bytes of one of the versions `or`.
    pub(crate) fn checker_of_any(
        self,
        notes: Arc<Notes>,
        what: String,
        or: Vec<u32>,
    ) -> ByteKernel {
        ByteKernel::new(self.spans(false), move |found| {
            let other =
                |version: &u32| Contents { version: *version, ..self }.compare(found).is_ok();
            if let Err(wrong) = self.compare(found)
                && !or.iter().any(other)
            {
                notes.wrong(format!("{what}: {wrong}, nor of {or:?}"));
            }
        })
    }

    /// A kernel that compares it while `applies` says so.
    pub(crate) fn checker(
        self,
        notes: Arc<Notes>,
        what: String,
        applies: impl Fn() -> bool + Send + Sync + 'static,
    ) -> ByteKernel {
        ByteKernel::new(self.spans(false), move |found| {
            if let Err(wrong) = self.compare(found)
                && applies()
            {
                notes.wrong(format!("{what}: {wrong}"));
            }
        })
    }
}

impl World {
    /// Enqueues the writing of contents.
    pub(crate) fn write(&self, stream: &Stream, contents: Contents) -> DriverResult<()> {
        self.enqueue(stream, contents.writer(|| {}))
    }

    /// Enqueues a comparison.
    pub(crate) fn check(
        &self,
        stream: &Stream,
        contents: Contents,
        what: String,
    ) -> DriverResult<()> {
        self.enqueue(stream, contents.checker(self.notes.clone(), what, || true))
    }

    pub(crate) fn enqueue(&self, stream: &Stream, kernel: ByteKernel) -> DriverResult<()> {
        self.sim.launch_bytes(stream.device(), kernel, stream.handle())
    }

    /// Lets `to` wait for what `from` has now.
    pub(crate) fn order(&self, from: &Stream, to: &Stream) -> DriverResult<()> {
        if from.id() == to.id() {
            return Ok(());
        }
        let event = Event::create(&self.driver, from.device())?;
        event.record(from)?;
        to.wait_event(&event)
    }
}
