//! All that the simulated machine knows, behind one lock.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use slab::Slab;

use super::answer::{Answer, Refused};
use super::builder::Config;
use super::capture::Captures;
use super::fault::Faults;
use super::legacy::{AddressArena, AsyncPool};
use super::physical::{Handle, Physical, SHARED_CHUNKS_MIN};
use super::regions::Region;
use super::timeline::Timeline;
use super::vaspace::AddressSpace;
use crate::error::ResultCode;
use crate::sync::thread::{self, ThreadId};
use crate::types::{CaptureMode, ContextHandle, DeviceId, Location};

/// One simulated GPU at run time.
#[derive(Debug)]
pub(super) struct Device {
    pub(super) context: Option<Context>,
    /// How often a context was made here: 0 for a device that nobody named.
    pub(super) contexts_made: u64,
    pub(super) used_bytes: u64,
    pub(super) small_blocks: AddressArena,
    pub(super) pool: AsyncPool,
}

/// A primary context.
#[derive(Debug)]
pub(super) struct Context {
    pub(super) handle: ContextHandle,
    /// References of callers.
    pub(super) references: u64,
    /// One more, of the driver object itself: see [`State::enter_context`].
    pub(super) implicit: bool,
    /// What went wrong on the device (row D-M6).
    pub(super) fault: Option<DeviceFault>,
    /// How many streams it has room for before it must make more (row D-N2).
    pub(super) stream_slots: usize,
    /// How many calls wait for all work of the device, and keep calls that enqueue work waiting
    /// behind them (row D-N18).
    pub(super) waiting_alone: usize,
}

/// A sticky error.
#[derive(Clone, Debug)]
pub(super) struct DeviceFault {
    pub(super) code: ResultCode,
    pub(super) why: String,
    /// Whether a synchronising call reported it: from then on every call in the context does.
    pub(super) reported: bool,
    /// Whether the report takes the contexts of all other devices along (row D-N8).
    pub(super) of_all: bool,
}

impl DeviceFault {
    fn refusal(&self) -> Refused {
        Refused::new(self.code).because(&self.why)
    }
}

/// What belongs to a thread.
#[derive(Debug)]
pub(super) struct ThreadState {
    pub(super) current: Option<ContextHandle>,
    pub(super) capture_mode: CaptureMode,
}

/// The machine.
#[derive(Debug)]
pub(super) struct State {
    pub(super) config: Config,
    /// Virtual time, in nanoseconds since the machine was built.
    pub(super) now_ns: u64,
    /// What the call in progress costs.
    pub(super) bill_ns: u64,
    pub(super) devices: Vec<Device>,
    pub(super) host_used_bytes: Vec<u64>,
    pub(super) threads: HashMap<ThreadId, ThreadState>,
    pub(super) next_context: u64,

    pub(super) space: AddressSpace,
    pub(super) regions: BTreeMap<u64, Region>,
    pub(super) last_region_id: u64,
    pub(super) physical: Slab<Physical>,
    /// Memory that only descriptors hold.
    pub(super) orphans: Vec<usize>,
    /// From how many shared chunks on to look for some that need not be any more.
    pub(super) shared_chunks_max: usize,
    pub(super) handles: HashMap<u64, Handle>,
    pub(super) next_chunk_handle: u64,
    /// Mappings alive for each (owner, other device) pair with access.
    pub(super) peer_mappings: BTreeMap<(DeviceId, DeviceId), u64>,
    /// Contexts that may use the legacy allocations of others: (who, whose).
    pub(super) enabled_peers: BTreeSet<(DeviceId, DeviceId)>,
    /// Allocations of page-locked host memory: address to bytes.
    pub(super) pinned: BTreeMap<u64, u64>,
    /// Host memory of the program's own that was registered as page-locked: address to bytes.
    pub(super) registered: BTreeMap<u64, u64>,

    pub(super) timeline: Timeline,
    pub(super) captures: Captures,
    pub(super) faults: Faults,
}

impl State {
    pub(super) fn new(config: Config) -> State {
        let device = |_: &_| Device {
            context: None,
            contexts_made: 0,
            used_bytes: 0,
            small_blocks: AddressArena::default(),
            pool: AsyncPool::default(),
        };
        State {
            now_ns: 0,
            bill_ns: 0,
            devices: config.devices.iter().map(device).collect(),
            host_used_bytes: vec![0; config.host_nodes as usize],
            threads: HashMap::new(),
            next_context: 0xC0DE_0000_0000,
            space: AddressSpace::new(config.address_space_bytes),
            regions: BTreeMap::new(),
            last_region_id: 0,
            physical: Slab::new(),
            orphans: Vec::new(),
            shared_chunks_max: SHARED_CHUNKS_MIN,
            handles: HashMap::new(),
            next_chunk_handle: 0xA110_0000_0000,
            peer_mappings: BTreeMap::new(),
            enabled_peers: BTreeSet::new(),
            pinned: BTreeMap::new(),
            registered: BTreeMap::new(),
            timeline: Timeline::default(),
            captures: Captures::default(),
            faults: Faults::new(config.seed),
            config,
        }
    }

    /// Replaces what the call in progress costs (it starts with the call's base cost).
    pub(super) fn bill(&mut self, nanos: u64) {
        self.bill_ns = nanos;
    }

    // ---- devices and contexts ----

    /// A device, or the refusal that there is none.
    pub(super) fn device(&self, device: DeviceId) -> Answer<&Device> {
        self.devices.get(device.0 as usize).ok_or_else(|| self.no_device(device))
    }

    /// The same, to change.
    pub(super) fn device_mut(&mut self, device: DeviceId) -> Answer<&mut Device> {
        let refused = self.no_device(device);
        self.devices.get_mut(device.0 as usize).ok_or(refused)
    }

