//! The soak: random operations of all kinds, in many threads, for minutes. Needs no cargo.
//!
//! `soak [--driver cuda|sim] [--devices N] [--minutes N | --seconds N | --operations N]
//! [--quiet-seconds N | --quiet-operations N] [--threads N] [--streams N] [--seed N] [--memory BYTES]
//! [--allowance BYTES] [--json FILE]`. Operations are those of each thread. The last line is JSON; a failure is exit code 1.

use std::process::ExitCode;
use std::str::FromStr;
use std::time::Duration;

use vmm_pool_tests::DriverChoice;
use vmm_pool_tests::soak::{Length, Options, run, serve_child};
use vmm_share::Address;

const USAGE: &str = "usage: soak [--driver cuda|sim] [--devices N] [--minutes N | --seconds N | \
    --operations N] [--quiet-seconds N | --quiet-operations N] [--threads N] [--streams N] \
    [--seed N] [--memory BYTES] [--allowance BYTES] [--json FILE]";

struct Arguments {
    options: Options,
    /// Given or not.
    memory_bytes: Option<u64>,
    allowance_bytes: Option<u64>,
    child: Option<Address>,
    json: Option<String>,
}

/// What pools may own of a device, unless it is said: so little that it is short now and then.
const MEMORY_BYTES: u64 = 1 << 30;
/// How much host memory may come, unless it is said.
const GPU_ALLOWANCE_BYTES: u64 = 64 << 20;
const SIM_ALLOWANCE_BYTES: u64 = 512 << 20;

fn number<T: FromStr>(name: &str, text: Option<String>) -> Result<T, String> {
    let text = text.unwrap_or_default();
    text.parse().map_err(|_| format!("{name} {text:?}: not what is expected\n{USAGE}"))
}

fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Arguments, String> {
    let options = Options {
        choice: DriverChoice::Cuda,
        devices: 2,
        length: Length::Time(Duration::from_secs(8 * 60)),
        quiet: Length::Time(Duration::from_secs(60)),
        threads: 16,
        streams: 8,
        seed: 1,
        memory_bytes: 0,
        allowance_bytes: 0,
        program: std::env::current_exe().ok(),
    };
    let mut all =
        Arguments { options, memory_bytes: None, allowance_bytes: None, child: None, json: None };
    let options = &mut all.options;
    while let Some(name) = arguments.next() {
        let value = arguments.next();
        let seconds = |text, of| {
            number::<u64>(&name, text).map(|n| Length::Time(Duration::from_secs(n * of)))
        };
        match name.as_str() {
            "--driver" => {
                options.choice = match value.as_deref() {
                    Some("cuda") => DriverChoice::Cuda,
                    Some("sim") => DriverChoice::Sim,
                    other => return Err(format!("--driver {other:?}: expected cuda or sim")),
                }
            }
            "--devices" => options.devices = number(&name, value)?,
            "--minutes" => options.length = seconds(value, 60)?,
            "--seconds" => options.length = seconds(value, 1)?,
            "--operations" => options.length = Length::Operations(number(&name, value)?),
            "--quiet-seconds" => options.quiet = seconds(value, 1)?,
            "--quiet-operations" => options.quiet = Length::Operations(number(&name, value)?),
            "--threads" => options.threads = number(&name, value)?,
            "--streams" => options.streams = number(&name, value)?,
            "--seed" => options.seed = number(&name, value)?,
            "--memory" => all.memory_bytes = Some(number(&name, value)?),
            "--allowance" => all.allowance_bytes = Some(number(&name, value)?),
            "--json" => all.json = Some(number(&name, value)?),
            "--child" => all.child = Some(number(&name, value)?),
            _ => return Err(format!("{name}: {USAGE}")),
        }
    }
    let allowance = match options.choice {
        DriverChoice::Cuda => GPU_ALLOWANCE_BYTES,
        DriverChoice::Sim => SIM_ALLOWANCE_BYTES,
    };
    options.memory_bytes = all.memory_bytes.unwrap_or(MEMORY_BYTES);
    options.allowance_bytes = all.allowance_bytes.unwrap_or(allowance);
    let each = options.quiet == Length::Operations(0);
    if each || options.devices == 0 || options.threads == 0 || options.streams < options.devices {
        return Err(format!("expected threads, devices, and a stream for each of them\n{USAGE}"));
    }
    Ok(all)
}

fn main() -> ExitCode {
    if std::env::args().skip(1).any(|argument| argument == "--help") {
        println!("{USAGE}");
        return ExitCode::SUCCESS;
    }
    let arguments = match parse(std::env::args().skip(1)) {
        Ok(arguments) => arguments,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::from(2);
        }
    };
    let Arguments { options, child, json, .. } = arguments;
    if let Some(address) = child {
        return match serve_child(options.choice, options.devices, &address) {
            Ok(()) => ExitCode::SUCCESS,
            Err(text) => {
                println!("{text}");
                ExitCode::FAILURE
            }
        };
    }
    let report = match run(options) {
        Ok(report) => report,
        Err(skip) => {
            eprintln!("not run: {skip}");
            return ExitCode::from(2);
        }
    };
    if let Some(failure) = &report.failure {
        println!("FAIL {failure}");
    }
    let summary = report.summary();
    if let Some(path) = json
        && let Err(error) = std::fs::write(&path, format!("{summary}\n"))
    {
        eprintln!("{path}: {error}");
    }
    println!("{summary}");
    // At once: after a failure other threads may still hang in what is left.
    std::process::exit(i32::from(report.failure.is_some()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_read_and_wrong_ones_refused() {
        let parse = |words: &str| parse(words.split_whitespace().map(str::to_owned));
        let all = parse("--driver sim --operations 7 --quiet-operations 3 --seed 5").unwrap();
        assert_eq!(all.options.length, Length::Operations(7));
        assert_eq!((all.options.seed, all.options.memory_bytes), (5, MEMORY_BYTES));
        let all = parse("--minutes 2 --memory 99 --json out").unwrap();
        assert_eq!(all.options.length, Length::Time(Duration::from_secs(120)));
        assert_eq!((all.options.memory_bytes, all.json.as_deref()), (99, Some("out")));
        for wrong in ["--threads", "--driver fpga", "--fast 1", "--streams 1", "--devices 0"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }
}
