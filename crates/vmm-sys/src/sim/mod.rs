//! The simulated device: a small truthful machine behind the [`Driver`](crate::Driver) contract.
//!
//! It answers as the measured driver does, row by row, with the same codes; it keeps a ledger of
//! addresses, chunks, references, mappings and access, and the bytes themselves; it has streams
//! and events on a virtual clock, and charges each call the cost that was measured. What it
//! imitates, where it is stricter than the hardware and what it cannot show is told in
//! `docs/SIMULATOR.md`.
//!
//! # Time
//!
//! The clock is virtual and moves in three ways: by the modelled cost of each call, by
//! [`Sim::advance`], and by a call that waits for work (it jumps to when the work is done). Work
//! that is held by a test ([`Sim::hold`]) or by a word that the host has yet to write has no such
//! time: a call that waits for it blocks its thread, in real time, until another thread lets it go.
//!
//! # The door
//!
//! Every call passes `Sim::enter`, which asks whether the process is gone, consults the fault plan,
//! charges the time and counts; operations behind it check everything before they change anything,
//! so that a refused call changes no state.

mod access;
mod answer;
mod builder;
mod byte_kernel;
mod bytes;
mod capture;
mod context;
mod control;
mod copies;
mod costs;
mod dma_buf;
mod driver_impl;
mod events;
mod execute;
mod export;
mod fault;
mod graphs;
mod inspect;
mod kernels;
mod legacy;
mod lies;
mod machine;
mod peers;
mod physical;
mod regions;
mod registered;
mod replay;
mod share;
mod state;
mod streams;
mod timeline;
mod vaspace;
mod vmm;

#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Instant;

use answer::{Answer, Refused};
use builder::Config;
pub use builder::{DEVICES_MAX, Link, SimBuilder, TimeMode};
pub use byte_kernel::{ByteKernel, ByteSpan};
pub use fault::{CallGate, FaultId, FaultPlan};
pub use inspect::{DeviceSummary, LedgerSummary};
pub use lies::Property;
use state::State;
pub use timeline::HoldId;

use crate::call::{Call, CallLedger};
use crate::error::{DriverResult, ResultCode};
use crate::process;
use crate::sync::{Condvar, Mutex, MutexGuard, thread};
use crate::types::DeviceId;

/// A simulated machine with up to [`DEVICES_MAX`] GPUs. See the [module page](self).
pub struct Sim {
    /// For the threads that run host functions.
    me: Weak<Sim>,
    ledger: CallLedger,
    /// Not of `sync`: it is read where a proof's scheduler is gone already.
    is_shut_down: AtomicBool,
    state: Mutex<State>,
    /// Signalled when something that a blocked call waits for may have changed.
    wake: Condvar,
}

/// The machine, locked.
type Locked<'a> = MutexGuard<'a, State>;

impl Sim {
    /// Starts from the machine that was measured, with one device.
    pub fn builder() -> SimBuilder {
        SimBuilder::new()
    }

    fn from_config(config: Config) -> Arc<Sim> {
        process::install_hooks();
        Arc::new_cyclic(|me| Sim {
            me: me.clone(),
            ledger: CallLedger::default(),
            is_shut_down: AtomicBool::new(false),
            state: Mutex::new(State::new(config)),
            wake: Condvar::new(),
        })
    }

    fn gone(&self) -> Option<ResultCode> {
        if process::is_forked_child() {
            Some(ResultCode::NOT_INITIALIZED)
        } else if process::is_exiting() || self.is_shut_down.load(Ordering::Relaxed) {
            Some(ResultCode::DEINITIALIZED)
        } else {
            None
        }
    }

