//! Paged.
mod bits;
mod zone;
