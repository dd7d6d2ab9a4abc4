//! Where the stand-in `libcuda` is, for tests that run a program on it.
//!
//! ```no_run
//! # fn main() -> std::io::Result<()> {
//! let libcuda = vmm_standin_directory::library_directory()?;
//! let mut program = std::process::Command::new("some-cuda-program");
//! program.env("LD_LIBRARY_PATH", libcuda.search_path());
//! program.status()?;
//! # Ok(())
//! # }
//! ```
//!
//! A child process, as the loader reads its search path once, when a process starts; and a directory of
//! its own, as a `libcuda.so` among cargo's output would be every test's driver.

use std::ffi::OsString;
use std::io::{Error, ErrorKind, Result};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

const LIBRARY: &str = "libvmm_standin.so";
/// The names that programs open.
const LINKS: [&str; 2] = ["libcuda.so", "libcuda.so.1"];

/// Directories made by this process.
static MADE: AtomicU32 = AtomicU32::new(0);

/// A private directory in which the stand-in is called `libcuda`. Dropped, it is gone again.
#[derive(Debug)]
pub struct LibraryDirectory {
    path: PathBuf,
}

/// Makes a private directory with links `libcuda.so` and `libcuda.so.1` to the stand-in.
///
/// # Errors
/// `NotFound` if the library is not beside this program's own target directory (it is for tests,
/// examples and programs that cargo built with this package among their dependencies), and what the
/// file system says.
pub fn library_directory() -> Result<LibraryDirectory> {
    let library = library()?;
    let directory = loop {
        let number = MADE.fetch_add(1, Ordering::Relaxed);
        let name = format!("vmm-standin-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        match std::fs::create_dir(&path) {
            Ok(()) => break LibraryDirectory { path },
            // Left by a process of the same id that had no time to remove it.
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    };
    for link in LINKS {
        symlink(&library, directory.path.join(link))?;
    }
    Ok(directory)
}

/// The library that cargo built: in `target/<profile>/deps`, where tests are, or beside it.
///
/// # Errors
/// As [`library_directory`].
pub fn library() -> Result<PathBuf> {
    let program = std::env::current_exe()?;
    let near = program.ancestors().skip(1).take(3);
    let places = near.flat_map(|directory| [directory.join("deps"), directory.to_owned()]);
    let mut places = places.map(|directory| directory.join(LIBRARY));
    places.find(|path| path.is_file()).ok_or_else(|| {
        let text = format!("no {LIBRARY} near {}: is it built?", program.display());
        Error::new(ErrorKind::NotFound, text)
    })
}

impl LibraryDirectory {
    /// The directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A value for `LD_LIBRARY_PATH`: this directory, and then what the variable says now.
    pub fn search_path(&self) -> OsString {
        let mut path = self.path.clone().into_os_string();
        if let Some(rest) = std::env::var_os("LD_LIBRARY_PATH").filter(|rest| !rest.is_empty()) {
            path.push(":");
            path.push(rest);
        }
        path
    }
}

impl Drop for LibraryDirectory {
    fn drop(&mut self) {
        // What cannot be removed is a directory of links in the temporary directory.
        let _ = std::fs::remove_dir_all(&self.path);
    }
}
