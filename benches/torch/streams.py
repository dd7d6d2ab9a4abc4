"""Streams, threads, and the edges: what `record_stream` promises, frees elsewhere, tensors of no bytes.

    streams.py native|pluggable|mempool
"""

import gc
import queue
import random
import threading

import common

MIB = 1 << 20


def hand_over(torch, rounds, record):
    """A tensor is made on one stream, used on another behind a pause, and dropped at once; its maker goes on
    with garbage. How many results were wrong."""
    maker, user = torch.cuda.Stream(), torch.cuda.Stream()
    sizes = random.Random(1)
    outcomes = []
    for step in range(rounds):
        count = sizes.randrange(1, 4 * MIB)
        with torch.cuda.stream(maker):
            made = torch.full((count,), float(step), device="cuda")
        user.wait_stream(maker)
        with torch.cuda.stream(user):
            torch.cuda._sleep(2_000_000)
            outcomes.append((made.double().sum(), float(step) * count))
        if record:
            made.record_stream(user)
        del made
        with torch.cuda.stream(maker):
            for _ in range(3):
                torch.full((count,), float("nan"), device="cuda")
    torch.cuda.synchronize()
    return sum(total.item() != expected for total, expected in outcomes)


def many_threads(torch, threads=8, rounds=150):
    wrong, errors = [0] * threads, []

    def work(number):
        try:
            stream, sizes, held = torch.cuda.Stream(), random.Random(number), []
            with torch.cuda.stream(stream):
                for step in range(rounds):
                    value = float(number * rounds + step)
                    held.append((torch.full((sizes.randrange(1, 2 * MIB),), value, device="cuda"), value))
                    if len(held) > 6:
                        tensor, value = held.pop(sizes.randrange(len(held)))
                        wrong[number] += not bool((tensor == value).all())
            stream.synchronize()
        except Exception as error:  # noqa: BLE001: said by the main thread
            errors.append(repr(error))

    running = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    common.check("threads with streams of their own", sum(wrong) == 0 and not errors, wrong=sum(wrong), errors=errors)


def freed_elsewhere(torch, rounds=300):
    """Each tensor is dropped by another thread than made it; the maker checks what it gets next."""
    waiting, wrong = queue.Queue(maxsize=8), 0

    def drop():
        while waiting.get() is not None:
            pass

    thread = threading.Thread(target=drop)
    thread.start()
    sizes = random.Random(5)
    for step in range(rounds):
        tensor = torch.full((sizes.randrange(1, MIB),), float(step), device="cuda")
        wrong += not bool((tensor == float(step)).all())
        waiting.put(tensor)
        del tensor
    waiting.put(None)
    thread.join()
    common.check("freed on another thread", wrong == 0, wrong=wrong)


def edges(torch):
    none = torch.empty(0, device="cuda")
    joined = torch.cat([none, torch.ones(3, device="cuda"), none.clone()])
    common.check("no bytes", none.data_ptr() == 0 and joined.sum().item() == 3, address=none.data_ptr())
    common.check("no rows", (torch.ones(0, 5, device="cuda") @ torch.ones(5, 3, device="cuda")).shape == (0, 3))
    none.record_stream(torch.cuda.Stream())
    addresses = {torch.empty(1, device="cuda").data_ptr() % 512 for _ in range(10)}
    common.check("aligned to 512", addresses == {0})
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        tensor = torch.ones(MIB, device="cuda")
    del stream
    gc.collect()
    total = tensor.sum().item()
    del tensor
    common.check("the stream object is gone before the tensor", total == MIB)


def gives_back(torch, mode):
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info()[0]
    blocks = [torch.zeros(256 * MIB, dtype=torch.uint8, device="cuda") for _ in range(8)]
    used = before - torch.cuda.mem_get_info()[0]
    del blocks
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    after = torch.cuda.mem_get_info()[0]
    common.check("2 GiB are taken", used >= 1800 * MIB, used=used)
    if mode != "mempool":
        # A memory pool keeps its segments as long as it lives.
        common.check("empty_cache gives them back", before - after <= 64 * MIB, missing=before - after)


def in_child(torch):
    """A forked child cannot use CUDA, in PyTorch's own words; its parent's tensors do not hurt it."""
    import os

    tensor = torch.ones(1000, device="cuda")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            torch.ones(1, device="cuda")
        except RuntimeError:
            code = 0
        finally:
            del tensor
            os._exit(code)
    _, status = os.waitpid(child, 0)
    common.check("a forked child is refused, and ends", status == 0, status=status)
    common.check("its parent goes on", tensor.sum().item() == 1000)


def main():
    mode = common.mode_of(("native", "pluggable", "mempool"))
    torch, context = common.set_up(mode)
    torch.cuda.init()
    with context:
        common.check("record_stream", hand_over(torch, 200, True) == 0)
        # Not a check: whether it goes wrong without is a matter of time.
        common.say(wrong_without_record_stream=hand_over(torch, 100, False))
        many_threads(torch)
        freed_elsewhere(torch)
        edges(torch)
        gives_back(torch, mode)
        in_child(torch)
    if mode == "pluggable":
        import vmm_pool

        common.say(stats=vmm_pool.stats(0))
    common.finish()


if __name__ == "__main__":
    main()
