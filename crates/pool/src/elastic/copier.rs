//! [`Copier`]: a stream of the pool's own for the copies of a move, and the events that say how far
//! they are.
//!
//! Made before any stream is held: while one is, making another may wait for it (row D-N2).

use std::sync::Arc;

use vmm_sys::object::{Event, Mapping, Stream};
use vmm_sys::{DeviceId, Driver, DriverResult};

use super::relocate::{Leg, Stage};
use crate::error::Error;
use crate::place::Place;
use crate::sync::{Mutex, thread};

/// The longest chunk that is copied by a kernel.
const KERNEL_BYTES_MAX: u64 = 64 << 20;

/// How many questions about copies may fail before a move that failed goes on without an answer.
const FAILURES_MAX: u32 = 1000;

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

    /// Waits until none of the `copies` is under way, or nothing can be known of them: a question that
    /// fails is asked again, unless the context is lost.
    pub(super) fn settle(&self, copies: usize) {
        let mut failures = 0;
        // One that was never recorded has passed.
        for copied in &self.events[..copies] {
            let ended = loop {
                match copied.passed() {
                    Ok(false) => thread::yield_now(),
                    Err(error) if !error.is_sticky() && failures < FAILURES_MAX => {
                        vmm_sys::say!(debug, %error, "a copy of a move is asked again");
                        failures += 1;
                        thread::yield_now();
                    }
                    other => break other,
                }
            };
            if let Err(error) = ended {
                vmm_sys::say!(warn, %error, "the end of a move's copies is not known");
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
                        vmm_sys::say!(debug, %error, "moves copy without kernels");
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

/// Enqueues the copy of each leg, and the event after it.
///
/// Mapping calls and copy engines wait for each other, so that a swap beside them holds the users up for
/// twice the copy; a kernel waits for nobody, and reaches the links' speed too. It does not reach the
/// host's, and for long chunks the few swaps matter less than the engines' small lead
/// (docs/DRIVER.md).
pub(super) fn copy(legs: &[Leg], copier: &Copier) -> Result<(), Error> {
    let is_on_device = |mapping: &Mapping| Place::of(mapping.chunk().props()).device().is_some();
    for (leg, copied) in legs.iter().zip(&copier.events) {
        if let Stage::Old(old) = &leg.stage {
            let by_kernel = copier.has_kernels
                && old.bytes() <= KERNEL_BYTES_MAX
                && is_on_device(old)
                && is_on_device(&leg.shadow);
            match by_kernel {
                true => leg.shadow.copy_from_by_kernel(old, &copier.stream)?,
                false => leg.shadow.copy_from(old, &copier.stream)?,
            }
        }
        copied.record(&copier.stream)?;
    }
    Ok(())
}
