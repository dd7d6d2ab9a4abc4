//! [`StreamKey`]: which queue of a context a stream is.

use std::thread::{self, ThreadId};

use cudarc::driver::CudaStream;
use vmm_sys::{StreamHandle, StreamId};

/// The queue that a handle names in the calling thread. Valid as long as the stream lives: handles are
/// given out again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct StreamKey {
    handle: usize,
    /// Of the default stream of a thread, which every thread has under the same handle.
    thread: Option<ThreadId>,
}

const LEGACY: usize = 1;
const PER_THREAD: usize = 2;

impl StreamKey {
    pub(crate) fn of(stream: &CudaStream) -> StreamKey {
        StreamKey::named(stream.cu_stream().addr())
    }

    /// The queue that `handle` names here. 0 and 1 are the same.
    pub(crate) fn named(handle: usize) -> StreamKey {
        let thread = (handle == PER_THREAD).then(|| thread::current().id());
        StreamKey { handle: handle.max(LEGACY), thread }
    }

    pub(crate) fn handle(self) -> StreamHandle {
        StreamHandle(self.handle as u64)
    }

    /// Whether it is a default stream: nobody makes it, and nobody destroys it.
    pub(crate) fn is_default(self) -> bool {
        self.handle <= PER_THREAD
    }
}

/// A stream that reads, for as long as a slice remembers it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReaderKey {
    /// Its handle stays its own: a default stream, or the slice's own.
    Lasting(StreamKey),
    /// It may go, and its handle come back for another, while its work still runs.
    Passing(StreamId),
}
