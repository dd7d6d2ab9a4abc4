//! [`Copier`]: a stream of the pool's own for the copies of a move, and the events that say how far
//! they are.
//!
//! Made before any stream is held: while one is, making another may wait for it (row D-N2).

use std::sync::Arc;

use vmm_sys::object::{Event, Stream};
use vmm_sys::{DeviceId, Driver, DriverResult};

use crate::sync::Mutex;

/// A stream, and an event for each copy.
#[derive(Debug)]
pub(super) struct Copier {
    pub(super) stream: Stream,
    pub(super) events: Vec<Event>,
}

/// Copiers that are not in use.
#[derive(Debug, Default)]
pub(crate) struct Copiers(Mutex<Vec<Copier>>);

impl Copiers {
    /// A copier of `device` with at least `copies` events.
    pub(super) fn take(
        &self,
        driver: &Arc<dyn Driver>,
        device: DeviceId,
        copies: usize,
    ) -> DriverResult<Copier> {
        let spare = {
            let mut spare = self.0.lock();
            let at = spare.iter().position(|it| it.stream.device() == device);
            at.map(|at| spare.swap_remove(at))
        };
        let mut copier = match spare {
            Some(copier) => copier,
            None => Copier { stream: Stream::create(driver, device)?, events: Vec::new() },
        };
        while copier.events.len() < copies {
            match Event::create(driver, device) {
                Ok(event) => copier.events.push(event),
                Err(error) => {
                    self.put(copier);
                    return Err(error);
                }
            }
        }
        Ok(copier)
    }

    /// Takes a copier back whose work is done.
    pub(super) fn put(&self, copier: Copier) {
        self.0.lock().push(copier);
    }
}
