//! What runs did, counted, so that the generator cannot stop doing something unseen.

use std::collections::BTreeMap;
use std::fmt;

use crate::actor::OPERATIONS;
use crate::faults::{CALLS, CODES};

/// How an operation came out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Done,
    /// As it may be: for want of memory, in use, asleep.
    Refused,
    /// By a call that was made to fail.
    Failed,
}

/// Things that are only worth something if they happen.
pub(crate) const FEATURES: &[&str] = &[
    "blocks compared",
    "blocks used by a second stream",
    "blocks used by another device",
    "blocks freed by another actor",
    "blocks compared by the host",
    "plain addresses",
    "requests that waited for held streams",
    "slots compared",
    "slots compared after a move",
    "slots compared after a sleep",
    "slots compared at a borrowed place",
    "slots compared on the host",
    "slots written at two addresses",
    "slots compared by another process",
    "buffers slept while they borrowed",
    "graphs that write slots",
    "graphs launched after a move",
    "graph memory compared",
    "tokens compared",
    "contexts lost",
    "guards held over other work",
    "driver calls slowed down",
    "checks of everything",
    "background threads",
    "guard mode",
    "tight machines",
    "modelled time",
];

#[derive(Clone, Debug, Default)]
pub(crate) struct Coverage {
    pub(crate) runs: u64,
    operations: BTreeMap<&'static str, [u64; 3]>,
    features: BTreeMap<&'static str, u64>,
    faults: BTreeMap<(&'static str, &'static str), u64>,
}

impl Coverage {
    pub(crate) fn operation(&mut self, name: &'static str, outcome: Outcome) {
        self.operations.entry(name).or_default()[outcome as usize] += 1;
    }

    pub(crate) fn feature(&mut self, name: &'static str) {
        debug_assert!(FEATURES.contains(&name), "{name}");
        *self.features.entry(name).or_default() += 1;
    }

    pub(crate) fn fault(&mut self, call: &'static str, code: &'static str, times: u64) {
        *self.faults.entry((call, code)).or_default() += times;
    }

    pub(crate) fn add(&mut self, other: &Coverage) {
        self.runs += other.runs;
        for (name, counts) in &other.operations {
            let mine = self.operations.entry(name).or_default();
            mine.iter_mut().zip(counts).for_each(|(mine, more)| *mine += more);
        }
        for (name, count) in &other.features {
            *self.features.entry(name).or_default() += count;
        }
        for (name, count) in &other.faults {
            *self.faults.entry(*name).or_default() += count;
        }
    }

    /// What was done less often than `least` times.
    pub(crate) fn missing(&self, least: u64) -> Vec<String> {
        let mut missing = Vec::new();
        for name in OPERATIONS.iter().map(|(_, name)| *name) {
            let done = self.operations.get(name).map_or(0, |counts| counts[0]);
            if done < least {
                missing.push(format!("{name}: done {done} times"));
            }
        }
        for name in FEATURES {
            let seen = self.features.get(name).copied().unwrap_or(0);
            if seen < least {
                missing.push(format!("{name}: {seen}"));
            }
        }
        let sum = |wanted: &dyn Fn(&(&'static str, &'static str)) -> bool| -> u64 {
            self.faults.iter().filter(|(key, _)| wanted(key)).map(|(_, count)| count).sum()
        };
        for (_, call) in CALLS {
            let fired = sum(&|(name, _)| *name == call.name());
            if fired < least {
                missing.push(format!("{call} was failed {fired} times"));
            }
        }
        for code in CODES {
            let fired = sum(&|(_, name)| Some(*name) == code.name());
            if fired < least {
                missing.push(format!("{code} was answered {fired} times"));
            }
        }
        missing
    }
}

impl fmt::Display for Coverage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:<32} {:>9} {:>9} {:>9}", "operation", "done", "refused", "failed")?;
        for (name, [done, refused, failed]) in &self.operations {
            writeln!(f, "{name:<32} {done:>9} {refused:>9} {failed:>9}")?;
        }
        writeln!(f, "seen")?;
        for name in FEATURES {
            writeln!(f, "  {name:<40} {:>9}", self.features.get(name).copied().unwrap_or(0))?;
        }
        writeln!(f, "calls that failed, by code")?;
        let mut last = "";
        for ((call, code), count) in &self.faults {
            let shown = if *call == last { "" } else { call };
            writeln!(f, "  {shown:<38} {code:<32} {count:>9}")?;
            last = call;
        }
        Ok(())
    }
}
