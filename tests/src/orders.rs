//! Every order of some things. `crates/pool/tests/lifecycle` has this file too, for it cannot have this crate.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

use vmm_sys::Driver;
use vmm_sys::object::retry_failed_drops;
use vmm_sys::sim::Sim;

/// Every order of `count` things, by their numbers.
pub fn orders(count: usize) -> Vec<Vec<usize>> {
    (0..count).fold(vec![vec![]], |orders, next| {
        let longer = |order: &Vec<usize>, at| {
            let mut order = order.clone();
            order.insert(at, next);
            order
        };
        orders.iter().flat_map(|order| (0..=next).map(|at| longer(order, at))).collect()
    })
}

/// Drops what `make` makes in every order, every seventh time while the thread unwinds; the machines must
/// be clean afterwards.
///
/// # Panics
/// If they are not.
pub fn in_every_order<const N: usize>(make: impl Fn() -> (Vec<Arc<Sim>>, [Box<dyn Any>; N])) {
    for (nth, order) in orders(N).into_iter().enumerate() {
        let (machines, things) = make();
        let unwinding = nth % 7 == 6;
        let ended = catch_unwind(AssertUnwindSafe(|| {
            let mut things = things.map(Some);
            let in_order: Vec<_> = order.iter().map(|at| things[*at].take()).collect();
            if unwinding {
                let _dropped_in_this_order = in_order;
                resume_unwind(Box::new("as the test wants it"));
            }
            in_order.into_iter().for_each(drop);
        }));
        assert_eq!(ended.is_err(), unwinding, "{order:?}");
        for sim in machines {
            let driver: Arc<dyn Driver> = sim.clone();
            assert_eq!(retry_failed_drops(&driver), 0, "{order:?}");
            sim.check_clean().unwrap_or_else(|left| panic!("{order:?}: {left}"));
        }
    }
}
