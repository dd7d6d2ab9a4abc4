"""A pool of GPU memory: the functions of libvmm_pool.so in Python. Needs nothing but the library.

    import vmm_pool
    with vmm_pool.Pool(devices=[0], limit_bytes=8 << 30) as pool:
        block = pool.alloc(1 << 20)
        ...
        block.free()

`vmm_pool.torch`, `vmm_pool.cupy` and `vmm_pool.rmm` put the pool under these libraries.
"""

from __future__ import annotations

from vmm_pool._import import Import, ImportState
from vmm_pool._library import (
    Busy,
    DriverFailed,
    Error,
    Forked,
    Invalid,
    LibraryNotFound,
    NoDriver,
    NotABlock,
    NotSupported,
    OutOfAddresses,
    OutOfMemory,
    OwnerFailed,
    Panicked,
    Status,
    check,
    library,
    library_path,
)
from vmm_pool._pool import Access, Block, Elastic, Pool, default, report, stats, stream_destroyed, trim, version

__all__ = [
    "Access",
    "Block",
    "Busy",
    "DriverFailed",
    "Elastic",
    "Error",
    "Forked",
    "Import",
    "ImportState",
    "Invalid",
    "LibraryNotFound",
    "NoDriver",
    "NotABlock",
    "NotSupported",
    "OutOfAddresses",
    "OutOfMemory",
    "OwnerFailed",
    "Panicked",
    "Pool",
    "Status",
    "check",
    "default",
    "library",
    "library_path",
    "report",
    "stats",
    "stream_destroyed",
    "trim",
    "version",
]
