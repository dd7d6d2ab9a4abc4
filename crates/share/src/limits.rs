//! How many descriptors this process may have.

use rustix::process::{Resource, getrlimit};

/// The limit of open descriptors of this process.
pub(crate) fn descriptor_limit() -> usize {
    // No limit, or one beyond what can be counted, is as good as any large one.
    getrlimit(Resource::Nofile).current.map_or(usize::MAX, |limit| limit as usize)
}

/// The descriptors that are open now. Where they cannot be counted, half of the limit is thought to
/// be.
pub(crate) fn open_descriptors() -> usize {
    match std::fs::read_dir("/proc/self/fd") {
        // One of them is the listing's own.
        Ok(entries) => entries.count().saturating_sub(1),
        Err(_) => descriptor_limit() / 2,
    }
}

/// How many descriptors of a kind may be kept: `most`, but with `reserve` left to the rest of the
/// program. `kept` of those that are open are of that kind.
pub(crate) fn keep_limit(most: usize, reserve: usize, kept: usize) -> usize {
    let others = open_descriptors().saturating_sub(kept);
    most.min(descriptor_limit().saturating_sub(others).saturating_sub(reserve))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_leaves_the_reserve_to_others() {
        let limit = descriptor_limit();
        assert_eq!(keep_limit(10, 0, 0), 10.min(limit - open_descriptors()));
        assert_eq!(keep_limit(usize::MAX, limit, 0), 0);
        assert!(keep_limit(usize::MAX, 16, 0) + 16 <= limit);
    }
}
