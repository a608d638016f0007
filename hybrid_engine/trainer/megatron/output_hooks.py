"""Forward hooks of Megatron's output layer, whose logits are split over the ranks that share a vocabulary.

Megatron's cross entropy, which comes next, writes into the logits' memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state

from hybrid_engine.trainer.batches.token_outputs import NO_OUTPUTS, Outputs, token_outputs
from hybrid_engine.trainer.megatron.model_variants import WithBias


def hide_padding(vocab_size: int) -> Callable[..., WithBias]:
    """A hook: -inf for the rows that pad the vocabulary."""

    def hook(_layer: torch.nn.Module, _inputs: Any, outputs: WithBias) -> WithBias:
        logits, bias = outputs
        local_size = logits.shape[-1]
        num_real = max(0, vocab_size - parallel_state.get_tensor_model_parallel_rank() * local_size)
        if num_real < local_size:
            logits[..., num_real:] = float("-inf")
        return logits, bias

    return hook


class OutputReader:
    """A hook that reads entropy and most likely tokens off the logits, while it is asked to."""

    def __init__(self) -> None:
        self._wanted = NO_OUTPUTS
        self._found: dict[str, torch.Tensor] = {}

    def __call__(self, _layer: torch.nn.Module, _inputs: Any, outputs: WithBias) -> None:
        """Read; MTP layers use the output layer before the decoder does, whose logits are the last."""
        if self._wanted:
            self._found = token_outputs(outputs[0], self._wanted, parallel_state.get_tensor_model_parallel_group())

    @contextmanager
    def reading(self, outputs: Outputs) -> Iterator[None]:
        """Read `outputs` in every forward pass of the block."""
        self._wanted = outputs
        try:
            yield
        finally:
            self._wanted, self._found = NO_OUTPUTS, {}

    def take(self) -> dict[str, torch.Tensor]:
        """By name, [b, L, ...] of the last forward pass."""
        found, self._found = self._found, {}
        return {name: value.transpose(0, 1) for name, value in found.items()}
