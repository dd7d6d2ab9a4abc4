//! What a step says, and how long it took.

use std::fmt;
use std::time::Instant;

use serde::Serialize;
use vmm_sys::DriverError;
use vmm_sys::sim::Sim;

use super::Plan;
use super::stage::{Stage, StepResult};

/// How a step came out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// It did what it should.
    Ok,
    /// The machine cannot do that.
    LeftOut,
    /// It did not.
    Failed,
}

/// One step. Displayed as a line for people, serialised as an object for programs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Telling {
    /// Its name.
    pub step: String,
    /// How it came out.
    pub outcome: Outcome,
    /// What it did, why it was left out, or what was expected and what was found.
    pub text: String,
    /// How long it took, in microseconds.
    pub us: u64,
    /// Whether that is time of the simulated device: what its calls and copies cost on an H200.
    pub modelled: bool,
}

impl fmt::Display for Telling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let status = match self.outcome {
            Outcome::Ok => "ok",
            Outcome::LeftOut => "left out",
            Outcome::Failed => "FAIL",
        };
        write!(f, "{status:<8}  {}: {}", self.step, self.text)?;
        if self.outcome == Outcome::LeftOut {
            return Ok(());
        }
        let ms = self.us as f64 / 1000.0;
        write!(f, " ({ms:.2} ms{})", if self.modelled { ", modelled" } else { "" })
    }
}

/// What a step that went well has to say.
#[derive(Debug)]
pub(super) enum Told {
    Done(String),
    LeftOut(String),
}

/// Why a step failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum Trouble {
    #[error("the pool refused: {0}")]
    Pool(#[from] vmm_pool::Error),
    #[error("the cache refused: {0}")]
    Kv(#[from] vmm_kv::KvError),
    #[error("sharing failed: {0}")]
    Share(#[from] vmm_share::ShareError),
    #[error("the driver refused: {0}")]
    Driver(#[from] DriverError),
    #[error("{0}")]
    Wrong(String),
}

impl Trouble {
    pub(super) fn wrong(text: impl Into<String>) -> Trouble {
        Trouble::Wrong(text.into())
    }
}

/// That something holds, or what was expected and what was found.
pub(super) fn expect(
    holds: bool,
    expected: impl fmt::Display,
    found: impl fmt::Debug,
) -> Result<(), Trouble> {
    match holds {
        true => Ok(()),
        false => Err(Trouble::Wrong(format!("expected {expected}, found {found:?}"))),
    }
}

/// Times the steps and tells them.
pub(super) struct Teller<'a> {
    plan: &'a Plan,
    tell: &'a mut dyn FnMut(&Telling),
    begun: Moment,
    done: u64,
    left_out: Vec<String>,
}

/// A moment, in real time and on the simulated device's clock if that is what counts.
#[derive(Clone, Copy)]
pub(super) struct Moment {
    real: Instant,
    modelled_ns: u64,
}

impl Moment {
    pub(super) fn now(sim: Option<&Sim>) -> Moment {
        Moment { real: Instant::now(), modelled_ns: sim.map_or(0, Sim::now_ns) }
    }

    /// Microseconds since then.
    pub(super) fn elapsed_us(&self, sim: Option<&Sim>) -> u64 {
        match sim {
            Some(sim) => (sim.now_ns() - self.modelled_ns) / 1000,
            None => self.real.elapsed().as_micros() as u64, // fits for ages
        }
    }
}

impl<'a> Teller<'a> {
    pub(super) fn new(plan: &'a Plan, tell: &'a mut dyn FnMut(&Telling)) -> Teller<'a> {
        let begun = Moment::now(plan.sim.as_deref());
        Teller { plan, tell, begun, done: 0, left_out: Vec::new() }
    }

    /// The first step; what it made, if it went well.
    pub(super) fn build(
        &mut self,
        name: &str,
        work: impl FnOnce() -> Result<(Stage, String), Trouble>,
    ) -> Option<Stage> {
        let mut made = None;
        self.step(name, || {
            let (stage, text) = work()?;
            made = Some(stage);
            Ok(Told::Done(text))
        });
        made
    }

    /// Any other step. Whether the story goes on.
    pub(super) fn step(&mut self, name: &str, work: impl FnOnce() -> StepResult) -> bool {
        let begun = Moment::now(self.plan.sim.as_deref());
        let (outcome, text) = match work() {
            Ok(Told::Done(text)) => (Outcome::Ok, text),
            Ok(Told::LeftOut(why)) => (Outcome::LeftOut, why),
            Err(trouble) => (Outcome::Failed, trouble.to_string()),
        };
        match outcome {
            Outcome::Ok => self.done += 1,
            Outcome::LeftOut => self.left_out.push(name.to_owned()),
            Outcome::Failed => {}
        }
        self.say(name, outcome, text, begun);
        outcome != Outcome::Failed
    }

    /// The last line.
    pub(super) fn sum_up(mut self, well: bool) -> bool {
        let done = self.done;
        let mut text = match well {
            true => format!("{done} steps done, every byte checked"),
            false => format!("{done} steps done before the one that failed"),
        };
        if !self.left_out.is_empty() {
            text += &format!("; left out: {}", self.left_out.join("; "));
        }
        let outcome = if well { Outcome::Ok } else { Outcome::Failed };
        let begun = self.begun;
        self.say("tour", outcome, text, begun);
        well
    }

    fn say(&mut self, step: &str, outcome: Outcome, text: String, begun: Moment) {
        let us = begun.elapsed_us(self.plan.sim.as_deref());
        let modelled = self.plan.sim.is_some();
        (self.tell)(&Telling { step: step.to_owned(), outcome, text, us, modelled });
    }
}

/// Bytes for people.
pub(super) fn mib(bytes: u64) -> String {
    format!("{} MiB", bytes as f64 / f64::from(1 << 20))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_is_a_line_that_says_whose_time_it_is() {
        let telling = |outcome, modelled| {
            let (step, text) = ("grow".to_owned(), "it grew".to_owned());
            Telling { step, outcome, text, us: 1500, modelled }.to_string()
        };
        assert_eq!(telling(Outcome::Ok, true), "ok        grow: it grew (1.50 ms, modelled)");
        assert_eq!(telling(Outcome::Failed, false), "FAIL      grow: it grew (1.50 ms)");
        assert_eq!(telling(Outcome::LeftOut, false), "left out  grow: it grew");
    }
}
