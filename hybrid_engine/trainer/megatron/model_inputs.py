"""What Megatron's models get for rows: positions, and a mask or the lengths of packed sequences.

    attention                        rows of one sequence      rows of several
    megatron-core's own              causal mask [1,1,L,L]     mask [b,1,L,L]: each sequence sees its own tokens
    Transformer Engine's             none: it is causal        one row of b * L tokens (`thd`) and where sequences begin

With megatron-core's own attention rotary positions count along the row: scores depend on differences alone, so that a
sequence's log-probabilities are those of its own row up to rounding. What Transformer Engine gets has **never run on a
GPU yet**.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_layer import TransformerLayer

from hybrid_engine.backends.megatron.forward_probe import (
    causal_mask,
    core_attentions,
    is_of_transformer_engine,
    masks_by_itself,
)
from hybrid_engine.backends.megatron.internals import softmax_of
from hybrid_engine.errors import BatchError, Violation
from hybrid_engine.trainer.batches.arrangement import Rows
from hybrid_engine.trainer.batches.sequences import begins_of


class ModelInputs:
    """Makes the arguments of a model's forward pass.

    Args:
        chunks: the model's.

    Attributes:
        no_packing: why rows of several sequences cannot be computed; empty where they can.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        found = core_attentions(chunks)
        self._with_te = masks_by_itself(chunks)
        self.no_packing = next(filter(None, _packing_faults(chunks, found, with_te=self._with_te)), "")

    def shape_of(self, rows: Rows) -> tuple[int, int]:
        """How many rows the model computes for a micro batch, and their length. Raises BatchError where it cannot."""
        if rows.sequence_ids is not None and self.no_packing:
            problem = f"rows have several sequences, but {self.no_packing}"
            raise BatchError([Violation("sequence_ids", problem, "Give each a row of its own")])
        num_rows, length = rows.tokens.shape
        return (1, num_rows * length) if self._are_joined(rows) else (num_rows, length)

    def _are_joined(self, rows: Rows) -> bool:
        return self._with_te and rows.sequence_ids is not None

    def arguments(self, rows: Rows) -> dict[str, Any]:
        """Of GPTModel.forward but for labels, on any pipeline stage."""
        # Megatron divides by the mask's sum, which must not be 0
        mask = None if rows.mask is None else rows.mask.float().clamp_min(1e-8)
        tensors = {"input_ids": rows.tokens, "position_ids": rows.position_ids, "loss_mask": mask}
        arguments = {name: self.in_shape(rows, value) for name, value in tensors.items()}
        if self._are_joined(rows):
            return {**arguments, "attention_mask": None, "packed_seq_params": _packed_params(rows)}
        return {**arguments, "attention_mask": None if self._with_te else _hidden_tokens(rows)}

    def in_shape(self, rows: Rows, values: torch.Tensor | None) -> torch.Tensor | None:
        """Values [b, L] of the rows' tokens as `shape_of` says."""
        return values.reshape(1, -1) if values is not None and self._are_joined(rows) else values


def _hidden_tokens(rows: Rows) -> torch.Tensor:
    """[1 or b, 1, L, L], True where a token (dim 2) may not look (dim 3)."""
    length = rows.tokens.shape[1]
    future = causal_mask(length, rows.tokens.device)
    ids = rows.sequence_ids
    return future if ids is None else future | (ids[:, None, :, None] != ids[:, None, None, :])


def _packed_params(rows: Rows) -> PackedSeqParams:
    """Where sequences begin in the rows, one after another. Stretches of padding count as sequences."""
    assert rows.sequence_ids is not None
    begins = begins_of(rows.sequence_ids).flatten().nonzero().flatten()
    offsets = torch.cat([begins, begins.new_tensor([rows.tokens.numel()])]).int()
    longest = int(offsets.diff().max())
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=offsets, cu_seqlens_kv=offsets, max_seqlen_q=longest, max_seqlen_kv=longest
    )


def _packing_faults(
    chunks: Sequence[torch.nn.Module], attentions: Sequence[torch.nn.Module], *, with_te: bool
) -> Iterator[str]:
    """Why a model cannot compute rows of several sequences."""
    for chunk in chunks:
        for module in chunk.modules():
            mixer = getattr(module, "self_attention", None) if isinstance(module, TransformerLayer) else None
            if mixer is not None and not isinstance(mixer, (Attention, IdentityOp)):
                yield f"{type(mixer).__name__} mixes tokens of different sequences"
            if type(module).__module__.startswith("megatron.core.ssm") and type(module).__name__.endswith("Layer"):
                yield f"{type(module).__name__} mixes tokens of different sequences"
        depth = getattr(getattr(chunk, "config", None), "mtp_num_layers", None) or 0
        if depth > 1:
            yield f"{depth} MTP layers would learn across their borders"
    for core in attentions:
        if with_te and is_of_transformer_engine(core):
            continue
        if with_te or not isinstance(core, DotProductAttention):
            yield f"{type(core).__name__} is not known to take a mask"
            continue
        softmax = softmax_of(core)
        if softmax.window_size is not None:
            yield "megatron-core's own attention ignores masks where a layer has a sliding window"
        if softmax.scaled_masked_softmax_fusion:
            yield "Megatron's fused softmax ignores masks (masked_softmax_fusion)"
