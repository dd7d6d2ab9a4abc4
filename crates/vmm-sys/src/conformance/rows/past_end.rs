//! D-N9, D-N17: mapping past the end of a range.
//!
//! A first run on a GPU found a chunk mapped across the end of a range, which an older measurement
//! had found refused. These cases tell what lies behind the end, by three questions that do not
//! depend on each other: what maps there, what a reservation with that hint gives, and what the
//! process has mapped there for the host.

use std::fmt::Write as _;

use crate::error::DriverResult;
use crate::types::ChunkHandle;

use super::super::bench::Bench;
use super::super::check::{Answers, answer};
use super::super::outcome::Outcome;
use super::super::row::Case;
use super::super::scratch::Scratch;
use super::reserve::try_hint;

/// What else is reserved, each in a process of its own.
pub(super) const N9_CASES: &[Case] = &[
    Case::any("one small range, nothing else"),
    Case::any("one range of 512 granules, nothing else"),
    Case::any("within addresses that were a range of 256 granules"),
    Case::any("across the end, neighbour reserved and then freed"),
    Case::any("as in the first run: two ranges, the second freed"),
    Case::any("the same, after all addresses were reserved and freed"),
];

/// D-N9: which addresses around a range take a mapping.
pub(super) fn d_n9(bench: &Bench) -> Outcome {
    bench.observe(|s| {
        let mut answers = Answers::default();
        match bench.case() {
            0 => sweep_around(s, s.range(4 * s.g())?, 4, &mut answers)?,
            1 => sweep_around(s, s.range(512 * s.g())?, 512, &mut answers)?,
            2 => {
                let large = s.range(256 * s.g())?;
                s.address_free(large, 256 * s.g())?;
                let hint = large + 128 * s.g();
                let address = s.address_reserve(4 * s.g(), 0, hint)?;
                answers.note("the hint was", if address == hint { "kept" } else { "moved" });
                sweep_around(s, address, 4, &mut answers)?;
            }
            3 => freed_neighbour(s, &mut answers)?,
            4 => first_run(s, &mut answers)?,
            _ => {
                let all: Vec<u64> = (0..64).map_while(|_| s.range(4 << 40).ok()).collect();
                all.iter().try_for_each(|&address| s.address_free(address, 4 << 40))?;
                answers.note("ranges of 4 TiB reserved and freed", all.len());
                first_run(s, &mut answers)?;
            }
        }
        answers.told()
    })
}

/// D-N17: the same in the suite's own process, where every other row has left its traces.
pub(super) fn d_n17(bench: &Bench) -> Outcome {
    bench.observe(|s| {
        let mut answers = Answers::default();
        first_run(s, &mut answers)?;
        sweep_around(s, s.range(4 * s.g())?, 4, &mut answers)?;
        answers.told()
    })
}

/// Maps at every granule around a range, asks for the same places by hints, and maps once more: a
/// freed reservation may leave something behind.
fn sweep_around(
    s: &Scratch<'_>,
    address: u64,
    granules: i64,
    answers: &mut Answers,
) -> DriverResult<()> {
    let g = s.g();
    let chunk = s.chunk(g, s.device())?;
    let wide = s.chunk(2 * g, s.device())?;
    let at = |n: i64| address.wrapping_add_signed(n * g as i64);
    let places = -16..granules + 64;
    answers.note("host mappings", host_mappings(s, at(-16), at(granules + 64)));
    let across = try_map(s, at(granules - 1), 2 * g, wide);
    answers.note("two granules across the end", across);
    answers.note("two granules across the start", try_map(s, at(-1), 2 * g, wide));
    let mapped = || places.clone().map(|n| try_map(s, at(n), g, chunk)).collect::<Vec<_>>();
    answers.note("one granule at n", runs(-16, mapped()));
    let hints: DriverResult<Vec<_>> =
        places.clone().map(|n| Ok(try_hint(s, g, 0, at(n))?.to_owned())).collect();
    answers.note("a hint at n", runs(-16, hints?));
    answers.note("one granule at n, again", runs(-16, mapped()));
    Ok(())
}

