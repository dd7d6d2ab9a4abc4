//! The spans of a space: every inserted byte lies in exactly one, free or used.
//!
//! Spans live in an arena, linked by index in address order. Space that was never inserted, or was
//! removed, is simply not covered: two neighbours in the list are adjacent only if one ends where
//! the other starts. To find a span from an address, a table holds the first one that starts in
//! each cell of 1 MiB; the others that start there follow it in the list. Up to 2048 may start in
//! one cell, so nothing here depends on how large blocks are; but blocks below 256 KiB come from
//! slabs, so as a rule few start in a cell, and a walk ends after a step or two.

use crate::sparse::SparseTable;
use crate::{GRANULE_BYTES, NIL};

/// `log2` of the bytes of a cell.
pub(crate) const CELL_SHIFT: u32 = 20;

/// The cell in which `offset` lies.
#[inline(always)]
pub(crate) fn cell_of(offset: u64) -> usize {
    (offset >> CELL_SHIFT) as usize
}

/// Bit of `Span::size` that marks a used span; lengths are multiples of the granule.
const USED: u64 = 1;

/// A run of inserted bytes, all free or all used. 32 bytes, two to a cache line: a warm operation
/// reads three or four of them, and little else.
#[derive(Clone, Copy, Debug)]
#[repr(align(32))] // never across two cache lines
pub(crate) struct Span {
    pub(crate) offset: u64,
    size: u64,
    /// When it became free; without meaning while it is used.
    pub(crate) tick: u64,
    pub(crate) prev: u32,
    pub(crate) next: u32,
}

impl Span {
    /// Length.
    #[inline(always)]
    pub(crate) fn bytes(&self) -> u64 {
        self.size & !USED
    }

    /// First byte behind it.
    #[inline(always)]
    pub(crate) fn end(&self) -> u64 {
        self.offset + self.bytes()
    }

    #[inline(always)]
    pub(crate) fn is_free(&self) -> bool {
        self.size & USED == 0
    }

    /// Changes state and length.
    #[inline(always)]
    pub(crate) fn set(&mut self, size: Size) {
        self.size = size.encode();
    }
}

/// State and length, in bytes, of a span.
pub(crate) enum Size {
    Free(u64),
    Used(u64),
}

impl Size {
    #[inline(always)]
    fn encode(self) -> u64 {
        match self {
            Self::Free(bytes) => bytes,
            Self::Used(bytes) => bytes | USED,
        }
    }
}

/// All spans, in address order, with the table of cells.
pub(crate) struct Spans {
    /// Slots by id. An id stays with its span until the span is merged away.
    arena: Vec<Span>,
    /// Arena slots without a span, linked by `next`.
    vacant: u32,
    head: u32,
    tail: u32,
    /// By cell, the first span that starts in it.
    cells: SparseTable,
    /// Arena slots reserved: one for each cell of space that was inserted.
    reserved: usize,
}

impl Spans {
    pub(crate) fn new() -> Self {
        Self {
            arena: Vec::new(),
            vacant: NIL,
            head: NIL,
            tail: NIL,
            cells: SparseTable::new(),
            reserved: 0,
        }
    }

    /// The span with this id, which is not `NIL`.
    #[inline(always)]
    pub(crate) fn at(&self, id: u32) -> &Span {
        &self.arena[id as usize]
    }

    #[inline(always)]
    pub(crate) fn at_mut(&mut self, id: u32) -> &mut Span {
        &mut self.arena[id as usize]
    }

    /// Makes room for spans in `[offset, offset + bytes)`, so that the warm path need not.
    pub(crate) fn cover(&mut self, offset: u64, bytes: u64) {
        let (first, last) = (cell_of(offset), cell_of(offset + bytes - 1));
        self.cells.cover(first, last);
        self.reserved += last - first + 1;
        self.arena.reserve(self.reserved.saturating_sub(self.arena.len()));
    }

