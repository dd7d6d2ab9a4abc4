//! [`Model`]: what must be true of the pool, kept in the slowest and most obvious way.

use std::collections::{BTreeMap, BTreeSet};

use vmm_pool::DeviceStats;

use crate::contents::Contents;
use crate::shadow::{Owner, Shadow};

/// A live buffer, as the script sees it.
#[derive(Clone, Debug)]
pub struct Entry {
    /// Asked for.
    pub bytes: u64,
    /// What it counts as: whole granules if the pool knows it by its address only.
    pub counted_bytes: u64,
    /// Asked for.
    pub align: u64,
    /// Given.
    pub address: u64,
    /// Home.
    pub device: u32,
    /// The stream of its lane.
    pub stream: u32,
    /// Which pool of the run it came from.
    pub pool: u64,
    /// Its lane takes no more requests: the last buffer's drop ends it.
    pub lane_closed: bool,
    /// What it must hold.
    pub contents: Contents,
    /// The capture that it was given out in: only launches of its graph write to it.
    pub graph: Option<u32>,
    /// Streams told to the pool, other than its lane's.
    pub recorded: BTreeSet<u32>,
}

/// Freed memory that held work may still touch.
#[derive(Clone, Debug)]
struct Parked {
    number: u32,
    entry: Entry,
    waits_for: BTreeSet<u32>,
}

/// The state of a run.
#[derive(Debug, Default)]
pub struct Model {
    entries: BTreeMap<u32, Entry>,
    shadow: Shadow,
    parked: Vec<Parked>,
    held: BTreeSet<u32>,
    /// Streams that may wait for held ones, without being held themselves, and for which.
    behind: BTreeMap<u32, BTreeSet<u32>>,
    graphs: BTreeMap<u32, GraphRanges>,
    /// Those of graphs that are gone, with the held streams that their launches are behind.
    gone: Vec<(GraphRanges, BTreeSet<u32>)>,
}

/// What a graph was given: nobody else may be, freed or not.
#[derive(Clone, Debug, Default)]
struct GraphRanges {
    /// (address, bytes).
    ranges: Vec<(u64, u64)>,
    /// Streams that it was launched on.
    launched: BTreeSet<u32>,
}

impl GraphRanges {
    fn touches(&self, address: u64, bytes: u64) -> bool {
        self.ranges
            .iter()
            .any(|(start, length)| *start < address + bytes && address < start + length)
    }
}

impl Model {
    /// A live buffer.
    pub fn entry(&self, number: u32) -> Option<&Entry> {
        self.entries.get(&number)
    }

    /// The numbers of the live buffers.
    pub fn numbers(&self) -> Vec<u32> {
        self.entries.keys().copied().collect()
    }

    /// The live buffers.
    pub fn entries(&self) -> impl Iterator<Item = &Entry> {
        self.entries.values()
    }

    /// Whether a stream is held, or may wait for one that is.
    pub fn is_held(&self, stream: u32) -> bool {
        !self.holders(stream).is_empty()
    }

    /// The held streams that a stream may wait for; itself, if it is one.
    pub fn holders(&self, stream: u32) -> BTreeSet<u32> {
        let mut holders = self.behind.get(&stream).cloned().unwrap_or_default();
        holders.extend(self.held.contains(&stream).then_some(stream));
        holders
    }

    /// Later work of a stream may wait for these held ones.
    pub fn comes_behind(&mut self, stream: u32, holders: impl IntoIterator<Item = u32>) {
        let held = holders.into_iter().filter(|holder| self.held.contains(holder));
        self.behind.entry(stream).or_default().extend(held);
    }

    /// Whether any stream is held.
    pub fn any_held(&self) -> bool {
        !self.held.is_empty()
    }

    /// A stream is held from now on.
    pub fn hold(&mut self, stream: u32) {
        self.held.insert(stream);
    }

    /// A stream was released and has done its work.
    ///
    /// # Errors
    /// A fault of the model itself.
    pub fn release(&mut self, stream: u32) -> Result<(), String> {
        self.held.remove(&stream);
        self.behind.values_mut().for_each(|holders| {
            holders.remove(&stream);
        });
        self.gone.retain_mut(|(_, behind)| {
            behind.remove(&stream);
            !behind.is_empty()
        });
        for parked in &mut self.parked {
            parked.waits_for.remove(&stream);
        }
        let (done, waiting) =
            std::mem::take(&mut self.parked).into_iter().partition(|p| p.waits_for.is_empty());
        self.parked = waiting;
        let done: Vec<Parked> = done;
        done.iter().try_for_each(|parked| self.forget(parked.number, parked.entry.address))
    }

    fn forget(&mut self, number: u32, address: u64) -> Result<(), String> {
        match self.shadow.remove(address)?.1 {
            Owner::Limbo(known) | Owner::Live(known) if known == number => Ok(()),
            other => Err(format!("{address:#x} belongs to {other:?}, not to buffer {number}")),
        }
    }

    /// A request was served.
    ///
    /// # Errors
    /// In words, if the address is not aligned, or overlaps memory that is in use.
    pub fn born(&mut self, number: u32, entry: Entry) -> Result<(), String> {
        if entry.bytes == 0 {
            if entry.address != 0 {
                return Err(format!("zero bytes got address {:#x}", entry.address));
            }
        } else {
            let align = entry.align.max(256);
            if !entry.address.is_multiple_of(align) || entry.address == 0 {
                return Err(format!("{:#x} is not aligned to {align}", entry.address));
            }
            self.shadow.insert(entry.address, entry.bytes, Owner::Live(number))?;
            self.check_graphs(entry.graph, entry.address, entry.bytes)?;
        }
        self.entries.insert(number, entry);
        Ok(())
    }

