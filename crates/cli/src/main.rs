//! The program `vmm-pool`.

fn main() {}
