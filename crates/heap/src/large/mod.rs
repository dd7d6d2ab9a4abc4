//! The large placement: everything that is not served from a slab, and the slabs themselves.

mod buddy;
mod first_fit;
mod lanes;
mod space;
mod spans;
mod tree;
#[cfg(target_arch = "x86_64")]
mod vector;
mod windows;

use buddy::Buddy;
use first_fit::FirstFit;
use lanes::Plain;
use space::{Index, Space};
use windows::Window;

use crate::config::Placement;
use crate::error::NotFree;
use crate::stats::FreeRun;

/// A space with the placement chosen at run time. All calls go through here, so the choice is made
/// once an operation.
pub(crate) enum Large {
    Buddy(Space<Buddy>),
    /// For processors without the vector form.
    FirstFit(Space<FirstFit<Plain>>),
    #[cfg(target_arch = "x86_64")]
    FirstFitVector(vector::VectorSpace),
}

/// [`Space::alloc`], as the vector form has it: a call, so that the common way to it, which small
/// requests go too, stays short.
#[inline(never)]
fn alloc<I: Index>(space: &mut Space<I>, bytes: u64, align: u64) -> Option<u64> {
    space.alloc(bytes, align)
}

/// [`Space::free`] likewise.
#[inline(never)]
fn free<I: Index>(space: &mut Space<I>, offset: u64, wanted_bytes: u64, tick: u64) -> Option<u64> {
    space.free(offset, wanted_bytes, tick)
}

/// The same expression for whichever placement it is.
macro_rules! each {
    ($large:expr, $space:ident => $call:expr) => {
        match $large {
            Large::Buddy($space) => $call,
            Large::FirstFit($space) => $call,
            #[cfg(target_arch = "x86_64")]
            Large::FirstFitVector($space) => $call,
        }
    };
}

impl Large {
    pub(crate) fn new(placement: Placement) -> Self {
        match placement {
            Placement::Buddy => Self::Buddy(Space::new(Buddy::new())),
            Placement::FirstFit => Self::first_fit(),
        }
    }

    /// First fit in the fastest form that this processor has.
    fn first_fit() -> Self {
        #[cfg(target_arch = "x86_64")]
        if let Some(space) = vector::new() {
            return Self::FirstFitVector(space);
        }
        Self::plain_first_fit()
    }

    /// First fit in the form for any processor.
    fn plain_first_fit() -> Self {
        Self::FirstFit(Space::new(FirstFit::new(Plain)))
    }

    /// Takes `bytes`, whole granules, at a multiple of `align`, at least a granule.
    #[inline(always)]
    pub(crate) fn alloc(&mut self, bytes: u64, align: u64) -> Option<u64> {
        match self {
            Self::Buddy(space) => alloc(space, bytes, align),
            Self::FirstFit(space) => alloc(space, bytes, align),
            #[cfg(target_arch = "x86_64")]
            Self::FirstFitVector(space) => vector::alloc(space, bytes, align),
        }
    }

    /// Frees the block at `offset`, if it has `wanted_bytes` or those are 0, and returns its length.
    #[inline(always)]
    pub(crate) fn free(&mut self, offset: u64, wanted_bytes: u64, tick: u64) -> Option<u64> {
        match self {
            Self::Buddy(space) => free(space, offset, wanted_bytes, tick),
            Self::FirstFit(space) => free(space, offset, wanted_bytes, tick),
            #[cfg(target_arch = "x86_64")]
            Self::FirstFitVector(space) => vector::free(space, offset, wanted_bytes, tick),
        }
    }

    /// Takes exactly `[offset, offset + bytes)`, if it is whole granules and wholly free.
    pub(crate) fn alloc_at(&mut self, offset: u64, bytes: u64) -> Result<(), NotFree> {
        each!(self, space => space.alloc_at(offset, bytes))
    }

