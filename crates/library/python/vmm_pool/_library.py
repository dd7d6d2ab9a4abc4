"""Finding libvmm_pool.so, its functions' signatures, and its failures as exceptions."""

from __future__ import annotations

import ctypes
import ctypes.util
import enum
import os
import pathlib
import threading

ABI_VERSION = 1
_NAME = "libvmm_pool.so"
# As programs name it that were linked with it.
_SONAME = f"{_NAME}.{ABI_VERSION}"
_VARIABLE = "VMM_POOL_LIBRARY"


class Status(enum.IntEnum):
    """What the functions answer: `enum vmm_pool_status` of vmm_pool.h."""

    OK = 0
    INVALID = 1
    OUT_OF_MEMORY = 2
    OUT_OF_ADDRESSES = 3
    NOT_A_BLOCK = 4
    NO_DRIVER = 5
    NOT_SUPPORTED = 6
    BUSY = 7
    FORKED = 8
    DRIVER = 9
    TRUNCATED = 10
    PANICKED = 11
    OWNER = 12


class Error(Exception):
    """What the pool could not do, in its own words."""


class LibraryNotFound(Error, ImportError):
    """libvmm_pool.so was not found, or is of another version than this module."""


class Invalid(Error, ValueError):
    """An argument is wrong; the words say what was expected."""


class OutOfMemory(Error, MemoryError):
    """Physical memory is short; the words are the pool's report."""


class OutOfAddresses(Error, MemoryError):
    """Addresses are short, which is not memory."""


class NotABlock(Invalid):
    """No block that somebody holds starts at the address."""


class NoDriver(Error):
    """There is no GPU, or ``VMM_POOL_DRIVER`` is wrong."""


class NotSupported(Error):
    """The device, the driver or the buffer cannot do that."""


class Busy(Error):
    """Somebody uses it: try again when that has ended."""


class Forked(Error):
    """This process was forked after the GPU was opened, and cannot use it."""


class DriverFailed(Error):
    """Any other answer of the driver."""


class OwnerFailed(Error):
    """The process that owns a shared buffer is not there, refuses, or has taken the buffer back."""


class Panicked(Error):
    """A bug in the pool."""


_KINDS = {
    Status.INVALID: Invalid,
    Status.OUT_OF_MEMORY: OutOfMemory,
    Status.OUT_OF_ADDRESSES: OutOfAddresses,
    Status.NOT_A_BLOCK: NotABlock,
    Status.NO_DRIVER: NoDriver,
    Status.NOT_SUPPORTED: NotSupported,
    Status.BUSY: Busy,
    Status.FORKED: Forked,
    Status.DRIVER: DriverFailed,
    Status.PANICKED: Panicked,
    Status.OWNER: OwnerFailed,
}


_LOCK = threading.Lock()
_loaded: tuple[pathlib.Path, ctypes.CDLL] | None = None


def _candidates():
    """Where the library may lie, best first."""
    here = pathlib.Path(__file__).resolve().parent
    # Beside the module, and in lib/ of any prefix that the module may lie in.
    for directory in [here, *(place for above in list(here.parents)[:5] for place in (above / "lib", above))]:
        yield directory / _NAME
        yield directory / _SONAME


def _find() -> str:
    if named := os.environ.get(_VARIABLE):
        if not os.path.exists(named):
            raise LibraryNotFound(f"{_VARIABLE} = {named}: there is no such file; expected the path of {_NAME}")
        return named
    for path in _candidates():
        if path.is_file():
            return str(path)
    return _SONAME


def _path_of(library: ctypes.CDLL, asked: str) -> pathlib.Path:
    """The file that was loaded, which the loader may have chosen."""

    class Found(ctypes.Structure):
        _fields_ = [
            ("file", ctypes.c_char_p),
            ("base", ctypes.c_void_p),
            ("symbol", ctypes.c_char_p),
            ("address", ctypes.c_void_p),
        ]

    found = Found()
    dladdr = ctypes.CDLL(None).dladdr
    dladdr.argtypes = [ctypes.c_void_p, ctypes.POINTER(Found)]
    if dladdr(ctypes.cast(library.vmm_pool_version, ctypes.c_void_p), ctypes.byref(found)) and found.file:
        return pathlib.Path(os.fsdecode(found.file)).resolve()
    return pathlib.Path(asked)


def _load() -> tuple[pathlib.Path, ctypes.CDLL]:
    name = _find()
    try:
        loaded = ctypes.CDLL(name)
    except OSError as error:
        raise LibraryNotFound(
            f"{name} could not be loaded: {error}; expected it beside this module, in lib/ of its prefix, on the "
            f"loader's path, or where {_VARIABLE} says; crates/library/install.sh PREFIX builds it and puts both there"
        ) from error
    try:
        loaded.vmm_pool_abi_version.restype = ctypes.c_uint32
        version = loaded.vmm_pool_abi_version()
    except AttributeError as error:
        raise LibraryNotFound(f"{name} is not the pool's library: {error}") from error
    if version != ABI_VERSION:
        raise LibraryNotFound(f"{name} has version {version} of its interface; expected {ABI_VERSION}")
    from vmm_pool._signatures import declare

    declare(loaded)
    return _path_of(loaded, name), loaded


def _get() -> tuple[pathlib.Path, ctypes.CDLL]:
    global _loaded
    with _LOCK:
        if _loaded is None:
            _loaded = _load()
        return _loaded


def library() -> ctypes.CDLL:
    """The library, loaded on first use.

    Raises `LibraryNotFound`.
    """
    return _get()[1]


def library_path() -> pathlib.Path:
    """The file of the library.

    Raises `LibraryNotFound`.
    """
    return _get()[0]


def check(status: int) -> None:
    """Nothing for `Status.OK`; else raises the exception of the status, with the library's words."""
    if status == Status.OK:
        return
    words = library().vmm_pool_last_error()
    text = words.decode(errors="replace") if words else f"status {status}"
    raise _KINDS.get(status, Error)(text)
