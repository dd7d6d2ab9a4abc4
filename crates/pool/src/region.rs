//! [`Region`]: the addresses of one lane, divided into slots, and what stands in each.
//!
//! A region is one logical space from 0. Segments of reserved addresses are laid into it one after
//! another; where two are not neighbours in the driver's address space a barrier slot keeps blocks
//! from spanning them. Offsets are logical, addresses are the driver's.
//!
//! Nothing here calls the driver, except [`Segment`] making (which is done outside of locks).

use slab::Slab;
use vmm_sys::object::{Mapping, Range};
use vmm_sys::{DriverResult, object::Chunk};

use std::sync::Arc;

use crate::lane::Figures;

/// What stands in one slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Slot {
    /// Reserved addresses, nothing mapped.
    Vacant,
    /// A thread is bringing memory here.
    Claimed,
    /// Part of the mapping with this key.
    Mapped(u32),
    /// A mapping that was replaced stands here until its gate has passed.
    Retiring,
    /// No address: the border of two segments that are not neighbours.
    Barrier,
}

/// A mapped chunk and its place.
#[derive(Debug)]
pub(crate) struct Placed {
    pub(crate) mapping: Mapping,
    pub(crate) first_slot: u32,
    pub(crate) slots: u32,
}

/// One reserved range, laid at `first_slot` of the logical space.
#[derive(Clone, Debug)]
pub(crate) struct Segment {
    pub(crate) range: Range,
    pub(crate) first_slot: u32,
    pub(crate) slots: u32,
}

impl Segment {
    #[inline]
    fn offset_of(&self, address: u64) -> Option<u64> {
        let offset = address.wrapping_sub(self.range.address());
        (offset < self.range.bytes()).then_some(offset)
    }
}

/// The addresses of a lane.
#[derive(Debug)]
pub(crate) struct Region {
    slot_bytes: u64,
    segments: Vec<Segment>,
    /// The segment at offset 0, where almost all blocks lie.
    first_address: u64,
    first_bytes: u64,
    /// Every slot below the end of the addresses in use.
    slots: Vec<Slot>,
    placed: Slab<Placed>,
    mapped_bytes: u64,
    /// Where the lane tells others of `mapped_bytes`.
    figures: &'static Figures,
}

impl Region {
    pub(crate) fn new(slot_bytes: u64, figures: &'static Figures) -> Region {
        figures.tell_mapped(0);
        Region {
            slot_bytes,
            segments: Vec::new(),
            first_address: 0,
            first_bytes: 0,
            slots: Vec::new(),
            placed: Slab::new(),
            mapped_bytes: 0,
            figures,
        }
    }

    pub(crate) fn slot_bytes(&self) -> u64 {
        self.slot_bytes
    }

    /// Bytes of the chunks mapped here; a chunk that also stands at a retiring address counts once.
    pub(crate) fn mapped_bytes(&self) -> u64 {
        self.mapped_bytes
    }

    /// Bytes of addresses reserved.
    pub(crate) fn reserved_bytes(&self) -> u64 {
        self.segments.iter().map(|s| s.range.bytes()).sum()
    }

    /// Number of slots in use, barriers included: the end of the logical space in use.
    pub(crate) fn end_slot(&self) -> u32 {
        self.slots.len() as u32
    }

    /// The end of the logical space in use, in bytes.
    pub(crate) fn end_bytes(&self) -> u64 {
        self.slots.len() as u64 * self.slot_bytes
    }

    /// Slots that have addresses: up to here the space can grow without a new reservation.
    pub(crate) fn capacity_slots(&self) -> u32 {
        self.segments.last().map_or(0, |s| s.first_slot + s.slots)
    }

    pub(crate) fn slot(&self, slot: u32) -> Slot {
        self.slots.get(slot as usize).copied().unwrap_or(Slot::Vacant)
    }

    pub(crate) fn placed(&self) -> impl Iterator<Item = (u32, &Placed)> {
        self.placed.iter().map(|(key, placed)| (key as u32, placed))
    }

    pub(crate) fn placed_at(&self, key: u32) -> Option<&Placed> {
        self.placed.get(key as usize)
    }

    /// The driver's address of a logical offset, which must lie in a segment.
    #[inline]
    pub(crate) fn address(&self, offset: u64) -> u64 {
        if offset < self.first_bytes {
            self.first_address + offset
        } else {
            self.segment_address(offset)
        }
    }

