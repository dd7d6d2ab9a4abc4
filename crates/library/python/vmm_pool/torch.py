"""The pool under PyTorch.

    import vmm_pool.torch
    vmm_pool.torch.install()          # the whole process, before CUDA is used

or, beside PyTorch's own allocator:

    with vmm_pool.torch.use():        # the same as torch.cuda.use_mem_pool(vmm_pool.torch.mem_pool())
        ...

`install` hands every tensor to the pool. What PyTorch then cannot do (``memory_stats``, ``memory_snapshot``,
CUDA IPC, ...) is in docs/integrations/pytorch.md. In a memory pool PyTorch's caching allocator stays, with all
it can do, and takes its segments from the pool.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import warnings

import vmm_pool

__all__ = [
    "AlreadyInitialized",
    "NoCompiler",
    "NoTorch",
    "ShimFailed",
    "allocator",
    "install",
    "installed",
    "mem_pool",
    "use",
]

_SOURCE = pathlib.Path(__file__).with_name("shim.cpp")
_PARTS = [_SOURCE, _SOURCE.with_name("shim_driver.hpp")]
_LOCK = threading.Lock()
_ALLOCATORS: dict[tuple[bool, bool], object] = {}
_SHIM: ctypes.CDLL | None = None
_INSTALLED = None
_MEM_POOLS: dict[int, object] = {}


class NoTorch(vmm_pool.Error, ImportError):
    """PyTorch is not installed, or has no CUDA."""


class AlreadyInitialized(vmm_pool.Error):
    """CUDA was used before: PyTorch's allocator cannot be changed any more."""


class NoCompiler(vmm_pool.Error):
    """No C++ compiler was found to build the part of the pool that PyTorch needs."""


class ShimFailed(vmm_pool.Error):
    """The compiler did not build the part of the pool that PyTorch needs."""


def _torch():
    try:
        import torch
    except ImportError as error:
        raise NoTorch(f"PyTorch could not be imported: {error}; expected `pip install torch`") from error
    if not hasattr(torch._C, "_cuda_customAllocator"):
        raise NoTorch(
            f"PyTorch {torch.__version__} was built without CUDA: expected a CUDA build of 2.1 or newer"
        )
    return torch


# The shim.


class _Functions(ctypes.Structure):
    """The order of `Functions` in shim.cpp."""

    _fields_ = [("struct_bytes", ctypes.c_uint64)] + [
        (name, ctypes.c_void_p)
        for name in (
            "alloc",
            "free",
            "capture_begin",
            "capture_join",
            "capture_end",
            "graph_destroyed",
            "memory_fraction",
            "empty_cache",
            "last_error",
            "last_status",
        )
    ] + [("out_of_memory", ctypes.c_int64)]


def _address(function) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value


def _bind(path: pathlib.Path) -> ctypes.CDLL:
    library = vmm_pool.library()
    shim = ctypes.CDLL(str(path))
    names = {
        "alloc": "vmm_pool_torch_alloc",
        "free": "vmm_pool_torch_free",
        "capture_begin": "vmm_pool_torch_capture_begin",
        "capture_join": "vmm_pool_torch_capture_join",
        "capture_end": "vmm_pool_torch_capture_end",
        "graph_destroyed": "vmm_pool_torch_graph_destroyed",
        "memory_fraction": "vmm_pool_torch_memory_fraction",
        "empty_cache": "vmm_pool_torch_empty_cache",
        "last_error": "vmm_pool_last_error",
        "last_status": "vmm_pool_last_status",
    }
    functions = _Functions(
        struct_bytes=ctypes.sizeof(_Functions),
        out_of_memory=int(vmm_pool.Status.OUT_OF_MEMORY),
        **{field: _address(getattr(library, name)) for field, name in names.items()},
    )
    shim.vmm_pool_shim_bind.restype = ctypes.c_int
    if shim.vmm_pool_shim_bind(ctypes.byref(functions)) != 0:
        raise ShimFailed(f"{path} was built from another shim.cpp than this torch.py knows; delete it")
    return shim


