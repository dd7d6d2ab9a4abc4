//! [`PoolView`] and [`PoolViewMut`]: a slice for one stream, which may be another GPU's.

use std::fmt;
use std::ops::{Deref, RangeBounds};
use std::sync::Arc;

use cudarc::driver::{
    CudaSlice, CudaStream, CudaViewMut, DevicePtr, DevicePtrMut, DeviceSlice, SyncOnDrop, sys,
};

use crate::guest::Guest;
use crate::tracked::Tracked;

/// A slice for reads on the stream that it was asked for: [`PoolSlice::on`](crate::PoolSlice::on).
///
/// For reading it is a `CudaSlice`, by `Deref`. Drop it once the work that uses it is enqueued. If it
/// is forgotten (`mem::forget`), whoever waits for it waits on the host for all that its stream has to
/// do.
pub struct PoolView<'a, T> {
    slice: &'a CudaSlice<T>,
    guest: Option<&'a Guest<T>>,
}

impl<'a, T> PoolView<'a, T> {
    pub(crate) fn of_reader(slice: &'a CudaSlice<T>) -> Self {
        PoolView { slice, guest: None }
    }

    pub(crate) fn of_guest(guest: &'a Guest<T>) -> Self {
        PoolView { slice: guest.shell(), guest: Some(guest) }
    }
}

impl<T> Drop for PoolView<'_, T> {
    fn drop(&mut self) {
        if let Some(guest) = self.guest {
            guest.leave();
        }
    }
}

impl<T> Deref for PoolView<'_, T> {
    type Target = CudaSlice<T>;

    fn deref(&self) -> &CudaSlice<T> {
        self.slice
    }
}

impl<T> DeviceSlice<T> for PoolView<'_, T> {
    fn len(&self) -> usize {
        self.slice.len()
    }

    fn stream(&self) -> &Arc<CudaStream> {
        self.slice.stream()
    }
}

impl<T> DevicePtr<T> for PoolView<'_, T> {
    fn device_ptr<'a>(&'a self, stream: &'a CudaStream) -> (sys::CUdeviceptr, SyncOnDrop<'a>) {
        self.slice.device_ptr(stream)
    }
}

impl<T> fmt::Debug for PoolView<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PoolView({} elements)", self.slice.len())
    }
}

/// A slice for writes on the stream that it was asked for:
/// [`PoolSlice::on_mut`](crate::PoolSlice::on_mut).
///
/// Drop it once the work that uses it is enqueued. If it is forgotten (`mem::forget`), reads that come
/// next are not ordered behind it.
pub struct PoolViewMut<'a, T> {
    tracked: &'a mut Tracked<T>,
    guest: Option<usize>,
}

impl<'a, T> PoolViewMut<'a, T> {
    pub(crate) fn new(tracked: &'a mut Tracked<T>, guest: Option<usize>) -> Self {
        PoolViewMut { tracked, guest }
    }

    #[inline]
    pub(crate) fn writer(&mut self) -> &mut CudaSlice<T> {
        match self.guest {
            Some(guest) => self.tracked.guest_writer(guest),
            None => self.tracked.writer(),
        }
    }

    fn reader(&self) -> &CudaSlice<T> {
        match self.guest {
            Some(guest) => self.tracked.guest_reader(guest),
            None => self.tracked.any_reader(),
        }
    }

    /// See `CudaSlice::as_view_mut`.
    pub fn as_view_mut(&mut self) -> CudaViewMut<'_, T> {
        self.writer().as_view_mut()
    }

    /// See `CudaSlice::try_slice_mut`.
    pub fn try_slice_mut(&mut self, bounds: impl RangeBounds<usize>) -> Option<CudaViewMut<'_, T>> {
        self.writer().try_slice_mut(bounds)
    }
}

impl<T> Drop for PoolViewMut<'_, T> {
    fn drop(&mut self) {
        if let Some(guest) = self.guest {
            self.tracked.leave_written(guest);
        }
    }
}

impl<T> DeviceSlice<T> for PoolViewMut<'_, T> {
    fn len(&self) -> usize {
        self.reader().len()
    }

    fn stream(&self) -> &Arc<CudaStream> {
        self.reader().stream()
    }
}

impl<T> DevicePtr<T> for PoolViewMut<'_, T> {
    fn device_ptr<'a>(&'a self, stream: &'a CudaStream) -> (sys::CUdeviceptr, SyncOnDrop<'a>) {
        self.reader().device_ptr(stream)
    }
}

impl<T> DevicePtrMut<T> for PoolViewMut<'_, T> {
    fn device_ptr_mut<'a>(
        &'a mut self,
        stream: &'a CudaStream,
    ) -> (sys::CUdeviceptr, SyncOnDrop<'a>) {
        self.writer().device_ptr_mut(stream)
    }
}

impl<T> fmt::Debug for PoolViewMut<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PoolViewMut({} elements)", self.reader().len())
    }
}
