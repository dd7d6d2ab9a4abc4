"""Buffers of another process: tests/python.rs offers some at the address in VMM_POOL_TEST_OFFERS."""

import ctypes
import gc
import os
import threading
import unittest
import weakref

from support import child

import vmm_pool
from vmm_pool import _dlpack

OFFERS = os.environ.get("VMM_POOL_TEST_OFFERS")
MIB = 1 << 20
api = ctypes.pythonapi
api.PyCapsule_GetName.argtypes, api.PyCapsule_GetName.restype = [ctypes.py_object], ctypes.c_char_p
api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
api.PyCapsule_GetPointer.restype = ctypes.c_void_p
api.PyCapsule_SetName.argtypes = [ctypes.py_object, ctypes.c_char_p]
USED = {b"dltensor": b"used_dltensor", b"dltensor_versioned": b"used_dltensor_versioned"}


def consume(capsule):
    """What a consumer does: takes the tensor, and renames the capsule. The struct and its deleter."""
    name = api.PyCapsule_GetName(capsule)
    kind = _dlpack.Managed if name == b"dltensor" else _dlpack.ManagedVersioned
    address = api.PyCapsule_GetPointer(capsule, name)
    api.PyCapsule_SetName(capsule, USED[name])
    managed = kind.from_address(address)
    return managed, lambda: ctypes.CFUNCTYPE(None, ctypes.c_void_p)(managed.deleter)(address)


@unittest.skipUnless(OFFERS, "no other process offers anything: VMM_POOL_TEST_OFFERS")
class Imports(unittest.TestCase):
    def setUp(self):
        gc.collect()
        self.assertEqual(_dlpack.alive(), 0)

    def open(self, name="tensor", **more):
        return vmm_pool.Import(OFFERS, name, **more)

    def test_what_is_known_of_it(self):
        with self.open(write=True, dtype="int32", shape=(4, 256)) as imported:
            self.assertEqual((imported.bytes, imported.device, imported.shape), (4 * MIB, 0, (4, 256)))
            self.assertTrue(imported.writable and imported.address)
            self.assertEqual(imported.check(), vmm_pool.ImportState.CURRENT)
            imported.refresh()
            self.assertEqual(imported.__dlpack_device__(), (2, 0))
            expected = {
                "shape": (4, 256),
                "typestr": "<i4",
                "data": (imported.address, False),
                "version": 3,
                "strides": None,
                "stream": None,
            }
            self.assertEqual(imported.__cuda_array_interface__, expected)
        imported.close()
        with self.assertRaisesRegex(vmm_pool.Invalid, "closed"):
            imported.check()

    def test_fields_of_a_plain_capsule(self):
        imported = self.open(write=True, dtype="float16", shape=(2, 3, 5))
        capsule = imported.__dlpack__(stream=1)
        self.assertEqual(api.PyCapsule_GetName(capsule), b"dltensor")
        managed, delete = consume(capsule)
        tensor = managed.tensor
        self.assertEqual((tensor.data, tensor.byte_offset), (imported.address, 0))
        self.assertEqual((tensor.device.kind, tensor.device.index, tensor.ndim), (2, 0, 3))
        self.assertEqual((tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes), (2, 16, 1))
        self.assertEqual(tensor.shape[:3], [2, 3, 5])
        self.assertFalse(tensor.strides)
        delete()
        self.assertEqual(_dlpack.alive(), 0)

    def test_read_only_memory_says_so(self):
        imported = self.open("frozen", dtype="bfloat16")
        self.assertEqual(imported.shape, (MIB,))
        with self.assertRaisesRegex(BufferError, "read-only"):
            imported.__dlpack__()
        managed, delete = consume(imported.__dlpack__(max_version=(1, 1)))
        self.assertEqual((managed.major, managed.minor, managed.flags), (1, 0, 1))
        self.assertEqual(managed.tensor.shape[0], MIB)
        delete()
        with self.assertRaisesRegex(AttributeError, "bfloat16"):
            _ = imported.__cuda_array_interface__
        with self.assertRaisesRegex(vmm_pool.OwnerFailed, "may only be read"):
            self.open("frozen", write=True)
        hidden = self.open("frozen", hide_read_only=True)
        self.assertEqual(hidden.__cuda_array_interface__["data"][1], False)
        managed, delete = consume(hidden.__dlpack__(max_version=(1, 0), dl_device=(2, 0), copy=False))
        self.assertEqual(managed.flags, 0)
        delete()
        consume(hidden.__dlpack__())[1]()

    def test_a_tensor_keeps_the_import_alive(self):
        imported = self.open(write=True)
        known, managed_delete = weakref.ref(imported), consume(imported.__dlpack__())[1]
        with self.assertRaisesRegex(vmm_pool.Busy, "tensors"):
            imported.close()
        del imported
        gc.collect()
        self.assertIsNotNone(known())
        # In another thread, as consumers do.
        thread = threading.Thread(target=managed_delete)
        thread.start()
        thread.join()
        gc.collect()
        self.assertIsNone(known())
        self.assertEqual(_dlpack.alive(), 0)

    def test_a_capsule_that_nobody_takes_frees_what_it_has(self):
        for max_version in (None, (1, 0)):
            imported = self.open(write=True)
            known = weakref.ref(imported)
            capsule = imported.__dlpack__(max_version=max_version)
            del imported
            gc.collect()
            self.assertIsNotNone(known())
            del capsule
            gc.collect()
            self.assertIsNone(known())
        self.assertEqual(_dlpack.alive(), 0)

    def test_a_capsule_that_was_taken_frees_nothing(self):
        imported = self.open(write=True)
        capsule = imported.__dlpack__()
        _, delete = consume(capsule)
        del capsule
        gc.collect()
        self.assertEqual(_dlpack.alive(), 1)
        delete()
        self.assertEqual(_dlpack.alive(), 0)

    def test_wrong_arguments_are_said(self):
        for more, words in (
            ({"dtype": "complex"}, "expected one of"),
            ({"shape": (-1,)}, "whole numbers"),
            ({"shape": (4 * MIB + 1,)}, "at most the buffer's"),
            ({"dtype": "int64", "shape": (MIB, 2)}, "at most the buffer's"),
        ):
            with self.assertRaisesRegex(vmm_pool.Invalid, words):
                self.open(**more)
        with self.assertRaisesRegex(vmm_pool.OwnerFailed, "is not offered"):
            self.open("nothing")
        with self.assertRaisesRegex(vmm_pool.Invalid, "1 to 255 bytes"):
            self.open("")
        with self.assertRaises(vmm_pool.OwnerFailed):
            vmm_pool.Import("/nonexistent/socket", "tensor")
        with self.assertRaisesRegex(vmm_pool.Invalid, "a path, or @"):
            vmm_pool.Import("", "tensor")
        imported = self.open(write=True)
        with self.assertRaisesRegex(BufferError, "dl_device"):
            imported.__dlpack__(dl_device=(1, 0))
        with self.assertRaisesRegex(BufferError, "copy"):
            imported.__dlpack__(copy=True)
        self.assertEqual(_dlpack.alive(), 0)

    def test_a_tensor_may_be_alive_at_exit(self):
        told = child(
            f"""
            import vmm_pool
            imported = vmm_pool.Import({OFFERS!r}, "tensor", write=True)
            capsule = imported.__dlpack__()
            print("alive")
            """
        )
        self.assertEqual(told, "alive")


if __name__ == "__main__":
    unittest.main()
