//! What is recorded, and the table for people.

use std::fmt;

use serde::Serialize;
use vmm_pool_cli::replay::Cause;
use vmm_pool_cli::report::aligned;

use super::Ground;
use crate::samples::Spread;
use crate::timed::Side;

/// What is asked of every side.
#[derive(Clone, Debug)]
pub struct Case {
    /// In words.
    pub name: String,
    /// How much memory it is about.
    pub bytes: u64,
    /// The length of the chunks; 0 where there are none.
    pub chunk_bytes: u64,
}

impl Case {
    /// So many bytes, in chunks.
    pub fn in_chunks(bytes: u64, chunk_bytes: u64) -> Case {
        let name = format!("{} in chunks of {}", in_words(bytes), in_words(chunk_bytes));
        Case { name, bytes, chunk_bytes }
    }

    /// The same, of which something special is asked.
    #[must_use]
    pub fn but(mut self, what: &str) -> Case {
        self.name = format!("{}, {what}", self.name);
        self
    }
}

/// A number of bytes, with the largest unit that divides it.
pub(super) fn in_words(bytes: u64) -> String {
    let units = [(30, "GiB"), (20, "MiB"), (10, "KiB")];
    let whole = units.iter().find(|(shift, _)| bytes != 0 && bytes.is_multiple_of(1 << shift));
    whole.map_or(format!("{bytes} B"), |(shift, unit)| format!("{} {unit}", bytes >> shift))
}

/// One side of one case.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// `move`, `grant`, `bandwidth`, `sleep`.
    pub part: &'static str,
    /// What every side was asked.
    pub case: String,
    /// Who did it, and which piece of it.
    pub side: &'static str,
    /// How much memory it was about.
    pub bytes: u64,
    /// The length of the chunks; 0 where there are none.
    pub chunk_bytes: u64,
    /// How often (count).
    pub repetitions: u32,
    /// `measured` on a GPU. On the simulated device `modelled`: of the host's calls alone, as work of
    /// the GPU takes no time there.
    pub time: &'static str,
    /// Of one repetition.
    pub us: Spread,
    /// Bytes through the median, where bytes were moved; none on the simulated device.
    pub gb_s: Option<f64>,
    /// The side of this case that the ratio is to.
    pub reference: Option<&'static str>,
    /// This median through the reference's.
    pub ratio: Option<f64>,
    /// Of one repetition.
    pub calls: String,
}

/// The rows of one part.
#[derive(Debug)]
pub struct Rows {
    part: &'static str,
    is_gpu: bool,
    moves_bytes: bool,
    repetitions: u32,
    rows: Vec<Row>,
}

impl Rows {
    /// None yet, of a part whose times are those of the host's calls.
    pub fn of_calls(ground: &Ground, part: &'static str, repetitions: u32) -> Rows {
        let is_gpu = ground.is_gpu();
        Rows { part, is_gpu, moves_bytes: false, repetitions, rows: Vec::new() }
    }

    /// None yet, of a part whose times are those of work on the GPU. Such work takes no time on the
    /// simulated device, so that nothing can be compared there.
    pub fn of_work(ground: &Ground, part: &'static str, repetitions: u32) -> Rows {
        Rows { moves_bytes: true, ..Rows::of_calls(ground, part, repetitions) }
    }

    /// How often each side is run.
    pub fn repetitions(&self) -> u32 {
        self.repetitions
    }

    /// Adds what was found for one case. Each side's ratio is to the one that `reference` names,
    /// which stands before it.
    ///
    /// # Errors
    /// A side without repetitions.
    pub fn add(
        &mut self,
        case: &Case,
        found: Vec<(&'static str, Side)>,
        reference: impl Fn(&str) -> Option<&'static str>,
    ) -> Result<(), Cause> {
        for (side, samples) in found {
            let (us, calls) = samples.figures()?;
            let median_of = |name: &str| {
                let of = |row: &&Row| row.case == case.name && row.side == name;
                self.rows.iter().find(of).map(|row| row.us.median)
            };
            let compare = self.is_gpu || !self.moves_bytes;
            let to = reference(side).filter(|_| compare);
            let to = to.and_then(|name| Some((name, median_of(name)?)));
            let (reference, ratio) = to.map(|(name, median)| (name, us.median / median)).unzip();
            self.rows.push(Row {
                part: self.part,
                case: case.name.clone(),
                side,
                bytes: case.bytes,
                chunk_bytes: case.chunk_bytes,
                repetitions: self.repetitions,
                time: if self.is_gpu { "measured" } else { "modelled" },
                us,
                gb_s: (self.is_gpu && self.moves_bytes)
                    .then(|| case.bytes as f64 / us.median / 1e3),
                reference,
                ratio,
                calls,
            });
        }
        Ok(())
    }

    /// What was added.
    pub fn into_rows(self) -> Vec<Row> {
        self.rows
    }
}

/// Rows for people, aligned.
#[derive(Debug)]
pub struct Table<'r>(pub &'r [Row]);

const HEADER: [&str; 8] =
    ["case", "side", "median us", "min", "max", "GB/s", "ratio", "driver calls"];

impl fmt::Display for Table<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut lines = vec![HEADER.map(str::to_owned)];
        lines.extend(self.0.iter().map(line_of));
        f.write_str(&aligned(&lines, |column| matches!(column, 0 | 1 | 7)))
    }
}

fn line_of(row: &Row) -> [String; HEADER.len()] {
    let us = |value: f64| format!("{value:.1}");
    [
        row.case.clone(),
        row.side.to_owned(),
        us(row.us.median),
        us(row.us.min),
        us(row.us.max),
        row.gb_s.map_or(String::new(), |gb_s| format!("{gb_s:.1}")),
        row.ratio.map_or(String::new(), |ratio| format!("{ratio:.3}")),
        row.calls.clone(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_told_in_the_largest_whole_unit() {
        for (bytes, words) in
            [(1 << 30, "1 GiB"), (48 << 20, "48 MiB"), (4096, "4 KiB"), (7, "7 B"), (0, "0 B")]
        {
            assert_eq!(in_words(bytes), words);
        }
        let case = Case::in_chunks(1 << 30, 32 << 20).but("dropped");
        assert_eq!(case.name, "1 GiB in chunks of 32 MiB, dropped");
    }
}
