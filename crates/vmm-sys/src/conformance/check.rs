//! The few comparisons that rows are made of; each says what was expected and what came.

use std::fmt::{Debug, Display};

use crate::error::{DriverResult, ResultCode};

use super::outcome::{Step, Stop};

/// The call must fail with `code`.
pub(crate) fn refused<T: Debug>(
    what: impl Display,
    result: DriverResult<T>,
    code: ResultCode,
) -> Step<()> {
    match result {
        Err(error) if error.code() == code => Ok(()),
        Err(error) => Err(Stop::Failed(format!("{what}: expected {code}, but {error}"))),
        Ok(value) => Err(Stop::Failed(format!("{what}: expected {code}, but it gave {value:?}"))),
    }
}

/// The call must succeed; `what` says which of many it is.
pub(crate) fn granted<T>(what: impl Display, result: DriverResult<T>) -> Step<T> {
    result.map_err(|error| Stop::Failed(format!("{what}: expected success, but {error}")))
}

/// Two values must be equal.
pub(crate) fn same<T: PartialEq + Debug>(what: impl Display, got: T, expected: T) -> Step<()> {
    ensure(got == expected, || format!("{what}: expected {expected:?}, got {got:?}"))
}

/// A byte count must be within `tolerance` of `expected`.
pub(crate) fn near(what: impl Display, got: u64, expected: u64, tolerance: u64) -> Step<()> {
    ensure(got.abs_diff(expected) <= tolerance, || {
        format!("{what}: expected {expected} bytes within {tolerance}, got {got}")
    })
}

/// A condition must hold; `what` says what was expected and what came.
pub(crate) fn ensure(holds: bool, what: impl FnOnce() -> String) -> Step<()> {
    if holds { Ok(()) } else { Err(Stop::Failed(what())) }
}

/// The row's state cannot be made here.
pub(crate) fn skip<T>(why: impl Into<String>) -> Step<T> {
    Err(Stop::Skipped(why.into()))
}

/// The code of a result in the words of a report.
pub(crate) fn answer<T>(result: &DriverResult<T>) -> String {
    match result {
        Ok(_) => "OK".to_owned(),
        Err(error) => error.code().to_string(),
    }
}

/// What came of many questions, a line each. Every wrong answer is told and not the first alone: a
/// run on a GPU is rare.
#[derive(Debug, Default)]
pub(crate) struct Answers {
    lines: Vec<String>,
    wrong: Vec<String>,
}

impl Answers {
    /// A question whose answer is not known.
    pub(crate) fn note(&mut self, what: impl Display, came: impl Display) {
        self.lines.push(format!("{what}: {came}"));
    }

    /// A question whose answer is known, in the words of [`answer`] or a row's own.
    pub(crate) fn expect(&mut self, what: impl Display, came: impl Display, expected: &str) {
        let came = came.to_string();
        if came != expected {
            self.wrong.push(format!("{what}: expected {expected}, got {came}"));
        }
        self.note(what, came);
    }

    /// All lines; a failure that lists the wrong ones if there are any.
    pub(crate) fn told(self) -> Step<String> {
        if self.wrong.is_empty() {
            Ok(self.lines.join("\n"))
        } else {
            Err(Stop::Failed(self.wrong.join("\n")))
        }
    }

    /// The same, and a failure lists the right ones too: where one step explains another.
    pub(crate) fn told_in_full(self) -> Step<String> {
        let all = self.lines.join("\n");
        self.told().map_err(|stop| match stop {
            Stop::Failed(wrong) => Stop::Failed(format!("{wrong}\nall answers:\n{all}")),
            skipped @ Stop::Skipped(_) => skipped,
        })
    }
}

/// `value`, `value + 1`, … as the bytes of 32-bit words: what `ProbeKernel::FillWords` writes.
pub(crate) fn pattern(words: u64, value: u32) -> Vec<u8> {
    // Truncation is the kernel's own rule: the words count up wrapping.
    (0..words).flat_map(|index| value.wrapping_add(index as u32).to_le_bytes()).collect()
}

/// The first byte in which `got` differs from `expected`.
pub(crate) fn same_bytes(what: impl Display, got: &[u8], expected: &[u8]) -> Step<()> {
    same(format_args!("{what}: length"), got.len(), expected.len())?;
    match got.iter().zip(expected).position(|(left, right)| left != right) {
        None => Ok(()),
        Some(at) => Err(Stop::Failed(format!(
            "{what}: byte {at} of {}: expected {:#04x}, got {:#04x}",
            got.len(),
            expected[at],
            got[at]
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::Call;
    use crate::error::DriverError;

    fn failure(code: ResultCode) -> DriverResult<u32> {
        Err(DriverError::new(Call::MemMap, code))
    }

    #[test]
    fn a_refusal_needs_the_very_code() {
        let expected = ResultCode::INVALID_VALUE;
        assert!(refused("map", failure(expected), expected).is_ok());
        for wrong in [failure(ResultCode::NOT_SUPPORTED), Ok(7)] {
            let Err(Stop::Failed(text)) = refused("map at 3", wrong, expected) else {
                panic!("a wrong answer went through");
            };
            assert!(text.contains("map at 3") && text.contains("CUDA_ERROR_INVALID_VALUE"));
        }
    }

    #[test]
    fn many_questions_tell_every_wrong_answer() {
        let mut answers = Answers::default();
        answers.note("open", 7);
        answers.expect("first", "OK", "OK");
        assert_eq!(Answers::told(answers), Ok("open: 7\nfirst: OK".into()));
        let mut answers = Answers::default();
        for (what, came) in [("first", "no"), ("second", "OK"), ("third", "9")] {
            answers.expect(what, came, "OK");
        }
        let wrong = "first: expected OK, got no\nthird: expected OK, got 9";
        assert_eq!(answers.told(), Err(Stop::Failed(wrong.into())));
    }

    #[test]
    fn a_failure_told_in_full_lists_the_right_answers_too() {
        let told = |came| {
            let mut answers = Answers::default();
            answers.expect("first", came, "OK");
            answers.note("second", 7);
            answers.told_in_full()
        };
        assert_eq!(told("OK"), Ok("first: OK\nsecond: 7".into()));
        let text = "first: expected OK, got no\nall answers:\nfirst: no\nsecond: 7";
        assert_eq!(told("no"), Err(Stop::Failed(text.into())));
    }

    #[test]
    fn bytes_are_compared_to_the_last() {
        let expected = pattern(3, u32::MAX);
        assert_eq!(expected, [255, 255, 255, 255, 0, 0, 0, 0, 1, 0, 0, 0]);
        assert!(same_bytes("words", &expected, &expected).is_ok());
        let mut wrong = expected.clone();
        wrong[11] = 9;
        let Err(Stop::Failed(text)) = same_bytes("words", &wrong, &expected) else {
            panic!("a wrong byte went through");
        };
        assert!(text.contains("byte 11 of 12: expected 0x00, got 0x09"), "{text}");
        assert!(same_bytes("words", &expected[1..], &expected).is_err());
    }

    #[test]
    fn nearness_is_two_sided() {
        assert!(near("free", 90, 100, 10).is_ok() && near("free", 110, 100, 10).is_ok());
        assert!(near("free", 89, 100, 10).is_err() && near("free", 111, 100, 10).is_err());
    }
}
