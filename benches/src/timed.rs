//! One piece of work: how long it took, and with which driver calls; and several of them in turns.

use std::sync::Arc;
use std::time::Instant;

use vmm_pool_cli::replay::Cause;
use vmm_sys::{CallCounts, Driver, DriverKind, ThreadTime};

use crate::samples::{Spread, spread};

/// What a piece of work took.
#[derive(Debug)]
pub struct Took {
    /// Microseconds.
    pub us: f64,
    /// The driver calls of all threads meanwhile.
    pub calls: CallCounts,
}

/// Runs `work`, timed and counted.
///
/// On the simulated device the host time that goes into simulating a call is taken out, and what
/// the call would cost is put in its place; what is left is the caller's own time, as on a GPU.
/// The ledger's timing must be on there. Work that only the GPU does takes no time then.
///
/// # Errors
/// Those of `work`.
pub fn timed<T>(
    driver: &Arc<dyn Driver>,
    work: impl FnOnce() -> Result<T, Cause>,
) -> Result<(T, Took), Cause> {
    let (before, time_before) = (driver.ledger().snapshot(), ThreadTime::now());
    let start = Instant::now();
    let made = work()?;
    let mut nanos = start.elapsed().as_nanos() as f64;
    let (calls, time) = (driver.ledger().snapshot().since(&before), ThreadTime::now());
    if driver.kind() == DriverKind::Sim {
        nanos -= (time.spent_nanos - time_before.spent_nanos) as f64;
        nanos += (time.charged_nanos - time_before.charged_nanos) as f64;
    }
    Ok((made, Took { us: nanos / 1e3, calls }))
}

/// What all repetitions of one side took, and the calls of one.
#[derive(Debug, Default)]
pub struct Side {
    us: Vec<f64>,
    calls: Option<String>,
}

impl Side {
    /// Notes one repetition: each must need the same calls.
    ///
    /// # Errors
    /// The calls differ from those before.
    pub fn add(&mut self, took: &Took) -> Result<(), Cause> {
        self.us.push(took.us);
        let calls = took.calls.to_string();
        match &self.calls {
            Some(known) if *known != calls => {
                Err(format!("repetitions differ: {known}, then {calls}").into())
            }
            _ => {
                self.calls = Some(calls);
                Ok(())
            }
        }
    }

    /// The times, and the calls of one repetition.
    ///
    /// # Errors
    /// There was no repetition.
    pub fn figures(self) -> Result<(Spread, String), Cause> {
        Ok((spread(&self.us).ok_or("no repetitions")?, self.calls.unwrap_or_default()))
    }
}

/// One repetition of a side: what its parts took, by their names.
pub type Parts = Vec<(&'static str, Took)>;

/// Something that is measured beside others.
pub type Run<'a> = Box<dyn FnMut() -> Result<Parts, Cause> + 'a>;

/// Runs all sides `repetitions` times, each time another one first, as the second may find a warmer
/// driver than the first; once before without counting. Answers in the order of the sides, and of
/// their parts.
///
/// # Errors
/// Those of the sides; a side whose driver calls differ from one repetition to the next.
pub fn in_turns(
    repetitions: u32,
    mut sides: Vec<Run<'_>>,
) -> Result<Vec<(&'static str, Side)>, Cause> {
    let mut found: Vec<Vec<(&'static str, Side)>> = Vec::new();
    for run in &mut sides {
        let parts = run()?;
        found.push(parts.into_iter().map(|(name, _)| (name, Side::default())).collect());
    }
    for repetition in 0..repetitions as usize {
        for turn in 0..sides.len() {
            let index = (repetition + turn) % sides.len();
            for ((name, side), (_, took)) in found[index].iter_mut().zip(sides[index]()?) {
                side.add(&took).map_err(|error| format!("{name}: {error}"))?;
            }
        }
    }
    Ok(found.into_iter().flatten().collect())
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use vmm_sys::sim::Sim;

    use super::*;

    #[test]
    fn each_side_is_first_in_its_turn_and_the_first_round_is_not_counted() {
        let driver: Arc<dyn Driver> = Sim::builder().build();
        let order = RefCell::new(String::new());
        let side = |name: &'static str| -> Run<'_> {
            let (driver, order) = (&driver, &order);
            Box::new(move || {
                let ((), took) = timed(driver, || {
                    order.borrow_mut().push_str(name);
                    driver.device_count()?;
                    Ok(())
                })?;
                Ok(vec![(name, took)])
            })
        };
        let found = in_turns(3, vec![side("a"), side("b")]).unwrap();
        assert_eq!(*order.borrow(), "ababbaab");
        for ((name, side), expected) in found.into_iter().zip(["a", "b"]) {
            assert_eq!((name, side.us.len()), (expected, 3));
            assert_eq!(side.figures().unwrap().1, "cuDeviceGetCount 1");
        }
    }

    #[test]
    fn a_side_whose_calls_change_is_an_error() {
        let driver: Arc<dyn Driver> = Sim::builder().build();
        let (mut side, call) = (Side::default(), |count: u32| {
            timed(&driver, || {
                for _ in 0..count {
                    driver.device_count()?;
                }
                Ok(())
            })
        });
        side.add(&call(1).unwrap().1).unwrap();
        let error = side.add(&call(2).unwrap().1).unwrap_err().to_string();
        assert_eq!(error, "repetitions differ: cuDeviceGetCount 1, then cuDeviceGetCount 2");
        assert!(Side::default().figures().is_err());
    }
}
