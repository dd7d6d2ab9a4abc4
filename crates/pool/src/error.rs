//! What can go wrong, with the numbers that explain it.

use vmm_sys::{Call, DeviceId, DriverError};

use crate::broken::Broken;
use crate::elastic::ElasticError;
use crate::out_of_memory::OutOfMemory;

/// An operation of the pool that did not succeed. The pool is as it was before.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The request is larger than could ever be served: four times the device's memory and more.
    #[error("a request of {bytes} bytes is too large: at most {max_bytes} bytes can be asked for")]
    TooLarge {
        /// Asked for.
        bytes: u64,
        /// The most that is not refused outright.
        max_bytes: u64,
    },
    /// The alignment is no power of two, or larger than a range's own.
    #[error(
        "an alignment of {align_bytes} bytes is not possible: it must be a power of two of at \
         most {max_bytes} bytes"
    )]
    BadAlignment {
        /// Asked for.
        align_bytes: u64,
        /// The largest.
        max_bytes: u64,
    },
    /// Physical memory is short.
    #[error("{0}")]
    OutOfMemory(Box<OutOfMemory>),
    /// Address space is short, which is not memory.
    #[error("no address range of {bytes} bytes is left: {cause}")]
    OutOfAddresses {
        /// What had to be reserved at least.
        bytes: u64,
        /// The driver's answer.
        cause: DriverError,
    },
    /// A read or write reaches beyond a buffer.
    #[error("{bytes} bytes at offset {offset} do not lie in a buffer of {buffer_bytes} bytes")]
    OutOfBounds {
        /// Where it starts.
        offset: u64,
        /// Its length.
        bytes: u64,
        /// The buffer's length.
        buffer_bytes: u64,
    },
    /// A setting was refused when the pool was built.
    #[error("{setting} = {value}: expected {expected}")]
    BadSetting {
        /// Its name.
        setting: &'static str,
        /// What was given.
        value: String,
        /// What would be accepted.
        expected: String,
    },
    /// Virtual memory management does not work on the device: found out when the pool was built.
    #[error("{device} cannot serve a pool: {cause}")]
    Unsupported {
        /// The device.
        device: DeviceId,
        /// The call that was refused; the question for the attribute if the device denies it.
        step: Call,
        /// The driver's answer.
        cause: DriverError,
    },
    /// The pool does not manage that device, or the stream belongs to another driver.
    #[error("{device} is not managed by this pool")]
    UnknownDevice {
        /// The device asked for.
        device: DeviceId,
    },
    /// No lane that hands out raw addresses has this one.
    #[error(
        "{address:#x} is no address of this process's pools: expected one that alloc_raw gave out"
    )]
    UnknownAddress {
        /// The address given.
        address: u64,
    },
    /// The address is a lane's, but no block that somebody holds starts there.
    #[error(
        "no block starts at {address:#x}: it was freed before, or the address lies inside of a \
         block; expected one that alloc_raw gave out and that was not freed since"
    )]
    NotAllocated {
        /// The address given.
        address: u64,
    },
    /// The length given at the free is not that of the block.
    #[error(
        "the block at {address:#x} has {block_bytes} bytes, not {bytes}: expected what was asked \
         for, which lies at most 511 bytes below"
    )]
    WrongBytes {
        /// The address given.
        address: u64,
        /// The length given.
        bytes: u64,
        /// The block's length.
        block_bytes: u64,
    },
    /// The block belongs to the lane of another stream.
    #[error("the block at {address:#x} belongs to the lane of another stream")]
    OtherStream {
        /// The address given.
        address: u64,
    },
    /// Another driver of this process gives out the same addresses, so plain ones say nothing.
    #[error(
        "{address:#x} is an address of another driver's pool in this process too: raw addresses \
         work with one driver at a time"
    )]
    AddressTaken {
        /// The first such address.
        address: u64,
    },
    /// The lane was closed: its stream is gone.
    #[error("the lane is closed: its stream was declared gone")]
    LaneClosed,
    /// A thread panicked in this part of the pool; others work.
    #[error("{0}")]
    Broken(Box<Broken>),
    /// The lane takes part in a capture scope already.
    #[error("the lane takes part in a capture scope already: finish that one first")]
    CaptureOpen,
    /// This is a forked child, or the process is exiting: the driver is gone.
    #[error(
        "the driver is gone in this process: it was forked after the driver was opened, or is \
             exiting"
    )]
    DriverGone,
    /// An operation of an elastic buffer.
    #[error(transparent)]
    Elastic(#[from] ElasticError),
    /// Any other answer of the driver.
    #[error(transparent)]
    Driver(#[from] DriverError),
}

impl Error {
    /// Physical memory is short, of the pool or of the driver.
    pub fn is_out_of_memory(&self) -> bool {
        match self {
            Error::OutOfMemory(_) => true,
            Error::Elastic(
                ElasticError::HostShort { .. }
                | ElasticError::NobodyLends { .. }
                | ElasticError::NotLent { .. },
            ) => true,
            Error::Driver(error) => error.is_out_of_memory(),
            _ => false,
        }
    }
}
