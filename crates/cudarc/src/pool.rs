//! [`CudaPool`]: allocation for cudarc's streams.

use std::sync::{Arc, Weak};

use cudarc::driver::{CudaContext, CudaStream, DeviceRepr, HostSlice, ValidAsZeroBits};
use parking_lot::Mutex;
use vmm_pool::{CaptureScope, ElasticBuffer, Lane, Pool, PoolBuilder};
use vmm_sys::cuda::Cuda;
use vmm_sys::{Access, Driver};

use crate::elastic::ElasticSlice;
use crate::error::Error;
use crate::homes::{Home, Homes, primary};
use crate::joins::Joins;
use crate::slice::PoolSlice;

/// A pool of memory for the streams of some contexts. Clones share it; slices keep it open.
///
/// Each stream has a lane of the pool: memory that a slice frees is at once reused for the same stream,
/// in its order, and a warm allocation makes no call for memory. A stream that nobody holds any more
/// has its lane closed when memory is first asked for another one.
#[derive(Clone, Debug)]
pub struct CudaPool(Arc<Shared>);

/// What the slices share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) pool: Pool,
    homes: Homes,
    pub(crate) joins: Joins,
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.homes.end(&self.pool);
    }
}

impl Shared {
    pub(crate) fn home(&self, stream: &Arc<CudaStream>) -> Result<Arc<Home>, Error> {
        self.homes.of(&self.pool, stream)
    }
}

/// Settings of a [`CudaPool`]: [`CudaPool::builder`].
#[derive(Debug)]
pub struct CudaPoolBuilder {
    contexts: Vec<Arc<CudaContext>>,
    share: bool,
    configure: Vec<Configure>,
}

struct Configure(Box<dyn FnOnce(PoolBuilder) -> PoolBuilder>);

impl std::fmt::Debug for Configure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Configure")
    }
}

impl CudaPoolBuilder {
    /// Adds the device of a context.
    pub fn context(mut self, context: &Arc<CudaContext>) -> Self {
        self.contexts.push(context.clone());
        self
    }

    /// Lets every device of the contexts use the memory of every other.
    pub fn share(mut self) -> Self {
        self.share = true;
        self
    }

    /// Sets whatever else a pool can be told: limits, marks, chunks, lending.
    pub fn configure(
        mut self,
        settings: impl FnOnce(PoolBuilder) -> PoolBuilder + 'static,
    ) -> Self {
        self.configure.push(Configure(Box::new(settings)));
        self
    }

    /// Opens the driver and builds the pool.
    ///
    /// # Errors
    /// [`Error::NoContext`], [`Error::NotPrimary`], [`Error::Load`]; [`Error::Pool`] as
    /// [`PoolBuilder::build`].
    pub fn build(self) -> Result<CudaPool, Error> {
        if self.contexts.is_empty() {
            return Err(Error::NoContext);
        }
        let devices: Result<Vec<_>, Error> =
            self.contexts.iter().map(|context| primary(context)).collect();
        let devices = devices?;
        let driver: Arc<dyn Driver> = open()?;
        let mut builder = devices.iter().copied().fold(Pool::builder(driver), PoolBuilder::device);
        for &owner in devices.iter().filter(|_| self.share) {
            for &accessor in devices.iter().filter(|accessor| **accessor != owner) {
                builder = builder.access(owner, accessor, Access::ReadWrite);
            }
        }
        let set = |builder, Configure(change): Configure| change(builder);
        Ok(CudaPool::over(self.configure.into_iter().fold(builder, set).build()?))
    }
}

/// The driver, the same for all pools that are alive. What it refused to take back of a pool that is gone,
/// or could not be built, keeps it open, so that the next pool tries that again.
fn open() -> Result<Arc<Cuda>, Error> {
    static OPENED: Mutex<Weak<Cuda>> = Mutex::new(Weak::new());
    let mut opened = OPENED.lock();
    if let Some(cuda) = opened.upgrade() {
        return Ok(cuda);
    }
    let cuda = Cuda::open()?;
    *opened = Arc::downgrade(&cuda);
    Ok(cuda)
}

impl CudaPool {
    /// A pool on the device of `context`, with the pool's own defaults.
    ///
    /// # Errors
    /// As [`CudaPoolBuilder::build`].
    pub fn new(context: &Arc<CudaContext>) -> Result<CudaPool, Error> {
        CudaPool::builder().context(context).build()
    }

    /// Starts the settings of a pool.
    pub fn builder() -> CudaPoolBuilder {
        CudaPoolBuilder { contexts: Vec::new(), share: false, configure: Vec::new() }
    }

    /// Takes memory from `pool`, whose driver is the one that cudarc uses. Lanes of streams that came
    /// from here are closed when their streams are gone, or this object and its slices.
    pub fn over(pool: Pool) -> CudaPool {
        CudaPool(Arc::new(Shared { pool, homes: Homes::default(), joins: Joins::default() }))
    }

    pub(crate) fn of(shared: Arc<Shared>) -> CudaPool {
        CudaPool(shared)
    }

    /// The pool behind it: figures, trimming, policy.
    pub fn pool(&self) -> &Pool {
        &self.0.pool
    }

