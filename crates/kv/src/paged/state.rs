//! [`State`]: who has which block. Plain numbers, behind one lock that is never held at the driver.

use std::collections::HashMap;
use std::sync::Arc;

use slab::Slab;

use super::zone::{Shift, Zone};
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::global;

/// The blocks of one sequence.
#[derive(Debug)]
pub(super) struct Table {
    /// In the order of its tokens. As many as its tokens take.
    pub(super) blocks: Vec<u32>,
    /// Blocks for tokens to come, held for it.
    pub(super) ahead: Vec<u32>,
    /// How many blocks it waits for ahead, with those that it has; 0 if it does not.
    pub(super) wanted_blocks: u64,
    /// Another number whenever a block changed; no two tables of a process have had the same.
    pub(super) version: u64,
    /// The number that it had first: its key may be another's after it.
    born: u64,
    /// Its tokens, which the sequence counts without the lock.
    pub(super) tokens: Arc<AtomicU64>,
    pub(super) is_parked: bool,
}

/// The blocks of a cache.
#[derive(Debug)]
pub(super) struct State {
    pub(super) device: Zone,
    pub(super) host: Option<Zone>,
    pub(super) tables: Slab<Table>,
    /// The blocks of all tables, one that several have once for each.
    pub(super) entries: u64,
    /// Tables that wait for blocks ahead, in the order in which they asked. Some may be gone.
    asks: Vec<Ask>,
}

/// A table that waits for blocks ahead.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ask {
    key: usize,
    born: u64,
}

impl Ask {
    /// The table that asked, if it is there still.
    fn of(self, tables: &Slab<Table>) -> Option<&Table> {
        tables.get(self.key).filter(|table| table.born == self.born)
    }
}

global! {
    /// The number that a table of this process had last.
    static LAST: AtomicU64 = AtomicU64::new(0);
}

/// A number that no table of this process has had.
pub(super) fn new_version() -> u64 {
    LAST.fetch_add(1, Ordering::Relaxed) + 1
}

impl State {
    pub(super) fn new(device: Zone, host: Option<Zone>) -> State {
        State { device, host, tables: Slab::new(), entries: 0, asks: Vec::new() }
    }

    /// A sequence with these blocks, which were held.
    pub(super) fn open(&mut self, tokens: Arc<AtomicU64>, blocks: Vec<u32>) -> usize {
        let Ask { key, .. } = self.insert(tokens, Vec::new(), 0);
        self.extend(key, blocks);
        key
    }

    /// A table with these blocks, that waits until it has `wanted_blocks` (0: for none).
    fn insert(&mut self, tokens: Arc<AtomicU64>, blocks: Vec<u32>, wanted_blocks: u64) -> Ask {
        let born = new_version();
        let key = self.tables.insert(Table {
            blocks,
            ahead: Vec::new(),
            wanted_blocks,
            version: born,
            born,
            tokens,
            is_parked: false,
        });
        Ask { key, born }
    }

    /// A sequence without tokens that is to have so many blocks: at once if they are free, else it waits
    /// for them. Says whether it waits.
    pub(super) fn open_ahead(&mut self, tokens: Arc<AtomicU64>, blocks: u64) -> (usize, bool) {
        let ask = self.insert(tokens, Vec::new(), blocks);
        let waits = !self.serve(ask);
        if waits {
            self.asks.push(ask);
        }
        (ask.key, waits)
    }

    /// How many blocks a table waits for; none if it is gone.
    pub(super) fn missing_ahead(&self, ask: Ask) -> u64 {
        ask.of(&self.tables).map_or(0, |table| {
            table.wanted_blocks.saturating_sub((table.blocks.len() + table.ahead.len()) as u64)
        })
    }

