//! The answers of the general functions.
#![allow(non_camel_case_types, reason = "the names are those of the header")]

/// What the functions of this header answer. Everything but VMM_POOL_OK leaves things as they were,
/// and vmm_pool_last_error says more in words.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum vmm_pool_status {
    /// It is done.
    VMM_POOL_OK = 0,
    /// An argument is wrong: the words say which, and what was expected.
    VMM_POOL_INVALID = 1,
    /// Physical memory is short, of the device, of a limit or of a quota.
    VMM_POOL_OUT_OF_MEMORY = 2,
    /// Addresses are short, which is not memory.
    VMM_POOL_OUT_OF_ADDRESSES = 3,
    /// No block that somebody holds starts at the address: it was freed before, or is none.
    VMM_POOL_NOT_A_BLOCK = 4,
    /// There is no driver: no GPU, or a wrong VMM_POOL_DRIVER.
    VMM_POOL_NO_DRIVER = 5,
    /// The device, the driver or the buffer cannot do that.
    VMM_POOL_NOT_SUPPORTED = 6,
    /// Somebody uses it: try again when that has ended.
    VMM_POOL_BUSY = 7,
    /// This process was forked after the driver was opened, or it is exiting: the driver is gone.
    VMM_POOL_FORKED = 8,
    /// Any other answer of the driver.
    VMM_POOL_DRIVER = 9,
    /// The text was cut, since the buffer is too short for it.
    VMM_POOL_TRUNCATED = 10,
    /// A bug in the pool; what it printed to stderr says where.
    VMM_POOL_PANICKED = 11,
    /// The process that owns a shared buffer is not there, refuses, or has taken the buffer back.
    VMM_POOL_OWNER = 12,
}
