//! The programs themselves: started, asked, ended by a signal.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Output, Stdio};

/// Ends the server if the test does not.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The server, and where it listens.
fn start(more: &[&str]) -> (Server, String) {
    let mut child = Command::new(env!("CARGO_BIN_EXE_vmm-server"))
        .args(["--driver", "sim", "--port", "0", "--pace", "fast", "--memory", "64MiB"])
        .args(more)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let out = child.stdout.as_mut().unwrap();
    let mut url = None;
    let mut lines = BufReader::new(out);
    while url.is_none() {
        let mut line = String::new();
        assert_ne!(lines.read_line(&mut line).unwrap(), 0, "the server ended");
        url = line.trim().strip_prefix("listening on ").map(str::to_owned);
    }
    (Server(child), url.unwrap())
}

fn load(url: &str, more: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_vmm-load"))
        .args(["--url", url, "--requests", "20", "--concurrency", "4"])
        .args(more)
        .output()
        .unwrap()
}

#[test]
fn a_load_is_answered_and_a_signal_ends_the_server() {
    let (mut server, url) = start(&["--form", "paged"]);
    let output = load(&url, &[]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{text}");
    let line = |name: &str| {
        let line = text.lines().find(|line| line.trim_start().starts_with(name)).unwrap();
        line.split_whitespace().last().unwrap().to_owned()
    };
    assert_eq!((line("done"), line("wrong")), ("20".to_owned(), "0".to_owned()), "{text}");
    let pid = server.0.id().to_string();
    assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
    let mut rest = String::new();
    server.0.stdout.take().unwrap().read_to_string(&mut rest).unwrap();
    assert!(server.0.wait().unwrap().success(), "{rest}");
    assert!(rest.contains("tiny: 20 finished, 0 refused, 0 failed"), "{rest}");
    assert!(rest.contains("everything was given back"), "{rest}");
}

#[test]
fn a_load_without_a_server_or_elsewhere_fails_in_words() {
    let output = load("http://127.0.0.1:1", &[]);
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(text.contains("cannot connect to 127.0.0.1:1"), "{text}");
    let output = load("http://192.0.2.1:80", &[]);
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(text.contains("expected a loopback address"), "{text}");
}

/// A model whose context is as long as can be, in a file.
fn long_context() -> String {
    let mut spec = vmm_server::model::ModelSpec::preset("tiny").unwrap();
    spec.max_tokens = u32::MAX;
    let path = std::env::temp_dir().join(format!("vmm-long-{}.json", std::process::id()));
    std::fs::write(&path, serde_json::to_string(&spec).unwrap()).unwrap();
    path.to_str().unwrap().to_owned()
}

#[test]
fn a_server_that_cannot_start_says_why() {
    let run = |more: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_vmm-server"))
            .args(["--driver", "sim"])
            .args(if more.contains(&"--port") { &[][..] } else { &["--port", "0"] })
            .args(more)
            .output()
            .unwrap();
        assert!(!output.status.success());
        String::from_utf8(output.stderr).unwrap()
    };
    assert!(run(&["--model", "gpt"]).contains("expected one of tiny"));
    assert!(run(&["--model", "tiny", "--model", "tiny"]).contains("two models are called"));
    let text = run(&["--model", "llama-8b", "--memory", "1GiB"]);
    assert!(text.contains("model llama-8b: out of memory on"), "{text}");
    assert!(run(&["--sleep", "host"]).contains("host_memory = 0: expected host memory"));
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let text = run(&["--port", &port]);
    assert!(text.contains(&format!("cannot listen at 127.0.0.1:{port}")), "{text}");
    let long = long_context();
    let text = run(&["--form", "paged", "--model", &long]);
    std::fs::remove_file(&long).unwrap();
    assert!(text.contains("tables of 68719476736 blocks for 256 requests"), "{text}");
}
