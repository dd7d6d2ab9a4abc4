//! The file: its name, its header, its lines.

use std::collections::HashSet;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use super::Record;
use crate::config::Settings;
use crate::sync::{Mutex, global};

global! {
    /// Files that pools of this process write to now: no two of them share one.
    static IN_USE: Mutex<Option<HashSet<PathBuf>>> = Mutex::new(None);
}

/// An open trace.
pub(super) struct TraceFile {
    path: PathBuf,
    out: Box<dyn Write + Send>,
}

impl TraceFile {
    /// Makes the file; one that stands there is overwritten. `%p` in the name is the number of the
    /// process; while another pool of this process writes to it, `.2`, `.3` and so on is appended.
    pub(super) fn create(path: &Path) -> io::Result<TraceFile> {
        let name = path.to_string_lossy();
        let path = match name.contains("%p") {
            true => PathBuf::from(name.replace("%p", &std::process::id().to_string())),
            false => path.to_owned(),
        };
        let path = claim(path);
        match File::create(&path) {
            Ok(file) => Ok(TraceFile::new(path, BufWriter::with_capacity(1 << 16, file))),
            Err(error) => {
                let_go(&path);
                Err(error)
            }
        }
    }

    pub(super) fn new(path: PathBuf, out: impl Write + Send + 'static) -> TraceFile {
        TraceFile { path, out: Box::new(out) }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// What a reader of a bug report wants to know first.
    pub(super) fn header(&mut self, settings: &Settings) -> io::Result<()> {
        writeln!(
            self.out,
            "# vmm-trace 1: 'a ID BYTES STREAM T_US' allocates, 'f ID T_US' frees; vmm-pool {}, {}",
            env!("CARGO_PKG_VERSION"),
            settings.in_words()
        )?;
        self.out.flush()
    }

    /// Writes lines, to the operating system.
    pub(super) fn append(&mut self, records: &[Record]) -> io::Result<()> {
        for record in records {
            match *record {
                Record::Stream { number, device, stream } => {
                    writeln!(self.out, "# stream {number} is stream {} of {device}", stream.0)
                }
                Record::Alloc { id, bytes, stream, time_us } => {
                    writeln!(self.out, "a {id} {bytes} {stream} {time_us}")
                }
                Record::Free { id, time_us } => writeln!(self.out, "f {id} {time_us}"),
            }?;
        }
        self.out.flush()
    }
}

impl Drop for TraceFile {
    fn drop(&mut self) {
        let_go(&self.path);
    }
}

fn claim(path: PathBuf) -> PathBuf {
    let mut in_use = IN_USE.lock();
    let in_use = in_use.get_or_insert_default();
    let numbered = (2_u64..).map(|number| {
        let mut name = path.clone().into_os_string();
        name.push(format!(".{number}"));
        PathBuf::from(name)
    });
    let mut names = std::iter::once(path.clone()).chain(numbered);
    let free = names.find(|name| in_use.insert(name.clone()));
    free.unwrap_or(path)
}

fn let_go(path: &Path) {
    if let Some(in_use) = IN_USE.lock().as_mut() {
        in_use.remove(path);
    }
}
