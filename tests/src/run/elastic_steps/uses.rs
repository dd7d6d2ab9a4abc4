//! Streams use elastic buffers.

use vmm_sys::object::Stream;
use vmm_sys::{Access, ProbeKernel};

use super::judge::Kind;
use super::{Elastic, Runner, Step};
use crate::elastic::areas;

impl Runner<'_> {
    /// What a use is refused for; `None` if stream or buffer are not there.
    pub(super) fn use_refusals(&self, number: u32, stream: u32) -> Option<Vec<Kind>> {
        let (elastic, slot) = (self.elastics.get(&number)?, self.streams.get(&stream)?);
        Some(match elastic.model.access_of(slot.device) {
            Access::None => vec![Kind::NoAccess],
            Access::Read | Access::ReadWrite => elastic.refusals(),
        })
    }

    pub(super) fn begin_use(&mut self, number: u32, stream: u32) -> Step {
        let Some(must) = self.use_refusals(number, stream) else { return Ok(()) };
        self.follow(number, stream);
        let begun = self.elastics[&number].buffer.use_on(&self.streams[&stream].stream);
        let begun = self.judge(begun, &must, &[])?;
        match (begun, self.elastics.get_mut(&number)) {
            (Some(guard), Some(elastic)) => elastic.guards.push_back((stream, guard)),
            // How far it came before a call failed is not known.
            _ if self.faulty => self.release_all()?,
            _ => {}
        }
        Ok(())
    }

    pub(super) fn end_use(&mut self, number: u32) -> Step {
        let guard = self.elastics.get_mut(&number).and_then(|it| it.guards.pop_front());
        let Some((stream, guard)) = guard else { return Ok(()) };
        drop(guard);
        self.note_use(number, stream);
        Ok(())
    }

    /// The stream comes behind earlier users of memory that came back.
    pub(super) fn follow(&mut self, number: u32, stream: u32) {
        if let Some(elastic) = self.elastics.get(&number) {
            let mut before = elastic.model.before().clone();
            before.remove(&stream);
            self.model.comes_behind(stream, before);
        }
    }

    pub(super) fn note_use(&mut self, number: u32, stream: u32) {
        let holders = self.model.holders(stream);
        if let Some(elastic) = self.elastics.get_mut(&number) {
            elastic.model.used(stream, holders);
        }
    }

    /// A kernel writes the slot: new contents, or the same again where another stream that is held
    /// has yet to write them.
    pub(super) fn write_slot(&mut self, number: u32, stream: u32, slot: u32) -> Step {
        let Some(must) = self.use_refusals(number, stream) else { return Ok(()) };
        let may_write = self.elastics[&number].model.access_of(self.streams[&stream].device)
            == Access::ReadWrite;
        let stands = self.elastics[&number].model.chunks.contains_key(&slot);
        let writes = must.is_empty() && may_write && stands;
        let alone = writes && self.settle_writers(number, slot, Some(stream))?;
        self.follow(number, stream);
        let elastic = &self.elastics[&number];
        let begun = elastic.buffer.use_on(&self.streams[&stream].stream);
        let Some(guard) = self.judge(begun, &must, &[])? else {
            return if self.faulty { self.release_all() } else { Ok(()) };
        };
        if writes {
            self.versions += u32::from(alone);
            let version = self.versions;
            let Some(Elastic { model, .. }) = self.elastics.get_mut(&number) else {
                return Ok(());
            };
            let start = model.address + u64::from(slot) * model.chunk_bytes;
            let written = model.write(slot, stream, alone.then_some(Some(version)));
            let version = written.unwrap_or(version);
            for (offset, words, value) in areas(model.chunk_bytes, version) {
                fill(&self.streams[&stream].stream, start + offset, words, value)?;
            }
        }
        drop(guard);
        self.note_use(number, stream);
        Ok(())
    }
}

/// Enqueues a kernel that writes words which count up from `value`.
fn fill(stream: &Stream, dst: u64, words: u64, value: u32) -> Step {
    let kernel = ProbeKernel::FillWords { dst, words, value };
    // SAFETY: the stream is live; the addresses are committed memory of an elastic buffer under a
    // guard, and the stream's device may write there.
    let launched = unsafe { stream.driver().launch(stream.device(), &kernel, stream.handle()) };
    launched.map_err(|error| format!("a kernel was refused: {error}"))
}
