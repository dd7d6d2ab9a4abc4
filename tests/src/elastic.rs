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
    /// Slots of one group have the same memory.
    pub group: u32,
    /// Whether another slot had it too since it came.
    pub was_shared: bool,
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
    /// What was taken from a slot.
    left: BTreeMap<u32, Left>,
    /// Groups that were ever made.
    groups: u32,
    /// Held streams whose work later users come behind.
    before: BTreeSet<u32>,
}

/// Memory that was taken from a slot.
#[derive(Clone, Debug)]
struct Left {
    /// Where it lay.
    place: Place,
    /// Whether another slot had it too: it does not come back.
    was_shared: bool,
    /// Held streams that may still use it.
    holders: BTreeSet<u32>,
}

impl Left {
    /// Whether memory of a place cannot come before it is gone.
    fn is_in_the_way(&self, place: Place) -> bool {
        self.was_shared || self.place != place
    }
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
            groups: 0,
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

    /// Where its memory lies now, by slot, and whether other slots have it too.
    pub fn pieces(&self) -> Vec<(u32, Place, bool)> {
        if self.asleep == Some(Contents::Dropped) {
            return Vec::new();
        }
        let sizes = self.sizes();
        let piece = |(slot, chunk): (&u32, &Chunk)| (*slot, chunk.now, sizes[&chunk.group] > 1);
        self.chunks.iter().map(piece).collect()
    }

    /// How much memory lies at a place, in chunks.
    pub fn chunks_at(&self, place: Place) -> u64 {
        if self.asleep == Some(Contents::Dropped) {
            return 0;
        }
        let here = self.chunks.values().filter(|chunk| chunk.now == place);
        here.map(|chunk| chunk.group).collect::<BTreeSet<u32>>().len() as u64
    }

    /// Slots of each group.
    fn sizes(&self) -> BTreeMap<u32, usize> {
        let mut sizes = BTreeMap::new();
        self.chunks.values().for_each(|chunk| *sizes.entry(chunk.group).or_default() += 1);
        sizes
    }

    fn new_group(&mut self) -> u32 {
        self.groups += 1;
        self.groups
    }

    /// The chunk of a slot, as each of its slots sees it.
    fn sharers(&mut self, slot: u32) -> impl Iterator<Item = &mut Chunk> {
        let group = self.chunks.get(&slot).map(|chunk| chunk.group);
        self.chunks.values_mut().filter(move |chunk| Some(chunk.group) == group)
    }

    /// Whether other slots have its memory too.
    pub fn is_shared(&self, slot: u32) -> bool {
        self.chunks.get(&slot).is_some_and(|chunk| self.sizes()[&chunk.group] > 1)
    }

    /// A stream writes, or copies from, a slot: new contents, unless it is not alone. Returns which
    /// contents.
    pub fn write(&mut self, slot: u32, stream: u32, version: Option<Option<u32>>) -> Option<u32> {
        for chunk in self.sharers(slot) {
            chunk.version = version.unwrap_or(chunk.version);
            chunk.writers.insert(stream);
        }
        self.chunks.get(&slot).and_then(|chunk| chunk.version)
    }

    /// The writing of these streams is done.
    pub fn settled(&mut self, slot: u32, writers: &[u32]) {
        self.sharers(slot).for_each(|it| it.writers.retain(|stream| !writers.contains(stream)));
    }

    /// The memory of a slot stands in another one too.
    pub fn shared(&mut self, from: u32, to: u32) {
        self.sharers(from).for_each(|chunk| chunk.was_shared = true);
        if let Some(chunk) = self.chunks.get(&from).cloned() {
            self.left.remove(&to);
            self.chunks.insert(to, chunk);
        }
    }

    /// A slot has other memory, and is the only one that has it.
    pub fn own(&mut self, slot: u32) {
        let group = self.new_group();
        if let Some(chunk) = self.chunks.get_mut(&slot) {
            (chunk.group, chunk.was_shared) = (group, false);
        }
    }