    #[cold]
    fn segment_address(&self, offset: u64) -> u64 {
        let slot = (offset / self.slot_bytes) as u32;
        self.segments
            .iter()
            .rev()
            .find(|s| s.first_slot <= slot)
            .map_or(0, |s| s.range.address() + offset - u64::from(s.first_slot) * self.slot_bytes)
    }

    /// The logical offset of an address, if it lies in a segment.
    #[inline]
    pub(crate) fn offset_of(&self, address: u64) -> Option<u64> {
        let offset = address.wrapping_sub(self.first_address);
        if offset < self.first_bytes { Some(offset) } else { self.segment_offset(address) }
    }

    #[cold]
    fn segment_offset(&self, address: u64) -> Option<u64> {
        self.segments
            .iter()
            .find_map(|s| Some(u64::from(s.first_slot) * self.slot_bytes + s.offset_of(address)?))
    }

    /// The reserved addresses: (first address, bytes).
    pub(crate) fn ranges(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.segments.iter().map(|s| (s.range.address(), s.range.bytes()))
    }

    /// The segment that holds a slot.
    pub(crate) fn segment_of(&self, slot: u32) -> Option<&Segment> {
        let holds = |s: &&Segment| s.first_slot <= slot && slot - s.first_slot < s.slots;
        self.segments.iter().find(holds)
    }

    /// The pieces of [offset, offset + bytes) by segment: (range, offset in it, bytes).
    pub(crate) fn pieces(&self, offset: u64, bytes: u64) -> Vec<(Range, u64, u64)> {
        let mut pieces = Vec::new();
        let (mut at, end) = (offset, offset + bytes);
        while at < end {
            let Some(segment) = self.segment_of((at / self.slot_bytes) as u32) else { break };
            let start = u64::from(segment.first_slot) * self.slot_bytes;
            let stop = end.min(start + segment.range.bytes());
            pieces.push((segment.range.clone(), at - start, stop - at));
            at = stop;
        }
        pieces
    }

    /// The address after the last segment: where a further one would be a neighbour.
    pub(crate) fn next_address(&self) -> u64 {
        self.segments.last().map_or(0, |s| s.range.address() + s.range.bytes())
    }

    /// Lays a new range behind the last segment. If they are neighbours and a window of
    /// `need_bytes` at a multiple of `align_bytes` fits behind what is in use, blocks may span the
    /// two; else barrier slots keep them apart, and the new segment starts at such a multiple.
    pub(crate) fn add_segment(&mut self, range: Range, need_bytes: u64, align_bytes: u64) {
        let slots = (range.bytes() / self.slot_bytes) as u32;
        let mut first_slot = self.capacity_slots();
        let neighbours = self.segments.is_empty() || range.address() == self.next_address();
        let start = self.end_bytes().next_multiple_of(align_bytes.max(self.slot_bytes));
        let capacity_bytes = u64::from(first_slot + slots) * self.slot_bytes;
        if !neighbours || start + need_bytes > capacity_bytes {
            let align_slots = (align_bytes / self.slot_bytes).max(1) as u32;
            // Slots below the new segment must all exist.
            self.slots.resize(first_slot as usize, Slot::Vacant);
            first_slot = (first_slot + 1).next_multiple_of(align_slots);
            self.slots.resize(first_slot as usize, Slot::Barrier);
        }
        if first_slot == 0 {
            (self.first_address, self.first_bytes) = (range.address(), range.bytes());
        }
        self.segments.push(Segment { range, first_slot, slots });
    }

    /// Marks slots that a thread is about to bring memory to.
    pub(crate) fn claim(&mut self, first_slot: u32, slots: u32) {
        let end = (first_slot + slots) as usize;
        if self.slots.len() < end {
            self.slots.resize(end, Slot::Vacant);
        }
        for slot in &mut self.slots[first_slot as usize..end] {
            debug_assert_eq!(*slot, Slot::Vacant, "only vacant slots are claimed");
            *slot = Slot::Claimed;
        }
    }

    /// Makes slots vacant again: a claim given up, or a retired mapping gone.
    pub(crate) fn vacate(&mut self, first_slot: u32, slots: u32) {
        for slot in &mut self.slots[first_slot as usize..(first_slot + slots) as usize] {
            debug_assert!(matches!(slot, Slot::Claimed | Slot::Retiring));
            *slot = Slot::Vacant;
        }
        while self.slots.last() == Some(&Slot::Vacant) {
            self.slots.pop();
        }
    }

