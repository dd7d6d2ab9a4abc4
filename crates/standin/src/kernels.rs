//! The kernels that run: known by name, with the parameters listed here.
//!
//! | entry | parameters | what it does |
//! |---|---|---|
//! | `fill_u32` | `u64 dst, u32 value, u64 n` | `dst[i] = value` |
//! | `copy_u32` | `u64 dst, u64 src, u64 n` | `dst[i] = src[i]` |
//! | `add_one_u32` | `u64 dst, u64 n` | `dst[i] += 1` |
//! | `add_u32` | `u64 dst, u64 a, u64 b, u64 n` | `dst[i] = a[i] + b[i]` |
//! | `sum_u32` | `u64 src, u64 n, u64 out` | `*out` = the sum of `src[i]`, one word |
//!
//! and the probe kernels of `vmm_sys`, as its PTX text declares them: `fill_words`, `copy_words`,
//! `copy_quads`, `check_words` and `spin`. Sums wrap. The launch shape does not matter: each runs over
//! all its `n` words.

use vmm_sys::sim::{ByteKernel, ByteSpan, Sim};
use vmm_sys::{DeviceId, Driver, DriverResult, ProbeKernel, StreamHandle};

/// A kernel that runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kernel {
    FillU32,
    CopyU32,
    AddOneU32,
    AddU32,
    SumU32,
    FillWords,
    CopyWords,
    CopyQuads,
    CheckWords,
    Spin,
    /// Any other, where the environment says that those do nothing.
    Nothing,
}

/// Name, kernel, and the bytes of each parameter.
const TABLE: [(&str, Kernel, &[usize]); 10] = [
    ("fill_u32", Kernel::FillU32, &[8, 4, 8]),
    ("copy_u32", Kernel::CopyU32, &[8, 8, 8]),
    ("add_one_u32", Kernel::AddOneU32, &[8, 8]),
    ("add_u32", Kernel::AddU32, &[8, 8, 8, 8]),
    ("sum_u32", Kernel::SumU32, &[8, 8, 8]),
    ("fill_words", Kernel::FillWords, &[8, 8, 4]),
    ("copy_words", Kernel::CopyWords, &[8, 8, 8]),
    ("copy_quads", Kernel::CopyQuads, &[8, 8, 8]),
    ("check_words", Kernel::CheckWords, &[8, 8, 4, 8]),
    ("spin", Kernel::Spin, &[8, 8]),
];

/// The most parameters that a known kernel has.
pub(crate) const PARAMETERS_MAX: usize = 4;

/// The kernel of a name.
pub(crate) fn by_name(name: &str) -> Option<Kernel> {
    TABLE.iter().find(|(known, ..)| *known == name).map(|(_, kernel, _)| *kernel)
}

fn word(bytes: &[u8]) -> u32 {
    bytes.iter().rev().fold(0, |word, byte| word << 8 | u32::from(*byte))
}

/// Turns each word of `into`, given the words at the same place of `from`.
fn map_words(into: &mut [u8], from: &[&[u8]], turn: impl Fn(u32, &[u32]) -> u32) {
    let mut others = vec![0; from.len()];
    for (index, place) in into.chunks_exact_mut(4).enumerate() {
        for (other, bytes) in others.iter_mut().zip(from) {
            *other = word(&bytes[index * 4..index * 4 + 4]);
        }
        place.copy_from_slice(&turn(word(place), &others).to_le_bytes());
    }
}

fn sum(bytes: &[u8]) -> u32 {
    bytes.chunks_exact(4).fold(0, |sum: u32, bytes| sum.wrapping_add(word(bytes)))
}

impl Kernel {
    /// The bytes of each parameter.
    pub(crate) fn parameter_bytes(self) -> &'static [usize] {
        TABLE.iter().find(|(_, kernel, _)| *kernel == self).map_or(&[], |(_, _, bytes)| bytes)
    }

    /// Enqueues it. The simulated device checks addresses when its turn comes.
    pub(crate) fn launch(
        self,
        sim: &Sim,
        device: DeviceId,
        stream: StreamHandle,
        arguments: [u64; PARAMETERS_MAX],
    ) -> DriverResult<()> {
        match self.probe(arguments) {
            // SAFETY: the simulated device checks the handle and, when the kernel runs, the addresses.
            Some(probe) => unsafe { sim.launch(device, &probe, stream) },
            None => sim.launch_bytes(device, self.bytes_kernel(arguments), stream),
        }
    }

    /// As one of the contract's kernels.
    fn probe(self, [a, b, c, d]: [u64; PARAMETERS_MAX]) -> Option<ProbeKernel> {
        Some(match self {
            Kernel::FillWords => ProbeKernel::FillWords { dst: a, words: b, value: c as u32 },
            Kernel::CopyU32 | Kernel::CopyWords => {
                ProbeKernel::CopyWords { dst: a, src: b, words: c }
            }
            Kernel::CopyQuads => {
                ProbeKernel::CopyWords { dst: a, src: b, words: c.saturating_mul(4) }
            }
            Kernel::CheckWords => {
                ProbeKernel::CheckWords { src: a, words: b, value: c as u32, errors: d }
            }
            Kernel::Spin => ProbeKernel::Spin { busy_us: a / 1000, done: b },
            _ => return None,
        })
    }

    /// As a function on bytes.
    fn bytes_kernel(self, [a, b, c, d]: [u64; PARAMETERS_MAX]) -> ByteKernel {
        let bytes = |n: u64| n.saturating_mul(4);
        let write = |address, n| ByteSpan::write(address, bytes(n));
        let read = |address, n| ByteSpan::read(address, bytes(n));
        match self {
            Kernel::FillU32 => ByteKernel::new([write(a, c)], move |spans| {
                map_words(&mut spans[0], &[], |_, _| b as u32);
            }),
            Kernel::AddOneU32 => ByteKernel::new([write(a, b)], |spans| {
                map_words(&mut spans[0], &[], |word, _| word.wrapping_add(1));
            }),
            Kernel::AddU32 => ByteKernel::new([write(a, d), read(b, d), read(c, d)], |spans| {
                if let [dst, left, right] = spans {
                    map_words(dst, &[left, right], |_, from| from[0].wrapping_add(from[1]));
                }
            }),
            Kernel::SumU32 => ByteKernel::new([read(a, b), write(c, 1)], |spans| {
                let sum = sum(&spans[0]);
                spans[1].copy_from_slice(&sum.to_le_bytes());
            }),
            _ => ByteKernel::new([], |_| {}),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_known_kernel_has_few_enough_parameters_and_a_name_of_its_own() {
        for (name, kernel, bytes) in TABLE {
            assert!(bytes.len() <= PARAMETERS_MAX, "{name}");
            assert_eq!((by_name(name), kernel.parameter_bytes()), (Some(kernel), bytes), "{name}");
        }
        assert_eq!(by_name("add_two_u32"), None);
    }
}
