//! Memory comes and goes; devices are granted access.

use std::collections::VecDeque;
use std::ops::Range;
use std::time::Duration;

use vmm_pool::{AheadState, Error, Place};
use vmm_sys::{Access, DeviceId};

use super::judge::Kind;
use super::{Elastic, Runner, Step};
use crate::action::ElasticAction;
use crate::elastic::ElasticModel;

/// How long anything in the background may take.
pub(super) const LONG: Duration = Duration::from_secs(20);

impl Runner<'_> {
    pub(super) fn build_elastic(&mut self, action: &ElasticAction) -> Step {
        let &ElasticAction::Build { buffer, device, slots, chunk, tag, quota } = action else {
            return Ok(());
        };
        if self.elastics.contains_key(&buffer) || slots == 0 {
            return Ok(());
        }
        let Some(pool) = self.pool()? else { return Ok(()) };
        let granularity = self.script.setup.granularity_bytes;
        let mut builder = pool.elastic(DeviceId(device)).tag(&format!("t{tag}"));
        builder = match chunk {
            Some(chunk) => {
                let capacity_bytes = u64::from(slots) * chunk;
                let builder = builder.chunk_bytes(chunk).capacity_bytes(capacity_bytes);
                quota.map_or(builder.clone(), |it| builder.quota_bytes(u64::from(it) * chunk))
            }
            None => builder.capacity_bytes(u64::from(slots) * granularity),
        };
        let known = device < self.script.setup.devices;
        let must: &[Kind] = if known { &[] } else { &[Kind::UnknownDevice] };
        let Some(built) = self.judge(builder.build(), must, &[])? else { return Ok(()) };
        let chunk_bytes = built.chunk_bytes();
        let slots = built.capacity_bytes().div_ceil(chunk_bytes) as u32;
        let mut model =
            ElasticModel::new(device, chunk_bytes, slots, tag, quota.filter(|_| chunk.is_some()));
        model.address = built.address();
        self.elastics.insert(buffer, Elastic { buffer: built, model, guards: VecDeque::new() });
        Ok(())
    }

    pub(super) fn commit(&mut self, number: u32, place: Place, range: Range<u32>) -> Step {
        let Some(Elastic { model, .. }) = self.elastics.get(&number) else { return Ok(()) };
        let missing = model.missing(range.clone());
        let holders = model.holders_in_the_way(&missing, Some(place));
        self.let_go(holders)?;
        let mut must = Vec::new();
        let known = self.knows(place);
        let Some(elastic) = self.elastics.get(&number) else { return Ok(()) };
        let Elastic { buffer, model, guards } = elastic;
        if range.end > model.slots {
            must.push(Kind::Beyond);
        } else {
            must.extend(elastic.refusals());
            if must.is_empty() && !missing.is_empty() {
                must.extend((!known).then_some(Kind::UnknownPlace));
                must.extend(model.over_quota(missing.len()).then_some(Kind::Quota));
            }
        }
        // Nobody can wait for the end of a guard.
        let elsewhere = model.is_in_the_way(&missing, Some(place)) && !guards.is_empty();
        let may: &[Kind] = if elsewhere { &[Kind::StillUsed] } else { &[] };
        let chunk = model.chunk_bytes;
        let bytes = u64::from(range.start) * chunk..u64::from(range.end) * chunk;
        let home = place == Place::Device(DeviceId(model.home));
        let outcome = match (home, range.start) {
            (true, 0) => buffer.grow_to(bytes.end),
            (true, _) => buffer.commit(bytes),
            (false, _) => buffer.commit_from(place, bytes),
        };
        let came = self.judge(outcome, &must, may)?;
        self.came(number, &missing, place, came)
    }

    /// Takes over what a commit did.
    fn came(&mut self, number: u32, missing: &[u32], place: Place, bytes: Option<u64>) -> Step {
        let Some(elastic) = self.elastics.get_mut(&number) else { return Ok(()) };
        let expected = missing.len() as u64 * elastic.model.chunk_bytes;
        match bytes {
            Some(bytes) if bytes != expected => {
                return Err(format!("{bytes} bytes came, {expected} were missing"));
            }
            Some(_) => elastic.model.committed(missing, place),
            None => {}
        }
        elastic.age(bytes.is_some() && !missing.is_empty())
    }

    pub(super) fn grow_ahead(&mut self, number: u32, slots: u32) -> Step {
        if self.may_be_short() {
            self.release_all()?;
        }
        let Some(elastic) = self.elastics.get(&number) else { return Ok(()) };
        let Elastic { buffer, model, .. } = elastic;
        let place = Place::Device(DeviceId(model.home));
        let missing = model.missing(0..slots);
        let mut must = elastic.refusals();
        if slots > model.slots {
            must = vec![Kind::Beyond];
        } else if must.is_empty() && model.over_quota(missing.len()) {
            must.push(Kind::Quota);
        }
        // It waits for nothing.
        let may: &[Kind] =
            if model.is_in_the_way(&missing, Some(place)) { &[Kind::StillUsed] } else { &[] };
        let before = buffer.committed_bytes();
        let outcome = buffer.grow_ahead(u64::from(slots) * model.chunk_bytes).map(|growth| {
            let state = growth.wait(LONG);
            (state, buffer.committed_bytes().saturating_sub(before))
        });
        let outcome: Result<u64, Error> = match outcome {
            Ok((AheadState::Done, came)) => Ok(came),
            Ok((AheadState::Failed(error), _)) => Err(error),
            Ok((state, _)) => return Err(format!("growth ahead does not end: {state:?}")),
            Err(error) => Err(error),
        };
        let came = self.judge(outcome, &must, may)?;
        self.came(number, &missing, place, came)
    }

    pub(super) fn decommit(&mut self, number: u32, range: Range<u32>) -> Step {
        let Some(elastic) = self.elastics.get(&number) else { return Ok(()) };
        let Elastic { buffer, model, .. } = elastic;
        let must = elastic.refusals();
        let gone: Vec<u32> = model.chunks.range(range.clone()).map(|(slot, _)| *slot).collect();
        let chunk = model.chunk_bytes;
        let bytes = u64::from(range.start) * chunk..u64::from(range.end) * chunk;
        let outcome = match range.end >= model.slots {
            true => buffer.shrink_to(bytes.start),
            false => buffer.decommit(bytes),
        };
        let taken = self.judge(outcome, &must, &[])?;
        let Some(elastic) = self.elastics.get_mut(&number) else { return Ok(()) };
        if taken.is_some_and(|taken| taken != gone.len() as u64 * chunk) {
            return Err(format!("{taken:?} bytes were taken, {} chunks stood", gone.len()));
        }
        if taken.is_some() {
            elastic.model.decommitted(&gone);
        }
        elastic.age(taken.is_some() && !gone.is_empty())
    }

    pub(super) fn grant(&mut self, number: u32, device: u32, access: Access) -> Step {
        if !self.elastics.contains_key(&number) || device >= self.script.setup.devices {
            return Ok(());
        }
        if access != Access::ReadWrite {
            // What is taken away must not be in use.
            self.quiet(device)?;
        }
        let Some(Elastic { buffer, model, .. }) = self.elastics.get(&number) else {
            return Ok(());
        };
        let home = device == model.home && access != Access::ReadWrite;
        let must: &[Kind] = if home { &[Kind::Home] } else { &[] };
        let granted = self.judge(buffer.grant(DeviceId(device), access), must, &[])?;
        if let (Some(()), Some(elastic)) = (granted, self.elastics.get_mut(&number)) {
            elastic.model.access.insert(device, access);
        }
        Ok(())
    }

    /// Waits for all streams of a device.
    fn quiet(&mut self, device: u32) -> Step {
        let of = self.streams.iter().filter(|(_, slot)| slot.device == device);
        let numbers: Vec<u32> = of.map(|(number, _)| *number).collect();
        for number in numbers {
            self.release(number)?;
            let _calm = self.calm()?;
            let synchronized = self.streams[&number].stream.synchronize();
            synchronized.map_err(|error| format!("a kernel went wrong: {error}"))?;
        }
        Ok(())
    }
}
