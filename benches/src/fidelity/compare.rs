//! Two records side by side.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use super::Row;

/// A difference that is no fault of the simulated device: the work's name begins so, the call's too.
struct Explained {
    work: &'static str,
    call: &'static str,
    why: &'static str,
}

const fn explained(work: &'static str, call: &'static str, why: &'static str) -> Explained {
    Explained { work, call, why }
}

const EXPLAINED: &[Explained] = &[
    explained(
        "",
        "cuCtx",
        "the real driver wants a context current; the simulated one is told the device",
    ),
    explained("", "cuDevicePrimaryCtx", "the same"),
    explained(
        "",
        "cuModule",
        "the kernels are loaded once a device; the simulated device knows them",
    ),
    explained(
        "",
        "cuThreadExchangeStreamCaptureMode",
        "twice more where kernels are loaded, and once for each look at events",
    ),
    explained(
        "tour",
        "cuEvent",
        "asked until the work is done, as often as it takes; its spare ones come and go with that",
    ),
    explained(
        "tour",
        "cuMemSetAccess",
        "a move swaps together what has been copied by then; the pool's thread has a part",
    ),
    explained("tour", "cuMemUnmap", "the same"),
    explained(
        "tour",
        "cuMemAddressFree",
        "the same: what is left over by one step goes in the next",
    ),
    explained("tour", "cuMemGetInfo", "the same"),
    explained("tour", "cuStreamGetCaptureInfo", "asked before an event is recorded"),
    explained("tour", "cuStreamWaitValue32", "only a use that begins while the copies run is held"),
];

/// The calls whose time is compared: those that map. Others wait for work, or take no time.
const TIMED: [&str; 7] = [
    "cuMemAddressReserve",
    "cuMemAddressFree",
    "cuMemCreate",
    "cuMemRelease",
    "cuMemMap",
    "cuMemUnmap",
    "cuMemSetAccess",
];
/// Less than that says nothing of a time.
const LEAST_US: f64 = 500.0;
/// How far a time may be off before the table says so. It fails nothing.
const NEAR: std::ops::RangeInclusive<f64> = 0.8..=1.2;

/// What came of a comparison.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Comparison {
    /// A table for people, in Markdown.
    pub text: String,
    /// Calls that differ, and nobody said why.
    pub unexplained: u64,
    /// Times that are further off than 20 %.
    pub far: u64,
}

fn timed_us(row: &Row) -> f64 {
    TIMED.iter().filter_map(|call| row.us.get(*call)).sum()
}

fn why(work: &str, call: &str) -> Option<&'static str> {
    let fits = |it: &&Explained| work.starts_with(it.work) && call.starts_with(it.call);
    EXPLAINED.iter().find(fits).map(|it| it.why)
}

/// Compares two records of the same work. A row that only one has is a difference.
pub fn compare(first: &[Row], second: &[Row]) -> Comparison {
    let mut all = Comparison::default();
    let names = first.iter().zip(second).next();
    let (one, two) = names.map_or(("first", "second"), |(a, b)| (&*a.driver, &*b.driver));
    // Writing to a string cannot fail.
    let _ = writeln!(all.text, "| work | calls | {one}, us | {two}, us | {two} / {one} |");
    let _ = writeln!(all.text, "|---|---|---|---|---|");
    let mut reasons = BTreeSet::new();
    let theirs: BTreeMap<&str, &Row> = second.iter().map(|row| (&*row.work, row)).collect();
    let ours: BTreeSet<&str> = first.iter().map(|row| &*row.work).collect();
    for row in first {
        match theirs.get(&*row.work) {
            Some(other) => pair(row, other, &mut all, &mut reasons),
            None => alone(&row.work, two, &mut all),
        }
    }
    for row in second.iter().filter(|row| !ours.contains(&*row.work)) {
        alone(&row.work, one, &mut all);
    }
    for (call, why) in reasons {
        let _ = writeln!(all.text, "\n{call}: {why}.");
    }
    let _ = writeln!(
        all.text,
        "\n{} calls differ and nobody said why; {} times are further off than 20 %",
        all.unexplained, all.far
    );
    all
}

fn alone(work: &str, lacking: &str, all: &mut Comparison) {
    all.unexplained += 1;
    let _ = writeln!(all.text, "| {work} | **not on {lacking}** | | | |");
}

fn pair<'a>(
    row: &'a Row,
    other: &'a Row,
    all: &mut Comparison,
    reasons: &mut BTreeSet<(&'a str, &'static str)>,
) {
    let calls: BTreeSet<&String> = row.calls.keys().chain(other.calls.keys()).collect();
    let of = |row: &Row, call: &str| row.calls.get(call).copied().unwrap_or(0);
    let mut differ = Vec::new();
    for call in calls {
        let (here, there) = (of(row, call), of(other, call));
        if here == there {
            continue;
        }
        match why(&row.work, call) {
            Some(why) => {
                reasons.insert((call, why));
            }
            None => differ.push(format!("**{call} {here}, {there}**")),
        }
    }
    all.unexplained += differ.len() as u64;
    if row.peak_held_bytes != other.peak_held_bytes {
        all.unexplained += 1;
        differ.push(format!("**held {}, {}**", row.peak_held_bytes, other.peak_held_bytes));
    }
    let says = if differ.is_empty() { "equal".to_owned() } else { differ.join("; ") };
    let (here, there) = (timed_us(row), timed_us(other));
    let ratio = there / here;
    let told = here.max(there) >= LEAST_US;
    if told && !NEAR.contains(&ratio) {
        all.far += 1;
    }
    let ratio = if told { format!("{ratio:.2}") } else { String::new() };
    let work = &row.work;
    let _ = writeln!(all.text, "| {work} | {says} | {here:.0} | {there:.0} | {ratio} |");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(work: &str, calls: &[(&str, u64, f64)]) -> Row {
        Row {
            work: work.to_owned(),
            driver: "sim".to_owned(),
            calls: calls.iter().map(|(call, count, _)| ((*call).to_owned(), *count)).collect(),
            us: calls.iter().map(|(call, _, us)| ((*call).to_owned(), *us)).collect(),
            peak_held_bytes: 5,
        }
    }

    #[test]
    fn equal_records_are_equal_and_times_are_only_told() {
        let one = [row("replay", &[("cuMemMap", 3, 1000.0)])];
        let two = [row("replay", &[("cuMemMap", 3, 1500.0), ("cuCtxSetCurrent", 9, 1.0)])];
        let both = compare(&one, &two);
        assert_eq!((both.unexplained, both.far), (0, 1), "{}", both.text);
        assert!(both.text.contains("| equal | 1000 | 1500 | 1.50 |"), "{}", both.text);
        assert!(both.text.contains("cuCtxSetCurrent: the real driver"), "{}", both.text);
    }

    #[test]
    fn a_call_more_a_row_less_and_other_memory_are_differences() {
        let one = [row("replay", &[("cuMemMap", 3, 1.0)]), row("kv", &[])];
        let mut other = row("replay", &[("cuMemMap", 4, 1.0), ("cuEventQuery", 1, 1.0)]);
        other.peak_held_bytes = 6;
        let both = compare(&one, &[other]);
        assert_eq!(both.unexplained, 4, "{}", both.text);
        let tour = |count| [row("tour, move", &[("cuEventQuery", count, 1.0)])];
        assert_eq!(compare(&tour(1), &tour(8)).unexplained, 0);
    }
}
