//! The owning objects of vmm-sys, and what it finds out about devices.

use std::fmt::Write as _;
use std::os::fd::AsFd;
use std::sync::Arc;

use vmm_sys::object::{
    Chunk, Event, Latch, Mapping, Range, RelaxedCapture, Stream, failed_drops, identity_of,
    retry_failed_drops,
};
use vmm_sys::sim::Sim;
use vmm_sys::topology::{Topology, try_vmm};
use vmm_sys::{AccessGrant, ChunkProps, Driver, HandleTypes, Location, StreamHandle};

use crate::engine::{Case, Scene};
use crate::stage::{G, HOME, NEXT, check_mode, give_back};

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

fn memory() -> Vec<Case> {
    vec![
        Case::new(
            "object::chunk",
            &["Chunk::create"],
            empty,
            |bench| {
                bench.chunks.push(Chunk::create(&bench.driver, G, &props())?);
                Ok(())
            },
            |bench| assert_eq!(bench.sim.ledger_summary().chunks, 1),
        ),
        Case::new(
            "object::chunk_release",
            &["Chunk::release"],
            full,
            |bench| match bench.chunks.pop().unwrap().release() {
                Ok(()) => Ok(()),
                Err((chunk, error)) => {
                    bench.chunks.push(chunk);
                    Err(error.into())
                }
            },
            |bench| assert_eq!(bench.sim.ledger_summary().chunks, 3),
        ),
        Case::new(
            "object::export_import",
            &["Chunk::export_fd", "Chunk::import_fd"],
            full,
            |bench| {
                let descriptor = bench.chunks[0].export_fd()?;
                drop(Chunk::import_fd(&bench.driver, descriptor.as_fd(), G, &props())?);
                Ok(())
            },
            check_bytes,
        ),
        Case::new(
            "object::range",
            &["Range::reserve"],
            empty,
            |bench| {
                bench.ranges.push(Range::reserve(&bench.driver, 4 * G, G, 0)?);
                Ok(())
            },
            |bench| assert_eq!(range(bench).bytes(), 4 * G),
        ),
        Case::new(
            "object::map",
            &["Mapping::map", "Mapping::set_access"],
            full,
            |bench| {
                let chunk = Chunk::create(&bench.driver, G, &props())?;
                let mapping = Mapping::map(range(bench), 3 * G, Arc::new(chunk))?;
                mapping.set_access(&[AccessGrant::read_write(HOME)])?;
                bench.mappings.push(mapping);
                Ok(())
            },
            |bench| range(bench).write(HOME, 3 * G, &[9]).unwrap(),
        ),
        Case::new(
            "object::set_access_all",
            &["Mapping::set_access_all"],
            full,
            |bench| {
                let grants = [AccessGrant::read_write(HOME), AccessGrant::read_write(NEXT)];
                Ok(Mapping::set_access_all(&bench.mappings, &grants)?)
            },
            |bench| range(bench).write(NEXT, 2 * G, &[3]).unwrap(),
        ),
        Case::new(
            "object::unmap",
            &["Mapping::unmap"],
            full,
            |bench| match bench.mappings.pop().unwrap().unmap() {
                Ok(chunk) => {
                    bench.chunks.extend(Arc::into_inner(chunk));
                    Ok(())
                }
                Err((mapping, error)) => {
                    bench.mappings.push(mapping);
                    Err(error.into())
                }
            },
            |bench| assert_eq!((bench.mappings.len(), bench.chunks.len()), (2, 2)),
        ),
        Case::new(
            "object::unmap_all",
            &["Mapping::unmap_all"],
            full,
            |bench| match Mapping::unmap_all(std::mem::take(&mut bench.mappings)) {
                Ok(chunks) => {
                    bench.chunks.extend(chunks.into_iter().filter_map(Arc::into_inner));
                    Ok(())
                }
                Err((mappings, error)) => {
                    bench.mappings = mappings;
                    Err(error.into())
                }
            },
            |bench| assert_eq!(bench.chunks.len(), 4),
        ),
        Case::new(
            "object::bytes",
            &["Range::write", "Range::read", "Range::fill", "Range::dma_buf"],
            full,
            |bench| {
                range(bench).write(HOME, 0, &[1; 4])?;
                let mut found = [0; 4];
                range(bench).read(HOME, 0, &mut found)?;
                assert_eq!(found, [1; 4]);
                range(bench).fill(HOME, G, 16, 2)?;
                drop(range(bench).dma_buf(HOME, 0, 2 * G)?);
                Ok(())
            },
            check_bytes,
        ),
        Case::new(
            "object::copies",
            &[
                "Range::copy_on",
                "Mapping::copy_from",
                "Mapping::copy_from_by_kernel",
                "Mapping::fill",
                "Stream::fill",
                "Stream::copy",
                "Stream::copy_words",
                "Stream::load_kernels",
            ],
            || {
                // A fourth chunk for the copies, so that the three are as they were in any case.
                let mut bench = full();
                let chunk = Chunk::create(&bench.driver, G, &props()).unwrap();
                let mapping = Mapping::map(range(&bench), 3 * G, Arc::new(chunk)).unwrap();
                mapping.set_access(&[AccessGrant::read_write(HOME)]).unwrap();
                bench.ranges[0].fill(HOME, 3 * G, 16, 1).unwrap();
                bench.mappings.push(mapping);
                bench
            },
            |bench| {
                let (stream, target) = (&bench.streams[0], &bench.mappings[3]);
                stream.load_kernels()?;
                range(bench).copy_on(stream, 3 * G, 0, 16)?;
                target.copy_from(&bench.mappings[0], stream)?;
                target.copy_from_by_kernel(&bench.mappings[0], stream)?;
                target.fill(1, stream)?;
                stream.synchronize()?;
                Ok(())
            },
            check_bytes,
        ),
        Case::quiet(
            "object::drops",
            &[
                "Mapping::drop",
                "Chunk::drop",
                "Range::drop",
                "Latch::drop",
                "Event::drop",
                "Stream::drop",
            ],
            || {
                let mut bench = full();
                bench.latches.push(Latch::create(&bench.driver, HOME).unwrap());
                bench
            },
            |bench| {
                bench.mappings.clear();
                bench.chunks.clear();
                bench.ranges.clear();
                bench.latches.clear();
                bench.events.clear();
                bench.streams.clear();
                Ok(())
            },
            |bench| assert_eq!(failed_drops(&bench.driver), []),
        ),
    ]
}

