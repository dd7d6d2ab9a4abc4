//! Pool.
