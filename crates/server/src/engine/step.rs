//! One step: who is in it, memory for its tokens, the device's work, and what follows from it.

use super::task::{Outcome, Task};
use super::{Engine, StepFigures};
use crate::backend::{Batch, SequenceStep, StepDone};
use crate::model::VOCABULARY;
use crate::pattern::next_token;

/// What one request does in a step.
#[derive(Clone, Copy, Debug)]
struct Part {
    /// In the list of those that run.
    index: usize,
    /// How many of its tokens are in memory afterwards.
    written: usize,
    /// The check of these.
    expected: u32,
}

impl Part {
    fn step<'a>(&self, task: &'a Task, place: u64) -> SequenceStep<'a> {
        SequenceStep {
            place,
            tokens: task.tokens.get(..self.written).unwrap_or(&task.tokens),
            new_from: task.written,
            expected: self.expected,
            whole: self.written + 1 == task.end_tokens,
        }
    }
}

impl Engine {
    /// Does one step, which admission began. `None` if no request has memory.
    pub(super) fn step(&mut self, begun_us: f64) -> Option<StepFigures> {
        let parts = self.plan();
        if parts.is_empty() {
            return None;
        }
        let growth_us = self.clock.now_us() - begun_us;
        let done = match self.execute(&parts) {
            Ok(done) => done,
            Err(reason) => {
                tracing::error!(reason, "a step failed");
                for part in parts.iter().rev() {
                    self.finish(part.index, Outcome::Failed(reason.clone()));
                }
                return Some(StepFigures { sequences: parts.len(), ..StepFigures::default() });
            }
        };
        if done.is_modelled {
            self.clock.pass(done.step_us);
        }
        let mut figures = StepFigures {
            step_us: growth_us + done.step_us,
            growth_us,
            sequences: parts.len(),
            ..StepFigures::default()
        };
        // From the last to the first: who ends leaves the list.
        for (part, check) in parts.iter().zip(&done.checks).rev() {
            self.settle(part, *check, &mut figures);
        }
        self.counts.steps += 1;
        Some(figures)
    }

    /// Who is in the step: one token of each that answers, and so many of prompts, the oldest first.
    /// Memory for all of these tokens is there then.
    fn plan(&mut self) -> Vec<Part> {
        let mut prefill_left = self.settings.prefill_tokens.max(1);
        let mut parts = Vec::with_capacity(self.running.len());
        let mut index = 0;
        while let Some(task) = self.running.get(index) {
            let number = task.number;
            let new = match task.unwritten() {
                _ if task.is_parked || !task.has_begun() => 0,
                1 => 1,
                many => many.min(prefill_left),
            };
            if new == 0 || !self.has_memory(index, task.written + new) {
                // Who lost its memory, or failed, is not there any more.
                let is_there = self.running.get(index).is_some_and(|it| it.number == number);
                index += usize::from(is_there);
                continue;
            }
            let Some(task) = self.running.get(index) else { break };
            if task.unwritten() > 1 {
                prefill_left -= new;
            }
            let added = (task.written as u32..).zip(&task.tokens[task.written..task.written + new]);
            let expected = added.fold(task.check, |check: u32, (position, id)| {
                check.wrapping_add(self.pattern.contribution(*id, position))
            });
            parts.push(Part { index, written: task.written + new, expected });
            index += 1;
        }
        parts
    }

    /// Makes sure that the request at `index` has memory for so many tokens. If there is none, the
    /// youngest that runs gives way, at last itself: false then.
    fn has_memory(&mut self, index: usize, tokens: usize) -> bool {
        loop {
            let Some(task) = self.running.get_mut(index) else { return false };
            let Some(sequence) = &mut task.sequence else { return false };
            let missing = (tokens as u64).saturating_sub(sequence.tokens());
            if missing == 0 {
                return true;
            }
            let error = match sequence.append(missing) {
                Ok(()) => return true,
                Err(error) => error,
            };
            if !error.is_shortage() {
                self.finish(index, Outcome::Failed(error.to_string()));
                return false;
            }
            let youngest = self.running.iter().rposition(|task| !task.is_parked);
            let youngest = youngest.map_or(index, |youngest| youngest.max(index));
            tracing::debug!(%error, youngest, index, "memory is short: preempting");
            self.preempt(youngest);
            if youngest == index {
                return false;
            }
        }
    }

    /// Has the backend do the work.
    fn execute(&mut self, parts: &[Part]) -> Result<StepDone, String> {
        let tasks = || parts.iter().filter_map(|part| self.running.get(part.index));
        let tokens = parts.iter().map(|part| part.written as u64).sum();
        let sequences = tasks().filter_map(|task| task.sequence.as_ref());
        self.cache.lay_out(sequences).map_err(|error| error.to_string())?;
        let read = self.cache.read_bytes(tokens);
        let tasks = parts.iter().filter_map(|part| self.running.get(part.index));
        let placed = parts.iter().zip(tasks).zip(self.cache.places());
        let steps: Vec<SequenceStep<'_>> =
            placed.map(|((part, task), place)| part.step(task, *place)).collect();
        let using = self.cache.use_now().map_err(|error| error.to_string())?;
        let weights =
            self.weights.use_on(self.cache.stream()).map_err(|error| error.to_string())?;
        let done = self.backend.step(&Batch {
            buffer: self.cache.buffer(),
            stream: self.cache.stream(),
            layout: self.cache.layout(),
            sequences: &steps,
            read,
            weights: self.weights.to_stream(),
        });
        drop((using, weights));
        let done = done.map_err(|error| error.to_string())?;
        match done.checks.len() == parts.len() {
            true => Ok(done),
            false => Err(format!(
                "the backend gave {} checks: expected {}",
                done.checks.len(),
                parts.len()
            )),
        }
    }

    /// What follows for one request: a token more, its end, or that its memory is wrong.
    fn settle(&mut self, part: &Part, check: u32, figures: &mut StepFigures) {
        let Some(task) = self.running.get_mut(part.index) else { return };
        let of_prompt = task.prompt_tokens.saturating_sub(task.written);
        let new = part.written - task.written;
        figures.written_tokens += new;
        self.counts.prompt_tokens += new.min(of_prompt) as u64;
        if check != part.expected {
            self.counts.mismatches += 1;
            let reason = format!(
                "{} tokens of KV memory read as {check:#010x}: expected {:#010x}",
                part.written, part.expected
            );
            tracing::error!(reason);
            self.finish(part.index, Outcome::Failed(reason));
            return;
        }
        (task.written, task.check) = (part.written, check);
        if task.unwritten() > 0 {
            return;
        }
        // Below 2^32: the longest context is.
        let id = next_token(check, (part.written - 1) as u32, VOCABULARY);
        task.tokens.push(id);
        task.sink.token(id);
        self.counts.answered_tokens += 1;
        figures.answered_tokens += 1;
        if task.tokens.len() >= task.end_tokens {
            self.finish(part.index, Outcome::Finished);
        }
    }
}
