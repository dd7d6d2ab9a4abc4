//! The heap from outside: against a slow model, over traces, and what it allocates on the host.

mod answers;
mod operations;
mod shadow;
mod trace;
mod warm;
mod windows;
