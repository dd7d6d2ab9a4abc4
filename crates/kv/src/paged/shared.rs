//! [`Shared`]: a cache's memory and its blocks, and how the one follows the other.

use std::fmt;
use std::sync::Arc;

use vmm_pool::{ElasticError, Error, Growth, Place};

use super::state::{Ask, State};
use super::zone::Zone;
use crate::error::KvError;
use crate::grower::Chores;
use crate::hands::Held;
use crate::layout::BlockLayout;
use crate::memory::{Form, Memory, Need, count, is_shortage};
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::{Mutex, MutexGuard, across_calls};

/// What the handles of a cache share.
pub(super) struct Shared {
    pub(super) memory: Memory,
    pub(super) layout: BlockLayout,
    pub(super) max_blocks: u32,
    /// Where the host's zone lies.
    pub(super) host: Option<Place>,
    pub(super) ahead_blocks: u64,
    pub(super) keep_idle_bytes: u64,
    /// Growth ahead was refused: it is not tried again before something has changed.
    discouraged: AtomicBool,
    state: Mutex<State>,
    /// Held from where copies between blocks are planned until tables say where the contents are, at
    /// the driver too. Taken before `state`, and never together with the hands.
    motion: Mutex<()>,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").field("memory", &self.memory).finish_non_exhaustive()
    }
}

/// Which of the zones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Device,
    Host,
}

impl State {
    pub(super) fn zone(&mut self, side: Side) -> Option<&mut Zone> {
        match side {
            Side::Device => Some(&mut self.device),
            Side::Host => self.host.as_mut(),
        }
    }
}

impl Shared {
    pub(super) fn new(memory: Memory, layout: BlockLayout, state: State) -> Shared {
        Shared {
            memory,
            layout,
            max_blocks: state.device.geometry().blocks,
            host: None,
            ahead_blocks: 0,
            keep_idle_bytes: 0,
            discouraged: AtomicBool::new(false),
            state: Mutex::new(state),
            motion: across_calls(()),
        }
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// See [`Shared::motion`].
    pub(super) fn motion(&self) -> MutexGuard<'_, ()> {
        self.motion.lock()
    }

    /// The longest sequence.
    pub(super) fn max_tokens(&self) -> u64 {
        u64::from(self.max_blocks) * u64::from(self.layout.block_tokens())
    }

    /// A table without tokens that is to have so many blocks.
    pub(super) fn open_ahead(&self, tokens: Arc<AtomicU64>, blocks: u64) -> usize {
        let (key, waits, free_blocks) = {
            let mut state = self.state();
            let (key, waits) = state.open_ahead(tokens, blocks);
            (key, waits, state.device.free_blocks())
        };
        match waits {
            true => self.have_chores_done(),
            false => self.after_taking(free_blocks),
        }
        key
    }

    /// Sees to it that a table has so many blocks, for so many tokens more.
    pub(super) fn extend(&self, key: usize, blocks: u64, tokens: u64) -> Result<(), KvError> {
        let mut state = self.state();
        let have = state.tables.get(key).map_or(0, |table| table.blocks.len() as u64);
        let missing = blocks.saturating_sub(have);
        if missing == 0 {
            return Ok(());
        }
        if state.try_extend(key, missing) {
            let free_blocks = state.device.free_blocks();
            drop(state);
            self.after_taking(free_blocks);
            return Ok(());
        }
        // What comes now is not to come ahead too.
        let ahead = state.end_wait(key);
        drop(state);
        let held = self.obtain(missing - ahead, tokens)?;
        let mut state = self.state();
        state.try_extend(key, ahead);
        state.extend(key, held);
        Ok(())
    }

    /// Holds so many blocks, for so many tokens: free ones, else ones whose memory comes now.
    pub(super) fn obtain(&self, blocks: u64, tokens: u64) -> Result<Vec<u32>, KvError> {
        let held = match self.hold(Side::Device, blocks) {
            Some(held) => held,
            None => self.obtain_with_growth(blocks, tokens)?,
        };
        let free_blocks = self.state().device.free_blocks();
        self.after_taking(free_blocks);
        Ok(held)
    }

