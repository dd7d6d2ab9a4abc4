"""DLPack capsules, built with ctypes.

The layouts are those of dlpack.h: `DLManagedTensor`, which older consumers take, and `DLManagedTensorVersioned` 1.0,
which can say that memory is read-only. Strides are NULL in both: rows lie one after the other.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import threading

CUDA = 2
_READ_ONLY = 1
_VERSION = (1, 0)
_PLAIN, _PLAIN_USED = b"dltensor", b"used_dltensor"
_VERSIONED, _VERSIONED_USED = b"dltensor_versioned", b"used_dltensor_versioned"

# Name: DLPack's code, bits, and the type string of NumPy, which has none for bfloat16.
DTYPES = {
    "bool": (6, 8, "|b1"),
    "int8": (0, 8, "|i1"),
    "int16": (0, 16, "<i2"),
    "int32": (0, 32, "<i4"),
    "int64": (0, 64, "<i8"),
    "uint8": (1, 8, "|u1"),
    "float16": (2, 16, "<f2"),
    "float32": (2, 32, "<f4"),
    "float64": (2, 64, "<f8"),
    "bfloat16": (4, 16, None),
}


class Device(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int32), ("index", ctypes.c_int32)]


class DataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", Device),
        ("ndim", ctypes.c_int32),
        ("dtype", DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class Managed(ctypes.Structure):
    _fields_ = [("tensor", Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class ManagedVersioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", Tensor),
    ]


# What capsules point to, with the memory's owner, by the number in their context.
_alive: dict[int, tuple] = {}
# Entered while it is held only by a collection that ends a capsule in the same thread.
_lock = threading.RLock()
_numbers = itertools.count(1)

_api = ctypes.pythonapi
_new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(("PyCapsule_New", _api))
# By address: a capsule that is being destroyed must not get another reference.
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", _api))
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_GetPointer", _api))


def _forget(context) -> None:
    with _lock:
        gone = _alive.pop(context, None)
    # Outside of the lock: the last reference to an import may go with it.
    del gone


def _delete_plain(address) -> None:
    if address:
        _forget(Managed.from_address(address).context)


def _delete_versioned(address) -> None:
    if address:
        _forget(ManagedVersioned.from_address(address).context)


def _end_capsule(capsule) -> None:
    # A consumer that took the tensor has renamed the capsule, and calls the deleter itself.
    for name, delete in ((_PLAIN, _delete_plain), (_VERSIONED, _delete_versioned)):
        if _is_valid(capsule, name):
            delete(_pointer(capsule, name))


# They take the lock of the interpreter by themselves, so that any thread may call them.
_Callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_deleter_plain, _deleter_versioned = _Callback(_delete_plain), _Callback(_delete_versioned)
_destructor = _Callback(_end_capsule)


def alive() -> int:
    """How many tensors are handed out and not given back."""
    return len(_alive)


def holds(owner) -> bool:
    """Whether a tensor is out that keeps ``owner``."""
    with _lock:
        return any(kept is owner for _, _, kept in _alive.copy().values())


def capsule(owner, address: int, device: int, dtype: str, shape: tuple, read_only: bool, versioned: bool):
    """A capsule for memory that ``owner`` keeps until the consumer calls the deleter, or the capsule ends unused."""
    code, bits, _ = DTYPES[dtype]
    lengths = (ctypes.c_int64 * max(len(shape), 1))(*shape)
    tensor = Tensor(
        data=address,
        device=Device(CUDA, device),
        ndim=len(shape),
        dtype=DataType(code, bits, 1),
        shape=ctypes.cast(lengths, ctypes.POINTER(ctypes.c_int64)),
    )
    number = next(_numbers)
    if versioned:
        deleter = ctypes.cast(_deleter_versioned, ctypes.c_void_p)
        major, minor = _VERSION
        flags = _READ_ONLY if read_only else 0
        managed = ManagedVersioned(major, minor, number, deleter, flags, tensor)
    else:
        managed = Managed(tensor, number, ctypes.cast(_deleter_plain, ctypes.c_void_p))
    with _lock:
        _alive[number] = (managed, lengths, owner)
    try:
        return _new(
            ctypes.addressof(managed), _VERSIONED if versioned else _PLAIN, ctypes.cast(_destructor, ctypes.c_void_p)
        )
    except BaseException:
        with contextlib.suppress(Exception):
            _forget(number)
        raise
