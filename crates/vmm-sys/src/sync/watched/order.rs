//! Classes of locks, and the order in which threads take them.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::panic::Location;

use crate::call::Call;

/// Where locks of a class are made, and whether they may be held at a driver call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Class {
    made_at: &'static Location<'static>,
    across_calls: bool,
}

impl fmt::Display for Class {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let file = self.made_at.file();
        let file = file.rsplit_once("crates/").map_or(file, |(_, file)| file);
        write!(f, "{file}:{}", self.made_at.line())
    }
}

impl Class {
    /// The class of what is made where this is called.
    #[track_caller]
    pub const fn here() -> Class {
        Class { made_at: Location::caller(), across_calls: false }
    }

    /// The same for locks that may be held at a driver call.
    #[track_caller]
    pub(super) const fn across_calls_here() -> Class {
        Class { made_at: Location::caller(), across_calls: true }
    }

    /// A lock of this class is taken; the answer is dropped when it is let go.
    pub fn taken(self) -> Held {
        self.hold(true)
    }

    /// `waits`: the thread may have waited for it, so its place in the order counts.
    pub(super) fn hold(self, waits: bool) -> Held {
        // In a forked child nobody knows what the others held.
        if !crate::process::is_forked_child() {
            let known = HELD.try_with(|held| {
                let mut held = held.borrow_mut();
                if waits {
                    held.iter().for_each(|before| before.comes_before(self));
                }
                held.push(self);
            });
            // Values of a thread that end after this one take locks too.
            let _unknown = known;
        }
        Held(self)
    }
}

impl Class {
    fn key(self) -> usize {
        std::ptr::from_ref(self.made_at).addr()
    }

    fn comes_before(self, after: Class) {
        let new =
            |known: &RefCell<HashSet<_>>| known.borrow_mut().insert((self.key(), after.key()));
        if KNOWN.try_with(new).unwrap_or(true) {
            ORDER.lock().follows(self, after);
        }
    }
}

/// A lock that the calling thread holds.
#[derive(Debug)]
pub struct Held(Class);

impl Drop for Held {
    fn drop(&mut self) {
        let _unknown = HELD.try_with(|held| {
            let mut held = held.borrow_mut();
            if let Some(at) = held.iter().rposition(|class| *class == self.0) {
                held.remove(at);
            }
        });
    }
}

thread_local! {
    static HELD: RefCell<Vec<Class>> = const { RefCell::new(Vec::new()) };
    /// Pairs that this thread need not tell again.
    static KNOWN: RefCell<HashSet<(usize, usize)>> = RefCell::new(HashSet::new());
}

static ORDER: parking_lot::Mutex<Order> =
    parking_lot::Mutex::new(Order { after: BTreeMap::new(), faults: Vec::new() });

/// Which class was taken while which was held.
#[derive(Debug)]
struct Order {
    after: BTreeMap<Class, Vec<Class>>,
    faults: Vec<String>,
}

impl Order {
    fn follows(&mut self, before: Class, after: Class) {
        let known = self.after.get(&before).is_some_and(|all| all.contains(&after));
        // Many lanes at once are taken under the lock of their list.
        if known || before == after {
            return;
        }
        if let Some(way) = self.way(after, before) {
            let way: Vec<String> = way.iter().map(Class::to_string).collect();
            let thread = std::thread::current();
            let name = thread.name().unwrap_or("without a name").to_owned();
            self.faults.push(format!(
                "thread {name:?} takes the lock of {after} while it holds that of {before}; elsewhere: {}",
                way.join(", then ")
            ));
        }
        self.after.entry(before).or_default().push(after);
    }

    fn at_the_driver(&mut self, held: &[Class], call: Call) {
        for class in held.iter().filter(|class| !class.across_calls) {
            let fault = format!("{call} is made under the lock of {class}");
            if !self.faults.contains(&fault) {
                self.faults.push(fault);
            }
        }
    }

    /// How `to` is reached from `from`, both included.
    fn way(&self, from: Class, to: Class) -> Option<Vec<Class>> {
        let mut ways = vec![vec![from]];
        let mut seen = vec![from];
        while let Some(way) = ways.pop() {
            let last = *way.last()?;
            if last == to {
                return Some(way);
            }
            for next in self.after.get(&last).into_iter().flatten() {
                if !seen.contains(next) {
                    seen.push(*next);
                    ways.push(way.iter().copied().chain([*next]).collect());
                }
            }
        }
        None
    }
}

/// The contradictions that were found in this process so far, and locks that were held at driver calls.
pub fn faults() -> Vec<String> {
    ORDER.lock().faults.clone()
}

/// What the calling thread holds.
pub(super) fn held() -> Vec<Class> {
    HELD.try_with(|held| held.borrow().clone()).unwrap_or_default()
}

/// The calling thread makes a driver call: whoever waits for what it holds waits for the driver.
pub fn at_the_driver(call: Call) {
    let held = held();
    if held.iter().any(|class| !class.across_calls) {
        ORDER.lock().at_the_driver(&held, call);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // On an order of its own: the process's is what the other tests are measured by.
    fn order() -> Order {
        Order { after: BTreeMap::new(), faults: Vec::new() }
    }

    #[test]
    fn orders_that_contradict_each_other_are_found_once() {
        let (first, second, third) = (Class::here(), Class::here(), Class::here());
        assert!(first != second, "of one line, and of two columns");
        let mut order = order();
        for (before, after) in [(first, second), (second, third), (first, third), (first, first)] {
            order.follows(before, after);
        }
        assert_eq!(order.faults, [""; 0]);
        order.follows(third, first);
        order.follows(third, first);
        assert_eq!(order.faults.len(), 1);
        let fault = format!("takes the lock of {first} while it holds that of {third}");
        assert!(order.faults[0].contains(&fault), "{:?}", order.faults);
    }

    #[test]
    fn a_lock_at_the_driver_is_found_unless_it_is_made_for_that() {
        let (plain, across) = (Class::here(), Class::across_calls_here());
        let mut order = order();
        order.at_the_driver(&[across], Call::EventQuery);
        assert_eq!(order.faults, [""; 0]);
        order.at_the_driver(&[across, plain], Call::EventQuery);
        order.at_the_driver(&[plain], Call::EventQuery);
        assert_eq!(order.faults, [format!("cuEventQuery is made under the lock of {plain}")]);
    }
}
