//! [`Offer`]: a buffer that other processes may open.

use std::fmt;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use vmm_pool::{BackingChange, BackingHook, Cause, ElasticBuffer, Phase};
use vmm_sys::object::Stream;
use vmm_sys::process;

use super::core::Core;
use super::publish::Publisher;
use super::shelf::{Layout, Shelf};
use crate::error::ShareError;
use crate::page::NoticeBoard;
use crate::steps::step;

/// How long a withdrawal waits for a call of the driver that is under way for the offer.
const WITHDRAW_PATIENCE: Duration = Duration::from_secs(5);

/// What the exporter's threads know of an offer.
#[derive(Debug)]
pub(super) struct OfferCore {
    pub(super) export: u64,
    pub(super) name: String,
    pub(super) writable: bool,
    pub(super) chunk_bytes: u64,
    pub(super) board: Arc<NoticeBoard>,
    pub(super) publisher: Publisher,
    pub(super) shelf: Mutex<Shelf>,
    buffer: Weak<ElasticBuffer>,
    /// Threads that hold the buffer for a moment.
    visits: Mutex<usize>,
    visit_ended: Condvar,
}

/// The buffer, held for a moment.
pub(super) struct Visit<'a> {
    buffer: Option<Arc<ElasticBuffer>>,
    core: &'a OfferCore,
}

impl OfferCore {
    pub(super) fn new(
        (export, name): (u64, &str),
        buffer: &Arc<ElasticBuffer>,
        writable: bool,
    ) -> Result<OfferCore, ShareError> {
        let board = Arc::new(NoticeBoard::create(buffer.generation())?);
        Ok(OfferCore {
            export,
            name: name.to_owned(),
            writable,
            chunk_bytes: buffer.chunk_bytes(),
            publisher: Publisher::new(board.clone(), buffer)?,
            board,
            shelf: Mutex::default(),
            buffer: Arc::downgrade(buffer),
            visits: Mutex::new(0),
            visit_ended: Condvar::new(),
        })
    }

    /// The buffer, unless the offer was withdrawn.
    pub(super) fn visit(&self) -> Option<Visit<'_>> {
        let mut visits = self.visits.lock();
        if self.board.notice().withdrawn {
            return None;
        }
        let buffer = self.buffer.upgrade()?;
        *visits += 1;
        Some(Visit { buffer: Some(buffer), core: self })
    }

    /// Brings the description up to the buffer's generation. Says whether it is; if not, a change is
    /// under way, whose end asks for this again.
    pub(super) fn describe(&self, next_id: impl FnMut() -> u64) -> Result<bool, ShareError> {
        let Some(visit) = self.visit() else { return Ok(false) };
        let buffer = visit.buffer();
        let before = self.board.notice();
        let generation = buffer.generation();
        let earlier = self.shelf.lock().layout.clone();
        let layout = Layout::describe(buffer, generation, &earlier, next_id)?;
        let mut shelf = self.shelf.lock();
        // A change that began meanwhile is seen in the notice or in the generation.
        let after = self.board.notice();
        if before != after || after.changing || buffer.generation() != generation {
            return Ok(false);
        }
        if after.generation != generation {
            self.board.end_change(generation);
        }
        shelf.take_layout(layout);
        Ok(true)
    }

    /// The description, if it is that of the buffer as it is now.
    pub(super) fn layout(&self) -> Option<Arc<Layout>> {
        let layout = self.shelf.lock().layout.clone();
        let notice = self.board.notice();
        let valid = !notice.changing && notice.generation == layout.generation;
        valid.then_some(layout)
    }

    /// Runs in the thread that changes the memory: a few stores, and the closing of descriptors.
    fn on_change(&self, change: &BackingChange) {
        match change.phase {
            Phase::Before => {
                step!("exporter-before");
                self.board.begin_change();
                // Only these two leave alone what is there.
                if !matches!(change.cause, Cause::Commit | Cause::Share) {
                    let end = change.offset.saturating_add(change.bytes);
                    self.shelf.lock().close(change.offset..end);
                }
            }
            _ => {
                step!("exporter-after");
                self.board.end_change(change.generation);
            }
        }
    }

    /// Nobody gets anything any more; what others have mapped stays.
    pub(super) fn withdraw(&self) {
        let mut visits = self.visits.lock();
        self.board.withdraw();
        self.shelf.lock().close_all();
        let deadline = Instant::now() + WITHDRAW_PATIENCE;
        while *visits > 0 {
            if self.visit_ended.wait_until(&mut visits, deadline).timed_out() {
                vmm_sys::say!(warn, name = self.name, "a withdrawn buffer is still being exported");
                return;
            }
        }
    }
}

