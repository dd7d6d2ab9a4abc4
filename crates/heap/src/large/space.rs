//! The large placement: spans cut to size on allocation and merged when they are freed.
//!
//! Free spans are always maximal, whatever the placement. A placement is an [`Index`]: it only
//! decides which free span serves a request, and where inside it. So cutting, merging, and the
//! operations on exact ranges are the same code for all of them.

use super::spans::{Size, Span, Spans};
use crate::error::NotFree;
use crate::stats::FreeRun;
use crate::{GRANULE_BYTES, NIL, SPACE_BYTES};

/// Decides which free span serves a request.
pub(crate) trait Index {
    /// The alignment at which a request is placed: that of the request, or more.
    fn placement_align(&self, bytes: u64, align: u64) -> u64;

    /// A free span and a start in it, aligned as `placement_align` says, where `bytes` fit. Finds
    /// one if there is one.
    fn find(&self, spans: &Spans, bytes: u64, align: u64) -> Option<(u32, u64)>;

    /// Space was inserted there: spans may start in it from now on.
    fn cover(&mut self, offset: u64, bytes: u64);

    /// The free span `id` is about to change or to go.
    fn detach(&mut self, spans: &Spans, id: u32);

    /// A used span was cut out of a free one that started at `offset`. What is left of that
    /// are the spans in `left`.
    fn cut(&mut self, spans: &Spans, offset: u64, left: Left);

    /// The free span `id` is new, or has grown. No free span starts at `dead_offset`, inside of it,
    /// any more.
    fn merge(&mut self, spans: &Spans, id: u32, dead_offset: Option<u64>);

    /// Bytes of host memory held.
    fn metadata_bytes(&self) -> u64;

    /// Checks the index against the spans.
    fn verify(&self, spans: &Spans) -> Result<(), String>;
}

/// What is left of a free span that was cut: by id, or `NIL`.
#[derive(Clone, Copy)]
pub(crate) struct Left {
    pub(crate) before: u32,
    pub(crate) behind: u32,
}

/// Spans with one placement.
pub(crate) struct Space<I> {
    pub(super) spans: Spans,
    pub(super) index: I,
    /// Sum of all spans.
    mapped_bytes: u64,
    /// Sum of the used ones.
    used_bytes: u64,
}

impl<I: Index> Space<I> {
    pub(crate) fn new(index: I) -> Self {
        Self { spans: Spans::new(), index, mapped_bytes: 0, used_bytes: 0 }
    }

    /// Takes `bytes` at a multiple of `align` from a free span; both are at least a granule.
    #[inline(always)]
    pub(crate) fn alloc(&mut self, bytes: u64, align: u64) -> Option<u64> {
        let (id, start) = self.index.find(&self.spans, bytes, align)?;
        self.take(id, start, bytes);
        Some(start)
    }

    /// Frees the used span at `offset` and returns its length; `None` if there is none, or it has
    /// not the `wanted_bytes`, where those are not 0.
    #[inline(always)]
    pub(crate) fn free(&mut self, offset: u64, wanted_bytes: u64, tick: u64) -> Option<u64> {
        let id = self.spans.used_at(offset)?;
        let bytes = self.spans.at(id).bytes();
        if wanted_bytes != 0 && wanted_bytes != bytes {
            return None;
        }
        self.release(id, tick);
        Some(bytes)
    }

    /// Takes exactly `[offset, offset + bytes)`.
    pub(crate) fn alloc_at(&mut self, offset: u64, bytes: u64) -> Result<(), NotFree> {
        let id = self.free_span_around(offset, bytes)?;
        self.take(id, offset, bytes);
        Ok(())
    }

    /// Adds a range to the space, as free.
    ///
    /// # Panics
    ///
    /// If the range is empty, not made of whole granules, beyond the largest space, or overlaps
    /// one that was inserted before.
    pub(crate) fn insert_free(&mut self, offset: u64, bytes: u64, tick: u64) {
        let end = offset.checked_add(bytes).filter(|&end| end <= SPACE_BYTES);
        let whole = bytes > 0 && (offset | bytes).is_multiple_of(GRANULE_BYTES);
        let Some(end) = end.filter(|_| whole) else {
            panic!("[{offset:#x}, +{bytes:#x}) is not a range of whole granules below 2^47");
        };
        let prev = self.spans.locate(offset);
        let next = if prev == NIL { self.spans.head() } else { self.spans.at(prev).next };
        let clear_before = prev == NIL || self.spans.at(prev).end() <= offset;
        let clear_behind = next == NIL || self.spans.at(next).offset >= end;
        assert!(
            clear_before && clear_behind,
            "[{offset:#x}, +{bytes:#x}) overlaps a range that was inserted before"
        );
        self.spans.cover(offset, bytes);
        self.index.cover(offset, bytes);
        self.mapped_bytes += bytes;
        // As if it had been used until now: freeing it is what merges it with its neighbours.
        self.used_bytes += bytes;
        let id = self.spans.insert_after(prev, offset, Size::Used(bytes), tick);
        self.release(id, tick);
    }

