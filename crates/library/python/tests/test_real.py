"""The real PyTorch and the real RMM on the simulated device, where they are installed. No GPU is needed."""

import importlib.util
import subprocess
import unittest

from support import COMPILER, TESTS, Place, child

HAS_TORCH = importlib.util.find_spec("torch") is not None
HAS_RMM = importlib.util.find_spec("rmm") is not None


@unittest.skipUnless(HAS_TORCH and COMPILER, "no PyTorch, or no C++ compiler")
class PyTorch(unittest.TestCase):
    def test_its_allocator_is_the_pool(self):
        place = Place(self).path
        runtime = place / "fake_runtime.so"
        subprocess.run(
            [COMPILER, "-x", "c", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", TESTS / "fake_runtime.c"]
            + ["-o", runtime],
            check=True,
        )
        told = child(
            """
            import os, torch, vmm_pool, vmm_pool.torch
            vmm_pool.torch.install()
            take, give = torch._C._cuda_cudaCachingAllocator_raw_alloc, torch._C._cuda_cudaCachingAllocator_raw_delete

            def live():
                return vmm_pool.stats(0)["live_bytes"]

            block = take(1000, 0)
            assert block % 512 == 0 and live() >= 1000
            give(block)
            assert live() == 0 and take(0, 0) == 0

            for length in (100 << 20, 1 << 50):
                try:
                    take(length, 0)
                except torch.OutOfMemoryError as error:
                    print(error)
            give(take(1000, 0))

            # A memory pool of a thread's, in which nothing is captured.
            torch._C._cuda_beginAllocateCurrentThreadToPool(0, (0, 77))
            block = take(1000, 0)
            torch._C._cuda_endAllocateToPool(0, (0, 77))
            torch._C._cuda_releasePool(0, (0, 77))
            give(block)
            assert live() == 0

            child = os.fork()
            if child == 0:
                code = 1
                try:
                    take(1000, 0)
                except torch.OutOfMemoryError:
                    pass
                except RuntimeError as error:
                    code = 0 if "forked" in str(error) else 1
                os._exit(code)
            assert os.waitpid(child, 0)[1] == 0
            """,
            LD_PRELOAD=str(runtime),
            VMM_POOL_LIMIT="64M",
            VMM_POOL_SHIM_CACHE=str(place),
        )
        self.assertIn("CUDA out of memory. Tried to allocate 104857600 bytes on GPU 0. vmm-pool: out of memory on", told)
        self.assertIn("too large", told)


@unittest.skipUnless(HAS_RMM, "no RMM")
class Rmm(unittest.TestCase):
    def test_its_resource_is_the_pool(self):
        told = child(
            """
            import rmm, vmm_pool, vmm_pool.rmm
            from rmm.pylibrmm.stream import DEFAULT_STREAM, PER_THREAD_DEFAULT_STREAM
            resource = vmm_pool.rmm.resource(0)
            for stream in (DEFAULT_STREAM, PER_THREAD_DEFAULT_STREAM):
                blocks = [(resource.allocate(size, stream), size) for size in (1, 1000, 5 << 20)]
                assert vmm_pool.stats(0)["live_bytes"] >= 1001 + (5 << 20)
                for block, size in blocks:
                    resource.deallocate(block, size, stream)
                assert vmm_pool.stats(0)["live_bytes"] == 0
            try:
                resource.allocate(100 << 20, DEFAULT_STREAM)
            except MemoryError as error:
                print(error)
            """,
            VMM_POOL_LIMIT="64M",
        )
        self.assertIn("vmm-pool: out of memory on device 0", told)


if __name__ == "__main__":
    unittest.main()
