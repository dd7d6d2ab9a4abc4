"""A tensor of another process in PyTorch, without a copy. First, in another terminal:

    cargo run --release -p vmm-share --example dlpack_exporter -- --socket /tmp/tensor.sock

Then `python import_tensor.py /tmp/tensor.sock`. The other program, ended by a line on its input, sees what was
written here.
"""

import sys

import torch

import vmm_pool

WORDS = 1 << 20

imported = vmm_pool.Import(sys.argv[1], "tensor", write=True, dtype="int32", shape=(WORDS,))
torch.cuda.init()
tensor = torch.from_dlpack(imported)
assert tensor.data_ptr() == imported.address, "a copy was made"
assert tensor.is_cuda and tensor.shape == (WORDS,) and tensor.dtype == torch.int32
expected = torch.arange(1, WORDS + 1, dtype=torch.int32, device=tensor.device)
assert torch.equal(tensor, expected), "the words are not the owner's"
print(f"sum {tensor.sum(dtype=torch.int64).item()} at {tensor.data_ptr():#x}, not copied")

tensor.mul_(2)
torch.cuda.synchronize()
print(f"sum {tensor.sum(dtype=torch.int64).item()} after it was doubled here")

# Read-only memory: PyTorch has no such tensors, so it must not be written to.
reader = vmm_pool.Import(sys.argv[1], "tensor", dtype="int32", shape=(WORDS,), hide_read_only=True)
assert torch.equal(torch.from_dlpack(reader), tensor)

# Tensors keep their import alive, and its memory.
del imported
assert torch.equal(tensor, 2 * expected)
print("well")
