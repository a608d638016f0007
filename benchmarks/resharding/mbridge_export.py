"""mbridge: `export_weights`, tensor by tensor, into vLLM's `load_weights`, as verl runs it.

Real: mbridge's bridge with its own constructor, its collectives, joins and conversions; vLLM's loader. Two things
stand in for what a CPU does not have:

- The CUDA redirect: mbridge asks `torch.cuda` for the device of what it receives. Its modules see the CPU there, as
  megatron-core's do by `megatron_patches`; torch itself stays as it is.
- The names: mbridge knows Transformer Engine's layers. On a CPU the same parameters are in megatron-core's own layers
  under other names, and are called by Transformer Engine's from the start.

verl fills a bucket with exported tensors and hands it to a server process. Here each tensor goes straight into
`load_weights`, which is faster.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from transformers import AutoConfig

from benchmarks.resharding.loading import Export
from hybrid_engine.trainer.worker import ActorHybridWorker
from megatron_patches.cpu.cuda_names import torch_on_cpu

_EXPERT = re.compile(r"\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight$")


class MbridgeExport(Export):
    """Training weights to vLLM's parameters by mbridge 0.15.1."""

    def __init__(self, worker: ActorHybridWorker) -> None:
        super().__init__(worker)
        _redirect_cuda()
        config = AutoConfig.from_pretrained(worker.config.model)
        self._bridge = _bridge_class(config)(config, dtype=getattr(torch, worker.config.actor_config.params_dtype))

    def _weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        return self._bridge.export_weights(self._chunks)


def _bridge_class(config: Any) -> type:
    """mbridge's class for a model, reading the local layers' names as Transformer Engine's."""
    import mbridge  # noqa: F401  (registers its models)
    from mbridge.core.bridge import _MODEL_REGISTRY

    base = _MODEL_REGISTRY[config.model_type]
    has_experts = bool(getattr(config, "num_experts", 0))

    class OfLocalLayers(base):
        def _weight_name_mapping_mcore_local_to_global(self, model: torch.nn.Module, consider_ep: bool = True) -> Any:
            names = super()._weight_name_mapping_mcore_local_to_global(model, consider_ep=False)
            assert not consider_ep, "export_weights numbers experts itself"
            return {local: transformer_engine_name(name, has_experts) for local, name in names.items()}

    OfLocalLayers._DIRECT_MAPPING = dict(base._DIRECT_MAPPING)  # mbridge changes its class for tied embeddings
    return OfLocalLayers


def transformer_engine_name(name: str, has_experts: bool) -> str:
    """What a parameter of megatron-core's local layers is called in those of Transformer Engine."""
    name = name.replace(".input_layernorm.weight", ".self_attention.linear_qkv.layer_norm_weight")
    if not has_experts:
        name = name.replace(".pre_mlp_layernorm.weight", ".mlp.linear_fc1.layer_norm_weight")
    return _EXPERT.sub(r".experts.\2.weight\1", name)


def _redirect_cuda() -> None:
    """mbridge's modules see a `torch.cuda` that names the CPU; nobody else does."""
    from mbridge.core import bridge, util

    for module in (bridge, util):
        module.torch = torch_on_cpu(torch)
