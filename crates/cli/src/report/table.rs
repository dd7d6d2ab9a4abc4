//! The table for people, with the legend that says what each figure is.

use std::fmt;

use super::{DriverCalls, Row};

/// All rows of a replay, aligned, with a summary over several traces.
#[derive(Debug)]
pub struct Table<'r>(pub &'r [Row]);

const HEADER: [&str; 19] = [
    "trace",
    "allocator",
    "pass",
    "ops",
    "mean ns",
    "median",
    "p99",
    "max us",
    "live MiB",
    "held MiB",
    "ratio",
    "create",
    "map",
    "access",
    "unmap",
    "release",
    "reserve/free",
    "other",
    "driver ms",
];

/// Cells in columns, a line a row: words to the left, numbers to the right.
pub fn aligned<const N: usize>(lines: &[[String; N]], is_words: fn(usize) -> bool) -> String {
    let width = |column: usize| lines.iter().map(|line| line[column].chars().count()).max();
    let width: [usize; N] = std::array::from_fn(|column| width(column).unwrap_or(0));
    let mut text = String::new();
    for line in lines {
        let cells =
            line.iter().zip(width).enumerate().map(|(column, (cell, width))| {
                match is_words(column) {
                    true => format!("{cell:<width$}"),
                    false => format!("{cell:>width$}"),
                }
            });
        text.push_str(cells.collect::<Vec<_>>().join("  ").trim_end());
        text.push('\n');
    }
    text
}

type Line = [String; HEADER.len()];

impl fmt::Display for Table<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut lines: Vec<Line> = vec![HEADER.map(str::to_owned)];
        lines.extend(self.0.iter().map(row_line));
        lines.extend(self.summary());
        f.write_str(&aligned(&lines, |column| column < 2))?;
        self.legend(f)
    }
}

impl Table<'_> {
    /// One line an allocator and pass, if there are several traces: geometric means of ratios and
    /// times, sums of calls.
    fn summary(&self) -> Vec<Line> {
        let mut groups: Vec<(&str, u32, Vec<&Row>)> = Vec::new();
        for row in self.0 {
            let key = (row.setting.allocator, row.pass);
            match groups.iter_mut().find(|group| (group.0, group.1) == key) {
                Some(group) => group.2.push(row),
                None => groups.push((key.0, key.1, vec![row])),
            }
        }
        groups
            .iter()
            .filter(|(_, _, rows)| rows.len() > 1)
            .map(|(allocator, pass, rows)| group_line(allocator, *pass, rows))
            .collect()
    }

    fn legend(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let has = |test: fn(&Row) -> bool| self.0.iter().any(test);
        writeln!(f)?;
        writeln!(
            f,
            "mean: host time of an operation over a whole pass without a clock inside, driver \
             calls excluded."
        )?;
        if has(|row| row.setting.placement.is_none()) {
            writeln!(
                f,
                "      For cudaMalloc and cudaMallocAsync the driver call is the operation: it is \
                 included,\n      and held is what the driver says is taken, asked every 1024 \
                 operations and at the peak."
            )?;
        }
        writeln!(
            f,
            "median, p99 (ns), max (us): single operations of a second run of the same passes, \
             driver calls included."
        )?;
        writeln!(
            f,
            "live: what the trace asks for; held: physical memory taken; ratio = held / live, at \
             their peaks."
        )?;
        if has(|row| row.driver_time == "modelled") {
            writeln!(
                f,
                "driver, on sim: MODELLED (calls counted exactly, each charged what it was measured to \
                 cost on an H200);\n      host times are measured, here."
            )?;
        }
        if has(|row| row.driver_time == "measured") {
            writeln!(f, "driver, on a GPU: measured, like the host times.")?;
        }
        Ok(())
    }
}

fn row_line(row: &Row) -> Line {
    let calls = call_cells(&row.driver_calls);
    line(
        [
            row.trace.clone(),
            row.setting.allocator.to_owned(),
            row.pass.to_string(),
            row.ops.to_string(),
            format!("{:.1}", row.mean_ns),
            row.median_ns.to_string(),
            row.p99_ns.to_string(),
            format!("{:.1}", row.max_us),
            mib(row.peak_live_bytes),
            mib(row.peak_held_bytes),
            format!("{:.4}", row.ratio),
        ],
        calls,
        row.driver_us,
    )
}

fn group_line(allocator: &str, pass: u32, rows: &[&Row]) -> Line {
    let mut calls = DriverCalls::default();
    for row in rows {
        calls.add(&row.driver_calls);
    }
    let mean = |of: fn(&Row) -> f64| geometric_mean(rows.iter().map(|row| of(row)));
    line(
        [
            format!("geometric mean of {}", rows.len()),
            allocator.to_owned(),
            pass.to_string(),
            rows.iter().map(|row| row.ops).sum::<usize>().to_string(),
            format!("{:.1}", mean(|row| row.mean_ns)),
            format!("{:.0}", mean(|row| row.median_ns as f64)),
            format!("{:.0}", mean(|row| row.p99_ns as f64)),
            format!("{:.1}", rows.iter().map(|row| row.max_us).fold(0.0, f64::max)),
            String::new(),
            String::new(),
            format!("{:.4}", mean(|row| row.ratio)),
        ],
        call_cells(&calls),
        rows.iter().map(|row| row.driver_us).sum(),
    )
}

/// Left part, calls, driver time.
fn line(left: [String; 11], calls: [String; 7], driver_us: f64) -> Line {
    let mut cells = left.into_iter().chain(calls).chain([format!("{:.2}", driver_us / 1e3)]);
    // 11 + 7 + 1 cells, as many as the header has.
    std::array::from_fn(|_| cells.next().unwrap_or_default())
}

fn call_cells(calls: &DriverCalls) -> [String; 7] {
    let [create, map, set_access, unmap, release, reserve, address_free, other] = calls.columns();
    [
        create.to_string(),
        map.to_string(),
        set_access.to_string(),
        unmap.to_string(),
        release.to_string(),
        format!("{reserve}/{address_free}"),
        other.to_string(),
    ]
}

fn mib(bytes: u64) -> String {
    format!("{:.1}", bytes as f64 / f64::from(1 << 20))
}

/// Of values that are not negative; 0 if one is 0 or there is none.
fn geometric_mean(values: impl Iterator<Item = f64>) -> f64 {
    let (mut logs, mut count) = (0.0, 0.0);
    for value in values {
        logs += value.ln();
        count += 1.0;
    }
    if count == 0.0 { 0.0 } else { (logs / count).exp() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let lines = [["µs", "of"], ["7", "what"], ["1200", ""]].map(|line| line.map(str::to_owned));
        assert_eq!(aligned(&lines, |column| column == 1), "  µs  of\n   7  what\n1200\n");
    }

    #[test]
    fn a_geometric_mean_is_one_of_ratios() {
        assert!((geometric_mean([1.0, 4.0].into_iter()) - 2.0).abs() < 1e-12);
        assert_eq!(geometric_mean([0.0, 4.0].into_iter()), 0.0);
        assert_eq!(geometric_mean([].into_iter()), 0.0);
    }
}
