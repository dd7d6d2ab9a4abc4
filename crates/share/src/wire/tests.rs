//! Every message survives the wire, and nothing else does.

use proptest::prelude::*;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use vmm_sys::Uuid;

use super::*;
use crate::error::Refusal;
use crate::owner::{HeldBuffer, Holder, LeaseState, OwnerDevice};
use std::time::Duration;

fn home() -> impl Strategy<Value = Home> {
    prop_oneof![
        any::<[u8; 16]>().prop_map(|it| Home::Gpu(Uuid(it))),
        any::<u32>().prop_map(Home::HostNuma)
    ]
}

fn piece() -> impl Strategy<Value = PieceEntry> {
    (any::<u64>(), any::<u64>(), any::<u64>(), home())
        .prop_map(|(id, offset, bytes, home)| PieceEntry { id, offset, bytes, home })
}

fn ordering() -> impl Strategy<Value = Ordering> {
    prop_oneof![
        Just(Ordering::Host),
        (any::<[u8; 16]>(), any::<[u8; 32]>()).prop_map(|(device, half)| {
            let mut handle = [0; 64];
            handle[..32].copy_from_slice(&half);
            Ordering::Event { device: Uuid(device), handle }
        })
    ]
}

fn ids() -> impl Strategy<Value = Vec<u64>> {
    prop::collection::vec(any::<u64>(), 0..=DESCRIPTORS_MAX)
}

fn held() -> impl Strategy<Value = HeldBuffer> {
    let lease = prop_oneof![
        Just(LeaseState::Held),
        any::<u64>().prop_map(|ms| LeaseState::Ends(Duration::from_millis(ms))),
        Just(LeaseState::UntilReleased),
    ];
    let holder = (any::<u32>(), any::<u32>(), any::<bool>());
    let holder = holder.prop_map(|(pid, uid, writes)| Holder { pid, uid, writes });
    let holders = prop::collection::vec(holder, 0..8);
    let numbers = (any::<u64>(), any::<u64>(), any::<u64>(), any::<u32>());
    (".{0,60}", numbers, any::<[u8; 16]>(), lease, holders).prop_map(
        |(name, (bytes, chunk_bytes, generation, descriptors), device, lease, holders)| {
            let device = Uuid(device);
            HeldBuffer { name, bytes, chunk_bytes, device, generation, descriptors, lease, holders }
        },
    )
}

fn owner_message() -> impl Strategy<Value = OwnerMessage> {
    let name = || ".{0,60}";
    let device = prop_oneof![
        any::<u32>().prop_map(OwnerDevice::Index),
        any::<[u8; 16]>().prop_map(|it| OwnerDevice::Uuid(Uuid(it))),
    ];
    let flags = (any::<bool>(), any::<bool>());
    let counts = (any::<u32>(), any::<u32>(), any::<u32>(), any::<u64>());
    prop_oneof![
        (name(), any::<u64>(), any::<u64>(), device, flags).prop_map(
            |(name, bytes, chunk_bytes, device, (others_write, succeed))| {
                OwnerMessage::Create { name, bytes, chunk_bytes, device, others_write, succeed }
            }
        ),
        name().prop_map(|name| OwnerMessage::Leave { name }),
        name().prop_map(|name| OwnerMessage::Release { name }),
        any::<u32>().prop_map(|first| OwnerMessage::Status { first }),
        (any::<bool>(), any::<bool>())
            .prop_map(|(created, write)| OwnerMessage::Created { created, write }),
        Just(OwnerMessage::Done),
        (counts, prop::collection::vec(held(), 0..=HELD_MAX)).prop_map(
            |((total, first, clients, total_bytes_max), buffers)| {
                OwnerMessage::Holding { total, first, clients, total_bytes_max, buffers }
            }
        ),
    ]
}

fn message() -> impl Strategy<Value = Message> {
    let number = any::<u64>;
    prop_oneof![
        Just(Message::Hello),
        (".{0,60}", any::<bool>()).prop_map(|(name, write)| Message::Open { name, write }),
        (number(), any::<u32>()).prop_map(|(export, first)| Message::Describe { export, first }),
        (number(), number(), ids()).prop_map(|(export, generation, pieces)| Message::Fetch {
            export,
            generation,
            pieces
        }),
        owner_message().prop_map(Message::Owner),
        any::<[u8; 16]>().prop_map(|exporter| Message::Welcome { exporter }),
        (number(), any::<bool>(), number(), ordering()).prop_map(
            |(export, write, chunk_bytes, ordering)| Message::Opened {
                export,
                write,
                chunk_bytes,
                ordering
            }
        ),
        (number(), any::<u32>(), any::<u32>(), prop::collection::vec(piece(), 0..40)).prop_map(
            |(generation, total, first, pieces)| Message::Layout {
                generation,
                total,
                first,
                pieces
            }
        ),
        (number(), ids()).prop_map(|(generation, pieces)| Message::Pieces { generation, pieces }),
        (1u16..=11, ".{0,200}").prop_map(|(code, text)| Message::Refused {
            reason: Refusal::from_code(code).unwrap(),
            text
        }),
    ]
}

