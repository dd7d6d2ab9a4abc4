//! `vmm-pool serve` and `vmm-pool status`, run as a user runs them, with this process as worker.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use vmm_share::{Access, Address, ImportState, ImporterOptions, NamedBuffer, OwnerClient};
use vmm_sys::sim::Sim;

const MIB: u64 = 1 << 20;

fn program() -> Command {
    Command::new(env!("CARGO_BIN_EXE_vmm-pool"))
}

fn path() -> PathBuf {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    std::env::temp_dir().join(format!("vmm-pool-serve-{}-{number}.sock", std::process::id()))
}

/// A `vmm-pool serve` that listens. Dropped while it runs, it is ended.
struct Served(Child);

impl Served {
    fn start(socket: &str, more: &[&str]) -> Served {
        let mut command = program();
        command.args(["serve", "--driver", "sim", "--socket", socket]).args(more);
        let child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let mut served = Served(child);
        let mut line = String::new();
        let stdout = served.0.stdout.take().unwrap();
        BufReader::new(stdout).read_line(&mut line).unwrap();
        assert_eq!(line, format!("listening at {socket}\n"));
        served
    }

    /// The exit code after a signal.
    fn end(mut self, signal: Signal) -> Option<i32> {
        kill_process(Pid::from_child(&self.0), signal).unwrap();
        self.0.wait().unwrap().code()
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        // Both fail only if it has ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn client(socket: &str) -> OwnerClient {
    let address: Address = socket.parse().unwrap();
    OwnerClient::connect(&address, ImporterOptions::new(Sim::builder().build())).unwrap()
}

fn status(socket: &str, more: &[&str]) -> Output {
    program().args(["status", "--socket", socket]).args(more).output().unwrap()
}

fn json(socket: &str) -> Value {
    serde_json::from_slice(&status(socket, &["--json"]).stdout).unwrap()
}

#[test]
fn what_is_held_is_shown_and_a_signal_ends_it_cleanly() {
    let path = path();
    let socket = path.to_str().unwrap();
    for signal in [Signal::TERM, Signal::INT] {
        let served = Served::start(socket, &["--device", "0", "1", "--total", "64MiB"]);
        let worker = client(socket);
        let wanted = NamedBuffer::new("weights", 4 * MIB).chunk_bytes(2 * MIB);
        let (import, created) = worker.create_or_find(&wanted).unwrap();
        assert!(created);
        import.write(MIB, &[5; 64]).unwrap();
        let reader = client(socket);
        reader.open("weights", Access::Read).unwrap();
        let held = json(socket);
        assert_eq!((&held["bytes"], &held["clients"]), (&(4 * MIB).into(), &3.into()));
        assert_eq!(held["total_bytes_max"], 64 * MIB);
        let buffer = &held["buffers"][0];
        assert_eq!((&buffer["name"], &buffer["lease"]), (&"weights".into(), &"held".into()));
        assert!(buffer["device"].as_str().unwrap().starts_with("GPU-"), "{buffer}");
        let holders = buffer["holders"].as_array().unwrap();
        let writes: Vec<bool> = holders.iter().map(|it| it["writes"].as_bool().unwrap()).collect();
        assert_eq!(writes, [true, false]);
        assert!(holders.iter().all(|it| it["pid"] == std::process::id()), "{buffer}");
        drop(reader);
        let text = String::from_utf8(status(socket, &[]).stdout).unwrap();
        assert!(text.contains("weights: 4194304 bytes on GPU-"), "{text}");
        assert!(text.contains("(at most 67108864)"), "{text}");
        assert_eq!(served.end(signal), Some(0));
        assert!(!path.exists());
        // The worker knows, and its memory is there until it lets go.
        assert_eq!((import.check(), import.bytes()), (ImportState::Withdrawn, 4 * MIB));
        assert!(!worker.is_owner_alive());
    }
    let nobody = status(socket, &["--json"]);
    assert_eq!((nobody.status.code(), nobody.stdout.len()), (Some(1), 0));
}

#[test]
fn a_lease_counts_and_limits_hold() {
    let name = format!("@vmm-pool-serve-{}", std::process::id());
    let served = Served::start(&name, &["--limit", "4MiB", "--lease", "3600"]);
    let worker = client(&name);
    let wanted = |name: &str, mib| NamedBuffer::new(name, mib * MIB).chunk_bytes(2 * MIB);
    let refused = worker.create_or_find(&wanted("a", 6)).unwrap_err().to_string();
    assert!(refused.contains("beyond a limit"), "{refused}");
    drop(worker.create_or_find(&wanted("a", 4)).unwrap());
    worker.leave("a").unwrap();
    let buffer = &json(&name)["buffers"][0];
    assert_eq!((&buffer["lease"], &buffer["holders"]), (&"ends".into(), &Value::Array(vec![])));
    let left = buffer["lease_left_s"].as_f64().unwrap();
    assert!((0.0..=3600.0).contains(&left), "{left}");
    worker.release("a").unwrap();
    assert_eq!(json(&name)["buffers"], Value::Array(vec![]));
    assert_eq!(served.end(Signal::TERM), Some(0));
}

#[test]
fn a_dead_socket_is_replaced_and_a_live_one_left_alone() {
    let path = path();
    let socket = path.to_str().unwrap();
    let first = Served::start(socket, &[]);
    let serve = || {
        let output = program().args(["serve", "--driver", "sim", "--socket", socket]).output();
        let output = output.unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    let (code, errors) = serve();
    let said = format!("listening: {socket}: ");
    assert!(code == Some(2) && errors.contains(&said), "{code:?} {errors}");
    assert_eq!(json(socket)["clients"], 1);
    assert_eq!(first.end(Signal::KILL), None);
    assert!(path.exists());
    let nobody = String::from_utf8(status(socket, &[]).stderr).unwrap();
    assert!(nobody.contains(&format!("connecting: {socket}: ")), "{nobody}");
    assert!(nobody.contains("expected an exporter or a `vmm-pool serve`"), "{nobody}");
    assert_eq!(Served::start(socket, &[]).end(Signal::TERM), Some(0));
    std::fs::write(&path, "somebody's").unwrap();
    assert_eq!(serve().0, Some(2));
    assert_eq!(std::fs::read(&path).unwrap(), b"somebody's");
    std::fs::remove_file(&path).unwrap();
}

#[test]
fn others_are_not_let_in_and_bad_usage_is_refused() {
    let path = path();
    let socket = path.to_str().unwrap();
    let served = Served::start(socket, &["--uid", "4294967294"]);
    let refused = status(socket, &[]);
    let errors = String::from_utf8(refused.stderr).unwrap();
    assert_eq!(refused.status.code(), Some(1), "{errors}");
    assert!(errors.contains("is not let in"), "{errors}");
    assert_eq!(served.end(Signal::TERM), Some(0));
    for (options, expected) in [
        (&["--socket", "@"][..], "a path, or @ and a name"),
        (&["--socket", "@x", "--limit", "much"], "expected a number of bytes"),
        (&["--socket", "@x", "--driver", "sim", "--device", "99"], "this machine has"),
        (&["--socket", "@x", "--driver", "sim", "--lease", "18446744073709551615"], "lease"),
        (&[], "--socket"),
    ] {
        let output = program().arg("serve").args(options).output().unwrap();
        let errors = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{options:?} {errors}");
        assert!(errors.contains(expected), "{errors}");
    }
}
