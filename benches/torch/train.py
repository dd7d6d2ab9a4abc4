"""Trains a small transformer on batches of changing shape, then lets it write with a growing cache.

    train.py native|expandable|pluggable|mempool

Prints the losses to the last digit, the tokens, the physical memory at its highest, and the time a step takes.
"""

import random
import time

import common

DIM, LAYERS, HEADS, VOCABULARY, LENGTH_MAX = 640, 8, 10, 16_000, 512
WATCHED_STEPS, TIMED_STEPS, NOT_TIMED = 60, 50, 10


def model_of(torch):
    nn, F = torch.nn, torch.nn.functional

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
            self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
            self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

        def forward(self, x, past=None):
            batch, length, _ = x.shape
            split = self.qkv(self.first(x)).view(batch, length, 3, HEADS, DIM // HEADS).permute(2, 0, 3, 1, 4)
            query, key, value = split[0], split[1], split[2]
            if past is not None:
                key, value = torch.cat([past[0], key], 2), torch.cat([past[1], value], 2)
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=past is None)
            x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, DIM))
            return x + self.down(F.gelu(self.up(self.second(x)))), (key, value)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.places = nn.Embedding(VOCABULARY, DIM), nn.Embedding(LENGTH_MAX, DIM)
            self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
            self.norm = nn.LayerNorm(DIM)

        def forward(self, tokens, past=None):
            seen = 0 if past is None else past[0][0].shape[2]
            places = torch.arange(seen, seen + tokens.shape[1], device=tokens.device)
            x, kept = self.tokens(tokens) + self.places(places), []
            for index, block in enumerate(self.blocks):
                x, keys = block(x, None if past is None else past[index])
                kept.append(keys)
            return F.linear(self.norm(x), self.tokens.weight), kept

    torch.manual_seed(1)
    return Model().cuda()


def batches(torch):
    """The same for everybody: shapes and contents come from the host."""
    shapes, source = random.Random(2), torch.Generator().manual_seed(3)
    while True:
        size = (shapes.randrange(2, 25), shapes.randrange(64, LENGTH_MAX + 1))
        yield torch.randint(VOCABULARY, size, generator=source)


def train(torch, watch, model, optimizer, data, steps):
    losses, seconds = [], []
    for _ in range(steps):
        begin = time.perf_counter()
        tokens = next(data).cuda()
        logits, _kept = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(repr(loss.item()))
        seconds.append(time.perf_counter() - begin)
        if watch is not None:
            watch.look()
    return losses, seconds


def write(torch, model, new_tokens=160):
    written = torch.randint(VOCABULARY, (8, 32), generator=torch.Generator().manual_seed(4)).cuda()
    with torch.no_grad():
        logits, past = model(written)
        for _ in range(new_tokens):
            last = logits[:, -1:].argmax(-1)
            written = torch.cat([written, last], 1)
            logits, past = model(last, past)
    return written.tolist()


def live_peak(torch, mode):
    if mode == "pluggable":
        import vmm_pool

        return vmm_pool.stats(0)
    return {"max_memory_allocated": torch.cuda.max_memory_allocated(),
            "max_memory_reserved": torch.cuda.max_memory_reserved()}


def main():
    mode = common.mode_of()
    torch, context = common.set_up(mode)
    torch.use_deterministic_algorithms(True)
    # Memory that nobody wrote is left as it is: a result that depends on it would differ.
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.cuda.init()
    watch = common.Watch(torch)
    math = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
    with context, math:
        model = model_of(torch)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        data = batches(torch)
        with watch:
            losses, _ = train(torch, watch, model, optimizer, data, WATCHED_STEPS)
            tokens = write(torch, model)
        more, seconds = train(torch, None, model, optimizer, data, TIMED_STEPS)
        timed = seconds[NOT_TIMED:]
        common.check("losses are numbers, and fall", float(losses[0]) > float(more[-1]) > 0)
        common.say(
            mode=mode,
            torch=torch.__version__,
            gpu=torch.cuda.get_device_name(),
            parameters=sum(p.numel() for p in model.parameters()),
            losses=losses + more,
            tokens=tokens,
            peak_physical_bytes=watch.peak,
            live=live_peak(torch, mode),
            step_seconds_median=common.quantile(timed, 0.5),
            step_seconds_p99=common.quantile(timed, 0.99),
        )
    common.finish()


if __name__ == "__main__":
    main()
