"""The pool under CuPy.

    import vmm_pool.cupy
    vmm_pool.cupy.install()

Arrays then lie in the pool's memory of the stream that is current when they are made, and go back behind that
stream. An array that another stream uses is said so by `record_stream`, or waited for before it is dropped, as
with CuPy's own pool.
"""

from __future__ import annotations

import ctypes

import vmm_pool

__all__ = ["NoCuPy", "allocate", "c_allocator", "install", "record_stream", "release_stream"]

# Streams that memory was taken for, by device and handle. A stream that ended unseen could give its handle to
# another, which would then be given memory that the ended one's work still uses.
_STREAMS: dict[tuple[int, int], object] = {}


class NoCuPy(vmm_pool.Error, ImportError):
    """CuPy is not installed."""


def _cupy():
    try:
        import cupy
    except ImportError as error:
        raise NoCuPy(f"CuPy could not be imported: {error}; expected `pip install cupy-cuda13x`") from error
    return cupy


class _Owner:
    """Gives a block back when the last array in it is gone. Lets no exception out: there is nobody to catch it."""

    __slots__ = ("_free", "address", "bytes", "device", "stream")

    def __init__(self, free, address, size, device, stream):
        self._free = free
        self.address, self.bytes, self.device, self.stream = address, size, device, stream

    def __del__(self):
        self._free(self.address, self.bytes, self.device, self.stream)


def allocate(size: int):
    """An allocator for ``cupy.cuda.set_allocator``: ``size`` bytes on the current device, for its current stream.

    Raises ``cupy.cuda.memory.OutOfMemoryError`` with the pool's report if memory is short, else `vmm_pool.Error`.
    """
    cupy = _cupy()
    device = cupy.cuda.runtime.getDevice()
    if size == 0:
        return cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(0, 0, None, device), 0)
    library = vmm_pool.library()
    current = cupy.cuda.get_current_stream()
    stream = current.ptr
    _STREAMS.setdefault((device, stream), current)
    address = library.vmm_pool_torch_alloc(size, device, stream)
    if not address:
        _fail(cupy, size)
    owner = _Owner(library.vmm_pool_torch_free, address, size, device, stream)
    return cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(address, size, owner, device), 0)


def _fail(cupy, size: int):
    """Raises what the calling thread's last failure was."""
    library = vmm_pool.library()
    status = library.vmm_pool_last_status()
    if status != vmm_pool.Status.OUT_OF_MEMORY:
        vmm_pool.check(status)
        raise vmm_pool.Error("there is no memory, and no reason was given")
    raise _out_of_memory(cupy, size, library.vmm_pool_last_error().decode(errors="replace"))


def _out_of_memory(cupy, size: int, words: str):
    kind = cupy.cuda.memory.OutOfMemoryError

    class PoolOutOfMemory(kind):
        """CuPy's own error, whose constructor takes numbers only, with the pool's words."""

        def __str__(self):
            return f"Out of memory allocating {size:,} bytes. vmm-pool: {words}"

    error = PoolOutOfMemory(size, 0)
    error.report = words
    return error


def install() -> None:
    """Has all of CuPy's arrays lie in the pool, from now on and in every thread.

    Raises `NoCuPy`, `vmm_pool.LibraryNotFound`.
    """
    cupy = _cupy()
    vmm_pool.library()
    cupy.cuda.set_allocator(allocate)


def record_stream(array, stream=None) -> None:
    """Says that ``stream``, or the current one, uses an array made on another: once dropped, its memory is not
    reused before the work enqueued there until then is done.

    Raises `vmm_pool.Invalid` if the array does not lie in the pool.
    """
    cupy = _cupy()
    owner = getattr(array.data.mem, "_owner", None)
    if not isinstance(owner, _Owner):
        raise vmm_pool.Invalid("the array does not lie in the pool: expected one made after vmm_pool.cupy.install()")
    chosen = stream if stream is not None else cupy.cuda.get_current_stream()
    _STREAMS.setdefault((owner.device, chosen.ptr), chosen)
    vmm_pool.check(vmm_pool.library().vmm_pool_record_stream(owner.address, chosen.ptr))


def release_stream(stream) -> None:
    """Forgets a stream that is not used any more. The pool keeps each stream that memory was taken for, so a program
    that makes many calls this with them; and with an ``ExternalStream`` before its owner destroys it.

    Raises `vmm_pool.Busy` while it is captured.
    """
    for device, handle in [key for key in list(_STREAMS) if key[1] == stream.ptr]:
        vmm_pool.stream_destroyed(handle, device)
        _STREAMS.pop((device, handle), None)


def c_allocator():
    """An allocator for ``cupy.cuda.set_allocator`` that calls C functions, without Python in between.

    CuPy tells C functions of no stream. So a block may be used on any stream when it is freed, and it is reused
    only after all that was enqueued on the device before: right, and slow for programs that free much. `install`
    knows the stream.

    Raises `NoCuPy`, `vmm_pool.LibraryNotFound`.
    """
    cupy = _cupy()
    library = vmm_pool.library()
    malloc = ctypes.cast(library.vmm_pool_cupy_malloc, ctypes.c_void_p).value
    free = ctypes.cast(library.vmm_pool_cupy_free, ctypes.c_void_p).value
    made = cupy.cuda.memory.CFunctionAllocator(0, malloc, free, library)

    def allocate_checked(size):
        pointer = made.malloc(size)
        if size and not pointer.ptr:
            _fail(cupy, size)
        return pointer

    return allocate_checked
