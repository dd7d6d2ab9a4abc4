//! [`Tracked`]: memory of the pool as a `CudaSlice`, with its readers told apart.
//!
//! A `CudaSlice` has one event for reads: a second stream that reads records it anew, and the first is
//! not waited for any more. Here the first stream that reads has that event, and every further one a
//! shell with an event of its own. **Before a write** (any `&mut`) a hidden stream waits for all of
//! them and records the slice's *write* event, so that cudarc's own waits, whatever they are, cover
//! everybody. The write event and not the read one: whether the write is ever enqueued is not known
//! here, and a read event that was recorded for all would be lost to the next reader.

use std::mem::{self, ManuallyDrop};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cudarc::driver::{CudaSlice, CudaStream, DevicePtr, DevicePtrMut, DriverError, SyncOnDrop};
use parking_lot::Mutex;
use vmm_sys::object::identity_of;

use crate::error::Error;
use crate::guest::Guest;
use crate::homes::device_of;
use crate::joins::{is_gone, quietly};
use crate::key::{ReaderKey, StreamKey};
use crate::pool::Shared;
use crate::shell::{self, Shell, event_of};

pub(crate) struct Tracked<T> {
    main: ManuallyDrop<CudaSlice<T>>,
    address: u64,
    /// Whether cudarc gave `main` events.
    has_events: bool,
    /// Whether it was used while cudarc managed several streams.
    was_managed: AtomicBool,
    readers: Mutex<Readers<T>>,
    pub(crate) shared: Arc<Shared>,
}

struct Readers<T> {
    /// The stream whose reads the slice's own event stands for.
    first: Option<ReaderKey>,
    /// For every further stream. Entries are dropped only with the slice, and changed only through
    /// `&mut` of it; they are never cloned.
    shells: Vec<(ReaderKey, Arc<Shell<T>>)>,
    guests: Vec<Arc<Guest<T>>>,
    /// Counts what may have been writes.
    written: u64,
    /// Counts the shells that went from one stream to another.
    passed_on: usize,
}

/// Shells of one slice, at most: streams may come and go, and the slice stay. A launch that is built, and
/// submitted only after as many further streams have read the slice, shares its event with one of them.
const SHELLS_MAX: usize = 32;

impl<T> Tracked<T> {
    /// # Safety
    /// As [`shell::shell`]. The memory stays the caller's, who gives it back after the drop.
    pub(crate) unsafe fn new(
        shared: Arc<Shared>,
        stream: &Arc<CudaStream>,
        address: u64,
        len: usize,
    ) -> Result<Tracked<T>, Error> {
        let has_events = stream.context().is_event_tracking();
        // SAFETY: by this function's own condition.
        let main = unsafe { shell::shell(stream, address, len)? };
        let (shells, guests) = (Vec::new(), Vec::new());
        let readers = Mutex::new(Readers { first: None, shells, guests, written: 0, passed_on: 0 });
        let was_managed = AtomicBool::new(false);
        Ok(Tracked { main, address, has_events, was_managed, readers, shared })
    }

    /// The slice as cudarc knows it, for readers on whichever stream.
    #[inline]
    pub(crate) fn any_reader(&self) -> &CudaSlice<T> {
        self.is_managed();
        &self.main
    }

    /// The slice for reads on one stream.
    #[inline]
    pub(crate) fn reader(&self, stream: Option<StreamKey>) -> &CudaSlice<T> {
        match stream {
            Some(stream) if self.is_managed() => self.reader_of(stream),
            _ => &self.main,
        }
    }

    /// Whether cudarc orders uses on several streams now. Remembers that it did.
    #[inline]
    fn is_managed(&self) -> bool {
        let managed = self.has_events && self.main.context().is_managing_stream_synchronization();
        if managed {
            self.was_managed.store(true, Ordering::Relaxed);
        }
        managed
    }

    fn reader_of(&self, stream: StreamKey) -> &CudaSlice<T> {
        let reader = self.reader_key(stream);
        let mut readers = self.readers.lock();
        if *readers.first.get_or_insert(reader) == reader {
            return &self.main;
        }
        let lent = quietly(self.main.context(), || self.lend(&mut readers, reader));
        match lent {
            Ok(Ok(shell)) => shell,
            Err(error) | Ok(Err(Error::Cudarc(error))) => {
                // cudarc's way for places that cannot answer: nothing is enqueued before somebody has
                // seen it.
                self.main.context().record_err::<()>(Err(error));
                &self.main
            }
            Ok(Err(error)) => {
                tracing::warn!(%error, "a second stream reads a slice, and its reads are not told apart");
                &self.main
            }
        }
    }

    /// Asks the driver for the identity of a stream other than the slice's own: a handle that is given
    /// out again must not be taken for the reader of before.
    fn reader_key(&self, stream: StreamKey) -> ReaderKey {
        if stream.is_default() || stream == StreamKey::of(self.main.stream()) {
            return ReaderKey::Lasting(stream);
        }
        let driver = self.shared.pool.driver();
        // SAFETY: whoever reads has the stream; the handle is that of a launch or of a reference to it.
        let id = unsafe { identity_of(driver, device_of(self.main.context()), stream.handle()) };
        // A stream that is being captured does not tell, and is not destroyed meanwhile.
        id.ok().flatten().map_or(ReaderKey::Lasting(stream), ReaderKey::Passing)
    }

