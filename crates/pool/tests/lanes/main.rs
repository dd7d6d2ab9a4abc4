//! Stories of lanes, one program: a file a subject.

#![allow(clippy::unwrap_used, reason = "a failure ends the story")]

#[path = "../common/mod.rs"]
mod common;

mod addresses;
mod answers;
mod capture;
mod first_form;
mod gates;
mod idle;
mod late_capture;
mod many_lanes;
mod old_drivers;
mod probe;
mod refused;
mod shortage;
mod thrift;
