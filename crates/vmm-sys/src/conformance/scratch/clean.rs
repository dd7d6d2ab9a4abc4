//! Giving back what a row made, in the one order that the driver allows.

use std::fmt::Display;
use std::mem;

use crate::error::DriverResult;

use super::{Made, Scratch};

impl Scratch<'_> {
    /// Gives everything back and tells what went wrong in it: a driver that lets a row make
    /// something must let it go too. Where the row broke its context on purpose, nothing is said.
    pub(crate) fn clean_up(self) -> Vec<String> {
        self.give_back()
    }

    pub(super) fn give_back(&self) -> Vec<String> {
        let made = mem::take(&mut *self.made.lock());
        let mut trouble = Trouble::default();
        self.end_work(&made, &mut trouble);
        self.give_back_memory(made, &mut trouble);
        trouble.0
    }

    /// Streams first: nothing may be unmapped under a kernel (row D-U4).
    fn end_work(&self, made: &Made, trouble: &mut Trouble) {
        let driver = self.driver();
        for &(device, stream) in &made.captures {
            // SAFETY: the stream is on record, so it is live.
            if let Ok(graph) = unsafe { driver.capture_end(device, stream) } {
                // SAFETY: the graph was made by the line above and is known to nobody else.
                trouble.note(unsafe { driver.graph_destroy(device, graph) });
            }
        }
        for &(device, stream) in made.held.iter().chain(&made.streams) {
            // SAFETY: the stream is on record or one that is always there, so it is live.
            trouble.note(unsafe { driver.stream_synchronize(device, stream) });
        }
        for &(device, exec) in &made.execs {
            // SAFETY: the executable graph is on record, so it is live, and this is its end.
            trouble.note(unsafe { driver.graph_exec_destroy(device, exec) });
        }
        for &(device, graph) in &made.graphs {
            // SAFETY: the graph is on record, so it is live, and this is its end.
            trouble.note(unsafe { driver.graph_destroy(device, graph) });
        }
        for &(device, event) in &made.events {
            // SAFETY: the event is on record, so it is live, and this is its end.
            trouble.note(unsafe { driver.event_destroy(device, event) });
        }
        for &(device, stream) in &made.streams {
            // SAFETY: the stream is on record, so it is live, and this is its end.
            trouble.note(unsafe { driver.stream_destroy(device, stream) });
        }
    }

    /// Mappings, then references, then address ranges.
    fn give_back_memory(&self, made: Made, trouble: &mut Trouble) {
        let driver = self.driver();
        for mapping in &made.mappings {
            trouble.note(driver.unmap(mapping.address, mapping.bytes));
        }
        for &chunk in &made.references {
            // SAFETY: the record has one entry a reference that the row owns.
            trouble.note(unsafe { driver.release(chunk) });
        }
        for &(address, bytes) in &made.ranges {
            trouble.note(driver.address_free(address, bytes));
        }
        for &(device, address, _) in &made.allocations {
            trouble.note(driver.mem_free(device, address));
        }
        for opener in made.openers {
            if opener.join().is_err() {
                trouble.0.push("a thread that opens a gate panicked".to_owned());
            }
        }
        for &(device, address) in &made.pinned {
            // SAFETY: the address is on record; the streams that waited on it were synchronised and
            // destroyed above, and the threads that write it have ended.
            trouble.note(unsafe { driver.host_free(device, address) });
        }
    }
}

/// Errors met while cleaning up.
#[derive(Default)]
struct Trouble(Vec<String>);

impl Trouble {
    fn note(&mut self, result: DriverResult<()>) {
        if let Err(error) = result {
            self.push(error);
        }
    }

    fn push(&mut self, error: impl Display) {
        self.0.push(error.to_string());
    }
}