    /// Keeps claimed slots from use: a mapping stands there that the driver did not take back.
    pub(crate) fn hold(&mut self, first_slot: u32, slots: u32) {
        self.slots[first_slot as usize..(first_slot + slots) as usize].fill(Slot::Retiring);
    }

    /// Records a mapping in slots that were claimed for it.
    pub(crate) fn publish(&mut self, first_slot: u32, mapping: Mapping) {
        let slots = (mapping.bytes() / self.slot_bytes) as u32;
        self.mapped_bytes += mapping.bytes();
        self.figures.tell_mapped(self.mapped_bytes);
        let key = self.placed.insert(Placed { mapping, first_slot, slots }) as u32;
        for slot in &mut self.slots[first_slot as usize..(first_slot + slots) as usize] {
            debug_assert_eq!(*slot, Slot::Claimed, "a mapping comes to where it was claimed");
            *slot = Slot::Mapped(key);
        }
    }

    /// Takes a mapping out; its slots are retiring until [`Region::vacate`].
    pub(crate) fn retire(&mut self, key: u32) -> Option<Placed> {
        let placed = self.placed.try_remove(key as usize)?;
        self.mapped_bytes -= placed.mapping.bytes();
        self.figures.tell_mapped(self.mapped_bytes);
        let first = placed.first_slot as usize;
        for slot in &mut self.slots[first..first + placed.slots as usize] {
            *slot = Slot::Retiring;
        }
        Some(placed)
    }

    /// Reserves a range for `min_bytes` at least: `wish_bytes` if the driver has so many
    /// addresses, else halves of it. Near the last segment, if the driver likes: a hint that it
    /// dislikes is left out, since some are refused (row D-R4) that would only have been a wish.
    pub(crate) fn reserve(
        driver: &Arc<dyn vmm_sys::Driver>,
        min_bytes: u64,
        wish_bytes: u64,
        align_bytes: u64,
        hint: u64,
    ) -> DriverResult<Range> {
        // Whole multiples of the alignment, so that the next range can be a neighbour.
        let wish_bytes = wish_bytes.max(min_bytes).next_multiple_of(align_bytes);
        let mut bytes = wish_bytes;
        loop {
            let near = Range::reserve(driver, bytes, align_bytes, hint);
            let reserved = match near {
                Err(error) if hint != 0 && !error.is_driver_gone() => {
                    Range::reserve(driver, bytes, align_bytes, 0)
                }
                answer => answer,
            };
            match reserved {
                Ok(range) => return Ok(range),
                Err(error) if bytes > min_bytes && !error.is_driver_gone() => {
                    bytes = (bytes / 2).max(min_bytes);
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// The walker: slots and mappings agree, the sum is right.
    pub(crate) fn verify(&self) -> Result<(), String> {
        let mut mapped = 0;
        let mut covered = 0usize;
        for (key, placed) in self.placed() {
            mapped += placed.mapping.bytes();
            covered += placed.slots as usize;
            for slot in placed.first_slot..placed.first_slot + placed.slots {
                if self.slot(slot) != Slot::Mapped(key) {
                    return Err(format!("slot {slot} is {:?}, not {key}", self.slot(slot)));
                }
            }
            let address = self.address(u64::from(placed.first_slot) * self.slot_bytes);
            if placed.mapping.address() != address {
                return Err(format!("mapping {key} is at {:#x}", placed.mapping.address()));
            }
        }
        let marked = self.slots.iter().filter(|s| matches!(s, Slot::Mapped(_))).count();
        if marked != covered {
            return Err(format!("{marked} slots are marked as mapped, {covered} are"));
        }
        if mapped != self.mapped_bytes {
            return Err(format!("{mapped} bytes are mapped, {} counted", self.mapped_bytes));
        }
        Ok(())
    }

    /// Takes every mapping out, when the lane ends.
    pub(crate) fn take_all(&mut self) -> Vec<Placed> {
        self.mapped_bytes = 0;
        self.slots.clear();
        let all = std::mem::take(&mut self.placed);
        all.into_iter().map(|(_, placed)| placed).collect()
    }

    /// Maps `chunk` at `first_slot` of `segment`. Calls the driver: not under a lock.
    pub(crate) fn map_in(
        segment: &Segment,
        slot_bytes: u64,
        first_slot: u32,
        chunk: Arc<Chunk>,
    ) -> DriverResult<Mapping> {
        let offset = u64::from(first_slot - segment.first_slot) * slot_bytes;
        Mapping::map(&segment.range, offset, chunk)
    }
}
