//! [`PoolSlice`]: memory of the pool, as good as a `CudaSlice`.

use std::fmt;
use std::ops::{Deref, RangeBounds};
use std::sync::Arc;

use cudarc::driver::{
    CudaContext, CudaSlice, CudaStream, CudaViewMut, DevicePtr, DevicePtrMut, DeviceRepr,
    DeviceSlice, SyncOnDrop, sys,
};
use vmm_pool::Buffer;
use vmm_sys::Access;

use crate::error::Error;
use crate::homes::{Home, device_of, primary};
use crate::key::StreamKey;
use crate::pool::{CudaPool, Shared};
use crate::tracked::Tracked;
use crate::view::{PoolView, PoolViewMut};

/// `Vec<T>` on a device, in memory of the pool. Made by [`CudaPool`].
///
/// It goes wherever cudarc takes slices by its traits. For reading it is a `CudaSlice`, by `Deref`:
/// `slice`, `split_at`, `as_view`, `len` and the like. Nothing gives a `&mut CudaSlice`.
///
/// Who owns the physical memory: the lane of its stream. Is the address stable: yes, until the drop.
/// Who may access: the device of its stream, and whom the pool's policy names.
///
/// Dropping it, in any thread, frees in the order of its stream, which waits for all uses that cudarc
/// and this crate know of. It keeps its stream, as a `CudaSlice` does, and the pool.
///
/// **Streams.** `&slice` as an argument of launches and copies is right on any streams of its context,
/// at the same time too. A view that is taken with `slice`, `split_at` or `as_view` is cudarc's: its
/// readers share one event. For views that are read on several streams take [`PoolSlice::on`] each.
///
/// **Another GPU's stream** comes by [`PoolSlice::on`] and [`PoolSlice::on_mut`]. Without them a launch
/// there is submitted and then refused by cudarc; copies and cuBLAS are right, and the thread waits for
/// them.
pub struct PoolSlice<T> {
    /// Declared first: uses are waited for before the memory is freed.
    tracked: Tracked<T>,
    buffer: Buffer,
    home: Arc<Home>,
}

impl<T> PoolSlice<T> {
    /// # Safety
    /// The memory is not set.
    pub(crate) unsafe fn new(
        shared: &Arc<Shared>,
        stream: &Arc<CudaStream>,
        home: Arc<Home>,
        buffer: Buffer,
        len: usize,
    ) -> Result<PoolSlice<T>, Error> {
        // SAFETY: the buffer is of the stream's device, long enough, and freed after `tracked` is gone.
        let tracked = unsafe { Tracked::new(shared.clone(), stream, buffer.address(), len)? };
        Ok(PoolSlice { tracked, buffer, home })
    }

    /// The slice for a launch on `stream`.
    #[inline]
    pub(crate) fn reader(&self, stream: Option<StreamKey>) -> &CudaSlice<T> {
        self.tracked.reader(stream)
    }

    #[inline]
    pub(crate) fn writer(&mut self) -> &mut CudaSlice<T> {
        self.tracked.writer()
    }