    /// A question that needs no context.
    fn ask<T>(
        &self,
        call: Call,
        device: Option<DeviceId>,
        body: impl FnOnce(&mut Locked<'_>) -> Answer<T>,
    ) -> DriverResult<T> {
        self.enter(call, device, body)
    }

    /// A call in whichever context is current in the calling thread, if any.
    fn call<T>(
        &self,
        call: Call,
        body: impl FnOnce(&mut Locked<'_>) -> Answer<T>,
    ) -> DriverResult<T> {
        self.enter(call, None, |state| {
            state.check_current_context()?;
            body(state)
        })
    }

    /// A call in the primary context of `device`. The thread's own current context is not touched.
    fn call_on<T>(
        &self,
        call: Call,
        device: DeviceId,
        body: impl FnOnce(&mut Locked<'_>) -> Answer<T>,
    ) -> DriverResult<T> {
        self.enter(call, Some(device), |state| {
            state.enter_context(device)?;
            self.wait_behind(state, call, device)?;
            body(state)
        })
    }

    /// The one door of all calls.
    fn enter<T>(
        &self,
        call: Call,
        device: Option<DeviceId>,
        body: impl FnOnce(&mut Locked<'_>) -> Answer<T>,
    ) -> DriverResult<T> {
        // Before the lock: in a forked child another thread of the parent may have held it.
        if let Some(code) = self.gone() {
            return Err(Refused::new(code).into_error(call, device));
        }
        if execute::in_host_function() {
            let refused = Refused::new(ResultCode::NOT_PERMITTED)
                .because("a host function must make no driver call");
            return Err(refused.into_error(call, device));
        }
        #[cfg(all(debug_assertions, not(shuttle)))]
        crate::sync::watched::at_the_driver(call);
        // What it takes to simulate the call, for whoever measures host time around calls.
        let _host_time = self.ledger.stopwatch();
        let mut state = self.state.lock();
        let mut verdict = state.faults.consult(call);
        if verdict.panics {
            // Counted, and with nothing of the machine in hand.
            self.ledger.book(call, 0);
            drop(state);
            panic!("injected panic in {call}");
        }
        if !verdict.real_delay.is_zero() {
            MutexGuard::unlocked(&mut state, || thread::sleep(verdict.real_delay));
        }
        if !verdict.gates.is_empty() {
            let limit = state.config.blocked_limit;
            let passed = |gate: &CallGate| gate.pass(limit);
            if !MutexGuard::unlocked(&mut state, || verdict.gates.iter().all(passed)) {
                verdict.fail = verdict.fail.or(Some(ResultCode::LAUNCH_TIMEOUT));
            }
        }
        self.pump(&mut state);
        let started_ns = state.now_ns;
        state.bill_ns = costs::base_ns(call);
        let version = state.config.driver_version;
        let answer = if let Some(code) = verdict.fail {
            Err(Refused::new(code).because("injected fault"))
        } else if version < costs::since_version(call) {
            Err(Refused::new(ResultCode::NOT_FOUND)
                .because(format_args!("driver {version} has no such call")))
        } else {
            body(&mut state)
        };
        let waited_ns = state.now_ns - started_ns;
        let cost_ns = state.bill_ns + verdict.delay_ns;
        self.ledger.book(call, waited_ns + cost_ns);
        let until = state.now_ns + cost_ns;
        self.advance_to(&mut state, until);
        self.settle_host_functions(&mut state);
        drop(state);
        answer.map_err(|refused| refused.into_error(call, device))
    }

    /// Lets time pass until `done`, as a call that waits does: jumps the clock to the next
    /// completion, and blocks in real time where only a test or another thread can help.
    fn wait_until(
        &self,
        state: &mut Locked<'_>,
        mut done: impl FnMut(&State) -> bool,
    ) -> Answer<()> {
        let mut blocked_since: Option<Instant> = None;
        let limit = state.config.blocked_limit;
        loop {
            self.pump(state);
            if done(state) {
                return Ok(());
            }
            if let Some(next_ns) = state.next_completion_ns() {
                self.advance_to(state, next_ns);
                continue;
            }
            if blocked_since.get_or_insert_with(Instant::now).elapsed() > limit {
                return Err(Refused::new(ResultCode::LAUNCH_TIMEOUT).because(format_args!(
                    "waited {limit:?} for work that nothing lets go: {}",
                    state.describe_blocked()
                )));
            }
            // A word in host memory changes without a signal, so look again soon.
            self.wake.wait_for(state, std::time::Duration::from_micros(200));
        }
    }
}

impl fmt::Debug for Sim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Not the state: a debug print must not wait for a lock.
        f.debug_struct("Sim").finish_non_exhaustive()
    }
}
