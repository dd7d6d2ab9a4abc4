//! Buddy placement with exact trimming.
//!
//! A request is placed at a multiple of the power of two that covers it. What classic buddy
//! allocators keep as separate pieces (the unused tail of the power of two, the halves on the way
//! down) stays one maximal free span here: its pieces follow from its two ends by arithmetic. A
//! span hangs in the list of its largest piece, and a bit for each list that is not empty finds the
//! closest fit in one instruction. Freeing merges with both neighbours, of any length, which is
//! what merging buddy by buddy would end in, and never less.
//!
//! ```text
//! a free span        [5 .................. 29)   list of order 3, by the piece [8, 16)
//! 3 granules, at a   [5, 8)                      list of order 1, by the piece [6, 8)
//! multiple of 4:            [8, 11)              used
//!                                  [11 ... 29)   list of order 3, by the piece [16, 24)
//! ```
//!
//! The price is that the smaller pieces at the ends of a span are not listed on their own: a small
//! request may cut a long span while such a piece would have done. On traces the memory and the
//! chunk moves are about those of a buddy allocator that lists each piece.

use super::space::{Index, Left};
use super::spans::{Span, Spans};
use crate::{GRANULE_BYTES, GRANULE_SHIFT, NIL, SPACE_BYTES, align_up};

/// Orders: a piece of order `n` has `GRANULE_BYTES << n` bytes; the last is the whole space.
const ORDERS: usize = (SPACE_BYTES.trailing_zeros() - GRANULE_SHIFT) as usize + 1;

/// Place of a free span in the list of its order.
#[derive(Clone, Copy)]
struct Link {
    prev: u32,
    next: u32,
}

/// Lists of free spans by their largest aligned piece, latest first.
pub(crate) struct Buddy {
    /// By span id; without meaning while the span is used.
    links: Vec<Link>,
    heads: [u32; ORDERS],
    /// Bit `n`: the list of order `n` is not empty.
    occupied: u64,
}

/// The order of the smallest power of two that covers `bytes`.
#[inline]
fn covering_order(bytes: u64) -> u32 {
    bytes.div_ceil(GRANULE_BYTES).next_power_of_two().trailing_zeros()
}

/// The order of the largest aligned power of two inside a span.
#[inline]
fn largest_order(span: &Span) -> usize {
    let order = (span.bytes() >> GRANULE_SHIFT).ilog2();
    let piece_bytes = GRANULE_BYTES << order;
    // Aligned pieces of half the size always fit: the first starts less than a half from the start.
    let fits = align_up(span.offset, piece_bytes) + piece_bytes <= span.end();
    order as usize - usize::from(!fits)
}

impl Buddy {
    pub(crate) fn new() -> Self {
        Self { links: Vec::new(), heads: [NIL; ORDERS], occupied: 0 }
    }

    /// The spans in the list of `order`.
    fn list(&self, order: usize) -> impl Iterator<Item = u32> {
        let some = |id: u32| (id != NIL).then_some(id);
        std::iter::successors(some(self.heads[order]), move |&id| {
            some(self.links[id as usize].next)
        })
    }

    /// Lists a free span.
    #[inline(always)]
    fn attach(&mut self, spans: &Spans, id: u32) {
        let order = largest_order(spans.at(id));
        if self.links.len() <= id as usize {
            // As long as the arena may get: that grows when space is inserted, not later.
            self.links.resize(spans.arena_capacity(), Link { prev: NIL, next: NIL });
        }
        let next = self.heads[order];
        self.links[id as usize] = Link { prev: NIL, next };
        if next != NIL {
            self.links[next as usize].prev = id;
        }
        self.heads[order] = id;
        self.occupied |= 1 << order;
    }

    /// A span without an aligned piece for the whole power of two, in which the request fits all
    /// the same because its tail may lie outside. A scan, so only where it would be a miss.
    #[cold]
    fn find_tight(&self, spans: &Spans, bytes: u64, align: u64) -> Option<(u32, u64)> {
        // Such a span holds an aligned piece of the largest power of two within the request, and
        // none of the whole alignment, or it would not be a miss.
        let orders = bytes.div_ceil(GRANULE_BYTES).ilog2()..align.trailing_zeros() - GRANULE_SHIFT;
        orders.map(|order| order as usize).filter(|&order| order < ORDERS).find_map(|order| {
            self.list(order).find_map(|id| {
                let start = align_up(spans.at(id).offset, align);
                (start + bytes <= spans.at(id).end()).then_some((id, start))
            })
        })
    }
}

impl Index for Buddy {
    fn placement_align(&self, bytes: u64, align: u64) -> u64 {
        align.max(GRANULE_BYTES << covering_order(bytes))
    }

