//! Chunks that several slots share, and copies from slot to slot.

use std::ops::Range;
use std::time::Duration;

use vmm_sys::Access;

use super::judge::Kind;
use super::memory::LONG;
use super::{Elastic, Runner, Step};

impl Runner<'_> {
    pub(super) fn share(&mut self, number: u32, from: Range<u32>, to: u32) -> Step {
        let Some(Elastic { model, .. }) = self.elastics.get(&number) else { return Ok(()) };
        let targets: Vec<u32> = (to..).take(from.len()).collect();
        let holders = model.holders_in_the_way(&targets, None);
        holders.into_iter().try_for_each(|stream| self.release(stream))?;
        let Some(elastic) = self.elastics.get(&number) else { return Ok(()) };
        let Elastic { buffer, model, guards } = elastic;
        let mut must = Vec::new();
        if from.end > model.slots || targets.iter().any(|slot| *slot >= model.slots) {
            must.push(Kind::Beyond);
        } else {
            must.extend(elastic.refusals());
            if must.is_empty() {
                must.extend((!model.missing(from.clone()).is_empty()).then_some(Kind::Hole));
                let taken = targets.iter().any(|slot| model.chunks.contains_key(slot));
                must.extend(taken.then_some(Kind::Occupied));
            }
            if must.is_empty() {
                must.extend(model.over_quota(targets.len()).then_some(Kind::Quota));
            }
        }
        let in_the_way = model.is_in_the_way(&targets, None) && !guards.is_empty();
        let may: &[Kind] = if in_the_way { &[Kind::StillUsed] } else { &[] };
        let chunk = model.chunk_bytes;
        let bytes = u64::from(from.start) * chunk..u64::from(from.end) * chunk;
        let outcome = buffer.share(bytes, u64::from(to) * chunk);
        let shared = self.judge(outcome, &must, may)?;
        let Some(elastic) = self.elastics.get_mut(&number) else { return Ok(()) };
        if shared.is_some_and(|shared| shared != targets.len() as u64 * chunk) {
            return Err(format!("{shared:?} bytes were shared, of {} slots", targets.len()));
        }
        if shared.is_some() {
            from.zip(targets).for_each(|(from, to)| elastic.model.shared(from, to));
            self.tally.shared += 1;
        }
        elastic.age(shared.is_some())
    }

    pub(super) fn unshare(&mut self, number: u32, range: Range<u32>) -> Step {
        let Some(elastic) = self.elastics.get(&number) else { return Ok(()) };
        let holders = elastic.model.holders();
        self.let_go(holders)?;
        let Some(elastic) = self.elastics.get(&number) else { return Ok(()) };
        let Elastic { buffer, model, guards } = elastic;
        let mut must = elastic.refusals();
        must.extend((range.end > model.slots).then_some(Kind::Beyond));
        let slots = if must.is_empty() { model.to_own(range.clone()) } else { Vec::new() };
        must.extend((!slots.is_empty() && !guards.is_empty()).then_some(Kind::InUse));
        let patience = if guards.is_empty() { LONG } else { Duration::ZERO };
        let chunk = model.chunk_bytes;
        let bytes = u64::from(range.start) * chunk..u64::from(range.end) * chunk;
        let fired = self.faults_fired();
        let unshared = self.judge(buffer.unshare(bytes, patience), &must, &[])?;
        let faults = self.faults_fired() - fired;
        let Some(elastic) = self.elastics.get_mut(&number) else { return Ok(()) };
        match unshared {
            Some(moved) if moved.bytes != slots.len() as u64 * chunk => {
                return Err(format!("{moved:?}, where {slots:?} were shared"));
            }
            Some(_) => {
                slots.iter().for_each(|slot| elastic.model.own(*slot));
                elastic.age(!slots.is_empty())?;
            }
            None => elastic.failed_unshare(&slots, faults)?,
        }
        self.check_at_home(number)
    }

    /// Copies a slot, where it is known what it has when the copy's turn comes.
    pub(super) fn copy(&mut self, number: u32, stream: u32, from: u32, to: u32) -> Step {
        if !self.elastics.contains_key(&number) || !self.streams.contains_key(&stream) {
            return Ok(());
        }
        let Elastic { model, .. } = &self.elastics[&number];
        if from.max(to) >= model.slots {
            return Ok(());
        }
        let mut must = self.elastics[&number].refusals();
        let group = |slot: u32| model.chunks.get(&slot).map(|chunk| chunk.group);
        let may_write = model.access_of(self.streams[&stream].device) == Access::ReadWrite;
        must.extend((!may_write).then_some(Kind::NoAccess));
        must.extend((group(from).is_none() || group(to).is_none()).then_some(Kind::Hole));
        // What sleeps with its contents dropped has no memory.
        must.extend(model.pieces().is_empty().then_some(Kind::Hole));
        must.extend((from == to || group(from) == group(to)).then_some(Kind::Overlap));
        if must.is_empty()
            && !(self.settle_writers(number, from, Some(stream))?
                && self.settle_writers(number, to, Some(stream))?)
        {
            return Ok(());
        }
        self.follow(number, stream);
        let Elastic { buffer, model, .. } = &self.elastics[&number];
        let chunk = model.chunk_bytes;
        let bytes = u64::from(from) * chunk..u64::from(from + 1) * chunk;
        let outcome = buffer.copy_on(&self.streams[&stream].stream, bytes, u64::from(to) * chunk);
        if self.judge(outcome, &must, &[])?.is_none() {
            return if self.faulty { self.release_all() } else { Ok(()) };
        }
        if let Some(Elastic { model, .. }) = self.elastics.get_mut(&number) {
            // Whoever writes what it reads comes behind it.
            let version = model.write(from, stream, None);
            model.write(to, stream, Some(version));
        }
        self.tally.copied += 1;
        self.note_use(number, stream);
        Ok(())
    }
}

impl Elastic {
    /// As a move that failed; a slot that kept its new chunk is of a new generation.
    fn failed_unshare(&mut self, slots: &[u32], faults: u64) -> Step {
        if faults < 2 {
            return self.age(false);
        }
        let before = self.model.generation;
        let stayed = self.buffer.pieces().into_iter().filter(|piece| piece.generation > before);
        let stayed: Vec<u32> =
            stayed.map(|it| (it.offset / self.model.chunk_bytes) as u32).collect();
        if let Some(slot) = stayed.iter().find(|slot| !slots.contains(slot)) {
            return Err(format!("slot {slot} has other memory, but was not shared"));
        }
        stayed.iter().for_each(|slot| self.model.own(*slot));
        self.age(!stayed.is_empty())
    }
}
