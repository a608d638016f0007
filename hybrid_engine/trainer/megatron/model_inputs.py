"""Arguments of a Megatron model's forward pass, and the order of its tokens.

Attention inputs of the model, for rows of L tokens in a micro batch of b rows:

    attention                one sequence a row         several sequences a row
    megatron-core's          causal mask [1, 1, L, L]   mask [b, 1, L, L]: each sequence sees only
                                                        its tokens
    Transformer Engine's     none: it is causal         one row of b * L tokens (`thd`), and the
                                                        offsets at which sequences begin

With megatron-core's attention, rotary positions count along the whole row. Scores depend only on
differences of positions, so a sequence gets the same log-probabilities as alone in a row, up to
rounding. The `thd` inputs of Transformer Engine have **never run on a GPU yet**.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import parallel_state
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
from hybrid_engine.backends.training_side import Modules
from hybrid_engine.errors import BatchError
from hybrid_engine.trainer.batches.arrangement import Rows, begins_of


class ModelInputs:
    """Arguments of a model's forward pass.

    Args:
        chunks: of the model.
        num_parts: sequence parallel ranks, which have equal parts of a row.

    Attributes:
        no_packing: reason why rows of several sequences are unsupported; "" if they are supported.
    """

    def __init__(self, chunks: Modules, num_parts: int = 1) -> None:
        self._with_te = masks_by_itself(chunks)
        self._num_parts = num_parts
        reasons = _reasons_against_packing(chunks, with_te=self._with_te)
        self.no_packing = next(reasons, "")

    def shape_of(self, rows: Rows) -> tuple[int, int]:
        """Return the number and the length of the rows that the model computes for a micro batch.

        Raises BatchError if it cannot compute them.
        """
        if rows.sequence_ids is not None and self.no_packing:
            raise BatchError.of(
                "sequence_ids",
                f"rows have several sequences, but {self.no_packing}",
                "Put each sequence into its own row",
                code="packing-unsupported",
            )
        num_rows, length = rows.tokens.shape
        return (1, num_rows * length) if self._are_joined(rows) else (num_rows, length)

    def _are_joined(self, rows: Rows) -> bool:
        return self._with_te and rows.sequence_ids is not None

    def arguments(self, rows: Rows) -> dict[str, Any]:
        """Return the arguments of GPTModel.forward except labels, for any pipeline stage."""
        # Megatron divides by the mask's sum, which must not be 0
        mask = None if rows.mask is None else rows.mask.float().clamp_min(1e-8)
        arguments = {
            "input_ids": self.in_shape(rows, rows.tokens),
            "position_ids": self.in_shape(rows, rows.position_ids),
            "loss_mask": self.in_shape(rows, mask),
            "attention_mask": None,
        }
        if self._are_joined(rows):
            return {**arguments, "packed_seq_params": _packed_params(rows)}
        if not self._with_te:
            arguments["attention_mask"] = _attention_mask(rows)
        return arguments

    def in_shape(self, rows: Rows, values: torch.Tensor | None) -> torch.Tensor | None:
        """Return values [b, L, ...] of the rows' tokens in the shape of `shape_of`."""
        if values is None or not self._are_joined(rows):
            return values
        return values.reshape(1, -1, *values.shape[2:])

    def for_routers(self, rows: Rows, values: torch.Tensor) -> torch.Tensor:
        """Return values [b, L, ...] as this rank's routers have tokens: [L, b, ...], flattened."""
        shaped = self.in_shape(rows, values)
        assert shaped is not None
        # Without sequence parallelism there is one part, and every rank has it.
        parts = shaped.transpose(0, 1).chunk(self._num_parts)
        return parts[parallel_state.get_tensor_model_parallel_rank() % len(parts)].flatten(0, 1)


def _attention_mask(rows: Rows) -> torch.Tensor:
    """Return a mask [1 or b, 1, L, L], True where a token (dim 2) must not see another (dim 3)."""
    is_later = causal_mask(rows.tokens.shape[1], rows.tokens.device)
    ids = rows.sequence_ids
    if ids is None:
        return is_later
    is_of_other = ids[:, None, :, None] != ids[:, None, None, :]
    return is_later | is_of_other


def _packed_params(rows: Rows) -> PackedSeqParams:
    """Return the offsets of sequences in the joined rows; stretches of padding count as well."""
    assert rows.sequence_ids is not None
    # offsets in the row that joins all rows
    # Rows 1 1 2 0 and 1 1 1 0 begin at 0 2 3 4 7 and end at 8.
    begins = begins_of(rows.sequence_ids).flatten().nonzero().flatten()
    offsets = torch.cat([begins, begins.new_tensor([rows.tokens.numel()])]).int()
    longest = int(offsets.diff().max())
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=offsets,
        cu_seqlens_kv=offsets,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def _reasons_against_packing(chunks: Modules, *, with_te: bool) -> Iterator[str]:
    """Yield the reasons why a model cannot compute rows of several sequences."""
    for chunk in chunks:
        for module in chunk.modules():
            mixer = None
            if isinstance(module, TransformerLayer):
                mixer = getattr(module, "self_attention", None)
            if mixer is not None and not isinstance(mixer, (Attention, IdentityOp)):
                yield f"{type(mixer).__name__} mixes tokens of different sequences"
            kind = type(module)
            # layers of state space models, such as Mamba
            if kind.__module__.startswith("megatron.core.ssm") and kind.__name__.endswith("Layer"):
                yield f"{kind.__name__} mixes tokens of different sequences"
        depth = getattr(getattr(chunk, "config", None), "mtp_num_layers", None) or 0
        if depth > 1:
            # the mask of `Rows` leaves out only the last token of a sequence
            yield f"{depth} MTP layers would learn across the borders of sequences"
    for core in core_attentions(chunks):
        if with_te and is_of_transformer_engine(core):
            continue
        if with_te or not isinstance(core, DotProductAttention):
            yield f"{type(core).__name__} is not known to support a mask"
            continue
        softmax = softmax_of(core)
        if softmax.window_size is not None:
            yield "megatron-core's attention ignores masks in layers with a sliding window"
        if softmax.scaled_masked_softmax_fusion:
            yield "Megatron's fused softmax ignores masks (masked_softmax_fusion)"
