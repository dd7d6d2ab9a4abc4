//! [`ElasticSlice`]: an elastic buffer of the pool, for cudarc.

use std::fmt;
use std::ops::RangeBounds;
use std::sync::Arc;

use cudarc::driver::{
    CudaSlice, CudaStream, CudaView, CudaViewMut, DevicePtr, DevicePtrMut, DeviceRepr, DeviceSlice,
    SyncOnDrop, ValidAsZeroBits, sys,
};
use vmm_pool::{ElasticBuffer, Use};
use vmm_sys::Access;

use crate::error::Error;
use crate::homes::primary;
use crate::key::StreamKey;
use crate::pool::{Shared, bytes_of};
use crate::slice::check_access;
use crate::tracked::Tracked;
use crate::view::{PoolView, PoolViewMut};

/// A slice whose memory comes, goes and moves behind an address that stays:
/// [`CudaPool::elastic`](crate::CudaPool::elastic).
///
/// Kernels and copies get it by [`view`](ElasticSlice::view) and [`view_mut`](ElasticSlice::view_mut),
/// which tell the pool which streams use the memory, and order them as a
/// [`PoolSlice`](crate::PoolSlice)'s are.
///
/// Who owns the physical memory: the slice alone. Is the address stable: yes, until the drop. Who may
/// access: its home, and whom the pool's policy or [`ElasticBuffer::grant`] names.
pub struct ElasticSlice<T> {
    /// Declared first: uses are waited for before the buffer ends.
    tracked: Tracked<T>,
    buffer: ElasticBuffer,
    len: usize,
}

impl<T> ElasticSlice<T> {
    pub(crate) fn new(
        shared: &Arc<Shared>,
        stream: &Arc<CudaStream>,
        buffer: ElasticBuffer,
    ) -> Result<ElasticSlice<T>, Error> {
        check(&buffer, stream, Access::ReadWrite)?;
        let elements = buffer.capacity_bytes().checked_div(size_of::<T>() as u64);
        let capacity = usize::try_from(elements.unwrap_or(0)).unwrap_or(usize::MAX);
        // SAFETY: the addresses are the buffer's until after `tracked` is gone; views are of what has
        // memory behind it.
        let tracked = unsafe { Tracked::new(shared.clone(), stream, buffer.address(), capacity)? };
        Ok(ElasticSlice { tracked, buffer, len: 0 })
    }

    /// Its elements with memory behind them, as asked for.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Elements that there are addresses for.
    pub fn capacity(&self) -> usize {
        self.tracked.any_reader().len()
    }

    /// The pool's buffer: to migrate, to send to sleep, to grant, for figures. What it decommits must
    /// not lie below the length.
    pub fn buffer(&self) -> &ElasticBuffer {
        &self.buffer
    }

    /// Brings memory for `len` elements; less than there are changes nothing.
    ///
    /// # Safety
    /// New elements are not set: write them before they are read.
    ///
    /// # Errors
    /// As [`ElasticBuffer::grow_to`].
    pub unsafe fn grow(&mut self, len: usize) -> Result<(), Error> {
        self.buffer.grow_to(bytes_of::<T>(len)?)?;
        self.len = self.len.max(len);
        Ok(())
    }

    /// Takes the memory beyond `len` elements away, in whole chunks; waits for nothing.
    ///
    /// # Errors
    /// As [`ElasticBuffer::shrink_to`].
    pub fn shrink(&mut self, len: usize) -> Result<(), Error> {
        let len = len.min(self.len);
        self.buffer.shrink_to(bytes_of::<T>(len)?)?;
        self.len = len;
        Ok(())
    }

    /// The elements, for reads on `stream` by what is enqueued until the view is dropped.
    ///
    /// # Errors
    /// [`Error::NoAccess`], [`Error::NotPrimary`], [`Error::Cudarc`]; as [`ElasticBuffer::use_on`].
    pub fn view(&self, stream: &Arc<CudaStream>) -> Result<ElasticView<'_, T>, Error> {
        let tracked = &self.tracked;
        check(&self.buffer, stream, Access::Read)?;
        let in_use = self.use_on(stream)?;
        let view = match stream.context() == tracked.any_reader().context() {
            true => PoolView::of_reader(tracked.reader(Some(StreamKey::of(stream)))),
            false => PoolView::of_guest(tracked.admit(stream)?),
        };
        Ok(ElasticView { view, len: self.len, _in_use: in_use })
    }

    /// The elements, for writes on `stream` by what is enqueued until the view is dropped.
    ///
    /// # Errors
    /// As [`ElasticSlice::view`].
    pub fn view_mut(&mut self, stream: &Arc<CudaStream>) -> Result<ElasticViewMut<'_, T>, Error> {
        check(&self.buffer, stream, Access::ReadWrite)?;
        let in_use = self.use_on(stream)?;
        let is_own = stream.context() == self.tracked.any_reader().context();
        let guest = if is_own { None } else { Some(self.tracked.admit_writer(stream)?) };
        let view = PoolViewMut::new(&mut self.tracked, guest);
        Ok(ElasticViewMut { view, len: self.len, _in_use: in_use })
    }

    fn use_on(&self, stream: &Arc<CudaStream>) -> Result<Use, Error> {
        Ok(self.buffer.use_on(&self.tracked.shared.home(stream)?.lasting()?)?)
    }
}