    #[inline(always)]
    fn find(&self, spans: &Spans, bytes: u64, align: u64) -> Option<(u32, u64)> {
        let align = self.placement_align(bytes, align);
        let order = align.trailing_zeros() - GRANULE_SHIFT;
        let fitting = self.occupied.unbounded_shr(order);
        if fitting == 0 {
            return self.find_tight(spans, bytes, align);
        }
        // The first aligned place in the span: its low end fills up first. The latest in the list,
        // not the lowest address: looking for that gained nothing on traces.
        let id = self.heads[(order + fitting.trailing_zeros()) as usize];
        Some((id, align_up(spans.at(id).offset, align)))
    }

    fn cover(&mut self, _offset: u64, _bytes: u64) {}

    #[inline(always)]
    fn detach(&mut self, spans: &Spans, id: u32) {
        // The span has not changed since it was listed, so this is still the same list.
        let order = largest_order(spans.at(id));
        let Link { prev, next } = self.links[id as usize];
        if next != NIL {
            self.links[next as usize].prev = prev;
        }
        if prev != NIL {
            self.links[prev as usize].next = next;
            return;
        }
        self.heads[order] = next;
        if next == NIL {
            self.occupied &= !(1 << order);
        }
    }

    #[inline(always)]
    fn cut(&mut self, spans: &Spans, _offset: u64, left: Left) {
        for id in [left.behind, left.before] {
            if id != NIL {
                self.attach(spans, id);
            }
        }
    }

    #[inline(always)]
    fn merge(&mut self, spans: &Spans, id: u32, _dead_offset: Option<u64>) {
        self.attach(spans, id);
    }

    fn metadata_bytes(&self) -> u64 {
        (self.links.capacity() * size_of::<Link>() + size_of::<Self>()) as u64
    }

    fn verify(&self, spans: &Spans) -> Result<(), String> {
        let mut listed = 0;
        for order in 0..ORDERS {
            if (self.heads[order] != NIL) != (self.occupied >> order & 1 == 1) {
                return Err(format!("order {order}: the bit disagrees with the list"));
            }
            let mut prev = NIL;
            for id in self.list(order) {
                let span = spans.at(id);
                if !span.is_free() || largest_order(span) != order {
                    return Err(format!("order {order} lists span {id}: {span:?}"));
                }
                if self.links[id as usize].prev != prev {
                    return Err(format!("order {order}: span {id} does not point back"));
                }
                prev = id;
                listed += 1;
            }
        }
        let free = spans.iter().filter(|span| span.is_free()).count();
        if listed != free {
            return Err(format!("{listed} spans listed, {free} are free"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::large::space::Space;

    fn space(ranges: &[(u64, u64)]) -> Space<Buddy> {
        let mut space = Space::new(Buddy::new());
        for &(offset, granules) in ranges {
            space.insert_free(offset * GRANULE_BYTES, granules * GRANULE_BYTES, 0);
        }
        space
    }

    fn alloc(space: &mut Space<Buddy>, granules: u64) -> Option<u64> {
        let start = space.alloc(granules * GRANULE_BYTES, GRANULE_BYTES);
        space.verify().unwrap();
        start.map(|start| start / GRANULE_BYTES)
    }

    #[test]
    fn blocks_are_naturally_aligned_and_tails_come_back_at_once() {
        let mut space = space(&[(0, 64)]);
        assert_eq!(alloc(&mut space, 5), Some(0));
        // The tail of the eight, [5, 8), serves these.
        assert_eq!(alloc(&mut space, 2), Some(6));
        assert_eq!(alloc(&mut space, 1), Some(5));
        assert_eq!(alloc(&mut space, 9), Some(16));
        let runs: Vec<_> = space.spans.iter().filter(|s| s.is_free()).map(Span::bytes).collect();
        assert_eq!(runs, [8 * 512, 39 * 512]);
    }

    #[test]
    fn a_request_fits_where_only_its_tail_would_not() {
        // [8, 13): five granules at a multiple of eight, but no aligned eight.
        let mut space = space(&[(8, 5)]);
        assert_eq!(alloc(&mut space, 5), Some(8));
        assert_eq!(alloc(&mut space, 1), None);
    }

    #[test]
    fn the_closest_list_serves_first() {
        let mut space = space(&[(0, 32), (64, 4), (128, 8)]);
        assert_eq!(alloc(&mut space, 3), Some(64));
        assert_eq!(alloc(&mut space, 8), Some(128));
        assert_eq!(alloc(&mut space, 8), Some(0));
    }

    #[test]
    fn the_largest_piece_is_found_by_brute_force_too() {
        let mut spans = Spans::new();
        spans.cover(0, 1 << 20);
        for start in 0..40u64 {
            for len in 1..40u64 {
                let size = super::super::spans::Size::Free(len * 512);
                let id = spans.insert_after(NIL, start * 512, size, 0);
                let fits = |order: &usize| {
                    let piece = 1u64 << order;
                    start.next_multiple_of(piece) + piece <= start + len
                };
                let expected = (0..8).rev().find(fits).unwrap();
                assert_eq!(largest_order(spans.at(id)), expected, "[{start}, +{len})");
                spans.unlink(id);
            }
        }
    }
}
