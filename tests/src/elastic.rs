//! [`ElasticModel`]: what must be true of one elastic buffer, whatever happens to its memory.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use vmm_pool::{Contents, Place};
use vmm_sys::Access;

/// Words that are written at each place of a long chunk.
const AREA_WORDS: u64 = 1024;

/// A chunk that stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Where it lies while the buffer is awake.
    pub place: Place,
    /// Where it lies now; of no meaning while the contents are dropped.
    pub now: Place,
    /// Which contents it has; `None` if nobody has written since it came.
    pub version: Option<u32>,
    /// Streams whose writing is not known to be done.
    pub writers: BTreeSet<u32>,
}

/// One elastic buffer.
#[derive(Clone, Debug)]
pub struct ElasticModel {
    /// Its address.
    pub address: u64,
    /// Length of its chunks.
    pub chunk_bytes: u64,
    /// Chunks that it has addresses for.
    pub slots: u32,
    /// The label of its owner.
    pub tag: u32,
    /// What it may commit, in chunks.
    pub quota: Option<u32>,
    /// Its home.
    pub home: u32,
    /// What each device may do, the home among them.
    pub access: BTreeMap<u32, Access>,
    /// Its memory by slot; what it would be, while the buffer sleeps.
    pub chunks: BTreeMap<u32, Chunk>,
    /// What became of the contents, if it sleeps.
    pub asleep: Option<Contents>,
    /// The number of changes.
    pub generation: u64,
    /// Held streams that the work of a stream which used it may wait for.
    users: BTreeMap<u32, BTreeSet<u32>>,
    /// Where memory lay that was taken from a slot, and held streams that may still use it.
    left: BTreeMap<u32, (Place, BTreeSet<u32>)>,
    /// Held streams whose work later users come behind.
    before: BTreeSet<u32>,
}

impl ElasticModel {
    /// A new buffer.
    pub fn new(home: u32, chunk_bytes: u64, slots: u32, tag: u32, quota: Option<u32>) -> Self {
        ElasticModel {
            address: 0,
            chunk_bytes,
            slots,
            tag,
            quota,
            home,
            access: BTreeMap::from([(home, Access::ReadWrite)]),
            chunks: BTreeMap::new(),
            asleep: None,
            generation: 0,
            users: BTreeMap::new(),
            left: BTreeMap::new(),
            before: BTreeSet::new(),
        }
    }

    /// Slots of `range` without memory.
    pub fn missing(&self, range: Range<u32>) -> Vec<u32> {
        range.filter(|slot| !self.chunks.contains_key(slot)).collect()
    }

    /// Slots of `range` whose memory lies elsewhere than at `place`.
    pub fn elsewhere(&self, range: Range<u32>, place: Place) -> Vec<u32> {
        let away = self.chunks.range(range).filter(|(_, it)| it.now != place);
        away.map(|(slot, _)| *slot).collect()
    }

    /// Whether so many chunks more would pass the quota.
    pub fn over_quota(&self, more: usize) -> bool {
        let taken = if self.asleep == Some(Contents::Dropped) { 0 } else { self.chunks.len() };
        self.quota.is_some_and(|quota| taken + more > quota as usize)
    }

    /// Where its memory lies now, by slot.
    pub fn pieces(&self) -> Vec<(u32, Place)> {
        if self.asleep == Some(Contents::Dropped) {
            return Vec::new();
        }
        self.chunks.iter().map(|(slot, chunk)| (*slot, chunk.now)).collect()
    }

    /// What it may do.
    pub fn access_of(&self, device: u32) -> Access {
        self.access.get(&device).copied().unwrap_or(Access::None)
    }

    /// Memory came.
    pub fn committed(&mut self, slots: &[u32], place: Place) {
        for slot in slots {
            if let Some((_, holders)) = self.left.remove(slot) {
                self.before.extend(holders);
            }
            let chunk = Chunk { place, now: place, version: None, writers: BTreeSet::new() };
            self.chunks.insert(*slot, chunk);
        }
    }

    /// Memory was taken away.
    pub fn decommitted(&mut self, slots: &[u32]) {
        let holders = self.holders();
        for slot in slots {
            if let Some(chunk) = self.chunks.remove(slot) {
                self.left.insert(*slot, (chunk.place, holders.clone()));
            }
        }
    }

    /// A stream whose work may wait for these held ones used it, or a guard on it ended.
    pub fn used(&mut self, stream: u32, holders: BTreeSet<u32>) {
        for (_, waiting) in self.left.values_mut() {
            // The guard may have been alive when the memory was taken.
            waiting.extend(&holders);
        }
        self.users.entry(stream).or_default().extend(holders);
    }

    /// Held streams that a later user may have to wait for.
    pub fn before(&self) -> &BTreeSet<u32> {
        &self.before
    }