    /// The slice for reads on `stream`, of whichever context: a kernel argument and source of copies
    /// there. Later writes, and the drop, wait for what is enqueued on `stream` until the view is
    /// dropped.
    ///
    /// # Errors
    /// [`Error::NoAccess`] if the stream is of another device and the pool does not let that read;
    /// [`Error::NotPrimary`]; [`Error::Cudarc`].
    pub fn on(&self, stream: &Arc<CudaStream>) -> Result<PoolView<'_, T>, Error> {
        if stream.context() == self.context() {
            return Ok(PoolView::of_reader(self.reader(Some(StreamKey::of(stream)))));
        }
        self.check_access(stream, Access::Read)?;
        Ok(PoolView::of_guest(self.tracked.admit(stream)?))
    }

    /// The slice for writes on `stream`, of whichever context. Later uses wait for what is enqueued on
    /// `stream` until the view is dropped.
    ///
    /// # Errors
    /// As [`PoolSlice::on`], for writing.
    pub fn on_mut(&mut self, stream: &Arc<CudaStream>) -> Result<PoolViewMut<'_, T>, Error> {
        if stream.context() == self.context() {
            return Ok(PoolViewMut::new(&mut self.tracked, None));
        }
        self.check_access(stream, Access::ReadWrite)?;
        let guest = self.tracked.admit_writer(stream)?;
        Ok(PoolViewMut::new(&mut self.tracked, Some(guest)))
    }

    fn check_access(&self, stream: &CudaStream, wanted: Access) -> Result<(), Error> {
        let (owner, accessor) = (self.buffer.device(), primary(stream.context())?);
        let access = self.tracked.shared.pool.access(owner, accessor)?;
        check_access((owner, accessor), access, wanted)
    }

    /// See `CudaSlice::as_view_mut`.
    pub fn as_view_mut(&mut self) -> CudaViewMut<'_, T> {
        self.writer().as_view_mut()
    }

    /// See `CudaSlice::slice_mut`.
    ///
    /// # Panics
    /// If the range does not lie in the slice.
    pub fn slice_mut(&mut self, bounds: impl RangeBounds<usize>) -> CudaViewMut<'_, T> {
        self.writer().slice_mut(bounds)
    }

    /// See `CudaSlice::try_slice_mut`.
    pub fn try_slice_mut(&mut self, bounds: impl RangeBounds<usize>) -> Option<CudaViewMut<'_, T>> {
        self.writer().try_slice_mut(bounds)
    }

    /// See `CudaSlice::split_at_mut`.
    ///
    /// # Panics
    /// If `mid` is larger than the length.
    pub fn split_at_mut(&mut self, mid: usize) -> (CudaViewMut<'_, T>, CudaViewMut<'_, T>) {
        self.writer().split_at_mut(mid)
    }

    /// See `CudaSlice::try_split_at_mut`.
    pub fn try_split_at_mut(
        &mut self,
        mid: usize,
    ) -> Option<(CudaViewMut<'_, T>, CudaViewMut<'_, T>)> {
        self.writer().try_split_at_mut(mid)
    }

    /// See `CudaSlice::transmute_mut`.
    ///
    /// # Safety
    /// The bytes are valid elements of `S`.
    pub unsafe fn transmute_mut<S>(&mut self, len: usize) -> Option<CudaViewMut<'_, S>> {
        // SAFETY: by this function's own condition.
        unsafe { self.writer().transmute_mut(len) }
    }

    /// The pool's buffer without its elements, for example to keep it with a graph
    /// ([`vmm_pool::GraphMemory::keep`]). The slice's stream waits for its uses.
    pub fn into_buffer(self) -> Buffer {
        let PoolSlice { tracked, buffer, home } = self;
        drop((tracked, home));
        buffer
    }
}

/// Whether `access` is enough, of the owner's memory for the accessor.
pub(crate) fn check_access(
    (owner, accessor): (vmm_sys::DeviceId, vmm_sys::DeviceId),
    access: Access,
    wanted: Access,
) -> Result<(), Error> {
    match (access, wanted) {
        (Access::ReadWrite, _) | (Access::Read, Access::Read) => Ok(()),
        _ => Err(Error::NoAccess { owner, accessor, access, wanted }),
    }
}

impl<T: DeviceRepr> PoolSlice<T> {
    /// A copy for the same stream, in memory of the same pool.
    ///
    /// # Errors
    /// As [`CudaPool::alloc`].
    pub fn try_clone(&self) -> Result<PoolSlice<T>, Error> {
        let stream = self.tracked.any_reader().stream();
        // SAFETY: it is set in the next lines, or empty.
        let mut copy = unsafe { self.pool().alloc::<T>(stream, self.len())? };
        if self.num_bytes() > 0 {
            stream.memcpy_dtod(self, &mut copy)?;
        }
        Ok(copy)
    }

    fn pool(&self) -> CudaPool {
        CudaPool::of(self.tracked.shared.clone())
    }
}

impl<T: DeviceRepr> Clone for PoolSlice<T> {
    /// As [`PoolSlice::try_clone`].
    ///
    /// # Panics
    /// If there is no memory, as `CudaSlice` does, for `Clone` has no other way to say it.
    fn clone(&self) -> Self {
        match self.try_clone() {
            Ok(copy) => copy,
            Err(error) => panic!("a slice could not be cloned: {error}"),
        }
    }
}

impl<T> Deref for PoolSlice<T> {
    type Target = CudaSlice<T>;

    fn deref(&self) -> &CudaSlice<T> {
        self.tracked.any_reader()
    }
}

impl<T> DeviceSlice<T> for PoolSlice<T> {
    fn len(&self) -> usize {
        self.tracked.any_reader().len()
    }

    fn stream(&self) -> &Arc<CudaStream> {
        self.tracked.any_reader().stream()
    }
}

impl<T> DevicePtr<T> for PoolSlice<T> {
    fn device_ptr<'a>(&'a self, stream: &'a CudaStream) -> (sys::CUdeviceptr, SyncOnDrop<'a>) {
        self.tracked.device_ptr(stream)
    }
}

impl<T> DevicePtrMut<T> for PoolSlice<T> {
    fn device_ptr_mut<'a>(
        &'a mut self,
        stream: &'a CudaStream,
    ) -> (sys::CUdeviceptr, SyncOnDrop<'a>) {
        self.tracked.device_ptr_mut(stream)
    }
}

impl<T> fmt::Debug for PoolSlice<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (len, context): (usize, &CudaContext) = (self.len(), self.context());
        let (address, device) = (self.buffer.address(), device_of(context));
        write!(f, "PoolSlice({len} elements at {address:#x} for a stream of {device})")
    }
}