impl<T: DeviceRepr + ValidAsZeroBits> ElasticSlice<T> {
    /// Brings memory for `len` elements, new ones of zero bits, set on the slice's own stream.
    ///
    /// # Errors
    /// As [`ElasticSlice::grow`] and [`ElasticSlice::view_mut`].
    pub fn grow_zeros(&mut self, len: usize) -> Result<(), Error> {
        let before = self.len;
        // SAFETY: they are set below, or taken back.
        unsafe { self.grow(len)? };
        if self.len == before {
            return Ok(());
        }
        let set = self.set_zeros(before);
        if set.is_err() {
            self.shrink(before)?;
        }
        set
    }

    fn set_zeros(&mut self, from: usize) -> Result<(), Error> {
        let stream = self.tracked.any_reader().stream().clone();
        let mut view = self.view_mut(&stream)?;
        if let Some(mut new) = view.try_slice_mut(from..) {
            stream.memset_zeros(&mut new)?;
        }
        Ok(())
    }
}

fn check(buffer: &ElasticBuffer, stream: &CudaStream, wanted: Access) -> Result<(), Error> {
    let (owner, accessor) = (buffer.device(), primary(stream.context())?);
    let access = if owner == accessor { Access::ReadWrite } else { buffer.access(accessor) };
    check_access((owner, accessor), access, wanted)
}

impl<T> fmt::Debug for ElasticSlice<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ElasticSlice({} of {} elements, {:?})", self.len, self.capacity(), self.buffer)
    }
}

/// The elements of an [`ElasticSlice`] for reads on one stream. Drop it once the work that uses it is
/// enqueued.
pub struct ElasticView<'a, T> {
    /// Declared first: it ends before the use does.
    view: PoolView<'a, T>,
    len: usize,
    _in_use: Use,
}

impl<T> ElasticView<'_, T> {
    pub(crate) fn reader(&self) -> &CudaSlice<T> {
        &self.view
    }

    /// All elements, as cudarc has views.
    pub fn as_view(&self) -> CudaView<'_, T> {
        self.view.slice(..self.len)
    }

    /// Some of them, if they lie in the slice.
    pub fn try_slice(&self, bounds: impl RangeBounds<usize>) -> Option<CudaView<'_, T>> {
        self.as_view().try_slice(bounds)
    }
}

impl<T> DeviceSlice<T> for ElasticView<'_, T> {
    fn len(&self) -> usize {
        self.len
    }

    fn stream(&self) -> &Arc<CudaStream> {
        self.view.stream()
    }
}

impl<T> DevicePtr<T> for ElasticView<'_, T> {
    fn device_ptr<'a>(&'a self, stream: &'a CudaStream) -> (sys::CUdeviceptr, SyncOnDrop<'a>) {
        self.view.device_ptr(stream)
    }
}

impl<T> fmt::Debug for ElasticView<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ElasticView({} elements)", self.len)
    }
}

/// The elements of an [`ElasticSlice`] for writes on one stream. Drop it once the work that uses it is
/// enqueued.
pub struct ElasticViewMut<'a, T> {
    /// Declared first: it ends before the use does.
    view: PoolViewMut<'a, T>,
    len: usize,
    _in_use: Use,
}

impl<T> ElasticViewMut<'_, T> {
    pub(crate) fn writer(&mut self) -> &mut CudaSlice<T> {
        self.view.writer()
    }

    /// All elements, as cudarc has views.
    pub fn as_view_mut(&mut self) -> CudaViewMut<'_, T> {
        self.view.writer().slice_mut(..self.len)
    }

    /// Some of them, if they lie in the slice.
    pub fn try_slice_mut(&mut self, bounds: impl RangeBounds<usize>) -> Option<CudaViewMut<'_, T>> {
        let range = (bounds.start_bound().cloned(), bounds.end_bound().cloned());
        let (start, end) = within(range, self.len)?;
        self.view.try_slice_mut(start..end)
    }
}

/// The bounds as numbers, if they lie in `len` elements.
fn within(
    (start, end): (std::ops::Bound<usize>, std::ops::Bound<usize>),
    len: usize,
) -> Option<(usize, usize)> {
    use std::ops::Bound::{Excluded, Included, Unbounded};
    let start = match start {
        Included(start) => start,
        Excluded(before) => before.checked_add(1)?,
        Unbounded => 0,
    };
    let end = match end {
        Included(last) => last.checked_add(1)?,
        Excluded(end) => end,
        Unbounded => len,
    };
    (start <= end && end <= len).then_some((start, end))
}

impl<T> DeviceSlice<T> for ElasticViewMut<'_, T> {
    fn len(&self) -> usize {
        self.len
    }

    fn stream(&self) -> &Arc<CudaStream> {
        self.view.stream()
    }
}

impl<T> DevicePtr<T> for ElasticViewMut<'_, T> {
    fn device_ptr<'a>(&'a self, stream: &'a CudaStream) -> (sys::CUdeviceptr, SyncOnDrop<'a>) {
        self.view.device_ptr(stream)
    }
}

impl<T> DevicePtrMut<T> for ElasticViewMut<'_, T> {
    fn device_ptr_mut<'a>(
        &'a mut self,
        stream: &'a CudaStream,
    ) -> (sys::CUdeviceptr, SyncOnDrop<'a>) {
        self.view.device_ptr_mut(stream)
    }
}

impl<T> fmt::Debug for ElasticViewMut<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ElasticViewMut({} elements)", self.len)
    }
}