    /// Holds what a table waits for, if so many blocks are free. Says whether it waits no more.
    pub(super) fn serve(&mut self, ask: Ask) -> bool {
        let missing = self.missing_ahead(ask);
        if self.device.free_blocks() < missing {
            return false;
        }
        if ask.of(&self.tables).is_some()
            && let Some(table) = self.tables.get_mut(ask.key)
        {
            table.ahead.extend((0..missing).map_while(|_| self.device.take_held()));
            table.wanted_blocks = 0;
        }
        true
    }

    /// Those who wait, the first first.
    pub(super) fn take_asks(&mut self) -> Vec<Ask> {
        std::mem::take(&mut self.asks)
    }

    /// A table waits no more, if it is there still.
    pub(super) fn end_ask(&mut self, ask: Ask) {
        if ask.of(&self.tables).is_some() {
            self.end_wait(ask.key);
        }
    }

    /// A table waits for nothing any more. Returns how many blocks are held for it.
    pub(super) fn end_wait(&mut self, key: usize) -> u64 {
        let Some(table) = self.tables.get_mut(key) else { return 0 };
        table.wanted_blocks = 0;
        table.ahead.len() as u64
    }

    /// Lets go what is held ahead for a table, and it waits for nothing.
    pub(super) fn forget_ahead(&mut self, key: usize) {
        let Some(table) = self.tables.get_mut(key) else { return };
        table.wanted_blocks = 0;
        let ahead = std::mem::take(&mut table.ahead);
        self.let_go(&ahead);
    }

    /// Blocks that are held for tokens to come.
    pub(super) fn ahead_blocks(&self) -> u64 {
        self.tables.iter().map(|(_, table)| table.ahead.len() as u64).sum()
    }

    /// Puts blocks that were held at the end of a table.
    pub(super) fn extend(&mut self, key: usize, blocks: Vec<u32>) {
        let Some(table) = self.tables.get_mut(key) else { return };
        blocks.iter().for_each(|block| self.device.settle(*block));
        self.entries += blocks.len() as u64;
        table.blocks.extend(blocks);
        table.version = new_version();
    }

    /// Puts free blocks at the end of a table. Says whether there were enough; else nothing is done.
    pub(super) fn try_extend(&mut self, key: usize, blocks: u64) -> bool {
        let Some(table) = self.tables.get_mut(key) else { return false };
        if self.device.free_blocks() + (table.ahead.len() as u64) < blocks {
            return false;
        }
        // The first that was held ahead is the lowest.
        let held = (table.ahead.len() as u64).min(blocks) as usize; // no more than a length
        for block in table.ahead.drain(..held) {
            self.device.settle(block);
            table.blocks.push(block);
        }
        let more = blocks - held as u64;
        table.blocks.extend((0..more).map_while(|_| self.device.take()));
        self.entries += blocks;
        table.version = new_version();
        true
    }

    /// Puts blocks that were held in the place of others of a table.
    pub(super) fn replace(&mut self, key: usize, swaps: impl Iterator<Item = (usize, u32)>) {
        for (at, block) in swaps {
            let Some(table) = self.tables.get_mut(key) else { return };
            let Some(entry) = table.blocks.get_mut(at) else { continue };
            let old = std::mem::replace(entry, block);
            table.version = new_version();
            match &mut self.host {
                Some(host) if host.has(block) => host.settle(block),
                _ => self.device.settle(block),
            }
            self.drop_ref(old);
        }
    }

    /// Blocks changed places, each of which was held, for all tables that have them.
    pub(super) fn rewrite(&mut self, shifts: &[Shift]) {
        let places: HashMap<u32, u32> = shifts.iter().map(|it| (it.from, it.to)).collect();
        for (_, table) in &mut self.tables {
            let mut changed = false;
            for block in &mut table.blocks {
                if let Some(to) = places.get(block) {
                    *block = *to;
                    changed = true;
                }
            }
            if changed {
                table.version = new_version();
            }
        }
        shifts.iter().for_each(|shift| self.device.hand_over(*shift));
    }

