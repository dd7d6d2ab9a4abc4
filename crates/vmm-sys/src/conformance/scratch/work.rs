//! Copies, kernels, streams and events, and the checks of bytes made with them.

use std::fmt::Display;
use std::thread::JoinHandle;

use crate::error::DriverResult;
use crate::types::{
    DeviceId, EventHandle, IpcEventHandle, PinnedAddress, ProbeKernel, StreamHandle, Transfer,
};

use super::super::check::{pattern, same, same_bytes};
use super::super::outcome::Step;
use super::Scratch;

/// Bytes of one word of a kernel.
pub(crate) const WORD: u64 = 4;

impl Scratch<'_> {
    // ---- copies ----

    /// Copies `bytes` to `dst`, with the context of `device` current.
    pub(crate) fn write(&self, device: DeviceId, dst: u64, bytes: &[u8]) -> DriverResult<()> {
        let length = bytes.len() as u64;
        self.transfer(device, Transfer::HostToDevice { dst, src: bytes.as_ptr(), bytes: length })
    }

    /// Copies `bytes` from `src`, with the context of `device` current.
    pub(crate) fn read(&self, device: DeviceId, src: u64, bytes: u64) -> DriverResult<Vec<u8>> {
        // Not zero: a copy that does nothing must not look like fresh memory.
        let mut buffer = vec![0xa5; bytes as usize];
        let dst = buffer.as_mut_ptr();
        self.transfer(device, Transfer::DeviceToHost { dst, src, bytes })?;
        Ok(buffer)
    }

    /// Fills with one byte.
    pub(crate) fn fill(
        &self,
        device: DeviceId,
        dst: u64,
        value: u8,
        bytes: u64,
    ) -> DriverResult<()> {
        self.transfer(device, Transfer::Fill8 { dst, value, bytes })
    }

    /// A synchronous transfer whose device sides are of this row.
    pub(crate) fn transfer(&self, device: DeviceId, transfer: Transfer) -> DriverResult<()> {
        self.must_own_sides(&transfer);
        // SAFETY: device sides are of this row; host sides come from the two methods above, which
        // pass live buffers of that length, or from a row that borrows one over the call.
        unsafe { self.driver().copy(device, &transfer) }
    }

    /// A transfer between device addresses on a stream.
    pub(crate) fn transfer_on(
        &self,
        device: DeviceId,
        transfer: Transfer,
        stream: StreamHandle,
    ) -> DriverResult<()> {
        self.must_own_sides(&transfer);
        self.must_run(stream);
        let has_host_side =
            matches!(transfer, Transfer::HostToDevice { .. } | Transfer::DeviceToHost { .. });
        assert!(!has_host_side, "host memory might not outlive the stream's work");
        // SAFETY: both sides are device addresses of this row, and so is the stream.
        unsafe { self.driver().copy_async(device, &transfer, stream) }
    }

    fn must_own_sides(&self, transfer: &Transfer) {
        match *transfer {
            Transfer::HostToDevice { dst, bytes, .. } | Transfer::Fill8 { dst, bytes, .. } => {
                self.must_own(dst, bytes);
            }
            Transfer::DeviceToHost { src, bytes, .. } => self.must_own(src, bytes),
            Transfer::DeviceToDevice { dst, src, bytes }
            | Transfer::Peer { dst, src, bytes, .. } => {
                self.must_own(dst, bytes);
                self.must_own(src, bytes);
            }
        }
    }

    // ---- kernels ----

    /// Enqueues a kernel whose addresses are of this row.
    pub(crate) fn launch(
        &self,
        device: DeviceId,
        kernel: ProbeKernel,
        stream: StreamHandle,
    ) -> DriverResult<()> {
        match kernel {
            ProbeKernel::FillWords { dst, words, .. } => self.must_own(dst, words * WORD),
            ProbeKernel::CopyWords { dst, src, words } => {
                self.must_own(dst, words * WORD);
                self.must_own(src, words * WORD);
            }
            ProbeKernel::CheckWords { src, words, errors, .. } => {
                self.must_own(src, words * WORD);
                self.must_own(errors, WORD);
            }
            ProbeKernel::Spin { done, .. } if done != 0 => self.must_own(done, WORD),
            ProbeKernel::Spin { .. } => {}
        }
        self.must_run(stream);
        // SAFETY: stream and addresses are of this row. A row that lets a kernel touch what it may
        // not is one of those that have a driver of their own.
        unsafe { self.driver().launch(device, &kernel, stream) }
    }

    /// Runs one kernel to its end on a stream of its own.
    pub(crate) fn run_kernel(&self, device: DeviceId, kernel: ProbeKernel) -> DriverResult<()> {
        let stream = self.stream(device)?;
        self.launch(device, kernel, stream)?;
        self.synchronize(device, stream)
    }

    /// A kernel of `device` writes `value`, `value + 1`, … there.
    pub(crate) fn fill_words(
        &self,
        device: DeviceId,
        dst: u64,
        words: u64,
        value: u32,
    ) -> DriverResult<()> {
        self.run_kernel(device, ProbeKernel::FillWords { dst, words, value })
    }

    /// How many of the words there are not `value`, `value + 1`, …, as a kernel of `device` sees
    /// it. `errors` is a word that the device may write.
    pub(crate) fn wrong_words(
        &self,
        device: DeviceId,
        src: u64,
        words: u64,
        value: u32,
        errors: u64,
    ) -> DriverResult<u32> {
        self.fill(device, errors, 0, WORD)?;
        self.run_kernel(device, ProbeKernel::CheckWords { src, words, value, errors })?;
        self.word(device, errors)
    }

    /// One word, read by a copy.
    pub(crate) fn word(&self, device: DeviceId, src: u64) -> DriverResult<u32> {
        let bytes = self.read(device, src, WORD)?;
        Ok(u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
    }

    // ---- checks of bytes ----

    /// The words there must be `value`, `value + 1`, …, as a copy to the host sees it.
    pub(crate) fn expect_words(
        &self,
        what: impl Display,
        device: DeviceId,
        src: u64,
        words: u64,
        value: u32,
    ) -> Step<()> {
        same_bytes(what, &self.read(device, src, words * WORD)?, &pattern(words, value))
    }

    /// Every byte there must be `value`.
    pub(crate) fn expect_fill(
        &self,
        what: impl Display,
        device: DeviceId,
        src: u64,
        bytes: u64,
        value: u8,
    ) -> Step<()> {
        same_bytes(what, &self.read(device, src, bytes)?, &vec![value; bytes as usize])
    }

    /// A kernel of `device` must find `value`, `value + 1`, … there; that the kernel can tell is
    /// shown by asking it for other words too.
    pub(crate) fn expect_words_by_kernel(
        &self,
        what: impl Display,
        device: DeviceId,
        src: u64,
        words: u64,
        value: u32,
    ) -> Step<()> {
        let errors = self.buffer(self.g(), device, &[device])?;
        let wrong = self.wrong_words(device, src, words, value, errors)?;
        same(format_args!("{what}: wrong words"), wrong, 0)?;
        let control = self.wrong_words(device, src, words, value.wrapping_add(1), errors)?;
        // Counts wrap at 32 bits as the kernel's counter does.
        same(format_args!("{what}: wrong words of another pattern"), control, words as u32)
    }

    // ---- streams and events ----

    pub(crate) fn stream(&self, device: DeviceId) -> DriverResult<StreamHandle> {
        Ok(self.note_stream(device, self.driver().stream_create(device)?))
    }

    /// A stream that is ordered with the legacy stream.
    pub(crate) fn blocking_stream(&self, device: DeviceId) -> DriverResult<StreamHandle> {
        Ok(self.note_stream(device, self.driver().stream_create_blocking(device)?))
    }

    fn note_stream(&self, device: DeviceId, stream: StreamHandle) -> StreamHandle {
        self.made.lock().streams.push((device, stream));
        stream
    }

    pub(crate) fn destroy_stream(
        &self,
        device: DeviceId,
        stream: StreamHandle,
    ) -> DriverResult<()> {
        let mut made = self.made.lock();
        let index = made.streams.iter().position(|&(_, made)| made == stream);
        made.streams.swap_remove(index.expect("rows destroy streams that they made, once"));
        assert!(!made.held.contains(&(device, stream)), "a held stream stays until the row ends");
        drop(made);
        // SAFETY: the stream was on record, so it is live, and now nobody can use it through here.
        unsafe { self.driver().stream_destroy(device, stream) }
    }

    pub(crate) fn synchronize(&self, device: DeviceId, stream: StreamHandle) -> DriverResult<()> {
        self.must_run(stream);
        // SAFETY: the stream is of this row.
        unsafe { self.driver().stream_synchronize(device, stream) }
    }

    /// Whether all work of the stream is done.
    pub(crate) fn is_idle(&self, device: DeviceId, stream: StreamHandle) -> DriverResult<bool> {
        self.must_run(stream);
        // SAFETY: the stream is of this row.
        unsafe { self.driver().stream_query(device, stream) }
    }

    pub(crate) fn stream_id(&self, device: DeviceId, stream: StreamHandle) -> DriverResult<u64> {
        self.must_run(stream);
        // SAFETY: the stream is of this row.
        Ok(unsafe { self.driver().stream_id(device, stream)? }.0)
    }

    pub(crate) fn event(&self, device: DeviceId) -> DriverResult<EventHandle> {
        Ok(self.note_event(device, self.driver().event_create(device)?))
    }

    /// An event that other processes can open.
    pub(crate) fn interprocess_event(&self, device: DeviceId) -> DriverResult<EventHandle> {
        Ok(self.note_event(device, self.driver().event_create_interprocess(device)?))
    }

    /// An event of another process, which lives until this row, or order, ends.
    pub(crate) fn open_event(
        &self,
        device: DeviceId,
        handle: &IpcEventHandle,
    ) -> DriverResult<EventHandle> {
        Ok(self.note_event(device, self.driver().ipc_event_open(device, handle)?))
    }

    fn note_event(&self, device: DeviceId, event: EventHandle) -> EventHandle {
        self.made.lock().events.push((device, event));
        event
    }

    pub(crate) fn event_handle(
        &self,
        device: DeviceId,
        event: EventHandle,
    ) -> DriverResult<IpcEventHandle> {
        self.must_mark(event);
        // SAFETY: the event is of this row.
        unsafe { self.driver().ipc_event_handle(device, event) }
    }

    pub(crate) fn record(
        &self,
        device: DeviceId,
        event: EventHandle,
        stream: StreamHandle,
    ) -> DriverResult<()> {
        self.must_mark(event);
        self.must_run(stream);
        // SAFETY: event and stream are of this row.
        unsafe { self.driver().event_record(device, event, stream) }
    }

    pub(crate) fn has_passed(&self, device: DeviceId, event: EventHandle) -> DriverResult<bool> {
        self.must_mark(event);
        // SAFETY: the event is of this row.
        unsafe { self.driver().event_query(device, event) }
    }

    pub(crate) fn wait_event(&self, device: DeviceId, event: EventHandle) -> DriverResult<()> {
        self.must_mark(event);
        // SAFETY: the event is of this row.
        unsafe { self.driver().event_synchronize(device, event) }
    }

    /// Later work of the stream waits for the event.
    pub(crate) fn follow(
        &self,
        device: DeviceId,
        stream: StreamHandle,
        event: EventHandle,
    ) -> DriverResult<()> {
        self.must_mark(event);
        self.must_run(stream);
        // SAFETY: event and stream are of this row.
        unsafe { self.driver().stream_wait_event(device, stream, event) }
    }

    // ---- holding a stream: see `Gate` ----

    pub(crate) fn wait_value(
        &self,
        device: DeviceId,
        stream: StreamHandle,
        word: PinnedAddress,
        value: u32,
    ) -> DriverResult<()> {
        self.must_run(stream);
        self.made.lock().held.push((device, stream));
        // SAFETY: the stream is of this row; the word is freed after the stream was synchronised.
        unsafe { self.driver().stream_wait_value32(device, stream, word, value) }
    }

    pub(crate) fn host_function(
        &self,
        device: DeviceId,
        stream: StreamHandle,
        function: Box<dyn FnOnce() + Send>,
    ) -> DriverResult<()> {
        self.must_run(stream);
        // SAFETY: the stream is of this row.
        unsafe { self.driver().launch_host_function(device, stream, function) }
    }

    /// Keeps a thread that opens a gate until the row ends.
    pub(crate) fn adopt_opener(&self, opener: JoinHandle<()>) {
        self.made.lock().openers.push(opener);
    }
}
