//! [`Terms`]: how memory is to change place.

use std::time::Duration;

use super::hooks::Cause;
use crate::lane::Wait;
use crate::place::Place;
use crate::turn::Turn;

/// How the memory is to change place.
#[derive(Clone, Copy, Debug)]
pub(super) struct Terms {
    pub(super) cause: Cause,
    pub(super) turn: Turn,
    /// Whether the GPU may be waited for in order to have memory.
    pub(super) wait: Wait,
    /// How long guards that are alive are waited for.
    pub(super) patience: Duration,
    pub(super) left: Left,
    pub(super) effort: Effort,
    /// Whether uses that begin meanwhile wait, instead of being held.
    pub(super) shut: bool,
}

/// What becomes of the chunks that are left behind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Left {
    /// They go to the stock of their place.
    Shelf,
    /// They go back to the driver.
    Driver,
}

/// How hard a place is pressed for memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Effort {
    /// By the whole ladder.
    Ladder,
    /// Not at all: it gives what is ready, in its stock or at the driver.
    Ready,
}

/// Where a chunk is to go.
#[derive(Clone, Copy, Debug)]
pub(super) struct Target {
    pub(super) slot: u32,
    pub(super) to: Place,
    /// Whether that is on loan: booked under the place's budget, and the place is not pressed.
    pub(super) is_loan: bool,
    /// Whether it gets another chunk where it lies already.
    pub(super) is_anew: bool,
}

impl Target {
    /// To a place that somebody chose.
    pub(super) fn chosen(slot: u32, to: Place) -> Target {
        Target { slot, to, is_loan: false, is_anew: false }
    }

    /// To a lender.
    pub(super) fn loan(slot: u32, to: Place) -> Target {
        Target { slot, to, is_loan: true, is_anew: false }
    }

    /// To a chunk of its own where it lies.
    pub(super) fn anew(slot: u32, at: Place, is_loan: bool) -> Target {
        Target { slot, to: at, is_loan, is_anew: true }
    }
}

/// What a move did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Moved {
    /// Memory that changed place, in bytes.
    pub bytes: u64,
    /// The buffer's generation afterwards.
    pub generation: u64,
    /// How long users were held, in microseconds: from the moment when no guard was alive until all
    /// memory stood at its new place. Work that was enqueued before is in it.
    pub held_us: u64,
}

impl Terms {
    /// A move that nobody asked the buffer's owner about.
    pub(super) fn unasked(patience: Duration) -> Terms {
        Terms {
            cause: Cause::Move,
            turn: Turn::Requester,
            wait: Wait::Yes,
            patience,
            left: Left::Shelf,
            effort: Effort::Ready,
            shut: false,
        }
    }
}
