//! Reads and writes from the host.

use vmm_sys::DeviceId;
use vmm_sys::object::RelaxedCapture;

use super::ElasticBuffer;
use super::error::ElasticError;
use super::uses::Uses;
use crate::error::Error;

impl ElasticBuffer {
    /// Copies `source` to `offset` in the buffer, by the home, and waits. The caller orders it
    /// against work that is still running.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`], [`ElasticError::NotCommitted`], [`ElasticError::Asleep`]; the
    /// driver's.
    pub fn write(&self, offset: u64, source: &[u8]) -> Result<(), Error> {
        let _using = Uses::begin_on_host(&self.body)?;
        self.check_bounds(offset, source.len() as u64)?;
        let _relaxed = RelaxedCapture::enter(self.body.range.driver())?;
        Ok(self.body.range.write(self.device(), offset, source)?)
    }

    /// Copies from `offset` in the buffer into `target`, by the home, and waits.
    ///
    /// # Errors
    /// As [`ElasticBuffer::write`].
    pub fn read(&self, offset: u64, target: &mut [u8]) -> Result<(), Error> {
        self.read_by(self.device(), offset, target)
    }

    /// As [`ElasticBuffer::read`], through the context of another device that has access.
    ///
    /// # Errors
    /// As [`ElasticBuffer::write`]; [`ElasticError::NoAccess`].
    pub fn read_by(&self, device: DeviceId, offset: u64, target: &mut [u8]) -> Result<(), Error> {
        let _using = Uses::begin_on_host(&self.body)?;
        if !self.body.may_access(device) {
            return Err(ElasticError::NoAccess { device }.into());
        }
        self.check_bounds(offset, target.len() as u64)?;
        let _relaxed = RelaxedCapture::enter(self.body.range.driver())?;
        Ok(self.body.range.read(device, offset, target)?)
    }

    /// Whether memory stands behind all of these bytes.
    fn check_bounds(&self, offset: u64, bytes: u64) -> Result<(), Error> {
        let buffer_bytes = self.capacity_bytes();
        if offset.checked_add(bytes).is_none_or(|end| end > buffer_bytes) {
            return Err(Error::OutOfBounds { offset, bytes, buffer_bytes });
        }
        let chunk_bytes = self.chunk_bytes();
        let state = self.body.state();
        let mut slots = self.body.slots_over(offset, bytes)?;
        match slots.find(|slot| !state.pieces.contains_key(slot)) {
            Some(slot) => {
                let offset = u64::from(slot) * chunk_bytes;
                Err(ElasticError::NotCommitted { offset }.into())
            }
            None => Ok(()),
        }
    }
}
