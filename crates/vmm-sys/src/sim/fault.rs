//! The fault plan: which call fails or is slow, with which code, how often.
//!
//! A plan is consulted at the door, before the call does anything: an injected failure changes no
//! state. Plans see every call in order, so the k-th call of a deterministic program is the same
//! in every run; random plans draw from the machine's seed.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::call::Call;
use crate::error::ResultCode;
use crate::sync::{Condvar, Mutex};

/// Names an installed plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FaultId(u64);

#[derive(Clone, Debug)]
enum Effect {
    Fail(ResultCode),
    Panic,
    DelayVirtual(u64),
    DelayReal(Duration),
    Stop(CallGate),
}

/// Where calls stand still until a test lets them go on: see [`FaultPlan::stop_at`]. Clones are the same
/// gate.
#[derive(Clone, Default)]
pub struct CallGate(Arc<GateInner>);

#[derive(Default)]
struct GateInner {
    state: Mutex<GateState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct GateState {
    came: u64,
    is_open: bool,
    gave_up: bool,
}

impl fmt::Debug for CallGate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("CallGate").field(&*self.0.state.lock()).finish()
    }
}

impl CallGate {
    /// A gate that is closed.
    pub fn new() -> CallGate {
        CallGate::default()
    }

    /// How many calls came to it, those that it let go included.
    pub fn came(&self) -> u64 {
        self.0.state.lock().came
    }

    /// Whether a call came that nobody let go in time.
    pub fn gave_up(&self) -> bool {
        self.0.state.lock().gave_up
    }

    /// Waits until `count` calls came to it, in real time. False if that takes longer than `patience`.
    pub fn wait_for(&self, count: u64, patience: Duration) -> bool {
        let deadline = Instant::now() + patience;
        let mut state = self.0.state.lock();
        while state.came < count {
            if self.0.changed.wait_until(&mut state, deadline).timed_out() {
                return state.came >= count;
            }
        }
        true
    }

    /// Lets every call go on, those to come too.
    pub fn open(&self) {
        self.0.state.lock().is_open = true;
        self.0.changed.notify_all();
    }

    /// Stands still until the gate is open. False if that takes longer than `patience`.
    pub(super) fn pass(&self, patience: Duration) -> bool {
        let deadline = Instant::now() + patience;
        let mut state = self.0.state.lock();
        state.came += 1;
        self.0.changed.notify_all();
        while !state.is_open {
            if self.0.changed.wait_until(&mut state, deadline).timed_out() {
                state.gave_up |= !state.is_open;
                return state.is_open;
            }
        }
        true
    }
}

/// What goes wrong, and when. Starts as: every call, from the first one on, for ever.
///
/// ```
/// use vmm_sys::sim::FaultPlan;
/// use vmm_sys::{Call, ResultCode};
/// // The third create fails, once.
/// let plan = FaultPlan::fail(ResultCode::OUT_OF_MEMORY).on(Call::MemCreate).at(3).once();
/// # let _ = plan;
/// ```
#[derive(Clone, Debug)]
pub struct FaultPlan {
    effect: Effect,
    call: Option<Call>,
    /// Matching calls to let pass first.
    skip: u64,
    /// Calls left to spoil; `None` is for ever.
    times: Option<u64>,
    /// Chance in 1000 that a call is spoilt.
    per_mille: u64,
}

impl FaultPlan {
    fn new(effect: Effect) -> FaultPlan {
        FaultPlan { effect, call: None, skip: 0, times: None, per_mille: 1000 }
    }

    /// Calls fail with `code`.
    pub fn fail(code: ResultCode) -> FaultPlan {
        FaultPlan::new(Effect::Fail(code))
    }

    /// Calls panic in the thread that makes them, before they do anything and with no lock of the machine
    /// held: what a faulty driver of Rust code could do to its callers.
    pub fn panic() -> FaultPlan {
        FaultPlan::new(Effect::Panic)
    }

    /// Calls stand still at `gate`, in real time and before they do anything, until a test opens it;
    /// other threads' calls go on meanwhile. A gate that nobody opens for as long as the machine lets a
    /// call be blocked is an error of the call (`CUDA_ERROR_LAUNCH_TIMEOUT`).
    pub fn stop_at(gate: &CallGate) -> FaultPlan {
        FaultPlan::new(Effect::Stop(gate.clone()))
    }

    /// Calls take `us` microseconds longer on the virtual clock.
    pub fn delay_us(us: u64) -> FaultPlan {
        FaultPlan::new(Effect::DelayVirtual(us.saturating_mul(1000)))
    }

    /// Calls take longer in real time; other threads' calls go on meanwhile.
    pub fn delay_real(delay: Duration) -> FaultPlan {
        FaultPlan::new(Effect::DelayReal(delay))
    }

    /// Only calls of this kind count.
    pub fn on(mut self, call: Call) -> FaultPlan {
        self.call = Some(call);
        self
    }

    /// From the k-th matching call on, counted from 1 when the plan is installed.
    pub fn at(mut self, k: u64) -> FaultPlan {
        self.skip = k.saturating_sub(1);
        self
    }

    /// One call only.
    pub fn once(self) -> FaultPlan {
        self.times(1)
    }

    /// This many calls.
    pub fn times(mut self, times: u64) -> FaultPlan {
        self.times = Some(times);
        self
    }

    /// Each matching call with this chance (in 1000), drawn from the machine's seed.
    pub fn random(mut self, per_mille: u64) -> FaultPlan {
        self.per_mille = per_mille.min(1000);
        self
    }
}

/// What the plans say of one call.
#[derive(Debug, Default)]
pub(super) struct Verdict {
    pub(super) fail: Option<ResultCode>,
    pub(super) panics: bool,
    pub(super) gates: Vec<CallGate>,
    pub(super) delay_ns: u64,
    pub(super) real_delay: Duration,
}

