"""transformers' own names of a model's tensors, whatever its users put around the model and its modules.

    base_model.model.model.layers.0._orig_mod.self_attn.q_proj.base_layer.weight     the model's state dict
                     model.layers.0.self_attn.q_proj.weight                          transformers' name

PEFT wraps the model and the layers that it adapts, `torch.compile` and activation checkpointing wrap modules.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from hybrid_engine.errors import ModelError

_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})
"""What `torch.compile` and `checkpoint_wrapper` call the module that they wrap."""


@dataclass(frozen=True, slots=True)
class Lora:
    """One adapter on one weight, W + scaling * B A; names are those of the state dict.

    Attributes:
        weight: W.
        a: A [rank, in].
        b: B [out, rank].
        scaling: whatever PEFT derived it from: alpha and rank, rank-stabilised or not, by pattern or by hand.
        transposed: W is [in, out], as those of embeddings are.
    """

    weight: str
    a: str
    b: str
    scaling: float
    transposed: bool


@dataclass(frozen=True)
class WrappedNames:
    """
    Attributes:
        model: the transformers model inside.
        weights: transformers' name -> name in the state dict of what computes. Neither adapters are there nor the
            originals of modules that PEFT trains a copy of (modules_to_save).
        loras: the active adapters.
    """

    model: torch.nn.Module
    weights: Mapping[str, str]
    loras: tuple[Lora, ...]


def transformers_model(model: torch.nn.Module) -> torch.nn.Module:
    """The transformers model in what may be around it; without one, the model itself."""
    return next((module for module in model.modules() if isinstance(module, PreTrainedModel)), model)


def wrapped_names(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> WrappedNames:
    """Find out which tensor of the state dict `tensors` is which of transformers' model.

    Raises ModelError with a line for everything of PEFT that is not supported.
    """
    inner = transformers_model(model)
    around = next(name for name, module in model.named_modules() if module is inner)
    state_names = {plain_name(name).removeprefix(f"{plain_name(around)}." if around else ""): name for name in tensors}
    layers = {plain_name(name): module for name, module in inner.named_modules()}
    peft = _PeftLayers(layers, state_names, tensors) if "peft" in sys.modules else None
    if peft is None:
        return WrappedNames(inner, state_names, ())
    if peft.findings:
        raise ModelError("what PEFT added to the model is not supported:\n  " + "\n  ".join(peft.findings))
    weights = {name: state_names[plain] for plain in state_names if (name := peft.name_of(plain)) is not None}
    return WrappedNames(inner, weights, tuple(peft.loras))


def plain_name(name: str) -> str:
    """A name without what `torch.compile` and checkpointing put into it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


class _PeftLayers:
    """What PEFT put in place of modules.

    Args:
        layers: plain name -> module.
        state_names: plain name of a tensor -> name in the state dict.
        tensors: the state dict.

    Attributes:
        loras: of all active adapters.
        findings: a line for everything that is not supported.
    """

    def __init__(
        self, layers: Mapping[str, torch.nn.Module], state_names: Mapping[str, str], tensors: Mapping[str, torch.Tensor]
    ) -> None:
        from peft.tuners.lora import LoraLayer
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper

        self._state_names, self._tensors = state_names, tensors
        self._computes: dict[str, str] = {}  # plain name of a wrapper -> of its part that computes, below it
        self.loras: list[Lora] = []
        self.findings: list[str] = []
        for name, layer in layers.items():
            if isinstance(layer, LoraLayer):
                self._computes[name] = "base_layer"
                self._add_loras(name, layer)
            elif isinstance(layer, ModulesToSaveWrapper):
                active = [] if layer.disable_adapters else layer.active_adapters
                self._computes[name] = f"modules_to_save.{active[0]}" if active else "original_module"
            elif isinstance(layer, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
                self.findings.append(f"{name}: {type(layer).__name__}; of PEFT's methods use LoRA")

    def name_of(self, plain: str) -> str | None:
        """Of a tensor without PEFT's parts; None for one that does not compute, or that is an adapter's."""
        parts, kept = plain.split("."), 0
        while kept < len(parts):
            kept += 1
            below = self._computes.get(".".join(parts[:kept]))
            if below is not None:
                computes = below.split(".")
                if parts[kept : kept + len(computes)] != computes:
                    return None
                del parts[kept : kept + len(computes)]
        return ".".join(parts)

    def _add_loras(self, name: str, layer: Any) -> None:
        if layer.merged_adapters:
            merged = ", ".join(layer.merged_adapters)
            self.findings.append(f"{name}: {merged} is merged into its weight; call unmerge_adapter() first")
        active = [] if layer.disable_adapters else layer.active_adapters
        understood, num_findings = set(), len(self.findings)
        for adapter in active:
            for matrices in _MATRICES:
                parts = [f"{name}.{part.format(adapter)}" for part in ("base_layer.weight", *matrices)]
                if parts[1] in self._state_names:
                    problem = _problem(layer, adapter) or self._add(layer, parts, layer.scaling[adapter])
                    self.findings += [f"{name}, adapter {adapter}: {problem}"] if problem else []
                    understood.update(parts[1:])
        others = [each for each in _added_tensors(layer, active) if f"{name}.{each}" not in understood]
        if others and num_findings == len(self.findings):
            kind = f"{type(layer).__name__} also computes with {', '.join(others)}"
            self.findings.append(f"{name}: {kind}, which a switch does not know; of PEFT's methods use LoRA")

    def _add(self, layer: Any, parts: list[str], scaling: float) -> str | None:
        """`parts`: plain names of W, A and B. Returns why they cannot be."""
        if parts[0] not in self._state_names:
            return f"on a {type(layer.get_base_layer()).__name__}; use linear layers and embeddings"
        weight, a, b = (self._state_names[name] for name in parts)
        shape, product = tuple(self._tensors[weight].shape), (self._tensors[b].shape[0], self._tensors[a].shape[1])
        transposed = "lora_embedding_A" in a or bool(layer.fan_in_fan_out)
        self.loras.append(Lora(weight, a, b, float(scaling), transposed))
        if shape != (product[::-1] if transposed else product):
            return f"its weight has shape {shape}, B A {product}; use linear layers and embeddings"
        tied = [name for name, tensor in self._tensors.items() if tensor is self._tensors[weight] and name != weight]
        return f"its weight is also {tied[0]}, which would be without; adapt other modules" if tied else None


_MATRICES = ("lora_A.{}.weight", "lora_B.{}.weight"), ("lora_embedding_A.{}", "lora_embedding_B.{}")
"""Below a layer with LoRA, by adapter: A and B of a linear layer, and of an embedding."""


def _added_tensors(layer: Any, active: Sequence[str]) -> list[str]:
    """All parameters and buffers that PEFT added to a layer, but for those of adapters that do not compute now."""
    idle = layer.scaling.keys() - set(active)
    names = [plain_name(name) for name, _ in (*layer.named_parameters(), *layer.named_buffers())] if active else []
    return [name for name in names if not name.startswith("base_layer.") and idle.isdisjoint(name.split(".")[1:])]


def _problem(layer: Any, adapter: str) -> str | None:
    """Why W + scaling * B A is not what a layer computes with an adapter."""
    if (variant := layer.lora_variant.get(adapter)) is not None:
        return f"{type(variant).__name__}, which is more than W + scaling * B A; train plain LoRA (use_dora=False)"
    if layer.lora_bias.get(adapter):
        return "its B has a bias; set lora_bias=False"
    if hasattr(layer, "parameter_name"):
        return "it changes a parameter, not a layer; use target_modules in place of target_parameters"
    return None
