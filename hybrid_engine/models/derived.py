"""A table derived from transformers' own class of a config, for every model that has such a class.

    config.json -> the class that `architectures` names, on the meta device
                -> its conversion to a checkpoint
                -> names, shapes and dtypes of a checkpoint's tensors

What trains transformers' modules (FSDP2) and what loads a checkpoint (vLLM) need no more.
Megatron's parameters have other names and packings: there are rules for them if the checkpoint's
names are the usual ones (conventions.py). Settings of Megatron's models do not follow, so none is
built here.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from hybrid_engine.errors import UnknownModelError, clipped
from hybrid_engine.files.model_files import HfConfig
from hybrid_engine.models.config_json import dense_width, dims_of
from hybrid_engine.models.conventions import conventional_rules
from hybrid_engine.models.table import ModelDims, ModelTable, Serving
from hybrid_engine.records.regions import Shapes

Tensor = TypeVar("Tensor")

_WEIGHTS = "bfloat16"
"""Dtype of the weights in the derivation; tensors of another dtype keep theirs in a checkpoint."""
_GATES = re.compile(r"gate_proj|gate_up|input_linear|\.w3\.")
"""In the names of projections that have a gate: w3 is Mixtral's, input_linear is Granite's."""
_OF_EXPERTS = re.compile(r"\.layers\.(\d+)\..*\bexperts\.")
_OF_LAYER = re.compile(r"\blayers\.(\d+)\.")


PLACEHOLDER_BIAS = -100.0
"""Added to the logits of placeholders of images, by both engines: the least that vLLM takes."""
_PLACEHOLDER = re.compile("(image|video|audio)_token_(?:id|index)")


def takes_images(config: HfConfig) -> bool:
    """Return whether the contents of a config.json have the section of a vision tower."""
    return bool(config.get("vision_config"))


def placeholder_tokens(config: HfConfig) -> dict[str, int]:
    """Return the tokens in whose places a model puts images and the like, by kind.

    `config`: contents of config.json. Models of text have none.
    """
    matches = ((_PLACEHOLDER.fullmatch(key), value) for key, value in config.items())
    return {match[1]: value for match, value in matches if match and isinstance(value, int)}


def derived_table(config: HfConfig, architecture: str) -> ModelTable:
    """Return the table of a transformers class, without settings of Megatron's models.

    Args:
        config: contents of config.json.
        architecture: its entry of `architectures`, a class of transformers.

    Raises:
        UnknownModelError: transformers is not installed, has no such class, or builds none from
            this config.
    """
    values = {key: value for key, value in config.items() if not key.startswith("_")}
    return _derived(json.dumps(values, sort_keys=True), architecture)


def full_config(config: HfConfig) -> dict[str, Any]:
    """Return a config as transformers reads it, with all keys and each where it belongs now.

    `config`: contents of config.json. Early files of Qwen2.5-VL have no "text_config", and many
    have no sizes that are the class's defaults.

    Raises UnknownModelError as `derived_table` does.
    """
    return dict(_read_config(json.dumps(config), config["architectures"][0]).to_dict())


def model_class(architecture: str) -> Any:
    """Return transformers' class of an entry of `architectures`; None if there is no such class."""
    import transformers

    named = getattr(transformers, architecture, None)
    is_model = isinstance(named, type) and issubclass(named, transformers.PreTrainedModel)
    return named if is_model else None


def _required_class(architecture: str) -> Any:
    named = model_class(architecture)
    if named is None:
        raise UnknownModelError(
            f"{architecture} has no name table, and transformers has no such class",
            code="unknown-architecture",
        )
    return named


def meta_model(config: Any, architecture: str, **options: Any) -> Any:
    """Return a model of transformers' config without memory.

    `options`: keyword arguments of transformers' `_from_config`, such as `dtype`.

    Raises UnknownModelError if transformers has no such class.
    """
    import torch
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    with torch.device("meta"):
        model = _required_class(architecture)._from_config(config, **options)
    # A model that was not loaded has no conversions of its own from a published checkpoint.
    # transformers leaves out all changes of prefixes, because either name may be loaded. In a part
    # of a model, published checkpoints have the prefix, as "vision_model." in a vision tower, and
    # vLLM reads no other name.
    conversions = get_model_conversion_mapping(model, add_legacy=False)
    kept = [
        conversion
        for conversion in conversions
        if conversion.scope_prefix or not isinstance(conversion, PrefixChange)
    ]
    model._weight_conversions = kept or None
    return model


def meta_copy_of(model: Any) -> Any:
    """Return a model without memory, of the config and class of a live transformers model."""
    config = config_of(model)
    return meta_model(config, config.architectures[0])


def without_repetitions(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a state dict, each tied one under its first name only."""
    first_names: dict[int, str] = {}
    for name, tensor in tensors.items():
        first_names.setdefault(id(tensor), name)
    return {name: tensors[name] for name in first_names.values()}


def config_of(model: Any) -> Any:
    """Return a copy of the model's config that names its architecture.

    `fully_shard` replaces the class of the model, so its name alone is not the architecture.
    """
    config = type(model.config).from_dict(model.config.to_dict())
    names = [base.__name__ for base in type(model).__mro__]
    known_names = (name for name in names if model_class(name) is not None)
    config.architectures = [next(known_names, names[0])]
    return config


def _read_config(config_text: str, architecture: str) -> Any:
    """Return transformers' config of the contents of a config.json."""
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise UnknownModelError(
            f"{architecture} has no name table, and transformers cannot be asked: {error}",
            code="unknown-architecture",
        ) from error
    _required_class(architecture)  # first: its message is clearer than those about the config
    with _building(architecture), tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(config_text)
        return AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)


