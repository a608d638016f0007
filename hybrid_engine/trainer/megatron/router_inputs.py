"""Inputs of a model's routers beside hidden states: experts of a batch, and masks of padding.

`routed_experts` [B, S, layers, k] of a batch has the experts that vLLM has computed each token
with, in every layer of the checkpoint. Near a tie, rounding decides which experts a router selects,
and log-probabilities of vLLM and of the trainer differ by more than rounding. With these experts,
gates are still the trainer's, and have gradients.

Layers are found by their number in the checkpoint, so any pipeline stages, virtual stages, dense
layers and no-op layers fit. MTP layers, which vLLM does not run, and tokens without experts keep
the router's own selection.

Padding is not load of experts, so routers leave it out of the counts for their biases and of
auxiliary losses. Megatron's models also take a mask as an argument, but hand it on wrongly: whole
to later pipeline stages with sequence parallelism and to those of HybridModel, and not at all
(0.16) or rolled past the last token to MTP layers.
"""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from itertools import chain

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.utils import unwrap_model

from hybrid_engine.backends.megatron.internals import (
    PassInput,
    chooser_of,
    given,
    padding_mask_of,
)
from hybrid_engine.backends.megatron.model_tensors import GlobalNames, ModelTensors
from hybrid_engine.trainer.batches.arrangement import Rows
from hybrid_engine.trainer.batches.batch_checks import Routing
from hybrid_engine.trainer.megatron.model_inputs import ModelInputs


class RouterInputs:
    """Gives the routers of a rank's chunks the experts and the padding of each micro batch.

    Args:
        model: with all chunks of this rank.
        config: of the model.
        replays: routers take the experts of a batch, if they can; otherwise they ignore them.

    Attributes:
        routing: layers and experts of the whole model; None if the routers take none.
        refusal: reason why its routers cannot take experts; "" if they can, or ignore them.
    """

    def __init__(self, model: ModelTensors, config: TransformerConfig, *, replays: bool) -> None:
        dims = model.table.dims
        self.refusal = _refusal(config) if replays else ""
        self.routing: Routing | None = None
        if replays and not self.refusal:
            self.routing = Routing(dims.num_layers, config.moe_router_topk, dims.num_experts)
        # the routers' inputs -> number of further tokens that a layer reads
        self._masks: dict[torch.nn.Module, dict[PassInput, int]] = {}
        # the routers' inputs -> number of the layer in the checkpoint
        self._choices: dict[torch.nn.Module, dict[PassInput, int]] = {}
        for chunk in unwrap_model(model.chunks):
            self._masks[chunk] = {
                padding_mask_of(module): _num_further_tokens(name)
                for name, module in chunk.named_modules()
                if isinstance(module, TopKRouter)
            }
            choices = self._choices[chunk] = {}
            if self.routing is not None:
                numbers = GlobalNames(chunk, dims.num_layers, model.noop_layers).layers
                for number, layer in zip(numbers, chunk.decoder.layers, strict=True):
                    router = getattr(getattr(layer, "mlp", None), "router", None)
                    if isinstance(router, TopKRouter):
                        choices[chooser_of(router).replayed] = number

    def given(
        self,
        chunk: torch.nn.Module,
        rows: Rows,
        inputs: ModelInputs,
    ) -> AbstractContextManager[None]:
        """Give a chunk's routers the inputs of `rows` in the forward pass of the block."""
        tensors = {}
        if torch.is_grad_enabled():
            for place, num_further in self._masks[chunk].items():
                is_padding = ~rows.has_tokens_after(num_further)
                tensors[place] = inputs.for_routers(rows, is_padding)
        if rows.routed_experts is not None:
            experts = inputs.for_routers(rows, rows.routed_experts)
            for place, number in self._choices[chunk].items():
                tensors[place] = experts[:, number].long()
        return given(tensors)

    def clear(self) -> None:
        """Forget all inputs; call when no backward pass can follow."""
        for place in chain(*self._masks.values(), *self._choices.values()):
            place.clear()


def _num_further_tokens(router: str) -> int:
    """Return how many further tokens of a sequence a router's layer reads: MTP layers read some."""
    mtp_layer = re.match(r"mtp\.layers\.(\d+)", router)
    return int(mtp_layer[1]) + 1 if mtp_layer else 0


def _refusal(config: TransformerConfig) -> str:
    if not config.num_moe_experts:
        return "the model has no experts"
    if config.moe_router_fusion:
        return "Transformer Engine's fused router (moe_router_fusion) selects experts itself"
    kind = config.moe_router_load_balancing_type
    kinds = kind if isinstance(kind, list) else [kind]
    for name in ("sinkhorn", "quantile_balancing"):
        if name in kinds:
            return f"routers with moe_router_load_balancing_type {name} take no experts"
    return ""
