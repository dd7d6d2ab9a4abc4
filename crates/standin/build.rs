//! Link arguments of the library.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // What the machine holds must outlive a program's last `dlclose`: a later one opens the same.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
