"""What vmm_pool.cupy uses of CuPy 14.2. Says nothing of CuPy itself."""

import ctypes
import types


class Stream:
    def __init__(self, ptr):
        self.ptr = ptr


class UnownedMemory:
    def __init__(self, ptr, size, owner, device_id):
        self.ptr, self.size, self._owner, self.device_id = ptr, size, owner, device_id


class MemoryPointer:
    def __init__(self, mem, offset):
        self.mem, self.ptr = mem, mem.ptr + offset


class OutOfMemoryError(MemoryError):
    def __init__(self, size, total, limit=0):
        super().__init__(f"Out of memory allocating {size:,} bytes (allocated so far: {total:,} bytes).")


class _CMemory:
    def __init__(self, size, param, malloc, free, device):
        self._free = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)(free)
        call = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)(malloc)
        self.param, self.device = param, device
        self.ptr = (call(param, size, device) or 0) if size else 0

    def __del__(self):
        if self.ptr:
            self._free(self.param, self.ptr, self.device)


class CFunctionAllocator:
    def __init__(self, param, malloc, free, owner):
        self._all = param, malloc, free

    def malloc(self, size):
        return MemoryPointer(_CMemory(size, *self._all, cuda.runtime.device), 0)


def _set_allocator(allocator):
    cuda.allocator = allocator


cuda = types.SimpleNamespace(
    allocator=None,
    stream=Stream(0),
    runtime=types.SimpleNamespace(device=0, getDevice=lambda: cuda.runtime.device),
    get_current_stream=lambda: cuda.stream,
    set_allocator=_set_allocator,
    UnownedMemory=UnownedMemory,
    MemoryPointer=MemoryPointer,
    memory=types.SimpleNamespace(OutOfMemoryError=OutOfMemoryError, CFunctionAllocator=CFunctionAllocator),
)


class Array:
    def __init__(self, size):
        self.data = cuda.allocator(size)
