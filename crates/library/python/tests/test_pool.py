"""Pools, blocks and elastic buffers on the simulated device."""

import gc
import os
import random
import threading
import unittest

from support import child

import vmm_pool

MIB = 1 << 20


class Blocks(unittest.TestCase):
    def setUp(self):
        self.pool = vmm_pool.Pool([0, 1], limit_bytes=64 * MIB, background=False)
        self.addCleanup(self.pool.destroy)

    def live(self, device=0):
        return self.pool.stats()["devices"][device]["live_bytes"]

    def test_blocks_come_and_go(self):
        blocks = [self.pool.alloc(size) for size in (1, 511, 513, 5 * MIB + 3)]
        self.assertEqual([block.bytes for block in blocks], [1, 511, 513, 5 * MIB + 3])
        self.assertEqual(len({block.address for block in blocks}), 4)
        self.assertGreaterEqual(self.live(), 5 * MIB + 1028)
        blocks[0].free()
        blocks[0].free()
        with blocks[1]:
            pass
        del blocks[:]
        gc.collect()
        self.assertEqual(self.live(), 0)
        self.assertIn("0", self.pool.report(0))
        self.assertGreater(self.pool.trim(), 0)
        self.assertEqual(self.pool.trim(), 0)

    def test_devices_are_apart(self):
        block = self.pool.alloc(1000, device=1)
        self.assertEqual((self.live(0), self.live(1) >= 1000), (0, True))
        block.free()

    def test_no_bytes(self):
        block = self.pool.alloc(0)
        self.assertEqual(block.address, 0)
        block.free()

    def test_out_of_memory_has_the_report_and_loses_nothing(self):
        kept = self.pool.alloc(MIB)
        with self.assertRaises(vmm_pool.OutOfMemory) as caught:
            self.pool.alloc(100 * MIB)
        self.assertIsInstance(caught.exception, MemoryError)
        self.assertRegex(str(caught.exception), r"\d{6,}")
        self.pool.alloc(2 * MIB).free()
        kept.free()
        self.assertEqual(self.live(), 0)

    def test_wrong_arguments_are_said_before_anything_is_done(self):
        alloc = self.pool.alloc
        for call, words in (
            (lambda: alloc(-1), "whole number of bytes"),
            (lambda: alloc(1 << 64), "whole number of bytes"),
            (lambda: alloc(1.5), "whole number of bytes"),
            (lambda: alloc(True), "whole number of bytes"),
            (lambda: alloc(1, device=-1), "expected an ordinal"),
            (lambda: alloc(1, stream="s"), "expected a handle"),
            (lambda: vmm_pool.Pool([]), "at least one"),
            (lambda: vmm_pool.Pool(chunk_bytes=3), "chunk"),
            (lambda: vmm_pool.Pool([99]), "99"),
            (lambda: alloc(1, device=5), "5"),
            (lambda: self.pool.report(7), "7"),
        ):
            with self.assertRaises(vmm_pool.Error) as caught:
                call()
            self.assertIn(words, str(caught.exception))
        self.assertEqual(self.live(), 0)

    def test_a_block_that_is_none_is_said(self):
        library = vmm_pool.library()
        for address, size in ((0x1000, 5), (self.pool.alloc(10).address + 8, 10)):
            with self.assertRaises(vmm_pool.Error):
                vmm_pool.check(library.vmm_pool_free(address, size, 0))

    def test_blocks_outlive_their_pool(self):
        pool = vmm_pool.Pool([0], background=False)
        block = pool.alloc(1000)
        pool.destroy()
        pool.destroy()
        with self.assertRaises(vmm_pool.Error):
            pool.alloc(1)
        block.free()

    def test_streams_are_taken_from_whoever_has_one(self):
        class Protocol:
            def __cuda_stream__(self):
                return (0, 1)

        class Torch:
            cuda_stream = 1

        class CuPy:
            ptr = 1

        for stream in (0, 1, Protocol(), Torch(), CuPy()):
            block = self.pool.alloc(100, stream=stream)
            block.record_stream(stream)
            block.free(stream)
        self.assertEqual(self.live(), 0)
        vmm_pool.stream_destroyed(0)

    def test_threads(self):
        failures = []

        def work(seed):
            try:
                source, held = random.Random(seed), []
                for _ in range(300):
                    held.append(self.pool.alloc(source.randrange(1, 100_000)))
                    if len(held) > 10:
                        held.pop(source.randrange(len(held))).free()
                for block in held:
                    block.free()
            except Exception as error:  # noqa: BLE001: said by the main thread
                failures.append(error)

        running = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        self.assertEqual(failures, [])
        self.assertEqual(self.live(), 0)