    fn obtain_with_growth(&self, blocks: u64, tokens: u64) -> Result<Vec<u32>, KvError> {
        let need = Need { tokens, bytes: blocks * self.layout.block_bytes() };
        self.with_room(need, |hands| {
            loop {
                if let Some(held) = self.hold(Side::Device, blocks) {
                    return Ok(held);
                }
                // Who appends meanwhile may take what came.
                if self.grow(hands, Side::Device, blocks, u64::MAX)? {
                    count(&self.memory.counts.foreground_growths);
                    self.discouraged.store(false, Ordering::Relaxed);
                }
            }
        })
    }

    /// The same in the host's zone. Nobody is asked to evict: what hooks free lies on the device.
    pub(super) fn obtain_on_host(&self, blocks: u64) -> Result<Vec<u32>, KvError> {
        let hands = self.memory.hands.take()?;
        loop {
            if let Some(held) = self.hold(Side::Host, blocks) {
                return Ok(held);
            }
            self.grow(&hands, Side::Host, blocks, u64::MAX).map_err(|cause| {
                let bytes = blocks * self.layout.block_bytes();
                let tokens = blocks * u64::from(self.layout.block_tokens());
                match is_shortage(&cause) {
                    true => KvError::NoMemory { tokens, bytes, cause },
                    false => cause.into(),
                }
            })?;
        }
    }

    fn hold(&self, side: Side, blocks: u64) -> Option<Vec<u32>> {
        let mut state = self.state();
        let zone = state.zone(side)?;
        if zone.free_blocks() < blocks {
            return None;
        }
        Some((0..blocks).map_while(|_| zone.take_held()).collect())
    }

    /// Commits the lowest chunks until so many blocks of a zone are free, `most_bytes` at most. Says
    /// whether any came.
    fn grow(
        &self,
        hands: &Held<'_>,
        side: Side,
        blocks: u64,
        most_bytes: u64,
    ) -> Result<bool, Error> {
        let chunks = {
            let mut state = self.state();
            let Some(zone) = state.zone(side) else { return Err(self.no_blocks(0, blocks)) };
            let missing = blocks.saturating_sub(zone.free_blocks());
            if missing > zone.lacking_blocks() {
                let all = u64::from(zone.geometry().blocks);
                return Err(self.no_blocks(all, blocks));
            }
            let mut chunks = zone.plan_growth(missing).chunks;
            let most = most_bytes / zone.geometry().chunk_bytes;
            chunks.truncate(usize::try_from(most).unwrap_or(usize::MAX));
            chunks
        };
        let runs = |run: &[u32]| self.state().zone(side).map_or(Vec::new(), |it| it.ranges(run));
        let stand = |run: &[u32]| {
            if let Some(zone) = self.state().zone(side) {
                zone.stand(run);
            }
        };
        match (side, self.host) {
            (Side::Host, Some(place)) => {
                for run in chunks.chunk_by(|one, next| one + 1 == *next) {
                    for range in runs(run) {
                        if let Err(error) = self.memory.buffer.commit_from(place, range) {
                            self.release(hands, Side::Host, 0, 0);
                            return Err(error);
                        }
                    }
                    stand(run);
                }
            }
            _ if chunks.is_empty() => {}
            _ => {
                let growth = self.memory.lending.apply(Growth::ranges(runs(&chunks)));
                self.memory.buffer.grow(growth)?;
                stand(&chunks);
            }
        }
        Ok(!chunks.is_empty())
    }

    /// Every block that there is has a sequence.
    fn no_blocks(&self, blocks: u64, more_blocks: u64) -> Error {
        let (bytes, quota_bytes) =
            (more_blocks * self.layout.block_bytes(), blocks * self.layout.block_bytes());
        ElasticError::OverQuota { bytes, booked_bytes: quota_bytes, quota_bytes }.into()
    }

    /// Gives empty chunks of a zone back, the highest first, so that `keep_bytes` of them and
    /// `keep_blocks` free blocks are left. Returns the bytes.
    pub(super) fn release(
        &self,
        _hands: &Held<'_>,
        side: Side,
        keep_bytes: u64,
        keep_blocks: u64,
    ) -> u64 {
        let chunks = {
            let mut state = self.state();
            let Some(zone) = state.zone(side) else { return 0 };
            let chunks = zone.surplus(keep_bytes, keep_blocks);
            // Nobody takes a block there from now on.
            zone.vacate(&chunks);
            chunks
        };
        let (mut released, mut left) = (0, chunks.len());
        // The highest first: if they are to stay, so are those below.
        for run in chunks.chunk_by(|one, next| one + 1 == *next).rev() {
            let range = self.state().zone(side).map_or(0..0, |zone| zone.range_of(run));
            match self.memory.buffer.decommit(range) {
                Ok(bytes) => released += bytes,
                Err(error) => {
                    vmm_sys::say!(debug, %error, "memory without tokens stays");
                    if let Some(zone) = self.state().zone(side) {
                        zone.stand(&chunks[..left]);
                    }
                    break;
                }
            }
            left -= run.len();
        }
        released
    }

