//! One thread of the soak: which operation comes next, and what its checks found.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use vmm_pool::{Migration, MigrationState};
use vmm_sys::DeviceId;
use vmm_sys::caught::thrown;
use vmm_sys::object::Stream;

use super::blocks::{Block, RawBlock};
use super::board::{WORDS, Words};
use super::graphs::Graph;
use super::kv::Held;
use super::trouble::{Step, Trouble};
use super::world::{Track, World, lock, told};
use super::{Length, blocks, elastic, graphs, kv, pools, sharing, sleep};
use crate::rng::Rng;

/// An operation: its name, how often it is chosen, and what it is.
pub(super) struct Kind {
    pub(super) name: &'static str,
    weight: u64,
    act: fn(&mut Worker<'_>) -> Step,
    /// On fewer devices there is nothing to do it with.
    pub(super) needs_devices: u32,
}

const fn kind(name: &'static str, weight: u64, act: fn(&mut Worker<'_>) -> Step) -> Kind {
    Kind { name, weight, act, needs_devices: 1 }
}

impl Kind {
    const fn across(self) -> Kind {
        Kind { needs_devices: 2, ..self }
    }
}

/// Every kind of operation. Each must have been done by the end of a run that is not short, if the
/// devices are enough for it.
pub(super) const KINDS: &[Kind] = &[
    kind("alloc", 300, blocks::alloc),
    kind("alloc_with", 60, blocks::alloc_with),
    kind("free", 240, blocks::free),
    kind("use_across", 80, blocks::use_across),
    kind("check", 80, blocks::check),
    kind("send", 60, blocks::send),
    kind("receive", 60, blocks::receive),
    kind("alloc_raw", 80, blocks::alloc_raw),
    kind("free_raw", 80, blocks::free_raw),
    kind("capture", 6, graphs::capture),
    kind("graph_launch", 40, graphs::launch),
    kind("graph_drop", 4, graphs::drop_one),
    kind("elastic_make", 6, elastic::make),
    kind("elastic_end", 4, elastic::end),
    kind("elastic_commit", 20, elastic::commit),
    kind("elastic_commit_from", 8, elastic::commit_from),
    kind("elastic_borrow", 12, elastic::borrow),
    kind("elastic_ahead", 8, elastic::grow_ahead),
    kind("elastic_decommit", 16, elastic::decommit),
    kind("elastic_check", 60, elastic::check),
    kind("elastic_read", 8, elastic::read_from_host),
    kind("elastic_refill", 10, elastic::refill),
    kind("elastic_copy", 8, elastic::copy),
    kind("elastic_share", 8, elastic::share),
    kind("elastic_unshare", 4, elastic::unshare),
    kind("elastic_grant", 6, elastic::grant),
    // A buffer's home keeps its access: it is another device that loses it.
    kind("elastic_revoke", 4, elastic::revoke).across(),
    kind("elastic_move", 10, elastic::migrate),
    kind("elastic_move_async", 8, elastic::migrate_async),
    kind("elastic_home", 4, elastic::come_home),
    kind("recall", 3, elastic::recall),
    kind("rebalance", 4, elastic::rebalance),
    kind("sleep_kept", 5, sleep::kept),
    kind("sleep_dropped", 5, sleep::dropped),
    kind("wake", 10, sleep::wake),
    kind("export_import", 8, sharing::import_here),
    kind("share_with_child", 8, sharing::with_child),
    kind("kv_open", 20, kv::open),
    kind("kv_append", 60, kv::append),
    kind("kv_fork", 14, kv::fork),
    kind("kv_check", 30, kv::check),
    kind("kv_cut", 8, kv::truncate),
    kind("kv_park", 4, kv::park),
    kind("kv_drop", 20, kv::drop_one),
    kind("kv_pack", 3, kv::pack),
    kind("trim", 3, pools::trim),
    kind("trim_idle", 4, pools::trim_idle),
    kind("prefill", 3, pools::prefill),
    kind("new_stream", 3, pools::new_stream),
    kind("pool", 3, pools::come_and_go),
    kind("refused_request", 10, pools::refused),
    kind("beyond_all", 2, pools::beyond_all),
    kind("stats", 10, pools::stats),
    kind("verify", 2, pools::verify),
];

/// Operations of a thread that are told when something is wrong.
const TOLD: usize = 20;

