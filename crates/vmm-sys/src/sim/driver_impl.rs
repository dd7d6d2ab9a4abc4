//! The contract, method by method: each goes straight to the file of its noun.
//!
//! The simulator never dereferences a handle, so the `# Safety` conditions about live handles are
//! not relied on here: a wrong handle is an error. Those about host memory are, when copies run.

use std::os::fd::{BorrowedFd, OwnedFd};

use super::Sim;
use crate::call::{Call, CallLedger};
use crate::driver::Driver;
use crate::error::DriverResult;
use crate::types::*;

impl Driver for Sim {
    fn kind(&self) -> DriverKind {
        DriverKind::Sim
    }

    fn ledger(&self) -> &CallLedger {
        &self.ledger
    }

    fn is_gone(&self) -> bool {
        self.gone().is_some()
    }

    fn missing_calls(&self) -> Vec<Call> {
        self.do_missing_calls()
    }

    fn driver_version(&self) -> DriverResult<u32> {
        self.do_driver_version()
    }

    fn device_count(&self) -> DriverResult<u32> {
        self.do_device_count()
    }

    fn device_name(&self, device: DeviceId) -> DriverResult<String> {
        self.do_device_name(device)
    }

    fn device_uuid(&self, device: DeviceId) -> DriverResult<Uuid> {
        self.do_device_uuid(device)
    }

    fn device_total_bytes(&self, device: DeviceId) -> DriverResult<u64> {
        self.do_device_total_bytes(device)
    }

    fn device_attribute(&self, device: DeviceId, attribute: DeviceAttribute) -> DriverResult<i32> {
        self.do_device_attribute(device, attribute)
    }

    fn can_access_peer(&self, device: DeviceId, peer: DeviceId) -> DriverResult<bool> {
        self.do_can_access_peer(device, peer)
    }

    fn peer_attribute(
        &self,
        attribute: PeerAttribute,
        device: DeviceId,
        peer: DeviceId,
    ) -> DriverResult<i32> {
        self.do_peer_attribute(attribute, device, peer)
    }

    fn primary_context_retain(&self, device: DeviceId) -> DriverResult<ContextHandle> {
        self.do_context_retain(device)
    }

    fn primary_context_release(&self, device: DeviceId) -> DriverResult<()> {
        self.do_context_release(device)
    }

    fn context_current(&self) -> DriverResult<Option<ContextHandle>> {
        self.do_context_current()
    }

    unsafe fn context_set_current(&self, context: Option<ContextHandle>) -> DriverResult<()> {
        self.do_context_set_current(context)
    }

    fn device_synchronize(&self, device: DeviceId) -> DriverResult<()> {
        self.do_device_synchronize(device)
    }

    fn mem_info(&self, device: DeviceId) -> DriverResult<MemInfo> {
        self.do_mem_info(device)
    }

    fn granularity(&self, props: &ChunkProps, kind: GranularityKind) -> DriverResult<u64> {
        self.do_granularity(props, kind)
    }

    fn address_reserve(&self, bytes: u64, align_bytes: u64, hint: u64) -> DriverResult<u64> {
        self.do_address_reserve(bytes, align_bytes, hint)
    }

    fn address_free(&self, address: u64, bytes: u64) -> DriverResult<()> {
        self.do_address_free(address, bytes)
    }

    fn create(&self, bytes: u64, props: &ChunkProps) -> DriverResult<ChunkHandle> {
        self.do_create(bytes, props)
    }

    unsafe fn release(&self, chunk: ChunkHandle) -> DriverResult<()> {
        self.do_release(chunk)
    }

    fn retain(&self, address: u64) -> DriverResult<ChunkHandle> {
        self.do_retain(address)
    }

    unsafe fn properties(&self, chunk: ChunkHandle) -> DriverResult<ChunkProps> {
        self.do_properties(chunk)
    }

    unsafe fn map(
        &self,
        address: u64,
        bytes: u64,
        offset: u64,
        chunk: ChunkHandle,
    ) -> DriverResult<()> {
        self.do_map(address, bytes, offset, chunk)
    }

