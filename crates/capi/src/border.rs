//! What every function of the C side does at its border: no panic crosses, failures are kept.

use std::ffi::c_int;

use vmm_sys::caught::thrown;
use vmm_sys::{DeviceId, process};

use crate::failure::{self, Failure};
use crate::status::vmm_pool_status;

/// Runs a function of the C side: what it answers, or `otherwise` if it has a bug.
#[inline]
pub fn guarded<T>(otherwise: T, work: impl FnOnce() -> T) -> T {
    thrown(work).unwrap_or_else(|_words| {
        failure::keep(&Failure::Panicked);
        otherwise
    })
}

/// The answer, or `otherwise` with the failure kept.
pub fn kept<T>(otherwise: T, answer: Result<T, Failure>) -> T {
    answer.unwrap_or_else(|failure| {
        failure::keep(&failure);
        otherwise
    })
}

/// The status of an answer, its failure kept.
pub fn told(answer: Result<(), Failure>) -> i32 {
    match answer {
        Ok(()) => vmm_pool_status::VMM_POOL_OK as i32,
        Err(failure) => {
            failure::keep(&failure);
            failure.status() as i32
        }
    }
}

/// Runs a function of the C side that answers with a status.
pub fn status(work: impl FnOnce() -> Result<(), Failure>) -> i32 {
    guarded(vmm_pool_status::VMM_POOL_PANICKED as i32, || told(work()))
}

/// A device as C names it.
///
/// # Errors
/// [`Failure::BadDevice`].
pub fn device_id(ordinal: c_int) -> Result<DeviceId, Failure> {
    u32::try_from(ordinal).map(DeviceId).map_err(|_| Failure::BadDevice(ordinal))
}

/// Not in a forked child. To be asked before any lock: another thread may have held it when the
/// process forked.
///
/// # Errors
/// [`vmm_pool::Error::DriverGone`].
pub fn not_forked() -> Result<(), Failure> {
    match process::is_forked_child() {
        true => Err(vmm_pool::Error::DriverGone.into()),
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::CStr;

    use super::*;

    #[test]
    fn a_panic_does_not_cross_the_border() {
        let answer = guarded(7, || if last_words().is_none() { panic!("meant to be") } else { 8 });
        assert_eq!(answer, 7);
        assert!(last_words().unwrap().contains("panicked"));
        let answer = status(|| panic!("meant to be"));
        assert_eq!(answer, vmm_pool_status::VMM_POOL_PANICKED as i32);
    }

    #[test]
    fn what_a_panic_carried_may_panic_too() {
        struct Bomb;
        impl Drop for Bomb {
            fn drop(&mut self) {
                panic!("meant to be, too");
            }
        }
        assert_eq!(guarded(7, || std::panic::panic_any(Bomb)), 7);
        assert!(last_words().unwrap().contains("panicked"));
    }

    #[test]
    fn words_are_kept_for_each_thread() {
        assert_eq!(kept(1, Err(Failure::BadLength(-3))), 1);
        assert_eq!(last_words().unwrap(), "a length of -3 bytes: expected 0 or more");
        assert_eq!(std::thread::spawn(last_words).join().unwrap(), None);
        assert_eq!(kept(1, Ok(2)), 2);
        assert!(last_words().is_some(), "success forgets nothing");
    }

    fn last_words() -> Option<String> {
        let words = failure::last();
        // SAFETY: a C string that stays until this thread's next failure.
        (!words.is_null()).then(|| unsafe { CStr::from_ptr(words) }.to_str().unwrap().to_owned())
    }
}
