//! For tests in Rust: what C has only a handle of, and an end of what lives as long as the process.

use vmm_pool::Pool;

use crate::failure::Failure;
use crate::handle::VmmPool;
use crate::pools;

/// The pool of a handle.
///
/// # Errors
/// [`Failure::UnknownHandle`]; a forked child.
pub fn pool_of(handle: *const VmmPool) -> Result<Pool, Failure> {
    Ok(pools::by_handle(handle)?.1)
}

/// Ends the process's own pools, as if nobody had asked for them: streams that used them were said to be
/// gone before, and blocks given back.
pub fn end_own() {
    pools::end_own();
}
