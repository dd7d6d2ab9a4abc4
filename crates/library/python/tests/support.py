"""What the tests share. They run on the simulated device: ``VMM_POOL_DRIVER=sim``, the library by
``VMM_POOL_LIBRARY``. See crates/library/tests/python.rs."""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import textwrap

TESTS = pathlib.Path(__file__).resolve().parent
MODULE = TESTS.parent
INCLUDES = MODULE.parent.parent

os.environ.setdefault("VMM_POOL_DRIVER", "sim")
os.environ.setdefault("VMM_POOL_BACKGROUND", "0")
if str(MODULE) not in sys.path:
    sys.path.insert(0, str(MODULE))

COMPILER = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")


def child(code, path=(), **environment):
    """Runs Python in a fresh process: what it printed. The test fails if it does."""
    done = run(code, path, **environment)
    assert done.returncode == 0, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout.strip()


def run(code, path=(), **environment):
    variables = {key: value for key, value in (os.environ | environment).items() if value is not None}
    variables["PYTHONPATH"] = os.pathsep.join([*map(str, path), str(MODULE), str(TESTS)])
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


class Place:
    """A directory that is gone at the end."""

    def __init__(self, test):
        self.path = pathlib.Path(tempfile.mkdtemp(prefix="vmm-pool-test-"))
        # A class has its own way to say it.
        later = test.addClassCleanup if isinstance(test, type) else test.addCleanup
        later(shutil.rmtree, self.path)


def fake_torch(place):
    """A directory with a package `torch` in it: what vmm_pool.torch uses of PyTorch, every call of it written to
    `torch.calls`. It has headers and a libc10.so, so that the shim is really built."""
    package = place / "torch"
    (package / "lib").mkdir(parents=True)
    (package / "include").symlink_to(TESTS / "stand_in")
    # As PyTorch's, it brings the C++ runtime along, which the shim does not link by itself.
    runtime = ["-Wl,--no-as-needed", "-lstdc++"]
    command = [COMPILER, "-shared", "-fPIC", "-x", "c++", "/dev/null", *runtime]
    subprocess.run([*command, "-o", package / "lib" / "libc10.so"], check=True)
    (package / "__init__.py").write_text((TESTS / "stand_in" / "torch.py").read_text())
    return place
