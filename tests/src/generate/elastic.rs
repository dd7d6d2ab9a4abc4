//! Steps with elastic buffers: memory from anywhere, moves, sleep.

use std::collections::VecDeque;

use vmm_pool::Place;
use vmm_sys::{Access, DeviceId};

use super::{Generator, KIB, MIB};
use crate::action::{Action, ElasticAction};
use crate::rng::Rng;
use crate::setup::Setup;

/// Buffers that a run has at once.
const BUFFERS_MAX: usize = 5;
/// Labels of owners.
const TAGS: u64 = 3;

#[derive(Clone, Copy, Debug)]
enum Kind {
    Build,
    Commit,
    Ahead,
    Decommit,
    Share,
    Unshare,
    Copy,
    Grant,
    Use,
    Begin,
    End,
    Move,
    Sleep,
    Wake,
    Check,
    Drop,
}

const KINDS: &[(u64, Kind)] = &[
    (40, Kind::Build),
    (230, Kind::Commit),
    (30, Kind::Ahead),
    (90, Kind::Decommit),
    (80, Kind::Share),
    (25, Kind::Unshare),
    (70, Kind::Copy),
    (70, Kind::Grant),
    (330, Kind::Use),
    (15, Kind::Begin),
    (30, Kind::End),
    (260, Kind::Move),
    (50, Kind::Sleep),
    (110, Kind::Wake),
    (40, Kind::Check),
    (25, Kind::Drop),
];

/// A buffer that is probably there.
#[derive(Clone, Copy, Debug)]
pub(super) struct Known {
    number: u32,
    slots: u32,
    device: u32,
}

/// What is known of elastic buffers while a script is made.
#[derive(Debug, Default)]
pub(super) struct Elastics {
    known: Vec<Known>,
    next: u32,
    /// Steps that belong together.
    due: VecDeque<Action>,
}

/// Several devices, mostly with fine chunks, so that all of their bytes can be compared; and mostly
/// memory of the host.
pub(super) fn make_room(setup: &mut Setup, rng: &mut Rng) {
    setup.devices = 2 + rng.below(3) as u32;
    setup.granularity_bytes = rng.weighted(&[(45, 4 * KIB), (40, 64 * KIB), (15, 2 * MIB)]);
    if rng.chance(500) {
        // What follows from a shortage is in half of the others.
        setup.limit_bytes = None;
        setup.device_bytes = setup.device_bytes.max(8 << 30);
    }
    setup.host_bytes = match rng.below(100) {
        0..15 => None,
        15..40 => Some(setup.granularity_bytes * (1 + rng.below(12))),
        _ => Some(1 << 40),
    };
}

impl Generator {
    /// The next of some steps that belong together.
    pub(super) fn due(&mut self) -> Option<Action> {
        self.elastics.due.pop_front()
    }

    pub(super) fn elastic(&mut self) -> Action {
        let kind = self.rng.weighted(KINDS);
        let some = match self.elastics.known.as_slice() {
            [] => None,
            known => Some(self.rng.pick(known)),
        };
        Action::Elastic(match (some, kind) {
            (None, _) => self.build(),
            (_, Kind::Build) if self.elastics.known.len() < BUFFERS_MAX => self.build(),
            (Some(it), Kind::Build | Kind::Commit) => {
                let (first, slots) = self.part(it);
                let place = match self.rng.chance(500) {
                    true => Place::Device(DeviceId(it.device)),
                    false => self.place(),
                };
                ElasticAction::Commit { buffer: it.number, place, first, slots }
            }
            (Some(it), Kind::Ahead) => {
                ElasticAction::Ahead { buffer: it.number, slots: self.part(it).1 }
            }
            (Some(it), Kind::Decommit) => {
                let (first, slots) = self.part(it);
                ElasticAction::Decommit { buffer: it.number, first, slots }
            }
            (Some(it), Kind::Share) => self.sharing(it),
            (Some(it), Kind::Unshare) => {
                let (first, slots) = self.part(it);
                ElasticAction::Unshare { buffer: it.number, first, slots }
            }
            (Some(it), Kind::Copy) => {
                let (stream, from, to) = (self.some_stream(), self.slot(it), self.slot(it));
                ElasticAction::Copy { buffer: it.number, stream, from, to }
            }
            (Some(it), Kind::Grant) => {
                let access = [(20, Access::None), (20, Access::Read), (60, Access::ReadWrite)];
                let (device, access) = (self.device(), self.rng.weighted(&access));
                ElasticAction::Grant { buffer: it.number, device, access }
            }
            (Some(it), Kind::Use) => {
                let slot = self.slot(it);
                ElasticAction::Use { buffer: it.number, stream: self.some_stream(), slot }
            }
            (Some(it), Kind::Begin) => {
                ElasticAction::Begin { buffer: it.number, stream: self.some_stream() }
            }
            (Some(it), Kind::End) => ElasticAction::End { buffer: it.number },
            (Some(it), Kind::Move) => self.relocation(it),
            (Some(_), Kind::Sleep) => {
                ElasticAction::Sleep { tag: self.tag(), kept: self.rng.chance(700) }
            }
            (Some(_), Kind::Wake) => ElasticAction::Wake { tag: self.tag() },
            (Some(it), Kind::Check) => {
                ElasticAction::Check { buffer: it.number, device: self.device() }
            }
            (Some(it), Kind::Drop) => {
                self.elastics.known.retain(|known| known.number != it.number);
                ElasticAction::Drop { buffer: it.number }
            }
        })
    }

