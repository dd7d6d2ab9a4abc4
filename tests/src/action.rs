//! [`Action`]: one step of a run, and its text form of one line.
//!
//! Actions name buffers and streams by small numbers. Every action is possible in every state: one
//! that refers to something that is not there does nothing. So any part of a script is a script,
//! which is what makes failing ones easy to shrink and to edit by hand.

mod elastic;

use std::fmt;
use std::str::FromStr;

use vmm_sys::{Call, CaptureMode, ResultCode};

pub use elastic::ElasticAction;

/// The modes of captures, by name.
const MODES: [(&str, CaptureMode); 3] = [
    ("global", CaptureMode::Global),
    ("thread-local", CaptureMode::ThreadLocal),
    ("relaxed", CaptureMode::Relaxed),
];

/// One step. `buffer` and `stream` are the script's own numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the fields are what their names say; units are in the variants")]
pub enum Action {
    /// Makes a stream of a device; or takes the running thread's own, once a device.
    Stream { stream: u32, device: u32, own: bool },
    /// Asks the stream's lane for memory, in bytes, and writes the buffer's pattern into it. A raw
    /// one is known to the pool by its address only.
    Alloc { buffer: u32, stream: u32, bytes: u64, align: u64, wait: bool, raw: bool },
    /// Checks the contents and drops the buffer, in another thread if it says so.
    Free { buffer: u32, elsewhere: bool },
    /// Tells the pool that a stream uses the buffer.
    Record { buffer: u32, stream: u32 },
    /// Records the stream and enqueues work on it that writes the buffer's own pattern.
    Use { buffer: u32, stream: u32 },
    /// Checks the contents.
    Check { buffer: u32 },
    /// Holds a stream: work enqueued from now on waits for the release.
    Hold { stream: u32 },
    /// Lets a held stream go.
    Release { stream: u32 },
    /// Enqueues work that keeps the stream busy for a time, in microseconds.
    Busy { stream: u32, us: u64 },
    /// Gives everything idle on a device back.
    Trim { device: u32 },
    /// Gives back what was idle for so long, in milliseconds.
    TrimIdle { device: u32, ms: u64 },
    /// Time passes, in milliseconds.
    Later { ms: u64 },
    /// Makes chunks ahead of need, in bytes.
    Prefill { device: u32, bytes: u64 },
    /// Declares a stream's lane closed. The next allocation on the stream opens a new one.
    CloseLane { stream: u32 },
    /// Begins to capture a stream of the device that has nothing to do with the pool. No other
    /// action may harm the capture.
    Capture { device: u32 },
    /// Ends that capture, which must be unharmed.
    EndCapture { device: u32 },
    /// Opens a capture scope on a stream's lane, and begins a capture there. Memory asked for on the
    /// stream until it is finished is the graph's.
    Scope { graph: u32, stream: u32, mode: CaptureMode },
    /// Lets that capture spread to another stream.
    Join { graph: u32, stream: u32 },
    /// Ends the capture, which must be unharmed.
    Finish { graph: u32 },
    /// Launches the graph, and checks what it wrote.
    Launch { graph: u32, stream: u32 },
    /// Drops the graph and its memory, after ending its capture.
    DropGraph { graph: u32 },
    /// Something with an elastic buffer.
    Elastic(ElasticAction),
    /// Starts new peaks.
    ResetPeaks,
    /// Drops the pool while buffers may live. The next action that needs one makes a new pool.
    DropPool,
    /// From the k-th call of this kind on (`at`), so many fail.
    Fault { call: Call, at: u64, code: ResultCode, times: u64 },
    /// No more faults.
    ClearFaults,
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Action::Stream { stream, device, own } => {
                write!(f, "stream s{stream} d{device}")?;
                f.write_str(if *own { " own" } else { "" })
            }
            Action::Alloc { buffer, stream, bytes, align, wait, raw } => {
                write!(f, "alloc b{buffer} s{stream} {bytes} align {align}")?;
                f.write_str(if *wait { "" } else { " nowait" })?;
                f.write_str(if *raw { " raw" } else { "" })
            }
            Action::Free { buffer, elsewhere } => {
                write!(f, "free b{buffer}")?;
                f.write_str(if *elsewhere { " elsewhere" } else { "" })
            }
            Action::Record { buffer, stream } => write!(f, "record b{buffer} s{stream}"),
            Action::Use { buffer, stream } => write!(f, "use b{buffer} s{stream}"),
            Action::Check { buffer } => write!(f, "check b{buffer}"),
            Action::Hold { stream } => write!(f, "hold s{stream}"),
            Action::Release { stream } => write!(f, "release s{stream}"),
            Action::Busy { stream, us } => write!(f, "busy s{stream} {us}"),
            Action::Trim { device } => write!(f, "trim d{device}"),
            Action::TrimIdle { device, ms } => write!(f, "trim-idle d{device} {ms}"),
            Action::Later { ms } => write!(f, "later {ms}"),
            Action::Prefill { device, bytes } => write!(f, "prefill d{device} {bytes}"),
            Action::CloseLane { stream } => write!(f, "close-lane s{stream}"),
            Action::Capture { device } => write!(f, "capture d{device}"),
            Action::EndCapture { device } => write!(f, "end-capture d{device}"),
            Action::Scope { graph, stream, mode } => {
                let (mode, _) = MODES.iter().find(|(_, known)| known == mode).unwrap_or(&MODES[0]);
                write!(f, "scope g{graph} s{stream} {mode}")
            }
            Action::Join { graph, stream } => write!(f, "join g{graph} s{stream}"),
            Action::Finish { graph } => write!(f, "finish g{graph}"),
            Action::Launch { graph, stream } => write!(f, "launch g{graph} s{stream}"),
            Action::DropGraph { graph } => write!(f, "drop-graph g{graph}"),
            Action::Elastic(action) => write!(f, "elastic {action}"),
            Action::ResetPeaks => f.write_str("reset-peaks"),
            Action::DropPool => f.write_str("drop-pool"),
            Action::Fault { call, at, code, times } => {
                write!(f, "fault {call} {at} {} {times}", code.0)
            }
            Action::ClearFaults => f.write_str("clear-faults"),
        }
    }
}

