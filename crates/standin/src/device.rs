//! Starting, and questions about the machine.

use vmm_sys::{DeviceAttribute, Driver, PeerAttribute, ResultCode};

use crate::door::{Out, Refusal};
use crate::machine::{device_id, machine, sim, start};
use crate::settings;

/// What programs size their launches by, for compute capability 9.0 (CUDA C++ Programming Guide,
/// technical specifications), and what the stand-in has or lacks. (`CUdevice_attribute`, value).
const PLAIN: [(i32, i32); 24] = [
    (1, 1024),          // MAX_THREADS_PER_BLOCK
    (2, 1024),          // MAX_BLOCK_DIM_X
    (3, 1024),          // MAX_BLOCK_DIM_Y
    (4, 64),            // MAX_BLOCK_DIM_Z
    (5, 2_147_483_647), // MAX_GRID_DIM_X
    (6, 65_535),        // MAX_GRID_DIM_Y
    (7, 65_535),        // MAX_GRID_DIM_Z
    (8, 49_152),        // MAX_SHARED_MEMORY_PER_BLOCK
    (9, 65_536),        // TOTAL_CONSTANT_MEMORY
    (10, 32),           // WARP_SIZE
    (12, 65_536),       // MAX_REGISTERS_PER_BLOCK
    (19, 1),            // CAN_MAP_HOST_MEMORY
    (20, 0),            // COMPUTE_MODE: default
    (31, 1),            // CONCURRENT_KERNELS
    (39, 2048),         // MAX_THREADS_PER_MULTIPROCESSOR
    (78, 0),            // STREAM_PRIORITIES_SUPPORTED
    (81, 233_472),      // MAX_SHARED_MEMORY_PER_MULTIPROCESSOR
    (82, 65_536),       // MAX_REGISTERS_PER_MULTIPROCESSOR
    (83, 0),            // MANAGED_MEMORY
    (88, 0),            // PAGEABLE_MEMORY_ACCESS
    (89, 0),            // CONCURRENT_MANAGED_ACCESS
    (95, 1),            // COOPERATIVE_LAUNCH
    (97, 232_448),      // MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    (106, 32),          // MAX_BLOCKS_PER_MULTIPROCESSOR
];

/// `CUdevice_P2PAttribute`.
fn peer_attribute(number: i32) -> Result<PeerAttribute, Refusal> {
    PeerAttribute::of_number(number).ok_or_else(|| {
        Refusal::new(ResultCode::INVALID_VALUE, format_args!("peer attribute {number}"))
    })
}

entries! {
    fn cuInit(flags: u32) {
        match flags {
            0 => start(),
            _ => Err(Refusal::new(ResultCode::INVALID_VALUE, format_args!("flags {flags}"))),
        }
    }

    /// May be asked before `cuInit`.
    fn cuDriverGetVersion(version: *mut i32) {
        let out = Out::new(version)?;
        let version = settings::driver_version()
            .map_err(|text| Refusal::new(ResultCode::INVALID_VALUE, text))?;
        out.set(version.cast_signed())
    }

    fn cuDeviceGetCount(count: *mut i32) {
        let out = Out::new(count)?;
        out.set(sim()?.device_count()?.cast_signed())
    }

    fn cuDeviceGet(device: *mut i32, ordinal: i32) {
        let out = Out::new(device)?;
        // Its refusal is that of an ordinal that does not exist.
        sim()?.device_total_bytes(device_id(ordinal))?;
        out.set(ordinal)
    }

    fn cuDeviceGetName(name: *mut u8, length: i32, device: i32) {
        Out::new(name)?;
        let text = sim()?.device_name(device_id(device))?;
        let Some(room) = usize::try_from(length).ok().filter(|room| *room > 0) else {
            return Err(Refusal::new(ResultCode::INVALID_VALUE, format_args!("{length} bytes of room")));
        };
        let taken = text.len().min(room - 1);
        // SAFETY: the caller has `length` writable bytes there, of which `taken` and one are written.
        unsafe {
            name.copy_from_nonoverlapping(text.as_ptr(), taken);
            name.add(taken).write(0);
        }
        Ok(())
    }

    fn cuDeviceGetUuid(uuid: *mut [u8; 16], device: i32) {
        let out = Out::new(uuid)?;
        out.set(sim()?.device_uuid(device_id(device))?.0)
    }

    /// No device is divided here, so it is the same.
    fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: i32) {
        let out = Out::new(uuid)?;
        out.set(sim()?.device_uuid(device_id(device))?.0)
    }

    fn cuDeviceTotalMem_v2(bytes: *mut u64, device: i32) {
        let out = Out::new(bytes)?;
        out.set(sim()?.device_total_bytes(device_id(device))?)
    }

    fn cuDeviceGetAttribute(value: *mut i32, attribute: i32, device: i32) {
        let out = Out::new(value)?;
        let (sim, device) = (sim()?, device_id(device));
        if let Some(known) = DeviceAttribute::of_number(attribute) {
            return out.set(sim.device_attribute(device, known)?);
        }
        sim.device_total_bytes(device)?;
        match PLAIN.iter().find(|(number, _)| *number == attribute) {
            Some((_, value)) => out.set(*value),
            None => Err(Refusal::new(ResultCode::INVALID_VALUE, format_args!("attribute {attribute}"))),
        }
    }

    fn cuDeviceCanAccessPeer(answer: *mut i32, device: i32, peer: i32) {
        let out = Out::new(answer)?;
        out.set(i32::from(sim()?.can_access_peer(device_id(device), device_id(peer))?))
    }

    fn cuDeviceGetP2PAttribute(value: *mut i32, attribute: i32, device: i32, peer: i32) {
        let out = Out::new(value)?;
        let attribute = peer_attribute(attribute)?;
        out.set(sim()?.peer_attribute(attribute, device_id(device), device_id(peer))?)
    }

    fn cuDevicePrimaryCtxGetState(device: i32, flags: *mut u32, active: *mut i32) {
        let (flags, active) = (Out::new(flags)?, Out::new(active)?);
        let (sim, device) = (sim()?, device_id(device));
        sim.device_total_bytes(device)?;
        flags.set(0)?;
        active.set(i32::from(sim.primary_context(device).is_some()))
    }

    fn cuDevicePrimaryCtxReset_v2(device: i32) {
        let (sim, device) = (sim()?, device_id(device));
        sim.device_total_bytes(device)?;
        let machine = machine()?;
        sim.reset_context(device);
        machine.modules.lock().forget(device);
        Ok(())
    }
}
