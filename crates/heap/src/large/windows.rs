//! Where new backing would make a request fit.
//!
//! Between two used spans lies a gap: free spans and space that is not inserted. A request that
//! fits into a gap needs the uninserted bytes under it to be backed. How many there are changes
//! linearly with the start of the request, except where one of its ends passes an end of a free
//! span. So a cheapest start is that of the gap, or one where the request ends with a free span, or
//! the nearest aligned place on either side of these.
//!
//! The mirror image (the end of the gap, and where the request starts with a free span) is no
//! cheaper, but it leans on the hole at the other side of the span. It is visited too, because the
//! owner may not be free to fill every hole now.

use super::spans::{Span, Spans};
use crate::{NIL, SPACE_BYTES, align_down, align_up};

/// The request: already aligned as the placement asks.
#[derive(Clone, Copy)]
pub(crate) struct Window {
    pub(crate) bytes: u64,
    pub(crate) align: u64,
}

impl Window {
    /// Visits the starts in all gaps. `end_bytes` is the end of the addresses in use: the last gap
    /// goes on behind it, and the first place wholly behind it is visited too.
    pub(crate) fn visit_all(self, spans: &Spans, end_bytes: u64, visit: &mut dyn FnMut(u64)) {
        let mut gap_start = 0;
        let mut gap_first = spans.head();
        let mut id = gap_first;
        while id != NIL {
            let span = spans.at(id);
            if !span.is_free() {
                self.visit_gap(spans, gap_first, gap_start, span.offset, visit);
                gap_start = span.end();
                gap_first = span.next;
            }
            id = span.next;
        }
        self.visit_gap(spans, gap_first, gap_start, SPACE_BYTES, visit);
        let fresh = align_up(end_bytes.max(gap_start), self.align);
        if fresh.checked_add(self.bytes).is_some_and(|end| end <= SPACE_BYTES) {
            visit(fresh);
        }
    }

    /// Visits the starts in the gap `[start, end)` whose spans begin with `first`.
    fn visit_gap(
        self,
        spans: &Spans,
        first: u32,
        start: u64,
        end: u64,
        visit: &mut dyn FnMut(u64),
    ) {
        if end - start < self.bytes {
            return;
        }
        // The gap is at least as long as the request, so this does not fall below its start.
        let last = end - self.bytes;
        let mut latest = None;
        let mut offer = |at: u64| {
            for at in [align_down(at, self.align), align_up(at, self.align)] {
                if at >= start && at <= last && latest != Some(at) {
                    latest = Some(at);
                    visit(at);
                }
            }
        };
        offer(start);
        for Span { offset, .. } in spans.iter_from(first).take_while(|span| span.offset < end) {
            offer(*offset);
        }
        for span in spans.iter_from(first).take_while(|span| span.offset < end) {
            if let Some(at) = span.end().checked_sub(self.bytes) {
                offer(at);
            }
        }
        // The last gap has no end to lean on.
        if end < SPACE_BYTES {
            offer(last);
        }
    }
}