    /// Blocks were taken: asks for more ahead, if few are left.
    pub(super) fn after_taking(&self, free_blocks: u64) {
        let is_low = free_blocks < self.ahead_blocks.div_ceil(2);
        if is_low && !self.discouraged.load(Ordering::Relaxed) {
            self.have_chores_done();
        }
    }

    /// Blocks became free: asks for what is too much to be given back.
    pub(super) fn after_freeing(&self, state: MutexGuard<'_, State>) {
        let device = &state.device;
        let is_much = device.spare_bytes() > self.keep_idle_bytes
            && device.free_blocks() > self.ahead_blocks
            || state.host.as_ref().is_some_and(|host| host.spare_bytes() > 0);
        drop(state);
        self.discouraged.store(false, Ordering::Relaxed);
        if is_much {
            self.have_chores_done();
        }
    }

    /// In the thread, or here if there is none.
    pub(super) fn have_chores_done(&self) {
        if !self.memory.bell.ring() {
            self.do_chores();
        }
    }
}

impl Form for Shared {
    fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Blocks are free as soon as they are left.
    fn collect(&self, _hands: &Held<'_>) {}

    fn give_idle(&self, hands: &Held<'_>, keep_bytes: u64) -> u64 {
        self.release(hands, Side::Device, keep_bytes, 0)
    }
}

impl Shared {
    /// Has blocks come for those who wait for them, in the order in which they asked, as far as memory
    /// lies ready. Where the driver refuses one nobody behind it is tried.
    fn serve_asks(&self, hands: &Held<'_>) {
        let asks = self.state().take_asks();
        let mut refused = false;
        for ask in asks {
            if !refused && let Err(error) = self.grow_for(hands, ask) {
                vmm_sys::say!(debug, %error, "no growth ahead");
                refused = true;
            }
            // Without its blocks it waits no more: its append takes them as any other does.
            self.state().end_ask(ask);
        }
    }

    fn grow_for(&self, hands: &Held<'_>, ask: Ask) -> Result<(), Error> {
        loop {
            let (missing, bytes) = {
                let mut state = self.state();
                if state.serve(ask) {
                    return Ok(());
                }
                let missing = state.missing_ahead(ask);
                let zone = &state.device;
                let chunks = zone.plan_growth(missing.saturating_sub(zone.free_blocks())).chunks;
                (missing, chunks.len() as u64 * zone.geometry().chunk_bytes)
            };
            if !self.memory.has_room(bytes) {
                return Ok(());
            }
            // Who appends meanwhile may take what came.
            if self.grow(hands, Side::Device, missing, u64::MAX)? {
                count(&self.memory.counts.background_growths);
            }
        }
    }
}

impl Chores for Shared {
    fn do_chores(&self) {
        // Whoever is changing the memory in this very thread is called from the pool, and goes on later.
        let Ok(hands) = self.memory.hands.take() else { return };
        self.serve_asks(&hands);
        let (free, lacking) = {
            let state = self.state();
            (state.device.free_blocks(), state.device.lacking_blocks())
        };
        if free < self.ahead_blocks.div_ceil(2) {
            let blocks = self.ahead_blocks.min(free + lacking);
            // Only what lies ready: nobody is pressed for what nobody needs yet.
            let room_bytes = self.memory.room_bytes();
            let grown = self.grow(&hands, Side::Device, blocks, room_bytes);
            match &grown {
                Ok(true) => count(&self.memory.counts.background_growths),
                Ok(false) => {}
                Err(error) => vmm_sys::say!(debug, %error, blocks, "no growth ahead"),
            }
            self.discouraged.store(!matches!(grown, Ok(true)), Ordering::Relaxed);
        }
        self.release(&hands, Side::Device, self.keep_idle_bytes, self.ahead_blocks);
        self.release(&hands, Side::Host, 0, 0);
    }
}