    /// The space [`cover`](Self::cover) made room for is gone.
    pub(crate) fn uncover(&mut self, offset: u64, bytes: u64) {
        let (first, last) = (cell_of(offset), cell_of(offset + bytes - 1));
        self.reserved = self.reserved.saturating_sub(last - first + 1);
    }

    /// The first span that starts in `cell`, or `NIL`.
    #[inline(always)]
    pub(crate) fn first_in(&self, cell: usize) -> u32 {
        self.cells.get(cell)
    }

    /// The used span that starts at exactly `offset`.
    #[inline(always)]
    pub(crate) fn used_at(&self, offset: u64) -> Option<u32> {
        let mut id = self.first_in(cell_of(offset));
        while id != NIL {
            let span = self.at(id);
            // In address order, so the first at or behind the offset decides; an offset inside a
            // span, or past the last span of the cell, ends here too.
            if span.offset >= offset {
                return (span.offset == offset && !span.is_free()).then_some(id);
            }
            id = span.next;
        }
        None
    }

    /// The largest free span that starts in `cell`, in bytes; 0 if there is none.
    #[inline(always)]
    pub(crate) fn largest_free_in(&self, cell: usize) -> u64 {
        self.largest_free_from(self.first_in(cell), cell)
    }

    /// The same of the span `id`, which ends in `cell` or behind it, and those that follow it.
    #[inline(always)]
    pub(crate) fn largest_free_behind(&self, id: u32, cell: usize) -> u64 {
        let span = self.at(id);
        // Do not touch the next span's cache line unless it may start in the cell.
        if cell_of(span.end()) > cell { 0 } else { self.largest_free_from(span.next, cell) }
    }

    /// The same of the span `id`, which starts in `cell` or behind it, or is `NIL`, and those that
    /// follow it.
    #[inline(always)]
    pub(crate) fn largest_free_from(&self, id: u32, cell: usize) -> u64 {
        let cell_end = (cell as u64 + 1) << CELL_SHIFT;
        let mut largest = 0;
        let mut id = id;
        // Almost always one step: a long free span, or a long used one.
        while id != NIL {
            let span = self.at(id);
            if span.offset >= cell_end {
                break;
            }
            if span.is_free() {
                largest = largest.max(span.bytes());
            }
            // Nothing else can start in this cell: do not touch the next span's cache line.
            if span.end() >= cell_end {
                break;
            }
            id = span.next;
        }
        largest
    }

    /// The last span that starts at or before `offset`, or `NIL`. Not for the warm path: it may
    /// scan the table backwards over the length of one span or gap.
    pub(crate) fn locate(&self, offset: u64) -> u32 {
        // Growth at the end of the space is the most frequent case.
        if self.tail != NIL && self.at(self.tail).offset <= offset {
            return self.tail;
        }
        // Any span that starts before will do as a start of the walk: the nearest cell with one.
        let mut id = self.first_in(cell_of(offset));
        if id == NIL || self.at(id).offset > offset {
            id = self.cells.last_before(cell_of(offset));
        }
        if id == NIL {
            return NIL;
        }
        loop {
            let next = self.at(id).next;
            if next == NIL || self.at(next).offset > offset {
                return id;
            }
            id = next;
        }
    }

    /// Adds a span behind `prev` (`NIL`: before all others) and returns its id.
    #[inline(always)]
    pub(crate) fn insert_after(&mut self, prev: u32, offset: u64, size: Size, tick: u64) -> u32 {
        let next = if prev == NIL { self.head } else { self.at(prev).next };
        let span = Span { offset, size: size.encode(), tick, prev, next };
        let mut id = self.vacant;
        if id == NIL {
            id = self.arena.len() as u32;
            self.arena.push(span);
        } else {
            self.vacant = self.at(id).next;
            *self.at_mut(id) = span;
        }
        let cell = cell_of(offset);
        if prev == NIL {
            self.head = id;
            self.cells.set(cell, id);
        } else {
            let before = self.at_mut(prev);
            before.next = id;
            // Whatever follows comes later in the cell, so only the one before can be first.
            if cell_of(before.offset) != cell {
                self.cells.set(cell, id);
            }
        }
        if next == NIL {
            self.tail = id;
        } else {
            self.at_mut(next).prev = id;
        }
        id
    }