def _compiler() -> list[str]:
    """CXX, as everywhere else; or what is usually there."""
    if named := os.environ.get("CXX"):
        command = shlex.split(named)
        if shutil.which(command[0]):
            return command
        raise NoCompiler(f"CXX = {named}: no such program; expected a C++17 compiler")
    for name in ("c++", "g++", "clang++"):
        if found := shutil.which(name):
            return [found]
    raise NoCompiler(
        "no C++ compiler was found (c++, g++, clang++, or the one that CXX names). One is needed once, since "
        "without it PyTorch would take a failed allocation for an address. Install one (Debian, Ubuntu: "
        "`apt-get install g++`), or go on at your own risk with install(shim=False)"
    )


def _cache() -> pathlib.Path:
    if named := os.environ.get("VMM_POOL_SHIM_CACHE"):
        return pathlib.Path(named)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return pathlib.Path(base) / "vmm-pool"


def _shim_path(torch) -> pathlib.Path:
    """Where the shim for this PyTorch lies; built now if it does not."""
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    root = pathlib.Path(torch.__file__).parent
    source = b"".join(part.read_bytes() for part in _PARTS)
    # Not only the version: a PyTorch of the same version may be built otherwise, elsewhere.
    about = [torch.__version__, str(torch.version.git_version), str(abi), str(root), sys.platform, os.uname().machine]
    key = hashlib.sha256(source + "\0".join(about).encode()).hexdigest()[:16]
    version = "".join(c if c.isalnum() or c in ".+-" else "_" for c in torch.__version__)
    place = _cache() / f"shim-{version}-abi{abi}-{key}.so"
    if not place.exists():
        _build(place, root, abi)
    return place


def _build(place: pathlib.Path, root: pathlib.Path, abi: int) -> None:
    compiler = _compiler()
    try:
        place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, name = tempfile.mkstemp(prefix=place.name + ".", suffix=".tmp", dir=place.parent)
    except OSError as error:
        raise ShimFailed(
            f"{place.parent} cannot be written: {error}; expected a directory, which VMM_POOL_SHIM_CACHE can name"
        ) from error
    os.close(handle)
    command = [
        *compiler,
        *("-std=c++17", "-O2", "-fPIC", "-shared", f"-D_GLIBCXX_USE_CXX11_ABI={abi}"),
        *("-isystem", str(root / "include")),
        *(str(_SOURCE), "-o", name),
        # The C++ runtime is PyTorch's, by way of libc10: where the compiler links one of its own, statically,
        # exceptions and streams of the two do not go together.
        *("-nodefaultlibs", "-Wl,--no-as-needed", f"-L{root / 'lib'}", "-lc10", f"-Wl,-rpath,{root / 'lib'}"),
        *("-lgcc_s", "-lc", "-ldl"),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        if done.returncode != 0:
            raise ShimFailed(
                f"`{shlex.join(command)}` failed with {done.returncode}:\n{done.stderr[-4000:]}"
            )
        # Whole, or not there at all: several processes may build it at the same time.
        os.replace(name, place)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)


def _with_shim(torch, segments: bool):
    global _SHIM
    path = _shim_path(torch)
    if _SHIM is None:
        _SHIM = _bind(path)
    kind = "_segment" if segments else ""
    names = f"vmm_pool_shim_alloc{kind}", f"vmm_pool_shim_free{kind}"
    made = torch.cuda.memory.CUDAPluggableAllocator(str(path), *names)
    hooks = made.allocator()
    hooks.set_memory_fraction_fn(_address(_SHIM.vmm_pool_shim_memory_fraction))
    if not segments:
        hooks.set_begin_allocate_to_pool(_address(_SHIM.vmm_pool_shim_begin))
        hooks.set_end_allocate_to_pool_fn(_address(_SHIM.vmm_pool_shim_end))
        hooks.set_release_pool(_address(_SHIM.vmm_pool_shim_release))
    return made


def _without_shim(torch):
    path = vmm_pool.library_path()
    made = torch.cuda.memory.CUDAPluggableAllocator(str(path), "vmm_pool_torch_alloc", "vmm_pool_torch_free")
    made.allocator().set_memory_fraction_fn(_address(vmm_pool.library().vmm_pool_torch_memory_fraction))
    return made


# What is for users.


