//! [`Copier`]: a stream of the pool's own for the copies of a move, and the events that say how far
//! they are.
//!
//! Made before any stream is held: while one is, making another may wait for it (row D-N2).

use std::sync::Arc;

use vmm_sys::object::{Event, Stream};
use vmm_sys::{DeviceId, Driver, DriverResult};

use crate::sync::{Mutex, thread};

/// A stream, and an event for each copy.
#[derive(Debug)]
pub(super) struct Copier {
    pub(super) stream: Stream,
    pub(super) events: Vec<Event>,
    /// Whether kernels can copy.
    pub(super) has_kernels: bool,
}

/// Copiers that are not in use.
#[derive(Debug, Default)]
pub(crate) struct Copiers(Mutex<Vec<Copier>>);

impl Copier {
    /// Waits until more than `passed` of the `copies` are done. Returns how many are. Asks, for whoever
    /// waits in the driver may wait for somebody who waits for this thread.
    pub(super) fn wait_beyond(&self, passed: usize, copies: usize) -> DriverResult<usize> {
        let mut done = passed;
        loop {
            while done < copies && self.events[done].passed()? {
                done += 1;
            }
            if done > passed || done == copies {
                return Ok(done);
            }
            thread::yield_now();
        }
    }

    /// Waits until none of the `copies` is under way, or nothing can be known of them.
    pub(super) fn settle(&self, copies: usize) {
        // One that was never recorded has passed.
        for copied in &self.events[..copies] {
            let ended = loop {
                match copied.passed() {
                    Ok(false) => thread::yield_now(),
                    other => break other,
                }
            };
            if let Err(error) = ended {
                tracing::warn!(%error, "the end of a move's copies is not known");
                return;
            }
        }
    }
}

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
            None => {
                let stream = Stream::create(driver, device)?;
                let has_kernels = match stream.load_kernels() {
                    Ok(()) => true,
                    Err(error) => {
                        tracing::debug!(%error, "moves copy without kernels");
                        false
                    }
                };
                Copier { stream, events: Vec::new(), has_kernels }
            }
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