fn work() -> Vec<Case> {
    vec![
        Case::new(
            "object::stream",
            &["Stream::create"],
            empty,
            |bench| {
                bench.streams.push(Stream::create(&bench.driver, NEXT)?);
                Ok(())
            },
            |bench| bench.streams[1].synchronize().unwrap(),
        ),
        Case::new(
            "object::borrowed_streams",
            &["Stream::legacy", "Stream::per_thread", "Stream::from_raw", "identity_of"],
            empty,
            |bench| {
                let legacy = Stream::legacy(&bench.driver, HOME)?;
                let own = Stream::per_thread(&bench.driver, HOME)?;
                // SAFETY: the legacy stream always lives.
                let id = unsafe { identity_of(&bench.driver, HOME, StreamHandle::LEGACY) }?;
                assert_eq!(id, Some(legacy.id()));
                bench.streams.extend([legacy, own]);
                Ok(())
            },
            |bench| bench.streams.iter().for_each(|stream| stream.synchronize().unwrap()),
        ),
        Case::new(
            "object::stream_work",
            &[
                "Stream::wait_event",
                "Stream::call_on_host",
                "Stream::synchronize",
                "Stream::capture_info",
            ],
            full,
            |bench| {
                let stream = &bench.streams[0];
                stream.wait_event(&bench.events[0])?;
                stream.call_on_host(|| {})?;
                stream.synchronize()?;
                stream.capture_info()?;
                Ok(())
            },
            check_bytes,
        ),
        Case::new(
            "object::event",
            &["Event::create", "Event::record", "Event::passed", "Event::wait"],
            full,
            |bench| {
                let event = Event::create(&bench.driver, HOME)?;
                event.record(&bench.streams[0])?;
                event.wait()?;
                assert!(event.passed()?);
                bench.events.push(event);
                Ok(())
            },
            |bench| assert_eq!(bench.events.len(), 2),
        ),
        Case::new(
            "object::latch",
            &["Latch::create", "Latch::hold", "Latch::open"],
            full,
            |bench| {
                let latch = Latch::create(&bench.driver, HOME)?;
                let held = latch.hold(&bench.streams[0], 1);
                latch.open(1);
                held?;
                bench.streams[0].synchronize().inspect_err(|_| {
                    // It is open, so the stream goes on by itself: only the host was not told.
                    assert_eq!(latch.reached(), 1);
                })?;
                Ok(())
            },
            check_bytes,
        ),
        Case::new(
            "object::relaxed_capture",
            &["RelaxedCapture::enter"],
            empty,
            |bench| {
                drop(RelaxedCapture::enter(&bench.driver)?);
                Ok(())
            },
            |_| {},
        ),
        Case::quiet(
            "topology::try_vmm",
            &["try_vmm"],
            empty,
            |bench| {
                // What is found says so by itself.
                let found = try_vmm(&bench.driver, HOME);
                assert_eq!(found.works(), found.error().is_none());
                Ok(())
            },
            |bench| assert!(try_vmm(&bench.driver, HOME).works()),
        ),
        Case::new(
            "topology::probe",
            &["Topology::probe"],
            empty,
            |bench| {
                Topology::probe(&bench.driver, &[HOME, NEXT])?;
                Ok(())
            },
            |bench| {
                let found = Topology::probe(&bench.driver, &[HOME, NEXT]).unwrap();
                assert!(found.reaches(HOME, NEXT) && found.reaches(NEXT, HOME));
            },
        ),
    ]
}

pub(crate) fn cases() -> Vec<Case> {
    [memory(), work()].into_iter().flatten().collect()
}
