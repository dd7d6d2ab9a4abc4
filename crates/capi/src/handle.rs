//! Handles: numbers in the shape of pointers. They are compared and looked up, never followed, so
//! whatever C passes for one is found out.

use crate::failure::Failure;

/// A pool. The pointer is a number: it is valid until vmm_pool_destroy.
pub struct VmmPool(());

/// An elastic buffer: addresses of its own, whose memory comes and goes. The pointer is a number: it
/// is valid until vmm_elastic_release.
pub struct VmmElastic(());

/// A use of an elastic buffer by a stream. The pointer is a number: it is valid until vmm_use_end.
pub struct VmmUse(());

/// What a handle stands for. Its upper half says the kind, in a form that is no address: bits 47 to 63
/// of those are all alike.
pub(crate) trait Kind {
    /// The upper half.
    const TAG: u32;
    /// The name for words.
    const NAME: &'static str;
}

impl Kind for VmmPool {
    const TAG: u32 = 0x564D_0001;
    const NAME: &'static str = "vmm_pool";
}

impl Kind for VmmElastic {
    const TAG: u32 = 0x564D_0002;
    const NAME: &'static str = "vmm_elastic";
}

impl Kind for VmmUse {
    const TAG: u32 = 0x564D_0003;
    const NAME: &'static str = "vmm_use";
}

const _: () = assert!(usize::BITS == 64, "handles and device addresses have 64 bits");

/// The handle of a number.
pub(crate) fn handle<K: Kind>(number: u32) -> *mut K {
    std::ptr::without_provenance_mut((K::TAG as usize) << 32 | number as usize)
}

/// The number of a handle, if it is of this kind. Whether the number stands for something, a table
/// knows.
#[inline]
pub(crate) fn number<K: Kind>(handle: *const K) -> Option<u32> {
    let value = handle.addr();
    // 0 is never given out: to the tables it is the process's own pool.
    (value >> 32 == K::TAG as usize && value as u32 != 0).then_some(value as u32)
}

/// The same, with the failure.
///
/// # Errors
/// [`Failure::UnknownHandle`].
pub(crate) fn checked<K: Kind>(handle: *const K) -> Result<u32, Failure> {
    number(handle).ok_or_else(|| unknown(handle))
}

/// The failure of a handle that stands for nothing.
#[cold]
pub(crate) fn unknown<K: Kind>(handle: *const K) -> Failure {
    Failure::UnknownHandle { kind: K::NAME, value: handle.addr() }
}

/// The next number of a table. They are never given twice.
///
/// # Errors
/// When 2^32 - 1 have been given out.
pub(crate) fn next(last: &mut u32) -> Result<u32, Failure> {
    let next = last.checked_add(1).ok_or_else(|| {
        Failure::argument("handles", u64::from(u32::MAX) + 1, "at most 2^32 - 1 in a process")
    })?;
    *last = next;
    Ok(next)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_is_of_one_kind_and_no_address() {
        let pool = handle::<VmmPool>(7);
        assert_eq!(number(pool), Some(7));
        assert_eq!(number(pool.cast::<VmmElastic>()), None);
        assert_eq!(number(handle::<VmmPool>(0)), None);
        assert!(checked(pool.cast::<VmmUse>()).unwrap_err().to_string().contains("no vmm_use"));
        let local = 0_u64;
        for foreign in [std::ptr::null(), std::ptr::from_ref(&local).cast::<VmmPool>()] {
            assert_eq!(number(foreign), None);
        }
        let upper = pool.addr() >> 47;
        assert!(upper != 0 && upper != (1 << 17) - 1);
        let mut last = u32::MAX - 1;
        assert_eq!(next(&mut last).unwrap(), u32::MAX);
        assert!(next(&mut last).is_err() && last == u32::MAX);
    }
}
