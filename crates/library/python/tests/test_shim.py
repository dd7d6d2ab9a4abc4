"""shim.cpp by itself: see shim_test.cpp."""

import subprocess
import unittest

from support import COMPILER, TESTS, Place


@unittest.skipUnless(COMPILER, "no C++ compiler")
class Shim(unittest.TestCase):
    def test_captures_and_errors(self):
        place = Place(self).path
        driver, program = place / "libcuda.so.1", place / "shim_test"
        warnings = ["-Wall", "-Wextra", "-Werror"]
        subprocess.run(
            [COMPILER, "-x", "c", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", *warnings]
            + [TESTS / "fake_driver.c", "-o", driver],
            check=True,
        )
        subprocess.run(
            [COMPILER, "-std=c++17", *warnings, "-isystem", TESTS / "stand_in", TESTS / "shim_test.cpp"]
            + ["-o", program, "-ldl", "-pthread"],
            check=True,
        )
        done = subprocess.run([program, driver], capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertGreater(done.stdout.count("ok "), 30)


if __name__ == "__main__":
    unittest.main()
