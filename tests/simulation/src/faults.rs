//! Which driver calls fail, with which codes, and which are slow.

use vmm_sys::sim::FaultPlan;
use vmm_sys::{Call, ResultCode};

use crate::rng::Rng;

/// Calls that fail in some runs, those that the pool makes, and how often beside each other.
pub(crate) const CALLS: &[(u64, Call)] = &[
    (4, Call::MemCreate),
    (4, Call::MemMap),
    (4, Call::MemSetAccess),
    (3, Call::MemUnmap),
    (3, Call::MemRelease),
    (2, Call::MemAddressReserve),
    (2, Call::MemAddressFree),
    (3, Call::MemGetInfo),
    (2, Call::EventCreate),
    (2, Call::EventRecord),
    (2, Call::EventQuery),
    (3, Call::EventSynchronize),
    (2, Call::StreamWaitEvent),
    (1, Call::StreamGetCaptureInfo),
    (1, Call::ThreadExchangeStreamCaptureMode),
    (3, Call::MemcpyDtoDAsync),
    (1, Call::LaunchKernel),
    (2, Call::MemExportToShareableHandle),
];

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
    let call = rng.weighted(CALLS);
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
