//! Two records side by side.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use vmm_pool_cli::replay::Cause;

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

/// Why two tours differ in the calls that map.
const SWAPS: &str =
    "a move swaps together what has been copied by then; the pool's thread has a part";

const EXPLAINED: &[Explained] = &[
    explained(
        "",
        "cuCtx",
        "the real driver wants a context current; the simulated one is told the device",
    ),
    explained("", "cuDevicePrimaryCtx", "its contexts are the primary ones"),
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
        "kv",
        "cuEventQuery",
        "a fork's first write copies a chunk, and that move asks until it is done; a simulated copy is at once",
    ),
    explained(
        "tour, kv, paged",
        "cuMemCreate",
        "made anew if the pool's thread has not yet what the step before let go; two runs of one driver \
         differ as well",
    ),
    explained("tour, end", "cuMemRelease", "as many more as were made"),
    explained(
        "tour",
        "cuEvent",
        "asked until the work is done, as often as it takes; its spare ones come and go with that",
    ),
    explained("tour", "cuMemSetAccess", SWAPS),
    explained("tour", "cuMemUnmap", SWAPS),
    explained(
        "tour",
        "cuMemAddressFree",
        "what a move leaves over goes in this step or the next, when its work is done",
    ),
    explained(
        "tour",
        "cuMemGetInfo",
        "how much is free is asked when threads grow or give back, at their own time",
    ),
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
/// A mean of fewer calls says nothing.
const MANY: u64 = 100;
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
    TIMED.iter().filter_map(|call| row.us.get(*call)).fold(0.0, |sum, us| sum + us)
}

fn why(work: &str, call: &str) -> Option<&'static str> {
    let fits = |it: &&Explained| work.starts_with(it.work) && call.starts_with(it.call);
    EXPLAINED.iter().find(fits).map(|it| it.why)
}

/// Compares two records of the same work. A row that only one has is a difference.
///
/// # Errors
/// The records are of unlike machines: with more devices the tour is another.
pub fn compare(first: &[Row], second: &[Row]) -> Result<Comparison, Cause> {
    let devices = |rows: &[Row]| rows.iter().map(|row| row.devices).collect::<BTreeSet<_>>();
    let (here, there) = (devices(first), devices(second));
    if here != there || here.len() > 1 {
        return Err(format!(
            "devices of the first record: {here:?}, of the second: {there:?}; `fidelity run \
             --devices N` makes a record of N"
        )
        .into());
    }
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
    each_call(first, second, (one, two), &mut all.text);
    for (call, why) in reasons {
        let _ = writeln!(all.text, "\n{call}: {why}.");
    }
    let _ = writeln!(
        all.text,
        "\n{} calls differ and nobody said why; {} times are further off than 20 %",
        all.unexplained, all.far
    );
    Ok(all)
}

