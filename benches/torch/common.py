"""What the scripts here share: how a form of allocator is set up, and how a result is said.

Each script runs in a process of its own, prints JSON lines, and exits with 1 if a check failed.
"""

import contextlib
import json
import os
import pathlib
import sys
import threading
import time

MODES = ("native", "expandable", "pluggable", "mempool")
ROOT = pathlib.Path(__file__).resolve().parents[2]
MODULE = ROOT / "crates" / "library" / "python"
BUILT = ROOT / "target" / "release" / "libvmm_pool.so"

_failed: list[str] = []


def mode_of(allowed=MODES) -> str:
    if len(sys.argv) < 2 or sys.argv[1] not in allowed:
        sys.exit(f"usage: {sys.argv[0]} {'|'.join(allowed)}")
    return sys.argv[1]


def set_up(mode: str):
    """PyTorch with the form of allocator, and a context that the work is done in."""
    # Asked for by cuBLAS before its first use, so that its results are the same each time.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if mode == "expandable":
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    import torch

    if mode in ("native", "expandable"):
        return torch, contextlib.nullcontext()
    find_module()
    import vmm_pool.torch

    if mode == "pluggable":
        vmm_pool.torch.install()
        return torch, contextlib.nullcontext()

    @contextlib.contextmanager
    def inside():
        # A memory pool is one thread's: without this, the backward pass would allocate elsewhere.
        with vmm_pool.torch.use() as pool, torch.autograd.set_multithreading_enabled(False):
            yield pool

    return torch, inside()


def find_module() -> None:
    """An installed module is preferred over the one of this checkout, and so is a library that was named."""
    sys.path.append(str(MODULE))
    if BUILT.exists():
        os.environ.setdefault("VMM_POOL_LIBRARY", str(BUILT))


def say(**facts) -> None:
    print(json.dumps(facts), flush=True)


def check(name: str, good, **facts) -> bool:
    say(check=name, ok=bool(good), **facts)
    if not good:
        _failed.append(name)
    return bool(good)


def finish() -> None:
    say(failed=_failed, ok=not _failed)
    sys.exit(1 if _failed else 0)


class Watch:
    """The least memory that the GPU had free, looked at each millisecond."""

    def __init__(self, torch):
        self._torch = torch
        self.start = self.least = self.free()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def free(self) -> int:
        return self._torch.cuda.mem_get_info()[0]

    def look(self) -> None:
        self.least = min(self.least, self.free())

    def _look(self) -> None:
        while not self._done.is_set():
            self.look()
            time.sleep(0.001)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._done.set()
        self._thread.join()

    @property
    def peak(self) -> int:
        return self.start - self.least


def quantile(values, part: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]
