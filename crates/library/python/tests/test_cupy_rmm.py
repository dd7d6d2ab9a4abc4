"""vmm_pool.cupy and vmm_pool.rmm: on stand-ins of the two, and truly on the pool."""

import unittest

from support import TESTS, child

STAND_IN = [TESTS / "stand_in"]


class CuPy(unittest.TestCase):
    def test_without_cupy_the_error_says_so(self):
        told = child(
            """
            import sys
            sys.modules["cupy"] = None
            import vmm_pool.cupy
            for call in (vmm_pool.cupy.install, vmm_pool.cupy.c_allocator, lambda: vmm_pool.cupy.allocate(1)):
                try:
                    call()
                except vmm_pool.cupy.NoCuPy as error:
                    print(error)
            """
        )
        self.assertEqual(told.count("pip install cupy-cuda13x"), 3)

    def test_arrays_lie_in_the_pool_and_go_back(self):
        child(
            """
            import cupy, vmm_pool, vmm_pool.cupy
            vmm_pool.cupy.install()
            arrays = [cupy.Array(size) for size in (1, 511, 513, 1 << 20, (5 << 20) + 3)]
            assert len({array.data.ptr for array in arrays}) == 5
            assert all(array.data.ptr % 512 == 0 for array in arrays)
            live = vmm_pool.stats(0)["live_bytes"]
            assert live >= 1 + 511 + 513 + (6 << 20) + 3, live
            vmm_pool.cupy.record_stream(arrays[0], cupy.Stream(1))
            del arrays
            assert vmm_pool.stats(0)["live_bytes"] == 0
            cupy.cuda.runtime.device = 3
            on_3 = cupy.Array(1000)
            assert vmm_pool.stats(3)["live_bytes"] >= 1000
            assert cupy.Array(0).data.ptr == 0
            """,
            STAND_IN,
        )

    def test_out_of_memory_is_cupys_with_the_report(self):
        told = child(
            """
            import cupy, vmm_pool.cupy
            vmm_pool.cupy.install()
            for allocator in (cupy.cuda.allocator, vmm_pool.cupy.c_allocator()):
                try:
                    allocator(100 << 20)
                except cupy.cuda.memory.OutOfMemoryError as error:
                    assert isinstance(error, MemoryError) and error.report in str(error)
                    print(error)
                assert allocator(1000).ptr
            """,
            STAND_IN,
            VMM_POOL_LIMIT="64M",
        )
        self.assertEqual(told.count("Out of memory allocating 104,857,600 bytes. vmm-pool: "), 2)

    def test_streams_are_kept_until_they_are_released(self):
        told = child(
            """
            import cupy, vmm_pool, vmm_pool.cupy

            class Stream(cupy.Stream):
                def __del__(self):
                    print("destroyed")

            vmm_pool.cupy.install()
            cupy.cuda.stream = Stream(1)
            array = cupy.Array(1000)
            stream, cupy.cuda.stream = cupy.cuda.stream, cupy.Stream(0)
            print("kept")
            vmm_pool.cupy.release_stream(stream)
            del stream
            print("gone")
            del array
            assert vmm_pool.stats(0)["live_bytes"] == 0
            """,
            STAND_IN,
        )
        self.assertEqual(told.split(), ["kept", "destroyed", "gone"])

    def test_another_failure_is_no_want_of_memory(self):
        told = child(
            """
            import cupy, rmm, vmm_pool, vmm_pool.cupy, vmm_pool.rmm
            cupy.cuda.runtime.device = 99
            resource = vmm_pool.rmm.resource(99)
            stream = rmm.Stream(0)
            for call in (vmm_pool.cupy.allocate, vmm_pool.cupy.c_allocator(), lambda n: resource.allocate(n, stream)):
                try:
                    call(10)
                except vmm_pool.Invalid as error:
                    print(error)
            """,
            STAND_IN,
        )
        self.assertEqual(told.count("device 99: this machine has 8 device(s)"), 3)

    def test_the_c_functions_give_and_take(self):
        child(
            """
            import cupy, vmm_pool, vmm_pool.cupy
            cupy.cuda.set_allocator(vmm_pool.cupy.c_allocator())
            arrays = [cupy.Array(size) for size in (1, 513, 1 << 20)]
            assert len({array.data.ptr for array in arrays}) == 3
            assert cupy.Array(0).data.ptr == 0
            try:
                vmm_pool.cupy.record_stream(arrays[0])
            except vmm_pool.Invalid as error:
                assert "vmm_pool.cupy.install()" in str(error)
            else:
                raise AssertionError
            del arrays
            for _ in range(50):
                # Many times the limit: what was freed comes back.
                assert cupy.Array(8 << 20).data.ptr
            assert vmm_pool.stats(0)["live_bytes"] <= 64 << 20
            """,
            STAND_IN,
            VMM_POOL_LIMIT="64M",
        )


class Rmm(unittest.TestCase):
    def test_without_rmm_the_error_says_so(self):
        told = child(
            """
            import sys
            sys.modules["rmm"] = None
            import vmm_pool.rmm
            try:
                vmm_pool.rmm.resource()
            except vmm_pool.rmm.NoRmm as error:
                print(error)
            """
        )
        self.assertIn("pip install rmm-cu13", told)

    def test_blocks_come_and_go(self):
        told = child(
            """
            import rmm, vmm_pool, vmm_pool.rmm
            resource = vmm_pool.rmm.resource()
            stream = rmm.Stream(0)
            block = resource.allocate(1000, stream)
            assert block % 256 == 0 and resource.allocate(0, stream) == 0
            assert vmm_pool.stats(1)["live_bytes"] >= 1000
            resource.deallocate(block, 1000, stream)
            assert vmm_pool.stats(1)["live_bytes"] == 0
            other = vmm_pool.rmm.resource(2).allocate(5, stream)
            assert vmm_pool.stats(2)["live_bytes"] >= 5
            try:
                resource.allocate(100 << 20, stream)
            except MemoryError as error:
                print(error)
            """,
            STAND_IN,
            VMM_POOL_LIMIT="64M",
        )
        self.assertTrue(told.startswith("vmm-pool: "), told)


if __name__ == "__main__":
    unittest.main()