/// A check under way.
struct Check {
    device: DeviceId,
    word: usize,
    operation: u64,
    kind: &'static str,
    words: Words,
}

/// A thread, and what it has in hand.
pub(super) struct Worker<'a> {
    pub(super) world: &'a World,
    pub(super) rng: Rng,
    pub(super) blocks: Vec<Block>,
    pub(super) raws: Vec<RawBlock>,
    pub(super) graphs: Vec<Graph>,
    pub(super) sequences: Vec<Held>,
    pub(super) moves: Vec<Migration>,
    pub(super) number: u32,
    operation: u64,
    kind: &'static str,
    checks: Vec<Check>,
    /// Streams with checks of this thread.
    checked_on: Vec<Stream>,
}

impl<'a> Worker<'a> {
    pub(super) fn new(world: &'a World, number: u32) -> Worker<'a> {
        let seed = world.options.seed.wrapping_mul(1000).wrapping_add(number.into());
        Worker {
            world,
            rng: Rng::new(seed),
            blocks: Vec::new(),
            raws: Vec::new(),
            graphs: Vec::new(),
            sequences: Vec::new(),
            moves: Vec::new(),
            number,
            operation: 0,
            kind: "",
            checks: Vec::new(),
            checked_on: Vec::new(),
        }
    }

    /// Does operations until the run ends.
    pub(super) fn run(mut self) {
        loop {
            let quiet = match self.world.options.quiet {
                Length::Operations(each) => {
                    self.operation > 0 && self.operation.is_multiple_of(each)
                }
                Length::Time(_) => false,
            };
            let finished = self.world.options.length == Length::Operations(self.operation);
            if quiet || finished || self.world.gate.is_closed() {
                if !self.rest(finished) || finished {
                    return;
                }
                if quiet {
                    self.operation += 1; // else it would be quiet again
                }
                continue;
            }
            self.one();
        }
    }

    /// Drops everything and waits. Returns whether the run goes on.
    fn rest(&mut self, finished: bool) -> bool {
        self.note("rest", String::new());
        if self.world.failure().is_none() {
            self.guarded(|it| it.drop_all());
        }
        lock(&self.my_slot().doing).waits = true;
        let goes_on = self.world.gate.arrive(finished);
        let mut doing = lock(&self.my_slot().doing);
        (doing.waits, doing.since) = (false, Instant::now());
        goes_on
    }

    fn my_slot(&self) -> &'a super::world::Slot {
        &self.world.slots[self.number as usize]
    }

    /// One operation.
    fn one(&mut self) {
        let sum: u64 = KINDS.iter().map(|kind| kind.weight).sum();
        let mut at = self.rng.below(sum);
        let mut index = 0;
        while at >= KINDS[index].weight {
            at -= KINDS[index].weight;
            index += 1;
        }
        let kind = &KINDS[index];
        self.note(kind.name, String::new());
        self.operation += 1;
        let outcome = self.guarded(|it| {
            if it.checks.len() >= WORDS - 40 {
                it.settle()?;
            }
            (kind.act)(it)
        });
        let counts = match outcome {
            Some(true) => &self.my_slot().done,
            _ => &self.my_slot().refused,
        };
        counts[index].fetch_add(1, Ordering::Relaxed);
    }

    /// Whether it was done; `None` after a fault, which ends the run.
    fn guarded(&mut self, act: impl FnOnce(&mut Self) -> Step) -> Option<bool> {
        let text = match thrown(|| act(self)) {
            Ok(Ok(())) => return Some(true),
            Ok(Err(Trouble::Refused(why))) => {
                self.say(why);
                return Some(false);
            }
            Ok(Err(Trouble::Wrong(text))) => text,
            Err(words) => format!("panicked: {words}"),
        };
        let last = told(&lock(&self.my_slot().doing).last);
        let (number, seed, kind) = (self.number, self.world.options.seed, self.kind);
        self.world.fail(format!(
            "thread {number} of seed {seed}, operation {} {kind}: {text}\nits last operations:{last}",
            self.operation
        ));
        None
    }

    fn note(&mut self, kind: &'static str, what: String) {
        self.kind = kind;
        let mut doing = lock(&self.my_slot().doing);
        if doing.last.len() == TOLD {
            doing.last.remove(0);
        }
        doing.last.push((self.operation, kind, what));
        doing.since = Instant::now();
    }

