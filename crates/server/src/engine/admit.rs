//! Who runs: admission, parking and coming back, and the end of patience.

use vmm_kv::KvError;

use super::task::{Outcome, RefusalKind, Task};
use super::{Engine, EngineError, Tick};

impl Engine {
    /// Drops requests that nobody waits for any more.
    pub(super) fn drop_gone(&mut self) {
        let before = self.requests();
        self.waiting.retain(|task| !task.sink.is_gone());
        self.running.retain(|task| !task.sink.is_gone());
        self.counts.cancelled += (before - self.requests()) as u64;
    }

    /// Brings parked sequences back, the oldest first, as far as there is room.
    pub(super) fn resume_parked(&mut self) {
        let margin = self.settings.margin_tokens;
        let mut active = self.active();
        for task in self.running.iter_mut().filter(|task| task.is_parked) {
            let Some(sequence) = &mut task.sequence else { continue };
            let needed = task.tokens.len() as u64 + margin * (active as u64 + 1);
            // Without any that runs nobody else gives room: it is worth a try.
            if active > 0 && self.cache.room().tokens() < needed {
                return;
            }
            if let Err(error) = sequence.resume() {
                tracing::debug!(%error, "a parked sequence cannot come back yet");
                return;
            }
            task.is_parked = false;
            self.counts.resumed += 1;
            active += 1;
        }
    }

    /// Opens sequences for those that wait, the oldest first, as far as there is room for their tokens and
    /// a margin. Their memory comes meanwhile. Returns what was short.
    pub(super) fn admit(&mut self) -> Option<KvError> {
        if self.running.iter().any(|task| task.is_parked) {
            return None;
        }
        let prompts = self.running.iter().map(Task::unwritten).filter(|count| *count > 1);
        let mut unwritten: usize = prompts.sum();
        // Asked for once: it is a question to the driver.
        let mut room = None;
        while let Some(task) = self.waiting.front() {
            let active = self.running.len();
            // Memory for prompts that the next step does not come to can wait.
            if active >= self.settings.max_running || unwritten >= self.settings.prefill_tokens {
                return None;
            }
            let tokens = task.tokens.len() as u64;
            let needed = tokens + self.settings.margin_tokens * (active as u64 + 1);
            let room = room.get_or_insert_with(|| self.cache.room());
            if active > 0 && (room.tokens() < needed || room.sequences == 0) {
                return None;
            }
            room.take(tokens + self.settings.margin_tokens);
            match self.cache.open_ahead(tokens) {
                Ok(sequence) => {
                    let mut task = self.waiting.pop_front()?;
                    unwritten += task.tokens.len();
                    task.sequence = Some(sequence);
                    let older = |other: &Task| other.number < task.number;
                    let at = self.running.partition_point(older);
                    self.running.insert(at, task);
                }
                Err(error) if error.is_shortage() => return Some(error),
                Err(error) => {
                    if let Some(task) = self.waiting.pop_front() {
                        self.fail(task, error.to_string());
                    }
                }
            }
        }
        None
    }

    /// Lets those whose memory has come begin, the oldest first. Who has waited for long enough, or if no
    /// other runs, takes memory now, as any append does. Returns what was short.
    pub(super) fn begin(&mut self) -> Option<KvError> {
        let runs = |task: &Task| task.has_begun() && !task.is_parked;
        let mut anyone_runs = self.running.iter().any(runs);
        let (mut short, mut index) = (None, 0);
        while let Some(task) = self.running.get_mut(index) {
            let tokens = task.tokens.len() as u64;
            let sequence = task.sequence.as_mut().filter(|sequence| sequence.tokens() == 0);
            let Some(sequence) = sequence else {
                index += 1;
                continue;
            };
            let may_wait = anyone_runs && task.waited_ticks < self.settings.ahead_ticks;
            if may_wait && !sequence.is_ready(tokens) {
                task.waited_ticks += 1;
                index += 1;
                continue;
            }
            match sequence.append(tokens) {
                Ok(()) => {
                    anyone_runs = true;
                    index += 1;
                }
                Err(error) if error.is_shortage() => {
                    // What younger ones wait with is the older one's. It is itself the last of them.
                    let youngest = self.running.iter().rposition(|task| !task.has_begun());
                    self.put_back(youngest.unwrap_or(index));
                    short = Some(error);
                }
                Err(error) => self.finish(index, Outcome::Failed(error.to_string())),
            }
        }
        short
    }

    /// The request at `index` waits again, without memory.
    fn put_back(&mut self, index: usize) {
        let mut task = self.running.remove(index);
        if task.has_begun() {
            task.since_us = self.clock.now_us();
        }
        task.forget();
        let older = |other: &Task| other.number < task.number;
        let at = self.waiting.partition_point(older);
        self.waiting.insert(at, task);
    }

    /// Requests that run.
    pub(super) fn active(&self) -> usize {
        self.running.iter().filter(|task| !task.is_parked).count()
    }

    /// Takes the memory of the request at `index` away: to the host, or it is written anew later.
    /// Returns whether the request is still at its place.
    pub(super) fn preempt(&mut self, index: usize) -> bool {
        let Some(task) = self.running.get_mut(index) else { return false };
        let has_begun = task.has_begun();
        let parked = match &mut task.sequence {
            Some(sequence) if has_begun && self.cache.parks() => sequence.park(),
            _ => Ok(false),
        };
        match parked {
            Ok(true) => {
                task.is_parked = true;
                task.since_us = self.clock.now_us();
                self.counts.parked += 1;
                return true;
            }
            Ok(false) => {}
            Err(error) => tracing::warn!(%error, "a sequence cannot be parked"),
        }
        self.counts.dropped += u64::from(has_begun);
        self.put_back(index);
        false
    }

    /// No request has memory. If that goes on for too long, whoever has had none for as long is refused.
    pub(super) fn stuck(&mut self, error: Option<&EngineError>) -> Tick {
        let now_us = self.clock.now_us();
        let since_us = *self.stuck_since_us.get_or_insert(now_us);
        let patience_us = self.settings.patience_us;
        if now_us - since_us < patience_us {
            return Tick::Stuck;
        }
        let reason = match error {
            Some(error) => error.to_string(),
            None => "the cache has no room for it".to_owned(),
        };
        let is_overdue = |task: &Task| now_us - task.since_us >= patience_us;
        // Parked ones are older than those that wait: what they leave may be enough for the next.
        if let Some(index) = self.running.iter().position(is_overdue) {
            let task = self.running.remove(index);
            self.refuse(task, RefusalKind::NoMemory, &reason);
            return Tick::Stuck;
        }
        while let Some(index) = self.waiting.iter().position(is_overdue) {
            let Some(task) = self.waiting.remove(index) else { break };
            self.refuse(task, RefusalKind::NoMemory, &reason);
        }
        Tick::Stuck
    }

    /// The request at `index` ends.
    pub(super) fn finish(&mut self, index: usize, outcome: Outcome) {
        let mut task = self.running.remove(index);
        task.forget();
        match &outcome {
            Outcome::Finished => self.counts.finished += 1,
            Outcome::Failed(_) => self.counts.failed += 1,
            Outcome::Refused(_) => self.counts.refused += 1,
            Outcome::Cancelled => self.counts.cancelled += 1,
        }
        task.sink.done(outcome);
    }
}
