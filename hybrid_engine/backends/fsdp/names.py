"""Names of a transformers model's tensors: in its state dict, in transformers, and in a checkpoint.

    base_model.model.model.layers.0._orig_mod.self_attn.q_proj.base_layer.weight   state dict
                     model.layers.0.self_attn.q_proj.weight                        transformers

PEFT wraps the model and the layers that it adapts. `torch.compile` and activation checkpointing
wrap modules.

    state dict of meta tensors  ->  transformers' conversion to a checkpoint  ->  views of them
                                                                                      |
                                      name on disk -> (parameter, offset, shape, strides)

transformers packs some tensors (the experts of a layer in one tensor of 3 dims) and renames others.
Its conversion for saving a checkpoint shows the location of each tensor, for every model that
transformers supports; a table here would become outdated. A view on the meta device keeps offset
and strides. A copy that only makes a view contiguous is replaced by the view.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from transformers import AutoConfig, PreTrainedModel

from hybrid_engine.backends.fsdp.internals import revert_weight_conversion
from hybrid_engine.config.keys import ALL_LINEAR, LoraConfig
from hybrid_engine.errors import (
    ConfigError,
    ModelError,
    ParameterMismatchError,
    clipped,
)
from hybrid_engine.files.hub import HubSnapshot
from hybrid_engine.layouts.sharded import Packed, PackedModel
from hybrid_engine.models.derived import meta_copy_of, meta_model, without_repetitions
from hybrid_engine.models.families import architecture_of
from hybrid_engine.models.table import Head, ModelTable
from hybrid_engine.ranks.torch_internals import Tensors, TorchDispatchMode, storage_id
from hybrid_engine.records.regions import StridedView

_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})
"""Attributes in which `torch.compile` and `checkpoint_wrapper` store the module that they wrap."""

_LORA_MATRICES = (
    ("lora_A.{}.weight", "lora_B.{}.weight"),
    ("lora_embedding_A.{}", "lora_embedding_B.{}"),
)
"""Names of A and B below a layer with LoRA, by adapter: of a linear layer, and of an embedding."""


@dataclass(frozen=True, slots=True)
class Lora:
    """One adapter on one weight, W + scaling * B A; names are those of the state dict.

    Attributes:
        weight: W [out, in], or of E experts [E, out, in].
        a: A [rank, in]; of experts [E * rank, in], expert by expert.
        b: B [out, rank]; of experts [out, rank * E], in which the expert changes fastest.
        scaling: the factor that PEFT uses. It is read rather than derived, because alpha and rank,
            rank stabilization, patterns and the user can all change it.
        transposed: W is [in, out], as for embeddings, or [E, in, out].
    """

    weight: str
    a: str
    b: str
    scaling: float
    transposed: bool


@dataclass(frozen=True)
class WrappedNames:
    """Names of the tensors with which a wrapped model computes.

    Attributes:
        model: the transformers model inside the wrappers.
        weights: transformers' name -> name in the state dict. Adapters are left out, and so are the
            originals of modules of which PEFT trains a copy (modules_to_save).
        loras: the active adapters.
    """

    model: torch.nn.Module
    weights: Mapping[str, str]
    loras: tuple[Lora, ...]


def transformers_model(model: torch.nn.Module) -> torch.nn.Module:
    """Return the transformers model inside wrappers, or `model` itself if there is none."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            return module
    return model


def wrapped_names(model: torch.nn.Module, tensors: Tensors) -> WrappedNames:
    """Match the tensors of a model's state dict with those of the transformers model inside it.

    Args:
        model: a transformers model, perhaps inside wrappers.
        tensors: state dict of `model`.

    Raises:
        ModelError: listing everything that PEFT added and that is not supported.
    """
    inner = transformers_model(model)
    # PEFT puts the transformers model at base_model.model.
    path = next(name for name, module in model.named_modules() if module is inner)
    prefix = f"{plain_name(path)}." if path else ""
    state_names = {plain_name(name).removeprefix(prefix): name for name in tensors}
    if "peft" not in sys.modules:
        # PEFT is optional, and without it a model has no adapters.
        return WrappedNames(inner, state_names, ())
    layers = {plain_name(name): module for name, module in inner.named_modules()}
    peft = _PeftLayers(layers, state_names, tensors)
    if peft.problems:
        listed = "\n  ".join(peft.problems)
        raise ModelError(
            f"what PEFT added to the model is not supported:\n  {listed}",
            code="unsupported-adapters",
        )
    weights = {}
    for plain, state_name in state_names.items():
        if (name := peft.transformers_name(plain)) is not None:
            weights[name] = state_name
    return WrappedNames(inner, weights, tuple(peft.loras))


