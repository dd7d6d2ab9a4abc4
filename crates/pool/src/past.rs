//! [`Past`]: what became of a chunk since it was made. It goes with the chunk, wherever that goes.
//!
//! Two laws rest on it. Memory that another process or another driver may have is given to nobody
//! else: the shelf does not give it, it only goes back to the driver, which clears what it makes anew
//! (row D-C5). And who must not see what others wrote is given memory that nobody used, or that was
//! zeroed since.

use std::sync::Arc;

use vmm_sys::object::Chunk;

use crate::account::Booking;
use crate::sync::Mutex;

/// Who wrote a chunk last, as far as anybody asks.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum User {
    /// It is as the driver made it: all zero.
    #[default]
    Nobody,
    /// Lanes, and elastic buffers of which nobody said whose they are. Everybody, where owners are not
    /// told apart.
    Nameless,
    /// The elastic buffers of one owner.
    Tag(Arc<str>),
    /// What different owners wrote may be in it.
    Several,
}

/// What is known of a chunk, and its booking.
#[derive(Debug)]
pub(crate) struct Past {
    _booking: Booking,
    known: Mutex<Known>,
}

#[derive(Debug, Default)]
struct Known {
    user: User,
    is_outside: bool,
}

impl User {
    /// Whose elastic buffers with this tag are.
    pub(crate) fn of_tag(tag: Option<&Arc<str>>) -> User {
        tag.map_or(User::Nameless, |tag| User::Tag(tag.clone()))
    }
}

impl Past {
    /// Of a chunk that is going to be made.
    pub(crate) fn new(booking: Booking) -> Past {
        Past { _booking: booking, known: Mutex::default() }
    }

    fn of(chunk: &Chunk) -> Option<&Past> {
        chunk.receipt()
    }
}

/// Who wrote `chunk` last.
pub(crate) fn user_of(chunk: &Chunk) -> User {
    // Only chunks of the depots' making are known.
    Past::of(chunk).map_or(User::Several, |past| past.known.lock().user.clone())
}

/// `user` may write `chunk` from now on, over what is there.
pub(crate) fn note_user(chunk: &Chunk, user: &User) {
    let Some(past) = Past::of(chunk) else { return };
    let known = &mut past.known.lock();
    known.user = match &known.user {
        User::Nobody => user.clone(),
        before if before == user => return,
        _ => User::Several,
    };
}

/// Nothing is in `chunk` but what `user` wrote.
pub(crate) fn note_only_user(chunk: &Chunk, user: &User) {
    let Some(past) = Past::of(chunk) else { return };
    past.known.lock().user = user.clone();
}

/// Whether another process or driver may have `chunk`.
pub(crate) fn is_outside(chunk: &Chunk) -> bool {
    Past::of(chunk).is_some_and(|past| past.known.lock().is_outside)
}

/// A descriptor of `chunk` is going to be made. What becomes of it, nobody can know, so that is for good.
pub(crate) fn note_outside(chunk: &Chunk) {
    let Some(past) = Past::of(chunk) else { return };
    past.known.lock().is_outside = true;
}
