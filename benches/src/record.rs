//! Figures as JSON lines, each with the facts of the machine, so that a line can be read alone.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use serde::Serialize;
use vmm_pool_cli::replay::Cause;

use crate::facts::Facts;

/// The file that lines are appended to. Default: `vmm-bench.jsonl` in the target directory.
pub const OUT_VAR: &str = "VMM_BENCH_OUT";

/// Writes lines, appending: several programs may share a file.
#[derive(Debug)]
pub struct Recorder {
    bench: &'static str,
    facts: Facts,
    path: PathBuf,
    file: File,
}

#[derive(Serialize)]
struct Line<'a, T> {
    bench: &'a str,
    #[serde(flatten)]
    row: &'a T,
    #[serde(flatten)]
    facts: &'a Facts,
}

impl Recorder {
    /// Opens `path`, or makes it with the directories above it.
    ///
    /// # Errors
    /// The file cannot be written; the message names it.
    pub fn open(path: PathBuf, bench: &'static str, facts: Facts) -> Result<Recorder, Cause> {
        let open = || {
            if let Some(parent) = path.parent() {
                std::fs::create_dir_all(parent)?;
            }
            OpenOptions::new().create(true).append(true).open(&path)
        };
        let file = open().map_err(|error| format!("{OUT_VAR}={}: {error}", path.display()))?;
        Ok(Recorder { bench, facts, path, file })
    }

    /// Where the lines go.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What each line says of the machine.
    pub fn facts(&self) -> &Facts {
        &self.facts
    }

    /// Appends one line: the bench, the fields of `row`, the facts.
    ///
    /// # Errors
    /// The disk's, with the file's name.
    pub fn write<T: Serialize>(&mut self, row: &T) -> Result<(), Cause> {
        let line = Line { bench: self.bench, row, facts: &self.facts };
        let mut text = serde_json::to_string(&line)?;
        text.push('\n');
        // One write, so that lines of two programs never mix.
        let written = self.file.write_all(text.as_bytes());
        Ok(written.map_err(|error| format!("{}: {error}", self.path.display()))?)
    }
}

/// Where lines go unless told otherwise.
pub(crate) fn default_path() -> PathBuf {
    let named = std::env::var_os("CARGO_TARGET_DIR").map(PathBuf::from);
    let target = named.or_else(|| target_of(&std::env::current_exe().ok()?));
    target.unwrap_or_else(|| PathBuf::from("target")).join("vmm-bench.jsonl")
}

/// The target directory that a program was built in, known by the tag that cargo puts there.
fn target_of(program: &Path) -> Option<PathBuf> {
    program.ancestors().find(|dir| dir.join("CACHEDIR.TAG").is_file()).map(Path::to_owned)
}

#[cfg(test)]
mod tests {
    use serde_json::Value;
    use vmm_sys::DeviceId;
    use vmm_sys::sim::Sim;

    use super::*;

    #[derive(Serialize)]
    struct Row {
        case: &'static str,
        median_ns: f64,
    }

    #[test]
    fn each_line_is_a_row_that_names_its_machine() {
        let dir = std::env::temp_dir().join(format!("vmm-bench-test-{}", std::process::id()));
        let path = dir.join("deep/out.jsonl");
        let facts = Facts::collect(&*Sim::builder().build(), DeviceId(0)).unwrap();
        for median_ns in [1.5, 2.5] {
            // Opened anew: lines are appended.
            let mut recorder = Recorder::open(path.clone(), "test", facts.clone()).unwrap();
            recorder.write(&Row { case: "hot", median_ns }).unwrap();
        }
        let text = std::fs::read_to_string(&path).unwrap();
        let lines: Vec<Value> = text.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
        assert_eq!(lines.len(), 2);
        assert_eq!(lines[1]["median_ns"], 2.5);
        for line in &lines {
            assert_eq!((&line["bench"], &line["case"]), (&"test".into(), &"hot".into()));
            assert_eq!(line["driver"], "sim");
            assert_eq!(line["cpu"], facts.cpu);
        }
        std::fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn a_file_that_cannot_be_made_is_named() {
        let facts = Facts::collect(&*Sim::builder().build(), DeviceId(0)).unwrap();
        let error = Recorder::open("/proc/no/such".into(), "test", facts).unwrap_err();
        assert!(error.to_string().starts_with("VMM_BENCH_OUT=/proc/no/such: "), "{error}");
    }
}