impl Visit<'_> {
    pub(super) fn buffer(&self) -> &ElasticBuffer {
        match &self.buffer {
            Some(buffer) => buffer,
            // Taken by the drop alone.
            None => unreachable!("a visit has its buffer until it is dropped"),
        }
    }
}

impl Drop for Visit<'_> {
    fn drop(&mut self) {
        // Before the owner goes on, so that the buffer ends where its owner lets go of it.
        self.buffer = None;
        *self.core.visits.lock() -= 1;
        self.core.visit_ended.notify_all();
    }
}

/// A buffer that other processes may open by its name. Dropped, it is withdrawn: nobody can open it
/// any more, and those who have it are told; what they have mapped stays theirs until they let go.
///
/// It keeps the buffer.
pub struct Offer {
    pub(super) core: Arc<OfferCore>,
    pub(super) exporter: Arc<Core>,
    hook: Option<BackingHook>,
    buffer: Arc<ElasticBuffer>,
}

impl Offer {
    pub(super) fn new(
        core: Arc<OfferCore>,
        exporter: &Arc<Core>,
        buffer: &Arc<ElasticBuffer>,
    ) -> Result<Offer, ShareError> {
        let (told, waker) = (core.clone(), Arc::downgrade(exporter));
        let hook = buffer.on_backing_change(move |change| {
            if process::is_forked_child() {
                return;
            }
            told.on_change(change);
            if change.phase != Phase::Before
                && let Some(exporter) = waker.upgrade()
            {
                exporter.look_again(&told);
            }
        });
        let (exporter, buffer) = (exporter.clone(), buffer.clone());
        let offer = Offer { core, exporter, hook: Some(hook), buffer };
        offer.core.describe(|| offer.exporter.next_piece())?;
        Ok(offer)
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.core.name
    }

    /// The buffer.
    pub fn buffer(&self) -> &Arc<ElasticBuffer> {
        &self.buffer
    }

    /// The descriptors of its pieces that are open now.
    pub(crate) fn descriptors(&self) -> usize {
        self.core.shelf.lock().open()
    }

    /// Whether importers may write.
    pub fn is_writable(&self) -> bool {
        self.core.writable
    }

    /// Says to importers that the work enqueued on `stream` until now has made the contents of a
    /// sequence, whose number is the answer: the first is 1. Work of an importer that waited for it
    /// ([`Import::wait_published`](crate::Import::wait_published)) comes after that work, and after
    /// that of all earlier sequences. Nobody waits here.
    ///
    /// Where the driver shares events between processes, one is recorded on the stream, and the work
    /// of importers waits for it on the GPU. Elsewhere a function that the driver calls in the stream's
    /// order stores the number in shared memory, and importers wait for it on the host.
    ///
    /// # Errors
    /// [`ShareError::BadArgument`] if the stream belongs to another driver or is being captured; the
    /// driver's.
    pub fn publish(&self, stream: &Stream) -> Result<u64, ShareError> {
        if !std::ptr::addr_eq(Arc::as_ptr(stream.driver()), Arc::as_ptr(self.buffer.driver())) {
            return Err(ShareError::BadArgument {
                what: "stream",
                value: format!("{stream:?}"),
                expected: "a stream of the buffer's driver".to_owned(),
            });
        }
        self.core.publisher.publish(stream)
    }

    /// Waits until a description of the buffer as it is now is given out, and, as far as the limit
    /// goes, the descriptors of its pieces are made. For whoever wants the first importer to find
    /// everything ready.
    ///
    /// # Errors
    /// [`ShareError::Timeout`].
    pub fn wait_ready(&self, timeout: Duration) -> Result<(), ShareError> {
        self.exporter.wait_ready(&self.core, timeout)
    }
}

impl fmt::Debug for Offer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Offer({:?} of {:?})", self.core.name, self.buffer)
    }
}

impl Drop for Offer {
    fn drop(&mut self) {
        // The page, the threads and the names are the parent's.
        if process::is_forked_child() {
            return;
        }
        self.hook = None;
        self.exporter.remove(&self.core);
        self.core.withdraw();
    }
}
