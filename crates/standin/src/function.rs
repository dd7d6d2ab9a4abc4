//! Attributes of functions. No kernel's code is looked at, so they are those of one that uses nothing;
//! the two that a program may set are kept, and change nothing.

use vmm_sys::ResultCode;

use crate::door::{Out, Refusal};
use crate::machine::machine;

/// `CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES`
const DYNAMIC_SHARED_BYTES: u32 = 8;
/// `CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT`
const CARVEOUT: u32 = 9;
/// The most dynamic shared memory of a block on compute capability 9.0, in bytes.
const DYNAMIC_SHARED_BYTES_MAX: i32 = 232_448;

/// What a program has set of a function.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Attributes {
    dynamic_shared_bytes: i32,
    carveout_percent: i32,
}

impl Default for Attributes {
    fn default() -> Attributes {
        // -1: the driver's choice.
        Attributes { dynamic_shared_bytes: 49_152, carveout_percent: -1 }
    }
}

impl Attributes {
    /// `CUfunction_attribute`.
    fn get(&self, attribute: u32) -> Option<i32> {
        match attribute {
            // MAX_THREADS_PER_BLOCK
            0 => Some(1024),
            // SHARED_SIZE_BYTES, CONST_SIZE_BYTES, LOCAL_SIZE_BYTES, NUM_REGS
            1..=4 => Some(0),
            // PTX_VERSION, BINARY_VERSION
            5 | 6 => Some(90),
            // CACHE_MODE_CA
            7 => Some(0),
            DYNAMIC_SHARED_BYTES => Some(self.dynamic_shared_bytes),
            CARVEOUT => Some(self.carveout_percent),
            _ => None,
        }
    }

    /// False for what cannot be set, or not to this.
    fn set(&mut self, attribute: u32, value: i32) -> bool {
        match attribute {
            DYNAMIC_SHARED_BYTES if (0..=DYNAMIC_SHARED_BYTES_MAX).contains(&value) => {
                self.dynamic_shared_bytes = value;
            }
            CARVEOUT if (-1..=100).contains(&value) => self.carveout_percent = value,
            _ => return false,
        }
        true
    }
}

fn refused(attribute: u32, value: impl std::fmt::Display) -> Refusal {
    let why = format_args!("function attribute {attribute}{value}");
    Refusal::new(ResultCode::INVALID_VALUE, why)
}

entries! {
    fn cuFuncGetAttribute(value: *mut i32, attribute: u32, function: u64) {
        let out = Out::new(value)?;
        let attributes = machine()?.modules.lock().function(function)?.attributes;
        out.set(attributes.get(attribute).ok_or_else(|| refused(attribute, ""))?)
    }

    fn cuFuncSetAttribute(function: u64, attribute: u32, value: i32) {
        match machine()?.modules.lock().attributes_of(function)?.set(attribute, value) {
            true => Ok(()),
            false => Err(refused(attribute, format_args!(" = {value}"))),
        }
    }

    /// A hint, on a GPU too.
    fn cuFuncSetCacheConfig(function: u64, _config: u32) {
        machine()?.modules.lock().function(function).map(drop)
    }

    fn cuFuncGetModule(module: *mut u64, function: u64) {
        let out = Out::new(module)?;
        out.set(machine()?.modules.lock().function(function)?.module)
    }
}
