//! The commands, and how they end.

pub(crate) mod doctor;
pub(crate) mod replay;
pub(crate) mod serve;
pub(crate) mod status;
pub(crate) mod tour;
pub(crate) mod tour_peer;

use std::fmt::Display;
use std::io;
use std::process::ExitCode;

/// Why a command did not end well.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The work itself failed. Exit code 1.
    Failed(String),
    /// Bad usage, bad input, or no driver to work with: nothing was begun. Exit code 2.
    Refused(String),
    /// Whoever read the output is gone, as in `… | head`. Not our error.
    ReaderGone,
}

impl Failure {
    pub(crate) fn failed(why: impl Display) -> Failure {
        Failure::Failed(why.to_string())
    }

    pub(crate) fn refused(why: impl Display) -> Failure {
        Failure::Refused(why.to_string())
    }

    /// Says it on stderr.
    pub(crate) fn report(self) -> ExitCode {
        let (message, code) = match self {
            Failure::Failed(message) => (message, 1),
            Failure::Refused(message) => (message, 2),
            Failure::ReaderGone => return ExitCode::SUCCESS,
        };
        say(format_args!("error: {message}"));
        ExitCode::from(code)
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Failure {
        match error.kind() {
            io::ErrorKind::BrokenPipe => Failure::ReaderGone,
            _ => Failure::failed(format_args!("cannot write the output: {error}")),
        }
    }
}

/// A line on stderr. `eprintln!` would panic where stderr is closed.
pub(crate) fn say(message: impl Display) {
    use io::Write;
    let _ = writeln!(io::stderr(), "{message}");
}