class Elastic(unittest.TestCase):
    def setUp(self):
        self.pool = vmm_pool.Pool([0, 1], host_bytes=64 * MIB, background=False)
        self.addCleanup(self.pool.destroy)

    def test_it_grows_moves_sleeps_and_shrinks_at_one_address(self):
        with self.pool.elastic(64 * MIB, tag="cache", chunk_bytes=2 * MIB, movable=True) as buffer:
            address = buffer.address
            self.assertGreaterEqual(buffer.grow_to(10 * MIB), 10 * MIB)
            committed = buffer.committed_bytes
            with buffer.use_on(0) as used:
                self.assertEqual((used, buffer.info()["open_uses"]), (address, 1))
            buffer.grant(1)
            buffer.revoke(1)
            buffer.to_device(1)
            self.assertEqual(buffer.info()["device_bytes"], committed)
            buffer.to_host()
            self.assertEqual(buffer.info()["host_bytes"], committed)
            buffer.to_device(0)
            self.assertEqual(self.pool.sleep("cache"), committed)
            self.assertEqual(buffer.info()["asleep"], 1)
            self.assertEqual(self.pool.wake("cache"), committed)
            self.assertEqual((buffer.info()["asleep"], buffer.address), (0, address))
            self.assertGreater(buffer.shrink_to(4 * MIB), 0)
            self.assertLess(buffer.committed_bytes, committed)
            (figures,) = self.pool.stats()["elastic"]
            self.assertEqual((figures["tag"], figures["committed_bytes"]), ("cache", buffer.committed_bytes))
        self.assertEqual(self.pool.stats()["elastic"], [])

    def test_a_pool_with_elastic_buffers_does_not_end(self):
        pool = vmm_pool.Pool([0], background=False)
        buffer = pool.elastic(4 * MIB)
        with self.assertRaises(vmm_pool.Busy):
            pool.destroy()
        buffer.release()
        buffer.release()
        with self.assertRaises(vmm_pool.Invalid):
            buffer.grow_to(MIB)
        pool.destroy()

    def test_more_than_its_capacity_is_said(self):
        with self.pool.elastic(4 * MIB) as buffer:
            with self.assertRaises(vmm_pool.Error) as caught:
                buffer.grow_to(100 * MIB)
            self.assertRegex(str(caught.exception), r"\d{6,}")
            self.assertEqual(buffer.committed_bytes, 0)


class Process(unittest.TestCase):
    def test_the_process_has_one_pool_a_device(self):
        told = child(
            """
            import vmm_pool
            pool = vmm_pool.default(2)
            block = pool.alloc(1000)
            assert vmm_pool.stats(2)["live_bytes"] >= 1000 and vmm_pool.stats(1)["live_bytes"] == 0
            assert vmm_pool.stats(2)["device"] == 2
            block.free()
            assert vmm_pool.trim(2) > 0
            assert "device" in vmm_pool.report(2).lower()
            try:
                pool.destroy()
            except vmm_pool.Invalid as error:
                print(error)
            vmm_pool.default(2).alloc(5)
            """
        )
        self.assertIn("not destroyed", told)

    def test_a_forked_child_is_refused_and_hurts_nothing(self):
        pool = vmm_pool.Pool([0], background=False)
        block = pool.alloc(1000)
        reader, writer = os.pipe()
        child_id = os.fork()
        if child_id == 0:
            code = 1
            try:
                for call in (lambda: pool.alloc(5), pool.stats, pool.trim, vmm_pool.stats):
                    try:
                        call()
                    except vmm_pool.Forked as error:
                        os.write(writer, str(error).encode()[:100] + b"\n")
                del block
                gc.collect()
                code = 0
            finally:
                os._exit(code)
        os.close(writer)
        with os.fdopen(reader) as told:
            lines = told.read().splitlines()
        self.assertEqual(os.waitpid(child_id, 0)[1], 0)
        self.assertEqual(len(lines), 4, lines)
        self.assertGreaterEqual(pool.stats()["devices"][0]["live_bytes"], 1000)
        block.free()
        pool.destroy()

    def test_exit_with_everything_alive_is_quiet(self):
        told = child(
            """
            import vmm_pool
            pool = vmm_pool.Pool()
            blocks = [pool.alloc(1000) for _ in range(10)]
            buffer = pool.elastic(8 << 20)
            buffer.grow_to(4 << 20)
            use = buffer.use_on(0)
            use.__enter__()
            kept = vmm_pool.default().alloc(5)
            """
        )
        self.assertEqual(told, "")

    def test_no_driver_is_said(self):
        told = child(
            """
            import vmm_pool
            try:
                vmm_pool.Pool()
            except vmm_pool.NoDriver as error:
                print(error)
            """,
            VMM_POOL_DRIVER="nonsense",
        )
        self.assertIn("expected auto, cuda or sim", told)


if __name__ == "__main__":
    unittest.main()
