"""Out of memory is PyTorch's own error with the pool's report in it, and nothing is lost by it.

    oom.py pluggable|mempool|fraction

`fraction` is `pluggable` with a quarter of the GPU (torch.cuda.set_per_process_memory_fraction).
"""

import common

GIB = 1 << 30


def fails(torch, name, bytes_):
    try:
        torch.empty(bytes_, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError as error:
        words = str(error)
        common.check(name, "vmm-pool" in words and "out of memory" in words, words=words)
    else:
        common.check(name, False, words="it was served")


def fill(torch):
    blocks = []
    try:
        while True:
            blocks.append(torch.full((GIB // 4,), float(len(blocks)), device="cuda"))
    except torch.OutOfMemoryError as error:
        return blocks, str(error)


def whole(torch, blocks):
    # No temporary as long as a block: there may be no room for one.
    return all(bool(block.amin() == block.amax()) for block in blocks)


def main():
    mode = common.mode_of(("pluggable", "mempool", "fraction"))
    torch, context = common.set_up("pluggable" if mode == "fraction" else mode)
    torch.cuda.init()
    free, total = torch.cuda.mem_get_info()
    usable = free
    if mode == "fraction":
        torch.cuda.set_per_process_memory_fraction(0.25)
        usable = min(free, total // 4)
    with context:
        fails(torch, "more than the GPU has", total + total // 2)
        fails(torch, "far more than the GPU has", 1 << 50)
        blocks, words = fill(torch)
        held = len(blocks) * GIB
        common.check("a fill ends in the report", "vmm-pool" in words, words=words)
        common.check("nearly all was given", usable - 3 * GIB <= held <= usable, held=held, usable=usable)
        common.check("all blocks are whole", whole(torch, blocks))
        common.check("each has its own number", [float(b[0]) for b in blocks] == list(map(float, range(len(blocks)))))
        count = len(blocks)
        del blocks[::2]
        again, words = fill(torch)
        common.check("what was freed is given again", len(again) >= count // 2 - 1, count=len(again), before=count)
        common.check("all blocks are still whole", whole(torch, blocks) and whole(torch, again))
        small = torch.ones(1000, device="cuda").sum().item()
        common.check("small requests go on", small == 1000)
        del blocks, again
        torch.cuda.synchronize()
        # A memory pool of PyTorch's keeps its segments as long as it lives.
        torch.cuda.empty_cache()
        after = torch.cuda.mem_get_info()[0]
        if mode != "mempool":
            common.check("all goes back", after >= free - 2 * GIB, before=free, after=after)
    common.finish()


if __name__ == "__main__":
    main()