    fn build(&mut self) -> ElasticAction {
        let number = self.elastics.next;
        self.elastics.next += 1;
        let device = self.device();
        let slots = 1 + self.rng.below(10) as u32;
        self.elastics.known.push(Known { number, slots, device });
        let granularity = self.granularity_bytes;
        let long = granularity.max(self.rng.pick(&[64 * KIB, 2 * MIB, 6 * MIB]));
        let chunk = self.rng.weighted(&[
            (50, Some(granularity)),
            (20, Some(3 * granularity)),
            (20, Some(long)),
            (10, None),
        ]);
        let quota = self.rng.chance(200).then(|| 1 + self.rng.below(u64::from(slots)) as u32);
        ElasticAction::Build { buffer: number, device, slots, chunk, tag: self.tag(), quota }
    }

    /// Mostly of memory that is there, to slots that have none, and with something that concerns one
    /// of them afterwards.
    fn sharing(&mut self, it: Known) -> ElasticAction {
        let buffer = it.number;
        let (first, to) = (self.slot(it), self.slot(it));
        let slots = if self.rng.chance(700) { 1 } else { self.part(it).1 };
        let share = ElasticAction::Share { buffer, first, slots, to };
        if self.rng.chance(200) {
            return share;
        }
        let place = self.place();
        let stream = self.some_stream();
        let (slot, other) = if self.rng.chance(500) { (first, to) } else { (to, first) };
        let then = match self.rng.below(6) {
            0 => ElasticAction::Use { buffer, stream, slot },
            1 => ElasticAction::Copy { buffer, stream, from: slot, to: self.slot(it) },
            2 => ElasticAction::Unshare { buffer, first: slot, slots: 1 },
            3 => ElasticAction::Decommit { buffer, first: slot, slots },
            4 => ElasticAction::Commit { buffer, place, first: other, slots },
            _ => {
                let (part, ahead) = (Some((slot, 1)), self.rng.chance(500));
                ElasticAction::Move { buffer, to: self.place(), part, ahead, late: None }
            }
        };
        let written = ElasticAction::Use { buffer, stream, slot: first };
        let steps = [ElasticAction::Commit { buffer, place, first, slots }, written, share, then];
        self.elastics.due.extend(steps.map(Action::Elastic));
        ElasticAction::Decommit { buffer, first: to, slots }
    }

    fn relocation(&mut self, it: Known) -> ElasticAction {
        let to = self.place();
        let part = self.rng.chance(300).then(|| self.part(it));
        let ahead = self.rng.chance(500);
        let late = (ahead && self.rng.chance(600)).then(|| self.some_stream());
        let order = ElasticAction::Move { buffer: it.number, to, part, ahead, late };
        if !ahead || self.rng.chance(500) {
            return order;
        }
        // With work that it has to wait for.
        let stream = self.some_stream();
        let slot = self.slot(it);
        let used = ElasticAction::Use { buffer: it.number, stream, slot };
        let steps =
            [Action::Hold { stream }, Action::Elastic(used.clone()), Action::Elastic(order)];
        self.elastics.due.extend(steps);
        used
    }

    fn slot(&mut self, it: Known) -> u32 {
        self.rng.below(u64::from(it.slots)) as u32
    }

    /// First slot and number of slots; rarely beyond the end.
    fn part(&mut self, it: Known) -> (u32, u32) {
        let slots = u64::from(it.slots);
        let first = if self.rng.chance(400) { 0 } else { self.rng.below(slots) };
        let over = u64::from(self.rng.chance(40));
        (first as u32, (1 + self.rng.below(slots - first) + over * slots) as u32)
    }

    /// A device; less often the host; rarely one that the pool knows nothing of.
    fn place(&mut self) -> Place {
        match self.rng.below(100) {
            0..70 => Place::Device(DeviceId(self.device())),
            70..97 => Place::HostNuma(0),
            97 => Place::HostNuma(1),
            _ => Place::Device(DeviceId(self.devices)),
        }
    }

    fn tag(&mut self) -> u32 {
        self.rng.below(TAGS) as u32
    }
}
