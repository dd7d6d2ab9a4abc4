"""PyTorch on the pool: one line, before CUDA is used. Then everything is as ever."""

import torch

import vmm_pool
import vmm_pool.torch

vmm_pool.torch.install()

model = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 10)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(20):
    # A batch of another length each time, which is what leaves holes in a cache of whole segments.
    inputs = torch.randn(64 + 37 * step, 512, device="cuda")
    loss = torch.nn.functional.cross_entropy(model(inputs), inputs.argmax(1) % 10)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"loss {loss.item():.4f}")

try:
    torch.empty(torch.cuda.mem_get_info()[1] * 2, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError as error:
    print(f"as PyTorch says it: {error}")

print(vmm_pool.report(0))
