//! A pool with elastic buffers over several simulated devices, and what a failed operation must
//! leave as it was.

use std::sync::Arc;

use vmm_pool::{DeviceStats, ElasticBuffer, Growth, Piece, Place, Pool, PoolBuilder};
use vmm_sys::object::Stream;
use vmm_sys::sim::{HoldId, Link, Sim, SimBuilder};
use vmm_sys::{Access, DeviceId, Driver, Location};

use super::still;

pub(crate) const G: u64 = 2 << 20;

pub(crate) struct Machine {
    pub(crate) sim: Arc<Sim>,
    pub(crate) driver: Arc<dyn Driver>,
    pub(crate) pool: Pool,
}

/// A pool over all of `devices` simulated ones, without a thread of its own.
pub(crate) fn machine(
    devices: u32,
    sim: impl FnOnce(SimBuilder) -> SimBuilder,
    settings: impl FnOnce(PoolBuilder) -> PoolBuilder,
) -> Machine {
    let sim = sim(Sim::builder().devices(devices as usize)).build();
    let driver: Arc<dyn Driver> = sim.clone();
    let mut builder = Pool::builder(driver.clone()).background(false).clock(still);
    for device in 0..devices {
        builder = builder.device(DeviceId(device));
    }
    let pool = settings(builder).build().unwrap();
    Machine { sim, driver, pool }
}

impl Machine {
    pub(crate) fn stream(&self, device: u32) -> Stream {
        Stream::create(&self.driver, DeviceId(device)).unwrap()
    }

    pub(crate) fn buffer(&self, device: u32, capacity_bytes: u64) -> ElasticBuffer {
        let builder = self.pool.elastic(DeviceId(device));
        builder.capacity_bytes(capacity_bytes).chunk_bytes(G).build().unwrap()
    }

    /// A buffer that fills its home, device 0, and borrows `chunks` more of `lender`, each written.
    pub(crate) fn borrower(&self, lender: DeviceId, chunks: u64) -> ElasticBuffer {
        let buffer = self.buffer(0, 64 * G);
        let grown = buffer.grow(Growth::to((4 + chunks) * G).borrow_from([lender])).unwrap();
        assert_eq!(grown.borrowed, [(lender.into(), chunks * G)]);
        for chunk in 0..4 + chunks {
            buffer.write(chunk * G, &[chunk as u8 + 1; 64]).unwrap();
        }
        buffer
    }

    pub(crate) fn stats(&self, device: u32) -> DeviceStats {
        self.pool.verify().unwrap();
        let stats = self.pool.device_stats(DeviceId(device)).unwrap();
        assert!(stats.adds_up(), "{stats:?}");
        stats
    }

    /// Everything that a failed operation on `buffer` must leave as it was.
    pub(crate) fn picture(&self, buffer: &ElasticBuffer) -> Picture {
        self.pool.verify().unwrap();
        let pieces = buffer.pieces();
        let devices: Vec<DeviceId> = self.pool.devices().collect();
        let access = pieces
            .iter()
            .map(|piece| {
                let ask = |device| Location::Device(device);
                let of = |device| self.driver.get_access(piece.address, ask(device)).unwrap();
                devices.iter().map(|device| of(*device)).collect()
            })
            .collect();
        let bytes = pieces.iter().map(|piece| self.sim.peek(piece.address, 64).unwrap()).collect();
        let mut stats: Vec<DeviceStats> =
            devices.iter().map(|device| self.stats(device.0)).collect();
        for stats in &mut stats {
            // What was tried is history, not state.
            stats.ladder = vmm_pool::LadderStats::default();
            stats.peak_held_bytes = 0;
            // What was found out about a pair of devices stays known, and its anchor.
            stats.held_bytes -= std::mem::take(&mut stats.anchor_bytes);
        }
        Picture {
            address: buffer.address(),
            committed_bytes: buffer.committed_bytes(),
            generation: buffer.generation(),
            pieces,
            access,
            bytes,
            stats,
        }
    }

    pub(crate) fn end(self) {
        let Machine { sim, driver, pool } = self;
        pool.verify().unwrap();
        drop((pool, driver));
        sim.check_clean().unwrap();
    }
}

/// These chunks of a borrower hold what was written.
pub(crate) fn check(buffer: &ElasticBuffer, chunks: std::ops::Range<u64>) {
    for chunk in chunks {
        let mut found = [0; 64];
        buffer.read(chunk * G, &mut found).unwrap();
        assert_eq!(found, [chunk as u8 + 1; 64], "chunk {chunk}");
    }
}

/// How many chunks of a buffer lie at a place.
pub(crate) fn count(buffer: &ElasticBuffer, place: impl Into<Place>) -> usize {
    let place = place.into();
    buffer.pieces().iter().filter(|piece| piece.place == place).count()
}

/// Two devices, and a node of the host.
pub(crate) fn with_host() -> Machine {
    machine(2, |sim| sim, |pool| pool.host_memory(0, 64 * G, 0))
}

/// A buffer at home with `chunks` chunks, each full of bytes of its own.
pub(crate) fn written(machine: &Machine, chunks: u64) -> ElasticBuffer {
    let buffer = machine.buffer(0, 64 * G);
    buffer.grow_to(chunks * G).unwrap();
    for chunk in 0..chunks {
        buffer.write(chunk * G, &pattern(chunk)).unwrap();
    }
    buffer
}

/// All of a chunk.
fn pattern(chunk: u64) -> Vec<u8> {
    (0..G).map(|at| (at ^ (at >> 8) ^ (chunk * 37)) as u8).collect()
}

/// Each chunk is full of its own bytes.
pub(crate) fn check_bytes(buffer: &ElasticBuffer, chunks: u64) {
    let mut found = vec![0; G as usize];
    for chunk in 0..chunks {
        buffer.read(chunk * G, &mut found).unwrap();
        assert!(found == pattern(chunk), "chunk {chunk} holds other bytes");
    }
}

/// Four devices of which the home has little memory, and reaches device 1 slowest.
pub(crate) fn four(settings: impl FnOnce(PoolBuilder) -> PoolBuilder) -> Machine {
    let far = |sim: SimBuilder| sim.device_bytes_of(0, 4 * G).link(0, 1, Link::Pcie);
    machine(4, far, settings)
}

pub(crate) fn on(device: u32) -> Place {
    Place::Device(DeviceId(device))
}

/// A held stream, let go at the latest when a failed story ends: else the pool's end would wait.
pub(crate) struct Held<'a>(&'a Machine, HoldId);

pub(crate) fn hold<'a>(machine: &'a Machine, stream: &Stream) -> Held<'a> {
    Held(machine, machine.sim.hold(stream.device(), stream.handle()).unwrap())
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.0.sim.release_hold(self.1);
    }
}

#[derive(Debug, PartialEq)]
pub(crate) struct Picture {
    address: u64,
    committed_bytes: u64,
    generation: u64,
    pieces: Vec<Piece>,
    access: Vec<Vec<Access>>,
    bytes: Vec<Vec<u8>>,
    stats: Vec<DeviceStats>,
}

impl Picture {
    pub(crate) fn pieces(&self) -> &[Piece] {
        &self.pieces
    }

    /// What a device may do, by piece.
    pub(crate) fn access_of(&self, device: usize) -> Vec<Access> {
        self.access.iter().map(|of| of[device]).collect()
    }
}
