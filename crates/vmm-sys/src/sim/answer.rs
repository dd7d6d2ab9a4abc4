//! What the inside of the simulator says when it refuses: a code and a reason. The door adds the
//! call and the device.

use std::fmt;

use crate::call::Call;
use crate::error::{DriverError, ResultCode};
use crate::types::DeviceId;

/// A refusal on its way to the door.
#[derive(Debug)]
pub(super) struct Refused {
    pub(super) code: ResultCode,
    why: String,
}

/// The result of an operation inside the simulator.
pub(super) type Answer<T> = Result<T, Refused>;

impl Refused {
    pub(super) fn new(code: ResultCode) -> Refused {
        Refused { code, why: String::new() }
    }

    /// The code that explains most wrong arguments.
    pub(super) fn invalid_value(why: impl fmt::Display) -> Refused {
        Refused::new(ResultCode::INVALID_VALUE).because(why)
    }

    pub(super) fn invalid_handle(why: impl fmt::Display) -> Refused {
        Refused::new(ResultCode::INVALID_HANDLE).because(why)
    }

    pub(super) fn because(mut self, why: impl fmt::Display) -> Refused {
        self.why = why.to_string();
        self
    }

    pub(super) fn into_error(self, call: Call, device: Option<DeviceId>) -> DriverError {
        let mut error = DriverError::new(call, self.code);
        if let Some(device) = device {
            error = error.on(device);
        }
        if self.why.is_empty() { error } else { error.because(self.why) }
    }
}
