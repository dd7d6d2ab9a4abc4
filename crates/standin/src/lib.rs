//! A stand-in `libcuda`: NVIDIA's driver entry points over the simulated device of [`vmm_sys::sim`].
//!
//! A program that loads the driver at run time, as cudarc does and as `vmm_sys::cuda::Cuda` does,
//! runs unchanged on a machine without a GPU if this library is what it finds. The library
//! translates: handles, numbers and host pointers of C to the calls of the contract and back. What
//! is answered is the simulated device's own answer, code by code. A function that the simulated
//! device has no answer for is not exported: a missing symbol is honest, a stub that says
//! `CUDA_SUCCESS` is not.
//!
//! | file | what it holds |
//! |---|---|
//! | `door` | what every entry point passes: panics, the log, the counts |
//! | `machine`, `settings` | the one simulated machine, and the environment it is built from |
//! | `device`, `context`, `memory`, `copy`, `stream`, `event`, `graph`, `vmm`, `pointer` | the calls |
//! | `module`, `function`, `kernels`, `launch` | modules, and the kernels that are known by name |
//! | `errors`, `procaddr` | names of codes, and looking up functions |
//! | `faults` | calls that fail on purpose |
//! | `control` | `vmm_standin_*`: what tests steer and read |
//!
//! The file is not called `libcuda.so`: cargo puts its output directory on the library path of
//! tests, and there it would be everybody's driver. `vmm-standin-directory` makes a directory with
//! links of that name, for the child processes that want it. Settings, kernels and limits are told in
//! `docs/SIMULATOR.md`.

#![allow(non_snake_case, reason = "the names are NVIDIA's")]

#[cfg(not(target_pointer_width = "64"))]
compile_error!("handles and sizes are passed as 64-bit integers");

#[macro_use]
mod door;

mod context;
mod control;
mod copy;
mod device;
mod errors;
mod event;
mod faults;
mod function;
mod graph;
mod kernels;
mod launch;
mod machine;
mod memory;
mod module;
mod pointer;
mod procaddr;
mod settings;
mod stream;
mod vmm;
