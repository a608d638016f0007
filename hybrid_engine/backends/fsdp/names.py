"""Names of a transformers model's tensors: in its state dict, by transformers, and in a checkpoint.

    base_model.model.model.layers.0._orig_mod.self_attn.q_proj.base_layer.weight     the model's state dict
                     model.layers.0.self_attn.q_proj.weight                          transformers' name

PEFT wraps the model and the layers that it adapts, `torch.compile` and activation checkpointing wrap modules.

    state dict of meta tensors  --->  transformers' conversion to a checkpoint  --->  views of those tensors
                                                                                       |
                                      name on disk -> (parameter, offset, shape, strides)

transformers packs some tensors (the experts of a layer in one of 3 dims) and renames others. What it does to save a
checkpoint says where each tensor of one lies, for every model it knows; there is no table of ours to fall behind.
A view on the meta device keeps offset and strides, and a copy made contiguous is taken for the view that it copies.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hybrid_engine.backends.fsdp.internals import TorchDispatchMode, revert_weight_conversion
from hybrid_engine.errors import ConfigError, ModelError, ParameterMismatchError, Violation, clipped
from hybrid_engine.layouts.sharded import Packed, PackedModel
from hybrid_engine.models.table import ModelTable
from hybrid_engine.ranks.torch_internals import storage_id
from hybrid_engine.records.regions import StridedView

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


def canonical_views(
    model: torch.nn.Module, tensors: Mapping[str, torch.Tensor], table: ModelTable
) -> Mapping[str, Packed]:
    """Canonical name -> where it lies, in the order of a checkpoint.

    Args:
        model: a transformers model; its conversion is used, its memory is not touched.
        tensors: state dict, of whole (global) shapes.
        table: says which tensors a checkpoint has.

    Raises ParameterMismatchError with one line for every tensor that a checkpoint of this config has and the model has
    not, or the other way round, and for every one that transformers computes from several parameters.
    """
    whole = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in tensors.items()}
    parameters = {storage_id(tensor.untyped_storage()): name for name, tensor in whole.items()}
    with torch.no_grad(), _CopiesAreViews():
        saved = revert_weight_conversion(model, dict(whole))
    found: dict[str, Packed] = {}
    findings: list[str] = []
    repeated = _repeats(tensors, table)
    for name, tensor in saved.items():
        shape, parameter = table.shapes.get(name), parameters.get(storage_id(tensor.untyped_storage()))
        if shape is None:
            if name not in repeated:
                findings.append(f"{name}: no tensor of a checkpoint of this config")
        elif parameter is None:
            findings.append(f"{name}: transformers computes it from parameters, so no part of one is it")
        elif tuple(tensor.shape) != shape:
            findings.append(f"{name}: shape {tuple(tensor.shape)} in the model, {shape} in a checkpoint of this config")
        else:
            found[name] = Packed(parameter, StridedView(int(tensor.storage_offset()), shape, tuple(tensor.stride())))
    missing = [name for name in table.shapes if name not in saved and table.is_served(name)]
    findings += [f"{name}: the model has no such tensor" for name in missing]
    if findings:
        raise ParameterMismatchError(findings)
    return {name: found[name] for name in table.shapes if name in found}


def packed_model(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor], table: ModelTable) -> PackedModel:
    """The same with the parameters' own shapes; arguments and errors are those of `canonical_views`."""
    views = canonical_views(model, tensors, table)
    named = {packed.parameter for packed in views.values()}
    once: dict[int, str] = {}
    for name in sorted(tensors, key=lambda name: name not in named):  # of tied ones the name that a checkpoint has
        once.setdefault(id(tensors[name]), name)
    return PackedModel(
        views,
        {name: tuple(tensors[name].shape) for name in once.values()},
        {name for name in once.values() if not isinstance(tensors[name], torch.nn.Parameter)},
    )


def _repeats(tensors: Mapping[str, torch.Tensor], table: ModelTable) -> set[str]:
    """Names under which a state dict lists a tensor again that has another, canonical name: tied embeddings."""
    canonical = {id(tensor) for name, tensor in tensors.items() if name in table.shapes}
    return {name for name, tensor in tensors.items() if id(tensor) in canonical} | set(table.copies)


class _CopiesAreViews(TorchDispatchMode):
    """A copy of a tensor without memory is that tensor: `contiguous()` would lose where the elements come from."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.clone.default and args[0].is_meta:
            return torch.ops.aten.alias.default(args[0])
        return func(*args, **(kwargs or {}))


def packed_model_of(directory: Path, table: ModelTable, key: str = "model") -> PackedModel:
    """Where the tensors of a checkpoint lie in the model of a config.json.

    Raises ConfigError under `key` for a config that transformers builds no model from, or another one than the table's.
    """
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        return packed_model(model, model.state_dict(keep_vars=True), table)
    except (AttributeError, KeyError, TypeError, ValueError, OSError) as error:
        problem = f"transformers builds no model from its config.json: {type(error).__name__}: {error}"
        remedy = "Check it by AutoModelForCausalLM.from_config, or plan for Megatron"
    except ParameterMismatchError as error:
        problem, remedy = f"transformers builds another model from it: {error}", "Check its config.json"
    raise ConfigError([Violation(key, clipped(problem, 1000), remedy)])
