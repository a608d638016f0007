"""The output layer of a value model: from a hidden state to one number, computed in float32."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig

from hybrid_engine.backends.megatron.internals import mark_sequence_parallel


class ValueHead(torch.nn.Module):
    """Whole on every tensor parallel rank. Accepts what Megatron passes to any output layer.

    New ones are zero: every value is 0 until the head was trained, in any layout.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))
        self.sequence_parallel = config.sequence_parallel
        if config.sequence_parallel:
            mark_sequence_parallel(self.weight)

    def forward(self, hidden: torch.Tensor, **_unused: Any) -> tuple[torch.Tensor, None]:
        """[s, b, hidden_size], a part of the sequence with sequence parallelism, to [S, b, 1] of all of it."""
        values = torch.nn.functional.linear(hidden.float(), self.weight.float())
        if self.sequence_parallel:
            # every rank goes on with the whole, so that each has the whole gradient and takes its part of it
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None


def put_value_head(model: LanguageModule) -> None:
    """Replace the output layer of the chunk that has one."""
    if model.post_process:
        model.output_layer = ValueHead(model.config)