    /// Takes a wholly free range out of the space.
    pub(crate) fn remove_free(&mut self, offset: u64, bytes: u64) -> Result<(), NotFree> {
        let id = self.free_span_around(offset, bytes)?;
        // Used spans are in no index, so one can simply be dropped from the list.
        let id = self.take(id, offset, bytes);
        self.spans.unlink(id);
        self.spans.uncover(offset, bytes);
        self.used_bytes -= bytes;
        self.mapped_bytes -= bytes;
        Ok(())
    }

    /// The free span that covers the whole range.
    fn free_span_around(&self, offset: u64, bytes: u64) -> Result<u32, NotFree> {
        let error = NotFree { offset, bytes };
        // Free spans are maximal, so a range that is free lies in one.
        let end = offset.checked_add(bytes).ok_or(error)?;
        if bytes == 0 || !(offset | bytes).is_multiple_of(GRANULE_BYTES) {
            return Err(error);
        }
        let id = self.spans.locate(offset);
        if id == NIL || !self.spans.at(id).is_free() || self.spans.at(id).end() < end {
            return Err(error);
        }
        Ok(id)
    }

    /// Cuts `[start, start + bytes)` out of the free span `id`, as a used span, and gives back
    /// what is left on both sides. Returns the used span.
    ///
    /// ```text
    /// |         free id           |      |        free id             |
    /// | used id |    free new     |  or  | free id | used new | free new |
    /// ```
    ///
    /// The part at the low end keeps the id, so that the table of cells need not change for it.
    #[inline(always)]
    fn take(&mut self, id: u32, start: u64, bytes: u64) -> u32 {
        let Span { offset, tick, .. } = *self.spans.at(id);
        let end = self.spans.at(id).end();
        let used_end = start + bytes;
        self.used_bytes += bytes;
        self.index.detach(&self.spans, id);
        let mut left = Left { before: NIL, behind: NIL };
        let used = if start > offset {
            left.before = id;
            self.spans.at_mut(id).set(Size::Free(start - offset));
            self.spans.insert_after(id, start, Size::Used(bytes), tick)
        } else {
            self.spans.at_mut(id).set(Size::Used(bytes));
            id
        };
        if used_end < end {
            let behind = Size::Free(end - used_end);
            left.behind = self.spans.insert_after(used, used_end, behind, tick);
        }
        self.index.cut(&self.spans, offset, left);
        used
    }

    /// Makes the used span `id` free and merges it with its free neighbours. The lowest of them
    /// keeps its id and grows; the others leave the list.
    #[inline(always)]
    fn release(&mut self, id: u32, tick: u64) {
        let Span { offset, prev, next, .. } = *self.spans.at(id);
        let mut end = self.spans.at(id).end();
        self.used_bytes -= end - offset;
        // Where a free span started that is part of a longer one now.
        let mut dead_offset = None;
        if next != NIL {
            let after = *self.spans.at(next);
            if after.is_free() && after.offset == end {
                end = after.end();
                dead_offset = Some(after.offset);
                self.index.detach(&self.spans, next);
                self.spans.unlink(next);
            }
        }
        let mut merged = id;
        let mut start = offset;
        if prev != NIL {
            let before = *self.spans.at(prev);
            if before.is_free() && before.end() == offset {
                start = before.offset;
                merged = prev;
                self.index.detach(&self.spans, prev);
                self.spans.unlink(id);
            }
        }
        let span = self.spans.at_mut(merged);
        span.set(Size::Free(end - start));
        // The parts merged were free at an earlier tick, so this one is the latest.
        span.tick = tick;
        self.index.merge(&self.spans, merged, dead_offset);
    }

    /// Length of the used span that starts at `offset`.
    pub(crate) fn used_bytes_at(&self, offset: u64) -> Option<u64> {
        self.spans.used_at(offset).map(|id| self.spans.at(id).bytes())
    }

    pub(crate) fn placement_align(&self, bytes: u64, align: u64) -> u64 {
        self.index.placement_align(bytes, align)
    }

    /// All free runs, in address order.
    pub(crate) fn free_runs(&self, visit: &mut dyn FnMut(FreeRun)) {
        for span in self.spans.iter().filter(|span| span.is_free()) {
            visit(FreeRun { offset: span.offset, bytes: span.bytes(), last_freed_tick: span.tick });
        }
    }

    pub(crate) fn spans(&self) -> &Spans {
        &self.spans
    }

    pub(crate) fn mapped_bytes(&self) -> u64 {
        self.mapped_bytes
    }

    pub(crate) fn used_bytes(&self) -> u64 {
        self.used_bytes
    }

    pub(crate) fn metadata_bytes(&self) -> u64 {
        self.spans.metadata_bytes() + self.index.metadata_bytes()
    }

    /// Checks spans, index and sums.
    pub(crate) fn verify(&self) -> Result<(), String> {
        self.spans.verify()?;
        self.index.verify(&self.spans)?;
        let mapped: u64 = self.spans.iter().map(Span::bytes).sum();
        let used: u64 = self.spans.iter().filter(|s| !s.is_free()).map(Span::bytes).sum();
        if (mapped, used) != (self.mapped_bytes, self.used_bytes) {
            return Err(format!(
                "spans sum to {mapped} mapped and {used} used, counted {} and {}",
                self.mapped_bytes, self.used_bytes
            ));
        }
        Ok(())
    }
}
