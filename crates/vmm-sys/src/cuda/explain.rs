//! What the numbers of a refused call mean. All of it runs after a failure only, so it may take its
//! time and ask the driver more.

use super::Cuda;
use crate::call::Call;
use crate::error::{DriverError, ResultCode, explain};
use crate::types::{
    AccessGrant, ChunkHandle, ChunkProps, DeviceId, GranularityKind, PeerAttribute,
};

/// More kinds of memory than any program uses; beyond it the driver is asked again each time.
const GRANULARITIES_MAX: usize = 64;

impl Cuda {
    /// The error of a call, with what can be said whatever the call was.
    pub(super) fn refused(
        &self,
        call: Call,
        device: Option<DeviceId>,
        code: ResultCode,
    ) -> DriverError {
        let mut error = DriverError::new(call, code);
        if let Some(device) = device {
            error = error.on(device);
        }
        match code {
            ResultCode::INVALID_DEVICE => error.because(format_args!(
                "this process sees {} device(s), counted from 0; CUDA_VISIBLE_DEVICES decides",
                self.devices.len()
            )),
            ResultCode::STREAM_CAPTURE_UNSUPPORTED => error.because(
                "a stream is being captured, and this call breaks captures unless the calling \
                 thread is in the relaxed capture mode",
            ),
            ResultCode::NOT_SUPPORTED | ResultCode::NOT_PERMITTED => {
                error.because(explain::MISSING_SUPPORT)
            }
            _ => error,
        }
    }

    pub(super) fn remember_granularity(&self, props: &ChunkProps, bytes: u64) {
        let mut known = self.granularities.lock();
        if known.len() < GRANULARITIES_MAX && known.iter().all(|(other, _)| other != props) {
            known.push((*props, bytes));
        }
    }

    /// The granularity for `props`. Without them (a plain address), the coarsest that was ever
    /// asked for, else that of device 0: all memory had the same wherever it was measured.
    fn known_granularity(&self, props: Option<&ChunkProps>) -> Option<u64> {
        let known = {
            let list = self.granularities.lock();
            let wanted = list.iter().filter(|(other, _)| props.is_none_or(|props| props == other));
            wanted.map(|&(_, bytes)| bytes).max()
        };
        known.or_else(|| {
            let plain = ChunkProps::on_device(DeviceId(0));
            self.granularity(props.unwrap_or(&plain), GranularityKind::Minimum).ok()
        })
    }

    /// An invalid value of a call about addresses: the remainders, and if those are all zero, what
    /// else it may be.
    pub(super) fn explain_range(
        &self,
        error: DriverError,
        address: Option<u64>,
        bytes: u64,
        props: Option<&ChunkProps>,
        otherwise: &str,
    ) -> DriverError {
        if error.code() != ResultCode::INVALID_VALUE {
            return error;
        }
        let Some(granularity) = self.known_granularity(props).filter(|&bytes| bytes != 0) else {
            return error.because(otherwise);
        };
        let error = error.because(explain::alignment(address, bytes, granularity));
        if bytes == 0 {
            return error.because("and more than 0 bytes");
        }
        let address = address.unwrap_or(0);
        if address.is_multiple_of(granularity) && bytes.is_multiple_of(granularity) {
            return error.because(format_args!("they are; then {otherwise}"));
        }
        error
    }

    pub(super) fn explain_reserve(
        &self,
        error: DriverError,
        bytes: u64,
        align_bytes: u64,
    ) -> DriverError {
        match error.code() {
            ResultCode::INVALID_VALUE if align_bytes != 0 && !align_bytes.is_power_of_two() => {
                error.because(format_args!("alignment {align_bytes} is no power of two"))
            }
            ResultCode::OUT_OF_MEMORY => error.because(format_args!(
                "no {bytes} bytes of addresses are left: about 128 TiB can be reserved in all"
            )),
            _ => {
                let why = "the alignment may be the cause";
                self.explain_range(error, None, bytes, None, why)
            }
        }
    }

    pub(super) fn explain_create(
        &self,
        error: DriverError,
        bytes: u64,
        props: &ChunkProps,
    ) -> DriverError {
        let error = match error.code() {
            ResultCode::OUT_OF_MEMORY => error.because(format_args!("{bytes} bytes wanted")),
            _ => {
                let why = "the driver does not take these properties";
                self.explain_range(error, None, bytes, Some(props), why)
            }
        };
        let ChunkProps { location, handle_types, rdma } = props;
        error.because(format_args!("memory on {location}, {handle_types:?}, rdma {rdma}"))
    }

    pub(super) fn explain_handle(&self, error: DriverError, chunk: ChunkHandle) -> DriverError {
        match error.code() {
            ResultCode::INVALID_VALUE => {
                error.because(format_args!("handle {:#x}: {}", chunk.0, explain::HANDLE_LIFE))
            }
            _ => error,
        }
    }

    pub(super) fn explain_map(
        &self,
        error: DriverError,
        address: u64,
        bytes: u64,
        offset: u64,
    ) -> DriverError {
        if error.code() == ResultCode::NOT_SUPPORTED {
            return error.because(format_args!(
                "{bytes} bytes from offset {offset}: a chunk is mapped whole, from offset 0"
            ));
        }
        let why = "the addresses are not reserved, or mapped already, or the handle is dead";
        self.explain_range(error, Some(address), bytes, None, why)
    }

    pub(super) fn explain_access(
        &self,
        error: DriverError,
        address: u64,
        bytes: u64,
        grants: &[AccessGrant],
    ) -> DriverError {
        let why = if grants.is_empty() {
            "there is no grant in the list"
        } else {
            "the range holds a hole or a part of a mapping, or a grantee does not exist"
        };
        let error = self.explain_range(error, Some(address), bytes, None, why);
        // A device out of range is refused like a peer without a link.
        let Some(owner) = self.owner_of(address) else { return error };
        grants
            .iter()
            .filter_map(|grant| grant.location.device().filter(|&peer| peer != owner))
            .fold(error, |error, peer| match self.why_no_link(peer, owner) {
                Some(why) => error.because(why),
                None => error,
            })
    }

    /// The device whose memory is mapped at an address.
    fn owner_of(&self, address: u64) -> Option<DeviceId> {
        let device = self.pointer_info(address).ok()?.device;
        self.slot(device).map(|_| device)
    }

    /// What the link between two devices says, if it says no.
    fn why_no_link(&self, peer: DeviceId, owner: DeviceId) -> Option<String> {
        let pair = format!("{peer} to memory of {owner}");
        if self.slot(peer).is_none() {
            return Some(format!("{pair}: there is no {peer}"));
        }
        match self.can_access_peer(peer, owner) {
            Ok(true) => return None,
            Ok(false) => {}
            Err(error) => return Some(format!("{pair}: {error}")),
        }
        let rank = self.peer_attribute(PeerAttribute::PerformanceRank, peer, owner);
        Some(match rank {
            Ok(rank) => format!("{pair}: no peer access over this link (rank {rank})"),
            Err(_) => format!("{pair}: no peer access over this link"),
        })
    }

    /// A copy or fill that the driver refused: mostly a device without a grant.
    pub(super) fn explain_transfer(&self, error: DriverError) -> DriverError {
        match error.code() {
            ResultCode::INVALID_VALUE => error.because(explain::MISSING_GRANT),
            _ => error,
        }
    }
}