    fn unmap(&self, address: u64, bytes: u64) -> DriverResult<()> {
        self.do_unmap(address, bytes)
    }

    fn set_access(&self, address: u64, bytes: u64, grants: &[AccessGrant]) -> DriverResult<()> {
        self.do_set_access(address, bytes, grants)
    }

    fn get_access(&self, address: u64, location: Location) -> DriverResult<Access> {
        self.do_get_access(address, location)
    }

    unsafe fn export_fd(&self, chunk: ChunkHandle) -> DriverResult<OwnedFd> {
        self.do_export_fd(chunk)
    }

    fn import_fd(&self, descriptor: BorrowedFd<'_>) -> DriverResult<ChunkHandle> {
        self.do_import_fd(descriptor)
    }

    fn address_range(&self, device: DeviceId, address: u64) -> DriverResult<(u64, u64)> {
        self.do_address_range(device, address)
    }

    fn pointer_info(&self, address: u64) -> DriverResult<PointerInfo> {
        self.do_pointer_info(address)
    }

    fn legacy_ipc_export(&self, device: DeviceId, address: u64) -> DriverResult<()> {
        self.do_legacy_ipc_export(device, address)
    }

    fn dma_buf(&self, device: DeviceId, address: u64, bytes: u64) -> DriverResult<OwnedFd> {
        self.do_dma_buf(device, address, bytes)
    }

    fn mem_alloc(&self, device: DeviceId, bytes: u64) -> DriverResult<u64> {
        self.do_mem_alloc(device, bytes)
    }

    fn mem_free(&self, device: DeviceId, address: u64) -> DriverResult<()> {
        self.do_mem_free(device, address)
    }

    unsafe fn mem_alloc_async(
        &self,
        device: DeviceId,
        bytes: u64,
        stream: StreamHandle,
    ) -> DriverResult<u64> {
        self.do_mem_alloc_async(device, bytes, stream)
    }

    unsafe fn mem_free_async(
        &self,
        device: DeviceId,
        address: u64,
        stream: StreamHandle,
    ) -> DriverResult<()> {
        self.do_mem_free_async(device, address, stream)
    }

    fn mem_pool_set_release_threshold(&self, device: DeviceId, bytes: u64) -> DriverResult<()> {
        self.do_set_release_threshold(device, bytes)
    }

    fn host_alloc(&self, device: DeviceId, bytes: u64) -> DriverResult<PinnedAddress> {
        self.do_host_alloc(device, bytes)
    }

    unsafe fn host_free(&self, device: DeviceId, address: PinnedAddress) -> DriverResult<()> {
        self.do_host_free(device, address)
    }

    unsafe fn copy(&self, device: DeviceId, transfer: &Transfer) -> DriverResult<()> {
        self.do_copy(device, transfer)
    }

    unsafe fn copy_async(
        &self,
        device: DeviceId,
        transfer: &Transfer,
        stream: StreamHandle,
    ) -> DriverResult<()> {
        self.do_copy_async(device, transfer, stream)
    }

    unsafe fn launch(
        &self,
        device: DeviceId,
        kernel: &ProbeKernel,
        stream: StreamHandle,
    ) -> DriverResult<()> {
        self.do_launch(device, kernel, stream)
    }

    unsafe fn launch_host_function(
        &self,
        device: DeviceId,
        stream: StreamHandle,
        function: Box<dyn FnOnce() + Send>,
    ) -> DriverResult<()> {
        self.do_launch_host_function(device, stream, function)
    }

    fn stream_create(&self, device: DeviceId) -> DriverResult<StreamHandle> {
        self.do_stream_create(device, false)
    }

    fn stream_create_blocking(&self, device: DeviceId) -> DriverResult<StreamHandle> {
        self.do_stream_create(device, true)
    }

    unsafe fn stream_destroy(&self, device: DeviceId, stream: StreamHandle) -> DriverResult<()> {
        self.do_stream_destroy(device, stream)
    }

