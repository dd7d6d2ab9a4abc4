//! What a row answers, and how rows stop early.

use std::fmt;

use crate::error::DriverError;

/// Begins the line that hands an outcome over.
const MARK: &str = "outcome: ";

/// What came of one row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The driver did what the table says; the text adds numbers worth reading, and may be empty.
    Passed(String),
    /// The table says nothing yet: the text is what came. Neither a pass nor a failure.
    Observed(String),
    /// What was expected, what came, and from which call.
    Failed(String),
    /// Why the row could not be run here.
    Skipped(String),
}

impl Outcome {
    /// One word: `passed`, `observed`, `failed` or `skipped`.
    pub fn word(&self) -> &'static str {
        match self {
            Outcome::Passed(_) => "passed",
            Outcome::Observed(_) => "observed",
            Outcome::Failed(_) => "failed",
            Outcome::Skipped(_) => "skipped",
        }
    }

    /// The text that goes with the word.
    pub fn text(&self) -> &str {
        match self {
            Outcome::Passed(text)
            | Outcome::Observed(text)
            | Outcome::Failed(text)
            | Outcome::Skipped(text) => text,
        }
    }

    /// The form in which a child process hands its outcome to its parent: a line with the word,
    /// then the text. Other lines may come before.
    pub fn encode(&self) -> String {
        format!("{MARK}{}\n{}", self.word(), self.text())
    }

    /// Reads [`Outcome::encode`]'s form; `None` if the child did not get that far.
    pub fn decode(said: &str) -> Option<Outcome> {
        let at = if said.starts_with(MARK) { 0 } else { said.rfind(&format!("\n{MARK}"))? + 1 };
        let (word, text) = said[at + MARK.len()..].split_once('\n')?;
        let text = text.to_owned();
        match word {
            "passed" => Some(Outcome::Passed(text)),
            "observed" => Some(Outcome::Observed(text)),
            "failed" => Some(Outcome::Failed(text)),
            "skipped" => Some(Outcome::Skipped(text)),
            _ => None,
        }
    }

    /// One outcome for the cases of a row: the worst that came, with every case's text.
    pub(crate) fn of_cases(cases: Vec<(&'static str, Outcome)>) -> Outcome {
        let lines = cases.iter().any(|(_, outcome)| outcome.text().contains('\n'));
        let (before, between) = if lines { (":\n", "\n") } else { (": ", "; ") };
        let mut text = Vec::new();
        for (name, outcome) in &cases {
            match (name.is_empty(), outcome.text()) {
                (true, part) => text.push(part.to_owned()),
                (false, "") => text.push(format!("{name}: {}", outcome.word())),
                (false, part) => text.push(format!("{name}: {}{before}{part}", outcome.word())),
            }
        }
        let text = text.join(between);
        let has = |word: &str| cases.iter().any(|(_, outcome)| outcome.word() == word);
        // A row with one case left out has still been checked by the others; its text says so.
        if has("failed") {
            Outcome::Failed(text)
        } else if has("passed") {
            Outcome::Passed(text)
        } else if has("observed") {
            Outcome::Observed(text)
        } else {
            Outcome::Skipped(text)
        }
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())?;
        if !self.text().is_empty() {
            write!(f, ": {}", self.text())?;
        }
        Ok(())
    }
}

/// Why a row's body ended before its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Stop {
    /// The driver did not do what the table says.
    Failed(String),
    /// The state that the row is about cannot be made here.
    Skipped(String),
}

impl From<Stop> for Outcome {
    fn from(stop: Stop) -> Outcome {
        match stop {
            Stop::Failed(text) => Outcome::Failed(text),
            Stop::Skipped(reason) => Outcome::Skipped(reason),
        }
    }
}

impl From<DriverError> for Stop {
    /// A call that should have succeeded did not: the error names call, code and numbers.
    fn from(error: DriverError) -> Stop {
        Stop::Failed(format!("expected success, but {error}"))
    }
}

impl From<std::io::Error> for Stop {
    /// Trouble beside the driver: a pipe, a socket, another process.
    fn from(error: std::io::Error) -> Stop {
        Stop::Failed(format!("outside the driver: {error}"))
    }
}

/// The result of a step of a row.
pub(crate) type Step<T> = Result<T, Stop>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outcomes_survive_the_way_from_child_to_parent() {
        for outcome in [
            Outcome::Passed(String::new()),
            Outcome::Observed("two\nlines".into()),
            Outcome::Failed("expected a, got b".into()),
            Outcome::Skipped("one device".into()),
        ] {
            let said = format!("making stream 3\n{}", outcome.encode());
            assert_eq!(Outcome::decode(&outcome.encode()).as_ref(), Some(&outcome));
            assert_eq!(Outcome::decode(&said), Some(outcome));
        }
        assert_eq!(Outcome::decode("thread 'main' panicked"), None);
        assert_eq!(Outcome::decode("outcome: nonsense\ntext"), None);
        assert_eq!(Outcome::decode("passed\n"), None);
    }

    #[test]
    fn one_failed_case_fails_the_row_and_a_left_out_case_shows() {
        let passed = || ("a", Outcome::Passed(String::new()));
        let failed = Outcome::of_cases(vec![passed(), ("b", Outcome::Failed("x".into()))]);
        assert_eq!(failed, Outcome::Failed("a: passed; b: failed: x".into()));
        let partly = Outcome::of_cases(vec![passed(), ("b", Outcome::Skipped("no GPU".into()))]);
        assert_eq!(partly, Outcome::Passed("a: passed; b: skipped: no GPU".into()));
        let long = Outcome::of_cases(vec![passed(), ("b", Outcome::Passed("1\n2".into()))]);
        assert_eq!(long, Outcome::Passed("a: passed\nb: passed:\n1\n2".into()));
        let single = Outcome::of_cases(vec![("", Outcome::Skipped("why".into()))]);
        assert_eq!(single, Outcome::Skipped("why".into()));
    }
}
