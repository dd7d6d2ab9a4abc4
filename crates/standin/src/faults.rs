//! Calls that fail on purpose: by their place in the order of calls, whatever they are.

use parking_lot::Mutex;
use vmm_sys::ResultCode;

use crate::door::Refusal;

/// What is asked before anything can go wrong, and what tells of it.
const SPARED: [&str; 4] =
    ["cuGetErrorName", "cuGetErrorString", "cuGetProcAddress", "cuDriverGetVersion"];

struct Plan {
    /// The first call that fails, counted from 1; how many there were; how many fail at most.
    at: u64,
    calls: u64,
    times: u64,
    /// What they answer; 0 lets them pass, and notes them.
    code: ResultCode,
    hit: Vec<&'static str>,
}

static PLAN: Mutex<Option<Plan>> = Mutex::new(None);

/// From now on: the calls from the `at`th on, `times` of them, answer `code`. With `times` of 0 none does.
pub(crate) fn set(at: u64, times: u64, code: u32) {
    *PLAN.lock() = Some(Plan { at, calls: 0, times, code: ResultCode(code), hit: Vec::new() });
}

/// Whether this call passes. One that fails does nothing.
pub(crate) fn check(name: &'static str) -> Result<(), Refusal> {
    if SPARED.iter().any(|spared| name.starts_with(spared)) || name.starts_with("vmm_standin") {
        return Ok(());
    }
    let mut plan = PLAN.lock();
    let Some(plan) = plan.as_mut().filter(|plan| plan.times > plan.hit.len() as u64) else {
        return Ok(());
    };
    plan.calls += 1;
    if plan.calls < plan.at {
        return Ok(());
    }
    plan.hit.push(name);
    match plan.code {
        ResultCode::SUCCESS => Ok(()),
        code => Err(Refusal::new(code, "injected fault")),
    }
}

/// The calls that failed since [`set`], in their order.
pub(crate) fn hit() -> String {
    PLAN.lock().as_ref().map_or_else(String::new, |plan| plan.hit.join(" "))
}
