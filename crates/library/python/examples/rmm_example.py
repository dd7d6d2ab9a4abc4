"""RMM on the pool: what cuDF and cuML allocate lies in it, and so does this buffer."""

import rmm

import vmm_pool
import vmm_pool.rmm

rmm.mr.set_current_device_resource(vmm_pool.rmm.resource())

stream = rmm.pylibrmm.stream.Stream()
data = bytes(range(256)) * 1001
buffer = rmm.DeviceBuffer.to_device(data, stream)
assert buffer.tobytes(stream) == data, "the bytes came back otherwise"

try:
    rmm.DeviceBuffer(size=1 << 45)
except MemoryError as error:
    print(f"as RMM says it: {error}")

del buffer
print(vmm_pool.report(0))
