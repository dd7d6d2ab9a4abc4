//! What can go wrong, with whose answer it was.

use cudarc::driver::DriverError;
use vmm_sys::{Access, DeviceId};

/// An operation that did not succeed. Nothing is lost: the slices are as they were.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The pool's answer; out of memory comes with all the figures.
    #[error(transparent)]
    Pool(#[from] vmm_pool::Error),
    /// The answer of the driver that the pool has opened.
    #[error(transparent)]
    Driver(#[from] vmm_sys::DriverError),
    /// The library of the driver could not be opened.
    #[error(transparent)]
    Load(#[from] vmm_sys::cuda::LoadError),
    /// The answer of the driver to cudarc. It may be that of an earlier call, whose place had no
    /// way to answer: cudarc keeps such errors in the context for the next one.
    #[error("cudarc: {0}")]
    Cudarc(#[from] DriverError),
    /// cudarc could not make the two events of a slice, and panicked.
    #[error("cudarc could not make the events of a slice on {device}: {message}")]
    Events {
        /// The device.
        device: DeviceId,
        /// What the panic said.
        message: String,
    },
    /// The context is not the device's primary one: streams and events of the two do not mix.
    #[error("the context on {device} is not the device's primary one: use CudaContext::new")]
    NotPrimary {
        /// The device.
        device: DeviceId,
    },
    /// A pool needs a context to begin with.
    #[error("a pool was to be made for no context: expected one at least")]
    NoContext,
    /// The length in bytes does not fit in 64 bits.
    #[error("{len} elements of {element_bytes} bytes are more bytes than 64 bits can count")]
    TooManyElements {
        /// Asked for.
        len: usize,
        /// The length of one.
        element_bytes: usize,
    },
    /// The device of the stream may not use the memory so.
    #[error(
        "{accessor} has {access:?} access to memory of {owner}: expected {wanted:?}, by \
         CudaPoolBuilder::share or Pool::grant"
    )]
    NoAccess {
        /// Whose memory it is.
        owner: DeviceId,
        /// Whose stream it is.
        accessor: DeviceId,
        /// What the pool lets it do.
        access: Access,
        /// What it would take.
        wanted: Access,
    },
}

impl Error {
    /// Physical memory is short, of the pool or of the driver.
    pub fn is_out_of_memory(&self) -> bool {
        match self {
            Error::Pool(error) => error.is_out_of_memory(),
            Error::Driver(error) => error.is_out_of_memory(),
            _ => false,
        }
    }
}
