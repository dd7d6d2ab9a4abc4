//! [`Row`]: what came of one run; and rows as a table.

use serde::Serialize;

use super::args::Growth;
use crate::cache::Form;

/// What came of one run. Times in microseconds, measured on a GPU and modelled on the simulated device.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// `sim` or `cuda`.
    pub driver: &'static str,
    /// The model.
    pub model: String,
    /// The form of cache.
    pub form: Form,
    /// Whether memory grew.
    pub growth: Growth,
    /// The pool's limit on the device.
    pub memory_bytes: u64,
    /// What the second device lent at most.
    pub lend_bytes: u64,
    /// Most requests that ran at once.
    pub peak_running: u64,
    /// Answered tokens a second.
    pub tokens_per_s: f64,
    /// Steps.
    pub steps: u64,
    /// Mean time of a step.
    pub step_mean_us: f64,
    /// Half of all steps took at most this.
    pub step_p50_us: u64,
    /// 99 of 100.
    pub step_p99_us: u64,
    /// 999 of 1000.
    pub step_p999_us: u64,
    /// All.
    pub step_max_us: u64,
    /// What steps waited for admission and growth, in all.
    pub growth_us: f64,
    /// Requests that were given all tokens.
    pub finished: u64,
    /// Requests that were refused.
    pub refused: u64,
    /// Requests that failed.
    pub failed: u64,
    /// Answers with other tokens than there should be.
    pub wrong: u64,
    /// Sequences that were parked on the host.
    pub parked: u64,
    /// Sequences whose memory was dropped and written anew.
    pub dropped: u64,
    /// Tokens that were answered.
    pub answered_tokens: u64,
    /// Most memory of the cache, wherever it lies: what is borrowed, and parked on the host, included.
    pub peak_committed_bytes: u64,
    /// Most memory that was borrowed.
    pub peak_borrowed_bytes: u64,
    /// Growths ahead of need.
    pub growths_ahead: u64,
    /// Growths that somebody waited for.
    pub growths_waited: u64,
    /// From the first request to the last answer, in seconds of the clock.
    pub elapsed_s: f64,
}

const HEAD: [&str; 15] = [
    "form",
    "growth",
    "lent GiB",
    "peak running",
    "tokens/s",
    "mean us",
    "p50 us",
    "p99 us",
    "p99.9 us",
    "of it memory",
    "refused",
    "parked",
    "dropped",
    "peak GiB",
    "growths",
];

/// Rows under a head, in columns.
pub fn table(rows: &[Row]) -> String {
    let gib = |bytes: u64| format!("{:.2}", bytes as f64 / f64::from(1 << 30));
    let name = |value: &dyn std::fmt::Debug| format!("{value:?}").to_lowercase();
    let cells = |row: &Row| -> [String; 15] {
        [
            name(&row.form),
            name(&row.growth),
            gib(row.lend_bytes),
            row.peak_running.to_string(),
            format!("{:.0}", row.tokens_per_s),
            format!("{:.0}", row.step_mean_us),
            row.step_p50_us.to_string(),
            row.step_p99_us.to_string(),
            row.step_p999_us.to_string(),
            format!("{:.0}", row.growth_us / (row.steps.max(1) as f64)),
            row.refused.to_string(),
            row.parked.to_string(),
            row.dropped.to_string(),
            gib(row.peak_committed_bytes),
            (row.growths_ahead + row.growths_waited).to_string(),
        ]
    };
    let mut lines = vec![HEAD.map(str::to_owned)];
    lines.extend(rows.iter().map(cells));
    let width = |column: usize| lines.iter().map(|line| line[column].len()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..HEAD.len()).map(width).collect();
    let mut text = String::new();
    for line in &lines {
        let padded = line.iter().zip(&widths).map(|(cell, width)| format!("{cell:>width$}"));
        text.push_str(&padded.collect::<Vec<_>>().join("  "));
        text.push('\n');
    }
    text
}