impl FromStr for Action {
    type Err = String;

    fn from_str(line: &str) -> Result<Action, String> {
        let mut words = Words { line, words: line.split_whitespace() };
        let action = match words.word()? {
            "stream" => Action::Stream {
                stream: words.named('s')?,
                device: words.named('d')?,
                own: words.take_if("own"),
            },
            "alloc" => Action::Alloc {
                buffer: words.named('b')?,
                stream: words.named('s')?,
                bytes: words.number()?,
                align: {
                    words.expect("align")?;
                    words.number()?
                },
                wait: !words.take_if("nowait"),
                raw: words.take_if("raw"),
            },
            "free" => {
                Action::Free { buffer: words.named('b')?, elsewhere: words.take_if("elsewhere") }
            }
            "record" => Action::Record { buffer: words.named('b')?, stream: words.named('s')? },
            "use" => Action::Use { buffer: words.named('b')?, stream: words.named('s')? },
            "check" => Action::Check { buffer: words.named('b')? },
            "hold" => Action::Hold { stream: words.named('s')? },
            "release" => Action::Release { stream: words.named('s')? },
            "busy" => Action::Busy { stream: words.named('s')?, us: words.number()? },
            "trim" => Action::Trim { device: words.named('d')? },
            "trim-idle" => Action::TrimIdle { device: words.named('d')?, ms: words.number()? },
            "later" => Action::Later { ms: words.number()? },
            "prefill" => Action::Prefill { device: words.named('d')?, bytes: words.number()? },
            "close-lane" => Action::CloseLane { stream: words.named('s')? },
            "capture" => Action::Capture { device: words.named('d')? },
            "end-capture" => Action::EndCapture { device: words.named('d')? },
            "scope" => Action::Scope {
                graph: words.named('g')?,
                stream: words.named('s')?,
                mode: words.mode()?,
            },
            "join" => Action::Join { graph: words.named('g')?, stream: words.named('s')? },
            "finish" => Action::Finish { graph: words.named('g')? },
            "launch" => Action::Launch { graph: words.named('g')?, stream: words.named('s')? },
            "drop-graph" => Action::DropGraph { graph: words.named('g')? },
            "elastic" => Action::Elastic(ElasticAction::read(&mut words)?),
            "reset-peaks" => Action::ResetPeaks,
            "drop-pool" => Action::DropPool,
            "fault" => Action::Fault {
                call: words.call()?,
                at: words.number()?,
                code: ResultCode(words.number::<u32>()?),
                times: words.number()?,
            },
            "clear-faults" => Action::ClearFaults,
            other => return Err(words.wrong("the name of an action", other)),
        };
        match words.words.next() {
            None => Ok(action),
            Some(rest) => Err(words.wrong("the end of the line", rest)),
        }
    }
}

