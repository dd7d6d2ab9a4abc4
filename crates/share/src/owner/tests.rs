//! Clients that do not keep to the protocol, and leases by a clock that is set.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use rustix::event::PollFlags;
use vmm_sys::Call;
use vmm_sys::ResultCode;
use vmm_sys::sim::{FaultPlan, Sim};

use super::*;
use crate::error::Refusal;
use crate::hostile::{address, connected, listener, send_raw};
use crate::importer::{Access, Importer, ImporterOptions};
use crate::socket::{Received, Waited, message_room, receive, wait};
use crate::wire::{Frame, Message, OwnerMessage};

const G: u64 = 2 << 20;
const SOON: Duration = Duration::from_secs(10);

struct Scene {
    sim: Arc<Sim>,
    owner: Owner,
    address: Address,
    seconds: Arc<AtomicU64>,
}

impl Scene {
    fn new() -> Scene {
        let sim = Sim::builder().build();
        let seconds = Arc::new(AtomicU64::new(0));
        let (address, clock) = (address(), seconds.clone());
        let builder = Owner::builder(sim.clone()).lease(Duration::from_secs(10));
        let builder = builder.clock(move || Duration::from_secs(clock.load(Ordering::SeqCst)));
        let owner = builder.timeout(SOON).bind(address.clone()).unwrap();
        Scene { sim, owner, address, seconds }
    }

    fn client(&self) -> OwnerClient {
        let sim = Sim::builder().build();
        OwnerClient::connect(&self.address, ImporterOptions::new(sim).timeout(SOON)).unwrap()
    }

    /// A socket whose hello was answered.
    fn greeted(&self) -> OwnedFd {
        let socket = connected(&self.address);
        send_raw(&socket, &frame(1, Message::Hello), &[]).unwrap();
        assert!(matches!(answer(&socket), Some(Message::Welcome { .. })));
        socket
    }

    fn wait(&self, is_it: impl Fn(&OwnerStatus) -> bool) {
        let deadline = Instant::now() + SOON;
        while !is_it(&self.owner.status()) {
            assert!(Instant::now() < deadline, "{:?}", self.owner.status());
            thread::sleep(Duration::from_millis(1));
        }
    }

    fn end(self) {
        let Scene { sim, owner, .. } = self;
        drop(owner);
        sim.check_clean().unwrap();
    }
}

fn frame(request: u32, message: Message) -> Vec<u8> {
    Frame { request, message }.encode()
}

/// The next message; `None` at the end.
fn answer(socket: &OwnedFd) -> Option<Message> {
    assert!(wait(socket, None, PollFlags::IN, Instant::now() + SOON).unwrap() == Waited::Ready);
    match receive(socket, 1, &mut message_room()) {
        Ok(Received::Frame(frame, _)) => Some(frame.message),
        Ok(Received::End) => None,
        other => panic!("{other:?}"),
    }
}

fn create(name: &str, bytes: u64, chunk_bytes: u64, device: u32) -> Message {
    Message::Owner(OwnerMessage::Create {
        name: name.to_owned(),
        bytes,
        chunk_bytes,
        device: OwnerDevice::Index(device),
        others_write: false,
        succeed: false,
    })
}

#[test]
fn questions_with_any_numbers_get_a_refusal_and_cost_nothing() {
    let scene = Scene::new();
    let socket = scene.greeted();
    for (message, expected) in [
        (create("", G, 0, 0), Refusal::Request),
        (create("a", 0, 0, 0), Refusal::Request),
        (create("a", G, 0, 7), Refusal::Device),
        (create("a", u64::MAX, 0, 0), Refusal::Failed),
        (create("a", 1 << 62, G, 0), Refusal::Failed),
        (create("a", G, 12345, 0), Refusal::Failed),
        (create("a", G, u64::MAX, 0), Refusal::Failed),
        (Message::Owner(OwnerMessage::Release { name: "a".into() }), Refusal::Unknown),
        (Message::Owner(OwnerMessage::Done), Refusal::Request),
        (Message::Open { name: "a".into(), write: true }, Refusal::Unknown),
    ] {
        send_raw(&socket, &frame(2, message.clone()), &[]).unwrap();
        let Some(Message::Refused { reason, .. }) = answer(&socket) else { panic!("{message:?}") };
        assert_eq!(reason, expected, "{message:?}");
    }
    let status = Message::Owner(OwnerMessage::Status { first: u32::MAX });
    send_raw(&socket, &frame(3, status), &[]).unwrap();
    let Some(Message::Owner(OwnerMessage::Holding { buffers, .. })) = answer(&socket) else {
        panic!("no status")
    };
    assert!(buffers.is_empty());
    assert_eq!(scene.sim.ledger_summary().chunks, 0);
    scene.end();
}

#[test]
fn garbage_is_cut_off_and_others_are_served() {
    let scene = Scene::new();
    let client = scene.client();
    let (import, _) = client.create_or_find(&NamedBuffer::new("a", G).chunk_bytes(G)).unwrap();
    let mut random = StdRng::seed_from_u64(0x0dd);
    for round in 0..300 {
        let socket = if round % 2 == 0 { scene.greeted() } else { connected(&scene.address) };
        let mut bytes = frame(7, create("b", 1 << 50, 0, 0));
        for _ in 0..4 {
            let at = random.random_range(0..bytes.len());
            bytes[at] = random.random();
        }
        bytes.truncate(random.random_range(1..=bytes.len()));
        // One that was cut before cannot be sent to.
        let _ = send_raw(&socket, &bytes, &[]);
    }
    scene.wait(|status| status.clients == 1);
    import.write(0, &[1; 8]).unwrap();
    drop((import, client));
    scene.wait(|status| status.clients == 0);
    scene.end();
}

