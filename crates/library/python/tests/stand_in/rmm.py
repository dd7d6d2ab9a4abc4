"""What vmm_pool.rmm uses of RMM 26.10. Says nothing of RMM itself."""

import sys
import types


class Stream:
    def __init__(self, handle):
        self._handle = handle

    def __cuda_stream__(self):
        return (0, self._handle)


class CallbackMemoryResource:
    def __init__(self, allocate, deallocate):
        self.allocate, self.deallocate = allocate, deallocate


mr = types.SimpleNamespace(CallbackMemoryResource=CallbackMemoryResource)
__path__ = []
for _name in ("rmm._cuda", "rmm._cuda.gpu"):
    sys.modules[_name] = types.ModuleType(_name)
sys.modules["rmm._cuda.gpu"].getDevice = lambda: 1
