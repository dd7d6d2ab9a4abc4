//! What can go wrong at the driver: which call, which code, which device, and the numbers that
//! explain it.

use std::fmt;

use crate::call::Call;
use crate::types::DeviceId;

/// A result code of the driver (`CUresult`), kept as the plain number it arrived as: drivers newer
/// than any header return codes that no enum knows.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ResultCode(pub u32);

macro_rules! codes {
    ($($constant:ident = $code:literal, $name:literal;)*) => {
        impl ResultCode {
            $(#[doc = concat!("`", $name, "`")] pub const $constant: ResultCode = ResultCode($code);)*

            /// The driver's name, or `None` for a code newer than this list.
            pub fn name(self) -> Option<&'static str> {
                match self.0 {
                    $($code => Some($name),)*
                    _ => None,
                }
            }
        }
    };
}

codes! {
    SUCCESS = 0, "CUDA_SUCCESS";
    INVALID_VALUE = 1, "CUDA_ERROR_INVALID_VALUE";
    OUT_OF_MEMORY = 2, "CUDA_ERROR_OUT_OF_MEMORY";
    NOT_INITIALIZED = 3, "CUDA_ERROR_NOT_INITIALIZED";
    DEINITIALIZED = 4, "CUDA_ERROR_DEINITIALIZED";
    STUB_LIBRARY = 34, "CUDA_ERROR_STUB_LIBRARY";
    DEVICE_UNAVAILABLE = 46, "CUDA_ERROR_DEVICE_UNAVAILABLE";
    NO_DEVICE = 100, "CUDA_ERROR_NO_DEVICE";
    INVALID_DEVICE = 101, "CUDA_ERROR_INVALID_DEVICE";
    INVALID_IMAGE = 200, "CUDA_ERROR_INVALID_IMAGE";
    INVALID_CONTEXT = 201, "CUDA_ERROR_INVALID_CONTEXT";
    MAP_FAILED = 205, "CUDA_ERROR_MAP_FAILED";
    UNMAP_FAILED = 206, "CUDA_ERROR_UNMAP_FAILED";
    ALREADY_MAPPED = 208, "CUDA_ERROR_ALREADY_MAPPED";
    NOT_MAPPED = 211, "CUDA_ERROR_NOT_MAPPED";
    ECC_UNCORRECTABLE = 214, "CUDA_ERROR_ECC_UNCORRECTABLE";
    UNSUPPORTED_LIMIT = 215, "CUDA_ERROR_UNSUPPORTED_LIMIT";
    PEER_ACCESS_UNSUPPORTED = 217, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED";
    INVALID_PTX = 218, "CUDA_ERROR_INVALID_PTX";
    UNSUPPORTED_PTX_VERSION = 222, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION";
    FILE_NOT_FOUND = 301, "CUDA_ERROR_FILE_NOT_FOUND";
    OPERATING_SYSTEM = 304, "CUDA_ERROR_OPERATING_SYSTEM";
    INVALID_HANDLE = 400, "CUDA_ERROR_INVALID_HANDLE";
    ILLEGAL_STATE = 401, "CUDA_ERROR_ILLEGAL_STATE";
    NOT_FOUND = 500, "CUDA_ERROR_NOT_FOUND";
    NOT_READY = 600, "CUDA_ERROR_NOT_READY";
    ILLEGAL_ADDRESS = 700, "CUDA_ERROR_ILLEGAL_ADDRESS";
    LAUNCH_OUT_OF_RESOURCES = 701, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES";
    LAUNCH_TIMEOUT = 702, "CUDA_ERROR_LAUNCH_TIMEOUT";
    PEER_ACCESS_ALREADY_ENABLED = 704, "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED";
    PEER_ACCESS_NOT_ENABLED = 705, "CUDA_ERROR_PEER_ACCESS_NOT_ENABLED";
    CONTEXT_IS_DESTROYED = 709, "CUDA_ERROR_CONTEXT_IS_DESTROYED";
    TOO_MANY_PEERS = 711, "CUDA_ERROR_TOO_MANY_PEERS";
    HOST_MEMORY_ALREADY_REGISTERED = 712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED";
    HOST_MEMORY_NOT_REGISTERED = 713, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED";
    MISALIGNED_ADDRESS = 716, "CUDA_ERROR_MISALIGNED_ADDRESS";
    LAUNCH_FAILED = 719, "CUDA_ERROR_LAUNCH_FAILED";
    NOT_PERMITTED = 800, "CUDA_ERROR_NOT_PERMITTED";
    NOT_SUPPORTED = 801, "CUDA_ERROR_NOT_SUPPORTED";
    SYSTEM_NOT_READY = 802, "CUDA_ERROR_SYSTEM_NOT_READY";
    SYSTEM_DRIVER_MISMATCH = 803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH";
    COMPAT_NOT_SUPPORTED_ON_DEVICE = 804, "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE";
    STREAM_CAPTURE_UNSUPPORTED = 900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED";
    STREAM_CAPTURE_INVALIDATED = 901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED";
    STREAM_CAPTURE_MERGE = 902, "CUDA_ERROR_STREAM_CAPTURE_MERGE";
    STREAM_CAPTURE_UNMATCHED = 903, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED";
    STREAM_CAPTURE_UNJOINED = 904, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED";
    STREAM_CAPTURE_ISOLATION = 905, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION";
    STREAM_CAPTURE_IMPLICIT = 906, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT";
    CAPTURED_EVENT = 907, "CUDA_ERROR_CAPTURED_EVENT";
    STREAM_CAPTURE_WRONG_THREAD = 908, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD";
    UNKNOWN = 999, "CUDA_ERROR_UNKNOWN";
}

