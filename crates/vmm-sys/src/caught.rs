//! Code that is not this project's, called from within: what it throws goes no further.
//!
//! A driver is a trait object, and a log has whatever subscriber the program chose. Both may panic, in
//! the middle of an operation that has memory in hand. A call of the driver that panics has failed as any
//! other call may; of a log nothing is expected.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::call::Call;
use crate::error::{DriverError, DriverResult, ResultCode};

/// Makes a driver call; a panic in the driver's code is an error of that call (`CUDA_ERROR_UNKNOWN`) that
/// says what was thrown, and in which thread.
///
/// # Errors
/// The driver's.
#[inline]
pub fn caught<T>(call: Call, body: impl FnOnce() -> DriverResult<T>) -> DriverResult<T> {
    thrown(body).unwrap_or_else(|words| {
        let thread = std::thread::current();
        let name = thread.name().unwrap_or("without a name");
        Err(DriverError::new(call, ResultCode::UNKNOWN)
            .because(format_args!("the driver's code panicked in thread {name:?}: {words}")))
    })
}

/// Runs `body`; what it throws is given back in words.
///
/// # Errors
/// The words of a panic.
#[inline]
pub fn thrown<T>(body: impl FnOnce() -> T) -> Result<T, String> {
    if cfg!(shuttle) {
        // The scheduler ends its threads by unwinding them.
        return Ok(body());
    }
    catch_unwind(AssertUnwindSafe(body)).map_err(words_of)
}

#[cold]
fn words_of(payload: Box<dyn Any + Send>) -> String {
    let text = payload.downcast_ref::<&str>().copied();
    let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    let words = text.unwrap_or("no words").to_owned();
    discard(payload);
    words
}

/// How often what a panic carried is tried to be dropped.
const DROPS_MAX: u32 = 8;

/// Drops what a panic carried. That could panic again, and so could what that one carries: each under a
/// net of its own, and in the end what is left is left alone.
fn discard(mut payload: Box<dyn Any + Send>) {
    for _ in 0..DROPS_MAX {
        match catch_unwind(AssertUnwindSafe(|| drop(payload))) {
            Ok(()) => return,
            Err(again) => payload = again,
        }
    }
    std::mem::forget(payload);
}

/// A span that was entered, in a log that may throw; leaves it when it is dropped.
#[derive(Debug)]
pub struct Spanned(Option<tracing::span::EnteredSpan>);

impl Drop for Spanned {
    fn drop(&mut self) {
        let span = self.0.take();
        let _unheard = thrown(move || drop(span));
    }
}

/// Enters the span that `make` makes. For [`say!`](crate::say) and [`within!`](crate::within).
#[doc(hidden)]
pub fn enter(make: impl FnOnce() -> tracing::Span) -> Spanned {
    Spanned(thrown(|| make().entered()).ok())
}

#[doc(hidden)]
pub use tracing;

/// An event for the log, as the macro of `tracing` that is named first makes it; nothing that a
/// subscriber throws comes back.
#[macro_export]
macro_rules! say {
    ($level:ident, $($event:tt)*) => {{
        let _unheard = $crate::caught::thrown(|| $crate::caught::tracing::$level!($($event)*));
    }};
}

/// A span of the log, on level debug, until the answer is dropped; nothing that a subscriber throws comes
/// back.
#[macro_export]
macro_rules! within {
    ($($span:tt)*) => {
        $crate::caught::enter(|| $crate::caught::tracing::debug_span!($($span)*))
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_panic_carried_may_panic_too() {
        struct Bomb;
        impl Drop for Bomb {
            fn drop(&mut self) {
                std::panic::panic_any(Bomb);
            }
        }
        assert_eq!(thrown(|| std::panic::panic_any(Bomb)), Err::<(), _>("no words".to_owned()));
    }

    #[test]
    fn what_a_driver_throws_is_an_error_of_its_call() {
        let thrown = |body: fn() -> u32| caught(Call::MemMap, || Ok(body())).unwrap_err();
        for (error, words) in [
            (thrown(|| panic!("as the test wants it")), "as the test wants it"),
            (thrown(|| panic!("number {}", 7)), "number 7"),
            (thrown(|| std::panic::panic_any(7_u8)), "no words"),
        ] {
            assert_eq!((error.call(), error.code()), (Call::MemMap, ResultCode::UNKNOWN));
            assert!(error.detail().contains(words), "{error}");
            assert!(error.detail().contains("what_a_driver_throws"), "the thread: {error}");
        }
        let refused = || Err(DriverError::new(Call::MemMap, ResultCode::INVALID_VALUE));
        assert_eq!(caught(Call::MemMap, refused).map(|(): ()| 0), refused().map(|()| 0));
        assert_eq!(caught(Call::MemMap, || Ok(7)), Ok(7));
    }

    /// Throws whatever it is told.
    struct Thrower;

    impl tracing::Subscriber for Thrower {
        fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
            true
        }
        fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
            tracing::span::Id::from_u64(1)
        }
        fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
        fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
        fn event(&self, _: &tracing::Event<'_>) {
            panic!("an event")
        }
        fn enter(&self, _: &tracing::span::Id) {}
        fn exit(&self, _: &tracing::span::Id) {
            panic!("an exit")
        }
    }

    #[test]
    fn a_log_that_throws_is_not_heard() {
        tracing::subscriber::with_default(Thrower, || {
            let number = 7;
            let _span = crate::within!("a span", number);
            crate::say!(warn, number, "an event");
        });
    }
}
