//! What a pool lets devices do, for those who put another interface before it.

use vmm_sys::{Access, DeviceId};

use super::Pool;
use crate::error::Error;

impl Pool {
    /// What `accessor` may do now with buffers of the lanes of `owner`. Asks the driver nothing.
    ///
    /// # Errors
    /// [`Error::UnknownDevice`] if the pool does not manage `owner`.
    pub fn access(&self, owner: DeviceId, accessor: DeviceId) -> Result<Access, Error> {
        let device = self.device(owner)?;
        if owner == accessor {
            return Ok(Access::ReadWrite);
        }
        let others = device.policy.others();
        let named = others.into_iter().find(|(device, _)| *device == accessor);
        Ok(named.map_or(Access::None, |(_, access)| access))
    }
}
