"""CuPy on the pool: arrays of odd sizes on two streams, checked against NumPy."""

import cupy
import numpy

import vmm_pool
import vmm_pool.cupy

vmm_pool.cupy.install()

streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
rng = numpy.random.default_rng(1)
for step in range(100):
    host = rng.random(int(rng.integers(1, 1_000_001)))
    stream, other = streams[step % 2], streams[1 - step % 2]
    with stream:
        array = cupy.asarray(host)
        result = cupy.sqrt(array * 3 + 1)
        done = stream.record()
    with other:
        # Made on one stream, used on the other: said so, that it is not reused too early.
        other.wait_event(done)
        total = (result * 2).sum()
        vmm_pool.cupy.record_stream(result)
    numpy.testing.assert_allclose(float(total), (numpy.sqrt(host * 3 + 1) * 2).sum(), rtol=1e-10)
print("100 arrays on two streams: as NumPy has it")
print(vmm_pool.report(0))
