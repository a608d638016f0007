"""Builds a sharded transformers model from a config.json, layer by layer: no rank ever holds more than one whole.

meta device:  AutoModelForCausalLM.from_config       shapes alone
each layer:   memory -> random values -> fully_shard
the rest:     embedding, head, norm, the same way
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoConfig, AutoModelForCausalLM

from hybrid_engine.backends.fsdp.internals import initialize_module
from hybrid_engine.backends.fsdp.sharding import shard_model
from hybrid_engine.config import FsdpConfig


def build_sharded_model(
    directory: Path, config: FsdpConfig, mesh: DeviceMesh, device: torch.device, dtype: str, seed: int
) -> torch.nn.Module:
    """A causal LM with the values that transformers would draw, the same on any number of ranks. Collective.

    Args:
        directory: with config.json.
        config: how it is sharded.
        mesh: see `mesh_of`.
        device: of this rank.
        dtype: of the parameters.
        seed: of their values; torch's generators are left as they were.

    It computes without dropout, in training too, as `build_model` of Megatron's side: the sampler has none.
    """
    hf_config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    # the other implementations leave out what they cannot do, without an error
    attention = "eager" if getattr(hf_config, "attn_logit_softcapping", None) else None
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config, dtype=getattr(torch, dtype), attn_implementation=attention)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        shard_model(model, config, mesh, lambda module: _fill(module, model, device))
    return model.eval()


@torch.no_grad()
def _fill(part: torch.nn.Module, model: torch.nn.Module, device: torch.device) -> None:
    """Give what of `part` has no memory yet some, and the values that the model draws for it."""
    made: dict[torch.Tensor, torch.Tensor] = {}  # parameters that two modules share stay shared
    for module in part.modules():
        bare = [item for item in _own_tensors(module) if item[1].is_meta]
        for name, tensor in bare:
            if tensor not in made:
                filled = torch.zeros_like(tensor, device=device)
                is_parameter = isinstance(tensor, torch.nn.Parameter)
                made[tensor] = torch.nn.Parameter(filled, tensor.requires_grad) if is_parameter else filled
            setattr(module, name, made[tensor])
        if bare:
            initialize_module(model, module)


def _own_tensors(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters and buffers of the module itself."""
    return [
        *module.named_parameters(recurse=False, remove_duplicate=False),
        *module.named_buffers(recurse=False, remove_duplicate=False),
    ]
