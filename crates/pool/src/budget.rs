//! [`Budget`]: a limit on physical memory that several pools of a process share.

use std::fmt;
use std::sync::Arc;

use crate::sync::atomic::{AtomicU64, Ordering};

/// Physical bytes that may be owned by everyone who shares the budget. Clones share it.
///
/// Memory is booked before it is made and the booking undone on failure, so no two threads can
/// overrun it together.
#[derive(Clone)]
pub struct Budget(Arc<Inner>);

struct Inner {
    limit_bytes: AtomicU64,
    booked_bytes: AtomicU64,
}

impl Budget {
    /// A budget of `limit_bytes`.
    pub fn new(limit_bytes: u64) -> Budget {
        Budget(Arc::new(Inner {
            limit_bytes: AtomicU64::new(limit_bytes),
            booked_bytes: AtomicU64::new(0),
        }))
    }

    /// The most that may be owned, in bytes.
    pub fn limit_bytes(&self) -> u64 {
        self.0.limit_bytes.load(Ordering::Relaxed)
    }

    /// Changes the most that may be owned. What is owned beyond it stays, until it is given back;
    /// nothing is made meanwhile.
    pub fn set_limit_bytes(&self, bytes: u64) {
        self.0.limit_bytes.store(bytes, Ordering::Relaxed);
    }

    /// What is owned now, in bytes.
    pub fn booked_bytes(&self) -> u64 {
        self.0.booked_bytes.load(Ordering::Relaxed)
    }

    /// What may still be made, in bytes.
    pub fn room_bytes(&self) -> u64 {
        self.limit_bytes().saturating_sub(self.booked_bytes())
    }

    /// Books `bytes`, unless that would pass the limit.
    pub(crate) fn book(&self, bytes: u64) -> bool {
        let limit = self.limit_bytes();
        let sum = |held: u64| held.checked_add(bytes).filter(|sum| *sum <= limit);
        let relaxed = Ordering::Relaxed;
        self.0.booked_bytes.fetch_update(relaxed, relaxed, sum).is_ok()
    }

    /// Gives a booking back.
    pub(crate) fn unbook(&self, bytes: u64) {
        self.0.booked_bytes.fetch_sub(bytes, Ordering::Relaxed);
    }
}

impl fmt::Debug for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Budget({} of {} bytes)", self.booked_bytes(), self.limit_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_together_never_pass_the_limit() {
        let budget = Budget::new(1000);
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..1000 {
                        if budget.book(300) {
                            assert!(budget.booked_bytes() <= 1000);
                            budget.unbook(300);
                        }
                    }
                });
            }
        });
        assert_eq!((budget.booked_bytes(), budget.room_bytes()), (0, 1000));
        assert!(!budget.book(1001) && !budget.book(u64::MAX) && budget.book(1000));
    }

    #[test]
    fn a_lower_limit_takes_nothing_away_and_lets_nothing_be_made() {
        let budget = Budget::new(u64::MAX);
        assert!(budget.book(600));
        budget.clone().set_limit_bytes(500);
        assert_eq!(
            (budget.limit_bytes(), budget.booked_bytes(), budget.room_bytes()),
            (500, 600, 0)
        );
        assert!(!budget.book(1));
        budget.unbook(200);
        assert!(budget.book(100) && !budget.book(1));
        budget.set_limit_bytes(501);
        assert!(budget.book(1));
    }
}
