//! The driver calls by name, and the ledger that counts them.

use std::cell::Cell;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

macro_rules! calls {
    ($($variant:ident = $name:literal),* $(,)?) => {
        /// One entry point of the driver. The name is the one in NVIDIA's documentation.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Call {
            $(#[doc = concat!("`", $name, "`")] $variant,)*
        }

        impl Call {
            /// Every call, in declaration order.
            pub const ALL: &'static [Call] = &[$(Call::$variant,)*];

            /// The driver's name of the call.
            pub fn name(self) -> &'static str {
                match self {
                    $(Call::$variant => $name,)*
                }
            }
        }
    };
}

calls! {
    Init = "cuInit",
    DriverGetVersion = "cuDriverGetVersion",
    DeviceGetCount = "cuDeviceGetCount",
    DeviceGet = "cuDeviceGet",
    DeviceGetName = "cuDeviceGetName",
    DeviceGetUuid = "cuDeviceGetUuid",
    DeviceTotalMem = "cuDeviceTotalMem",
    DeviceGetAttribute = "cuDeviceGetAttribute",
    DeviceCanAccessPeer = "cuDeviceCanAccessPeer",
    DeviceGetP2pAttribute = "cuDeviceGetP2PAttribute",
    DevicePrimaryCtxRetain = "cuDevicePrimaryCtxRetain",
    DevicePrimaryCtxRelease = "cuDevicePrimaryCtxRelease",
    CtxGetCurrent = "cuCtxGetCurrent",
    CtxSetCurrent = "cuCtxSetCurrent",
    CtxSynchronize = "cuCtxSynchronize",
    MemGetInfo = "cuMemGetInfo",
    MemGetAllocationGranularity = "cuMemGetAllocationGranularity",
    MemAddressReserve = "cuMemAddressReserve",
    MemAddressFree = "cuMemAddressFree",
    MemCreate = "cuMemCreate",
    MemRelease = "cuMemRelease",
    MemRetainAllocationHandle = "cuMemRetainAllocationHandle",
    MemGetAllocationProperties = "cuMemGetAllocationPropertiesFromHandle",
    MemMap = "cuMemMap",
    MemUnmap = "cuMemUnmap",
    MemSetAccess = "cuMemSetAccess",
    MemGetAccess = "cuMemGetAccess",
    MemExportToShareableHandle = "cuMemExportToShareableHandle",
    MemImportFromShareableHandle = "cuMemImportFromShareableHandle",
    MemGetAddressRange = "cuMemGetAddressRange",
    PointerGetAttributes = "cuPointerGetAttributes",
    IpcGetMemHandle = "cuIpcGetMemHandle",
    MemGetHandleForAddressRange = "cuMemGetHandleForAddressRange",
    MemAlloc = "cuMemAlloc",
    MemFree = "cuMemFree",
    MemAllocAsync = "cuMemAllocAsync",
    MemFreeAsync = "cuMemFreeAsync",
    DeviceGetDefaultMemPool = "cuDeviceGetDefaultMemPool",
    MemPoolSetAttribute = "cuMemPoolSetAttribute",
    MemHostAlloc = "cuMemHostAlloc",
    MemFreeHost = "cuMemFreeHost",
    MemcpyHtoD = "cuMemcpyHtoD",
    MemcpyDtoH = "cuMemcpyDtoH",
    MemcpyDtoD = "cuMemcpyDtoD",
    MemcpyPeer = "cuMemcpyPeer",
    MemsetD8 = "cuMemsetD8",
    MemcpyHtoDAsync = "cuMemcpyHtoDAsync",
    MemcpyDtoHAsync = "cuMemcpyDtoHAsync",
    MemcpyDtoDAsync = "cuMemcpyDtoDAsync",
    MemcpyPeerAsync = "cuMemcpyPeerAsync",
    MemsetD8Async = "cuMemsetD8Async",
    StreamCreate = "cuStreamCreate",
    StreamDestroy = "cuStreamDestroy",
    StreamGetId = "cuStreamGetId",
    StreamGetCtx = "cuStreamGetCtx",
    StreamQuery = "cuStreamQuery",
    StreamSynchronize = "cuStreamSynchronize",
    StreamWaitEvent = "cuStreamWaitEvent",
    StreamWaitValue32 = "cuStreamWaitValue32",
    StreamBeginCapture = "cuStreamBeginCapture",
    StreamEndCapture = "cuStreamEndCapture",
    StreamGetCaptureInfo = "cuStreamGetCaptureInfo",
    ThreadExchangeStreamCaptureMode = "cuThreadExchangeStreamCaptureMode",
    LaunchHostFunc = "cuLaunchHostFunc",
    LaunchKernel = "cuLaunchKernel",
    ModuleLoadData = "cuModuleLoadData",
    ModuleGetFunction = "cuModuleGetFunction",
    ModuleUnload = "cuModuleUnload",
    EventCreate = "cuEventCreate",
    EventDestroy = "cuEventDestroy",
    EventRecord = "cuEventRecord",
    EventQuery = "cuEventQuery",
    EventSynchronize = "cuEventSynchronize",
    IpcGetEventHandle = "cuIpcGetEventHandle",
    IpcOpenEventHandle = "cuIpcOpenEventHandle",
    GraphInstantiate = "cuGraphInstantiate",
    GraphLaunch = "cuGraphLaunch",
    GraphDestroy = "cuGraphDestroy",
    GraphExecDestroy = "cuGraphExecDestroy",
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

const CALLS: usize = Call::ALL.len();

/// Counts every driver call that a driver made, and the time spent in it.
///
/// Counting is always on: it is one relaxed add beside a call of microseconds. Timing reads the
/// clock twice a call, so it is switched on where it is wanted ([`CallLedger::set_timing`]); the
/// simulated device always charges its modelled cost.
#[derive(Debug)]
pub struct CallLedger {
    counts: [AtomicU64; CALLS],
    nanos: [AtomicU64; CALLS],
    timing: AtomicBool,
}

impl Default for CallLedger {
    fn default() -> Self {
        CallLedger {
            counts: [const { AtomicU64::new(0) }; CALLS],
            nanos: [const { AtomicU64::new(0) }; CALLS],
            timing: AtomicBool::new(false),
        }
    }
}

impl CallLedger {
    /// Books one call and its nanoseconds (0 if not timed).
    pub fn book(&self, call: Call, nanos: u64) {
        self.counts[call as usize].fetch_add(1, Ordering::Relaxed);
        if nanos != 0 {
            self.nanos[call as usize].fetch_add(nanos, Ordering::Relaxed);
            ThreadTime::add(0, nanos);
        }
    }

    /// Starts to measure the host time of one call, if timing is on.
    pub fn stopwatch(&self) -> Stopwatch {
        Stopwatch(self.timing().then(Instant::now))
    }

    /// Whether the driver should measure its calls.
    pub fn timing(&self) -> bool {
        self.timing.load(Ordering::Relaxed)
    }

    /// Switches the measuring of calls on or off.
    pub fn set_timing(&self, on: bool) {
        self.timing.store(on, Ordering::Relaxed);
    }

    /// The counts up to now. Differences of two snapshots are what a piece of work cost.
    pub fn snapshot(&self) -> CallCounts {
        let mut counts = CallCounts::default();
        for index in 0..CALLS {
            counts.counts[index] = self.counts[index].load(Ordering::Relaxed);
            counts.nanos[index] = self.nanos[index].load(Ordering::Relaxed);
        }
        counts
    }
}

/// The time that driver calls of one thread have taken, over all drivers.
///
/// A ledger adds up all threads; whoever wants to know what remains of an interval of *one* thread
/// once the driver's part is taken out asks here. On a GPU the two figures are the same. The
/// simulated device spends host time to simulate a call, and charges what the call would cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ThreadTime {
    /// Host nanoseconds that passed inside calls, while timing was on.
    pub spent_nanos: u64,
    /// Nanoseconds booked for them.
    pub charged_nanos: u64,
}

