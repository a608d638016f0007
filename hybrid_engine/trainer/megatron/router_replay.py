"""Experts of a batch in place of those that a model's routers would select.

`routed_experts` [B, S, layers, k] of a batch has the experts that vLLM has computed each token
with, in every layer of the checkpoint. Near a tie, rounding decides which experts a router selects,
and log-probabilities of vLLM and of the trainer differ by more than rounding. With these experts,
gates are still the trainer's, and have gradients.

Layers are found by their number in the checkpoint, so any pipeline stages, virtual stages, dense
layers and no-op layers fit. MTP layers, which vLLM does not run, and tokens without experts keep
the router's own selection.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.utils import unwrap_model

from hybrid_engine.backends.megatron.internals import ReplayedChoices, replayed_choices
from hybrid_engine.backends.megatron.model_tensors import GlobalNames
from hybrid_engine.models.table import ModelTable
from hybrid_engine.trainer.batches.arrangement import Rows
from hybrid_engine.trainer.batches.batch_checks import Routing
from hybrid_engine.trainer.megatron.pipeline import ModelInputs


@dataclass(frozen=True)
class _RoutedLayer:
    """A layer with experts: its number in the checkpoint, and the choices of its router."""

    number: int
    choices: ReplayedChoices


class RouterReplayer:
    """Gives the routers of a rank's chunks the experts of each micro batch.

    Args:
        chunks: of the model.
        config: of the model.
        table: the model's name table.
        noop_layers: positions of layers that return their input.

    Attributes:
        routing: layers and experts of the whole model; None without experts.
        refusal: reason why its routers cannot take experts; "" if they can.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        config: TransformerConfig,
        table: ModelTable,
        noop_layers: Sequence[int],
    ) -> None:
        self.refusal = _refusal(config)
        self.routing: Routing | None = None
        self._sequence_parallel = config.sequence_parallel
        self._layers: dict[torch.nn.Module, list[_RoutedLayer]] = {}
        if self.refusal:
            return
        dims = table.dims
        self.routing = Routing(dims.num_layers, config.moe_router_topk, dims.num_experts)
        for model in unwrap_model(list(chunks)):
            numbers = GlobalNames(model, dims.num_layers, frozenset(noop_layers)).layers
            layers = []
            for number, layer in zip(numbers, model.decoder.layers, strict=True):
                router = getattr(getattr(layer, "mlp", None), "router", None)
                if isinstance(router, TopKRouter):
                    layers.append(_RoutedLayer(number, replayed_choices(router)))
            self._layers[model] = layers

    @contextmanager
    def replaying(self, chunk: torch.nn.Module, rows: Rows, inputs: ModelInputs) -> Iterator[None]:
        """Replay the experts of `rows`, if they have any, in the chunk's forward pass."""
        experts = inputs.in_shape(rows, rows.routed_experts)
        if experts is None:
            yield
            return
        # Megatron's hidden states are [L, b, hidden], and routers see them flattened.
        experts = experts.transpose(0, 1)
        if self._sequence_parallel:
            num_ranks = parallel_state.get_tensor_model_parallel_world_size()
            experts = experts.chunk(num_ranks)[parallel_state.get_tensor_model_parallel_rank()]
        layers = self._layers[unwrap_model(chunk)]
        for layer in layers:
            layer.choices.begin(experts[:, :, layer.number].flatten(0, 1).long())
        try:
            yield
        finally:
            for layer in layers:
                layer.choices.end()

    def clear(self) -> None:
        """Forget all experts; call when no backward pass can follow."""
        for layers in self._layers.values():
            for layer in layers:
                layer.choices.clear()


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
