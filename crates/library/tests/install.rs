//! The library installed under a prefix, found by pkg-config, and used by C and C++ programs.

#![allow(clippy::unwrap_used, reason = "a failure ends the test")]

mod support;

use std::path::{Path, PathBuf};
use std::process::Command;

use support::{compiler, good};

/// Installs the library that cargo built beside this test.
fn install(prefix: &Path) -> Option<()> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("install.sh");
    let mut command = Command::new("bash");
    command.arg(script).arg(prefix).arg("--library").arg(support::library());
    good("install", &mut command).map(|_| ())
}

/// What pkg-config says of the installed library.
fn pkg_config(prefix: &Path, what: &[&str]) -> Option<Vec<String>> {
    let mut command = Command::new("pkg-config");
    command.args(what).arg("vmm_pool").env("PKG_CONFIG_PATH", prefix.join("lib/pkgconfig"));
    let words = good("install", &mut command)?;
    Some(words.split_whitespace().map(str::to_owned).collect())
}

/// What a program says that is compiled and linked with the installed library.
fn says(prefix: &Path, compiler: &mut Command, program: &Path) -> Option<String> {
    let flags = pkg_config(prefix, &["--cflags", "--libs"])?;
    compiler.args(flags).arg("-o").arg(program);
    good("install", compiler)?;
    let mut command = Command::new(program);
    command.arg("version").env("LD_LIBRARY_PATH", prefix.join("lib")).env("VMM_POOL_DRIVER", "sim");
    good("install", &mut command)
}

#[test]
fn the_installed_library_is_found_and_used() {
    let prefix = support::directory("prefix");
    install(&prefix).unwrap();
    for name in ["vmm_pool.h", "vmm_pool_torch.h", "vmm_pool_cupy.h", "vmm_pool_rmm.hpp"] {
        assert!(prefix.join("include").join(name).is_file(), "{name}");
    }
    let program = prefix.join("program");
    // The headers of the prefix alone.
    let mut c = Command::new("cc");
    c.args(["-std=gnu11", "-pthread"]).args(support::sources(&[
        "general.c",
        "wrong.c",
        "elastic.c",
    ]));
    if let Some(said) = says(&prefix, &mut c, &program) {
        let version = pkg_config(&prefix, &["--modversion"]).unwrap();
        assert_eq!((said.trim(), version[0].as_str()), (env!("CARGO_PKG_VERSION"), said.trim()));
    }
    let source = prefix.join("example.c");
    std::fs::write(&source, example()).unwrap();
    let mut example = compiler("cc", "-std=c11");
    example.arg("-pedantic").arg(&source);
    if let Some(said) = says(&prefix, &mut example, &program) {
        assert!(said.starts_with("1048576 bytes at 0x"), "{said}");
    }
    let mut python = Command::new("python3");
    python
        .args(["-B", "-c", "import vmm_pool; print(vmm_pool.version())"])
        .env("PYTHONPATH", prefix.join("lib/python"))
        .env_remove("VMM_POOL_LIBRARY");
    if let Some(said) = good("install", &mut python) {
        assert_eq!(said.trim(), env!("CARGO_PKG_VERSION"));
    }
    std::fs::remove_dir_all(&prefix).unwrap();
}

/// The first piece of C in docs/integrations/c.md.
fn example() -> String {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/integrations/c.md");
    let text = std::fs::read_to_string(page).unwrap();
    let (_, code) = text.split_once("```c\n").unwrap();
    code.split_once("```").unwrap().0.to_owned()
}

/// The soname is that of the version that the header names.
#[test]
fn the_name_of_the_library_has_the_version_of_the_header() {
    let mut readelf = Command::new("readelf");
    readelf.arg("-d").arg(support::library());
    let Some(said) = good("soname", &mut readelf) else { return };
    let header: PathBuf = support::include_directories()[0].join("vmm_pool.h");
    let text = std::fs::read_to_string(header).unwrap();
    let version = text.split("#define VMM_POOL_ABI_VERSION ").nth(1).unwrap();
    let soname = format!("[libvmm_pool.so.{}]", version.lines().next().unwrap());
    assert!(said.contains(&soname), "{soname}: {said}");
}
