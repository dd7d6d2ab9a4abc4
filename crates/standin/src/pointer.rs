//! What the driver knows of an address.

use std::ffi::c_void;

use vmm_sys::{Driver, PointerInfo, ResultCode};

use crate::door::{Done, Out, Refusal};
use crate::machine::{current, sim};

/// `CU_MEMORYTYPE_HOST`
const HOST: u32 = 1;

/// Writes one attribute (`CUpointer_attribute`), with the width that it has.
fn tell(info: &PointerInfo, address: u64, attribute: u32, place: *mut c_void) -> Done {
    Out::new(place)?;
    let word = |value: u32| Out::new(place.cast())?.set(value);
    let pointer = |value: u64| Out::new(place.cast())?.set(value);
    let known = info.memory_type != 0;
    match attribute {
        1 => pointer(info.context.map_or(0, |context| context.0)),
        2 => word(info.memory_type),
        3 => pointer(if known { address } else { 0 }),
        4 => pointer(if info.memory_type == HOST { address } else { 0 }),
        // No managed memory.
        8 => word(0),
        // Negative ordinals stand for the host and for "none".
        9 => word(info.device.0),
        10 => word(u32::from(info.legacy_ipc_capable)),
        _ => {
            let why = format_args!("pointer attribute {attribute}");
            Err(Refusal::new(ResultCode::NOT_SUPPORTED, why))
        }
    }
}

entries! {
    /// An address that the driver does not know is an error here, and is none in the plural.
    fn cuPointerGetAttribute(place: *mut c_void, attribute: u32, address: u64) {
        let info = sim()?.pointer_info(address)?;
        match info.memory_type {
            0 => Err(Refusal::new(ResultCode::INVALID_VALUE, format_args!("nothing at {address:#x}"))),
            _ => tell(&info, address, attribute, place),
        }
    }

    fn cuPointerGetAttributes(
        count: u32, attributes: *const u32, places: *const *mut c_void, address: u64,
    ) {
        let info = sim()?.pointer_info(address)?;
        if attributes.is_null() || places.is_null() {
            return Err(Refusal::new(ResultCode::INVALID_VALUE, "null in the place of a list"));
        }
        for index in 0..count as usize {
            // SAFETY: the caller has `count` entries in both lists.
            let (attribute, place) = unsafe { (attributes.add(index).read(), places.add(index).read()) };
            tell(&info, address, attribute, place)?;
        }
        Ok(())
    }

    /// The handle names the address. Nothing opens it: there is no `cuIpcOpenMemHandle`.
    fn cuIpcGetMemHandle(handle: *mut [u64; 8], address: u64) {
        let out = Out::new(handle)?;
        let (sim, device) = current()?;
        sim.legacy_ipc_export(device, address)?;
        out.set([address, 0, 0, 0, 0, 0, 0, 0])
    }
}
