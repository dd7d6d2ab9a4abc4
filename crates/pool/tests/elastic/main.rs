//! Stories of elastic buffers, one program: a file a subject.

#![allow(clippy::unwrap_used, reason = "a failure ends the story")]

#[path = "../common/mod.rs"]
mod common;

mod access;
mod answers;
mod balance;
mod borrow;
mod copy;
mod core;
mod homecoming;
mod hooks;
mod host;
mod leftovers;
mod lenders;
mod moving;
mod outside;
mod recall;
mod room;
mod scrub;
mod share;
mod share_moves;
mod sleep;
mod stuck;
mod threads;
mod uses;