    /// Slots of `range` that get memory of their own if nothing there is to be shared: all but the last
    /// of a group that lies wholly in it.
    pub fn to_own(&self, range: Range<u32>) -> Vec<u32> {
        let sizes = self.sizes();
        let mut seen: BTreeMap<u32, usize> = BTreeMap::new();
        let mut others = |chunk: &Chunk| {
            let seen = seen.entry(chunk.group).or_default();
            *seen += 1;
            *seen < sizes[&chunk.group]
        };
        self.chunks.range(range).filter(|(_, it)| others(it)).map(|(slot, _)| *slot).collect()
    }

    /// What it may do.
    pub fn access_of(&self, device: u32) -> Access {
        self.access.get(&device).copied().unwrap_or(Access::None)
    }

    /// Memory came.
    pub fn committed(&mut self, slots: &[u32], place: Place) {
        for slot in slots {
            if let Some(left) = self.left.remove(slot) {
                self.before.extend(left.holders);
            }
            let (group, was_shared, writers) = (self.new_group(), false, BTreeSet::new());
            let chunk = Chunk { place, now: place, group, was_shared, version: None, writers };
            self.chunks.insert(*slot, chunk);
        }
    }

    /// Memory was taken away.
    pub fn decommitted(&mut self, slots: &[u32]) {
        let holders = self.holders();
        for slot in slots {
            if let Some(Chunk { place, was_shared, .. }) = self.chunks.remove(slot) {
                let holders = holders.clone();
                self.left.insert(*slot, Left { place, was_shared, holders });
            }
        }
    }

    /// A stream whose work may wait for these held ones used it, or a guard on it ended.
    pub fn used(&mut self, stream: u32, holders: BTreeSet<u32>) {
        for left in self.left.values_mut() {
            // The guard may have been alive when the memory was taken.
            left.holders.extend(&holders);
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

    /// Held streams that may still use memory of another place or slot, which was taken from these
    /// slots; whatever was taken, for no place.
    pub fn holders_in_the_way(&self, slots: &[u32], place: Option<Place>) -> BTreeSet<u32> {
        let left = slots.iter().filter_map(|slot| self.left.get(slot));
        let in_the_way = left.filter(|it| place.is_none_or(|place| it.is_in_the_way(place)));
        in_the_way.flat_map(|it| &it.holders).copied().collect()
    }

    /// Whether such memory was taken from one of these slots and may still stand there.
    pub fn is_in_the_way(&self, slots: &[u32], place: Option<Place>) -> bool {
        let mut left = slots.iter().filter_map(|slot| self.left.get(slot));
        left.any(|it| place.is_none_or(|place| it.is_in_the_way(place)))
    }

    /// A held stream was let go and has done its work.
    pub fn released(&mut self, stream: u32) {
        self.before.remove(&stream);
        let left = self.left.values_mut().map(|left| &mut left.holders);
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
        assert_eq!(model.holders_in_the_way(&[0, 1], Some(THERE)), [5].into());
        assert!(model.holders_in_the_way(&[0, 1], Some(HERE)).is_empty());
        assert!(model.is_in_the_way(&[1], None) && !model.is_in_the_way(&[0], None));
        model.committed(&[1], HERE);
        assert_eq!(*model.before(), [5].into());
        model.released(5);
        assert!(model.before().is_empty() && model.holders().is_empty());
    }

    #[test]
    fn slots_that_share_memory_see_the_same_and_part_when_one_moves() {
        let mut model = ElasticModel::new(0, 4096, 9, 0, None);
        model.committed(&[0, 1], HERE);
        model.shared(0, 4);
        model.shared(4, 5);
        assert_eq!(
            (model.chunks_at(HERE), model.is_shared(5), model.is_shared(1)),
            (2, true, false)
        );
        assert_eq!(model.write(4, 3, Some(Some(7))), Some(7));
        assert_eq!((model.chunks[&0].version, model.chunks[&5].version), (Some(7), Some(7)));
        assert_eq!((model.to_own(0..5), model.to_own(0..9)), (vec![0, 4], vec![0, 4]));
        model.own(0);
        model.write(0, 3, Some(Some(8)));
        model.settled(4, &[3]);
        assert_eq!((model.chunks[&5].version, model.chunks[&5].writers.len()), (Some(7), 0));
        assert_eq!((model.chunks_at(HERE), model.chunks[&0].writers.len()), (3, 1));
        model.decommitted(&[5]);
        assert!(model.is_in_the_way(&[5], Some(HERE)), "it stands elsewhere");
    }
}
