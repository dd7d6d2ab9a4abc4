//! Commands of the pages, run: by the programs that cargo built for the tests.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command as Process, Output, Stdio};

use crate::command::{Command, built};
use crate::lists::{RUN, Run};
use crate::page::{pages, root};

/// A program that is asked by others, ended if the test does not end it.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Running {
    /// Starts a shell line, and waits for the line of its output that begins so; what follows is the
    /// answer. `exec`, so that the process is the program and no shell.
    fn start(line: &str, begins: &str) -> (Running, String) {
        let mut shell = shell(&format!("exec {line}"));
        let child = shell.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let mut running = Running(child);
        let out = running.0.stdout.as_mut().unwrap();
        for line in BufReader::new(out).lines() {
            if let Some(rest) = line.unwrap().strip_prefix(begins) {
                return (running, rest.to_owned());
            }
        }
        panic!("{line} ended without a line {begins}…");
    }

    /// As the page says that it ends: by a signal, cleanly.
    fn end(mut self) {
        let id = self.0.id().to_string();
        assert!(Process::new("kill").args(["-TERM", &id]).status().unwrap().success());
        assert!(self.0.wait().unwrap().success());
    }
}

fn shell(line: &str) -> Process {
    let mut shell = Process::new("sh");
    shell.args(["-c", line]).current_dir(root()).env("VMM_POOL_DRIVER", "sim");
    // What commands reach is not what tests reach: tests/coverage.sh.
    shell.env("LLVM_PROFILE_FILE", "/dev/null");
    shell
}

fn output(line: &str) -> (Output, String) {
    let output = shell(line).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{line}\n{text}{}", String::from_utf8_lossy(&output.stderr));
    (output, text)
}

/// The shell line that does what the command says with the program that is built: `cargo run` and its
/// own options become the program's path.
fn line_of(text: &str) -> String {
    let words: Vec<&str> = text.split_whitespace().collect();
    let path =
        |package: &str, program: &str| format!("'{}'", built(package, program).unwrap().display());
    if words[0] != "cargo" {
        let package = if words[0] == "vmm-pool" { "vmm-pool-cli" } else { "vmm-server" };
        return format!("{} {}", path(package, words[0]), words[1..].join(" "));
    }
    let behind = |option: &str| {
        words.iter().position(|word| *word == option).and_then(|at| words.get(at + 1).copied())
    };
    let package = behind("-p").unwrap();
    let program = behind("--bin").or(behind("--example"));
    let passed = words.iter().position(|word| *word == "--").map_or(&[][..], |at| &words[at + 1..]);
    // Only the package of `vmm-pool` is run without a program's name.
    format!("{} {}", path(package, program.unwrap_or("vmm-pool")), passed.join(" "))
}

#[test]
fn commands_do_what_the_pages_say() {
    for Run { command, more, prints } in RUN {
        let (_, text) = output(&format!("{} {more}", line_of(command)));
        assert!(text.contains(prints), "{command} {more}: expected {prints:?} in\n{text}");
    }
}

/// The command of a page that begins so, if exactly one does.
fn of_page(path: &str, begins: &str) -> String {
    let pages = pages();
    let page = pages.iter().find(|page| page.path == path).unwrap();
    let mut found: Vec<String> =
        Command::of(page).into_iter().map(|command| command.text).collect();
    found.retain(|text| text.starts_with(begins) && text != begins);
    let [only] = &found[..] else { panic!("{path}: {begins}…: {found:?}") };
    only.clone()
}

/// docs/SHARING.md: a process that owns buffers, and what it says of itself.
#[test]
fn a_process_holds_buffers_and_says_which() {
    let socket = std::env::temp_dir().join(format!("vmm-docs-{}.sock", std::process::id()));
    let here = |begins: &str| {
        let text = of_page("docs/SHARING.md", begins);
        line_of(&text).replace("/tmp/weights.sock", socket.to_str().unwrap())
    };
    let serve = format!("{} --driver sim", here("vmm-pool serve"));
    let (running, _) = Running::start(&serve, "listening at ");
    let (_, said) = output(&here("vmm-pool status"));
    assert!(said.contains("0 buffers, 0 bytes"), "{said}");
    running.end();
    assert!(!socket.exists());
}

/// docs/SERVER.md: the server, the load program beside it, and questions by hand.
#[test]
fn the_server_answers_what_the_page_asks() {
    let page = "docs/SERVER.md";
    let server = line_of("cargo run --release -p vmm-server --bin vmm-server");
    let (running, url) =
        Running::start(&format!("{server} --driver sim --port 0 --pace fast"), "listening on ");
    let load = line_of("cargo run --release -p vmm-server --bin vmm-load");
    let (_, said) = output(&format!("{load} --url {url} --requests 20"));
    assert!(
        said.lines().any(|line| line.split_whitespace().eq(["wrong", "answers", "0"])),
        "{said}"
    );
    if Process::new("curl").arg("--version").output().is_err() {
        println!("skipped: no curl");
        return;
    }
    for (begins, expected) in [
        ("curl http://127.0.0.1:8077/v1", "\"completion_tokens\":8"),
        (
            "curl http://127.0.0.1:8077/m",
            "vmm_requests_total{model=\"tiny\",outcome=\"finished\"} 21",
        ),
    ] {
        let text = of_page(page, begins).replace("http://127.0.0.1:8077", &url);
        let (_, said) = output(&text.replacen("curl", "curl -sS", 1));
        assert!(said.contains(expected), "{text}: {said}");
    }
    running.end();
}
