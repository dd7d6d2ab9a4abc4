//! Steps with elastic buffers, and what must be true of them after every step.
//!
//! What may be refused, and how, is said before each operation ([`judge`]); whatever fails must
//! leave the model's picture true. Contents are words that kernels count up ([`areas`]): known once
//! somebody has written, kept over moves and sleep, compared after each.

mod judge;
mod memory;
mod moves;
mod share;
mod uses;

use std::collections::{BTreeSet, VecDeque};
use std::ops::Range;
use std::time::{Duration, Instant};

use vmm_pool::{Contents, ElasticBuffer, Place, Use};
use vmm_sys::{Access, DeviceId};

use judge::Kind;

use super::{Runner, Step};
use crate::action::ElasticAction;
use crate::elastic::{ElasticModel, areas, first_wrong};

/// An elastic buffer, what must be true of it, and guards that are alive, with their streams.
pub(super) struct Elastic {
    pub(super) buffer: ElasticBuffer,
    pub(super) model: ElasticModel,
    guards: VecDeque<(u32, Use)>,
}

/// A small pool or host refuses what it has no memory for.
const AMPLE_BYTES: u64 = 1 << 32;

const A_MOMENT: Duration = Duration::from_secs(1);

impl Runner<'_> {
    pub(super) fn elastic(&mut self, action: &ElasticAction) -> Step {
        use ElasticAction as A;
        match action {
            A::Build { .. } => self.build_elastic(action),
            A::Commit { buffer, place, first, slots } => {
                self.commit(*buffer, *place, *first..first + slots)
            }
            A::Ahead { buffer, slots } => self.grow_ahead(*buffer, *slots),
            A::Decommit { buffer, first, slots } => self.decommit(*buffer, *first..first + slots),
            A::Share { buffer, first, slots, to } => {
                self.share(*buffer, *first..first + slots, *to)
            }
            A::Unshare { buffer, first, slots } => self.unshare(*buffer, *first..first + slots),
            A::Copy { buffer, stream, from, to } => self.copy(*buffer, *stream, *from, *to),
            A::Grant { buffer, device, access } => self.grant(*buffer, *device, *access),
            A::Use { buffer, stream, slot } => self.write_slot(*buffer, *stream, *slot),
            A::Begin { buffer, stream } => self.begin_use(*buffer, *stream),
            A::End { buffer } => self.end_use(*buffer),
            A::Move { buffer, to, part, ahead, late } => {
                let part = part.map(|(first, slots)| first..first + slots);
                match ahead {
                    true => self.move_ahead(*buffer, *to, part, *late),
                    false => self.move_now(*buffer, *to, part),
                }
            }
            A::Sleep { tag, kept } => self.sleep(*tag, *kept),
            A::Wake { tag } => self.wake(*tag),
            A::Check { buffer, device } => self.check_elastic(*buffer, *device),
            A::Drop { buffer } => self.drop_elastic(*buffer),
        }
    }

    /// Whether requests may be refused for want of memory.
    fn may_be_short(&self) -> bool {
        let setup = &self.script.setup;
        self.was_faulty
            || setup.limit_bytes.is_some()
            || setup.device_bytes < AMPLE_BYTES
            || setup.host_bytes.is_some_and(|bytes| bytes < AMPLE_BYTES)
    }

    /// Whether the pool knows the place.
    fn knows(&self, place: Place) -> bool {
        match place {
            Place::Device(device) => device.0 < self.script.setup.devices,
            Place::HostNuma(node) => node == 0 && self.script.setup.host_bytes.is_some(),
        }
    }

    /// Lets these streams go; all of them, where memory may be short: then the pool waits for
    /// whatever may give some back.
    fn let_go(&mut self, streams: BTreeSet<u32>) -> Step {
        if self.may_be_short() {
            return self.release_all();
        }
        streams.into_iter().try_for_each(|stream| self.release(stream))
    }

    /// Whether memory may be kept by a guard that is alive.
    pub(super) fn any_guard(&self) -> bool {
        self.elastics.values().any(|elastic| !elastic.guards.is_empty())
    }

    /// Memory of a device that elastic buffers keep from every request, and links between devices.
    pub(super) fn kept_elastic(&self, device: u32) -> u64 {
        let stats = self.pool.as_ref().and_then(|pool| pool.device_stats(DeviceId(device)));
        stats.map_or(0, |stats| stats.elastic_bytes + stats.anchor_bytes)
    }

    /// Compares every elastic buffer with its model, and the sums of each place.
    pub(super) fn compare_elastics(&self) -> Step {
        for (number, elastic) in &self.elastics {
            elastic.compare().map_err(|text| format!("e{number}: {text}"))?;
        }
        let begun = Instant::now();
        loop {
            let sums = self.compare_sums();
            // The pool's thread may have a buffer in its hands for a moment after it was dropped.
            if sums.is_ok() || !self.script.setup.background || begun.elapsed() > A_MOMENT {
                return sums;
            }
            std::thread::yield_now();
        }
    }

    fn compare_sums(&self) -> Step {
        let Some(pool) = &self.pool else { return Ok(()) };
        let stats = pool.stats();
        let devices = stats.devices.iter().map(|(id, it)| (Place::Device(*id), it.elastic_bytes));
        let hosts = stats.hosts.iter().map(|it| (Place::HostNuma(it.node), it.elastic_bytes));
        for (place, counted) in devices.chain(hosts) {
            let at = |elastic: &Elastic| elastic.model.chunks_at(place) * elastic.model.chunk_bytes;
            let expected: u64 = self.elastics.values().map(at).sum();
            if expected != counted {
                let text = "elastic bytes: the model has";
                return Err(format!("{place}: {text} {expected}, the pool {counted}"));
            }
        }
        match stats.hosts.iter().find(|host| !host.adds_up()) {
            Some(host) => Err(format!("the columns do not add up: {host:?}")),
            None => Ok(()),
        }
    }

    /// Compares all that is known of the contents, as `device` reads them.
    pub(super) fn check_elastic(&mut self, number: u32, device: u32) -> Step {
        let Some(elastic) = self.elastics.get(&number) else { return Ok(()) };
        if elastic.model.asleep.is_some() || elastic.model.access_of(device) == Access::None {
            return Ok(());
        }
        let slots: Vec<u32> = elastic.model.chunks.keys().copied().collect();
        for slot in slots {
            if self.settle_writers(number, slot, None)? {
                self.check_slot(number, slot, device)?;
            }
        }
        Ok(())
    }

    /// As [`Runner::check_elastic`] by the home.
    fn check_at_home(&mut self, number: u32) -> Step {
        let home = self.elastics.get(&number).map(|elastic| elastic.model.home);
        home.map_or(Ok(()), |home| self.check_elastic(number, home))
    }

    /// Waits for the streams that have written to a slot, `except` one. Whether that can be.
    fn settle_writers(
        &mut self,
        number: u32,
        slot: u32,
        except: Option<u32>,
    ) -> Result<bool, String> {
        let Some(chunk) = self.elastics.get(&number).and_then(|it| it.model.chunks.get(&slot))
        else {
            return Ok(false);
        };
        let others = chunk.writers.iter().filter(|stream| Some(**stream) != except);
        let writers: Vec<u32> = others.copied().collect();
        if writers.iter().any(|stream| self.model.is_held(*stream)) {
            return Ok(false);
        }
        let _calm = self.calm()?;
        for stream in &writers {
            let synchronized = self.streams[stream].stream.synchronize();
            synchronized.map_err(|error| format!("a kernel went wrong: {error}"))?;
        }
        if let Some(elastic) = self.elastics.get_mut(&number) {
            elastic.model.settled(slot, &writers);
        }
        Ok(true)
    }

    /// Compares what is known of one slot. Nobody writes to it now.
    fn check_slot(&mut self, number: u32, slot: u32, device: u32) -> Step {
        let Some(Elastic { buffer, model, .. }) = self.elastics.get(&number) else { return Ok(()) };
        let Some(version) = model.chunks.get(&slot).and_then(|chunk| chunk.version) else {
            return Ok(());
        };
        for (offset, words, value) in areas(model.chunk_bytes, version) {
            let mut found = vec![0; 4 * words as usize];
            let offset = u64::from(slot) * model.chunk_bytes + offset;
            match buffer.read_by(DeviceId(device), offset, &mut found) {
                Ok(()) => {}
                // What a failed move could not bring back is tried again when calls succeed.
                Err(_) if self.faulty => return Ok(()),
                Err(error) => return Err(format!("e{number} slot {slot} is not read: {error}")),
            }
            if let Some(at) = first_wrong(&found, value) {
                let place = model.chunks[&slot].place;
                return Err(format!(
                    "e{number} slot {slot} on {place} holds other bytes: at {at} of the area at \
                     {offset}"
                ));
            }
        }
        self.tally.elastic_checked += 1;
        Ok(())
    }

    /// Checks a buffer, drops it, and then its guards.
    fn drop_elastic(&mut self, number: u32) -> Step {
        self.check_at_home(number)?;
        // In the order of the fields: the buffer first.
        drop(self.elastics.remove(&number));
        Ok(())
    }

    /// Drops all of them.
    pub(super) fn drop_elastics(&mut self) -> Step {
        let numbers: Vec<u32> = self.elastics.keys().copied().collect();
        numbers.into_iter().try_for_each(|number| self.drop_elastic(number))
    }

    /// At the end: no guards, everything awake if there is memory, everything compared.
    pub(super) fn end_elastics(&mut self) -> Step {
        self.elastics.values_mut().for_each(|elastic| elastic.guards.clear());
        let tags: BTreeSet<u32> = self.elastics.values().map(|it| it.model.tag).collect();
        for tag in tags {
            self.wake(tag)?;
            self.compare()?;
        }
        self.drop_elastics()?;
        self.compare()
    }
}

