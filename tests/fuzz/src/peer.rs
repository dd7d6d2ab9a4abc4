use std::os::fd::OwnedFd;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recv,
    send, socket_with,
};
use vmm_pool::{ElasticBuffer, Pool};
use vmm_share::{Access, Address, Exporter, Importer, ImporterOptions, Offer, Offered};
use vmm_sys::sim::Sim;
use vmm_sys::{DeviceId, Driver};

use crate::reader::Reader;

const SOON: Duration = Duration::from_secs(20);
/// Messages of one input.
const MESSAGES_MAX: usize = 8;

/// A process that offers a buffer, for all inputs.
struct House {
    name: String,
    exporter: Exporter,
    buffer: Arc<ElasticBuffer>,
    _offered: Offer,
}

fn house() -> &'static House {
    static HOUSE: OnceLock<House> = OnceLock::new();
    HOUSE.get_or_init(|| {
        let driver: Arc<dyn Driver> = Sim::builder().build();
        let pool = Pool::builder(driver).background(false).build().expect("a pool");
        let builder = pool.elastic(DeviceId(0)).capacity_bytes(8 << 20).chunk_bytes(2 << 20);
        let buffer = Arc::new(builder.exportable(true).build().expect("a buffer"));
        buffer.grow_to(4 << 20).expect("memory");
        let name = format!("vmm-pool-fuzz-{}", std::process::id());
        let address = Address::Abstract(name.clone());
        let exporter = Exporter::builder().timeout(SOON).bind(address).expect("an exporter");
        let offered = exporter.offer("buffer", &buffer, Offered::Read).expect("an offer");
        House { name, exporter, buffer, _offered: offered }
    })
}

/// Messages of any bytes, each behind its length, from a process that says nothing else: the owner of
/// the memory cuts it off or answers, keeps its memory, and serves others.
///
/// # Panics
/// If it does not hold.
pub fn peer(bytes: &[u8]) -> bool {
    let house = house();
    let mut reader = Reader(bytes);
    let (socket, mut answered) = (connected(&house.name), false);
    for _ in 0..MESSAGES_MAX {
        if reader.is_empty() {
            break;
        }
        let length = usize::from(reader.byte()) + 1;
        // One that was cut off cannot be sent to.
        if send(&socket, reader.take(length), SendFlags::NOSIGNAL).is_err() {
            break;
        }
        // An answer, or the end. What is not answered is no reason to wait long.
        let wait = Timespec { tv_sec: 0, tv_nsec: 2_000_000 };
        if poll(&mut [PollFd::new(&socket, PollFlags::IN)], Some(&wait)).is_ok_and(|n| n > 0) {
            let mut answer = [0; 65536];
            match recv(&socket, &mut answer, RecvFlags::DONTWAIT) {
                // Behind the mark and the version; 105 is a refusal, below are answers to questions.
                Ok((8.., _)) => answered |= (102..105).contains(&answer[6]),
                Ok((1.., _)) => {}
                _ => break,
            }
        }
    }
    drop(socket);
    others_are_served(house);
    answered
}

fn connected(name: &str) -> OwnedFd {
    let flags = SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
    let socket = socket.expect("a socket");
    let address = SocketAddrUnix::new_abstract_name(name.as_bytes()).expect("a name");
    connect(&socket, &address).expect("connected");
    socket
}

fn others_are_served(house: &House) {
    let address = house.exporter.address();
    let options = ImporterOptions::new(Sim::builder().build()).timeout(SOON);
    let importer = Importer::connect(address, options).expect("somebody else connects");
    let import = importer.open("buffer", Access::Read).expect("the buffer");
    assert_eq!(import.bytes(), 4 << 20);
    drop((import, importer));
    assert_eq!(house.buffer.committed_bytes(), 4 << 20);
    let deadline = Instant::now() + SOON;
    while house.exporter.stats().clients > 0 {
        assert!(Instant::now() < deadline, "who went is still there: {:?}", house.exporter.stats());
        std::thread::yield_now();
    }
}
