//! The addresses of an import, and what stands there.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range as Bytes;
use std::sync::Arc;

use vmm_sys::object::{Chunk, Mapping, Range};
use vmm_sys::{AccessGrant, Driver};

use crate::error::{AtStep, ShareError};
use crate::steps::step;
use crate::wire::PieceEntry;

/// A piece where it stands.
#[derive(Debug)]
pub(super) struct Placed {
    pub(super) piece: PieceEntry,
    mapping: Mapping,
}

/// Addresses one behind the other, and the pieces in them by offset.
#[derive(Debug)]
pub(super) struct Space {
    driver: Arc<dyn Driver>,
    /// Each with the offset at which it begins. Never empty, and only ever more.
    ranges: Vec<(u64, Range)>,
    pub(super) placed: BTreeMap<u64, Placed>,
    grants: Vec<AccessGrant>,
}

const REPLACING: &str = "replacing pieces";

impl Space {
    /// Reserves addresses.
    pub(super) fn reserve(
        driver: &Arc<dyn Driver>,
        bytes: u64,
        grants: Vec<AccessGrant>,
    ) -> Result<Space, ShareError> {
        let range = Range::reserve(driver, bytes, 0, 0).at("reserving addresses")?;
        step!("importer-reserved");
        let (driver, placed) = (driver.clone(), BTreeMap::new());
        Ok(Space { driver, ranges: vec![(0, range)], placed, grants })
    }

    pub(super) fn address(&self) -> u64 {
        self.ranges.first().map_or(0, |(_, range)| range.address())
    }

    /// Addresses, in bytes.
    pub(super) fn bytes(&self) -> u64 {
        self.ranges.last().map_or(0, |(offset, range)| offset + range.bytes())
    }

    /// Makes sure of addresses up to `need_bytes`, right behind those there are. The answer goes to
    /// [`Space::extend`]; dropped, it is as before.
    pub(super) fn adjacent(
        &self,
        step: &'static str,
        need_bytes: u64,
    ) -> Result<Option<Range>, ShareError> {
        let have_bytes = self.bytes();
        if need_bytes <= have_bytes {
            return Ok(None);
        }
        let needs_reopen = |cause| ShareError::NeedsReopen { step, need_bytes, have_bytes, cause };
        let hint = self.address() + have_bytes;
        match Range::reserve(&self.driver, need_bytes - have_bytes, 0, hint) {
            Ok(range) if range.address() == hint => Ok(Some(range)),
            Ok(_) => Err(needs_reopen(None)),
            Err(error) if error.is_out_of_addresses() => Err(needs_reopen(Some(error))),
            Err(cause) => Err(ShareError::Driver { step, cause }),
        }
    }

    pub(super) fn extend(&mut self, range: Option<Range>) {
        let offset = self.bytes();
        self.ranges.extend(range.map(|range| (offset, range)));
    }

    /// Gives up the addresses of the last [`Space::extend`], in which nothing lies.
    pub(super) fn retract(&mut self, was_extended: bool) {
        if was_extended {
            self.ranges.pop();
        }
    }

    /// The range in which an offset lies, and the offset there.
    fn range_at(&self, offset: u64) -> Option<(&Range, u64)> {
        let at = self.ranges.partition_point(|(start, _)| *start <= offset).checked_sub(1)?;
        let (start, range) = self.ranges.get(at)?;
        Some((range, offset - start))
    }

    /// Maps pieces and grants access. All or nothing.
    pub(super) fn place(
        &mut self,
        step: &'static str,
        pieces: &[PieceEntry],
        chunks: &HashMap<u64, Arc<Chunk>>,
    ) -> Result<(), ShareError> {
        let mapped: Result<Vec<Placed>, ShareError> = pieces
            .iter()
            .map(|piece| {
                let missing =
                    || ShareError::NotMapped { step, offset: piece.offset, bytes: piece.bytes };
                let (range, offset) = self.range_at(piece.offset).ok_or_else(missing)?;
                let chunk = chunks.get(&piece.id).ok_or_else(missing)?;
                let mapping = Mapping::map(range, offset, chunk.clone()).at(step)?;
                Ok(Placed { piece: *piece, mapping })
            })
            .collect();
        let mapped = mapped?;
        step!("importer-mapped");
        for run in mapped.chunk_by(|a, b| self.are_neighbours(a, b)) {
            let mappings = run.iter().map(|it| &it.mapping);
            Mapping::set_access_all(mappings, &self.grants).at(step)?;
        }
        step!("importer-granted");
        self.placed.extend(mapped.into_iter().map(|it| (it.piece.offset, it)));
        Ok(())
    }

    /// Whether one call can reach over both.
    fn are_neighbours(&self, a: &Placed, b: &Placed) -> bool {
        let start = |it: &Placed| self.range_at(it.piece.offset).map(|(range, _)| range.address());
        a.piece.offset + a.piece.bytes == b.piece.offset && start(a) == start(b)
    }

    /// Takes the pieces at these offsets away and puts others in. If that fails, all is as before, or
    /// the driver refuses even that: then those are not there any more.
    pub(super) fn replace(
        &mut self,
        leaving: &[u64],
        coming: &[PieceEntry],
        chunks: &HashMap<u64, Arc<Chunk>>,
    ) -> Result<(), ShareError> {
        let mut left: Vec<PieceEntry> = Vec::with_capacity(leaving.len());
        let mut kept = HashMap::with_capacity(leaving.len());
        let mut failure = None;
        for offset in leaving {
            let Some(Placed { piece, mapping }) = self.placed.remove(offset) else { continue };
            match mapping.unmap() {
                Ok(chunk) => {
                    kept.insert(piece.id, chunk);
                    left.push(piece);
                }
                Err((mapping, cause)) => {
                    self.placed.insert(*offset, Placed { piece, mapping });
                    failure = Some(ShareError::Driver { step: REPLACING, cause });
                    break;
                }
            }
        }
        step!("importer-unmapped");
        let replaced = match failure {
            Some(error) => Err(error),
            None => self.place(REPLACING, coming, chunks),
        };
        step!("importer-replaced");
        let Err(error) = replaced else { return Ok(()) };
        if let Err(again) = self.place(REPLACING, &left, &kept) {
            vmm_sys::say!(warn, %again, "pieces of an import could not be put back");
        }
        Err(error)
    }

    /// Whether all of these bytes have memory behind them.
    pub(super) fn is_mapped(&self, bytes: &Bytes<u64>) -> bool {
        let mut at = bytes.start;
        while at < bytes.end {
            let below = self.placed.range(..=at).next_back();
            match below.map(|(_, it)| it.piece.offset + it.piece.bytes) {
                Some(end) if end > at => at = end,
                _ => return false,
            }
        }
        bytes.start <= bytes.end && bytes.end <= self.bytes()
    }

    /// The parts of these bytes, each in one range: range, offset there, length.
    pub(super) fn parts(&self, bytes: Bytes<u64>) -> Vec<(Range, u64, u64)> {
        let mut parts = Vec::new();
        let mut at = bytes.start;
        while at < bytes.end {
            let Some((range, offset)) = self.range_at(at) else { break };
            let length = (bytes.end - at).min(range.bytes() - offset);
            if length == 0 {
                break;
            }
            parts.push((range.clone(), offset, length));
            at += length;
        }
        parts
    }
}