    unsafe fn stream_id(&self, device: DeviceId, stream: StreamHandle) -> DriverResult<StreamId> {
        self.do_stream_id(device, stream)
    }

    unsafe fn stream_query(&self, device: DeviceId, stream: StreamHandle) -> DriverResult<bool> {
        self.do_stream_query(device, stream)
    }

    unsafe fn stream_synchronize(
        &self,
        device: DeviceId,
        stream: StreamHandle,
    ) -> DriverResult<()> {
        self.do_stream_synchronize(device, stream)
    }

    unsafe fn stream_wait_event(
        &self,
        device: DeviceId,
        stream: StreamHandle,
        event: EventHandle,
    ) -> DriverResult<()> {
        self.do_stream_wait_event(device, stream, event)
    }

    unsafe fn stream_wait_value32(
        &self,
        device: DeviceId,
        stream: StreamHandle,
        address: PinnedAddress,
        value: u32,
    ) -> DriverResult<()> {
        self.do_stream_wait_value32(device, stream, address, value)
    }

    fn event_create(&self, device: DeviceId) -> DriverResult<EventHandle> {
        self.do_event_create(device)
    }

    fn event_create_interprocess(&self, device: DeviceId) -> DriverResult<EventHandle> {
        self.do_event_shared(Call::EventCreate, device)
    }

    unsafe fn ipc_event_handle(
        &self,
        device: DeviceId,
        _event: EventHandle,
    ) -> DriverResult<IpcEventHandle> {
        self.do_event_shared(Call::IpcGetEventHandle, device)
    }

    fn ipc_event_open(
        &self,
        device: DeviceId,
        _handle: &IpcEventHandle,
    ) -> DriverResult<EventHandle> {
        self.do_event_shared(Call::IpcOpenEventHandle, device)
    }

    unsafe fn event_destroy(&self, device: DeviceId, event: EventHandle) -> DriverResult<()> {
        self.do_event_destroy(device, event)
    }

    unsafe fn event_record(
        &self,
        device: DeviceId,
        event: EventHandle,
        stream: StreamHandle,
    ) -> DriverResult<()> {
        self.do_event_record(device, event, stream)
    }

    unsafe fn event_query(&self, device: DeviceId, event: EventHandle) -> DriverResult<bool> {
        self.do_event_query(device, event)
    }

    unsafe fn event_synchronize(&self, device: DeviceId, event: EventHandle) -> DriverResult<()> {
        self.do_event_synchronize(device, event)
    }

    unsafe fn capture_begin(
        &self,
        device: DeviceId,
        stream: StreamHandle,
        mode: CaptureMode,
    ) -> DriverResult<()> {
        self.do_capture_begin(device, stream, mode)
    }

    unsafe fn capture_end(
        &self,
        device: DeviceId,
        stream: StreamHandle,
    ) -> DriverResult<GraphHandle> {
        self.do_capture_end(device, stream)
    }

    unsafe fn capture_info(
        &self,
        device: DeviceId,
        stream: StreamHandle,
    ) -> DriverResult<CaptureInfo> {
        self.do_capture_info(device, stream)
    }

    fn exchange_capture_mode(&self, mode: CaptureMode) -> DriverResult<CaptureMode> {
        self.do_exchange_capture_mode(mode)
    }

    unsafe fn graph_instantiate(
        &self,
        device: DeviceId,
        graph: GraphHandle,
    ) -> DriverResult<GraphExecHandle> {
        self.do_graph_instantiate(device, graph)
    }

    unsafe fn graph_launch(
        &self,
        device: DeviceId,
        graph: GraphExecHandle,
        stream: StreamHandle,
    ) -> DriverResult<()> {
        self.do_graph_launch(device, graph, stream)
    }

    unsafe fn graph_destroy(&self, device: DeviceId, graph: GraphHandle) -> DriverResult<()> {
        self.do_graph_destroy(device, graph)
    }

    unsafe fn graph_exec_destroy(
        &self,
        device: DeviceId,
        graph: GraphExecHandle,
    ) -> DriverResult<()> {
        self.do_graph_exec_destroy(device, graph)
    }
}
