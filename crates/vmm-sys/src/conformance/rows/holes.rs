//! D-N10: set access over ranges with holes.
//!
//! A first run on a GPU found a hole between two mappings accepted, which an older measurement had
//! found refused. These layouts tell the shapes apart, and what each part can do afterwards.

use crate::error::DriverResult;
use crate::types::Location;

use super::super::bench::Bench;
use super::super::check::{Answers, answer};
use super::super::outcome::{Outcome, Step};
use super::super::row::Case;
use super::super::scratch::Scratch;
use super::access::says;

/// Mappings in a range of eight granules, and a call over some of them. Places and lengths are in
/// granules.
struct Layout {
    name: &'static str,
    pieces: &'static [(u64, u64)],
    call: (u64, u64),
}

const fn layout(name: &'static str, pieces: &'static [(u64, u64)], call: (u64, u64)) -> Layout {
    Layout { name, pieces, call }
}

/// Shapes of one kind, each kind in a process of its own.
pub(super) const N10_CASES: &[Case] = &[
    Case::any("holes between mappings"),
    Case::any("holes at the ends"),
    Case::any("halves"),
    Case::any("nothing reserved between"),
];

const BETWEEN: &[Layout] = &[
    layout("no hole", &[(0, 2), (2, 2)], (0, 4)),
    layout("one granule", &[(0, 2), (3, 2)], (0, 5)),
    layout("one granule between chunks of one", &[(0, 1), (2, 1)], (0, 3)),
    layout("four granules", &[(0, 1), (5, 1)], (0, 6)),
    layout("chunks of unlike sizes", &[(0, 1), (2, 4)], (0, 6)),
    layout("two holes", &[(0, 1), (2, 1), (4, 1)], (0, 5)),
];

const ENDS: &[Layout] = &[
    layout("at the start", &[(1, 2)], (0, 3)),
    layout("at the end", &[(0, 2)], (0, 3)),
    layout("at both ends", &[(1, 2)], (0, 4)),
    layout("at the start, and one between", &[(1, 1), (3, 1)], (0, 4)),
    layout("at the end, and one between", &[(0, 1), (2, 1)], (0, 4)),
    layout("nothing else, between two mappings", &[(0, 1), (3, 1)], (1, 2)),
    layout("nothing at all", &[], (0, 2)),
];

const HALVES: &[Layout] = &[
    layout("first half", &[(0, 2)], (0, 1)),
    layout("second half", &[(0, 2)], (1, 1)),
    layout("the middle", &[(0, 4)], (1, 2)),
    layout("half, then a whole one that touches", &[(0, 2), (2, 2)], (1, 3)),
    layout("whole, then half of one that touches", &[(0, 2), (2, 2)], (0, 3)),
    layout("half, a hole, a whole one", &[(0, 2), (3, 2)], (1, 4)),
    layout("whole, a hole, half", &[(0, 2), (3, 2)], (0, 4)),
];

/// D-N10: each layout, with what each part has after the call.
pub(super) fn d_n10(bench: &Bench) -> Outcome {
    bench.observe(|s| {
        let mut answers = Answers::default();
        let layouts = match bench.case() {
            0 => BETWEEN,
            1 => ENDS,
            2 => HALVES,
            _ => {
                nothing_reserved_between(s, &mut answers)?;
                &[]
            }
        };
        for layout in layouts {
            bench.say(layout.name);
            let address = s.range(8 * s.g())?;
            answers.note(layout.name, try_layout(s, address, layout)?);
            let freed = s.address_free(address, 8 * s.g());
            if freed.is_err() {
                answers.note("free the range", answer(&freed));
            }
        }
        answers.told()
    })
}

/// Maps the pieces, makes the call, and tells what each piece, and each hole, has then.
fn try_layout(s: &Scratch<'_>, address: u64, layout: &Layout) -> Step<String> {
    let (g, device) = (s.g(), s.device());
    for &(place, granules) in layout.pieces {
        let chunk = s.chunk(granules * g, device)?;
        s.map(address + place * g, granules * g, 0, chunk)?;
    }
    let (start, granules) = layout.call;
    let result = s.grant(address + start * g, granules * g, &[device]);
    let mut parts = Vec::new();
    for &(place, _) in layout.pieces {
        parts.push(format!("piece at {place} {}", state_at(s, address + place * g)));
    }
    let is_hole = |slot: &u64| {
        !layout.pieces.iter().any(|&(place, granules)| (place..place + granules).contains(slot))
    };
    for slot in (start..start + granules).filter(is_hole) {
        let chunk = s.chunk(g, device)?;
        let came = match s.map(address + slot * g, g, 0, chunk) {
            Ok(()) => state_at(s, address + slot * g),
            Err(error) => error.code().to_string(),
        };
        parts.push(format!("mapped into the hole at {slot} {came}"));
    }
    // Only what is mapped: that unmap minds no holes is the business of D-U2.
    let unmapped = unmap_all(s, address, layout);
    if unmapped.is_err() {
        parts.push(format!("unmap {}", answer(&unmapped)));
    }
    Ok(format!("{}; {}", answer(&result), parts.join(", ")))
}

fn unmap_all(s: &Scratch<'_>, address: u64, layout: &Layout) -> DriverResult<()> {
    let g = s.g();
    let covers = |slot: u64| {
        layout.pieces.iter().find(|&&(place, granules)| (place..place + granules).contains(&slot))
    };
    let mut slot = 0;
    while slot < 8 {
        let length = covers(slot).map_or(1, |&(_, granules)| granules);
        // An empty granule is unmapped too: that is no error.
        s.unmap(address + slot * g, length * g)?;
        slot += length;
    }
    Ok(())
}

/// What get access says there, and whether a copy agrees.
fn state_at(s: &Scratch<'_>, address: u64) -> String {
    let device = s.device();
    let copy = answer(&s.read(device, address, 64));
    format!("{}, copy {copy}", says(s, address, Location::Device(device)))
}

/// Two mappings in two ranges, with addresses between that belong to no range.
fn nothing_reserved_between(s: &Scratch<'_>, answers: &mut Answers) -> Step<()> {
    let (g, device) = (s.g(), s.device());
    let large = s.range(64 * g)?;
    s.address_free(large, 64 * g)?;
    let (low, high) = (large + 24 * g, large + 30 * g);
    let got = (s.address_reserve(2 * g, 0, low)?, s.address_reserve(2 * g, 0, high)?);
    answers.note("the hints were", if got == (low, high) { "kept" } else { "moved" });
    if got != (low, high) {
        return Ok(());
    }
    for address in [low, high] {
        let chunk = s.chunk(2 * g, device)?;
        s.map(address, 2 * g, 0, chunk)?;
    }
    answers.note("set access over all", answer(&s.grant(low, 8 * g, &[device])));
    answers.note("the first mapping", state_at(s, low));
    answers.note("the second mapping", state_at(s, high));
    answers.note("unmap of all", answer(&s.unmap(low, 8 * g)));
    answers.note("the first mapping then", state_at(s, low));
    Ok(())
}