thread_local! {
    static THREAD_TIME: Cell<ThreadTime> =
        const { Cell::new(ThreadTime { spent_nanos: 0, charged_nanos: 0 }) };
}

impl ThreadTime {
    /// Of the calling thread, up to now. Differences of two are what a piece of work took.
    #[inline]
    pub fn now() -> ThreadTime {
        THREAD_TIME.get()
    }

    fn add(spent_nanos: u64, charged_nanos: u64) {
        let time = THREAD_TIME.get();
        THREAD_TIME.set(ThreadTime {
            spent_nanos: time.spent_nanos + spent_nanos,
            charged_nanos: time.charged_nanos + charged_nanos,
        });
    }
}

/// Measures one call: from [`CallLedger::stopwatch`] to its end, which books the time as spent.
#[derive(Debug)]
#[must_use = "the time ends where this is dropped"]
pub struct Stopwatch(Option<Instant>);

impl Stopwatch {
    /// Ends the call. Its nanoseconds, for [`CallLedger::book`]: 0 if timing is off, else at least
    /// 1.
    pub fn stop(mut self) -> u64 {
        self.end()
    }

    fn end(&mut self) -> u64 {
        let Some(start) = self.0.take() else { return 0 };
        let nanos = u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX).max(1);
        ThreadTime::add(nanos, 0);
        nanos
    }
}

