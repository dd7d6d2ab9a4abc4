//! [`Account`]: the physical memory of one device's pool, booked before it is made.
//!
//! A [`Booking`] goes with the memory it stands for, and ends when the driver has taken that back:
//! so a release that the driver refuses leaves the memory booked, wherever it is kept then.

use std::sync::Arc;

use crate::budget::Budget;
use crate::sync::atomic::{AtomicU64, Ordering};

/// What one device's pool owns, against its limits.
#[derive(Debug)]
pub(crate) struct Account {
    limit_bytes: u64,
    /// A limit shared with other pools.
    budget: Option<Budget>,
    booked_bytes: AtomicU64,
    peak_booked_bytes: AtomicU64,
}

/// Bytes that are booked as long as this lives.
#[derive(Debug)]
pub(crate) struct Booking {
    account: Arc<Account>,
    bytes: u64,
}

impl Drop for Booking {
    fn drop(&mut self) {
        // Released: who sees it gone also sees that a thread had it in its hands.
        self.account.booked_bytes.fetch_sub(self.bytes, Ordering::Release);
        if let Some(budget) = &self.account.budget {
            budget.unbook(self.bytes);
        }
    }
}

impl Account {
    pub(crate) fn new(limit_bytes: u64, budget: Option<Budget>) -> Arc<Account> {
        let (booked_bytes, peak_booked_bytes) = (AtomicU64::new(0), AtomicU64::new(0));
        Arc::new(Account { limit_bytes, budget, booked_bytes, peak_booked_bytes })
    }

    /// Books memory before it is made, so that no two threads can overrun a limit together. `None`
    /// if a limit would be passed.
    pub(crate) fn book(self: &Arc<Account>, bytes: u64) -> Option<Booking> {
        let sum = |held: u64| held.checked_add(bytes).filter(|sum| *sum <= self.limit_bytes);
        let (set, fetch) = (Ordering::AcqRel, Ordering::Relaxed);
        self.booked_bytes.fetch_update(set, fetch, sum).ok()?;
        if self.budget.as_ref().is_some_and(|budget| !budget.book(bytes)) {
            self.booked_bytes.fetch_sub(bytes, Ordering::Release);
            return None;
        }
        Some(Booking { account: self.clone(), bytes })
    }

    pub(crate) fn held_bytes(&self) -> u64 {
        self.booked_bytes.load(Ordering::Acquire)
    }

    pub(crate) fn peak_held_bytes(&self) -> u64 {
        self.peak_booked_bytes.load(Ordering::Relaxed)
    }

    /// What is booked was made.
    pub(crate) fn note_peak(&self) {
        self.peak_booked_bytes.fetch_max(self.held_bytes(), Ordering::Relaxed);
    }

    /// Starts a new peak from the present.
    pub(crate) fn reset_peak(&self) {
        self.peak_booked_bytes.store(self.held_bytes(), Ordering::Relaxed);
    }

    /// Bytes that may still be made under the hard limit and the shared budget.
    pub(crate) fn room_bytes(&self) -> u64 {
        let own = self.limit_bytes.saturating_sub(self.held_bytes());
        self.budget.as_ref().map_or(own, |budget| own.min(budget.room_bytes()))
    }

    /// The shared budget's limit, if it leaves less than the pool's own.
    pub(crate) fn binding_budget_bytes(&self) -> Option<u64> {
        let own = self.limit_bytes.saturating_sub(self.held_bytes());
        self.budget.as_ref().filter(|shared| shared.room_bytes() < own).map(Budget::limit_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_booking_counts_against_both_limits_until_it_ends() {
        let budget = Budget::new(100);
        let account = Account::new(60, Some(budget.clone()));
        let first = account.book(50).unwrap();
        account.note_peak();
        assert_eq!((account.held_bytes(), account.room_bytes()), (50, 10));
        assert!(account.book(11).is_none() && account.book(u64::MAX).is_none());
        let other = Account::new(u64::MAX, Some(budget.clone()));
        assert!(other.book(51).is_none());
        assert_eq!((other.held_bytes(), other.binding_budget_bytes()), (0, Some(100)));
        let second = other.book(50).unwrap();
        assert_eq!((account.room_bytes(), account.binding_budget_bytes()), (0, Some(100)));
        drop((first, second));
        assert_eq!((account.held_bytes(), budget.booked_bytes()), (0, 0));
        assert_eq!(account.peak_held_bytes(), 50);
        account.reset_peak();
        assert_eq!(account.peak_held_bytes(), 0);
    }
}
