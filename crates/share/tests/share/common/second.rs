//! The second process: takes orders on its standard input, one a line, and answers each with a line.

use std::io::{BufRead, BufReader, Lines, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use vmm_share::Address;
use vmm_sys::sim::Sim;

use super::socket_path;

const ROLE: &str = "VMM_SHARE_TEST_ROLE";
const SOCKET: &str = "VMM_SHARE_TEST_SOCKET";
/// Begins a line that is an answer.
const MARK: &str = "@@ ";

/// Does what a role answers to an order. `None`: it ends.
pub(crate) type Answers = Box<dyn FnMut(&[&str]) -> Option<String>>;

/// The life of the second process.
pub(crate) fn run() {
    let Ok(role) = std::env::var(ROLE) else { return };
    super::limit_descriptors();
    let forbidden = super::forbid_calls();
    let address = Address::Path(std::env::var(SOCKET).unwrap().into());
    let mut answers = match role.as_str() {
        "owner" => super::owner::answers(address),
        "keeper" => super::keeper::answers(address),
        "worker" => super::worker::answers(address),
        "reader" => super::reader::answers(address),
        other => panic!("no such role: {other}"),
    };
    println!("{MARK}ready");
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let words: Vec<&str> = line.split_whitespace().collect();
        if words == ["forbidden"] {
            println!("{MARK}{}", if forbidden { "yes" } else { "no" });
            continue;
        }
        if words == ["leave", "a", "fork"] {
            super::leave_a_fork();
            println!("{MARK}left");
            continue;
        }
        let Some(answer) = answers(&words) else { break };
        println!("{MARK}{answer}");
    }
}

/// The second process, seen from the first. Dropped while it runs, it is ended.
pub(crate) struct Second {
    child: Child,
    orders: Option<ChildStdin>,
    answers: Lines<BufReader<ChildStdout>>,
    pub(crate) address: Address,
    /// The socket is its own.
    owns: bool,
}

impl Second {
    /// Starts it. `more` goes into its environment.
    pub(crate) fn start(role: &str, address: Address, more: &[(&str, &str)]) -> Second {
        let mut second = Second::spawn(role, address, more);
        assert_eq!(second.answer().as_deref(), Some("ready"));
        second
    }

    /// An owner at a path of its own.
    pub(crate) fn owner(more: &[(&str, &str)]) -> Second {
        Second::start("owner", Address::Path(socket_path()), more)
    }

    pub(crate) fn spawn(role: &str, address: Address, more: &[(&str, &str)]) -> Second {
        let Address::Path(path) = &address else { panic!("tests use paths") };
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["second_process", "--exact", "--nocapture"])
            .env(ROLE, role)
            .env(SOCKET, path);
        command.envs(more.iter().copied());
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let orders = child.stdin.take();
        let answers = BufReader::new(child.stdout.take().unwrap()).lines();
        Second { child, orders, answers, address, owns: role == "owner" }
    }

    /// The next answer, or `None` if it has ended.
    pub(crate) fn answer(&mut self) -> Option<String> {
        loop {
            let line = self.answers.next()?.ok()?;
            // The frame of the tests prints on the same lines.
            if let Some(at) = line.find(MARK) {
                return Some(line[at + MARK.len()..].to_owned());
            }
        }
    }

    /// Gives an order without waiting for the answer. A process that has ended takes none.
    pub(crate) fn order(&mut self, order: &str) {
        let _ = writeln!(self.orders.as_mut().unwrap(), "{order}");
    }

    /// Gives an order; the answer.
    pub(crate) fn ask(&mut self, order: &str) -> String {
        self.order(order);
        self.answer().unwrap_or_else(|| panic!("no answer to {order}"))
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Ends it at once.
    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Waits for its end; the signal that ended it.
    pub(crate) fn wait(&mut self) -> Option<i32> {
        self.orders = None;
        self.child.wait().unwrap().signal()
    }

    /// Has an owner give everything back, and looks that nothing is left on either side.
    pub(crate) fn finish(mut self, sim: &Sim) {
        assert_eq!(self.ask("end"), "clean");
        self.end();
        sim.check_clean().unwrap();
    }

    /// Has it end by itself; panics unless all was well there.
    fn end(mut self) {
        self.orders = None;
        while self.answer().is_some() {}
        assert!(self.child.wait().unwrap().success());
    }
}

impl Drop for Second {
    fn drop(&mut self) {
        // Both fail only if it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
        if let (true, Address::Path(path)) = (self.owns, &self.address) {
            // Left by one that was killed.
            let _ = std::fs::remove_file(path);
        }
    }
}
