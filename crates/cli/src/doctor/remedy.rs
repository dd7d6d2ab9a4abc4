//! What to do about an answer of the driver.

use vmm_sys::{DriverError, ResultCode};

pub(super) const NO_DEVICE: &str =
    "look at nvidia-smi and CUDA_VISIBLE_DEVICES; in a container, pass the GPUs through";

pub(super) const UPDATE: &str = "update the NVIDIA driver to one for CUDA 12.0 or later";

/// Advice that fits the answer, whatever was asked.
pub(super) fn of(error: &DriverError) -> &'static str {
    if error.is_out_of_addresses() {
        return "lift limits on address space (ulimit -v, the container's), then try again";
    }
    if error.is_out_of_memory() {
        return "this is no verdict: free device memory (nvidia-smi lists its users) and try again";
    }
    if error.is_sticky() {
        return "the context is lost: run this again; if it repeats, look for Xid lines in dmesg";
    }
    match error.code() {
        ResultCode::NOT_FOUND => UPDATE,
        ResultCode::SYSTEM_DRIVER_MISMATCH | ResultCode::COMPAT_NOT_SUPPORTED_ON_DEVICE => {
            "library and kernel module differ in version: reboot, or mend the container's mounts"
        }
        ResultCode::SYSTEM_NOT_READY => "start nvidia-fabricmanager, then try again",
        ResultCode::NO_DEVICE | ResultCode::INVALID_DEVICE => NO_DEVICE,
        ResultCode::DEVICE_UNAVAILABLE => {
            "another process uses the device exclusively: end it, or choose another device"
        }
        ResultCode::NOT_SUPPORTED | ResultCode::NOT_PERMITTED | ResultCode::UNKNOWN => {
            "virtual GPUs, MIG, WSL and confidential computing switch abilities off: ask whoever \
             runs the machine, or take a whole GPU"
        }
        ResultCode::TOO_MANY_PEERS => "use fewer GPUs in one process",
        ResultCode::PEER_ACCESS_UNSUPPORTED => "choose devices with a link (nvidia-smi topo -m)",
        _ => "report it, with this output",
    }
}
