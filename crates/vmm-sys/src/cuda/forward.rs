//! The contract on [`Cuda`], spelled once: what each method does is in the file of its noun, under
//! the same name.

use std::os::fd::{BorrowedFd, OwnedFd};

use super::Cuda;
use crate::call::{Call, CallLedger};
use crate::driver::Driver;
use crate::error::DriverResult;
use crate::process;
use crate::types::{
    Access, AccessGrant, CaptureInfo, CaptureMode, ChunkHandle, ChunkProps, ContextHandle,
    DeviceAttribute, DeviceId, DriverKind, EventHandle, GranularityKind, GraphExecHandle,
    GraphHandle, IpcEventHandle, Location, MemInfo, PeerAttribute, PinnedAddress, PointerInfo,
    ProbeKernel, StreamHandle, StreamId, Transfer, Uuid,
};

macro_rules! forward {
    (
        safe { $(fn $safe:ident($($safe_arg:ident: $safe_type:ty),*) -> $safe_result:ty;)* }
        unsafe { $(fn $name:ident($($arg:ident: $type:ty),*) -> $result:ty;)* }
    ) => {
        impl Driver for Cuda {
            fn kind(&self) -> DriverKind {
                DriverKind::Cuda
            }

            fn ledger(&self) -> &CallLedger {
                &self.ledger
            }

            fn is_gone(&self) -> bool {
                process::is_forked_child() || process::is_exiting()
            }

            fn missing_calls(&self) -> Vec<Call> {
                self.entry.missing()
            }

            // `Cuda::name` is the inherent method: those come before a trait's.
            $(fn $safe(&self, $($safe_arg: $safe_type),*) -> DriverResult<$safe_result> {
                Cuda::$safe(self, $($safe_arg),*)
            })*

            $(unsafe fn $name(&self, $($arg: $type),*) -> DriverResult<$result> {
                // SAFETY: the conditions of both are the same, word by word.
                unsafe { Cuda::$name(self, $($arg),*) }
            })*
        }
    };
}

forward! {
    safe {
        fn driver_version() -> u32;
        fn device_count() -> u32;
        fn device_name(device: DeviceId) -> String;
        fn device_uuid(device: DeviceId) -> Uuid;
        fn device_total_bytes(device: DeviceId) -> u64;
        fn device_attribute(device: DeviceId, attribute: DeviceAttribute) -> i32;
        fn can_access_peer(device: DeviceId, peer: DeviceId) -> bool;
        fn peer_attribute(attribute: PeerAttribute, device: DeviceId, peer: DeviceId) -> i32;
        fn primary_context_retain(device: DeviceId) -> ContextHandle;
        fn primary_context_release(device: DeviceId) -> ();
        fn context_current() -> Option<ContextHandle>;
        fn device_synchronize(device: DeviceId) -> ();
        fn mem_info(device: DeviceId) -> MemInfo;
        fn granularity(props: &ChunkProps, kind: GranularityKind) -> u64;
        fn address_reserve(bytes: u64, align_bytes: u64, hint: u64) -> u64;
        fn address_free(address: u64, bytes: u64) -> ();
        fn create(bytes: u64, props: &ChunkProps) -> ChunkHandle;
        fn retain(address: u64) -> ChunkHandle;
        fn unmap(address: u64, bytes: u64) -> ();
        fn set_access(address: u64, bytes: u64, grants: &[AccessGrant]) -> ();
        fn get_access(address: u64, location: Location) -> Access;
        fn import_fd(descriptor: BorrowedFd<'_>) -> ChunkHandle;
        fn address_range(device: DeviceId, address: u64) -> (u64, u64);
        fn pointer_info(address: u64) -> PointerInfo;
        fn legacy_ipc_export(device: DeviceId, address: u64) -> ();
        fn dma_buf(device: DeviceId, address: u64, bytes: u64) -> OwnedFd;
        fn mem_alloc(device: DeviceId, bytes: u64) -> u64;
        fn mem_free(device: DeviceId, address: u64) -> ();
        fn mem_pool_set_release_threshold(device: DeviceId, bytes: u64) -> ();
        fn host_alloc(device: DeviceId, bytes: u64) -> PinnedAddress;
        fn stream_create(device: DeviceId) -> StreamHandle;
        fn stream_create_blocking(device: DeviceId) -> StreamHandle;
        fn event_create(device: DeviceId) -> EventHandle;
        fn event_create_interprocess(device: DeviceId) -> EventHandle;
        fn ipc_event_open(device: DeviceId, handle: &IpcEventHandle) -> EventHandle;
        fn exchange_capture_mode(mode: CaptureMode) -> CaptureMode;
    }
    unsafe {
        fn context_set_current(context: Option<ContextHandle>) -> ();
        fn release(chunk: ChunkHandle) -> ();
        fn properties(chunk: ChunkHandle) -> ChunkProps;
        fn map(address: u64, bytes: u64, offset: u64, chunk: ChunkHandle) -> ();
        fn export_fd(chunk: ChunkHandle) -> OwnedFd;
        fn mem_alloc_async(device: DeviceId, bytes: u64, stream: StreamHandle) -> u64;
        fn mem_free_async(device: DeviceId, address: u64, stream: StreamHandle) -> ();
        fn host_free(device: DeviceId, address: PinnedAddress) -> ();
        fn copy(device: DeviceId, transfer: &Transfer) -> ();
        fn copy_async(device: DeviceId, transfer: &Transfer, stream: StreamHandle) -> ();
        fn launch(device: DeviceId, kernel: &ProbeKernel, stream: StreamHandle) -> ();
        fn launch_host_function(
            device: DeviceId, stream: StreamHandle, function: Box<dyn FnOnce() + Send>
        ) -> ();
        fn stream_destroy(device: DeviceId, stream: StreamHandle) -> ();
        fn stream_id(device: DeviceId, stream: StreamHandle) -> StreamId;
        fn stream_query(device: DeviceId, stream: StreamHandle) -> bool;
        fn stream_synchronize(device: DeviceId, stream: StreamHandle) -> ();
        fn stream_wait_event(device: DeviceId, stream: StreamHandle, event: EventHandle) -> ();
        fn stream_wait_value32(
            device: DeviceId, stream: StreamHandle, address: PinnedAddress, value: u32
        ) -> ();
        fn ipc_event_handle(device: DeviceId, event: EventHandle) -> IpcEventHandle;
        fn event_destroy(device: DeviceId, event: EventHandle) -> ();
        fn event_record(device: DeviceId, event: EventHandle, stream: StreamHandle) -> ();
        fn event_query(device: DeviceId, event: EventHandle) -> bool;
        fn event_synchronize(device: DeviceId, event: EventHandle) -> ();
        fn capture_begin(device: DeviceId, stream: StreamHandle, mode: CaptureMode) -> ();
        fn capture_end(device: DeviceId, stream: StreamHandle) -> GraphHandle;
        fn capture_info(device: DeviceId, stream: StreamHandle) -> CaptureInfo;
        fn graph_instantiate(device: DeviceId, graph: GraphHandle) -> GraphExecHandle;
        fn graph_launch(device: DeviceId, graph: GraphExecHandle, stream: StreamHandle) -> ();
        fn graph_destroy(device: DeviceId, graph: GraphHandle) -> ();
        fn graph_exec_destroy(device: DeviceId, graph: GraphExecHandle) -> ();
    }
}
