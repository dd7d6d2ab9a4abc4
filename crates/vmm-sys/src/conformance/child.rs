//! One case of a row in a process of its own, for rows that break a context or end the process.

use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use super::outcome::Outcome;
use super::row::{Row, RowKind};

/// Runs a child that prints [`Outcome::encode`] on its standard output for one case of a row, and
/// reads it.
///
/// A child that ends early, or runs longer than `limit` and is killed, has answered too: for a
/// checking row that is a failure, unless the case expects that very signal; for an observing row it
/// is what came. The last line that it
/// wrote on standard output ([`super::Bench::with_voice`]) goes into the text.
pub fn run_in_child(row: &Row, case: usize, mut command: Command, limit: Duration) -> Outcome {
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn();
    let mut child = match child {
        Ok(child) => child,
        Err(error) => return Outcome::Skipped(format!("no child process: {error}")),
    };
    let output = child.stdout.take();
    // Read aside, so that the limit holds for a child that says nothing.
    let reader = thread::spawn(move || {
        let mut text = Vec::new();
        // Whatever was read before an error is what the child said.
        let _ = output.map(|mut output| output.read_to_end(&mut text));
        String::from_utf8_lossy(&text).into_owned()
    });
    let deadline = Instant::now() + limit;
    let (end, signal) = loop {
        match child.try_wait() {
            Ok(Some(status)) => break (describe(status), status.signal()),
            Err(error) => break (format!("was lost: {error}"), None),
            Ok(None) if Instant::now() > deadline => {
                // Fails only if it has just ended.
                let _ = child.kill();
                let _ = child.wait();
                break (format!("was killed after {limit:?}"), None);
            }
            Ok(None) => thread::sleep(Duration::from_millis(5)),
        }
    };
    let said = reader.join().unwrap_or_default();
    if let Some(outcome) = Outcome::decode(&said) {
        return outcome;
    }
    let last_words = said.trim_end().lines().last().unwrap_or("nothing");
    let text = format!("the process {end}; its last words: {last_words}");
    let expected = row.cases.get(case).and_then(|case| case.ends_by);
    match row.kind {
        RowKind::Check if signal.is_some() && signal == expected => Outcome::Passed(text),
        RowKind::Check => Outcome::Failed(text),
        RowKind::Observe => Outcome::Observed(text),
    }
}

fn describe(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("ended with exit code {code} and no outcome"),
        (None, Some(signal)) => format!("was ended by signal {signal}"),
        (None, None) => format!("ended: {status}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::row::{Case, Needs, ONLY};

    fn row(kind: RowKind) -> Row {
        let run = |_: &_| Outcome::Failed("rows of this test run in children".into());
        Row { id: "D-T1", group: "", title: "", kind, needs: Needs::DEVICE, cases: ONLY, run }
    }

    fn shell(kind: RowKind, script: &str) -> Outcome {
        shell_for(&row(kind), script)
    }

    fn shell_for(row: &Row, script: &str) -> Outcome {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", script]);
        run_in_child(row, 0, command, Duration::from_millis(700))
    }

    #[test]
    fn a_crash_passes_only_where_that_signal_is_the_answer() {
        const CASES: &[Case] = &[Case::ends_by("crash", 11)];
        let row = Row { cases: CASES, ..row(RowKind::Check) };
        let crashed = shell_for(&row, "kill -SEGV $$");
        assert!(matches!(&crashed, Outcome::Passed(text) if text.contains("signal 11")));
        for other in ["kill -ABRT $$", "exit 0", "exec sleep 20"] {
            assert!(matches!(shell_for(&row, other), Outcome::Failed(_)), "{other}");
        }
    }

    #[test]
    fn a_child_is_believed_only_if_it_answered() {
        let passed = shell(RowKind::Check, "echo begun; echo outcome: passed; printf fine");
        assert_eq!(passed, Outcome::Passed("fine".into()));
        let crashed = shell(RowKind::Check, "echo map of 3; kill -SEGV $$");
        assert!(matches!(&crashed, Outcome::Failed(text)
            if text.contains("signal 11; its last words: map of 3")));
        let crashed = shell(RowKind::Observe, "kill -SEGV $$");
        assert!(matches!(&crashed, Outcome::Observed(text) if text.contains("signal 11")));
        let silent = shell(RowKind::Check, "exit 0");
        assert!(matches!(&silent, Outcome::Failed(text) if text.contains("exit code 0")));
        let stuck = shell(RowKind::Check, "exec sleep 20");
        assert!(matches!(&stuck, Outcome::Failed(text) if text.contains("killed after")));
    }
}
