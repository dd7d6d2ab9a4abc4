//! An exporter against importers that send anything.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use rustix::event::PollFlags;
use vmm_pool::{ElasticBuffer, Pool};
use vmm_sys::sim::{FaultPlan, Sim};
use vmm_sys::{Call, DeviceId, Driver, ResultCode};

use super::{address, connected, send_raw};
use crate::address::Address;
use crate::error::ShareError;
use crate::exporter::{Exporter, ExporterBuilder, Offer, Offered};
use crate::importer::{Access, Importer, ImporterOptions};
use crate::socket::{Received, Waited, message_room, receive, wait};
use crate::wire::{Frame, Message};

const G: u64 = 2 << 20;
const PATIENCE: Duration = Duration::from_millis(200);
const SOON: Duration = Duration::from_secs(10);

struct Scene {
    sim: Arc<Sim>,
    pool: Pool,
    buffer: Arc<ElasticBuffer>,
    exporter: Exporter,
    offer: Offer,
    address: Address,
}

impl Scene {
    fn new(clients_max: usize) -> Scene {
        Scene::with(Exporter::builder().timeout(PATIENCE).clients_max(clients_max))
    }

    fn with(builder: ExporterBuilder) -> Scene {
        let sim = Sim::builder().build();
        let driver: Arc<dyn Driver> = sim.clone();
        let pool = Pool::builder(driver).build().unwrap();
        let elastic = pool.elastic(DeviceId(0)).capacity_bytes(8 * G).chunk_bytes(G);
        let buffer = Arc::new(elastic.exportable(true).build().unwrap());
        buffer.grow_to(2 * G).unwrap();
        let address = address();
        let exporter = builder.bind(address.clone()).unwrap();
        let offer = exporter.offer("buffer", &buffer, Offered::Read).unwrap();
        Scene { sim, pool, buffer, exporter, offer, address }
    }

    /// A faithful importer is served.
    fn serves(&self) {
        self.try_to_be_served().unwrap();
    }

    fn try_to_be_served(&self) -> Result<(), ShareError> {
        let sim = Sim::builder().build();
        let driver: Arc<dyn Driver> = sim.clone();
        let options = ImporterOptions::new(driver).timeout(SOON);
        let importer = Importer::connect(&self.address, options)?;
        let import = importer.open("buffer", Access::Read)?;
        import.read(0, &mut [0])
    }