def _index(torch, device) -> int:
    index = device if device is None or isinstance(device, int) else torch.device(device).index
    return torch.cuda.current_device() if index is None else index


def allocator(*, shim: bool = True, segments: bool = False):
    """The pool as a ``torch.cuda.memory.CUDAPluggableAllocator``, the same each time. ``segments`` makes the one for
    memory pools, whose frees wait for the device and give memory back to the driver, as PyTorch's caching allocator
    takes for granted.

    Raises `NoTorch`, `NoCompiler`, `ShimFailed`, `vmm_pool.LibraryNotFound`.
    """
    torch = _torch()
    with _LOCK:
        if (shim, segments) not in _ALLOCATORS:
            made = _with_shim(torch, segments) if shim else _without_shim(torch)
            library, hooks = vmm_pool.library(), made.allocator()
            hooks.set_init_fn(_address(library.vmm_pool_torch_init))
            hooks.set_reset_fn(_address(library.vmm_pool_torch_reset))
            hooks.set_base_alloc_fn(_address(library.vmm_pool_torch_base_alloc))
            hooks.set_record_stream_fn(_address(library.vmm_pool_torch_record_stream))
            _ALLOCATORS[shim, segments] = made
        return _ALLOCATORS[shim, segments]


def install(*, shim: bool = True):
    """Has all CUDA tensors of this process lie in the pool. To be called before CUDA is used; a second call
    changes nothing.

    ``shim=False`` goes on without a C++ compiler, at your own risk: a failed allocation is then an address of
    0, which work on the GPU runs into, and what CUDA graphs use is not kept for them.

    Raises `AlreadyInitialized`, and what `allocator` raises.
    """
    global _INSTALLED
    torch = _torch()
    if _INSTALLED is not None:
        return _INSTALLED
    if torch.cuda.is_initialized():
        raise AlreadyInitialized(
            "CUDA was used in this process before: expected vmm_pool.torch.install() before the first tensor "
            "on the GPU, best right behind `import torch`. Later, vmm_pool.torch.use() still works"
        )
    if not shim:
        warnings.warn(
            "vmm_pool.torch.install(shim=False): out of memory is an illegal address here, and CUDA graphs must "
            "not be captured",
            RuntimeWarning,
            stacklevel=2,
        )
    made = allocator(shim=shim)
    try:
        torch.cuda.memory.change_current_allocator(made)
    except RuntimeError as error:
        raise AlreadyInitialized(f"PyTorch refused another allocator: {error}") from error
    _INSTALLED = made
    return made


def installed() -> bool:
    """Whether `install` has been called."""
    return _INSTALLED is not None


def mem_pool(device=None, *, shim: bool = True):
    """A new ``torch.cuda.MemPool`` whose segments come from the pool.

    ``shim=False`` needs no compiler: then PyTorch's error tells that memory is short, without the pool's report, and
    a graph in the memory pool must not run any more when it is deleted.

    Raises `vmm_pool.NotSupported` if the process has `install`-ed the pool, or this PyTorch is older than 2.5;
    and what `allocator` raises.
    """
    torch = _torch()
    if _INSTALLED is not None:
        raise vmm_pool.NotSupported(
            "all memory of this process comes from the pool already: PyTorch has its own memory pools only "
            "under its own allocator, so expected either install() or mem_pool()"
        )
    if not hasattr(torch.cuda, "MemPool"):
        raise vmm_pool.NotSupported(f"PyTorch {torch.__version__} has no torch.cuda.MemPool: expected 2.5 or newer")
    made = allocator(shim=shim, segments=True)
    with torch.cuda.device(_index(torch, device)):
        return torch.cuda.MemPool(made.allocator())


@contextlib.contextmanager
def use(device=None, *, shim: bool = True):
    """What this thread allocates inside lies in the pool. One memory pool a device, kept as long as the process.

    Raises what `mem_pool` raises.
    """
    torch = _torch()
    index = _index(torch, device)
    with _LOCK:
        known = _MEM_POOLS.get(index)
    if known is None:
        fresh = mem_pool(index, shim=shim)
        with _LOCK:
            known = _MEM_POOLS.setdefault(index, fresh)
    with torch.cuda.use_mem_pool(known, device=index):
        yield known
