//! Elastic buffers as a whole: moves, sleep, lending, access, other processes.

use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use vmm_pool::{Contents, MigrationState, Move, Place};
use vmm_sys::object::{Chunk, Mapping, Range};
use vmm_sys::{Access, AccessGrant, ChunkProps, DeviceId, Driver, HandleTypes, Location};

use crate::actor::Actor;
use crate::coverage::Outcome;
use crate::elastic::LONG;
use crate::faults;
use crate::judge::Kind;
use crate::part::Backing;
use crate::world::{Dropping, Elastic, TAGS};

const MOVE: &[Kind] = &[Kind::InUse, Kind::StillUsed, Kind::Asleep, Kind::Stuck];

impl Actor {
    /// How long guards of others are waited for: not at all, or until they are gone.
    pub(crate) fn patience(&mut self) -> Duration {
        if self.rng.chance(600) { LONG } else { Duration::ZERO }
    }

    fn any_elastic(&mut self) -> Arc<Elastic> {
        let part = self.any_part();
        self.parts[part].elastic.clone()
    }

    fn any_device(&mut self) -> DeviceId {
        DeviceId(self.rng.below(self.world.setup.devices.into()) as u32)
    }

    pub(crate) fn migrate(&mut self) {
        let elastic = self.any_elastic();
        let mut order = Move::to(self.any_place()).patience(self.patience());
        if self.rng.chance(300) {
            let part = self.any_part();
            let part = &self.parts[part];
            if Arc::ptr_eq(&part.elastic, &elastic) {
                order = order.range(part.bytes(0, part.slots.len() / 2));
            }
        }
        if self.rng.chance(400) {
            let asked = elastic.buffer.migrate_async(order);
            if let Some(migration) = self.judge("ask to move", asked, &[]) {
                self.migrations.push(migration);
            }
        } else {
            self.judge("move", elastic.buffer.migrate(order), MOVE);
        }
    }

    /// Waits for the moves that were asked for.
    pub(crate) fn wait_for_moves(&mut self) {
        for migration in std::mem::take(&mut self.migrations) {
            match migration.wait(LONG) {
                MigrationState::Done(_) => drop(self.judge("move in the background", Ok(()), &[])),
                MigrationState::Failed(error) => {
                    let may = [MOVE, &[Kind::Busy]].concat();
                    self.judge::<()>("move in the background", Err(error), &may);
                }
                other => panic!("actor {}: a move is {other:?}", self.number),
            }
        }
    }

    pub(crate) fn come_home(&mut self) {
        let (elastic, patience) = (self.any_elastic(), self.patience());
        self.judge("come home", elastic.buffer.come_home(patience), MOVE);
    }

    pub(crate) fn sleep(&mut self) {
        let kept = self.world.setup.host_bytes.is_some() && self.rng.chance(600);
        let contents = if kept { Contents::Kept { node: 0 } } else { Contents::Dropped };
        let (elastic, patience) = (self.any_elastic(), self.patience());
        let borrowed = !elastic.buffer.stats().borrowed.is_empty();
        let slept = if self.rng.chance(400) {
            let tag = self.rng.pick(TAGS);
            let whose = self.world.tagged(tag);
            let _dropping = (!kept).then(|| Dropping::begin(whose));
            let slept = self.world.pool.sleep(tag, contents, patience);
            let may = [MOVE, &[Kind::Tag]].concat();
            self.judge("sleep by tag", slept, &may).is_some()
        } else {
            let _dropping = (!kept).then(|| Dropping::begin(vec![elastic.clone()]));
            let slept = elastic.buffer.sleep(contents, patience);
            self.judge("sleep", slept, MOVE).is_some()
        };
        if slept && borrowed && elastic.buffer.asleep().is_some() {
            self.feature("buffers slept while they borrowed");
        }
    }

    pub(crate) fn wake(&mut self) {
        let may = [Kind::StillUsed, Kind::InUse, Kind::Tag, Kind::Stuck];
        if self.rng.chance(400) {
            let tag = self.rng.pick(TAGS);
            self.judge("wake by tag", self.world.pool.wake(tag), &may);
            return;
        }
        let elastic = self.any_elastic();
        let slept = elastic.buffer.asleep();
        if self.judge("wake", elastic.buffer.wake(), &may).is_some()
            && matches!(slept, Some(Contents::Kept { .. }))
        {
            elastic.wakes.fetch_add(1, SeqCst);
        }
    }

