"""The pool under RMM, and so under cuDF, cuML and what else takes memory from it.

    import rmm, vmm_pool.rmm
    rmm.mr.set_current_device_resource(vmm_pool.rmm.resource())

C++ programs take include/vmm_pool_rmm.hpp instead.
"""

from __future__ import annotations

import vmm_pool

__all__ = ["NoRmm", "resource"]


class NoRmm(vmm_pool.Error, ImportError):
    """RMM is not installed."""


def resource(device: int | None = None):
    """The pool of a device, by default of the current one, as an ``rmm.mr.CallbackMemoryResource``.

    Blocks belong to the stream that RMM names, and go back behind the stream that RMM names then. A request that
    cannot be served for want of memory raises ``MemoryError`` with the pool's report, else `vmm_pool.Error`.

    Raises `NoRmm`, `vmm_pool.LibraryNotFound`.
    """
    try:
        import rmm
    except ImportError as error:
        raise NoRmm(f"RMM could not be imported: {error}; expected `pip install rmm-cu13`") from error
    library = vmm_pool.library()
    if device is None:
        from rmm._cuda.gpu import getDevice

        device = getDevice()

    def handle(stream) -> int:
        # RMM's stream says its handle by the protocol of CUDA's Python libraries; older ones by a method.
        if hasattr(stream, "__cuda_stream__"):
            return stream.__cuda_stream__()[1]
        return int(stream.value())

    def allocate(size, stream):
        if size == 0:
            return 0
        address = library.vmm_pool_torch_alloc(size, device, handle(stream))
        if not address:
            status, words = library.vmm_pool_last_status(), library.vmm_pool_last_error()
            if status != vmm_pool.Status.OUT_OF_MEMORY:
                vmm_pool.check(status)
            raise MemoryError(f"vmm-pool: {(words or b'no reason was given').decode(errors='replace')}")
        return address

    def deallocate(address, size, stream):
        library.vmm_pool_torch_free(address, size, device, handle(stream))

    return rmm.mr.CallbackMemoryResource(allocate, deallocate)
