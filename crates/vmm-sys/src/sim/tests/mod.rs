//! Tests of the simulated machine through the contract, row by row where a row was measured.

mod capture;
mod faults;
mod machine;
mod memory;
mod model;
mod programs;
mod refusals;
mod sharing;
mod streams;
mod waiting;

use std::sync::Arc;

use super::Sim;
use crate::driver::Driver;
use crate::error::{DriverResult, ResultCode};
use crate::types::*;

pub(super) const G: u64 = 2 << 20;
pub(super) const D0: DeviceId = DeviceId(0);
pub(super) const D1: DeviceId = DeviceId(1);

pub(super) fn sim() -> Arc<Sim> {
    Sim::builder().devices(2).device_bytes(1 << 30).build()
}

/// The code of a refusal; SUCCESS for a success.
pub(super) fn code<T>(result: DriverResult<T>) -> ResultCode {
    result.map_or_else(|error| error.code(), |_| ResultCode::SUCCESS)
}

/// Calls whose conditions the tests meet: handles are this driver's, host memory outlives the call.
pub(super) trait Unchecked: Driver {
    fn t_release(&self, chunk: ChunkHandle) -> DriverResult<()> {
        // SAFETY: the simulator checks handles itself.
        unsafe { self.release(chunk) }
    }
    fn t_map(&self, address: u64, bytes: u64, chunk: ChunkHandle) -> DriverResult<()> {
        // SAFETY: the simulator checks handles itself.
        unsafe { self.map(address, bytes, 0, chunk) }
    }
    fn t_upload(&self, device: DeviceId, dst: u64, from: &[u8]) -> DriverResult<()> {
        let transfer = Transfer::HostToDevice { dst, src: from.as_ptr(), bytes: from.len() as u64 };
        // SAFETY: a synchronous copy from a live slice.
        unsafe { self.copy(device, &transfer) }
    }
    fn t_download(&self, device: DeviceId, src: u64, bytes: usize) -> DriverResult<Vec<u8>> {
        let mut into = vec![0xEE; bytes];
        let transfer = Transfer::DeviceToHost { dst: into.as_mut_ptr(), src, bytes: bytes as u64 };
        // SAFETY: a synchronous copy to a live vector.
        unsafe { self.copy(device, &transfer) }?;
        Ok(into)
    }
    fn t_copy(&self, device: DeviceId, transfer: Transfer) -> DriverResult<()> {
        // SAFETY: used with device addresses only.
        unsafe { self.copy(device, &transfer) }
    }
    fn t_launch(
        &self,
        device: DeviceId,
        kernel: ProbeKernel,
        stream: StreamHandle,
    ) -> DriverResult<()> {
        // SAFETY: the simulator checks handles and addresses itself.
        unsafe { self.launch(device, &kernel, stream) }
    }
    fn t_sync(&self, device: DeviceId, stream: StreamHandle) -> DriverResult<()> {
        // SAFETY: the simulator checks handles itself.
        unsafe { self.stream_synchronize(device, stream) }
    }
    fn t_query(&self, device: DeviceId, event: EventHandle) -> DriverResult<bool> {
        // SAFETY: the simulator checks handles itself.
        unsafe { self.event_query(device, event) }
    }
    fn t_record(
        &self,
        device: DeviceId,
        event: EventHandle,
        stream: StreamHandle,
    ) -> DriverResult<()> {
        // SAFETY: the simulator checks handles itself.
        unsafe { self.event_record(device, event, stream) }
    }
    fn t_wait(
        &self,
        device: DeviceId,
        stream: StreamHandle,
        event: EventHandle,
    ) -> DriverResult<()> {
        // SAFETY: the simulator checks handles itself.
        unsafe { self.stream_wait_event(device, stream, event) }
    }

    /// A new mapping of a new chunk, with access for its owner.
    fn t_mapped(&self, device: DeviceId, bytes: u64) -> (u64, ChunkHandle) {
        let address = self.address_reserve(bytes, 0, 0).unwrap();
        let chunk = self.create(bytes, &ChunkProps::on_device(device)).unwrap();
        self.t_map(address, bytes, chunk).unwrap();
        self.set_access(address, bytes, &[AccessGrant::read_write(device)]).unwrap();
        (address, chunk)
    }

    /// Undoes [`Unchecked::t_mapped`].
    fn t_unmapped(&self, address: u64, bytes: u64, chunk: ChunkHandle) {
        self.unmap(address, bytes).unwrap();
        self.t_release(chunk).unwrap();
        self.address_free(address, bytes).unwrap();
    }
}

impl Unchecked for Sim {}
