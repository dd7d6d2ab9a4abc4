//! What the operating system says of this process.

/// Descriptors, and host memory.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Process {
    pub(super) descriptors: u64,
    pub(super) resident_bytes: u64,
}

impl Process {
    /// As it is now. 0 where there is no `/proc`.
    pub(super) fn now() -> Process {
        // Not counting the one that is open to count.
        let open = std::fs::read_dir("/proc/self/fd").map_or(1, Iterator::count) as u64;
        Process { descriptors: open.saturating_sub(1), resident_bytes: resident_bytes() }
    }
}

/// Has the allocator give back what nobody has: at a quiet point it is no part of what creeps.
pub(super) fn give_back_free_memory() {
    #[cfg(target_env = "gnu")]
    // SAFETY: it concerns memory that is free, whichever threads run.
    unsafe {
        libc::malloc_trim(0);
    }
}

fn resident_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or(0) << 10
}
