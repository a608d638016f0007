"""Weights in fp8 blocks: the published recipe, written out, and a kernel of torch for vLLM on a CPU."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

BLOCK = 128
PUBLISHED = {
    **{"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"},
    "weight_block_size": [BLOCK, BLOCK],
}
"""quantization_config of published checkpoints, without their `modules_to_not_convert`."""


def quantised(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight in float8_e4m3fn and its `weight_scale_inv`, block by block."""
    rows, columns = weight.shape
    values = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    scales = torch.ones(-(-rows // BLOCK), -(-columns // BLOCK))
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            box = (slice(row * BLOCK, (row + 1) * BLOCK), slice(column * BLOCK, (column + 1) * BLOCK))
            block = weight[box].float()
            if block.abs().max() > 0:
                scales[row, column] = block.abs().max() / 448
            values[box] = (block / scales[row, column]).to(torch.float8_e4m3fn)
    return values, scales


def dequantised(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the weight, in float32, that a kernel computes with."""
    rows, columns = values.shape
    spread = scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return values.float() * spread


def quantised_checkpoint(weights: Mapping[str, torch.Tensor], names: Collection[str]) -> dict[str, torch.Tensor]:
    """Return the tensors of a published checkpoint, in which the weights `names` are quantised."""
    tensors = dict(weights)
    for name in names:
        tensors[name], tensors[f"{name}_scale_inv"] = quantised(weights[name])
    return tensors


def write_checkpoint(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a checkpoint beside its config.json."""
    from safetensors.torch import save_file

    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, str(path / "model.safetensors"))


def published_config(path: Path, **changes: Any) -> None:
    """Add a quantization_config to a config.json."""
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {**PUBLISHED, **changes}
    (path / "config.json").write_text(json.dumps(config))


@contextlib.contextmanager
def kernel_in_torch() -> Iterator[None]:
    """Let vLLM compute with such weights on a CPU without AMX, as its kernel for AMX does: activations stay bf16."""
    from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel
    from vllm.platforms import current_platform

    from hybrid_engine.backends.vllm import internals

    class BlockKernelInTorch(Fp8BlockScaledMMLinearKernel):
        apply_input_quant = False

        @classmethod
        def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
            return True, None

        def apply_block_scaled_mm(
            self, A: torch.Tensor, B: torch.Tensor, As: torch.Tensor, Bs: torch.Tensor
        ) -> torch.Tensor:
            return (A.float() @ dequantised(B, Bs).T).to(A.dtype)

    kernels = internals.FP8_BLOCK_KERNELS.load()
    before = kernels[current_platform._enum]
    kernels[current_platform._enum] = [BlockKernelInTorch]
    try:
        yield
    finally:
        kernels[current_platform._enum] = before