impl fmt::Display for ResultCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => write!(f, "{name} ({})", self.0),
            None => write!(f, "result code {}", self.0),
        }
    }
}

impl fmt::Debug for ResultCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A driver call that did not succeed.
#[derive(Clone, PartialEq, Eq)]
pub struct DriverError(Box<Facts>);

#[derive(Clone, PartialEq, Eq)]
struct Facts {
    call: Call,
    code: ResultCode,
    device: Option<DeviceId>,
    detail: String,
}

/// The result of a driver call.
pub type DriverResult<T> = Result<T, DriverError>;

impl DriverError {
    /// An error of `call` with the driver's `code`.
    pub fn new(call: Call, code: ResultCode) -> DriverError {
        DriverError(Box::new(Facts { call, code, device: None, detail: String::new() }))
    }

    /// Adds the device that the call was made for.
    pub fn on(mut self, device: DeviceId) -> DriverError {
        self.0.device = Some(device);
        self
    }

    /// Adds the numbers that explain the failure. Details add up, the newest last.
    pub fn because(mut self, detail: impl fmt::Display) -> DriverError {
        let text = &mut self.0.detail;
        if !text.is_empty() {
            text.push_str("; ");
        }
        text.push_str(&detail.to_string());
        self
    }

    /// The call that failed.
    pub fn call(&self) -> Call {
        self.0.call
    }

    /// The driver's code.
    pub fn code(&self) -> ResultCode {
        self.0.code
    }

    /// The device, where one was named.
    pub fn device(&self) -> Option<DeviceId> {
        self.0.device
    }

    /// The explanation, possibly empty.
    pub fn detail(&self) -> &str {
        &self.0.detail
    }

    /// Physical memory is short. An address-space shortage has the same code but another call:
    /// see [`DriverError::is_out_of_addresses`].
    pub fn is_out_of_memory(&self) -> bool {
        self.0.code == ResultCode::OUT_OF_MEMORY && self.0.call != Call::MemAddressReserve
    }

    /// No address range of that size is left (`cuMemAddressReserve` answers out of memory: row
    /// D-R7).
    pub fn is_out_of_addresses(&self) -> bool {
        self.0.code == ResultCode::OUT_OF_MEMORY && self.0.call == Call::MemAddressReserve
    }

