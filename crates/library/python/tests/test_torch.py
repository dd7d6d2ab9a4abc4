"""vmm_pool.torch: the order of its calls, on a stand-in of PyTorch; the building of the shim, truly."""

import json
import subprocess
import sys
import unittest

from support import COMPILER, Place, child, fake_torch, run

HOOKS = [
    "set_memory_fraction_fn",
    "set_begin_allocate_to_pool",
    "set_end_allocate_to_pool_fn",
    "set_release_pool",
    "set_init_fn",
    "set_reset_fn",
    "set_base_alloc_fn",
    "set_record_stream_fn",
]


class Missing(unittest.TestCase):
    def test_without_pytorch_the_error_says_so(self):
        told = child(
            """
            import sys
            sys.modules["torch"] = None
            import vmm_pool.torch
            try:
                vmm_pool.torch.install()
            except vmm_pool.torch.NoTorch as error:
                assert isinstance(error, ImportError)
                print(error)
            """
        )
        self.assertIn("pip install torch", told)

    def test_without_cuda_the_error_says_so(self):
        told = child(
            """
            import sys, types
            sys.modules["torch"] = types.SimpleNamespace(__version__="2.11.0+cpu", _C=types.SimpleNamespace())
            import vmm_pool.torch
            try:
                vmm_pool.torch.mem_pool()
            except vmm_pool.torch.NoTorch as error:
                print(error)
            """
        )
        self.assertIn("2.11.0+cpu was built without CUDA", told)


