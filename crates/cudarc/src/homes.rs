//! [`Homes`]: the lanes of cudarc's streams, and when they are closed.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use cudarc::driver::{CudaContext, CudaStream};
use parking_lot::{Mutex, RwLock};
use vmm_pool::{Lane, Pool};
use vmm_sys::object::Stream;
use vmm_sys::{DeviceId, StreamHandle};

use crate::error::Error;
use crate::joins::is_gone;
use crate::key::StreamKey;

/// A stream that memory is taken for, and its lane.
#[derive(Debug)]
pub(crate) struct Home {
    /// Keeps the handle live as long as the pool may use it.
    stream: Arc<CudaStream>,
    key: StreamKey,
    pool_stream: Stream,
    /// The same stream as one that keeps itself alive: for users whose end is not known here.
    lasting: OnceLock<Stream>,
    pub(crate) lane: Lane,
}

/// The streams that were seen, each under its context and key.
///
/// A lane keeps its memory for its stream. So a stream that nobody else holds any more has its lane
/// closed when the lane of another stream is made, and is destroyed by cudarc then. Default streams
/// stay, but for those of threads that have ended.
#[derive(Debug, Default)]
pub(crate) struct Homes {
    known: RwLock<HashMap<(usize, StreamKey), Arc<Home>>>,
    /// Could not be closed, for they were captured.
    unfinished: Mutex<Vec<Arc<Home>>>,
}

/// The device of a context.
pub(crate) fn device_of(context: &CudaContext) -> DeviceId {
    DeviceId(u32::try_from(context.ordinal()).unwrap_or(u32::MAX))
}

/// The device, if the context is one whose streams the pool can use.
pub(crate) fn primary(context: &CudaContext) -> Result<DeviceId, Error> {
    let device = device_of(context);
    if context.is_primary() { Ok(device) } else { Err(Error::NotPrimary { device }) }
}

impl Homes {
    /// The home of `stream`, made at the first call.
    pub(crate) fn of(&self, pool: &Pool, stream: &Arc<CudaStream>) -> Result<Arc<Home>, Error> {
        let key = StreamKey::of(stream);
        let place = (stream.context().cu_ctx().addr(), key);
        if is_gone() {
            // Before any lock: another thread may have held it when the process forked.
            return Err(vmm_pool::Error::DriverGone.into());
        }
        if let Some(home) = self.known.read().get(&place) {
            return Ok(home.clone());
        }
        let device = primary(stream.context())?;
        let handle = StreamHandle(stream.cu_stream().expose_provenance() as u64);
        // SAFETY: the home keeps the stream, and so its handle, until its lane is closed and the pool
        // has said that it does not use the handle any more.
        let pool_stream = unsafe { Stream::from_raw(pool.driver(), device, handle, None)? };
        let lane = pool.lane(&pool_stream)?;
        let home = Arc::new(Home {
            stream: stream.clone(),
            key,
            pool_stream,
            lasting: OnceLock::new(),
            lane,
        });
        let unused = {
            let mut known = self.known.write();
            if let Some(other) = known.get(&place) {
                return Ok(other.clone());
            }
            let unused = known.extract_if(|_, home| home.is_unused()).map(|(_, home)| home);
            let unused: Vec<Arc<Home>> = unused.collect();
            known.insert(place, home.clone());
            unused
        };
        self.close(pool, unused);
        Ok(home)
    }

    /// Forgets the stream, whose lane was closed by somebody or is to be closed now. Returns whether
    /// the stream may be destroyed.
    pub(crate) fn forget(&self, pool: &Pool, stream: &CudaStream) -> bool {
        let place = (stream.context().cu_ctx().addr(), StreamKey::of(stream));
        let home = self.known.write().remove(&place);
        self.close(pool, home.into_iter().collect());
        !self.unfinished.lock().iter().any(|home| *home.stream == *stream)
    }

    /// Closes lanes, and those that could not be closed before.
    fn close(&self, pool: &Pool, homes: Vec<Arc<Home>>) {
        let mut unfinished = self.unfinished.lock();
        unfinished.extend(homes);
        unfinished.retain(|home| !pool.close_lane(&home.pool_stream));
    }

    /// Closes all, at the end. What the pool may still use a handle of is kept for good.
    pub(crate) fn end(&mut self, pool: &Pool) {
        if is_gone() {
            std::mem::forget(std::mem::take(self));
            return;
        }
        let homes = self.known.get_mut().drain().map(|(_, home)| home).collect();
        self.close(pool, homes);
        std::mem::forget(std::mem::take(self.unfinished.get_mut()));
    }
}

impl Home {
    /// Whether nobody has the stream or memory of its lane any more. Called with the table locked, so
    /// that nobody gets it meanwhile.
    fn is_unused(self: &Arc<Self>) -> bool {
        if self.key.is_default() {
            return self.pool_stream.has_ended() && Arc::strong_count(self) == 1;
        }
        let own_count = 1 + usize::from(self.lasting.get().is_some());
        Arc::strong_count(self) == 1 && Arc::strong_count(&self.stream) == own_count
    }

    /// The stream for elastic buffers, which remember it until they have waited for its work: it keeps
    /// cudarc's stream alive as long.
    pub(crate) fn lasting(&self) -> Result<Stream, Error> {
        if let Some(stream) = self.lasting.get() {
            return Ok(stream.clone());
        }
        let keep = Box::new(self.stream.clone());
        let (driver, device) = (self.pool_stream.driver(), self.pool_stream.device());
        let handle = self.pool_stream.handle();
        // SAFETY: what is kept keeps the handle live.
        let stream = unsafe { Stream::from_raw(driver, device, handle, Some(keep))? };
        Ok(self.lasting.get_or_init(|| stream).clone())
    }
}