    fn lend<'a>(
        &'a self,
        readers: &mut Readers<T>,
        reader: ReaderKey,
    ) -> Result<&'a CudaSlice<T>, Error> {
        let join = self.shared.joins.of(self.main.context())?;
        let known = readers.shells.iter().position(|(key, _)| *key == reader);
        let at = match known {
            Some(at) => at,
            None if readers.shells.len() == SHELLS_MAX => {
                let at = readers.passed_on % SHELLS_MAX;
                readers.passed_on += 1;
                readers.shells[at].0 = reader;
                readers.shells[at].1.pass_on(&join)?;
                at
            }
            None => {
                // SAFETY: the memory is that of `main`, which outlives the shell.
                let shell = unsafe { Shell::new(&self.main, self.address, &join)? };
                readers.shells.push((reader, Arc::new(shell)));
                readers.shells.len() - 1
            }
        };
        let shell = Arc::as_ptr(&readers.shells[at].1);
        // SAFETY: entries are dropped only with `self`, and changed only through `&mut self`.
        let shell: &'a Shell<T> = unsafe { &*shell };
        Ok(shell.lend(&self.main, readers.written, &join)?)
    }

    /// The slice for a write on whichever stream, which cudarc makes wait for its events: they stand
    /// for all readers now.
    pub(crate) fn writer(&mut self) -> &mut CudaSlice<T> {
        let managed = self.is_managed();
        let readers = self.readers.get_mut();
        readers.written += 1;
        let crowded = readers.shells.iter().any(|(_, shell)| shell.is_lent())
            || readers.guests.iter().any(|guest| guest.is_owed());
        if crowded {
            let context = self.main.context().clone();
            let gathered = quietly(&context, || self.gather(managed));
            if let Err(error) | Ok(Err(error)) = gathered {
                context.record_err::<()>(Err(error));
            }
        }
        &mut self.main
    }

    /// Lets a write wait for all readers.
    fn gather(&mut self, managed: bool) -> Result<(), DriverError> {
        let own = self.main.stream().clone();
        let gatherer = if managed { self.shared.joins.of(own.context())? } else { own };
        self.readers.get_mut().wait_for_all(&gatherer)?;
        // Waits for the slice's own events, and records its write event, if cudarc manages streams.
        // Else its own stream has waited, and is the only one.
        drop(self.main.device_ptr_mut(&gatherer));
        self.readers.get_mut().first = None;
        Ok(())
    }

    /// Later work of `stream`, of another context, waits for what was written on the slice's own.
    fn order_foreign(&self, stream: &CudaStream) -> Result<(), DriverError> {
        if self.is_managed() {
            return quietly(stream.context(), || {
                event_of(self.main.device_ptr(stream).1);
            });
        }
        stream.wait(&self.main.stream().record_event(None)?)
    }

    /// The same for all that uses the slice.
    fn order_foreign_writer(&mut self, stream: &CudaStream) -> Result<(), DriverError> {
        if self.is_managed() {
            return quietly(stream.context(), || {
                event_of(self.main.device_ptr_mut(stream).1);
            });
        }
        stream.wait(&self.main.stream().record_event(None)?)
    }

    /// As of a `CudaSlice`. For a stream of another context the thread waits until the read is done,
    /// since cudarc could record nothing.
    pub(crate) fn device_ptr<'a>(&'a self, stream: &'a CudaStream) -> (u64, SyncOnDrop<'a>) {
        if stream.context() == self.main.context() {
            return self.reader(Some(StreamKey::of(stream))).device_ptr(stream);
        }
        stream.context().record_err(self.order_foreign(stream));
        (self.address, SyncOnDrop::sync_stream(stream))
    }

    /// The same to be written.
    pub(crate) fn device_ptr_mut<'a>(
        &'a mut self,
        stream: &'a CudaStream,
    ) -> (u64, SyncOnDrop<'a>) {
        if stream.context() == self.main.context() {
            return self.writer().device_ptr_mut(stream);
        }
        self.writer();
        stream.context().record_err(self.order_foreign_writer(stream));
        (self.address, SyncOnDrop::sync_stream(stream))
    }

    /// The guest on `stream`, which waits for what was written; one view of it more is alive.
    pub(crate) fn admit(&self, stream: &Arc<CudaStream>) -> Result<&Guest<T>, Error> {
        let guest = self.guest(stream)?;
        if self.is_managed() {
            self.order_foreign(stream)?;
        } else {
            guest.follow(self.main.stream())?;
        }
        guest.enter();
        Ok(guest)
    }

    fn guest(&self, stream: &Arc<CudaStream>) -> Result<&Guest<T>, Error> {
        let mut readers = self.readers.lock();
        let known = readers.guests.iter().position(|guest| guest.is(stream));
        let at = match known {
            Some(at) => at,
            None => {
                // SAFETY: the memory is that of `main`, which outlives the guest; the caller has asked
                // whether the device has access.
                let guest = unsafe { Guest::new(&self.main, self.address, stream)? };
                readers.guests.push(Arc::new(guest));
                // A stream that nobody else has goes, and its place with it.
                let left = readers.guests.iter().position(|guest| guest.is_left());
                if let Some(left) = left.map(|left| readers.guests.swap_remove(left))
                    && let Some(new) = readers.guests.iter().find(|guest| guest.is(stream))
                    && let Some(mut left) = Arc::into_inner(left)
                {
                    new.inherit(&mut left)?;
                }
                readers.guests.iter().position(|guest| guest.is(stream)).unwrap_or_default()
            }
        };
        let guest = Arc::as_ptr(&readers.guests[at]);
        // SAFETY: as for the shells.
        Ok(unsafe { &*guest })
    }

    /// As [`Tracked::admit`], for a write: its number among the guests.
    pub(crate) fn admit_writer(&mut self, stream: &Arc<CudaStream>) -> Result<usize, Error> {
        self.writer();
        self.guest(stream)?;
        let managed = self.is_managed();
        if managed {
            self.order_foreign_writer(stream)?;
        }
        let readers = self.readers.get_mut();
        let at = readers.guests.iter().position(|guest| guest.is(stream)).unwrap_or_default();
        if !managed {
            readers.guests[at].follow(self.main.stream())?;
        }
        readers.guests[at].enter();
        Ok(at)
    }

    fn guest_at(&mut self, at: usize) -> Option<&mut Guest<T>> {
        self.readers.get_mut().guests.get_mut(at).and_then(Arc::get_mut)
    }

    /// The shell of a guest that was admitted to write.
    pub(crate) fn guest_reader(&self, at: usize) -> &CudaSlice<T> {
        let guest = Arc::as_ptr(&self.readers.lock().guests[at]);
        // SAFETY: as for the shells.
        unsafe { &*guest }.shell()
    }

    /// The same to be written.
    pub(crate) fn guest_writer(&mut self, at: usize) -> &mut CudaSlice<T> {
        match self.readers.get_mut().guests.get_mut(at).and_then(Arc::get_mut) {
            Some(guest) => guest.shell_mut(),
            // Not reached: entries stay as long as the slice, and are never cloned.
            None => &mut self.main,
        }
    }

    /// A guest has written: the slice's own stream waits for it, and others wait for that.
    pub(crate) fn leave_written(&mut self, at: usize) {
        if let Some(guest) = self.guest_at(at) {
            guest.leave_written();
        }
        let own = self.main.stream().clone();
        let gathered = quietly(own.context(), || {
            self.readers.get_mut().wait_for_all(&own)?;
            drop(self.main.device_ptr_mut(&own));
            Ok(())
        });
        if let Err(error) | Ok(Err(error)) = gathered {
            own.context().record_err::<()>(Err(error));
        }
    }

    /// The slice's own stream waits for all uses; what cudarc made is dropped. The caller may then free
    /// the memory in the order of that stream.
    fn end(&mut self) -> Result<(), DriverError> {
        let own = self.main.stream().clone();
        let mut waited = self.readers.get_mut().wait_for_all(&own);
        if *self.was_managed.get_mut() && !own.context().is_managing_stream_synchronization() {
            // The other streams are gone, but their work may still run, and cudarc would not wait.
            let read = event_of(self.main.device_ptr(&own).1).map_or(Ok(()), |it| own.wait(it));
            let write =
                event_of(self.main.device_ptr_mut(&own).1).map_or(Ok(()), |it| own.wait(it));
            waited = waited.and(read).and(write);
        }
        if waited.is_err() {
            waited = own.context().synchronize();
        }
        let readers = self.readers.get_mut();
        readers.shells_mut().for_each(Shell::end);
        readers.guests.iter_mut().filter_map(Arc::get_mut).for_each(Guest::end);
        shell::end(&mut self.main);
        waited
    }
}

impl<T> Readers<T> {
    fn shells_mut(&mut self) -> impl Iterator<Item = &mut Shell<T>> {
        self.shells.iter_mut().filter_map(|(_, shell)| Arc::get_mut(shell))
    }

    /// Later work of `stream` waits for all readers that have events of their own.
    fn wait_for_all(&mut self, stream: &CudaStream) -> Result<(), DriverError> {
        for shell in self.shells_mut() {
            shell.wait_for_reads(stream)?;
        }
        for guest in self.guests.iter_mut().filter_map(Arc::get_mut) {
            guest.wait_for_uses(stream)?;
        }
        Ok(())
    }
}

impl<T> Drop for Tracked<T> {
    fn drop(&mut self) {
        if is_gone() {
            let readers = self.readers.get_mut();
            mem::forget((mem::take(&mut readers.shells), mem::take(&mut readers.guests)));
            return;
        }
        let context = self.main.context().clone();
        if let Err(error) | Ok(Err(error)) = quietly(&context, || self.end()) {
            tracing::debug!(%error, "the end of a slice's uses could not be waited for");
        }
    }
}