/// What one call takes, by the setting of the replays: the mean of all traces.
fn each_call(first: &[Row], second: &[Row], (one, two): (&str, &str), text: &mut String) {
    let mut sums: BTreeMap<(&str, &str), [(u64, f64); 2]> = BTreeMap::new();
    for (side, rows) in [first, second].into_iter().enumerate() {
        for row in rows {
            let replay = row.work.strip_prefix("replay ").and_then(|work| work.split_once(", "));
            let Some((_, setting)) = replay else { continue };
            for call in TIMED {
                let sum = &mut sums.entry((setting, call)).or_default()[side];
                sum.0 += row.calls.get(call).copied().unwrap_or(0);
                sum.1 += row.us.get(call).copied().unwrap_or(0.0);
            }
        }
    }
    let _ = writeln!(
        text,
        "\n| replays | call | calls | {one}, us each | {two}, us each | {two} / {one} |"
    );
    let _ = writeln!(text, "|---|---|---|---|---|---|");
    for ((setting, call), [(count, us), (other_count, other_us)]) in sums {
        if count.min(other_count) >= MANY {
            let (here, there) = (us / count as f64, other_us / other_count as f64);
            let ratio = there / here;
            let _ = writeln!(
                text,
                "| {setting} | {call} | {count} | {here:.2} | {there:.2} | {ratio:.2} |"
            );
        }
    }
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
    let (mut differ, mut explained) = (Vec::new(), 0);
    for call in calls {
        let (here, there) = (of(row, call), of(other, call));
        if here == there {
            continue;
        }
        match why(&row.work, call) {
            Some(why) => {
                explained += 1;
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
    let says = match (differ.is_empty(), explained) {
        (true, 0) => "equal".to_owned(),
        (true, count) => format!("equal but for {count} explained"),
        (false, _) => differ.join("; "),
    };
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
            devices: 1,
            calls: calls.iter().map(|(call, count, _)| ((*call).to_owned(), *count)).collect(),
            us: calls.iter().map(|(call, _, us)| ((*call).to_owned(), *us)).collect(),
            peak_held_bytes: 5,
        }
    }

    #[test]
    fn equal_records_are_equal_and_times_are_only_told() {
        let one = [row("replay", &[("cuMemMap", 3, 1000.0)])];
        let two = [row("replay", &[("cuMemMap", 3, 1500.0), ("cuCtxSetCurrent", 9, 1.0)])];
        let both = compare(&one, &two).unwrap();
        assert_eq!((both.unexplained, both.far), (0, 1), "{}", both.text);
        assert!(
            both.text.contains("| equal but for 1 explained | 1000 | 1500 | 1.50 |"),
            "{}",
            both.text
        );
        assert!(both.text.contains("cuCtxSetCurrent: the real driver"), "{}", both.text);
    }

    #[test]
    fn a_call_more_a_row_less_and_other_memory_are_differences() {
        let one = [row("replay", &[("cuMemMap", 3, 1.0)]), row("kv", &[])];
        let mut other = row("replay", &[("cuMemMap", 4, 1.0), ("cuEventQuery", 1, 1.0)]);
        other.peak_held_bytes = 6;
        let both = compare(&one, &[other]).unwrap();
        assert_eq!(both.unexplained, 4, "{}", both.text);
        let tour = |count| [row("tour, move", &[("cuEventQuery", count, 1.0)])];
        assert_eq!(compare(&tour(1), &tour(8)).unwrap().unexplained, 0);
    }

    #[test]
    fn what_a_call_takes_is_the_mean_of_all_traces_under_a_setting() {
        let of = |us| {
            [
                row("replay a, defaults, pass 1", &[("cuMemMap", 90, us)]),
                row("replay b, defaults, pass 1", &[("cuMemMap", 10, us), ("cuMemCreate", 99, us)]),
                row("kv, paged", &[("cuMemMap", 1000, us)]),
            ]
        };
        let text = compare(&of(100.0), &of(50.0)).unwrap().text;
        assert!(
            text.contains("| defaults, pass 1 | cuMemMap | 100 | 2.00 | 1.00 | 0.50 |"),
            "{text}"
        );
        assert!(!text.contains("pass 1 | cuMemCreate"), "too few: {text}");
    }

    #[test]
    fn looks_at_events_are_explained_and_more_memory_mapped_is_not() {
        let kv = |queries, maps| {
            [row("kv, contiguous", &[("cuEventQuery", queries, 1.0), ("cuMemMap", maps, 1.0)])]
        };
        assert_eq!(compare(&kv(77, 3), &kv(240, 3)).unwrap().unexplained, 0);
        assert_eq!(compare(&kv(77, 3), &kv(240, 4)).unwrap().unexplained, 1);
    }

    #[test]
    fn records_of_unlike_machines_are_not_compared() {
        let one = [row("replay", &[])];
        let two = [Row { devices: 2, ..row("replay", &[]) }];
        let refused = compare(&one, &two).unwrap_err().to_string();
        assert!(refused.contains("first record: {1}, of the second: {2}"), "{refused}");
        let mixed = [row("replay", &[]), Row { devices: 2, ..row("kv", &[]) }];
        assert!(compare(&one, &mixed).is_err());
    }
}
