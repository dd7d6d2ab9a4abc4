//! Running many rows, and what came of them.

use std::fmt::{self, Write as _};
use std::time::{Duration, Instant};

use super::bench::Bench;
use super::outcome::Outcome;
use super::row::Row;
use super::rows::ROWS;

/// What a run tells while it goes on.
#[derive(Debug)]
pub enum Progress<'a> {
    /// A row begins: said before, so that a row that hangs has a name.
    Begins(&'a Row),
    /// A row has ended.
    Ended(&'a RowReport),
}

/// What came of one row.
#[derive(Clone, Debug)]
pub struct RowReport {
    /// Its id: `D-R1`.
    pub id: &'static str,
    /// What the driver is expected to do.
    pub title: &'static str,
    /// What came.
    pub outcome: Outcome,
    /// How long it took.
    pub took: Duration,
}

/// What came of all rows that were run. Its `Display` ends in `N passed, N failed, N skipped`.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// One entry a row, in the order of the table.
    pub rows: Vec<RowReport>,
}

/// Runs the rows that `filter` selects: all for an empty one, the row of that name (`d_r1`,
/// `D-R1`), or all rows whose name starts with it (`d_r`).
pub fn run_all(bench: &Bench, filter: &str, tell: &mut dyn FnMut(Progress<'_>)) -> Report {
    let mut report = Report::default();
    for row in select(filter) {
        tell(Progress::Begins(row));
        let begin = Instant::now();
        let outcome = bench.run(row);
        let row = RowReport { id: row.id, title: row.title, outcome, took: begin.elapsed() };
        tell(Progress::Ended(&row));
        report.rows.push(row);
    }
    report
}

/// The rows that a filter names.
pub fn select(filter: &str) -> Vec<&'static Row> {
    let filter = filter.to_lowercase().replace('-', "_");
    let exact: Vec<_> = ROWS.iter().filter(|row| row.name() == filter).collect();
    if exact.is_empty() {
        ROWS.iter().filter(|row| row.name().starts_with(&filter)).collect()
    } else {
        exact
    }
}

impl Report {
    /// How many rows came out as `word` ([`Outcome::word`]).
    pub fn count(&self, word: &str) -> usize {
        self.rows.iter().filter(|row| row.outcome.word() == word).count()
    }

    /// Whether no row failed, and any was run at all.
    pub fn is_good(&self) -> bool {
        !self.rows.is_empty() && self.count("failed") == 0
    }

    /// One JSON object a line: `id`, `title`, `outcome`, `text`, `ms`.
    pub fn to_json_lines(&self) -> String {
        self.rows.iter().fold(String::new(), |mut lines, row| {
            // Writing to a string cannot fail.
            let _ = writeln!(
                lines,
                r#"{{"id":{},"title":{},"outcome":{},"text":{},"ms":{:.3}}}"#,
                quoted(row.id),
                quoted(row.title),
                quoted(row.outcome.word()),
                quoted(row.outcome.text()),
                row.took.as_secs_f64() * 1e3,
            );
            lines
        })
    }
}

impl fmt::Display for RowReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = self.took.as_millis();
        write!(f, "{:<6} {:<8} {} [{ms} ms]", self.id, self.outcome.word(), self.title)?;
        match self.outcome.text() {
            "" => Ok(()),
            text => write!(f, "\n       {}", text.replace('\n', "\n       ")),
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for word in ["skipped", "failed"] {
            for row in self.rows.iter().filter(|row| row.outcome.word() == word) {
                writeln!(f, "{row}")?;
            }
        }
        let count = |word| self.count(word);
        let observed = self.rows.iter().filter(|row| row.outcome.word() == "observed");
        let observed: Vec<_> = observed.map(|row| row.id).collect();
        if !observed.is_empty() {
            let (count, names) = (observed.len(), observed.join(", "));
            writeln!(f, "{count} observed (no answer is known yet, they cannot fail): {names}")?;
        }
        write!(
            f,
            "{} passed, {} failed, {} skipped",
            count("passed"),
            count("failed"),
            count("skipped")
        )
    }
}

/// A JSON string.
fn quoted(text: &str) -> String {
    let mut quoted = String::with_capacity(text.len() + 2);
    quoted.push('"');
    for character in text.chars() {
        match character {
            '"' => quoted.push_str("\\\""),
            '\\' => quoted.push_str("\\\\"),
            '\n' => quoted.push_str("\\n"),
            control if control < ' ' => {
                // Writing to a string cannot fail.
                let _ = write!(quoted, "\\u{:04x}", u32::from(control));
            }
            other => quoted.push(other),
        }
    }
    quoted.push('"');
    quoted
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> Report {
        let row = |id, outcome| RowReport { id, title: "t", outcome, took: Duration::ZERO };
        Report {
            rows: vec![
                row("D-R1", Outcome::Passed(String::new())),
                row("D-R2", Outcome::Skipped("one \"device\"\n".into())),
                row("D-N1", Outcome::Observed("1 us".into())),
            ],
        }
    }

    #[test]
    fn skips_are_listed_with_reasons_and_the_last_line_counts() {
        let text = report().to_string();
        assert!(text.contains("D-R2   skipped") && text.contains("one \"device\""), "{text}");
        assert!(text.contains("1 observed"), "{text}");
        assert!(text.ends_with("1 passed, 0 failed, 1 skipped"), "{text}");
        assert!(report().is_good() && !Report::default().is_good());
    }

    #[test]
    fn json_is_one_escaped_object_a_line() {
        let lines = report().to_json_lines();
        assert_eq!(lines.lines().count(), 3);
        let expected =
            r#"{"id":"D-R2","title":"t","outcome":"skipped","text":"one \"device\"\n","ms":0.000}"#;
        assert_eq!(lines.lines().nth(1), Some(expected));
        assert_eq!(quoted("\u{1}\\"), r#""\u0001\\""#);
    }

    #[test]
    fn a_filter_is_a_name_or_the_start_of_names() {
        let names = |filter| select(filter).iter().map(|row| row.name()).collect::<Vec<_>>();
        assert_eq!(names("D-R1"), ["d_r1"]);
        assert_eq!(names("d_n1"), ["d_n1"]);
        assert!(names("d_r").len() > 2 && names("d_r").iter().all(|name| name.starts_with("d_r")));
        assert_eq!(names("").len(), ROWS.len());
        assert!(names("d_zz").is_empty());
    }
}