    /// Adds a range as free; panics as [`Space::insert_free`] does.
    pub(crate) fn insert_free(&mut self, offset: u64, bytes: u64, tick: u64) {
        each!(self, space => space.insert_free(offset, bytes, tick));
    }

    /// Takes a wholly free range out of the space.
    pub(crate) fn remove_free(&mut self, offset: u64, bytes: u64) -> Result<(), NotFree> {
        each!(self, space => space.remove_free(offset, bytes))
    }

    /// Length of the block at `offset`.
    #[inline]
    pub(crate) fn used_bytes_at(&self, offset: u64) -> Option<u64> {
        each!(self, space => space.used_bytes_at(offset))
    }

    /// The alignment at which a request is placed.
    pub(crate) fn placement_align(&self, bytes: u64, align: u64) -> u64 {
        each!(self, space => space.placement_align(bytes, align))
    }

    /// Visits where a request would fit; `align` is a placement alignment.
    pub(crate) fn windows(
        &self,
        bytes: u64,
        align: u64,
        end_bytes: u64,
        visit: &mut dyn FnMut(u64),
    ) {
        let window = Window { bytes, align };
        each!(self, space => window.visit_all(space.spans(), end_bytes, visit));
    }

    /// Visits the maximal free runs in address order.
    pub(crate) fn free_runs(&self, visit: &mut dyn FnMut(FreeRun)) {
        each!(self, space => space.free_runs(visit));
    }

    /// Bytes inserted and not removed.
    pub(crate) fn mapped_bytes(&self) -> u64 {
        each!(self, space => space.mapped_bytes())
    }

    /// Bytes of used spans: large blocks and slabs.
    pub(crate) fn used_bytes(&self) -> u64 {
        each!(self, space => space.used_bytes())
    }

    pub(crate) fn metadata_bytes(&self) -> u64 {
        each!(self, space => space.metadata_bytes())
    }

    pub(crate) fn verify(&self) -> Result<(), String> {
        each!(self, space => space.verify())
    }

    /// Used spans in address order: `(offset, bytes)`.
    pub(crate) fn used_spans(&self, visit: &mut dyn FnMut(u64, u64)) {
        each!(self, space => {
            for span in space.spans().iter().filter(|span| !span.is_free()) {
                visit(span.offset, span.bytes());
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::GRANULE_BYTES;

    /// The same operations on both; everything that can be asked must be the same.
    fn same(steps: &[(u64, u32, usize)]) -> Result<(), TestCaseError> {
        let mut pair = [Large::first_fit(), Large::plain_first_fit()];
        let mut live: Vec<u64> = Vec::new();
        for large in &mut pair {
            large.insert_free(0, 24 << 20, 0);
            large.insert_free(20 << 30, 40 << 20, 0);
        }
        for (&(granules, align_shift, nth), tick) in steps.iter().zip(1..) {
            let answers = pair.each_mut().map(|large| {
                if nth % 3 == 0 && !live.is_empty() {
                    large.free(live[nth % live.len()], 0, tick)
                } else {
                    large.alloc(granules * GRANULE_BYTES, 1 << align_shift)
                }
            });
            prop_assert_eq!(answers[0], answers[1]);
            if nth % 3 == 0 && !live.is_empty() {
                live.swap_remove(nth % live.len());
            } else {
                live.extend(answers[0]);
            }
            let runs = pair.each_ref().map(|large| {
                let mut runs = Vec::new();
                large.free_runs(&mut |run| runs.push(run));
                runs
            });
            prop_assert_eq!(&runs[0], &runs[1]);
            for large in &pair {
                large.verify().map_err(TestCaseError::fail)?;
            }
        }
        Ok(())
    }

    proptest! {
        #![proptest_config(crate::test_config())]

        #[test]
        fn the_plain_and_the_fastest_form_place_alike(
            steps in prop::collection::vec((1..9000u64, 9..23u32, any::<usize>()), 1..60)
        ) {
            same(&steps)?;
        }
    }
}
