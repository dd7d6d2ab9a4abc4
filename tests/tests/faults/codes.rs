//! What each driver call may answer when it fails, and how a cell of the matrix fails it.

use std::fmt;
use std::sync::Arc;

use vmm_sys::sim::{FaultPlan, Sim};
use vmm_sys::{Call, ResultCode};

/// What any call may say: NVIDIA lists the first for every one of these, the second is for whatever the
/// driver has no word for.
const ANY: &[ResultCode] = &[ResultCode::INVALID_VALUE, ResultCode::UNKNOWN];
/// Calls that take memory, addresses, page tables or room of the host.
const TAKES: &[ResultCode] = &[
    ResultCode::OUT_OF_MEMORY,
    ResultCode::INVALID_VALUE,
    ResultCode::NOT_PERMITTED,
    ResultCode::NOT_SUPPORTED,
    ResultCode::INVALID_DEVICE,
    ResultCode::SYSTEM_NOT_READY,
    ResultCode::UNKNOWN,
];
/// Calls that give back or take down.
const GIVES: &[ResultCode] = &[
    ResultCode::INVALID_VALUE,
    ResultCode::NOT_PERMITTED,
    ResultCode::NOT_SUPPORTED,
    ResultCode::UNKNOWN,
];
/// Calls in a context, on a stream or an event.
const WORKS: &[ResultCode] = &[
    ResultCode::OUT_OF_MEMORY,
    ResultCode::INVALID_VALUE,
    ResultCode::INVALID_HANDLE,
    ResultCode::ILLEGAL_STATE,
    ResultCode::UNKNOWN,
];
/// Descriptors.
const HANDS: &[ResultCode] = &[
    ResultCode::INVALID_VALUE,
    ResultCode::OUT_OF_MEMORY,
    ResultCode::NOT_PERMITTED,
    ResultCode::NOT_SUPPORTED,
    ResultCode::OPERATING_SYSTEM,
    ResultCode::UNKNOWN,
];
/// Questions about a device.
const ASKS: &[ResultCode] =
    &[ResultCode::INVALID_DEVICE, ResultCode::INVALID_VALUE, ResultCode::UNKNOWN];

/// The codes with which a call is made to fail. Codes after which nothing works any more (a lost context,
/// a driver that is gone) are no faults of one call, and not here.
pub(crate) fn plausible(call: Call) -> &'static [ResultCode] {
    use Call as C;
    match call {
        C::MemCreate
        | C::MemAddressReserve
        | C::MemMap
        | C::MemSetAccess
        | C::MemHostAlloc
        | C::MemAlloc
        | C::MemAllocAsync
        | C::StreamCreate
        | C::EventCreate
        | C::DevicePrimaryCtxRetain
        | C::GraphInstantiate => TAKES,
        // A handle that is said to be none any more is no failure to give it back.
        C::MemRelease
        | C::MemUnmap
        | C::MemAddressFree
        | C::MemFree
        | C::MemFreeHost
        | C::StreamDestroy
        | C::EventDestroy => GIVES,
        C::MemExportToShareableHandle
        | C::MemImportFromShareableHandle
        | C::MemGetHandleForAddressRange => HANDS,
        C::EventRecord
        | C::EventQuery
        | C::EventSynchronize
        | C::StreamWaitEvent
        | C::StreamWaitValue32
        | C::StreamQuery
        | C::StreamSynchronize
        | C::StreamGetId
        | C::StreamGetCaptureInfo
        | C::LaunchKernel
        | C::LaunchHostFunc
        | C::CtxSynchronize
        | C::MemcpyHtoD
        | C::MemcpyDtoH
        | C::MemcpyDtoD
        | C::MemsetD8
        | C::MemcpyHtoDAsync
        | C::MemcpyDtoHAsync
        | C::MemcpyDtoDAsync
        | C::MemsetD8Async => WORKS,
        C::DeviceGetCount
        | C::DeviceGet
        | C::DeviceGetName
        | C::DeviceGetUuid
        | C::DeviceTotalMem
        | C::DeviceGetAttribute
        | C::DeviceCanAccessPeer
        | C::DeviceGetP2pAttribute
        | C::MemGetAllocationGranularity => ASKS,
        _ => ANY,
    }
}

/// Which calls fail, from the k-th on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// That one.
    Once,
    /// It, and every later one of its kind until the faults are cleared.
    Kind,
    /// It, and every later one of whatever kind.
    All,
    /// It, and that many calls later another: what cleans up fails too.
    Two(u64),
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Mode::Once => f.write_str("once"),
            Mode::Kind => f.write_str("kind"),
            Mode::All => f.write_str("all"),
            Mode::Two(later) => write!(f, "two+{later}"),
        }
    }
}

impl Mode {
    pub(crate) fn parse(word: &str) -> Option<Mode> {
        match word {
            "once" => Some(Mode::Once),
            "kind" => Some(Mode::Kind),
            "all" => Some(Mode::All),
            other => other.strip_prefix("two+")?.parse().ok().map(Mode::Two),
        }
    }
}

/// One failure: the k-th driver call of an operation, counted from 1.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fault {
    pub(crate) k: u64,
    /// What that call is where nothing fails before, and the how manieth of its kind.
    pub(crate) call: Call,
    pub(crate) nth: u64,
    pub(crate) code: ResultCode,
    pub(crate) mode: Mode,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "k={} code={} {}", self.k, self.code.0, self.mode)
    }
}

impl Fault {
    pub(crate) fn inject(&self, sim: &Arc<Sim>) {
        let fail = || FaultPlan::fail(self.code);
        match self.mode {
            Mode::Once => {
                sim.inject(fail().at(self.k).once());
            }
            Mode::Kind => {
                sim.inject(fail().on(self.call).at(self.nth));
            }
            Mode::All => {
                sim.inject(fail().at(self.k));
            }
            Mode::Two(later) => {
                sim.inject(fail().at(self.k).once());
                sim.inject(fail().at(self.k + later).once());
            }
        }
    }
}

/// The faults of an operation that makes these calls.
pub(crate) fn faults(trace: &[Call], whole: bool) -> Vec<Fault> {
    let mut faults = Vec::new();
    for (at, &call) in trace.iter().enumerate() {
        let k = at as u64 + 1;
        let nth = trace[..=at].iter().filter(|it| **it == call).count() as u64;
        let codes = plausible(call);
        let mut add = |code, mode| faults.push(Fault { k, call, nth, code, mode });
        if whole {
            for code in codes {
                [Mode::Once, Mode::Kind].into_iter().for_each(|mode| add(*code, mode));
            }
            for code in GIVES {
                add(*code, Mode::All);
            }
            (1..=4).for_each(|later| add(GIVES[at % GIVES.len()], Mode::Two(later)));
        } else {
            add(codes[at % codes.len()], Mode::Once);
            // Other calls fail too: with what any of them may say.
            let any = GIVES[at % GIVES.len()];
            match at % 3 {
                0 => add(any, Mode::All),
                1 => add(codes[(at + 1) % codes.len()], Mode::Kind),
                _ => add(any, Mode::Two(1 + k / 3 % 3)),
            }
        }
    }
    faults
}
