//! The walker: what the books say against what stands.

use std::collections::BTreeMap;

use super::ContiguousCache;
use super::books::Use;
use super::core::Core;

impl ContiguousCache {
    /// Walks the whole cache and checks its invariants, for tests: the books add up, each slot has exactly
    /// the chunks that they say, memory covers all tokens, and no chunk is in two slots unless that is
    /// known. Waits for a growth that is under way.
    ///
    /// # Errors
    /// The first that does not hold, in words.
    pub fn verify(&self) -> Result<(), String> {
        let core = self.core();
        let _held = core.memory.hands.take().map_err(|error| error.to_string())?;
        let stats = core.memory.buffer.stats();
        let pieces: BTreeMap<u64, bool> =
            core.memory.buffer.pieces().iter().map(|it| (it.offset, it.shared)).collect();
        let books = core.books();
        books.verify()?;
        let mut known = 0;
        for slot in 0..books.slots() {
            core.verify_line(slot, books.used(slot), books.stands(slot))?;
            // A cache that sleeps without its contents has no pieces.
            if stats.asleep.is_some() {
                continue;
            }
            known += core.verify_slot(slot, &books, &pieces)?;
        }
        if stats.asleep.is_none() && known != pieces.len() {
            return Err(format!("{} pieces, of which the slots have {known}", pieces.len()));
        }
        Ok(())
    }
}

impl Core {
    fn verify_line(&self, slot: u32, used: Use, stands: u64) -> Result<(), String> {
        let line = self.slot(slot);
        let (usable, tokens) = (line.usable_chunks(), line.tokens());
        if used != Use::Open && (usable, tokens, line.is_parked()) != (0, 0, false) {
            return Err(format!("slot {slot} is {used:?} and has {tokens} tokens"));
        }
        if usable > stands || self.geometry.chunks_for(tokens) > usable {
            return Err(format!(
                "slot {slot}: {tokens} tokens, {usable} chunks usable of {stands} that stand"
            ));
        }
        Ok(())
    }

    /// Returns how many pieces lie in the slot.
    fn verify_slot(
        &self,
        slot: u32,
        books: &super::books::Books,
        pieces: &BTreeMap<u64, bool>,
    ) -> Result<usize, String> {
        let stands = books.stands(slot);
        for chunk in 0..stands {
            for range in self.geometry.ranges(slot, chunk..chunk + 1) {
                match pieces.get(&range.start) {
                    None => return Err(format!("slot {slot}: chunk {chunk} is missing")),
                    Some(true) if !books.links.is_chunk_shared(slot, chunk) => {
                        return Err(format!("slot {slot}: chunk {chunk} is another's too"));
                    }
                    Some(_) => {}
                }
            }
        }
        let found = pieces.range(self.geometry.span(slot)).count();
        let expected = self.geometry.mappings(stands) as usize;
        if found != expected && !books.has_rest(slot) {
            return Err(format!("slot {slot}: {found} pieces, expected {expected}"));
        }
        Ok(found)
    }
}
