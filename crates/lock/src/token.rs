//! A number for each thread, never given out twice in a process.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

#[cfg(shuttle)]
use shuttle::thread_local;

static LAST: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// 0 until the thread first asks.
    static TOKEN: Cell<u64> = const { Cell::new(0) };
}

/// The calling thread's; never 0.
#[inline]
pub(crate) fn of_this_thread() -> u64 {
    match TOKEN.with(Cell::get) {
        0 => draw(),
        token => token,
    }
}

#[cold]
fn draw() -> u64 {
    // At one a nanosecond they last for six hundred years.
    let token = LAST.fetch_add(1, Ordering::Relaxed) + 1;
    TOKEN.with(|it| it.set(token));
    token
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_thread_keeps_a_token_of_its_own() {
        let mine = of_this_thread();
        assert_eq!(mine, of_this_thread());
        let others: Vec<u64> = (0..3)
            .map(|_| std::thread::spawn(of_this_thread).join().expect("does not panic"))
            .collect();
        assert!(others.iter().all(|&other| other != mine && other != 0), "{others:?}");
        assert!(others[0] != others[1] && others[1] != others[2], "{others:?}");
    }
}