    fn no_device(&self, device: DeviceId) -> Refused {
        Refused::new(ResultCode::INVALID_DEVICE)
            .because(format_args!("{device} of {} devices", self.devices.len()))
    }

    /// Makes a device's context current for a call, as it were; makes the context if there is
    /// none. A lost context refuses (row D-M6).
    pub(super) fn enter_context(&mut self, device: DeviceId) -> Answer<()> {
        self.ensure_context(device)?;
        // The driver object keeps a reference of its own from the first call that names a device.
        if let Some(context) = &mut self.device_mut(device)?.context {
            context.implicit = true;
        }
        self.check_context(device)
    }

    /// Refuses if the device's context is lost and has said so.
    pub(super) fn check_context(&self, device: DeviceId) -> Answer<()> {
        match self.fault(device) {
            Some(fault) if fault.reported => Err(fault.refusal()),
            _ => Ok(()),
        }
    }

    /// Makes the primary context if there is none.
    pub(super) fn ensure_context(&mut self, device: DeviceId) -> Answer<()> {
        if self.device(device)?.context.is_some() {
            return Ok(());
        }
        self.commit(Location::Device(device), self.config.context_bytes)?;
        let stream_slots = self.config.stream_slots;
        let handle = ContextHandle(self.next_context);
        self.next_context += 0x1000;
        let entry = self.device_mut(device)?;
        entry.context = Some(Context {
            handle,
            references: 0,
            implicit: false,
            fault: None,
            stream_slots,
            waiting_alone: 0,
        });
        entry.contexts_made += 1;
        // A fault that took all contexts along takes those made after it too.
        if let Some(fault) = self.fault_of_all() {
            self.set_fault(device, fault);
        }
        Ok(())
    }

    /// Ends a context and all that lives in it.
    pub(super) fn destroy_context(&mut self, device: DeviceId) {
        let Some(entry) = self.devices.get_mut(device.0 as usize) else { return };
        if entry.context.take().is_none() {
            return;
        }
        self.uncommit(Location::Device(device), self.config.context_bytes);
        self.drop_streams_of(device);
        self.free_legacy_of(device);
        self.enabled_peers.retain(|(user, owner)| *user != device && *owner != device);
    }

    /// The device whose live context this is.
    pub(super) fn context_device(&self, context: ContextHandle) -> Option<DeviceId> {
        let holds = |device: &Device| {
            device.context.as_ref().is_some_and(|existing| existing.handle == context)
        };
        self.devices.iter().position(holds).map(|index| DeviceId(index as u32))
    }

    /// What went wrong on a device, reported or not.
    pub(super) fn fault(&self, device: DeviceId) -> Option<&DeviceFault> {
        self.devices.get(device.0 as usize)?.context.as_ref()?.fault.as_ref()
    }

    /// A reported fault that leaves no context of the process well, if there was one.
    fn fault_of_all(&self) -> Option<DeviceFault> {
        let mut faults =
            self.devices.iter().filter_map(|device| device.context.as_ref()?.fault.as_ref());
        faults.find(|fault| fault.of_all && fault.reported).cloned()
    }

    /// Work of the device faulted: nothing enqueued there runs any more, and once it is reported
    /// no context of the process answers otherwise (row D-N8). The first fault stays.
    pub(super) fn raise_fault(&mut self, device: DeviceId, code: ResultCode, why: String) {
        self.set_fault(device, DeviceFault { code, why, reported: false, of_all: true });
    }

    /// A fault of one device, if it has none yet.
    pub(super) fn set_fault(&mut self, device: DeviceId, fault: DeviceFault) {
        let context =
            self.devices.get_mut(device.0 as usize).and_then(|device| device.context.as_mut());
        if let Some(context) = context
            && context.fault.is_none()
        {
            context.fault = Some(fault);
        }
    }

    /// What a synchronising call answers: a fault that happened is reported, and sticks.
    pub(super) fn report_fault(&mut self, device: DeviceId) -> Answer<()> {
        let context =
            self.devices.get_mut(device.0 as usize).and_then(|device| device.context.as_mut());
        let Some(fault) = context.and_then(|context| context.fault.as_mut()) else { return Ok(()) };
        fault.reported = true;
        let fault = fault.clone();
        if fault.of_all {
            for other in (0..self.devices.len() as u32).map(DeviceId) {
                self.set_fault(other, fault.clone());
            }
        }
        Err(fault.refusal())
    }

    // ---- threads ----

    /// The calling thread, known from its first call on.
    pub(super) fn thread_mut(&mut self) -> &mut ThreadState {
        let fresh = || ThreadState { current: None, capture_mode: CaptureMode::Global };
        self.threads.entry(thread::current().id()).or_insert_with(fresh)
    }

    /// The capture mode that the calling thread asked for.
    pub(super) fn thread_capture_mode(&self) -> CaptureMode {
        let state = self.threads.get(&thread::current().id());
        state.map_or(CaptureMode::Global, |state| state.capture_mode)
    }

    /// Refuses if the calling thread's current context is lost.
    pub(super) fn check_current_context(&self) -> Answer<()> {
        if self.threads.is_empty() {
            return Ok(());
        }
        let current = self.threads.get(&thread::current().id()).and_then(|state| state.current);
        match current.and_then(|context| self.context_device(context)) {
            Some(device) => self.check_context(device),
            None => Ok(()),
        }
    }

    /// The pairs of devices with a granted mapping alive, from the owner's side.
    pub(super) fn peers_of(&self, owner: DeviceId) -> BTreeSet<DeviceId> {
        self.peer_mappings
            .range((owner, DeviceId(0))..=(owner, DeviceId(u32::MAX)))
            .map(|((_, peer), _)| *peer)
            .collect()
    }
}
