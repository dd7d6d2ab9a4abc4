//! The owning objects of vmm-sys, and what it finds out about devices.

mod memory;
mod work;

use std::fmt::Write as _;
use std::sync::Arc;

use vmm_sys::object::{Chunk, Event, Latch, Mapping, Range, Stream, retry_failed_drops};
use vmm_sys::sim::Sim;
use vmm_sys::{AccessGrant, ChunkProps, Driver, HandleTypes, Location};

use crate::engine::{Case, Scene, check_mode, give_back};
use crate::stage::{G, HOME, NEXT};

/// Objects without a pool. Fields drop in this order: what stands on something goes before it.
struct Bench {
    sim: Arc<Sim>,
    driver: Arc<dyn Driver>,
    mappings: Vec<Mapping>,
    chunks: Vec<Chunk>,
    ranges: Vec<Range>,
    latches: Vec<Latch>,
    events: Vec<Event>,
    streams: Vec<Stream>,
}

fn empty() -> Bench {
    let sim = Sim::builder().devices(2).build();
    let driver: Arc<dyn Driver> = sim.clone();
    let streams = vec![Stream::create(&driver, HOME).unwrap()];
    Bench {
        sim,
        driver,
        mappings: Vec::new(),
        chunks: Vec::new(),
        ranges: Vec::new(),
        latches: Vec::new(),
        events: Vec::new(),
        streams,
    }
}

fn props() -> ChunkProps {
    ChunkProps { handle_types: HandleTypes::POSIX_FD, ..ChunkProps::on_device(HOME) }
}

/// A range with three chunks in it, written, and room for a fourth; a chunk beside it; an event.
fn full() -> Bench {
    let mut bench = empty();
    let range = Range::reserve(&bench.driver, 4 * G, 0, 0).unwrap();
    for at in 0..3 {
        let chunk = Chunk::create(&bench.driver, G, &props()).unwrap();
        let mapping = Mapping::map(&range, at * G, Arc::new(chunk)).unwrap();
        mapping.set_access(&[AccessGrant::read_write(HOME)]).unwrap();
        range.write(HOME, at * G, &[at as u8 + 1; 16]).unwrap();
        bench.mappings.push(mapping);
    }
    bench.ranges.push(range);
    bench.chunks.push(Chunk::create(&bench.driver, G, &props()).unwrap());
    let event = Event::create(&bench.driver, HOME).unwrap();
    event.record(&bench.streams[0]).unwrap();
    bench.events.push(event);
    bench
}

impl Scene for Bench {
    fn sim(&self) -> Arc<Sim> {
        self.sim.clone()
    }

    fn picture(&self, _: bool) -> String {
        let mut text = String::new();
        for mapping in &self.mappings {
            let ask = |device| self.driver.get_access(mapping.address(), Location::Device(device));
            let access = [HOME, NEXT].map(ask).map(Result::unwrap);
            let bytes = self.sim.peek(mapping.address(), 16);
            let _ = writeln!(text, "{:#x} {access:?} {bytes:?}", mapping.address());
        }
        let (chunks, ranges) = (self.chunks.len(), self.ranges.len());
        let (streams, events) = (self.streams.len(), self.events.len());
        let _ = writeln!(text, "{chunks} chunks {ranges} ranges {streams} streams {events} events");
        text
    }

    /// What the driver has given out is what the objects own.
    fn laws(&self) -> Result<(), String> {
        check_mode(&self.driver)?;
        retry_failed_drops(&self.driver);
        let ledger = self.sim.ledger_summary();
        let (chunks, mappings) = (self.chunks.len() as u64, self.mappings.len() as u64);
        let events = self.events.len() as u64;
        let (ranges, streams) = (self.ranges.len() as u64, self.streams.len() as u64);
        let there = (ledger.chunks, ledger.mappings, ledger.events, ledger.ranges);
        let owned = (chunks + mappings, mappings, events, ranges);
        // Streams that are borrowed are there anyway.
        if there != owned || ledger.streams > streams {
            return Err(format!("owned {owned:?} and {streams} streams, there are {ledger:?}"));
        }
        Ok(())
    }

    fn end(self) -> Result<(), String> {
        let driver = self.driver.clone();
        drop(self);
        give_back(&driver)
    }
}

fn range(bench: &Bench) -> &Range {
    &bench.ranges[0]
}

/// The bytes that were written are there still.
fn check_bytes(bench: &Bench) {
    for (at, mapping) in bench.mappings.iter().take(3).enumerate() {
        assert_eq!(bench.sim.peek(mapping.address(), 1).unwrap(), [at as u8 + 1]);
    }
}

pub(crate) fn cases() -> Vec<Case> {
    [memory::cases(), work::cases()].into_iter().flatten().collect()
}
