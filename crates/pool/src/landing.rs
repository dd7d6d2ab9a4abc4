//! [`Landing`]: chunks of a node of the host that stand mapped at addresses of the pool's own, ready for
//! contents that come to the host.
//!
//! Granting memory of the host costs some 10 us a MiB, half of what a copy of it takes: so what
//! a move has mapped there stays mapped as long as its chunk serves as somebody's memory, and is
//! kept here for the next when that leaves. It counts as stock.

use vmm_sys::object::Mapping;
use vmm_sys::{AccessGrant, ChunkProps};

use crate::sync::Mutex;

/// A chunk at an address of the pool's own, and who may use it there.
#[derive(Debug)]
pub(crate) struct Spare {
    pub(crate) mapping: Mapping,
    pub(crate) grants: Vec<AccessGrant>,
}

/// The spare mappings of one place.
#[derive(Debug, Default)]
pub(crate) struct Landing(Mutex<Vec<Spare>>);

impl Landing {
    pub(crate) fn put(&self, spare: Spare) {
        self.0.lock().push(spare);
    }

    /// One with a chunk of this kind and length, and these grants: the first that came, so that
    /// neighbours come one after the other.
    pub(crate) fn take(
        &self,
        props: &ChunkProps,
        bytes: u64,
        grants: &[AccessGrant],
    ) -> Option<Spare> {
        let mut spares = self.0.lock();
        let fits = |it: &Spare| {
            let chunk = it.mapping.chunk();
            chunk.props() == props && chunk.bytes() == bytes && it.grants == grants
        };
        let at = spares.iter().position(fits)?;
        Some(spares.remove(at))
    }

    /// Some of them, for their memory.
    pub(crate) fn take_any(&self) -> Option<Spare> {
        self.0.lock().pop()
    }

    /// What they hold, in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.0.lock().iter().map(|it| it.mapping.bytes()).sum()
    }
}
