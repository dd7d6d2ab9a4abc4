"""Pools, blocks and elastic buffers."""

from __future__ import annotations

import contextlib
import ctypes
import enum
import json
import threading
import weakref

from vmm_pool._library import Error, Invalid, Status, check, library
from vmm_pool._signatures import ElasticInfo, ElasticOptions, PoolOptions

_USE_ENVIRONMENT, _EXPORTABLE, _NO_BACKGROUND, _GUARD = 1, 2, 4, 8
_MOVABLE, _ELASTIC_EXPORTABLE, _SINGLE_PIECE = 1, 2, 4


class Access(enum.IntEnum):
    """What a device may do with an elastic buffer."""

    NONE = 0
    READ = 1
    READ_WRITE = 3


class _Place(enum.IntEnum):
    DEVICE = 0
    HOST_NODE = 1


class _Contents(enum.IntEnum):
    KEEP = 0
    DROP = 1


def version() -> str:
    """The library's version."""
    return library().vmm_pool_version().decode()


def _bytes(value, what: str) -> int:
    """A length that ctypes does not silently cut."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 64:
        raise Invalid(f"{what} = {value!r}: expected a whole number of bytes from 0 to 2^64 - 1")
    return value


def _device(value) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 31:
        raise Invalid(f"device {value!r}: expected an ordinal from 0 to 2^31 - 1")
    return value


def _stream(value) -> int:
    """A handle, or what the CUDA libraries of Python have for one."""
    if hasattr(value, "__cuda_stream__"):
        return value.__cuda_stream__()[1]
    for name in ("cuda_stream", "ptr"):
        if isinstance(found := getattr(value, name, None), int):
            return found
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 64:
        raise Invalid(f"stream {value!r}: expected a handle, or an object with __cuda_stream__, cuda_stream or ptr")
    return value


def _text(call, *arguments) -> str:
    """A text that grows between asking for its length and asking for it is asked for again."""
    needed = ctypes.c_size_t(4096)
    while True:
        capacity = needed.value + 1024
        buffer = ctypes.create_string_buffer(capacity)
        status = call(*arguments, buffer, capacity, ctypes.byref(needed))
        if status != Status.TRUNCATED:
            check(status)
            return buffer.value.decode()


class Block:
    """Memory of a pool at a stable address. Freed by `free`, at the end of a `with`, or with its last reference."""

    def __init__(self, address: int, size: int, device: int, stream: int):
        self.address, self.bytes, self.device, self.stream = address, size, device, stream
        self._is_live = address != 0
        self._lock = threading.Lock()

    def record_stream(self, stream) -> None:
        """Says that another stream uses it: once freed, it is not reused before the work enqueued there is done."""
        if self._is_live:
            check(library().vmm_pool_record_stream(self.address, _stream(stream)))

    def free(self, stream=None) -> None:
        """Gives it back; work enqueued before on its stream, and on ``stream``, may still use it. A second call
        does nothing."""
        handle = self.stream if stream is None else _stream(stream)
        with self._lock:
            if self._is_live:
                check(library().vmm_pool_free(self.address, self.bytes, handle))
                self._is_live = False

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.free()

    def __del__(self):
        # Nobody could catch it; a forked child is told that the GPU is gone.
        with contextlib.suppress(Exception):
            self.free()

    def __repr__(self):
        return f"<Block of {self.bytes} bytes at {self.address:#x} on device {self.device}>"


class Elastic:
    """A range of addresses whose memory comes and goes. See `Pool.elastic`."""

    def __init__(self, pool: Pool, handle: int):
        self._handle = handle
        self._pool = pool
        self._finish = weakref.finalize(self, _quietly, "vmm_elastic_release", handle)
        # The driver may be gone by then.
        self._finish.atexit = False

    def _call(self, name: str, *arguments) -> int:
        answer = ctypes.c_uint64()
        check(getattr(library(), name)(self._handle, *arguments, ctypes.byref(answer)))
        return answer.value

    def grow_to(self, size: int) -> int:
        """Puts memory behind the first ``size`` bytes, in whole chunks; all or nothing. Answers how much is new.

        Raises `OutOfMemory`, `Invalid`.
        """
        return self._call("vmm_elastic_grow", _bytes(size, "bytes"))

    def shrink_to(self, size: int) -> int:
        """Takes the memory beyond ``size`` away, in whole chunks. Answers how much."""
        return self._call("vmm_elastic_shrink", _bytes(size, "bytes"))

    def to_device(self, device: int, patience_us: int = 1_000_000) -> int:
        """Moves the memory to a device; the address stays. Answers how much was moved."""
        return self._call("vmm_elastic_migrate", _Place.DEVICE, _device(device), patience_us)

    def to_host(self, node: int = 0, patience_us: int = 1_000_000) -> int:
        """Moves the memory to a NUMA node of the host; the address stays. Answers how much was moved."""
        return self._call("vmm_elastic_migrate", _Place.HOST_NODE, node, patience_us)

    def grant(self, device: int, access: Access = Access.READ_WRITE) -> None:
        """Lets another device use it."""
        check(library().vmm_elastic_grant(self._handle, _device(device), access))

    def revoke(self, device: int) -> None:
        """Takes the access of another device away."""
        check(library().vmm_elastic_revoke(self._handle, _device(device)))

    @contextlib.contextmanager
    def use_on(self, stream=0, device: int | None = None):
        """Work enqueued inside on ``stream``, one of ``device`` or of the buffer's home, uses the buffer: the memory
        stays until that is done."""
        info, use = self.info(), ctypes.c_void_p()
        where = info["device"] if device is None else _device(device)
        check(library().vmm_elastic_use_on(self._handle, where, _stream(stream), ctypes.byref(use)))
        try:
            yield info["address"]
        finally:
            check(library().vmm_use_end(use))

    def info(self) -> dict:
        """What is known of it, by the names of `vmm_elastic_state`."""
        found = ElasticInfo()
        check(library().vmm_elastic_info(self._handle, ctypes.byref(found)))
        names = [name for name, _ in ElasticInfo._fields_ if name not in ("struct_bytes", "reserved")]
        return {name: getattr(found, name) for name in names}

    @property
    def address(self) -> int:
        """Its address, which never changes."""
        return self.info()["address"]

    @property
    def committed_bytes(self) -> int:
        """How much of it has memory."""
        return self.info()["committed_bytes"]

    def release(self) -> None:
        """Gives addresses and memory back; the memory goes once the work of its uses is done. A second call does
        nothing."""
        if self._finish.alive:
            check(library().vmm_elastic_release(self._handle))
            self._finish.detach()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.release()


def _quietly(name: str, handle: int) -> None:
    getattr(library(), name)(handle)


class Pool:
    """A pool of memory of some devices, by default of all.

    ``environment=True`` puts what the VMM_POOL_ variables say in place of the arguments. Blocks that are alive when
    the pool is destroyed stay valid until they are freed.

    Raises `Invalid`, `NoDriver`, `LibraryNotFound`.
    """

    def __init__(
        self,
        devices: list[int] | None = None,
        *,
        chunk_bytes: int = 0,
        limit_bytes: int = 0,
        stock_low_bytes: int = 0,
        stock_high_bytes: int = 0,
        host_bytes: int = 0,
        host_node: int = 0,
        environment: bool = False,
        exportable: bool = False,
        background: bool = True,
        guard: bool = False,
    ):
        options = PoolOptions(
            flags=environment * _USE_ENVIRONMENT
            | exportable * _EXPORTABLE
            | (not background) * _NO_BACKGROUND
            | guard * _GUARD,
            chunk_bytes=_bytes(chunk_bytes, "chunk_bytes"),
            limit_bytes=_bytes(limit_bytes, "limit_bytes"),
            stock_low_bytes=_bytes(stock_low_bytes, "stock_low_bytes"),
            stock_high_bytes=_bytes(stock_high_bytes, "stock_high_bytes"),
            host_bytes=_bytes(host_bytes, "host_bytes"),
            host_node=host_node,
        )
        if devices is not None:
            ordinals = [_device(device) for device in devices]
            if not ordinals:
                raise Invalid("devices = []: expected at least one, or None for all")
            options.devices = (ctypes.c_int32 * len(ordinals))(*ordinals)
            options.device_count = len(ordinals)
        handle = ctypes.c_void_p()
        check(library().vmm_pool_create(ctypes.byref(options), ctypes.byref(handle)))
        self._own(handle.value, devices[0] if devices else 0)

    def _own(self, handle: int, device: int) -> None:
        self._handle, self._device = handle, device
        self._finish = weakref.finalize(self, _quietly, "vmm_pool_destroy", handle)
        self._finish.atexit = False

    @classmethod
    def _default(cls, device: int) -> Pool:
        handle = ctypes.c_void_p()
        check(library().vmm_pool_default(_device(device), ctypes.byref(handle)))
        pool = cls.__new__(cls)
        pool._own(handle.value, device)
        # It lives as long as the process.
        pool._finish.detach()
        return pool

    def _on(self, device: int | None) -> int:
        return self._device if device is None else _device(device)

    def alloc(self, size: int, device: int | None = None, stream=0) -> Block:
        """``size`` bytes for work on ``stream``. The device is by default the pool's first.

        Raises `OutOfMemory` with the report of the device, `Invalid`, `Forked`.
        """
        where, handle = self._on(device), _stream(stream)
        address = ctypes.c_void_p()
        check(library().vmm_pool_alloc(self._handle, where, _bytes(size, "bytes"), handle, ctypes.byref(address)))
        return Block(address.value or 0, size, where, handle)

    def elastic(
        self,
        capacity_bytes: int = 0,
        device: int | None = None,
        *,
        chunk_bytes: int = 0,
        tag: str | None = None,
        quota_bytes: int = 0,
        movable: bool = False,
        exportable: bool = False,
        single_piece: bool = False,
    ) -> Elastic:
        """Addresses for ``capacity_bytes``, by default as many as the device has memory, with none behind them yet.

        Raises `Invalid`, `OutOfAddresses`, `NotSupported`.
        """
        options = ElasticOptions(
            device=self._on(device),
            capacity_bytes=_bytes(capacity_bytes, "capacity_bytes"),
            chunk_bytes=_bytes(chunk_bytes, "chunk_bytes"),
            tag=None if tag is None else tag.encode(),
            quota_bytes=_bytes(quota_bytes, "quota_bytes"),
            flags=movable * _MOVABLE | exportable * _ELASTIC_EXPORTABLE | single_piece * _SINGLE_PIECE,
        )
        handle = ctypes.c_void_p()
        check(library().vmm_elastic_reserve(self._handle, ctypes.byref(options), ctypes.byref(handle)))
        return Elastic(self, handle.value)

    def stats(self) -> dict:
        """All figures of the pool: docs/CONFIGURATION.md says what they mean."""
        return json.loads(_text(library().vmm_pool_stats_json, self._handle))

    def report(self, device: int | None = None) -> str:
        """How a device's memory is used, for people."""
        return _text(library().vmm_pool_report, self._handle, self._on(device))

    def trim(self, device: int | None = None) -> int:
        """Gives what is idle back to the driver, and answers how much. Waits for work that may still use it."""
        freed = ctypes.c_uint64()
        check(library().vmm_pool_trim(self._handle, self._on(device), ctypes.byref(freed)))
        return freed.value

    def sleep(self, tag: str, *, keep: bool = True, patience_us: int = 1_000_000) -> int:
        """Gives up the device memory of the elastic buffers with a tag. ``keep`` has the host hold what is in them,
        for which the pool needs ``host_bytes``. Answers how much was given up."""
        given = ctypes.c_uint64()
        contents = _Contents.KEEP if keep else _Contents.DROP
        check(library().vmm_pool_sleep(self._handle, tag.encode(), contents, patience_us, ctypes.byref(given)))
        return given.value

    def wake(self, tag: str) -> int:
        """Puts memory behind them again, and answers how much."""
        taken = ctypes.c_uint64()
        check(library().vmm_pool_wake(self._handle, tag.encode(), ctypes.byref(taken)))
        return taken.value

    def destroy(self) -> None:
        """Ends the pool. Blocks that are alive stay valid. A second call does nothing.

        Raises `Busy` while elastic buffers are alive, `Invalid` for the process's own pool.
        """
        if self._handle is not None:
            check(library().vmm_pool_destroy(self._handle))
            self._finish.detach()
            self._handle = None

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        # Not in the place of an error that is under way.
        with contextlib.suppress(*([Error] if kind else [])):
            self.destroy()


def stream_destroyed(stream, device: int = 0) -> None:
    """To be called before a stream that was used with a pool is destroyed: its handle may be given out again.

    Raises `Busy` while it is captured.
    """
    check(library().vmm_pool_stream_destroyed(_device(device), _stream(stream)))


def default(device: int = 0) -> Pool:
    """The process's own pool of a device, which PyTorch, CuPy and RMM share. It is never destroyed."""
    return Pool._default(device)


def stats(device: int = 0) -> dict:
    """The figures of a device in the process's own pool."""
    return default(device).stats()["devices"][0]


def report(device: int = 0) -> str:
    """How the memory of the process's own pool of a device is used, for people."""
    return default(device).report()


def trim(device: int = 0) -> int:
    """Gives what is idle in the process's own pool of a device back to the driver, and answers how much."""
    return default(device).trim()
