//! Which driver calls fail, with which codes, and which are slow.

use vmm_sys::sim::FaultPlan;
use vmm_sys::{Call, ResultCode};

use crate::rng::Rng;

/// Calls that fail in some runs: those that the pool makes.
pub(crate) const CALLS: &[Call] = &[
    Call::MemCreate,
    Call::MemMap,
    Call::MemSetAccess,
    Call::MemUnmap,
    Call::MemRelease,
    Call::MemAddressReserve,
    Call::MemAddressFree,
    Call::MemGetInfo,
    Call::EventCreate,
    Call::EventRecord,
    Call::EventQuery,
    Call::EventSynchronize,
    Call::StreamWaitEvent,
    Call::StreamGetCaptureInfo,
    Call::ThreadExchangeStreamCaptureMode,
    Call::MemcpyDtoDAsync,
    Call::LaunchKernel,
    Call::MemExportToShareableHandle,
];

/// Which of them how often.
const WEIGHTS: &[u64] = &[4, 4, 4, 3, 3, 2, 2, 3, 2, 2, 2, 3, 2, 1, 1, 3, 1, 2];

pub(crate) const CODES: &[ResultCode] = &[
    ResultCode::OUT_OF_MEMORY,
    ResultCode::INVALID_VALUE,
    ResultCode::UNKNOWN,
    ResultCode::NOT_SUPPORTED,
    ResultCode::NOT_PERMITTED,
];

/// The next export fails. Exports are so rare among calls that other plans hardly meet one.
pub(crate) fn of_export(rng: &mut Rng) -> (FaultPlan, String) {
    let (call, code) = (Call::MemExportToShareableHandle, rng.pick(CODES));
    (FaultPlan::fail(code).on(call).once(), format!("{call} fails with {code}, once"))
}

/// A plan, and what it says.
pub(crate) fn plan(rng: &mut Rng) -> (FaultPlan, String) {
    let weighted: Vec<(u64, Call)> = WEIGHTS.iter().copied().zip(CALLS.iter().copied()).collect();
    let call = rng.weighted(&weighted);
    if rng.chance(200) {
        let us = 1 + rng.below(500);
        let times = 1 + rng.below(5);
        let plan = FaultPlan::delay_us(us).on(call).times(times);
        return (plan, format!("{call} takes {us} us more, {times} times"));
    }
    let code = if rng.chance(300) { ResultCode::OUT_OF_MEMORY } else { rng.pick(CODES) };
    if rng.chance(250) {
        let per_mille = 20 + rng.below(200);
        let times = 1 + rng.below(8);
        let plan = FaultPlan::fail(code).on(call).random(per_mille).times(times);
        return (plan, format!("{call} fails with {code}, {per_mille} of 1000, {times} times"));
    }
    let (at, times) = (1 + rng.below(4), rng.pick(&[1, 1, 1, 2, 5, 40]));
    let plan = FaultPlan::fail(code).on(call).at(at).times(times);
    (plan, format!("{call} fails with {code}, from the {at}. on, {times} times"))
}
