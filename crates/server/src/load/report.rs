//! [`LoadReport`]: what came of a load, as a table.

use std::fmt;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;

/// What came of a load.
#[derive(Clone, Debug)]
pub struct LoadReport {
    /// Requests that were made.
    pub asked: u64,
    /// Requests whose answers came whole.
    pub done: u64,
    /// Requests that the server had no room for.
    pub refused: u64,
    /// Requests that failed.
    pub failed: u64,
    /// Answers with other tokens than there should be.
    pub wrong: u64,
    /// Tokens that came.
    pub tokens: u64,
    /// From the first request to the last answer.
    pub elapsed: Duration,
    /// The reason of the first failure.
    pub first_failure: Option<String>,
    first_token_us: Histogram<u64>,
    token_us: Histogram<u64>,
}

/// The longest time that is told apart, in microseconds: an hour.
const LONGEST_US: u64 = 3_600_000_000;

impl Default for LoadReport {
    fn default() -> LoadReport {
        LoadReport {
            asked: 0,
            done: 0,
            refused: 0,
            failed: 0,
            wrong: 0,
            tokens: 0,
            elapsed: Duration::ZERO,
            first_failure: None,
            first_token_us: histogram(),
            token_us: histogram(),
        }
    }
}

/// Of times in microseconds, to three digits.
fn histogram() -> Histogram<u64> {
    // Fails only for bounds or digits out of range, which these constants are not.
    #[expect(clippy::unwrap_used)]
    Histogram::new_with_bounds(1, LONGEST_US, 3).unwrap()
}

impl LoadReport {
    /// Whether every answer was right and nothing failed; refusals are no failures.
    pub fn is_good(&self) -> bool {
        self.wrong == 0 && self.failed == 0
    }

    pub(super) fn fail(&mut self, reason: String) {
        self.failed += 1;
        self.first_failure.get_or_insert(reason);
    }

    /// When the request was made, and when each token came.
    pub(super) fn time(&mut self, times: &[Instant]) {
        for (index, pair) in times.windows(2).enumerate() {
            let [before, after] = pair else { continue };
            let us = u64::try_from((*after - *before).as_micros()).unwrap_or(LONGEST_US);
            match index {
                0 => self.first_token_us.saturating_record(us.max(1)),
                _ => self.token_us.saturating_record(us.max(1)),
            }
        }
    }

    /// Tokens a second.
    pub fn tokens_per_s(&self) -> f64 {
        self.tokens as f64 / self.elapsed.as_secs_f64().max(1e-9)
    }
}

impl fmt::Display for LoadReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = |of: &Histogram<u64>, quantile| of.value_at_quantile(quantile) as f64 / 1000.0;
        writeln!(f, "requests         {:>12}", self.asked)?;
        writeln!(f, "  done           {:>12}", self.done)?;
        writeln!(f, "  refused        {:>12}", self.refused)?;
        writeln!(f, "  failed         {:>12}", self.failed)?;
        writeln!(f, "wrong answers    {:>12}", self.wrong)?;
        writeln!(f, "tokens           {:>12}", self.tokens)?;
        writeln!(f, "tokens a second  {:>12.1}", self.tokens_per_s())?;
        for (name, of) in [("first token", &self.first_token_us), ("next tokens", &self.token_us)] {
            writeln!(f, "{name}, ms  p50 {:>9.3}   p99 {:>9.3}", ms(of, 0.5), ms(of, 0.99))?;
        }
        if let Some(reason) = &self.first_failure {
            writeln!(f, "first failure: {reason}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_told_apart_by_first_and_next_tokens() {
        let mut report = LoadReport::default();
        let begun = Instant::now();
        let at = |ms| begun + Duration::from_millis(ms);
        report.time(&[at(0), at(40), at(42), at(44)]);
        report.time(&[at(0)]);
        report.tokens = 3;
        report.elapsed = Duration::from_millis(500);
        let text = report.to_string();
        let shows = |name: &str, ms: f64| {
            let line = text.lines().find(|line| line.starts_with(name)).unwrap();
            let found: f64 = line.split_whitespace().last().unwrap().parse().unwrap();
            assert!((found - ms).abs() < 0.05, "{line}");
        };
        shows("first token", 40.0);
        shows("next tokens", 2.0);
        shows("tokens a second", 6.0);
        assert!(report.is_good());
        report.fail("why".to_owned());
        assert!(!report.is_good() && report.to_string().contains("first failure: why"));
    }
}
