//! First fit in AVX2: the same code as the plain form, compiled for a processor that has it.
//!
//! Each function here is the outermost of one warm operation. All below it is inlined into it and
//! so compiled with its target feature; the choice costs one branch an operation.
#![allow(unsafe_code)]

use super::first_fit::FirstFit;
use super::lanes::Avx2;
use super::space::Space;

/// A space that can only be made on a processor with AVX2.
pub(crate) type VectorSpace = Space<FirstFit<Avx2>>;

/// An empty space, if the processor has AVX2.
pub(crate) fn new() -> Option<VectorSpace> {
    Avx2::detect().map(|lanes| Space::new(FirstFit::new(lanes)))
}

/// [`Space::alloc`].
#[inline]
pub(crate) fn alloc(space: &mut VectorSpace, bytes: u64, align: u64) -> Option<u64> {
    #[target_feature(enable = "avx2")]
    fn with_avx2(space: &mut VectorSpace, bytes: u64, align: u64) -> Option<u64> {
        space.alloc(bytes, align)
    }
    // SAFETY: the space holds an `Avx2`, which exists only where the processor has AVX2.
    unsafe { with_avx2(space, bytes, align) }
}

/// [`Space::free`].
#[inline]
pub(crate) fn free(
    space: &mut VectorSpace,
    offset: u64,
    wanted_bytes: u64,
    tick: u64,
) -> Option<u64> {
    #[target_feature(enable = "avx2")]
    fn with_avx2(
        space: &mut VectorSpace,
        offset: u64,
        wanted_bytes: u64,
        tick: u64,
    ) -> Option<u64> {
        space.free(offset, wanted_bytes, tick)
    }
    // SAFETY: as in `alloc`.
    unsafe { with_avx2(space, offset, wanted_bytes, tick) }
}