    /// Memory that a request got must be no graph's, but that of the capture it was made in.
    fn check_graphs(&self, own: Option<u32>, address: u64, bytes: u64) -> Result<(), String> {
        let others = self.graphs.iter().filter(|(number, _)| own != Some(**number));
        let mut all = others.map(|(_, it)| it).chain(self.gone.iter().map(|(it, _)| it));
        match all.find(|graph| graph.touches(address, bytes)) {
            None => Ok(()),
            Some(graph) => Err(format!("{bytes} bytes at {address:#x} are a graph's: {graph:?}")),
        }
    }

    /// A capture was given memory.
    ///
    /// # Errors
    /// In words, if it is another graph's.
    pub fn given_to_graph(&mut self, number: u32, address: u64, bytes: u64) -> Result<(), String> {
        if bytes == 0 {
            return Ok(());
        }
        self.check_graphs(Some(number), address, bytes)?;
        self.graphs.entry(number).or_default().ranges.push((address, bytes));
        Ok(())
    }

    /// A graph was launched.
    pub fn launched(&mut self, number: u32, stream: u32) {
        self.graphs.entry(number).or_default().launched.insert(stream);
    }

    /// A graph is dropped. Its memory stays taken while a stream of its launches is held; buffers of
    /// its capture are the last of their lanes.
    pub fn graph_is_gone(&mut self, number: u32) {
        for entry in self.entries.values_mut().filter(|entry| entry.graph == Some(number)) {
            entry.lane_closed = true;
        }
        let Some(graph) = self.graphs.remove(&number) else { return };
        let behind: BTreeSet<u32> = graph.launched.intersection(&self.held).copied().collect();
        if !behind.is_empty() {
            self.gone.push((graph, behind));
        }
    }

    /// A stream was recorded.
    pub fn record(&mut self, number: u32, stream: u32) {
        if let Some(entry) = self.entries.get_mut(&number)
            && entry.stream != stream
            && entry.bytes > 0
        {
            entry.recorded.insert(stream);
        }
    }

    /// A buffer is about to be dropped. Its memory stays taken while a recorded stream is held; and
    /// its own, if that is a thread's own and the drop happens in another (`elsewhere`).
    ///
    /// # Errors
    /// A fault of the model itself.
    pub fn freed(&mut self, number: u32, elsewhere: bool) -> Result<(), String> {
        let Some(entry) = self.entries.remove(&number) else {
            return Err(format!("buffer {number} is not alive"));
        };
        if entry.bytes == 0 {
            return Ok(());
        }
        self.forget(number, entry.address)?;
        let mut users = entry.recorded.clone();
        users.extend(elsewhere.then_some(entry.stream));
        let waits_for: BTreeSet<u32> = users.intersection(&self.held).copied().collect();
        if !waits_for.is_empty() {
            self.shadow.insert(entry.address, entry.bytes, Owner::Limbo(number))?;
            self.parked.push(Parked { number, entry, waits_for });
        }
        Ok(())
    }

    /// Lanes were closed: of one stream, or of all if `stream` is `None`.
    pub fn close(&mut self, pool: u64, stream: Option<u32>) {
        for entry in self.entries.values_mut() {
            if entry.pool == pool && stream.is_none_or(|stream| stream == entry.stream) {
                entry.lane_closed = true;
            }
        }
    }

    /// Compares the figures of one device of a pool.
    ///
    /// # Errors
    /// In words, what differs.
    pub fn check(&self, pool: u64, device: u32, stats: &DeviceStats) -> Result<(), String> {
        let mine = |entry: &&Entry| entry.pool == pool && entry.device == device && entry.bytes > 0;
        let mut buffers = 0;
        let mut live_bytes = 0;
        for entry in self.entries.values().filter(mine) {
            buffers += 1;
            live_bytes += entry.counted_bytes;
        }
        let same = |what: &str, model: u64, pool: u64| match model == pool {
            true => Ok(()),
            false => Err(format!("{what}: the model has {model}, the pool {pool}: {stats:?}")),
        };
        same("live bytes", live_bytes, stats.live_bytes)?;
        same("buffers", buffers, stats.buffers)?;
        let parked: Vec<_> = self.parked.iter().map(|p| &p.entry).filter(mine).collect();
        let parked_bytes: u64 = parked.iter().map(|entry| entry.bytes).sum();
        let truths = [
            ("the columns add up", stats.adds_up()),
            ("held is within the limit", stats.held_bytes <= stats.limit_bytes),
            ("peaks are peaks", stats.peak_live_bytes >= live_bytes),
            ("peaks are peaks", stats.peak_held_bytes >= stats.held_bytes),
            ("held work keeps memory", stats.limbo_bytes >= parked_bytes),
            ("held work keeps frees", stats.limbo_buffers >= parked.len() as u64),
            ("memory has addresses", stats.reserved_bytes >= stats.live_bytes),
        ];
        match truths.iter().find(|(_, holds)| !holds) {
            Some((what, _)) => Err(format!("not so: {what}: {stats:?}")),
            None => Ok(()),
        }
    }
}
