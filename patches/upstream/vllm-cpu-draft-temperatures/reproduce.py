"""Expand settings of two requests to their drafted tokens, on a CPU without Triton."""

import sys

import torch
from vllm.platforms import current_platform
from vllm.v1.sample.rejection_sampler import expand_batch_to_tokens

current_platform.register_triton_kernel_overrides()  # as the CPU worker does

ends = torch.tensor([2, 5], dtype=torch.int32)  # 2 drafted tokens, then 3
cases = {
    "temperature": torch.tensor([0.75, 1.5]),
    "top_k": torch.tensor([5, 9], dtype=torch.int32),
    "top_p": torch.tensor([0.25, 0.5]),
}
failed = False
for name, values in cases.items():
    expanded = expand_batch_to_tokens(values, ends, 5)
    expected = values.repeat_interleave(torch.tensor([2, 3]))
    failed |= not torch.equal(expanded, expected)
    print(f"{name}: {expanded.tolist()}, expected {expected.tolist()}")
sys.exit(int(failed))
