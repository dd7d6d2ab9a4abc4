"""CUDA graphs: what a graph uses is kept for it, and comes back when it is gone.

    graphs.py native|pluggable|mempool
"""

import gc

import common

MIB = 1 << 20
ROWS = 2048


class Work:
    """A function with temporaries of many lengths, and what it must answer."""

    def __init__(self, torch, seed):
        source = torch.Generator().manual_seed(seed)
        self.weight = torch.randn(ROWS, ROWS, generator=source).cuda() / ROWS**0.5
        self.input = torch.zeros(ROWS, ROWS, device="cuda")

    def __call__(self):
        first = self.input @ self.weight
        second = first.relu() * 2 + 1
        third = second.softmax(1)
        return (third - first).sin() @ self.weight

    def eager(self, torch, values):
        self.input.copy_(values)
        return self()


def values_of(torch, seed):
    return torch.randn(ROWS, ROWS, generator=torch.Generator().manual_seed(seed)).cuda()


def same(torch, found, expected) -> bool:
    """A graph may choose other kernels than work without one does; memory of somebody else is far from that."""
    return bool(torch.allclose(found, expected, rtol=1e-4, atol=1e-4))


def id_of(pool):
    return None if pool is None else pool.id


def capture(torch, work, pool=None):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        output = work()
    return graph, output


class Others:
    """Other work's tensors, of the lengths that the graphs use; none must ever change."""

    def __init__(self, torch):
        self._torch, self._held, self._count = torch, [], 0

    def come_and_go(self, rounds=40):
        torch = self._torch
        for _ in range(rounds):
            self._count += 1
            side = ROWS if self._count % 3 else 37 * self._count
            self._held.append((torch.full((side, ROWS), float(self._count), device="cuda"), self._count))
            if self._count % 2:
                self._held.pop(self._count * 7 % len(self._held))

    def whole(self):
        return all(bool((tensor == float(number)).all()) for tensor, number in self._held)


def replays(torch, name, pairs, others):
    """Launches the graphs in turn, with other allocations in between."""
    good = True
    for step in range(12):
        graph, output, work = pairs[step % len(pairs)]
        values = values_of(torch, 100 + step)
        expected = work.eager(torch, values)
        others.come_and_go()
        output.fill_(float("nan"))
        work.input.copy_(values)
        graph.replay()
        good &= same(torch, output, expected)
    common.check(f"{name}: results are those without a graph", good)
    common.check(f"{name}: other tensors are as they were", others.whole())


def one_graph(torch, pool):
    work, others = Work(torch, 1), Others(torch)
    graph, output = capture(torch, work, pool)
    replays(torch, "one graph", [(graph, output, work)], others)


def two_graphs(torch, pool):
    one, two, others = Work(torch, 2), Work(torch, 3), Others(torch)
    first, first_output = capture(torch, one, pool)
    second, second_output = capture(torch, two, first.pool())
    replays(torch, "two graphs, one pool", [(first, first_output, one), (second, second_output, two)], others)
    # The other one goes on when one is gone.
    del first
    gc.collect()
    replays(torch, "the one that is left", [(second, second_output, two)], others)


def two_streams(torch, pool):
    work, others, side = Work(torch, 4), Others(torch), torch.cuda.Stream()

    def forked():
        here = torch.cuda.current_stream()
        first = work.input @ work.weight
        side.wait_stream(here)
        with torch.cuda.stream(side):
            away = (first + 1).cos() @ work.weight
        back = (first - 1).sin() @ work.weight
        here.wait_stream(side)
        away.record_stream(here)
        return away + back

    graph = torch.cuda.CUDAGraph()
    forked()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, pool=pool):
        output = forked()
    good = True
    for step in range(8):
        values = values_of(torch, 200 + step)
        work.input.copy_(values)
        expected = forked()
        others.come_and_go()
        output.fill_(float("nan"))
        graph.replay()
        good &= same(torch, output, expected)
    common.check("a capture over two streams: results", good)
    common.check("a capture over two streams: other tensors", others.whole())


def launched_elsewhere_then_deleted(torch, pool):
    """The graph is deleted while a launch on another stream than the captured one still runs."""
    good = True
    for step in range(6):
        work, stream = Work(torch, 5), torch.cuda.Stream()
        values = values_of(torch, 300 + step)
        expected = work.eager(torch, values)
        graph, output = capture(torch, work, pool)
        work.input.copy_(values)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            graph.replay()
            kept = output.clone()
        output.record_stream(stream)
        work.input.record_stream(stream)
        work.weight.record_stream(stream)
        del graph, output, work
        gc.collect()
        torch.cuda.empty_cache()
        filler = [torch.full((ROWS, ROWS), float("nan"), device="cuda") for _ in range(24)]
        stream.synchronize()
        good &= same(torch, kept, expected)
        del filler
    common.check("deleted while it runs: results", good)


def memory_returns(torch, new_pool):
    def long():
        blocks = [torch.full((256 * MIB // 4,), float(n), device="cuda") for n in range(8)]
        return torch.stack([block.sum() for block in blocks])

    settle(torch)
    before = torch.cuda.mem_get_info()[0]
    pool = new_pool()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=id_of(pool)):
        output = long()
    torch.cuda.empty_cache()
    during = torch.cuda.mem_get_info()[0]
    graph.replay()
    good = output.tolist() == [float(n) * (256 * MIB // 4) for n in range(8)]
    common.check("2 GiB of temporaries: results", good)
    common.check("2 GiB of temporaries are kept", before - during >= 1800 * MIB, used=before - during)
    del graph, output, pool
    settle(torch)
    after = torch.cuda.mem_get_info()[0]
    common.check("and come back", before - after <= 200 * MIB, missing=before - after)


def settle(torch):
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def failed_captures(torch):
    """A capture that fails costs its streams nothing, and its memory comes back. Last: PyTorch itself is not the
    same after one."""
    stream = torch.cuda.Stream()
    free = []
    for _ in range(4):
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=stream):
                block = torch.zeros(256 * MIB, dtype=torch.uint8, device="cuda")
                stream.synchronize()  # not allowed in a capture
        except RuntimeError as error:
            words = str(error)
        else:
            words = ""
        block = graph = None
        gc.collect()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            after = torch.full((1000,), 7.0, device="cuda")
        stream.synchronize()
        free.append(torch.cuda.mem_get_info()[0])
        common.check("a capture failed, and its stream works on", words and after.sum().item() == 7000, words=words[:80])
    common.check("failed captures keep at most one's memory", free[0] - free[-1] <= 300 * MIB, free=free)
    work = Work(torch, 6)
    values = values_of(torch, 400)
    expected = work.eager(torch, values)
    graph, output = capture(torch, work)
    work.input.copy_(values)
    graph.replay()
    common.check("a capture after failed ones", same(torch, output, expected))


def main():
    mode = common.mode_of(("native", "pluggable", "mempool"))
    torch, _context = common.set_up(mode)
    torch.cuda.init()
    new_pool = lambda: None  # noqa: E731
    if mode == "mempool":
        import vmm_pool.torch

        # Not inside use(): there PyTorch takes the graph's memory for the thread's. The graph names the pool.
        new_pool = vmm_pool.torch.mem_pool
    for part in (one_graph, two_graphs, two_streams, launched_elsewhere_then_deleted):
        pool = new_pool()
        part(torch, id_of(pool))
        settle(torch)
    memory_returns(torch, new_pool)
    if mode != "native":
        import vmm_pool

        common.say(stats=vmm_pool.stats(0))
    if mode == "pluggable":
        failed_captures(torch)
    common.finish()


if __name__ == "__main__":
    main()
