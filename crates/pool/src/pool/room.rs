//! [`Pool::room`] and [`Pool::on_shortage`]: how much there is, and who is asked when it is short.

use vmm_sys::DeviceId;

use super::Pool;
use crate::error::Error;
use crate::ladder::ShortageHook;
use crate::place::Place;
use crate::room::{self, Room};

impl Pool {
    /// What an elastic buffer with home `device` could grow by now, in plain chunks of the shortest
    /// length, and what others would lend, by the pool's own figures: an estimate.
    /// [`ElasticBuffer::room`](crate::ElasticBuffer::room) counts in a buffer's own chunks.
    ///
    /// Asks the driver how much is free, and changes nothing.
    ///
    /// # Errors
    /// [`Error::UnknownDevice`].
    pub fn room(&self, device: DeviceId) -> Result<Room, Error> {
        let chunk_bytes = self.device(device)?.plan.granularity_bytes;
        let plain = |place: Place| place.props(false);
        Ok(room::room(&self.0.places, device, plain, chunk_bytes))
    }

    /// Asks `callback` when nothing of the pool's own helps a request, until the answer is dropped:
    /// as [`PoolBuilder::on_shortage`](crate::PoolBuilder::on_shortage), after those that were set before. Elastic growth asks too,
    /// with the length of one chunk, but not in the background.
    ///
    /// A callback that owns a handle of the pool keeps it open: let it hold a weak one of what it
    /// frees, or drop the answer before.
    pub fn on_shortage(
        &self,
        callback: impl Fn(DeviceId, u64) -> bool + Send + Sync + 'static,
    ) -> ShortageHook {
        self.0.callbacks.add(callback)
    }
}