    /// Held streams that a change of its memory may have to wait for.
    pub fn holders(&self) -> BTreeSet<u32> {
        self.users.values().flatten().chain(&self.before).copied().collect()
    }

    /// Of these, streams that have used it while they were held: those it has to wait for.
    pub fn held_users(&self) -> BTreeSet<u32> {
        let own =
            |(stream, holders): (&u32, &BTreeSet<u32>)| holders.contains(stream).then_some(*stream);
        self.users.iter().filter_map(own).collect()
    }

    /// Held streams that may still use memory of another place, which was taken from these slots.
    pub fn holders_elsewhere(&self, slots: &[u32], place: Place) -> BTreeSet<u32> {
        let left = slots.iter().filter_map(|slot| self.left.get(slot));
        left.filter(|(was, _)| *was != place).flat_map(|(_, holders)| holders).copied().collect()
    }

    /// Whether memory of another place was taken from one of these slots and may still stand there.
    pub fn was_elsewhere(&self, slots: &[u32], place: Place) -> bool {
        slots.iter().any(|slot| self.left.get(slot).is_some_and(|(was, _)| *was != place))
    }

    /// A held stream was let go and has done its work.
    pub fn released(&mut self, stream: u32) {
        self.before.remove(&stream);
        let left = self.left.values_mut().map(|(_, holders)| holders);
        for holders in self.users.values_mut().chain(left) {
            holders.remove(&stream);
        }
    }

    /// The contents are lost: the memory was given back, and will be other memory.
    pub fn forget(&mut self) {
        for chunk in self.chunks.values_mut() {
            chunk.version = None;
            chunk.writers.clear();
        }
    }
}

/// What is written into a chunk: first byte, words that count up, their first value. Every word of
/// a short chunk; start, middle and end of a long one.
pub fn areas(chunk_bytes: u64, version: u32) -> Vec<(u64, u64, u32)> {
    let words = chunk_bytes / 4;
    let starts = match words <= 3 * AREA_WORDS {
        true => vec![(0, words)],
        false => [0, words / 2, words - AREA_WORDS].map(|start| (start, AREA_WORDS)).to_vec(),
    };
    let value = |index: u32| version.wrapping_mul(0x9E37_79B1).wrapping_add(index << 30);
    (0..).zip(starts).map(|(index, (start, words))| (4 * start, words, value(index))).collect()
}

/// The first byte of an area that is not as it must be, if there is one.
pub fn first_wrong(found: &[u8], value: u32) -> Option<usize> {
    let expected = (0..).flat_map(|word: u32| value.wrapping_add(word).to_le_bytes());
    found.iter().zip(expected).position(|(found, expected)| *found != expected)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HERE: Place = Place::HostNuma(0);
    const THERE: Place = Place::HostNuma(1);

    #[test]
    fn areas_lie_in_the_chunk_do_not_overlap_and_differ_by_version() {
        for chunk_bytes in [4096, 8192, 12_288, 16_384, 65_536, 2 << 20] {
            let (found, other) = (areas(chunk_bytes, 7), areas(chunk_bytes, 8));
            let mut end = 0;
            for (offset, words, _) in &found {
                assert!(*offset >= end && *words > 0 && offset % 4 == 0, "{found:?}");
                end = offset + 4 * words;
            }
            assert!(found[0].0 == 0 && end == chunk_bytes, "{found:?}");
            assert!(found.iter().zip(&other).all(|(a, b)| a.2 != b.2));
        }
        let found: Vec<u8> = [5_u32, 6, 7].iter().flat_map(|word| word.to_le_bytes()).collect();
        assert_eq!((first_wrong(&found, 5), first_wrong(&found, 6)), (None, Some(0)));
        assert_eq!(first_wrong(&[&found[..], &[9, 0, 0, 0]].concat(), 5), Some(12));
    }

    #[test]
    fn who_uses_memory_that_came_back_comes_behind_those_who_used_it_before() {
        let mut model = ElasticModel::new(0, 4096, 4, 0, None);
        model.committed(&[0, 1], HERE);
        model.used(5, BTreeSet::from([5]));
        model.used(6, BTreeSet::from([5]));
        assert_eq!((model.holders(), model.held_users()), ([5].into(), [5].into()));
        model.decommitted(&[1]);
        assert!(model.before().is_empty());
        assert_eq!(model.holders_elsewhere(&[0, 1], THERE), [5].into());
        assert!(model.holders_elsewhere(&[0, 1], HERE).is_empty());
        model.committed(&[1], HERE);
        assert_eq!(*model.before(), [5].into());
        model.released(5);
        assert!(model.before().is_empty() && model.holders().is_empty());
    }
}
