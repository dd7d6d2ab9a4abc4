//! [`Registry`]: functions that callers want to be called, until they say otherwise.

use std::fmt;
use std::sync::{Arc, Weak};

use crate::process;
use crate::sync::Mutex;

/// Functions of callers, the oldest first. `F` is what they have in common: `dyn Fn(..) + Send + Sync`.
///
/// Nothing is locked while one is called or dropped: it may do anything, also with the registry.
pub struct Registry<F: ?Sized>(Arc<Mutex<List<F>>>);

struct List<F: ?Sized> {
    entries: Vec<(u64, Arc<F>)>,
    last_number: u64,
}

/// Keeps a function registered, and not the registry; dropping it ends that. A call that has begun in
/// another thread is not waited for.
#[must_use = "dropping it unregisters the function"]
pub struct Registered<F: ?Sized> {
    list: Weak<Mutex<List<F>>>,
    number: u64,
}

impl<F: ?Sized> Registry<F> {
    /// Registers it until the answer is dropped. A forked child calls nobody any more, and its locks
    /// may be held by threads that it does not have.
    pub fn register(&self, function: Arc<F>) -> Registered<F> {
        if process::is_forked_child() {
            return Registered { list: Weak::new(), number: 0 };
        }
        Registered { list: Arc::downgrade(&self.0), number: self.add(function) }
    }

    /// Registers it for good.
    pub fn push(&self, function: Arc<F>) {
        self.add(function);
    }

    fn add(&self, function: Arc<F>) -> u64 {
        let mut list = self.0.lock();
        list.last_number += 1;
        let number = list.last_number;
        list.entries.push((number, function));
        number
    }

    /// Those of now.
    pub fn all(&self) -> Vec<Arc<F>> {
        self.0.lock().entries.iter().map(|(_, function)| function.clone()).collect()
    }
}

impl<F: ?Sized> Default for Registry<F> {
    fn default() -> Registry<F> {
        Registry(Arc::new(Mutex::new(List { entries: Vec::new(), last_number: 0 })))
    }
}

impl<F: ?Sized> Clone for Registry<F> {
    /// A list of its own, of the same functions. Who registered one ends that in the first.
    fn clone(&self) -> Registry<F> {
        let list = self.0.lock();
        let (entries, last_number) = (list.entries.clone(), list.last_number);
        Registry(Arc::new(Mutex::new(List { entries, last_number })))
    }
}

impl<F: ?Sized> fmt::Debug for Registry<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Registry({})", self.0.lock().entries.len())
    }
}

impl<F: ?Sized> fmt::Debug for Registered<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Registered({})", self.number)
    }
}

impl<F: ?Sized> Drop for Registered<F> {
    fn drop(&mut self) {
        let alive = self.list.upgrade().filter(|_| !process::is_forked_child());
        let Some(list) = alive else { return };
        let mut list = list.lock();
        let at = list.entries.iter().position(|(number, _)| *number == self.number);
        let function = at.map(|at| list.entries.remove(at));
        drop(list);
        // What it holds may do anything when it is dropped.
        drop(function);
    }
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use super::*;

    type Count = dyn Fn() -> u64 + Send + Sync;

    fn answers(registry: &Registry<Count>) -> Vec<u64> {
        registry.all().iter().map(|function| function()).collect()
    }

    #[test]
    fn functions_are_there_in_order_until_their_callers_let_go() {
        let registry: Registry<Count> = Registry::default();
        let first = registry.register(Arc::new(|| 1));
        registry.push(Arc::new(|| 2));
        // What the third holds ends the first: nothing is locked while it is dropped.
        let held =
            registry.register(Arc::new(move || u64::from(format!("{first:?}").len() > 1) + 2));
        assert_eq!(answers(&registry), [1, 2, 3]);
        let copy = registry.clone();
        drop(held);
        assert_eq!((answers(&registry), answers(&copy)), (vec![1, 2], vec![1, 2, 3]));
        drop(copy);
        assert_eq!(answers(&registry), [2]);
        let late = registry.register(Arc::new(|| 4));
        assert_eq!(answers(&registry), [2, 4]);
        drop(registry);
        drop(late);
    }
}
