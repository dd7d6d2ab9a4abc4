//! Copies within a buffer, in the order of a stream.

use std::ops::Range;
use std::sync::Arc;

use vmm_sys::Access;
use vmm_sys::object::Stream;

use super::ElasticBuffer;
use super::body::Body;
use super::error::ElasticError;
use super::state::{Standing, State};
use super::uses::Uses;
use crate::depot::Footing;
use crate::error::Error;

/// One copy, by offsets in the buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Span {
    from: u64,
    to: u64,
    bytes: u64,
}

impl ElasticBuffer {
    /// Enqueues a copy of the bytes of `from` to offset `to` in the buffer on `stream`, whose device
    /// reads and writes. It is a use of its own: whatever becomes of the memory meanwhile waits for
    /// it. Returns once it is enqueued. A move that holds the buffer's users is waited for by the
    /// thread, for the driver refuses copies of addresses that are changing place.
    ///
    /// # Errors
    /// Before any driver call: [`Error::OutOfBounds`]; [`ElasticError::NotCommitted`];
    /// [`ElasticError::Overlap`] if some byte is in both, at whichever address;
    /// [`ElasticError::NoAccess`] if the stream's device may not write the buffer. As
    /// [`ElasticBuffer::use_on`]; the driver's.
    pub fn copy_on(&self, stream: &Stream, from: Range<u64>, to: u64) -> Result<(), Error> {
        self.copies_on(stream, [(from, to)])
    }

    /// Enqueues several copies, one behind the other, as one use: see [`ElasticBuffer::copy_on`].
    /// One may read what an earlier one wrote.
    ///
    /// # Errors
    /// As [`ElasticBuffer::copy_on`], of whichever of them: then none is enqueued, unless the driver
    /// refused one, and those before it are.
    pub fn copies_on(
        &self,
        stream: &Stream,
        copies: impl IntoIterator<Item = (Range<u64>, u64)>,
    ) -> Result<(), Error> {
        let copies: Result<Vec<Span>, Error> =
            copies.into_iter().map(|(from, to)| self.body.span(&from, to)).collect();
        let copies = copies?;
        let device = stream.device();
        if self.access(device) != Access::ReadWrite {
            return Err(ElasticError::NoAccess { device }.into());
        }
        let check = || {
            let state = self.body.state();
            copies.iter().try_for_each(|copy| self.body.check_copy(&state, copy))
        };
        check()?;
        let using = Uses::begin_checked(&self.body, stream)?;
        // From here on memory that is taken away waits for the guard; it may have been before.
        check()?;
        let parts: Vec<Span> = {
            let state = self.body.state();
            copies.iter().flat_map(|copy| self.body.parts(&state, *copy)).collect()
        };
        for Span { from, to, bytes } in parts {
            self.body.range.copy_on(stream, to, from, bytes)?;
        }
        drop(using);
        Ok(())
    }
}

impl Body {
    /// A copy, if its ends lie in the buffer and apart.
    fn span(&self, from: &Range<u64>, to: u64) -> Result<Span, Error> {
        let (buffer_bytes, bytes) =
            (self.shape.capacity_bytes, from.end.saturating_sub(from.start));
        for offset in [from.start, to] {
            if offset.checked_add(bytes).is_none_or(|end| end > buffer_bytes) {
                return Err(Error::OutOfBounds { offset, bytes, buffer_bytes });
            }
        }
        let span = Span { from: from.start, to, bytes };
        match from.start.abs_diff(to) < bytes {
            true => Err(span.overlap()),
            false => Ok(span),
        }
    }

    /// Refuses a copy of what is not there.
    fn check_copy(&self, state: &State, copy: &Span) -> Result<(), Error> {
        for offset in [copy.from, copy.to] {
            let mut slots = self.slots_over(offset, copy.bytes)?;
            if let Some(slot) = slots.find(|slot| !state.pieces.contains_key(slot)) {
                let offset = u64::from(slot) * self.shape.chunk_bytes;
                return Err(ElasticError::NotCommitted { offset }.into());
            }
        }
        // A byte of a shared chunk has several addresses.
        let targets = self.shared_bytes(state, copy.to, copy.bytes);
        let overlaps = |(chunk, bytes): &(*const Footing, Range<u64>)| {
            let same = targets.iter().filter(|(target, _)| target == chunk);
            same.into_iter().any(|(_, it)| it.start < bytes.end && bytes.start < it.end)
        };
        match !targets.is_empty()
            && self.shared_bytes(state, copy.from, copy.bytes).iter().any(overlaps)
        {
            true => Err(copy.overlap()),
            false => Ok(()),
        }
    }

    /// What of these bytes lies in shared chunks, by chunk, from its start.
    fn shared_bytes(
        &self,
        state: &State,
        offset: u64,
        bytes: u64,
    ) -> Vec<(*const Footing, Range<u64>)> {
        let chunk_bytes = self.shape.chunk_bytes;
        // Checked by the caller.
        let slots = self.slots_over(offset, bytes).unwrap_or_default();
        let of = |(slot, it): (&u32, &Standing)| {
            let start = u64::from(*slot) * chunk_bytes;
            let bytes = offset.saturating_sub(start)..(offset + bytes - start).min(chunk_bytes);
            it.is_shared().then_some((Arc::as_ptr(&it.footing), bytes))
        };
        state.pieces.range(slots).filter_map(of).collect()
    }

    /// The copy in parts of which each side lies at one place, since nobody says that the driver
    /// copies across.
    fn parts(&self, state: &State, copy: Span) -> Vec<Span> {
        let chunk_bytes = self.shape.chunk_bytes;
        let place = |offset: u64| {
            let slot = u32::try_from(offset / chunk_bytes).ok()?;
            state.pieces.get(&slot).map(|standing| standing.place)
        };
        let mut parts: Vec<Span> = Vec::new();
        let mut places = None;
        let mut done = 0;
        while done < copy.bytes {
            let (from, to) = (copy.from + done, copy.to + done);
            let to_border = |offset: u64| chunk_bytes - offset % chunk_bytes;
            let bytes = to_border(from).min(to_border(to)).min(copy.bytes - done);
            let here = Some((place(from), place(to)));
            match parts.last_mut() {
                Some(part) if places == here => part.bytes += bytes,
                _ => parts.push(Span { from, to, bytes }),
            }
            places = here;
            done += bytes;
        }
        parts
    }
}

impl Span {
    fn overlap(&self) -> Error {
        let Span { from, to, bytes } = *self;
        ElasticError::Overlap { from, to, bytes }.into()
    }
}