/// The installed plans.
#[derive(Debug)]
pub(super) struct Faults {
    plans: Vec<(FaultId, FaultPlan)>,
    last_id: u64,
    random: u64,
    fired: u64,
    /// The same by call and code; without a code, calls that were only slow.
    fired_by: BTreeMap<(Call, Option<u32>), u64>,
    /// The calls that were spoilt since the plans were cleared.
    hit: Vec<Call>,
}

impl Faults {
    pub(super) fn new(seed: u64) -> Faults {
        let (plans, fired_by, hit) = (Vec::new(), BTreeMap::new(), Vec::new());
        Faults { plans, last_id: 0, random: seed, fired: 0, fired_by, hit }
    }

    pub(super) fn install(&mut self, plan: FaultPlan) -> FaultId {
        self.last_id += 1;
        let id = FaultId(self.last_id);
        self.plans.push((id, plan));
        id
    }

    pub(super) fn remove(&mut self, id: FaultId) {
        self.plans.retain(|(existing, _)| *existing != id);
    }

    pub(super) fn clear(&mut self) {
        self.plans.clear();
        self.hit.clear();
    }

    /// How many calls were spoilt so far.
    pub(super) fn fired(&self) -> u64 {
        self.fired
    }

    /// The same by call and code, in the order of calls.
    pub(super) fn fired_by(&self) -> Vec<(Call, Option<ResultCode>, u64)> {
        let each = self.fired_by.iter();
        each.map(|((call, code), count)| (*call, code.map(ResultCode), *count)).collect()
    }

    /// The calls that were spoilt since the plans were cleared, in order.
    pub(super) fn hit(&self) -> &[Call] {
        &self.hit
    }

    pub(super) fn consult(&mut self, call: Call) -> Verdict {
        let mut verdict = Verdict::default();
        if self.plans.is_empty() {
            return verdict;
        }
        let fired = self.fired;
        for (_, plan) in &mut self.plans {
            if plan.call.is_some_and(|wanted| wanted != call) || plan.times == Some(0) {
                continue;
            }
            if plan.skip > 0 {
                plan.skip -= 1;
                continue;
            }
            if plan.per_mille < 1000 && splitmix(&mut self.random) % 1000 >= plan.per_mille {
                continue;
            }
            plan.times = plan.times.map(|times| times - 1);
            self.fired += 1;
            let code = match plan.effect {
                Effect::Fail(code) => Some(code.0),
                _ => None,
            };
            *self.fired_by.entry((call, code)).or_default() += 1;
            match &plan.effect {
                // The oldest plan's code counts.
                Effect::Fail(code) => verdict.fail = verdict.fail.or(Some(*code)),
                Effect::Panic => verdict.panics = true,
                Effect::Stop(gate) => verdict.gates.push(gate.clone()),
                Effect::DelayVirtual(nanos) => verdict.delay_ns += nanos,
                Effect::DelayReal(delay) => verdict.real_delay += *delay,
            }
        }
        if self.fired > fired {
            self.hit.push(call);
        }
        verdict
    }
}

/// The next number of the splitmix64 sequence.
fn splitmix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    const CODE: ResultCode = ResultCode::OUT_OF_MEMORY;

    fn fails(faults: &mut Faults, call: Call, rounds: usize) -> Vec<bool> {
        (0..rounds).map(|_| faults.consult(call).fail.is_some()).collect()
    }

    #[test]
    fn the_kth_matching_call_fails_once_n_times_or_for_ever() {
        let mut faults = Faults::new(1);
        faults.install(FaultPlan::fail(CODE).on(Call::MemMap).at(2).once());
        assert_eq!(fails(&mut faults, Call::MemCreate, 3), [false; 3]);
        assert_eq!(fails(&mut faults, Call::MemMap, 3), [false, true, false]);
        faults.install(FaultPlan::fail(CODE).times(2));
        assert_eq!(fails(&mut faults, Call::MemMap, 3), [true, true, false]);
        let id = faults.install(FaultPlan::fail(CODE).at(3));
        assert_eq!(fails(&mut faults, Call::MemMap, 5), [false, false, true, true, true]);
        faults.remove(id);
        assert_eq!(fails(&mut faults, Call::MemMap, 1), [false]);
        assert_eq!(faults.fired(), 6);
        let by = faults.fired_by();
        assert_eq!(by, [(Call::MemMap, Some(CODE), 6)]);
        assert_eq!(faults.hit(), [Call::MemMap; 6]);
        faults.clear();
        assert_eq!((faults.fired(), faults.hit()), (6, &[][..]));
    }

    #[test]
    fn a_gate_keeps_calls_until_it_is_open() {
        let (gate, patience) = (CallGate::new(), Duration::from_secs(10));
        assert!(!gate.pass(Duration::ZERO) && gate.gave_up(), "nobody opens it");
        let theirs = gate.clone();
        let caller = std::thread::spawn(move || theirs.pass(patience));
        assert!(gate.wait_for(2, patience) && !caller.is_finished());
        gate.open();
        assert!(caller.join().unwrap() && gate.pass(Duration::ZERO));
        assert_eq!((gate.came(), gate.wait_for(4, Duration::ZERO)), (3, false));
    }

    #[test]
    fn random_plans_repeat_with_the_seed() {
        let draw = |seed| {
            let mut faults = Faults::new(seed);
            faults.install(FaultPlan::fail(CODE).random(300));
            fails(&mut faults, Call::MemCreate, 1000)
        };
        assert_eq!(draw(7), draw(7));
        assert_ne!(draw(7), draw(8));
        let share = draw(7).iter().filter(|failed| **failed).count();
        assert!((200..400).contains(&share), "{share} of 1000");
    }
}
