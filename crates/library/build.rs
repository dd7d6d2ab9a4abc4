//! Link options of the C library.

/// `VMM_POOL_ABI_VERSION` of the header; tests/install.rs compares.
const ABI_VERSION: u32 = 1;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if std::env::var("CARGO_CFG_TARGET_OS").as_deref() == Ok("linux") {
        // The pool's background thread and its fork hooks run code of the library until the
        // process ends, so it must not be unloaded.
        for argument in ["-Wl,-z,nodelete", &format!("-Wl,-soname,libvmm_pool.so.{ABI_VERSION}")] {
            // To all targets: the library of the tests is an example. They mean nothing to programs.
            println!("cargo::rustc-link-arg={argument}");
        }
    }
}
