"""What vmm_pool.torch uses of PyTorch 2.11, with every call written down. Says nothing of PyTorch itself."""

import ctypes
import types

__version__ = "2.11.0+test"
version = types.SimpleNamespace(git_version="0000")
calls = []


class _Hooks:
    def __getattr__(self, name):
        if not name.startswith("set_"):
            raise AttributeError(name)

        def take(address):
            assert isinstance(address, int) and address > 0, (name, address)
            calls.append(name)

        return take


class CUDAPluggableAllocator:
    def __init__(self, path, alloc, free):
        library = ctypes.CDLL(path)
        getattr(library, alloc), getattr(library, free)
        calls.append(f"{alloc},{free}")
        self._hooks = _Hooks()

    def allocator(self):
        return self._hooks


def _change(_allocator):
    if cuda.refuses:
        raise RuntimeError("Can't swap an already initialized allocator")
    calls.append("change_current_allocator")


class _Device:
    def __init__(self, index):
        self.index = index

    def __enter__(self):
        calls.append(f"device {self.index}")

    def __exit__(self, *_):
        pass


class MemPool:
    def __init__(self, allocator):
        calls.append("MemPool")
        self.allocator = allocator


class use_mem_pool:  # noqa: N801
    def __init__(self, pool, device=None):
        calls.append(f"use_mem_pool {device}")

    def __enter__(self):
        pass

    def __exit__(self, *_):
        calls.append("left")


cuda = types.SimpleNamespace(
    initialized=False,
    refuses=False,
    is_initialized=lambda: cuda.initialized,
    memory=types.SimpleNamespace(
        CUDAPluggableAllocator=CUDAPluggableAllocator, change_current_allocator=_change
    ),
    device=_Device,
    current_device=lambda: 2,
    MemPool=MemPool,
    use_mem_pool=use_mem_pool,
)
_C = types.SimpleNamespace(_GLIBCXX_USE_CXX11_ABI=True, _cuda_customAllocator=None)
