//! Which driver calls fail, and with which codes.

use vmm_sys::{Call, ResultCode};

use super::{Generator, Profile};
use crate::action::Action;

/// Calls that the pool makes, and that may fail. Not among them: `cuEventDestroy` and `cuStreamDestroy`, which
/// the fault matrix fails.
const FAULTY_CALLS: &[Call] = &[
    Call::MemCreate,
    Call::MemCreate,
    Call::MemMap,
    Call::MemMap,
    Call::MemSetAccess,
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
    Call::StreamGetCaptureInfo,
    Call::ThreadExchangeStreamCaptureMode,
];

/// Calls that only elastic buffers make.
const MOVING_CALLS: &[Call] = &[Call::MemcpyDtoDAsync, Call::StreamWaitEvent];

const FAULT_CODES: &[ResultCode] = &[
    ResultCode::OUT_OF_MEMORY,
    ResultCode::OUT_OF_MEMORY,
    ResultCode::INVALID_VALUE,
    ResultCode::UNKNOWN,
    ResultCode::NOT_SUPPORTED,
];

impl Generator {
    pub(super) fn fault(&mut self) -> Action {
        let moving = self.profile == Profile::ElasticFaulty && self.rng.chance(250);
        Action::Fault {
            call: self.rng.pick(if moving { MOVING_CALLS } else { FAULTY_CALLS }),
            at: 1 + self.rng.below(4),
            code: self.rng.pick(FAULT_CODES),
            times: self.rng.pick(&[1, 1, 2, 5, 1000]),
        }
    }
}
