//! Dma-bufs: descriptors by which other drivers would reach memory at an address.
//!
//! No other driver is simulated, so the descriptor is an empty file of the right length that nobody
//! can read memory through. It is truthful in what matters to its owner: it is a real descriptor,
//! and each chunk behind the addresses stays taken until its last duplicate is closed, in whichever
//! process (row D-X9). That is asked as for exports: see `share`.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::Sim;
use super::answer::{Answer, Refused};
use super::export::os_refusal;
use super::regions::Backing;
use super::share;
use super::state::State;
use crate::call::Call;
use crate::error::{DriverResult, ResultCode};
use crate::types::{DeviceId, Location};

/// What addresses and lengths are multiples of: seen on the measured machine (rows D-X8 and D-N19).
const PAGE_BYTES: u64 = 4 << 10;

/// The first driver that has the call.
const SINCE_VERSION: u32 = 11_070;

/// A descriptor that was given out, as the simulator remembers it.
#[derive(Debug)]
pub(super) struct DmaBuf(File);

impl DmaBuf {
    /// One to remember, and one to give out.
    fn make(bytes: u64) -> io::Result<(DmaBuf, OwnedFd)> {
        let file = share::sealed_file(c"vmm-sim-dma-buf", bytes, |_| Ok(()))?;
        let given_out = share::reopen_held(&file)?;
        Ok((DmaBuf(file), given_out))
    }

    /// Whether a duplicate of the descriptor is open anywhere.
    pub(super) fn is_open(&self) -> bool {
        share::is_held(&self.0)
    }
}

impl State {
    /// The chunks behind addresses that are mapped without a hole, all of them device memory.
    fn chunks_behind(&self, address: u64, bytes: u64) -> Answer<Vec<usize>> {
        let end = address.checked_add(bytes).filter(|end| *end > address).ok_or_else(|| {
            Refused::invalid_value(format_args!("{bytes} bytes at {address:#x} are no range"))
        })?;
        let (mut chunks, mut at) = (Vec::new(), address);
        while at < end {
            let Some((start, region)) = self.region_at(at) else {
                return Err(super::vmm::no_chunk_at(at));
            };
            let Backing::Chunk { physical, .. } = region.backing else {
                return Err(Refused::new(ResultCode::NOT_SUPPORTED)
                    .because("simulated dma-bufs are of mapped chunks only"));
            };
            let props = self.physical[physical].props;
            if !matches!(props.location, Location::Device(_)) {
                return Err(Refused::invalid_value(format_args!(
                    "memory of {} has no dma-buf",
                    props.location
                )));
            }
            self.config.permit(Call::MemGetHandleForAddressRange, &props)?;
            chunks.push(physical);
            at = start + region.bytes;
        }
        Ok(chunks)
    }
}

impl Sim {
    /// Rows D-X8 and D-X9.
    pub(super) fn do_dma_buf(
        &self,
        device: DeviceId,
        address: u64,
        bytes: u64,
    ) -> DriverResult<OwnedFd> {
        self.call_on(Call::MemGetHandleForAddressRange, device, |state| {
            if state.config.driver_version < SINCE_VERSION {
                return Err(Refused::new(ResultCode::NOT_SUPPORTED).because(format_args!(
                    "driver {} has no such call",
                    state.config.driver_version
                )));
            }
            if !address.is_multiple_of(PAGE_BYTES) || !bytes.is_multiple_of(PAGE_BYTES) {
                return Err(Refused::invalid_value(format_args!(
                    "{bytes} bytes at {address:#x}: expected multiples of {PAGE_BYTES}"
                )));
            }
            let chunks = state.chunks_behind(address, bytes)?;
            // Here, so that descriptors of the simulator's own do not pile up.
            for (_, physical) in &mut state.physical {
                physical.dma_bufs.retain(|dma_buf| dma_buf.is_open());
            }
            let (dma_buf, given_out) = DmaBuf::make(bytes).map_err(os_refusal)?;
            let dma_buf = Arc::new(dma_buf);
            for chunk in chunks {
                state.physical[chunk].dma_bufs.push(Arc::clone(&dma_buf));
            }
            Ok(given_out)
        })
    }
}