/// The words of one line, taken from the left.
struct Words<'a> {
    line: &'a str,
    words: std::str::SplitWhitespace<'a>,
}

impl<'a> Words<'a> {
    fn wrong(&self, expected: &str, found: &str) -> String {
        format!("\"{}\": expected {expected}, found \"{found}\"", self.line)
    }

    fn word(&mut self) -> Result<&'a str, String> {
        self.words.next().ok_or_else(|| self.wrong("one more word", "the end of the line"))
    }

    /// Takes the next word if it is this one.
    fn take_if(&mut self, wanted: &str) -> bool {
        let mut rest = self.words.clone();
        let found = rest.next() == Some(wanted);
        if found {
            self.words = rest;
        }
        found
    }

    fn expect(&mut self, wanted: &str) -> Result<(), String> {
        match self.word()? {
            word if word == wanted => Ok(()),
            word => Err(self.wrong(wanted, word)),
        }
    }

    fn number<N: FromStr>(&mut self) -> Result<N, String> {
        let word = self.word()?;
        word.parse().map_err(|_| self.wrong("a number", word))
    }

    /// A number behind its letter: `b3`.
    fn named(&mut self, letter: char) -> Result<u32, String> {
        let word = self.word()?;
        let number = word.strip_prefix(letter).and_then(|rest| rest.parse().ok());
        number.ok_or_else(|| self.wrong(&format!("{letter} and a number"), word))
    }

    fn mode(&mut self) -> Result<CaptureMode, String> {
        let word = self.word()?;
        let mode = MODES.iter().find(|(name, _)| *name == word);
        mode.map(|(_, mode)| *mode).ok_or_else(|| self.wrong("the name of a capture mode", word))
    }

    fn call(&mut self) -> Result<Call, String> {
        let word = self.word()?;
        let call = Call::ALL.iter().find(|call| call.name() == word);
        call.copied().ok_or_else(|| self.wrong("the name of a driver call", word))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_action_is_read_as_it_was_written() {
        let code = ResultCode::OUT_OF_MEMORY;
        let actions = [
            Action::Stream { stream: 1, device: 0, own: false },
            Action::Stream { stream: 2, device: 1, own: true },
            Action::Alloc {
                buffer: 2,
                stream: 1,
                bytes: u64::MAX,
                align: 256,
                wait: true,
                raw: false,
            },
            Action::Alloc { buffer: 3, stream: 1, bytes: 0, align: 0, wait: false, raw: true },
            Action::Free { buffer: 2, elsewhere: false },
            Action::Free { buffer: 3, elsewhere: true },
            Action::Record { buffer: 2, stream: 4 },
            Action::Use { buffer: 2, stream: 4 },
            Action::Check { buffer: 7 },
            Action::Hold { stream: 1 },
            Action::Release { stream: 1 },
            Action::Busy { stream: 1, us: 50 },
            Action::Trim { device: 1 },
            Action::Prefill { device: 1, bytes: 3 << 20 },
            Action::CloseLane { stream: 9 },
            Action::Capture { device: 1 },
            Action::EndCapture { device: 1 },
            Action::Scope { graph: 3, stream: 1, mode: CaptureMode::ThreadLocal },
            Action::Join { graph: 3, stream: 2 },
            Action::Finish { graph: 3 },
            Action::Launch { graph: 3, stream: 0 },
            Action::DropGraph { graph: 3 },
            Action::ResetPeaks,
            Action::DropPool,
            Action::Fault { call: Call::MemCreate, at: 3, code, times: 2 },
            Action::ClearFaults,
        ];
        for action in actions {
            assert_eq!(action.to_string().parse(), Ok(action));
        }
    }

    #[test]
    fn what_cannot_be_read_says_what_was_expected() {
        for (line, expected) in [
            ("", "one more word"),
            ("fly b1", "the name of an action"),
            ("free 1", "b and a number"),
            ("alloc b1 s1 ten align 256", "a number"),
            ("alloc b1 s1 10 align 256 never", "the end of the line"),
            ("trim d0 now", "the end of the line"),
            ("scope g1 s1 strict", "the name of a capture mode"),
            ("fault cuFly 1 2 3", "the name of a driver call"),
        ] {
            let error = line.parse::<Action>().unwrap_err();
            assert!(error.contains(expected), "{line}: {error}");
        }
    }
}