impl Elastic {
    fn all(&self) -> Range<u32> {
        0..self.model.slots
    }

    /// What is seen of the buffer against what must be.
    fn compare(&self) -> Step {
        let Elastic { buffer, model, guards } = self;
        let chunk = model.chunk_bytes;
        let seen = buffer.pieces();
        let pieces = seen.iter().map(|it| ((it.offset / chunk) as u32, it.place, it.shared));
        let pieces: Vec<_> = pieces.collect();
        let stats = buffer.stats();
        let expected = model.pieces();
        let seen = [
            ("address", model.address, buffer.address()),
            ("generation", model.generation, buffer.generation()),
            ("home", model.home.into(), buffer.device().0.into()),
            ("committed bytes", expected.len() as u64 * chunk, buffer.committed_bytes()),
            ("committed bytes in figures", buffer.committed_bytes(), stats.committed_bytes),
            ("open guards", guards.len() as u64, stats.open_uses),
            ("incoming bytes", 0, stats.incoming_bytes),
        ];
        if let Some((what, model, pool)) = seen.iter().find(|(_, model, pool)| model != pool) {
            return Err(format!("{what}: the model has {model}, the pool {pool}"));
        }
        if pieces != expected {
            return Err(format!("pieces: the model has {expected:?}, the pool {pieces:?}"));
        }
        if buffer.asleep() != model.asleep {
            return Err(format!("asleep: {:?}, the pool says {:?}", model.asleep, buffer.asleep()));
        }
        let devices = model.access.keys().copied().chain(0..4);
        match devices.into_iter().find(|id| buffer.access(DeviceId(*id)) != model.access_of(*id)) {
            Some(id) => Err(format!("access of device {id}: {:?}", buffer.access(DeviceId(id)))),
            None => Ok(()),
        }
    }

    /// Takes the generation over after an operation that changed something, or nothing.
    fn age(&mut self, changed: bool) -> Step {
        let (before, now) = (self.model.generation, self.buffer.generation());
        if changed && now <= before || !changed && now != before {
            return Err(format!("generation {before} became {now}, changed: {changed}"));
        }
        self.model.generation = now;
        Ok(())
    }

    /// What every operation that needs memory is refused for.
    fn refusals(&self) -> Vec<Kind> {
        self.model.asleep.map(|_: Contents| Kind::Asleep).into_iter().collect()
    }
}
