//! The Rust of the pages, compiled, and run where it needs no GPU and no second process. Pages about one
//! package's types are in that package: `tests/tests/docs` sees that none is forgotten.

macro_rules! pages {
    ($($name:ident: $path:literal,)*) => { $(#[doc = include_str!($path)] mod $name {})* };
}

pages! {
    readme: "../../README.md",
    configuration: "../../docs/CONFIGURATION.md",
    cross_gpu: "../../docs/CROSS-GPU.md",
    kv: "../../docs/KV.md",
    sharing: "../../docs/SHARING.md",
    simulator: "../../docs/SIMULATOR.md",
}
