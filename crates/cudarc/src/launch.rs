//! Kernel arguments, and the stream that a launch goes to.

use std::fmt::{self, Write};

use cudarc::driver::{CudaSlice, LaunchArgs, PushKernelArg};

use crate::elastic::{ElasticView, ElasticViewMut};
use crate::key::StreamKey;
use crate::slice::PoolSlice;
use crate::view::{PoolView, PoolViewMut};

/// How the text begins that `LaunchArgs` prints of itself; the handle of its stream follows.
const BEFORE_HANDLE: &str = "LaunchArgs { stream: CudaStream { cu_stream: 0x";

/// The stream of a launch. cudarc has no accessor, but prints it. `None` if a later cudarc prints
/// something else: then all launches are one reader, as with a `CudaSlice`.
pub(crate) fn stream_of(args: &LaunchArgs<'_>) -> Option<StreamKey> {
    let mut head = Head { text: [0; HEAD_BYTES], bytes: 0 };
    // Ends with an error on purpose, once the head is full.
    let _cut = write!(head, "{args:?}");
    let text = std::str::from_utf8(&head.text[..head.bytes]).ok()?;
    let (digits, _) = text.strip_prefix(BEFORE_HANDLE)?.split_once(',')?;
    usize::from_str_radix(digits, 16).ok().map(StreamKey::named)
}

/// Room for 16 digits and a comma.
const HEAD_BYTES: usize = BEFORE_HANDLE.len() + 17;

/// The beginning of a text.
struct Head {
    text: [u8; HEAD_BYTES],
    bytes: usize,
}

impl Write for Head {
    fn write_str(&mut self, more: &str) -> fmt::Result {
        let taken = more.len().min(HEAD_BYTES - self.bytes);
        self.text[self.bytes..self.bytes + taken].copy_from_slice(&more.as_bytes()[..taken]);
        self.bytes += taken;
        // Nothing after the comma is of interest.
        if self.bytes == HEAD_BYTES || more.contains(',') { Err(fmt::Error) } else { Ok(()) }
    }
}

// SAFETY: as for `&CudaSlice`, which is what is pushed; it lives as long as the slice is borrowed.
unsafe impl<'a, 'b: 'a, T> PushKernelArg<&'b PoolSlice<T>> for LaunchArgs<'a> {
    #[inline(always)]
    fn arg(&mut self, arg: &'b PoolSlice<T>) -> &mut Self {
        let is_managed = arg.context().is_managing_stream_synchronization();
        let stream = if is_managed { stream_of(self) } else { None };
        <Self as PushKernelArg<&'b CudaSlice<T>>>::arg(self, arg.reader(stream))
    }
}

// SAFETY: as for `&mut CudaSlice`, which is what is pushed, borrowed exclusively.
unsafe impl<'a, 'b: 'a, T> PushKernelArg<&'b mut PoolSlice<T>> for LaunchArgs<'a> {
    #[inline(always)]
    fn arg(&mut self, arg: &'b mut PoolSlice<T>) -> &mut Self {
        <Self as PushKernelArg<&'b mut CudaSlice<T>>>::arg(self, arg.writer())
    }
}

// SAFETY: as for `&CudaSlice`, which is what is pushed; it lives as long as the view is borrowed.
unsafe impl<'a, 'b: 'a, 'c: 'b, T> PushKernelArg<&'b PoolView<'c, T>> for LaunchArgs<'a> {
    #[inline(always)]
    fn arg(&mut self, arg: &'b PoolView<'c, T>) -> &mut Self {
        <Self as PushKernelArg<&'b CudaSlice<T>>>::arg(self, arg)
    }
}

// SAFETY: as for `&mut CudaSlice`, which is what is pushed, borrowed exclusively.
unsafe impl<'a, 'b: 'a, 'c: 'b, T> PushKernelArg<&'b mut PoolViewMut<'c, T>> for LaunchArgs<'a> {
    #[inline(always)]
    fn arg(&mut self, arg: &'b mut PoolViewMut<'c, T>) -> &mut Self {
        <Self as PushKernelArg<&'b mut CudaSlice<T>>>::arg(self, arg.writer())
    }
}

// SAFETY: as for `&CudaSlice`, which is what is pushed; it lives as long as the view is borrowed.
unsafe impl<'a, 'b: 'a, 'c: 'b, T> PushKernelArg<&'b ElasticView<'c, T>> for LaunchArgs<'a> {
    #[inline(always)]
    fn arg(&mut self, arg: &'b ElasticView<'c, T>) -> &mut Self {
        <Self as PushKernelArg<&'b CudaSlice<T>>>::arg(self, arg.reader())
    }
}

// SAFETY: as for `&mut CudaSlice`, which is what is pushed, borrowed exclusively.
unsafe impl<'a, 'b: 'a, 'c: 'b, T> PushKernelArg<&'b mut ElasticViewMut<'c, T>> for LaunchArgs<'a> {
    #[inline(always)]
    fn arg(&mut self, arg: &'b mut ElasticViewMut<'c, T>) -> &mut Self {
        <Self as PushKernelArg<&'b mut CudaSlice<T>>>::arg(self, arg.writer())
    }
}
