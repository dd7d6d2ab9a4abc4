"""Finding the library, its version, and that the module's signatures are those of the headers."""

import ctypes
import pathlib
import re
import unittest

from support import COMPILER, INCLUDES, MODULE, Place, child, run

import vmm_pool
from vmm_pool._signatures import FUNCTIONS, STRUCTS

HEADERS = [INCLUDES / name / "include" / f"vmm_pool{suffix}.h" for name, suffix in
           (("capi", ""), ("torch", "_torch"), ("cupy", "_cupy"))]
# How the headers write what ctypes calls otherwise.
TYPES = {
    "uint32_t": ctypes.c_uint32,
    "int32_t": ctypes.c_int32,
    "int": ctypes.c_int,
    "uint64_t": ctypes.c_uint64,
    "size_t": ctypes.c_size_t,
    "uintptr_t": ctypes.c_size_t,
    "ssize_t": ctypes.c_ssize_t,
    "ptrdiff_t": ctypes.c_ssize_t,
    "intptr_t": ctypes.c_ssize_t,
    "double": ctypes.c_double,
    "void": None,
}


def text_of_headers():
    text = "\n".join(path.read_text() for path in HEADERS)
    return re.sub(r"/\*.*?\*/|//[^\n]*|^#[^\n]*", "", text, flags=re.S | re.M)


def kind_of(declared):
    """A C type as ctypes has it; any pointer is a pointer."""
    if "*" in declared:
        return "pointer"
    words = [word for word in declared.split() if word not in ("const", "struct", "enum")]
    kind = TYPES[words[0]]
    return kind if kind is None else (kind._type_, ctypes.sizeof(kind))


def kind_in_python(kind):
    if kind is None:
        return None
    if kind in (ctypes.c_void_p, ctypes.c_char_p) or issubclass(kind, ctypes._Pointer):
        return "pointer"
    return (kind._type_, ctypes.sizeof(kind))


class Headers(unittest.TestCase):
    def test_functions_are_those_of_the_headers(self):
        found = {}
        for answer, name, arguments in re.findall(r"([\w ]+?[\s*]+)(vmm_\w+)\s*\(([^()]*)\)\s*;", text_of_headers()):
            listed = [] if arguments.strip() in ("", "void") else arguments.split(",")
            found[name] = (kind_of(answer), [kind_of(argument) for argument in listed])
        ours = {
            name: (kind_in_python(answer), [kind_in_python(argument) for argument in arguments])
            for name, (answer, arguments) in FUNCTIONS.items()
        }
        self.maxDiff = None
        self.assertGreater(len(found), 40)
        self.assertEqual(ours, found)

    def test_structs_are_those_of_the_headers(self):
        bodies = dict(re.findall(r"struct\s+(\w+)\s*\{([^{}]*)\}", text_of_headers()))
        for name, struct in STRUCTS.items():
            fields = re.findall(r"(\w[\w\s*]*?[\s*])(\w+)\s*;", bodies[name])
            theirs = [(field, kind_of(kind)) for kind, field in fields]
            ours = [(field, kind_in_python(kind)) for field, kind in struct._fields_]
            self.assertEqual(ours, theirs, name)

    def test_statuses_are_those_of_the_header(self):
        found = {
            name: int(value)
            for name, value in re.findall(r"VMM_POOL_([A-Z_]+)\s*=\s*(\d+)\s*,", text_of_headers())
        }
        self.assertEqual({status.name: status.value for status in vmm_pool.Status}, found)

    def test_the_library_has_them_all(self):
        missing = [name for name in FUNCTIONS if not hasattr(vmm_pool.library(), name)]
        self.assertEqual(missing, [])


class Finding(unittest.TestCase):
    def test_version_and_place(self):
        self.assertRegex(vmm_pool.version(), r"^\d+\.\d+\.\d+$")
        self.assertTrue(vmm_pool.library_path().is_file())

    def test_a_wrong_path_is_said(self):
        told = child(
            """
            import vmm_pool
            try:
                vmm_pool.version()
            except vmm_pool.LibraryNotFound as error:
                print(error)
            """,
            VMM_POOL_LIBRARY="/nonexistent/libvmm_pool.so",
        )
        self.assertIn("VMM_POOL_LIBRARY = /nonexistent/libvmm_pool.so: there is no such file", told)

    @unittest.skipUnless(COMPILER, "no C++ compiler")
    def test_another_library_is_said(self):
        import subprocess

        place = Place(self).path
        for source, words in (
            ("int other;", "is not the pool's library"),
            ('extern "C" unsigned vmm_pool_abi_version() { return 7; }', "has version 7 of its interface; expected 1"),
        ):
            (place / "other.cpp").write_text(source)
            library = place / f"other{len(source)}.so"
            subprocess.run([COMPILER, "-shared", "-fPIC", place / "other.cpp", "-o", library], check=True)
            done = run("import vmm_pool; vmm_pool.version()", VMM_POOL_LIBRARY=str(library))
            self.assertIn("LibraryNotFound", done.stderr)
            self.assertIn(words, done.stderr)

    def test_beside_the_module_and_in_the_prefix(self):
        place = Place(self).path
        library = vmm_pool.library_path()
        for module, lies in (
            ("lib/python", "lib"),
            ("lib/python3.12/site-packages", "lib/python3.12/site-packages/vmm_pool"),
            ("share/vmm-pool/python", "lib"),
        ):
            prefix = place / module.replace("/", "-")
            (prefix / module).mkdir(parents=True)
            (prefix / lies).mkdir(parents=True, exist_ok=True)
            import shutil

            shutil.copytree(MODULE / "vmm_pool", prefix / module / "vmm_pool", dirs_exist_ok=True)
            link = prefix / lies / ("libvmm_pool.so.1" if "share" in module else "libvmm_pool.so")
            shutil.copy(library, link)
            told = child(
                f"""
                import sys
                sys.path.insert(0, {str(prefix / module)!r})
                import vmm_pool
                print(vmm_pool.library_path())
                """,
                VMM_POOL_LIBRARY=None,
            )
            self.assertEqual(pathlib.Path(told), link.resolve())


if __name__ == "__main__":
    unittest.main()
