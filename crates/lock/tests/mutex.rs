//! The mutex as its users see it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use vmm_lock::BiasedMutex;

/// Two numbers that are equal whenever nobody is inside, and a store apart while somebody is.
#[derive(Default)]
struct Pair {
    first: u64,
    second: u64,
}

impl Pair {
    fn step(&mut self) {
        assert_eq!(self.first, self.second, "two threads inside");
        self.first += 1;
        std::hint::black_box(&mut *self);
        self.second += 1;
    }
}

/// One thread goes in and out all the time and so has the bias whenever it can; the others break in.
fn torture(needed: u32, intruders: u64, breaks: u64) {
    let mutex = Arc::new(BiasedMutex::with_streak(Pair::default(), needed));
    let stop = Arc::new(AtomicBool::new(false));
    let owner = {
        let (mutex, stop) = (mutex.clone(), stop.clone());
        thread::spawn(move || {
            let mut steps = 0u64;
            while !stop.load(Ordering::Relaxed) {
                mutex.lock().step();
                steps += 1;
            }
            steps
        })
    };
    let others: Vec<_> = (0..intruders)
        .map(|nth| {
            let mutex = mutex.clone();
            thread::spawn(move || {
                let mut seen = 0u64;
                for round in 0..breaks {
                    // So that the owner is met at every place of its way in and out.
                    for _ in 0..(round * 7 + nth * 13) % 400 {
                        std::hint::spin_loop();
                    }
                    seen += u64::from(mutex.is_biased());
                    mutex.lock().step();
                }
                seen
            })
        })
        .collect();
    let biased: u64 = others.into_iter().map(|it| it.join().expect("no overlap")).sum();
    stop.store(true, Ordering::Relaxed);
    let steps = owner.join().expect("no overlap");
    let pair = mutex.lock();
    assert_eq!(pair.first, steps + intruders * breaks, "a step was lost");
    assert_eq!(pair.second, pair.first);
    if needed == 1 {
        assert!(biased > 0, "the bias was never met: this tested a spin lock");
    }
}

#[test]
fn the_owner_and_an_intruder_are_never_inside_together() {
    torture(1, 1, 60_000);
}

#[test]
fn nor_are_several_intruders() {
    torture(1, 3, 4_000);
    torture(50, 2, 4_000);
}

/// Where the kernel offers the fence; elsewhere there is no bias to test.
fn biased_after(mutex: &BiasedMutex<u32>, most: u32) -> Option<u32> {
    (1..=most).find(|_| {
        *mutex.lock() += 1;
        mutex.is_biased()
    })
}

#[test]
fn a_streak_earns_the_bias_and_another_thread_ends_it() {
    let mutex = BiasedMutex::with_streak(0, 10);
    let Some(first) = biased_after(&mutex, 1000) else {
        assert!(!mutex.is_biased());
        return;
    };
    assert!((10..=11).contains(&first), "{first}");
    thread::scope(|scope| {
        scope.spawn(|| *mutex.lock() += 1);
    });
    assert!(!mutex.is_biased());
    // More patience the second time, even for the same thread.
    let second = biased_after(&mutex, 1000).expect("it is available");
    assert!((20..=21).contains(&second), "{second}");
    assert_eq!(*mutex.lock(), first + second + 1);
    assert_eq!(format!("{:?}", mutex.lock()), (first + second + 1).to_string());
}

#[test]
fn threads_that_alternate_earn_nothing() {
    let mutex = BiasedMutex::with_streak(0, 10);
    for _ in 0..20 {
        for _ in 0..5 {
            *mutex.lock() += 1;
        }
        thread::scope(|scope| {
            scope.spawn(|| *mutex.lock() += 1);
        });
        assert!(!mutex.is_biased());
    }
    assert_eq!(*mutex.lock(), 120);
}

#[test]
fn a_panic_inside_leaves_the_mutex() {
    let mutex = BiasedMutex::with_streak(0, 2);
    for biased in [false, true] {
        if biased && biased_after(&mutex, 100).is_none() {
            return;
        }
        let inside = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let mut value = mutex.lock();
            *value = 7;
            panic!("meant to be");
        }));
        assert!(inside.is_err());
        assert_eq!(*mutex.lock(), 7);
        thread::scope(|scope| {
            scope.spawn(|| assert_eq!(*mutex.lock(), 7));
        });
    }
}

#[test]
fn a_dead_owner_blocks_nobody() {
    let mutex = Arc::new(BiasedMutex::with_streak(0, 2));
    let theirs = mutex.clone();
    thread::spawn(move || biased_after(&theirs, 100)).join().expect("no panic");
    *mutex.lock() += 1;
    assert!(*mutex.lock() >= 3);
    assert!(!format!("{mutex:?}").is_empty());
}
