//! C programs and the library, for the tests beside this.
#![allow(dead_code, reason = "each test program uses some of it")]

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// Counts a test that cannot run here, and says so on the terminal.
pub(crate) fn skip(story: &str, why: &str) {
    static SKIPPED: AtomicU32 = AtomicU32::new(0);
    let count = SKIPPED.fetch_add(1, Ordering::Relaxed) + 1;
    // Not `eprintln`: the test runner would swallow the line of a test that passes.
    let mut terminal = std::io::stderr();
    writeln!(terminal, "skipped ({count} so far): {story}: {why}").unwrap();
}

/// The library that cargo built for the tests (Cargo.toml).
pub(crate) fn library() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let path = test.parent().unwrap().with_file_name("examples").join("libvmm_pool.so");
    let hint = "cargo test builds it, unless it is told to run one test program alone";
    assert!(path.exists(), "{}: {hint}", path.display());
    path
}

/// The crates whose headers the library has.
pub(crate) fn include_directories() -> [PathBuf; 3] {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    ["capi", "torch", "cupy"].map(|name| crates.join(name).join("include"))
}

/// A directory of this test's own. A process id in the name: the same test may run twice at a time.
pub(crate) fn directory(name: &str) -> PathBuf {
    let name = format!("{name}-{}", std::process::id());
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::create_dir_all(&path).unwrap();
    path
}

/// What a command printed. `None`, with a counted line, if the program is not there.
pub(crate) fn run(story: &str, command: &mut Command) -> Option<Output> {
    match command.output() {
        Ok(output) => Some(output),
        Err(error) => {
            skip(story, &format!("{}: {error}", command.get_program().display()));
            None
        }
    }
}

/// What a command that succeeds prints to its output.
pub(crate) fn good(story: &str, command: &mut Command) -> Option<String> {
    let output = run(story, command)?;
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {}: {said}", output.status);
    Some(String::from_utf8(output.stdout).unwrap())
}

/// A compiler with all warnings, and the library's headers.
pub(crate) fn compiler(name: &str, standard: &str) -> Command {
    let mut command = Command::new(name);
    command.args(["-O1", "-Wall", "-Wextra", "-Werror", "-pthread", standard]);
    for directory in include_directories() {
        command.arg("-I").arg(directory);
    }
    command
}

/// Sources of the fixture.
pub(crate) fn sources(names: &[&str]) -> Vec<PathBuf> {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixture");
    names.iter().map(|name| fixture.join(name)).collect()
}

/// The program that tells the stories of the general functions, and where the library lies for it.
pub(crate) struct Program {
    directory: PathBuf,
}

impl Program {
    /// The one of this process: compiled once while tests are at it.
    pub(crate) fn general(story: &str) -> Option<Arc<Program>> {
        static PROGRAM: Mutex<Weak<Program>> = Mutex::new(Weak::new());
        // A test that failed meanwhile has left nothing half done.
        let mut program = PROGRAM.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(program) = program.upgrade() {
            return Some(program);
        }
        let made = Arc::new(Program::make(story)?);
        *program = Arc::downgrade(&made);
        Some(made)
    }

    /// Compiles and links it. `None`, with a counted line, where there is no C compiler.
    fn make(story: &str) -> Option<Program> {
        let directory = directory("general");
        // Linked by one name, loaded by the other.
        for name in ["libvmm_pool.so", "libvmm_pool.so.1"] {
            std::os::unix::fs::symlink(library(), directory.join(name)).unwrap();
        }
        let mut command = compiler("cc", "-std=gnu11");
        command.args(sources(&["general.c", "wrong.c", "elastic.c"]));
        command.arg("-o").arg(directory.join("program"));
        command.arg("-L").arg(&directory).arg("-lvmm_pool");
        let program = Program { directory };
        good(story, &mut command)?;
        Some(program)
    }

    /// Where the program and the library lie.
    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }

    /// The command that tells a story, on the simulated device.
    pub(crate) fn command(&self, story: &str) -> Command {
        let mut command = Command::new(self.directory.join("program"));
        command.arg(story).env("LD_LIBRARY_PATH", &self.directory).env("VMM_POOL_DRIVER", "sim");
        command
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // What stays is cleaned up with the target directory.
        let _left = std::fs::remove_dir_all(&self.directory);
    }
}
