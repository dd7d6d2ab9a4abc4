//! The owner: has a pool of two GPUs, and a buffer that it offers as `buffer`.

use std::sync::Arc;
use std::time::Duration;

use vmm_pool::{ChunkSize, Contents, ElasticBuffer, Place, Pool};
use vmm_share::{Address, Exporter, Offer, Offered};
use vmm_sys::object::Stream;
use vmm_sys::sim::Sim;
use vmm_sys::{DeviceId, Driver};

use super::clog::Clog;
use super::second::Answers;
use super::{G, machine, pattern};

pub(crate) const HOME: DeviceId = DeviceId(0);

/// All that an owner has.
pub(crate) struct Owner {
    pub(crate) sim: Arc<Sim>,
    pub(crate) driver: Arc<dyn Driver>,
    pub(crate) pool: Pool,
    pub(crate) buffer: Arc<ElasticBuffer>,
    pub(crate) exporter: Option<Exporter>,
    pub(crate) offer: Option<Offer>,
}

/// Settings from the environment of the second process.
fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

impl Owner {
    pub(crate) fn new(address: Address, slots: u64) -> Owner {
        let (sim, driver) = machine(2);
        let pool = Pool::builder(driver.clone())
            .device(HOME)
            .device(DeviceId(1))
            .chunk(ChunkSize::Fixed(G))
            .host_memory(0, 1 << 30, 0)
            .build()
            .unwrap();
        let builder = pool.elastic(HOME).capacity_bytes(1 << 30).chunk_bytes(G).exportable(true);
        let buffer = Arc::new(builder.build().unwrap());
        buffer.grow_to(slots * G).unwrap();
        fill(&buffer, 0..slots);
        let mut builder = Exporter::builder();
        if let Some(most) = number("VMM_SHARE_TEST_DESCRIPTORS") {
            builder = builder.descriptors_max(most as usize);
        }
        if let Some(ms) = number("VMM_SHARE_TEST_TIMEOUT_MS") {
            builder = builder.timeout(Duration::from_millis(ms));
        }
        let exporter = builder.bind(address).unwrap();
        let offered = match number("VMM_SHARE_TEST_READ_ONLY") {
            Some(_) => Offered::Read,
            None => Offered::ReadWrite,
        };
        let offer = exporter.offer("buffer", &buffer, offered).unwrap();
        let (exporter, offer) = (Some(exporter), Some(offer));
        Owner { sim, driver, pool, buffer, exporter, offer }
    }

    /// Gives everything back and looks whether it is.
    pub(crate) fn end(self) -> String {
        let Owner { sim, driver, pool, buffer, exporter, offer } = self;
        drop((offer, exporter));
        drop((buffer, pool));
        drop(driver);
        super::left(&sim)
    }
}

/// Writes the pattern of each chunk at its start.
pub(crate) fn fill(buffer: &ElasticBuffer, slots: std::ops::Range<u64>) {
    for slot in slots {
        buffer.write(slot * G, &[pattern(slot); 64]).unwrap();
    }
}

/// What the second process does as an owner.
pub(crate) fn answers(address: Address) -> Answers {
    let slots = number("VMM_SHARE_TEST_SLOTS").unwrap_or(4);
    let mut owner = Some(Owner::new(address, slots));
    let mut clog: Option<Clog> = None;
    Box::new(move |words| {
        if words == ["end"] {
            return owner.take().map(Owner::end);
        }
        let owner = owner.as_mut()?;
        let done = |done: Result<u64, vmm_pool::Error>| {
            Some(done.map_or_else(|error| error.to_string(), |bytes| bytes.to_string()))
        };
        match words {
            ["grow", slots] => {
                let (from, to) = (owner.buffer.committed_bytes() / G, slots.parse().unwrap());
                let grown = owner.buffer.grow_to(to * G);
                fill(&owner.buffer, from..to);
                done(grown)
            }
            ["shrink", slots] => done(owner.buffer.shrink_to(slots.parse::<u64>().unwrap() * G)),
            ["move", device] => {
                let place = Place::Device(DeviceId(device.parse().unwrap()));
                done(owner.buffer.migrate(place).map(|moved| moved.bytes))
            }
            ["sleep"] => done(owner.buffer.sleep(Contents::Kept { node: 0 }, Duration::ZERO)),
            ["wake"] => done(owner.buffer.wake()),
            ["write", offset, value] => {
                let (offset, value) = (offset.parse().unwrap(), value.parse().unwrap());
                owner.buffer.write(offset, &[value; 64]).unwrap();
                Some("written".to_owned())
            }
            ["read", offset] => {
                let mut byte = [0];
                owner.buffer.read(offset.parse().unwrap(), &mut byte).unwrap();
                Some(byte[0].to_string())
            }
            ["ready"] => {
                owner.offer.as_ref()?.wait_ready(super::SOON).unwrap();
                Some(owner.exporter.as_ref()?.stats().descriptors.to_string())
            }
            ["publish"] => {
                let stream = Stream::create(&owner.driver, HOME).unwrap();
                Some(owner.offer.as_ref()?.publish(&stream).unwrap().to_string())
            }
            ["withdraw"] => {
                owner.offer = None;
                Some("withdrawn".to_owned())
            }
            ["stop"] => {
                owner.exporter = None;
                Some("stopped".to_owned())
            }
            ["fork"] => Some(super::in_fork(|| {
                drop((owner.offer.take(), owner.exporter.take()));
            })),
            ["clog"] => {
                clog.get_or_insert_with(Clog::new);
                Some("clogged".to_owned())
            }
            ["unclog"] => {
                drop(clog.take());
                Some("free".to_owned())
            }
            ["clients"] => Some(owner.exporter.as_ref()?.stats().clients.to_string()),
            ["descriptors"] => Some(owner.exporter.as_ref()?.stats().descriptors.to_string()),
            // Memory that only descriptors keep.
            ["orphans"] => Some(owner.sim.ledger_summary().orphans.to_string()),
            other => panic!("no such order: {other:?}"),
        }
    })
}