/// A chunk across the seam of two ranges, then with the second one freed.
fn freed_neighbour(s: &Scratch<'_>, answers: &mut Answers) -> DriverResult<()> {
    let (g, bytes) = (s.g(), 4 * s.g());
    let chunk = s.chunk(2 * g, s.device())?;
    let first = s.range(bytes)?;
    let seam = first + bytes;
    answers.note("across the end, before", try_map(s, seam - g, 2 * g, chunk));
    let second = s.address_reserve(bytes, 0, seam)?;
    answers.note("the neighbour's hint was", if second == seam { "kept" } else { "moved" });
    answers.note("across the seam", try_map(s, seam - g, 2 * g, chunk));
    s.address_free(second, bytes)?;
    answers.note("the neighbour freed: across the end", try_map(s, seam - g, 2 * g, chunk));
    answers.note("wholly in what was freed", try_map(s, second + g, 2 * g, chunk));
    answers.note("host mappings", host_mappings(s, first, seam + bytes));
    Ok(())
}

/// The steps of the row that came out otherwise than expected, one by one.
fn first_run(s: &Scratch<'_>, answers: &mut Answers) -> DriverResult<()> {
    let (g, bytes) = (s.g(), 4 * s.g());
    let address = s.range(bytes)?;
    let freed = s.range(bytes)?;
    let distance = (freed as i64).wrapping_sub(address as i64) / g as i64;
    answers.note("the second range is, in granules from the first", distance);
    s.address_free(freed, bytes)?;
    let chunk = s.chunk(2 * g, s.device())?;
    answers.note("4 KiB off", try_map(s, address + g / 512, 2 * g, chunk));
    answers.note("across the end", try_map(s, address + bytes - g, 2 * g, chunk));
    answers.note("in the range that was freed", try_map(s, freed, 2 * g, chunk));
    answers.note("in the first pages", try_map(s, 4 * g, 2 * g, chunk));
    // What such a mapping is good for: access, and a copy in the part that is of the range.
    let place = address + bytes - g;
    let mapped = s.map(place, 2 * g, 0, chunk);
    answers.note("across the end, again", answer(&mapped));
    if mapped.is_ok() {
        let device = s.device();
        answers.note("set access there", answer(&s.grant(place, 2 * g, &[device])));
        let found = s.driver().address_range(device, place + g);
        answers.note("address range there", format!("{found:x?}"));
        answers.note("copy to its first half", answer(&s.write(device, place, &[1; 64])));
        answers.note("free the range under it", answer(&s.address_free(address, bytes)));
        answers.note("unmap there", answer(&s.unmap(place, 2 * g)));
    }
    answers.note("host mappings", host_mappings(s, address - bytes, address + 2 * bytes));
    Ok(())
}

/// Maps and unmaps; the answer of the map, and of an unmap that failed.
fn try_map(s: &Scratch<'_>, address: u64, bytes: u64, chunk: ChunkHandle) -> String {
    let mapped = s.map(address, bytes, 0, chunk);
    match mapped.is_ok().then(|| s.unmap(address, bytes)) {
        Some(unmapped @ Err(_)) => format!("OK, then unmap {}", answer(&unmapped)),
        _ => answer(&mapped),
    }
}

/// Answers of places in a row, equal neighbours together: `-16..=-1 no, 0..=3 yes`.
fn runs(first: i64, answers: Vec<String>) -> String {
    let mut text = String::new();
    let mut begin = 0;
    for (index, answer) in answers.iter().enumerate() {
        if answers.get(index + 1) == Some(answer) {
            continue;
        }
        let comma = if begin > 0 { ", " } else { "" };
        let (from, to) = (first + begin as i64, first + index as i64);
        // Writing to a string cannot fail.
        let _ = write!(text, "{comma}{from}..={to} {answer}");
        begin = index + 1;
    }
    text
}

/// What the process has mapped between two addresses: the driver keeps its own addresses there.
fn host_mappings(s: &Scratch<'_>, from: u64, to: u64) -> String {
    const LINES_MAX: usize = 12;
    let maps = match std::fs::read_to_string("/proc/self/maps") {
        Ok(maps) => maps,
        Err(error) => return error.to_string(),
    };
    let overlaps = |line: &&str| {
        let number = |text: &str| u64::from_str_radix(text, 16).ok();
        let (start, end) = line.split_once(' ')?.0.split_once('-')?;
        Some(number(start)? < to && number(end)? > from)
    };
    let found: Vec<&str> = maps.lines().filter(|line| overlaps(line) == Some(true)).collect();
    let shown = found.iter().take(LINES_MAX).copied().collect::<Vec<_>>().join(" | ");
    format!("{} between {from:#x} and {to:#x} (granule {:#x}): {shown}", found.len(), s.g())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_neighbours_are_told_together() {
        let answers = |text: &str| text.chars().map(String::from).collect();
        assert_eq!(runs(-2, answers("aabba")), "-2..=-1 a, 0..=1 b, 2..=2 a");
        assert_eq!(runs(0, Vec::new()), "");
    }
}