    /// `len` elements for work of `stream`, in place of [`CudaStream::alloc`].
    ///
    /// # Safety
    /// The memory is not set: write it before it is read.
    ///
    /// # Errors
    /// [`Error::TooManyElements`], [`Error::NotPrimary`], before anything is touched; [`Error::Pool`],
    /// among them out of memory with all figures; [`Error::Cudarc`] with an error of earlier work.
    pub unsafe fn alloc<T: DeviceRepr>(
        &self,
        stream: &Arc<CudaStream>,
        len: usize,
    ) -> Result<PoolSlice<T>, Error> {
        let bytes = bytes_of::<T>(len)?;
        let mut home = self.0.home(stream)?;
        let buffer = match home.lane.alloc(bytes) {
            Err(vmm_pool::Error::LaneClosed) => {
                // By somebody who has the pool too: the stream goes on, with a lane of its own.
                self.close(stream);
                home = self.0.home(stream)?;
                home.lane.alloc(bytes)?
            }
            answer => answer?,
        };
        // SAFETY: the buffer is of the stream's device; what it holds is the caller's to say.
        unsafe { PoolSlice::new(&self.0, stream, home, buffer, len) }
    }

    /// `len` elements of zero bits, in place of [`CudaStream::alloc_zeros`].
    ///
    /// # Errors
    /// As [`CudaPool::alloc`].
    pub fn alloc_zeros<T: DeviceRepr + ValidAsZeroBits>(
        &self,
        stream: &Arc<CudaStream>,
        len: usize,
    ) -> Result<PoolSlice<T>, Error> {
        // SAFETY: it is set in the next line, or empty.
        let mut slice = unsafe { self.alloc::<T>(stream, len)? };
        if slice.num_bytes() > 0 {
            stream.memset_zeros(&mut slice)?;
        }
        Ok(slice)
    }

    /// A copy of `source`, in place of [`CudaStream::clone_htod`].
    ///
    /// # Errors
    /// As [`CudaPool::alloc`].
    pub fn clone_htod<T: DeviceRepr, Src: HostSlice<T> + ?Sized>(
        &self,
        stream: &Arc<CudaStream>,
        source: &Src,
    ) -> Result<PoolSlice<T>, Error> {
        // SAFETY: it is set in the next line, or empty.
        let mut slice = unsafe { self.alloc::<T>(stream, source.len())? };
        if slice.num_bytes() > 0 {
            stream.memcpy_htod(source, &mut slice)?;
        }
        Ok(slice)
    }

    /// No elements, in place of [`CudaStream::null`]; takes no memory.
    ///
    /// # Errors
    /// As [`CudaPool::alloc`].
    pub fn null<T: DeviceRepr>(&self, stream: &Arc<CudaStream>) -> Result<PoolSlice<T>, Error> {
        // SAFETY: nothing can be read.
        unsafe { self.alloc(stream, 0) }
    }

    /// Reserves addresses for `capacity` elements, with no memory behind them yet.
    ///
    /// # Errors
    /// [`Error::TooManyElements`]; as [`vmm_pool::ElasticBuilder::build`].
    pub fn elastic<T: DeviceRepr>(
        &self,
        stream: &Arc<CudaStream>,
        capacity: usize,
    ) -> Result<ElasticSlice<T>, Error> {
        let bytes = bytes_of::<T>(capacity)?;
        let device = primary(stream.context())?;
        let buffer = self.0.pool.elastic(device).capacity_bytes(bytes).build()?;
        self.elastic_over(stream, buffer)
    }

    /// The same over a buffer that was built with other settings.
    ///
    /// # Errors
    /// [`Error::NotPrimary`], [`Error::NoAccess`] if `stream` is of another device and that may not
    /// write; [`Error::Cudarc`].
    pub fn elastic_over<T: DeviceRepr>(
        &self,
        stream: &Arc<CudaStream>,
        buffer: ElasticBuffer,
    ) -> Result<ElasticSlice<T>, Error> {
        ElasticSlice::new(&self.0, stream, buffer)
    }

    /// The lane of `stream`: for other streams that a capture spreads to, and for memory without a
    /// slice.
    ///
    /// # Errors
    /// [`Error::NotPrimary`], [`Error::Pool`] if the pool does not manage the device.
    pub fn lane(&self, stream: &Arc<CudaStream>) -> Result<Lane, Error> {
        Ok(self.0.home(stream)?.lane.clone())
    }

    /// What is asked for `stream` until [`CaptureScope::finish`] is kept for the graph that is captured
    /// meanwhile. Call it before [`CudaStream::begin_capture`], and finish after
    /// [`CudaStream::end_capture`]; the memory it gives then is dropped with the graph.
    ///
    /// Without it, memory that is asked for during a capture is ordinary: keep its slices as long as
    /// the graph.
    ///
    /// # Errors
    /// As [`Lane::capture`].
    pub fn capture(&self, stream: &Arc<CudaStream>) -> Result<CaptureScope, Error> {
        Ok(self.0.home(stream)?.lane.capture()?)
    }

    /// Closes the lane of `stream`. Only needed for a stream that its owner is going to destroy past
    /// cudarc ([`CudaContext::wrap_borrowed_stream`]), after the last work with its slices was
    /// enqueued. Returns whether it may be destroyed: not while it is captured; then call it again. The
    /// slices of the stream must not be used afterwards, nor dropped later than the stream.
    pub fn close(&self, stream: &Arc<CudaStream>) -> bool {
        self.0.close(stream)
    }
}

impl Shared {
    fn close(&self, stream: &Arc<CudaStream>) -> bool {
        self.homes.forget(&self.pool, stream)
    }
}

/// The length in bytes.
pub(crate) fn bytes_of<T>(len: usize) -> Result<u64, Error> {
    let element_bytes = size_of::<T>();
    let bytes = len.checked_mul(element_bytes).and_then(|bytes| u64::try_from(bytes).ok());
    bytes.ok_or(Error::TooManyElements { len, element_bytes })
}
