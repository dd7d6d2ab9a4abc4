//! [`Lending`]: memory of one place for elastic buffers whose home is another.
//!
//! A buffer borrows where it names lenders and its home is short. What a lender gives is booked under
//! its own budget first ([`Loan`]), so that no two borrowers can pass it together. Memory that
//! somebody placed elsewhere by name is counted like it ([`Lent`]) but booked nowhere: whoever names a
//! place has chosen it, and nobody was asked to lend.

use std::sync::Arc;

use crate::budget::Budget;
use crate::sync::atomic::{AtomicU64, Ordering};

/// How a place lends, and the figures of both sides.
#[derive(Debug)]
pub(crate) struct Lending {
    /// What borrowers may have together.
    budget: Budget,
    /// Whether borrowers that name nobody may have it too.
    to_any: bool,
    /// Memory of this place in buffers whose home is elsewhere.
    lent_bytes: AtomicU64,
    /// Memory elsewhere in buffers whose home this place is.
    borrowed_bytes: AtomicU64,
}

/// Memory that is booked under a lender's budget, as long as this lives.
#[derive(Debug)]
pub(crate) struct Loan {
    lender: Arc<Lending>,
    bytes: u64,
}

/// Memory of one place that stands in a buffer whose home is another: counted on both sides as long
/// as this lives.
#[derive(Debug)]
pub(crate) struct Lent {
    owner: Arc<Lending>,
    home: Arc<Lending>,
    bytes: u64,
    loan: Option<Loan>,
}

impl Lending {
    pub(crate) fn new(budget_bytes: u64, to_any: bool) -> Arc<Lending> {
        Arc::new(Lending {
            budget: Budget::new(budget_bytes),
            to_any,
            lent_bytes: AtomicU64::new(0),
            borrowed_bytes: AtomicU64::new(0),
        })
    }

    /// Whether borrowers that name nobody may have its memory.
    pub(crate) fn is_for_any(&self) -> bool {
        self.to_any && self.budget_bytes() > 0
    }

    /// What borrowers may have together, in bytes.
    pub(crate) fn budget_bytes(&self) -> u64 {
        self.budget.limit_bytes()
    }

    /// What they have or are about to have of it.
    pub(crate) fn booked_bytes(&self) -> u64 {
        self.budget.booked_bytes()
    }

    /// What they may still have.
    pub(crate) fn room_bytes(&self) -> u64 {
        self.budget.room_bytes()
    }

    /// Memory of this place in buffers whose home is elsewhere, borrowed or placed.
    pub(crate) fn lent_bytes(&self) -> u64 {
        self.lent_bytes.load(Ordering::Relaxed)
    }

    /// Memory elsewhere in buffers whose home this place is, borrowed or placed.
    pub(crate) fn borrowed_bytes(&self) -> u64 {
        self.borrowed_bytes.load(Ordering::Relaxed)
    }

    /// Books memory before it is taken. `None` if the budget would be passed.
    pub(crate) fn book(self: &Arc<Lending>, bytes: u64) -> Option<Loan> {
        self.budget.book(bytes).then(|| Loan { lender: self.clone(), bytes })
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        self.lender.budget.unbook(self.bytes);
    }
}

impl Lent {
    pub(crate) fn new(
        owner: &Arc<Lending>,
        home: &Arc<Lending>,
        bytes: u64,
        loan: Option<Loan>,
    ) -> Lent {
        owner.lent_bytes.fetch_add(bytes, Ordering::Relaxed);
        home.borrowed_bytes.fetch_add(bytes, Ordering::Relaxed);
        Lent { owner: owner.clone(), home: home.clone(), bytes, loan }
    }

    /// Whether it is booked under the owner's budget.
    pub(crate) fn is_loan(&self) -> bool {
        self.loan.is_some()
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        self.owner.lent_bytes.fetch_sub(self.bytes, Ordering::Relaxed);
        self.home.borrowed_bytes.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loan_counts_until_it_ends_and_the_budget_holds() {
        let (lender, home) = (Lending::new(10, true), Lending::new(0, true));
        let loan = lender.book(6).unwrap();
        assert!(lender.book(5).is_none() && home.book(1).is_none());
        let lent = Lent::new(&lender, &home, 6, Some(loan));
        let placed = Lent::new(&lender, &home, 7, None);
        assert_eq!((lender.lent_bytes(), home.borrowed_bytes()), (13, 13));
        assert_eq!((lender.booked_bytes(), lender.room_bytes()), (6, 4));
        assert!(lent.is_loan() && !placed.is_loan());
        drop((lent, placed));
        assert_eq!((lender.lent_bytes(), home.borrowed_bytes(), lender.booked_bytes()), (0, 0, 0));
        assert!(lender.is_for_any() && !home.is_for_any());
        assert!(!Lending::new(10, false).is_for_any());
    }
}