    pub(crate) fn recall(&mut self) {
        let (place, patience) = (self.any_place(), self.patience());
        let bytes = if self.rng.chance(500) { u64::MAX } else { self.world.setup.slot_bytes };
        let recalled = self.world.pool.recall(place, bytes, patience);
        let Some(recall) = self.judge("recall", recalled, &[]) else { return };
        for not in recall.refused {
            self.judge::<()>("give back", Err(not.why), MOVE);
        }
        if recall.moved_bytes > 0 {
            self.judge("give back", Ok(()), &[]);
        }
    }

    pub(crate) fn rebalance(&mut self) {
        self.world.pool.rebalance();
        self.judge("rebalance", Ok(()), &[]);
    }

    /// Lets a device use the actor's own buffer, or not any more.
    pub(crate) fn grant(&mut self) {
        let device = self.any_device();
        let Some(part) = self.parts.iter().find(|part| part.is_whole) else { return };
        let buffer = &part.elastic.buffer;
        if device == buffer.device() {
            return;
        }
        if buffer.access(device) == Access::None {
            let granted = buffer.grant(device, Access::ReadWrite);
            self.judge("grant", granted, &[Kind::Asleep, Kind::Stuck, Kind::NoPeer]);
            return;
        }
        // Its work must be done before.
        for stream in self.world.streams_of(device).chain([&self.own]) {
            if stream.device() == device && self.drive("a wait", stream.synchronize()).is_none() {
                return;
            }
        }
        // Balance may make it the home meanwhile.
        self.judge("revoke", buffer.revoke(device), &[Kind::Asleep, Kind::Stuck, Kind::Home]);
    }

    /// Hands a slot to another process, which compares it.
    pub(crate) fn export(&mut self) {
        if self.world.setup.faulty && self.rng.chance(200) {
            let (plan, text) = faults::of_export(&mut self.rng);
            self.world.sim.inject(plan);
            self.came_out("inject a fault", Outcome::Done, &text);
        }
        let number = self.any_part();
        let choice = self.rng.next_u64();
        let part = &self.parts[number];
        let Some(at) = part.pick(choice, |slot| slot.backing == Backing::Committed) else { return };
        let before = part.known(at);
        if let Some(last) = part.last(at)
            && self.drive("a wait", last.synchronize()).is_none()
        {
            return;
        }
        let exported = part.elastic.buffer.export_pieces_in(part.bytes(at, 1));
        let may = [Kind::NotExportable, Kind::Stuck];
        let Some(exported) = self.judge("export", exported, &may) else { return };
        let Some((piece, descriptor)) = exported.into_iter().next() else { return };
        let contents = before.filter(|_| self.parts[number].known(at).is_some());
        let other: Arc<dyn Driver> = self.world.other.clone();
        let location = match piece.place {
            Place::Device(device) => Location::Device(device),
            Place::HostNuma(node) => Location::HostNuma(node),
        };
        let props = ChunkProps { location, handle_types: HandleTypes::POSIX_FD, rdma: false };
        let user = DeviceId(0);
        let chunk =
            Chunk::import_fd(&other, std::os::fd::AsFd::as_fd(&descriptor), piece.bytes, &props)
                .expect("another process imports");
        let range = Range::reserve(&other, piece.bytes, 0, 0).expect("it has addresses");
        let mapping = Mapping::map(&range, 0, Arc::new(chunk)).expect("it maps");
        mapping.set_access(&[AccessGrant::read_write(user)]).expect("it grants");
        if let Some(contents) = contents {
            let found = contents.edges().into_iter().map(|(offset, bytes)| {
                let mut edge = vec![0; bytes as usize];
                range.read(user, offset, &mut edge).expect("it reads");
                edge
            });
            let compared = contents.compare(&found.collect::<Vec<_>>());
            assert!(compared.is_ok(), "actor {}, another process: {compared:?}", self.number);
            self.feature("slots compared by another process");
        }
    }
}