@unittest.skipUnless(COMPILER, "no C++ compiler")
class Install(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        # Its shim is built once, for all tests that are not about that.
        cls.shared = Place(cls).path
        fake_torch(cls.shared / "packages")

    def setUp(self):
        self.place = self.shared
        self.look()

    def fresh(self):
        self.place = Place(self).path
        fake_torch(self.place / "packages")
        self.look()

    def look(self):
        self.cache, self.torch = self.place / "cache", self.place / "packages"

    def child(self, code, **environment):
        return child(code, [self.torch], VMM_POOL_SHIM_CACHE=str(self.cache), **environment)

    def built(self):
        return sorted(path.name for path in self.cache.iterdir())

    def test_the_allocator_is_complete_before_it_is_changed(self):
        told = self.child(
            """
            import json, torch, vmm_pool.torch
            assert not vmm_pool.torch.installed()
            first = vmm_pool.torch.install()
            assert vmm_pool.torch.install() is first and vmm_pool.torch.installed()
            print(json.dumps(torch.calls))
            """
        )
        expected = ["vmm_pool_shim_alloc,vmm_pool_shim_free", *HOOKS, "change_current_allocator"]
        self.assertEqual(json.loads(told), expected)
        (name,) = self.built()
        self.assertRegex(name, r"^shim-2\.11\.0\+test-abi1-[0-9a-f]{16}\.so$")

    def test_the_shim_is_built_once_for_each_pytorch(self):
        self.fresh()
        code = "import vmm_pool.torch; vmm_pool.torch.install()"
        self.child(code)
        before = (self.cache / self.built()[0]).stat().st_mtime_ns
        self.child(code, CXX="/nonexistent/never-asked")
        self.assertEqual((self.cache / self.built()[0]).stat().st_mtime_ns, before)
        text = (self.torch / "torch" / "__init__.py").read_text()
        (self.torch / "torch" / "__init__.py").write_text(text.replace("2.11.0+test", "2.12.0+test"))
        self.child(code)
        self.assertEqual(len(self.built()), 2)

    def test_processes_that_build_at_the_same_time_are_fine(self):
        self.fresh()
        from support import MODULE, TESTS
        import os

        code = "import vmm_pool.torch; vmm_pool.torch.install(); print('fine')"
        path = os.pathsep.join(map(str, [self.torch, MODULE, TESTS]))
        variables = os.environ | {"PYTHONPATH": path, "VMM_POOL_SHIM_CACHE": str(self.cache)}
        running = [
            subprocess.Popen([sys.executable, "-c", code], env=variables, stdout=subprocess.PIPE, text=True)
            for _ in range(3)
        ]
        self.assertEqual([process.communicate()[0] for process in running], ["fine\n"] * 3)
        self.assertEqual(len(self.built()), 1, self.built())

    def test_too_late_is_said(self):
        for state in ("initialized", "refuses"):
            told = self.child(
                f"""
                import torch, vmm_pool.torch
                torch.cuda.{state} = True
                try:
                    vmm_pool.torch.install()
                except vmm_pool.torch.AlreadyInitialized as error:
                    print(error, vmm_pool.torch.installed())
                """
            )
            self.assertRegex(told, r"(expected|refused another).*False$")

    def test_without_a_compiler_it_refuses_or_warns(self):
        self.fresh()
        code = """
            import torch, warnings, vmm_pool.torch
            try:
                vmm_pool.torch.install()
            except vmm_pool.torch.NoCompiler as error:
                print(error)
            assert torch.calls == []
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                vmm_pool.torch.install(shim=False)
            print(torch.calls[0], torch.calls[-1], seen[0].category.__name__, seen[0].message)
            """
        told = self.child(code, CXX="no-such-compiler").splitlines()
        self.assertIn("CXX = no-such-compiler", told[0])
        self.assertIn("vmm_pool_torch_alloc,vmm_pool_torch_free change_current_allocator RuntimeWarning", told[1])
        self.assertIn("illegal address", told[1])
        python = self.place / "bin"
        python.mkdir()
        (python / "python").symlink_to(sys.executable)
        told = self.child(code, CXX=None, PATH=str(python)).splitlines()
        self.assertIn("apt-get install g++", told[0])

    def test_a_build_that_fails_leaves_nothing_and_says_why(self):
        self.fresh()
        (self.torch / "torch" / "include").unlink()
        done = run("import vmm_pool.torch; vmm_pool.torch.install()", [self.torch], VMM_POOL_SHIM_CACHE=str(self.cache))
        self.assertIn("ShimFailed", done.stderr)
        self.assertIn("c10/core/Allocator.h", done.stderr)
        self.assertEqual(self.built(), [])

    def test_a_cache_that_cannot_be_written_is_said(self):
        self.fresh()
        (self.place / "file").write_text("")
        done = run(
            "import vmm_pool.torch; vmm_pool.torch.install()",
            [self.torch],
            VMM_POOL_SHIM_CACHE=str(self.place / "file" / "below"),
        )
        self.assertIn("VMM_POOL_SHIM_CACHE can name", done.stderr)

    def test_memory_pools_share_one_allocator(self):
        told = self.child(
            """
            import json, torch, vmm_pool.torch
            with vmm_pool.torch.use() as one:
                pass
            with vmm_pool.torch.use() as again:
                assert one is again
            with vmm_pool.torch.use(3) as other:
                assert other is not one and other.allocator is one.allocator
            print(json.dumps(torch.calls))
            """
        )
        calls = json.loads(told)
        # PyTorch's own allocator has the captures.
        hooks = [name for name in HOOKS if "pool" not in name]
        made = ["vmm_pool_shim_alloc_segment,vmm_pool_shim_free_segment", *hooks]
        self.assertEqual(calls[: len(made)], made)
        of_2 = ["device 2", "MemPool", "use_mem_pool 2", "left", "use_mem_pool 2", "left"]
        self.assertEqual(calls[len(made) :], of_2 + ["device 3", "MemPool", "use_mem_pool 3", "left"])

    def test_a_memory_pool_under_the_pool_is_refused(self):
        told = self.child(
            """
            import vmm_pool, vmm_pool.torch
            vmm_pool.torch.install()
            try:
                vmm_pool.torch.mem_pool()
            except vmm_pool.NotSupported as error:
                print(error)
            """
        )
        self.assertIn("either install() or mem_pool()", told)


if __name__ == "__main__":
    unittest.main()
