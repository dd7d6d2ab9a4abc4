//! What tests steer: the clock, holds, faults, lost contexts.

use super::answer::Answer;
use super::fault::{FaultId, FaultPlan};
use super::state::DeviceFault;
use super::timeline::{HoldId, Op};
use super::{Locked, Sim};
use crate::call::Call;
use crate::error::{DriverResult, ResultCode};
use crate::types::{DeviceId, StreamHandle};

impl Sim {
    /// Virtual time since the machine was built, in nanoseconds.
    pub fn now_ns(&self) -> u64 {
        self.state.lock().now_ns
    }

    /// Lets virtual time pass, and with it the work that ends in it.
    pub fn advance(&self, us: u64) {
        let mut state = self.state.lock();
        let until_ns = state.now_ns.saturating_add(us.saturating_mul(1000));
        self.advance_to(&mut state, until_ns);
        self.settle_host_functions(&mut state);
        drop(state);
        self.wake.notify_all();
    }

    /// Holds a stream: work enqueued from now on waits for [`Sim::release_hold`]. A test's tool,
    /// no driver call: it is not counted and costs nothing.
    ///
    /// # Errors
    /// As a launch on that stream would.
    pub fn hold(&self, device: DeviceId, stream: StreamHandle) -> DriverResult<HoldId> {
        self.control(device, |state| {
            let id = state.stream(device, stream)?;
            state.timeline.last_hold += 1;
            let hold = HoldId(state.timeline.last_hold);
            state.submit(id, Op::Hold(hold))?;
            state.timeline.holds.insert(hold);
            Ok(hold)
        })
    }

    /// Lets a held stream go on. Releasing twice does nothing.
    pub fn release_hold(&self, hold: HoldId) {
        let mut state = self.state.lock();
        state.timeline.holds.remove(&hold);
        self.pump(&mut state);
        self.settle_host_functions(&mut state);
        drop(state);
        self.wake.notify_all();
    }

    /// Keeps a stream busy for `us` microseconds of virtual time from when its turn comes.
    ///
    /// # Errors
    /// As a launch on that stream would.
    pub fn busy(&self, device: DeviceId, stream: StreamHandle, us: u64) -> DriverResult<()> {
        self.control(device, |state| {
            let id = state.stream(device, stream)?;
            state.submit(id, Op::Busy { nanos: us.saturating_mul(1000) })
        })
    }

    /// Puts work behind what the stream has now that ends `us` microseconds of virtual time from
    /// now, or with what is before it if that takes longer. So each piece of work of a stream that
    /// is fed this way ends as late after it was enqueued, however many there are.
    ///
    /// # Errors
    /// As a launch on that stream would.
    pub fn keep_busy(&self, device: DeviceId, stream: StreamHandle, us: u64) -> DriverResult<()> {
        self.control(device, |state| {
            let id = state.stream(device, stream)?;
            let ends_ns = state.now_ns.saturating_add(us.saturating_mul(1000));
            if state.timeline.is_busy_until(id, ends_ns) {
                return Ok(());
            }
            state.submit(id, Op::BusyUntil { ends_ns })
        })
    }

    /// Adds a plan of failures or delays.
    pub fn inject(&self, plan: FaultPlan) -> FaultId {
        self.state.lock().faults.install(plan)
    }

    /// Ends one plan.
    pub fn clear_fault(&self, id: FaultId) {
        self.state.lock().faults.remove(id);
    }

    /// Ends all plans.
    pub fn clear_faults(&self) {
        self.state.lock().faults.clear();
    }

    /// The calls that plans failed or delayed since [`Sim::clear_faults`], in order. A plan that delays
    /// every call by nothing so tells what calls a piece of work makes.
    pub fn faults_hit(&self) -> Vec<Call> {
        self.state.lock().faults.hit().to_vec()
    }

    /// How many calls were failed or delayed by plans so far.
    pub fn faults_fired(&self) -> u64 {
        self.state.lock().faults.fired()
    }

    /// The same by call and code; without a code, calls that were only slow.
    pub fn faults_fired_by(&self) -> Vec<(Call, Option<ResultCode>, u64)> {
        self.state.lock().faults.fired_by()
    }

    /// The device's context is lost, and it alone: every call in it fails with `code` from now on.
    /// (A kernel that faults takes the contexts of all devices along: row D-N8.)
    pub fn lose_context(&self, device: DeviceId, code: ResultCode) {
        let mut state = self.state.lock();
        let why = "lost by the test".to_owned();
        state.set_fault(device, DeviceFault { code, why, reported: false, of_all: false });
        // Reporting is what makes it stick; the report itself has no reader here.
        let _ = state.report_fault(device);
        self.pump(&mut state);
        drop(state);
        self.wake.notify_all();
    }

    /// The driver is gone, as at the exit of the process: every call is refused from now on, and nothing
    /// need be given back.
    pub fn shut_down(&self) {
        self.is_shut_down.store(true, std::sync::atomic::Ordering::Relaxed);
    }

    /// Somebody else reset the device's primary context (`cuDevicePrimaryCtxReset`): its streams,
    /// events and legacy allocations are gone. Chunks and mappings are not of the context.
    pub fn reset_context(&self, device: DeviceId) {
        let mut state = self.state.lock();
        state.destroy_context(device);
        self.pump(&mut state);
        drop(state);
        self.wake.notify_all();
    }

    /// An operation of a test on a device, with the door's errors but without its price.
    fn control<T>(
        &self,
        device: DeviceId,
        body: impl FnOnce(&mut Locked<'_>) -> Answer<T>,
    ) -> DriverResult<T> {
        let mut state = self.state.lock();
        self.pump(&mut state);
        let answer = state.enter_context(device).and_then(|()| body(&mut state));
        self.pump(&mut state);
        answer.map_err(|refused| refused.into_error(Call::LaunchKernel, Some(device)))
    }
}
