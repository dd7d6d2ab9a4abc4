"""CuPy with the pool: odd sizes on two streams, checked against numpy.

    cupy_check.py python|c         the Python allocator, or the C functions
"""

import common

MIB = 1 << 20


def main():
    mode = common.mode_of(("python", "c"))
    common.find_module()
    import cupy
    import numpy

    import vmm_pool.cupy

    if mode == "python":
        vmm_pool.cupy.install()
    else:
        cupy.cuda.set_allocator(vmm_pool.cupy.c_allocator())

    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    rng, wrong, held = numpy.random.default_rng(1), 0, []
    for step in range(400):
        stream = streams[step % 2]
        count = int(rng.integers(1, 3_000_001))
        host = rng.random(count)
        with stream:
            array = cupy.asarray(host)
            result = cupy.sqrt(array * 3 + 1)[::-1]
            held.append((stream, result, numpy.sqrt(host * 3 + 1)[::-1]))
            if len(held) > 5:
                stream, result, expected = held.pop(int(rng.integers(len(held))))
                with stream:
                    wrong += not numpy.allclose(result.get(stream=stream), expected, rtol=1e-12, atol=0)
                del result
            del array
    common.check("odd sizes on two streams", wrong == 0, wrong=wrong)
    held.clear()

    # One stream makes and drops, another uses meanwhile.
    maker, user = streams
    outcomes = []
    for step in range(100):
        count = int(rng.integers(1, 2_000_001))
        with maker:
            array = cupy.full(count, float(step))
            ready = maker.record()
        with user:
            user.wait_event(ready)
            outcomes.append((array.sum(), float(step) * count))
            if mode == "python":
                vmm_pool.cupy.record_stream(array, user)
        del array
        with maker:
            cupy.full(count, numpy.nan)
    cupy.cuda.Device().synchronize()
    wrong = sum(float(total) != expected for total, expected in outcomes)
    common.check("made on one stream, used on another", wrong == 0, wrong=wrong)

    common.check("no bytes", cupy.empty(0).size == 0 and float(cupy.concatenate([cupy.empty(0), cupy.ones(3)]).sum()) == 3)
    total = cupy.cuda.runtime.memGetInfo()[1]
    try:
        cupy.empty(total * 2, dtype=cupy.uint8)
    except cupy.cuda.memory.OutOfMemoryError as error:
        common.check("out of memory", "vmm-pool" in str(error), words=str(error))
    else:
        common.check("out of memory", False)
    common.check("goes on afterwards", float(cupy.ones(1000).sum()) == 1000)
    common.say(stats=vmm_pool.stats(0))
    common.finish()


if __name__ == "__main__":
    main()