    /// The driver is gone for this process: shut down at exit, or this is a forked child (row
    /// D-K1). Nothing can be released any more, and nothing needs to be.
    pub fn is_driver_gone(&self) -> bool {
        matches!(self.0.code, ResultCode::DEINITIALIZED | ResultCode::NOT_INITIALIZED)
    }

    /// The context is lost: every later call in it fails the same way (row D-M6).
    pub fn is_sticky(&self) -> bool {
        matches!(
            self.0.code,
            ResultCode::ILLEGAL_ADDRESS
                | ResultCode::LAUNCH_FAILED
                | ResultCode::LAUNCH_TIMEOUT
                | ResultCode::ECC_UNCORRECTABLE
                | ResultCode::CONTEXT_IS_DESTROYED
        )
    }
}

impl fmt::Display for DriverError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Facts { call, code, device, detail } = &*self.0;
        write!(f, "{call} failed")?;
        if let Some(device) = device {
            write!(f, " on {device}")?;
        }
        write!(f, ": {code}")?;
        if !detail.is_empty() {
            write!(f, " ({detail})")?;
        }
        Ok(())
    }
}

impl fmt::Debug for DriverError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for DriverError {}

/// The four classic errors of VMM programs, in one wording for errors, documentation and doctor.
pub mod explain {
    use std::fmt::Write as _;

    /// Alignment: which of address and size is no multiple of the granularity, and by how much.
    pub fn alignment(address: Option<u64>, bytes: u64, granularity: u64) -> String {
        let mut text = String::new();
        if let Some(address) = address {
            let rest = address.checked_rem(granularity).unwrap_or(0);
            let _ = write!(text, "address {address:#x} = n x {granularity} + {rest}, ");
        }
        let rest = bytes.checked_rem(granularity).unwrap_or(0);
        let _ = write!(
            text,
            "{bytes} bytes = {} x {granularity} + {rest}: address and size must be multiples of the \
             granularity {granularity}",
            bytes.checked_div(granularity).unwrap_or(0),
        );
        text
    }

    /// Life of a handle: what is still held, and what has to come first.
    pub const HANDLE_LIFE: &str =
        "the handle was released or never created; a mapping keeps the memory, not the handle";

    /// Missing grant: the pair, and that it has to be granted mapping by mapping.
    pub const MISSING_GRANT: &str = "no access: every mapping starts with none, for the owner too; set access for each device \
         that touches it";

    /// Missing support.
    pub const MISSING_SUPPORT: &str = "the driver or the device does not support this; an attribute is no promise, only the try is";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_names_call_code_device_and_numbers() {
        let error = DriverError::new(Call::MemMap, ResultCode::INVALID_VALUE)
            .on(DeviceId(1))
            .because(explain::alignment(Some(0x1000), 4096, 2 << 20));
        let text = error.to_string();
        for part in ["cuMemMap", "CUDA_ERROR_INVALID_VALUE (1)", "device 1", "2097152", "+ 4096"] {
            assert!(text.contains(part), "{part} is missing in: {text}");
        }
    }

    #[test]
    fn unknown_codes_keep_their_number() {
        let error = DriverError::new(Call::MemCreate, ResultCode(4711));
        assert!(error.to_string().contains("result code 4711"));
        assert!(!error.is_out_of_memory() && !error.is_sticky() && !error.is_driver_gone());
    }

    #[test]
    fn address_shortage_is_not_memory_shortage() {
        let addresses = DriverError::new(Call::MemAddressReserve, ResultCode::OUT_OF_MEMORY);
        let memory = DriverError::new(Call::MemCreate, ResultCode::OUT_OF_MEMORY);
        assert!(addresses.is_out_of_addresses() && !addresses.is_out_of_memory());
        assert!(memory.is_out_of_memory() && !memory.is_out_of_addresses());
    }
}