    /// Lets blocks go that were held and are not needed after all.
    pub(super) fn let_go(&mut self, blocks: &[u32]) {
        for block in blocks {
            match &mut self.host {
                Some(host) if host.has(*block) => host.let_go(*block),
                _ => self.device.let_go(*block),
            }
        }
    }

    /// A sequence that begins with the first blocks of another.
    pub(super) fn fork(&mut self, key: usize, tokens: Arc<AtomicU64>, blocks: usize) -> usize {
        let parent = self.tables.get(key);
        let blocks = parent.map_or(Vec::new(), |parent| parent.blocks[..blocks].to_vec());
        blocks.iter().for_each(|block| self.device.add_ref(*block));
        self.entries += blocks.len() as u64;
        self.insert(tokens, blocks, 0).key
    }

    /// Takes all but the first blocks away from a table. Says whether there were more.
    pub(super) fn truncate(&mut self, key: usize, blocks: usize) -> bool {
        let Some(table) = self.tables.get_mut(key) else { return false };
        let gone = table.blocks.split_off(blocks.min(table.blocks.len()));
        if gone.is_empty() {
            return false;
        }
        table.version = new_version();
        self.entries -= gone.len() as u64;
        gone.into_iter().for_each(|block| self.drop_ref(block));
        true
    }

    /// Ends a sequence.
    pub(super) fn close(&mut self, key: usize) {
        self.truncate(key, 0);
        self.forget_ahead(key);
        self.tables.try_remove(key);
    }

    fn drop_ref(&mut self, block: u32) {
        match &mut self.host {
            Some(host) if host.has(block) => host.drop_ref(block),
            _ => self.device.drop_ref(block),
        }
    }

    /// At which places of a table blocks are so.
    pub(super) fn entries_where(
        &self,
        key: usize,
        is_so: impl Fn(&State, u32) -> bool,
    ) -> Vec<usize> {
        let blocks = self.tables.get(key).map_or(&[][..], |table| &table.blocks);
        let found = blocks.iter().enumerate().filter(|(_, block)| is_so(self, **block));
        found.map(|(at, _)| at).collect()
    }

    /// Whether a block lies in the host's zone.
    pub(super) fn is_on_host(&self, block: u32) -> bool {
        self.host.as_ref().is_some_and(|host| host.has(block))
    }

    /// Checks that the zones' figures are those of the tables.
    pub(super) fn verify(&self, block_tokens: u32) -> Result<(), String> {
        let refs = |zone: &Zone| vec![0; zone.geometry().blocks as usize];
        let (mut device_refs, mut host_refs) =
            (refs(&self.device), self.host.as_ref().map_or(Vec::new(), refs));
        let mut entries = 0;
        for (key, table) in &self.tables {
            let tokens = table.tokens.load(Ordering::Relaxed);
            for block in &table.blocks {
                entries += 1;
                match &self.host {
                    Some(host) if host.has(*block) => {
                        if !table.is_parked {
                            return Err(format!("{key} is not parked but has block {block}"));
                        }
                        host_refs[(block - host.geometry().first_block) as usize] += 1;
                    }
                    _ => device_refs[*block as usize] += 1,
                }
            }
            if let Some(block) = table.ahead.iter().find(|block| !self.device.is_held(**block)) {
                return Err(format!("block {block} is ahead of {key} and not held"));
            }
            let mut blocks = table.blocks.clone();
            blocks.extend(&table.ahead);
            blocks.sort_unstable();
            if blocks.windows(2).any(|pair| pair[0] == pair[1]) {
                return Err(format!("{key} has a block twice: {:?}", table.blocks));
            }
            if tokens > table.blocks.len() as u64 * u64::from(block_tokens) {
                return Err(format!("{key} has {tokens} tokens in {} blocks", table.blocks.len()));
            }
        }
        if entries != self.entries {
            return Err(format!("tables have {entries} blocks, counted are {}", self.entries));
        }
        self.device.verify(&device_refs)?;
        self.host.as_ref().map_or(Ok(()), |host| host.verify(&host_refs))
    }
}