    /// Adds to what is told of the present operation.
    pub(super) fn say(&self, what: impl std::fmt::Display) {
        if let Some((_, _, text)) = lock(&self.my_slot().doing).last.last_mut() {
            let gap = if text.is_empty() { "" } else { " " };
            *text = format!("{text}{gap}{what}");
        }
    }

    // ---- choices ----

    /// One of the shared streams.
    pub(super) fn track(&mut self) -> Arc<Track> {
        let index = self.rng.below(self.world.tracks() as u64) as usize;
        self.world.track(index)
    }

    /// One of the shared streams of a device.
    pub(super) fn track_of(&mut self, device: DeviceId) -> Option<Arc<Track>> {
        let first = self.rng.below(self.world.tracks() as u64) as usize;
        let all = (0..self.world.tracks()).map(|n| (first + n) % self.world.tracks());
        all.map(|index| self.world.track(index)).find(|track| track.device() == device)
    }

    /// One of the pools.
    pub(super) fn pool(&mut self) -> usize {
        self.rng.below(self.world.pools.len() as u64) as usize
    }

    pub(super) fn device(&mut self) -> DeviceId {
        DeviceId(self.rng.below(self.world.options.devices.into()) as u32)
    }

    pub(super) fn value(&mut self) -> u32 {
        self.rng.next_u64() as u32
    }

    /// Takes one of some.
    pub(super) fn take<T>(rng: &mut Rng, from: &mut Vec<T>) -> Option<T> {
        (!from.is_empty()).then(|| from.swap_remove(rng.below(from.len() as u64) as usize))
    }

    // ---- checks ----

    /// Enqueues a comparison. What it finds is known at the next [`Worker::settle`].
    pub(super) fn enqueue_check(&mut self, stream: &Stream, words: Words) -> Step {
        if self.checks.len() == WORDS {
            self.settle()?;
        }
        let (device, word) = (stream.device(), self.checks.len());
        words.check(stream, self.world.board.address(device, self.number, word))?;
        let (operation, kind) = (self.operation, self.kind);
        self.checks.push(Check { device, word, operation, kind, words });
        if !self.checked_on.iter().any(|other| other.id() == stream.id()) {
            self.checked_on.push(stream.clone());
        }
        Ok(())
    }

    /// Waits for all checks of this thread, and looks what they found.
    pub(super) fn settle(&mut self) -> Step {
        for stream in self.checked_on.drain(..) {
            stream.synchronize()?;
        }
        let checks = std::mem::take(&mut self.checks);
        self.my_slot().checks.fetch_add(checks.len() as u64, Ordering::Relaxed);
        for device in self.world.machine.devices() {
            if !checks.iter().any(|check| check.device == device) {
                continue;
            }
            let row = self.world.board.read(device, self.number)?;
            for check in checks.iter().filter(|check| check.device == device) {
                let wrong = row[check.word];
                if wrong != 0 {
                    let Check { operation, kind, words, .. } = check;
                    return Err(Trouble::Wrong(format!(
                        "{wrong} words are wrong as {device} read them in operation {operation} \
                         {kind}: {words:x?}"
                    )));
                }
            }
        }
        Ok(())
    }

    /// How many comparisons can be enqueued before the thread waits for them.
    pub(super) fn checks_left(&self) -> usize {
        WORDS - self.checks.len()
    }

    // ---- the end of a round ----

    fn drop_all(&mut self) -> Step {
        while let Some(graph) = self.graphs.pop() {
            graphs::end(self, graph)?;
        }
        while let Some(block) = self.blocks.pop() {
            blocks::check_and_drop(self, block)?;
        }
        while let Some(raw) = self.raws.pop() {
            blocks::check_and_free(self, raw)?;
        }
        while let Some(held) = self.sequences.pop() {
            kv::check_and_drop(self, held)?;
        }
        self.finish_moves()?;
        self.settle()
    }

    /// Waits for the moves that this thread has asked for.
    pub(super) fn finish_moves(&mut self) -> Step {
        for migration in self.moves.drain(..) {
            match migration.wait(super::HANG) {
                MigrationState::Done(_) => {}
                MigrationState::Failed(error) => match error.into() {
                    Trouble::Refused(_) => {}
                    trouble => return Err(trouble),
                },
                state => return Err(Trouble::Wrong(format!("a move has not ended: {state:?}"))),
            }
        }
        Ok(())
    }
}
