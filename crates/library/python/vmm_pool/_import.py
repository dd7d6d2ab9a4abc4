"""Buffers of other processes as arrays of this one, without a copy."""

from __future__ import annotations

import ctypes
import enum
import math
import os
import weakref

from vmm_pool import _dlpack
from vmm_pool._library import Busy, Invalid, check, library
from vmm_pool._pool import Access
from vmm_pool._signatures import ImportFacts


class ImportState(enum.IntEnum):
    """Whether what is mapped is the owner's memory."""

    CURRENT = 0
    CHANGING = 1
    LAGGING = 2
    WITHDRAWN = 3
    OWNER_GONE = 4


def _end(importer, handle) -> None:
    library().vmm_import_close(handle)
    library().vmm_import_disconnect(importer)


class Import:
    """A buffer that another process offers by a name, at an address of this one.

    ``socket`` is the path at which that process listens, or ``@`` and a name. It has ``__dlpack__``, so that
    ``torch.from_dlpack`` makes a tensor of it, and ``__cuda_array_interface__`` for CuPy and Numba. Tensors keep it
    alive.

    Consumers that know no read-only memory are refused (`BufferError`), unless ``hide_read_only`` is set: then a
    kernel that writes faults, and this process's context with it.

    Raises `OwnerFailed` if the other process is not there or refuses, `Busy` if it does not answer in time.
    """

    def __init__(
        self,
        socket: str | os.PathLike,
        name: str,
        *,
        write: bool = False,
        dtype: str = "uint8",
        shape: tuple | None = None,
        hide_read_only: bool = False,
        timeout_us: int = 5_000_000,
    ):
        if dtype not in _dlpack.DTYPES:
            raise Invalid(f"dtype = {dtype!r}: expected one of {', '.join(_dlpack.DTYPES)}")
        calls = library()
        importer, handle = ctypes.c_void_p(), ctypes.c_void_p()
        check(calls.vmm_import_connect(os.fsencode(socket), timeout_us, ctypes.byref(importer)))
        try:
            access = Access.READ_WRITE if write else Access.READ
            check(calls.vmm_import_open(importer, name.encode(), access, ctypes.byref(handle)))
        except BaseException:
            calls.vmm_import_disconnect(importer)
            raise
        self._handle = handle.value
        self._finish = weakref.finalize(self, _end, importer.value, handle.value)
        # At exit nothing is torn down: tensors may be alive.
        self._finish.atexit = False
        self._hides = hide_read_only
        facts = self._facts()
        self.name, self.address, self.device = name, facts.address, facts.device
        self.writable = facts.access == Access.READ_WRITE
        self.dtype = dtype
        try:
            self.shape = self._checked_shape(shape, facts.bytes)
        except BaseException:
            self._finish()
            raise

    def _checked_shape(self, shape, size: int) -> tuple:
        item = _dlpack.DTYPES[self.dtype][1] // 8
        if shape is None:
            return (size // item,)
        shape = tuple(shape)
        if not all(isinstance(length, int) and 0 <= length < 1 << 63 for length in shape):
            raise Invalid(f"shape = {shape!r}: expected whole numbers from 0 to 2^63 - 1")
        if math.prod(shape) * item > size:
            raise Invalid(f"shape = {shape!r} of {self.dtype}: expected at most the buffer's {size} bytes")
        return shape

    def _facts(self) -> ImportFacts:
        if self._handle is None:
            raise Invalid("the import is closed")
        facts = ImportFacts()
        check(library().vmm_import_info(self._handle, ctypes.byref(facts)))
        return facts

    @property
    def bytes(self) -> int:
        """Where its last memory ends."""
        return self._facts().bytes

    @property
    def generation(self) -> int:
        """Counts the changes of the owner's memory."""
        return self._facts().generation

    def check(self) -> ImportState:
        """Whether what is mapped is the owner's memory. Costs no call of the system."""
        if self._handle is None:
            raise Invalid("the import is closed")
        state = ctypes.c_int32()
        check(library().vmm_import_check(self._handle, ctypes.byref(state)))
        return ImportState(state.value)

    def refresh(self, patience_us: int = 1_000_000) -> None:
        """Maps what the owner has now, at the same address. The shape stays. Work that uses memory which leaves must
        have ended."""
        if self._handle is None:
            raise Invalid("the import is closed")
        check(library().vmm_import_refresh(self._handle, patience_us))

    def close(self) -> None:
        """Unmaps it. Work that uses it must have ended. A second call does nothing.

        Raises `Busy` while tensors that were made of it are alive.
        """
        if _dlpack.holds(self):
            raise Busy("tensors made of the import are alive: drop them first")
        self._handle = None
        self._finish()

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if kind is None or not _dlpack.holds(self):
            self.close()

    def _check_current(self) -> None:
        state = self.check()
        if state not in (ImportState.CURRENT, ImportState.OWNER_GONE):
            raise Busy(f"the import is {state.name}: expected it to be CURRENT; refresh it")

    def __dlpack_device__(self) -> tuple[int, int]:
        return (_dlpack.CUDA, self.device)

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        """A capsule for one consumer. ``stream`` is not used: nothing is under way here, and the order after the
        owner's work is agreed with the owner."""
        if dl_device is not None and tuple(dl_device) != self.__dlpack_device__():
            raise BufferError(f"dl_device = {dl_device!r}: expected {self.__dlpack_device__()}, where the memory is")
        if copy:
            raise BufferError("copy = True: expected a consumer that takes the memory as it is")
        versioned = max_version is not None and max_version[0] >= 1
        if not (versioned or self.writable or self._hides):
            raise BufferError(
                "read-only memory for a consumer that cannot be told: expected max_version of (1, 0) or later, or an "
                "import with write=True or hide_read_only=True"
            )
        self._check_current()
        read_only = not (self.writable or self._hides)
        return _dlpack.capsule(self, self.address, self.device, self.dtype, self.shape, read_only, versioned)

    @property
    def __cuda_array_interface__(self) -> dict:
        kind = _dlpack.DTYPES[self.dtype][2]
        if kind is None:
            raise AttributeError(f"{self.dtype} has no __cuda_array_interface__; __dlpack__ has it")
        self._check_current()
        read_only = not (self.writable or self._hides)
        data = (self.address, read_only)
        return {"shape": self.shape, "typestr": kind, "data": data, "version": 3, "strides": None, "stream": None}