@contextmanager
def _building(architecture: str) -> Iterator[None]:
    """Raise errors of transformers as UnknownModelError."""
    try:
        yield
    except Exception as error:  # KeyError for a missing key, AssertionError for a size, ...
        raise UnknownModelError(
            f"transformers builds no {architecture} from config.json: "
            f"{clipped(f'{type(error).__name__}: {error}', 1000)}",
            code="unknown-architecture",
        ) from error


@lru_cache(8)
def _derived(config_text: str, architecture: str) -> ModelTable:
    config = _read_config(config_text, architecture)
    import torch
    from transformers.core_model_loading import revert_weight_conversion

    with _building(architecture):
        model = meta_model(config, architecture, dtype=getattr(torch, _WEIGHTS))
    tensors = model.state_dict(keep_vars=True)
    once = without_repetitions(tensors)
    with torch.no_grad():
        saved = revert_weight_conversion(model, dict(once))
    dtypes = {}
    for name, tensor in saved.items():
        # A model that loads a checkpoint has, and saves, these in float32 whatever its dtype.
        is_precise = any(part in name for part in model._keep_in_fp32_modules_strict)
        dtype = "float32" if is_precise else str(tensor.dtype).removeprefix("torch.")
        if dtype != _WEIGHTS:
            dtypes[name] = dtype
    text_config = config.get_text_config()
    shapes = {name: tuple(tensor.shape) for name, tensor in saved.items()}
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    is_tied = head is not None and embedding is not None and head.weight is embedding.weight
    dims = dims_of(text_config, _layers_with_experts(shapes), tied_embeddings=is_tied)
    return ModelTable(
        dims,
        rules=conventional_rules(shapes, dims),
        shapes=shapes,
        transformer={},
        layer_sizes=_layer_sizes(text_config.to_dict(), dims, shapes),
        unserved=_unused_of_tower(model, saved),
        # Second names of tied tensors.
        left_out=frozenset(tensors.keys() - once.keys()),
        # Layers for multi-token prediction, mostly, which transformers' classes do not have.
        ignored=tuple(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()),
        dtypes=dtypes,
        serving=Serving(ends_on_every_stage=True),
        not_built=(f"{architecture}, which has no name table,",),
        architecture=architecture,
        placeholders=placeholder_tokens(config.to_dict()),
    )


def _unused_of_tower(model: Any, saved: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the tensors of a vision tower behind the layers whose features a model selects.

    transformers computes these layers and drops their results; vLLM does not build them.

    `saved`: name in a checkpoint -> tensor of `model`.
    """
    selected = getattr(model.config, "vision_feature_layer", None)
    if selected is None:
        return ()
    tower_config = model.config.vision_config
    modules = model.modules()
    tower = next(module for module in modules if getattr(module, "config", None) is tower_config)
    tensors = tower.state_dict(keep_vars=True)
    # Features of all layers begin with the embeddings, and -1 is the last layer.
    num_features = tower_config.num_hidden_layers + 1
    layers = [selected] if isinstance(selected, int) else selected
    # 24 layers have 25 features, of the embeddings and of each layer. LLaVA selects -2, feature 23:
    # the output of layer 22, so layer 23 is not used.
    first_unused = max(layer % num_features for layer in layers)
    unused = set()
    is_behind = False
    for name, tensor in tensors.items():
        # Order matters: tensors without a layer number behind an unused layer, such as the last
        # norm, are unused too. Those before the first layer are used.
        if match := _OF_LAYER.search(name):
            is_behind = int(match[1]) >= first_unused
        if is_behind:
            unused.add(id(tensor))
    return tuple(name for name, tensor in saved.items() if id(tensor) in unused)


def _layers_with_experts(shapes: Iterable[str]) -> set[int]:
    return {int(match[1]) for match in map(_OF_EXPERTS.search, shapes) if match is not None}


def _layer_sizes(values: HfConfig, dims: ModelDims, shapes: Shapes) -> dict[str, Any]:
    """Return the settings of TransformerConfig on which estimates of memory depend."""
    with_experts = _layers_with_experts(shapes)
    num_shared = values.get("n_shared_experts") or values.get("num_shared_experts") or 0
    width_of_dense = dense_width(values, dims.hidden_size)
    width = values.get("moe_intermediate_size") or width_of_dense
    return {
        "gated_linear_unit": any(map(_GATES.search, shapes)),
        "ffn_hidden_size": width_of_dense,
        "moe_layer_freq": (
            [int(layer in with_experts) for layer in range(dims.num_layers)]
            if with_experts
            else None
        ),
        "moe_ffn_hidden_size": width,
        "moe_router_topk": values.get("num_experts_per_tok") or values.get("moe_k") or 1,
        "moe_shared_expert_intermediate_size": (
            values.get("shared_expert_intermediate_size") or num_shared * width
        ),
        "multi_latent_attention": bool(dims.latent_kv_size),
        "q_lora_rank": values.get("q_lora_rank"),
        "qk_head_dim": values.get("qk_nope_head_dim"),
        "v_head_dim": values.get("v_head_dim"),
    }