def plain_name(name: str) -> str:
    """Return `name` without the parts that `torch.compile` and checkpointing insert."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def computing_modules(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return plain name -> module; of a layer of PEFT, the layer inside it, which computes."""
    modules = {}
    for name, module in model.named_modules():
        # PEFT nests wrappers if several parameters of a module have adapters.
        while isinstance(base := getattr(module, "base_layer", None), torch.nn.Module):
            module = base
        modules[plain_name(name)] = module
    return modules


class _PeftLayers:
    """Modules that PEFT put in place of others.

    Args:
        layers: plain name -> module.
        state_names: plain name of a tensor -> name in the state dict.
        tensors: the state dict.

    Attributes:
        loras: all active adapters.
        problems: a line for everything that is not supported.
    """

    def __init__(
        self,
        layers: Mapping[str, torch.nn.Module],
        state_names: Mapping[str, str],
        tensors: Tensors,
    ) -> None:
        from peft.tuners.lora import LoraLayer
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper

        self._state_names = state_names
        self._tensors = tensors
        # Plain name of a wrapper -> path below it of the module that computes.
        self._computing: dict[str, str] = {}
        self.loras: list[Lora] = []
        self.problems: list[str] = []
        for name, layer in layers.items():
            if isinstance(layer, LoraLayer):
                # PEFT nests the wrappers of several parameters of one module.
                depth = 1
                while isinstance(layer := layer.base_layer, LoraLayer):
                    depth += 1
                self._computing[name] = ".".join(["base_layer"] * depth)
                self._add_loras(name, layers[name])
            elif isinstance(layer, ModulesToSaveWrapper):
                active = _active_adapters(layer)
                path = f"modules_to_save.{active[0]}" if active else "original_module"
                self._computing[name] = path
            elif isinstance(layer, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
                self.problems.append(f"{name}: {type(layer).__name__}; of PEFT's methods use LoRA")

    def transformers_name(self, plain: str) -> str | None:
        """Return a tensor's name without the parts that PEFT inserts.

        None: it belongs to an adapter, or to a module that does not compute now.
        """
        parts = plain.split(".")
        depth = 0
        # Example: q_proj.base_layer.weight. The prefix "q_proj" is a wrapper that computes with
        # base_layer; removing that part leaves q_proj.weight. q_proj.lora_A.default.weight has
        # another part there, so it is an adapter's. Wrappers may be nested, hence the loop.
        while depth < len(parts):
            depth += 1
            path = self._computing.get(".".join(parts[:depth]))
            if path is None:
                continue
            end = depth + path.count(".") + 1
            if ".".join(parts[depth:end]) != path:
                return None
            del parts[depth:end]
        return ".".join(parts)

    def _add_loras(self, name: str, layer: Any) -> None:
        """Add the active adapters of a layer, and the reasons why they are not supported."""
        if layer.merged_adapters:
            merged = ", ".join(layer.merged_adapters)
            self.problems.append(
                f"{name}: {merged} is merged into its weight; call unmerge_adapter() first"
            )
        active = _active_adapters(layer)
        num_problems = len(self.problems)
        supported: set[str] = set()
        for adapter in active:
            for template_a, template_b in _LORA_MATRICES:
                a = f"{name}.{template_a.format(adapter)}"
                b = f"{name}.{template_b.format(adapter)}"
                if a not in self._state_names:
                    continue
                supported.update((a, b))
                problem = _lora_problem(layer, adapter)
                if problem is None:
                    # PEFT's target_parameters adapt another parameter.
                    parameter = getattr(layer, "parameter_name", "weight")
                    weight = f"{name}.{self._computing[name]}.{parameter}"
                    problem = self._add_lora(layer, weight, a, b, layer.scaling[adapter])
                if problem is not None:
                    self.problems.append(f"{name}, adapter {adapter}: {problem}")
        added = _added_tensors(layer, active)
        others = [tensor for tensor in added if f"{name}.{tensor}" not in supported]
        # Further tensors follow from a problem that is listed already, such as DoRA's magnitude.
        if others and len(self.problems) == num_problems:
            self.problems.append(
                f"{name}: {type(layer).__name__} also computes with {', '.join(others)}, which a "
                "switch does not know; of PEFT's methods use LoRA"
            )

    def _add_lora(
        self,
        layer: Any,
        plain_weight: str,
        plain_a: str,
        plain_b: str,
        scaling: float,
    ) -> str | None:
        """Add an adapter, and return the reason why it is not supported, if any.

        Args:
            layer: the layer with the adapter.
            plain_weight: plain name of W.
            plain_a: plain name of A.
            plain_b: plain name of B.
            scaling: factor of B A.
        """
        if plain_weight not in self._state_names:
            kind = type(layer.get_base_layer()).__name__
            return f"on a {kind}; use linear layers and embeddings"
        weight = self._state_names[plain_weight]
        a = self._state_names[plain_a]
        b = self._state_names[plain_b]
        shape = tuple(self._tensors[weight].shape)
        # One parameter may hold several experts.
        experts = shape[:-2] if getattr(layer, "num_experts", 1) > 1 else ()
        # fan_in_fan_out: a Conv1D of transformers, which stores its weight transposed.
        transposed = "lora_embedding_A" in a or bool(layer.fan_in_fan_out)
        if experts:
            # transformers' mark of experts that are stored transposed; PEFT reads it too.
            transposed = bool(getattr(layer.get_base_layer(), "is_transposed", False))
        self.loras.append(Lora(weight, a, b, float(scaling), transposed))
        product = (self._tensors[b].shape[0], self._tensors[a].shape[1])
        # Convolutions have other shapes.
        if shape != (*experts, *(product[::-1] if transposed else product)):
            return f"its weight has shape {shape}, B A {product}; use linear layers and embeddings"
        for name, tensor in self._tensors.items():
            if tensor is self._tensors[weight] and name != weight:
                return (
                    f"its weight is also {name}, which would be left without the adapter; adapt "
                    "other modules"
                )
        return None


def _active_adapters(layer: Any) -> Sequence[str]:
    return [] if layer.disable_adapters else layer.active_adapters


def _added_tensors(layer: Any, active: Sequence[str]) -> list[str]:
    """Return the names of parameters and buffers that PEFT added to a layer and that compute now.

    Names are plain, and relative to the layer.
    """
    if not active:
        return []
    # `scaling` has an entry for each adapter of the layer, active or not.
    idle = layer.scaling.keys() - set(active)
    names = []
    for name, _ in (*layer.named_parameters(), *layer.named_buffers()):
        plain = plain_name(name)
        parts = plain.split(".")
        if not plain.startswith("base_layer.") and idle.isdisjoint(parts[1:]):
            names.append(plain)
    return names


def _lora_problem(layer: Any, adapter: str) -> str | None:
    """Return the reason why a layer does not compute W + scaling * B A with an adapter, or None."""
    if (variant := layer.lora_variant.get(adapter)) is not None:
        kind = type(variant).__name__
        return f"{kind} is more than W + scaling * B A; train plain LoRA (use_dora=False)"
    if layer.lora_bias.get(adapter):
        return "its B has a bias; set lora_bias=False"
    return None


def canonical_views(
    model: torch.nn.Module,
    tensors: Tensors,
    table: ModelTable,
) -> Mapping[str, Packed]:
    """Return the location of each canonical tensor, in the order of a checkpoint.

    Args:
        model: a transformers model. Only its conversion is used; its memory is not accessed.
        tensors: state dict, of whole (global) shapes.
        table: lists the tensors of a checkpoint.

    Raises:
        ParameterMismatchError: listing every tensor that only a checkpoint of this config or only
            the model has, and every tensor that transformers computes from several parameters.
    """
    # Views on the meta device share the storage of their base, so a storage identifies a parameter.
    on_meta = {}
    parameters = {}
    for name, tensor in without_repetitions(tensors).items():
        empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        on_meta[name] = empty
        parameters[storage_id(empty.untyped_storage())] = name
    converter = model
    if isinstance(model, FSDPModule) and getattr(model, "_weight_conversions", None) is None:
        # transformers finds some conversions by the class's name, which `fully_shard` has changed.
        converter = meta_copy_of(model)
    with torch.no_grad(), _CopiesAreViews():
        # A copy of the dict: `on_meta` keeps the storages alive, so that no id is used twice.
        saved = revert_weight_conversion(converter, dict(on_meta))
    views: dict[str, Packed] = {}
    findings: list[str] = []
    # Names by which a state dict repeats a tensor with a canonical name (tied weights).
    canonical = {id(tensor) for name, tensor in tensors.items() if name in table.shapes}
    repeated = {name for name, tensor in tensors.items() if id(tensor) in canonical}
    repeated |= set(table.copies)
    for name, tensor in saved.items():
        shape = table.shapes.get(name)
        parameter = parameters.get(storage_id(tensor.untyped_storage()))
        if shape is None:
            if name not in repeated:
                findings.append(f"{name}: not in a checkpoint of this config")
        elif parameter is None:
            # The conversion allocated this storage, so the values are no longer in a parameter.
            findings.append(
                f"{name}: transformers computes it from parameters, so it is not a view of one"
            )
        elif tuple(tensor.shape) != shape:
            findings.append(
                f"{name}: shape {tuple(tensor.shape)} in the model, {shape} in a checkpoint of "
                "this config"
            )
        else:
            view = StridedView(int(tensor.storage_offset()), shape, tuple(tensor.stride()))
            views[name] = Packed(parameter, view)
    for name in table.shapes:
        if name not in saved and table.is_served(name):
            findings.append(f"{name}: not in the model")
    if findings:
        raise ParameterMismatchError(findings)
    return {name: views[name] for name in table.shapes if name in views}


def packed_model(model: torch.nn.Module, tensors: Tensors, table: ModelTable) -> PackedModel:
    """Return the location of each canonical tensor with the shapes of the parameters.

    Arguments and errors are those of `canonical_views`.
    """
    views = canonical_views(model, tensors, table)
    viewed = {packed.parameter for packed in views.values()}
    # Of tied tensors keep the name that a checkpoint has.
    names_by_id: dict[int, str] = {}
    # False sorts before True: names with a view come first, and the first name of a tensor stays.
    for name in sorted(tensors, key=lambda name: name not in viewed):
        names_by_id.setdefault(id(tensors[name]), name)
    shapes = {name: tuple(tensors[name].shape) for name in names_by_id.values()}
    buffers = {name for name in shapes if not isinstance(tensors[name], torch.nn.Parameter)}
    return PackedModel(views, shapes, buffers)


class _CopiesAreViews(TorchDispatchMode):
    """Replaces each copy of a meta tensor by the tensor itself.

    A copy, as by `contiguous()`, would lose the location of the elements.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.clone.default and args[0].is_meta:
            return torch.ops.aten.alias.default(args[0])
        return func(*args, **(kwargs or {}))


def packed_model_of(directory: Path, table: ModelTable) -> PackedModel:
    """Return the location of a checkpoint's tensors in the model of a config.json.

    Args:
        directory: directory with the config.json.
        table: lists the tensors of a checkpoint.

    Raises:
        ConfigError: transformers builds no model from the config, or one that does not match the
            table.
    """
    model = model_of_config(directory, table.head)
    try:
        return packed_model(model, model.state_dict(keep_vars=True), table)
    except (ParameterMismatchError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError.of(
            "model",
            clipped(f"transformers builds another model from it: {error}", 1000),
            "Check its config.json",
            code="builds-another-model",
        ) from error


def model_of_config(
    directory: Path,
    head: Head = "vocabulary",
    dtype: torch.dtype | None = None,
) -> Any:
    """Build the model that a config.json describes, on the meta device.

    Args:
        directory: directory with the config.json. Nothing is downloaded, and no code from the
            directory is run.
        head: output of the model; see `ModelTable`.
        dtype: dtype of the parameters; None: that of the config.

    Raises:
        ConfigError: transformers builds no model from the config.
    """
    options = {} if dtype is None else {"dtype": dtype}
    try:
        config = AutoConfig.from_pretrained(
            directory,
            local_files_only=True,
            trust_remote_code=False,
        )
        model = meta_model(config, architecture_of(config.architectures), **options)
        if head == "value":
            _replace_head(model)
        return model
    except Exception as error:
        # Of any type: KeyError for an unknown name, AssertionError for an invalid size.
        cause = f"{type(error).__name__}: {error}"
        raise ConfigError.of(
            "model",
            clipped(f"transformers builds no model from its config.json: {cause}", 1000),
            "Compare it with the published one",
            code="builds-no-model",
        ) from error


def with_adapters(model: Any, lora: LoraConfig, directory: Path) -> Any:
    """Return a model of PEFT around a transformers model, whose adapters have no memory yet."""
    import peft

    # PEFT names it in adapter_config.json.
    snapshot = HubSnapshot.at(directory)
    model.name_or_path = str(directory) if snapshot is None else snapshot.repo_id
    is_all = ALL_LINEAR in lora.target_modules
    settings = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=ALL_LINEAR if is_all else [*lora.target_modules],
        task_type="CAUSAL_LM",
    )
    return peft.get_peft_model(model, settings, low_cpu_mem_usage=True)


def _replace_head(model: Any) -> None:
    """Let a causal LM return one value [b, L] per token, of its last hidden states.

    Scales and soft caps, which models apply to logits, are left out.
    """
    head = model.get_output_embeddings()
    path = next(name for name, module in model.named_modules() if module is head)
    parent, _, name = path.rpartition(".")
    delattr(model.get_submodule(parent), name)
    weight = head.weight
    model.score = torch.nn.Linear(weight.shape[1], 1, False, weight.device, weight.dtype)

    def forward(tokens: torch.Tensor, **arguments: Any) -> torch.Tensor:
        hidden = model.base_model(tokens, **arguments).last_hidden_state
        values: torch.Tensor = model.score(hidden).squeeze(-1)
        return values

    model.forward = forward
