//! Work on device memory: copies, fills, and the few kernels.

use super::DeviceId;

/// A copy or a fill on device memory. Synchronous forms return when the bytes are there.
///
/// `device` of the calls that take one of these is the GPU whose context is current during the
/// call: its grants decide (row D-A8).
#[derive(Clone, Copy, Debug)]
pub enum Transfer {
    /// `cuMemcpyHtoD`: `src` is a host address of `bytes` readable bytes.
    HostToDevice {
        /// Device address.
        dst: u64,
        /// Host address.
        src: *const u8,
        /// Length.
        bytes: u64,
    },
    /// `cuMemcpyDtoH`: `dst` is a host address of `bytes` writable bytes.
    DeviceToHost {
        /// Host address.
        dst: *mut u8,
        /// Device address.
        src: u64,
        /// Length.
        bytes: u64,
    },
    /// `cuMemcpyDtoD`.
    DeviceToDevice {
        /// Device address.
        dst: u64,
        /// Device address.
        src: u64,
        /// Length.
        bytes: u64,
    },
    /// `cuMemcpyPeer`: each side is reached through its own device's context.
    Peer {
        /// Device address.
        dst: u64,
        /// The device that `dst` is reached from.
        dst_device: DeviceId,
        /// Device address.
        src: u64,
        /// The device that `src` is reached from.
        src_device: DeviceId,
        /// Length.
        bytes: u64,
    },
    /// `cuMemsetD8`.
    Fill8 {
        /// Device address.
        dst: u64,
        /// The byte written.
        value: u8,
        /// Length.
        bytes: u64,
    },
}

/// The few kernels that tests and checks need; each is a single launch of a small grid.
/// The CUDA driver compiles them from embedded PTX, the simulated device knows them by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProbeKernel {
    /// `dst[i] = value + i` for `words` 32-bit words.
    FillWords {
        /// Device address, 4-aligned.
        dst: u64,
        /// Number of words.
        words: u64,
        /// First value; the others count up, wrapping.
        value: u32,
    },
    /// `dst[i] = src[i]` for `words` 32-bit words.
    CopyWords {
        /// Device address, 4-aligned.
        dst: u64,
        /// Device address, 4-aligned.
        src: u64,
        /// Number of words.
        words: u64,
    },
    /// Adds to the 32-bit word at `errors` the number of `i` with `src[i] != value + i`.
    CheckWords {
        /// Device address, 4-aligned.
        src: u64,
        /// Number of words.
        words: u64,
        /// First expected value.
        value: u32,
        /// Device address of one 32-bit counter.
        errors: u64,
    },
    /// Keeps one thread busy for about `busy_us`, then writes 1 to the word at `done`, if not 0.
    Spin {
        /// Microseconds; at most 2,000,000.
        busy_us: u64,
        /// Device address of one word, or 0.
        done: u64,
    },
}