#[test]
fn who_asked_and_went_before_the_answer_holds_nothing() {
    let scene = Scene::new();
    for round in 0..20 {
        let socket = scene.greeted();
        let message = create(&format!("left {round}"), G, G, 0);
        send_raw(&socket, &frame(2, message), &[]).unwrap();
    }
    let none_held = |status: &OwnerStatus| {
        status.clients == 0 && status.buffers.iter().all(|it| it.lease != LeaseState::Held)
    };
    scene.wait(none_held);
    // The last buffers may still be being made: their leases begin when that is done, so time goes on.
    // The memory goes a moment after the name.
    scene.wait(|status| {
        scene.seconds.fetch_add(10, Ordering::SeqCst);
        status.buffers.is_empty() && scene.sim.ledger_summary().chunks == 0
    });
    scene.end();
}

#[test]
fn a_driver_that_refuses_is_told_and_nothing_is_left() {
    let scene = Scene::new();
    let client = scene.client();
    let wanted = NamedBuffer::new("a", 4 * G).chunk_bytes(G);
    let refused = FaultPlan::fail(ResultCode::UNKNOWN).on(Call::MemCreate).at(2).once();
    scene.sim.inject(refused);
    let error = client.create_or_find(&wanted).unwrap_err();
    assert!(matches!(error, ShareError::Refused { reason: Refusal::Failed, .. }), "{error}");
    assert!(scene.owner.status().buffers.is_empty());
    let (import, created) = client.create_or_find(&wanted).unwrap();
    assert_eq!((import.bytes(), created), (4 * G, true));
    // An open that is refused does not end what is held.
    assert!(client.open("nothing", Access::Read).is_err());
    assert_eq!(scene.owner.status().buffers[0].lease, LeaseState::Held);
    drop((import, client));
    scene.end();
}

#[test]
fn a_plain_importer_holds_what_it_opens() {
    let scene = Scene::new();
    let client = scene.client();
    drop(client.create_or_find(&NamedBuffer::new("a", G).chunk_bytes(G)).unwrap());
    let options = ImporterOptions::new(Sim::builder().build()).timeout(SOON);
    let importer = Importer::connect(&scene.address, options).unwrap();
    let import = importer.open("a", Access::Read).unwrap();
    drop(client);
    scene.wait(|status| status.clients == 1);
    scene.seconds.store(100, Ordering::SeqCst);
    assert_eq!(scene.owner.status().buffers[0].lease, LeaseState::Held);
    drop((import, importer));
    scene.wait(|status| status.buffers[0].lease == LeaseState::Ends(Duration::from_secs(10)));
    scene.seconds.store(110, Ordering::SeqCst);
    scene.wait(|status| status.buffers.is_empty());
    scene.end();
}

#[test]
fn an_owner_that_answers_nonsense_is_a_protocol_error() {
    let holding = |total, first| OwnerMessage::Holding {
        total,
        first,
        clients: 1,
        total_bytes_max: 0,
        buffers: Vec::new(),
    };
    for nonsense in [
        Message::Welcome { exporter: [0; 16] },
        Message::Owner(OwnerMessage::Done),
        Message::Owner(OwnerMessage::Leave { name: "a".into() }),
        Message::Owner(holding(1, 1)),
        Message::Owner(holding(u32::MAX, 0)),
    ] {
        let address = address();
        let socket = listener(&address);
        let said = nonsense.clone();
        let owner = thread::spawn(move || {
            for _ in 0..2 {
                assert!(
                    wait(&socket, None, PollFlags::IN, Instant::now() + SOON).unwrap()
                        == Waited::Ready
                );
                let client = rustix::net::accept(&socket).unwrap();
                for (request, message) in
                    [(1, Message::Welcome { exporter: [1; 16] }), (2, said.clone())]
                {
                    assert!(answer(&client).is_some());
                    send_raw(&client, &frame(request, message), &[]).unwrap();
                }
            }
        });
        let asked = OwnerStatus::ask(&address, SOON).unwrap_err();
        assert!(matches!(asked, ShareError::Protocol { .. }), "{nonsense:?}: {asked}");
        let options = ImporterOptions::new(Sim::builder().build()).timeout(SOON);
        let client = OwnerClient::connect(&address, options).unwrap();
        let made = client.create_or_find(&NamedBuffer::new("a", G)).unwrap_err();
        assert!(matches!(made, ShareError::Protocol { .. }), "{nonsense:?}: {made}");
        let after = client.release("a").unwrap_err();
        assert!(matches!(after, ShareError::OwnerGone { .. }), "{after}");
        owner.join().unwrap();
        let Address::Path(path) = &address else { panic!("a path") };
        std::fs::remove_file(path).unwrap();
    }
}

#[test]
fn settings_that_cannot_be_are_refused() {
    let builder = || Owner::builder(Sim::builder().build());
    for wrong in
        [builder().devices([]), builder().devices([DeviceId(1)]), builder().lease(Duration::MAX)]
    {
        let refused = wrong.bind(address()).unwrap_err();
        assert!(matches!(refused, ShareError::BadArgument { .. }), "{refused}");
    }
}
