//! The header of a crate: made from its sources, compared with the committed one, compiled.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Says that the headers are to be written anew.
const WRITE_VARIABLE: &str = "VMM_POOL_WRITE_HEADERS";

fn made(root: &Path) -> String {
    let config = cbindgen::Config::from_file(root.join("cbindgen.toml")).unwrap();
    let builder = cbindgen::Builder::new().with_src(root.join("src/lib.rs"));
    let mut bytes = Vec::new();
    builder.with_config(config).generate().unwrap().write(&mut bytes);
    // What Rust calls so are plain conditions in C.
    let header = String::from_utf8(bytes).unwrap().replace(" * # Safety\n", "");
    header.trim_start().to_owned()
}

/// The committed header is the one that cbindgen makes of the sources.
pub(crate) fn is_the_committed_one(root: &str, name: &str) {
    let root = Path::new(root);
    let path = root.join("include").join(name);
    let made = made(root);
    if std::env::var_os(WRITE_VARIABLE).is_some() {
        std::fs::write(&path, &made).unwrap();
    }
    let committed = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        committed == made,
        "{} is not what the sources say: run this test with {WRITE_VARIABLE}=1, which writes it",
        path.display()
    );
}

/// It compiles as C and as C++, with all warnings on, by itself.
pub(crate) fn compiles(root: &str, name: &str) {
    let directory = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    let strict = ["-Wall", "-Wextra", "-Werror", "-pedantic", "-fsyntax-only"];
    let mut skipped = 0;
    for (compiler, standard, suffix) in [("cc", "-std=c11", "c"), ("c++", "-std=c++17", "cc")] {
        let source = directory.join(format!("{name}-{}.{suffix}", std::process::id()));
        std::fs::write(&source, format!("#include \"{name}\"\nint nothing;\n")).unwrap();
        let include = Path::new(root).join("include");
        let output = Command::new(compiler)
            .args(strict)
            .arg(standard)
            .arg("-I")
            .arg(include)
            .arg(&source)
            .output();
        std::fs::remove_file(&source).unwrap();
        match output {
            Ok(output) => {
                let words = String::from_utf8_lossy(&output.stderr);
                assert!(output.status.success(), "{compiler}: {words}");
            }
            Err(error) => {
                skipped += 1;
                // Not `eprintln`: the test runner would swallow the line of a test that passes.
                let line = format!("skipped ({skipped} so far): {name}: no {compiler}: {error}");
                let mut terminal = std::io::stderr();
                writeln!(terminal, "{line}").unwrap();
            }
        }
    }
}