impl Drop for Stopwatch {
    fn drop(&mut self) {
        self.end();
    }
}

/// A snapshot of a [`CallLedger`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallCounts {
    counts: [u64; CALLS],
    nanos: [u64; CALLS],
}

impl Default for CallCounts {
    fn default() -> Self {
        CallCounts { counts: [0; CALLS], nanos: [0; CALLS] }
    }
}

impl CallCounts {
    /// How often `call` was made.
    pub fn of(&self, call: Call) -> u64 {
        self.counts[call as usize]
    }

    /// Nanoseconds spent in `call`: measured on a GPU, modelled on the simulated device.
    pub fn nanos_of(&self, call: Call) -> u64 {
        self.nanos[call as usize]
    }

    /// All calls together.
    pub fn total(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// The time of all calls together, in nanoseconds.
    pub fn total_nanos(&self) -> u64 {
        self.nanos.iter().sum()
    }

    /// What happened between `earlier` and `self`.
    pub fn since(&self, earlier: &CallCounts) -> CallCounts {
        let mut difference = CallCounts::default();
        for index in 0..CALLS {
            difference.counts[index] = self.counts[index] - earlier.counts[index];
            difference.nanos[index] = self.nanos[index] - earlier.nanos[index];
        }
        difference
    }

    /// The calls that were made at all, with their counts, in declaration order.
    pub fn nonzero(&self) -> impl Iterator<Item = (Call, u64)> + '_ {
        Call::ALL.iter().map(|call| (*call, self.of(*call))).filter(|(_, count)| *count != 0)
    }
}

impl fmt::Display for CallCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut first = true;
        for (call, count) in self.nonzero() {
            write!(f, "{}{call} {count}", if first { "" } else { ", " })?;
            first = false;
        }
        if first {
            f.write_str("no driver call")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_difference_shows_only_what_happened_between() {
        let ledger = CallLedger::default();
        ledger.book(Call::MemCreate, 10);
        let before = ledger.snapshot();
        ledger.book(Call::MemMap, 5);
        ledger.book(Call::MemMap, 6);
        let work = ledger.snapshot().since(&before);
        assert_eq!(work.of(Call::MemCreate), 0);
        assert_eq!((work.of(Call::MemMap), work.nanos_of(Call::MemMap)), (2, 11));
        assert_eq!((work.total(), work.total_nanos()), (2, 11));
        assert_eq!(work.to_string(), "cuMemMap 2");
        assert_eq!(CallCounts::default().to_string(), "no driver call");
    }

    #[test]
    fn a_threads_own_time_is_kept_apart_from_that_of_others() {
        let ledger = CallLedger::default();
        let before = ThreadTime::now();
        assert_eq!(ledger.stopwatch().stop(), 0, "timing is off");
        ledger.set_timing(true);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                drop(ledger.stopwatch());
                ledger.book(Call::MemMap, 1000);
            });
        });
        assert_eq!(ThreadTime::now(), before);
        let nanos = ledger.stopwatch().stop();
        ledger.book(Call::MemMap, 40);
        let mine = ThreadTime::now();
        assert!(nanos > 0);
        assert_eq!(mine.spent_nanos - before.spent_nanos, nanos, "counted once");
        assert_eq!(mine.charged_nanos - before.charged_nanos, 40);
        assert_eq!(ledger.snapshot().total_nanos(), 1040);
    }

    #[test]
    fn names_are_unique() {
        let mut names: Vec<_> = Call::ALL.iter().map(|call| call.name()).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), Call::ALL.len());
    }
}