    /// Takes a span out of the list.
    #[inline(always)]
    pub(crate) fn unlink(&mut self, id: u32) {
        let Span { offset, prev, next, .. } = *self.at(id);
        let cell = cell_of(offset);
        if prev == NIL {
            self.head = next;
        } else {
            self.at_mut(prev).next = next;
        }
        // The next span is the first of the cell now, if it starts there at all.
        let mut heir = NIL;
        if next == NIL {
            self.tail = prev;
        } else {
            let after = self.at_mut(next);
            after.prev = prev;
            if cell_of(after.offset) == cell {
                heir = next;
            }
        }
        if self.first_in(cell) == id {
            self.cells.set(cell, heir);
        }
        self.at_mut(id).next = std::mem::replace(&mut self.vacant, id);
    }

    /// The first span, or `NIL`.
    pub(crate) fn head(&self) -> u32 {
        self.head
    }

    /// All spans in address order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Span> {
        self.iter_from(self.head)
    }

    /// The span `id` and those behind it.
    pub(crate) fn iter_from(&self, id: u32) -> impl Iterator<Item = &Span> {
        let get = |id| (id != NIL).then(|| self.at(id));
        std::iter::successors(get(id), move |span| get(span.next))
    }

    /// How many spans there can be before the arena grows: ids are below it.
    pub(crate) fn arena_capacity(&self) -> usize {
        self.arena.capacity()
    }

    pub(crate) fn metadata_bytes(&self) -> u64 {
        self.cells.metadata_bytes() + (self.arena.capacity() * size_of::<Span>()) as u64
    }

    /// Checks the list, the arena and the table against each other.
    pub(crate) fn verify(&self) -> Result<(), String> {
        let mut count = 0usize;
        let mut prev = NIL;
        let mut id = self.head;
        while id != NIL {
            let span = self.at(id);
            count += 1;
            if count > self.arena.len() {
                return Err("the list of spans is a cycle".into());
            }
            if span.prev != prev {
                return Err(format!("span {id}: prev is {}, expected {prev}", span.prev));
            }
            if span.bytes() == 0 || !(span.bytes() | span.offset).is_multiple_of(GRANULE_BYTES) {
                return Err(format!("span {id} is not made of whole granules: {span:?}"));
            }
            let mut starts_cell = true;
            if prev != NIL {
                let before = self.at(prev);
                if before.end() > span.offset {
                    return Err(format!("spans overlap: {before:?} and {span:?}"));
                }
                if before.end() == span.offset && before.is_free() && span.is_free() {
                    return Err(format!("free neighbours not merged: {before:?}, {span:?}"));
                }
                starts_cell = cell_of(before.offset) != cell_of(span.offset);
            }
            if starts_cell != (self.first_in(cell_of(span.offset)) == id) {
                return Err(format!("table of cells disagrees with span {id}: {span:?}"));
            }
            prev = id;
            id = span.next;
        }
        if self.tail != prev {
            return Err(format!("tail is {}, expected {prev}", self.tail));
        }
        self.verify_counts(count)
    }

    /// No slot of the arena and no entry of the table is beyond what the list reaches.
    fn verify_counts(&self, listed: usize) -> Result<(), String> {
        let vacant = self.iter_from(self.vacant).count();
        if listed + vacant != self.arena.len() {
            return Err(format!("{listed} spans and {vacant} vacant of {}", self.arena.len()));
        }
        let mut cells = 0;
        let mut last = usize::MAX;
        for span in self.iter() {
            cells += usize::from(cell_of(span.offset) != last);
            last = cell_of(span.offset);
        }
        let entries = self.cells.count();
        if entries != cells {
            return Err(format!("{entries} cells have an entry, {cells} should"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