fn frame() -> impl Strategy<Value = Frame> {
    (any::<u32>(), message()).prop_map(|(request, message)| Frame { request, message })
}

proptest! {
    #[test]
    fn what_is_encoded_is_decoded(frame in frame()) {
        let bytes = frame.encode();
        prop_assert!(bytes.len() <= MESSAGE_BYTES_MAX);
        prop_assert_eq!(Frame::decode(&bytes), Ok(frame));
    }

    #[test]
    fn a_message_cut_short_or_with_something_behind_is_none(frame in frame(), cut in any::<u16>()) {
        let mut bytes = frame.encode();
        let end = usize::from(cut) % bytes.len();
        prop_assert!(Frame::decode(&bytes[..end]).is_err());
        bytes.push(0);
        prop_assert!(Frame::decode(&bytes).is_err());
    }

    #[test]
    fn any_bytes_are_answered(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        fuzz_decode(&bytes);
    }
}

#[test]
fn f_f6_ten_thousand_mutations_are_refused_or_have_one_form() {
    let mut random = StdRng::seed_from_u64(0x5ea1);
    let piece = PieceEntry { id: 1, offset: 0, bytes: 2 << 20, home: Home::HostNuma(1) };
    let seeds: Vec<Vec<u8>> = [
        Message::Open { name: "weights".into(), write: true },
        Message::Fetch { export: 1, generation: 2, pieces: vec![1, 2, 3] },
        Message::Opened { export: 1, write: false, chunk_bytes: 2 << 20, ordering: Ordering::Host },
        Message::Layout { generation: 3, total: 2, first: 0, pieces: vec![piece; 2] },
        Message::Refused { reason: Refusal::Changed, text: "changed".into() },
        Message::Owner(OwnerMessage::Create {
            name: "weights".into(),
            bytes: 1 << 30,
            chunk_bytes: 0,
            device: OwnerDevice::Index(1),
            others_write: false,
            succeed: true,
        }),
        Message::Owner(OwnerMessage::Holding {
            total: 2,
            first: 0,
            clients: 3,
            total_bytes_max: u64::MAX,
            buffers: vec![long_held(2); 2],
        }),
    ]
    .into_iter()
    .map(|message| Frame { request: 7, message }.encode())
    .collect();
    let (mut refused, mut taken) = (0, 0);
    for _ in 0..10_000 {
        let mut bytes = seeds[random.random_range(0..seeds.len())].clone();
        for _ in 0..random.random_range(1..4) {
            let at = random.random_range(0..bytes.len());
            match random.random_range(0..3) {
                0 => bytes[at] = random.random(),
                1 => bytes[at] ^= 1 << random.random_range(0..8),
                _ => bytes.truncate(at.max(1)),
            }
        }
        match fuzz_decode(&bytes) {
            true => taken += 1,
            false => refused += 1,
        }
    }
    assert!(refused > 1000 && taken > 1000, "{refused} refused, {taken} taken");
}

/// With so many holders, and the longest name.
fn long_held(holders: usize) -> HeldBuffer {
    HeldBuffer {
        name: "n".repeat(NAME_BYTES_MAX),
        bytes: 1 << 30,
        chunk_bytes: 2 << 20,
        device: Uuid([7; 16]),
        generation: 1,
        descriptors: 512,
        lease: LeaseState::Ends(Duration::from_secs(60)),
        holders: vec![Holder { pid: 1, uid: 1000, writes: true }; holders],
    }
}

#[test]
fn the_longest_messages_fit() {
    let piece = PieceEntry { id: 1, offset: 0, bytes: 1, home: Home::Gpu(Uuid([9; 16])) };
    let pieces = vec![piece; LAYOUT_PIECES_MAX];
    let longest = Message::Layout { generation: 1, total: 1400, first: 0, pieces };
    let refused = Message::Refused { reason: Refusal::Failed, text: "ä".repeat(4000) };
    let holding = Message::Owner(OwnerMessage::Holding {
        total: 16,
        first: 0,
        clients: 256,
        total_bytes_max: 1,
        buffers: vec![long_held(HOLDERS_MAX); HELD_MAX],
    });
    for message in [longest, refused, holding] {
        let bytes = Frame { request: 1, message }.encode();
        assert!(bytes.len() <= MESSAGE_BYTES_MAX);
        assert!(Frame::decode(&bytes).is_ok());
    }
}

#[test]
fn another_version_and_unknown_kinds_are_told() {
    let mut bytes = Frame { request: 1, message: Message::Hello }.encode();
    bytes[4] = 2;
    assert_eq!(Frame::decode(&bytes), Err(WireError::Version(2)));
    bytes[4] = 1;
    bytes[6] = 99;
    assert!(matches!(Frame::decode(&bytes), Err(WireError::Malformed { got, .. }) if got == "99"));
}