    /// Waits until so many were cut.
    fn wait_cut(&self, cut: u64) {
        let deadline = Instant::now() + SOON;
        while self.exporter.stats().cut < cut {
            assert!(Instant::now() < deadline, "{:?}", self.exporter.stats());
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn end(self) {
        let Scene { sim, pool, buffer, exporter, offer, .. } = self;
        drop((offer, exporter, buffer, pool));
        sim.check_clean().unwrap();
    }
}

fn frame(request: u32, message: Message) -> Vec<u8> {
    Frame { request, message }.encode()
}

fn hello() -> Vec<u8> {
    frame(1, Message::Hello)
}

/// The answer, or `None` if the connection ended.
fn answer(socket: &OwnedFd) -> Option<Message> {
    assert!(wait(socket, None, PollFlags::IN, Instant::now() + SOON).unwrap() == Waited::Ready);
    match receive(socket, 128, &mut message_room()) {
        Ok(Received::Frame(frame, _)) => Some(frame.message),
        Ok(Received::End) => None,
        other => panic!("{other:?}"),
    }
}

#[test]
fn whoever_sends_no_message_is_cut() {
    let scene = Scene::new(64);
    let null = || vec![std::fs::File::open("/dev/null").unwrap().into()];
    let fetch =
        |export, piece| frame(3, Message::Fetch { export, generation: 1, pieces: vec![piece] });
    let bad: [(Vec<u8>, Vec<OwnedFd>, bool); 7] = [
        (b"garbage".to_vec(), Vec::new(), false),
        (hello()[..10].to_vec(), Vec::new(), false),
        (vec![7; 65_537], Vec::new(), true),
        (hello(), null(), false),
        (hello(), Vec::new(), true),
        (fetch(1, 1), Vec::new(), false),
        (frame(2, Message::Welcome { exporter: [1; 16] }), Vec::new(), true),
    ];
    let cases = bad.len() as u64;
    for (bytes, files, greeted) in bad {
        let socket = connected(&scene.address);
        if greeted {
            send_raw(&socket, &hello(), &[]).unwrap();
            assert!(matches!(answer(&socket), Some(Message::Welcome { .. })));
        }
        send_raw(&socket, &bytes, &files).unwrap();
        // It is told why, as far as there is a why, and then the connection ends.
        while answer(&socket).is_some() {}
        scene.serves();
    }
    scene.wait_cut(cases);
    assert_eq!(scene.exporter.stats().cut, cases);
    scene.end();
}

#[test]
fn questions_for_what_is_not_there_are_refused_and_harmless() {
    let scene = Scene::new(64);
    let socket = connected(&scene.address);
    send_raw(&socket, &hello(), &[]).unwrap();
    assert!(matches!(answer(&socket), Some(Message::Welcome { .. })));
    let generation = scene.buffer.generation();
    for message in [
        Message::Open { name: "other".into(), write: false },
        Message::Open { name: "buffer".into(), write: true },
        Message::Describe { export: 99, first: 0 },
        Message::Fetch { export: 99, generation, pieces: vec![1] },
        Message::Fetch { export: 1, generation: generation + 1, pieces: vec![1] },
        Message::Fetch { export: 1, generation, pieces: vec![1, 99] },
    ] {
        send_raw(&socket, &frame(2, message), &[]).unwrap();
        assert!(matches!(answer(&socket), Some(Message::Refused { .. })));
    }
    // Behind the end there is nothing, which is no error.
    send_raw(&socket, &frame(3, Message::Describe { export: 1, first: 1000 }), &[]).unwrap();
    assert!(matches!(answer(&socket), Some(Message::Layout { pieces, .. }) if pieces.is_empty()));
    assert_eq!(scene.exporter.stats().cut, 0);
    drop(socket);
    scene.serves();
    scene.end();
}

#[test]
fn whoever_says_nothing_is_cut_and_whoever_has_greeted_is_not() {
    let scene = Scene::new(64);
    let silent = connected(&scene.address);
    let greeted = connected(&scene.address);
    send_raw(&greeted, &hello(), &[]).unwrap();
    assert!(matches!(answer(&greeted), Some(Message::Welcome { .. })));
    scene.wait_cut(1);
    assert_eq!(answer(&silent), None);
    std::thread::sleep(2 * PATIENCE);
    assert_eq!((scene.exporter.stats().cut, scene.exporter.stats().clients), (1, 1));
    scene.serves();
    scene.end();
}

#[test]
fn whoever_floods_and_does_not_read_is_cut() {
    let scene = Scene::new(64);
    let socket = connected(&scene.address);
    send_raw(&socket, &hello(), &[]).unwrap();
    let open = frame(2, Message::Open { name: "buffer".into(), write: false });
    let deadline = Instant::now() + SOON;
    // Until the exporter has cut it; meanwhile the queue may be full.
    while scene.exporter.stats().cut == 0 {
        let _ = send_raw(&socket, &open, &[]);
        assert!(Instant::now() < deadline, "{:?}", scene.exporter.stats());
    }
    scene.serves();
    drop(socket);
    scene.end();
}

#[test]
fn there_are_only_so_many_clients() {
    let scene = Scene::new(2);
    let mut sockets: Vec<OwnedFd> = Vec::new();
    for _ in 0..2 {
        let socket = connected(&scene.address);
        send_raw(&socket, &hello(), &[]).unwrap();
        assert!(matches!(answer(&socket), Some(Message::Welcome { .. })));
        sockets.push(socket);
    }
    let refused = connected(&scene.address);
    assert!(matches!(answer(&refused), Some(Message::Refused { .. })));
    assert_eq!(answer(&refused), None);
    sockets.pop();
    let deadline = Instant::now() + SOON;
    while scene.exporter.stats().clients > 1 {
        assert!(Instant::now() < deadline);
        std::thread::sleep(Duration::from_millis(1));
    }
    scene.serves();
    assert_eq!(scene.exporter.stats().refused, 1);
    scene.end();
}

#[test]
fn what_is_made_for_somebody_who_has_given_up_keeps_nobody_waiting() {
    let patience = Duration::from_millis(500);
    let builder = Exporter::builder().ahead(false).descriptors_max(0).timeout(patience);
    let scene = Scene::with(builder);
    let generation = scene.buffer.generation();
    let late = FaultPlan::delay_real(patience * 3 / 2).on(Call::MemExportToShareableHandle);
    let unknown = FaultPlan::fail(ResultCode::UNKNOWN).on(Call::MemExportToShareableHandle);
    let socket = connected(&scene.address);
    send_raw(&socket, &hello(), &[]).unwrap();
    assert!(matches!(answer(&socket), Some(Message::Welcome { .. })));
    for plan in [late.once(), unknown.once()] {
        scene.sim.inject(plan);
        let pieces = vec![1];
        let fetch = Message::Fetch { export: 1, generation, pieces };
        send_raw(&socket, &frame(2, fetch.clone()), &[]).unwrap();
        assert!(matches!(answer(&socket), Some(Message::Refused { .. })));
        // It holds its connection, and asks for nothing.
        let deadline = Instant::now() + SOON;
        while let Err(error) = scene.try_to_be_served() {
            // The late call may still be under way.
            assert!(Instant::now() < deadline, "{error}");
        }
        assert_eq!(scene.exporter.stats().descriptors, 0);
        // It is not told again of what is over.
        send_raw(&socket, &frame(3, fetch), &[]).unwrap();
        assert!(matches!(answer(&socket), Some(Message::Pieces { .. })));
    }
    drop(socket);
    scene.end();
}

#[test]
fn a_thousand_spoilt_conversations_leave_nothing() {
    let scene = Scene::new(64);
    let mut random = StdRng::seed_from_u64(77);
    let generation = scene.buffer.generation();
    for _ in 0..1000 {
        let socket = connected(&scene.address);
        let mut messages = [
            hello(),
            frame(2, Message::Open { name: "buffer".into(), write: false }),
            frame(3, Message::Describe { export: 1, first: 0 }),
            frame(4, Message::Fetch { export: 1, generation, pieces: vec![1, 2] }),
        ];
        let spoilt = random.random_range(0..messages.len());
        let at = random.random_range(0..messages[spoilt].len());
        messages[spoilt][at] ^= 1 << random.random_range(0..8);
        for message in &messages {
            // It may be cut already.
            if send_raw(&socket, message, &[]).is_err() {
                break;
            }
        }
        if random.random_range(0..2) == 0 {
            // Some read, some just go.
            let _ = answer(&socket);
        }
    }
    scene.serves();
    let deadline = Instant::now() + SOON;
    while scene.exporter.stats().clients > 0 {
        assert!(Instant::now() < deadline, "{:?}", scene.exporter.stats());
        std::thread::sleep(Duration::from_millis(1));
    }
    scene.end();
}
