"""A published model's config.json with reduced sizes, and the files beside it.

Properties that decide the form of a layout are kept: architecture, biases, tied embeddings, a small
ratio of query to key/value heads, kinds of layers, experts and their groups. Other sizes shrink as
far as the layouts can still divide them. A model of images and text keeps its vocabulary, in which
its tokenizer and its processor have their tokens, and the form of its vision tower.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybrid_engine.errors import ConfigError
from hybrid_engine.files.model_files import CONFIG, PROCESSOR, TOKENIZER, HfConfig, files_like
from hybrid_engine.models import table_for
from hybrid_engine.models.derived import full_config, takes_images

HEAD_DIM = 32
"""Elements per attention head: the minimum of vLLM's CPU attention."""

VOCABULARY = 515
"""Tokens of the vocabulary, not a multiple of any padding of either engine.

It is larger if TP does not divide the padded vocabulary."""

_PADDED_VOCABULARY = 576
"""`VOCABULARY` as vLLM pads it, to a multiple of 64."""

_SIZES = {
    "max_position_embeddings": 512,
    "n_positions": 512,
    "n_ctx": 512,
    "q_lora_rank": 64,
    "qk_nope_head_dim": HEAD_DIM,
    "v_head_dim": HEAD_DIM,
    "sliding_window": 16,
    "sliding_window_pattern": 2,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}
"""Key that only scales the model -> largest value."""

_WIDTHS = {
    "intermediate_size": 192,
    "n_inner": 192,
    "moe_intermediate_size": 96,
    "shared_expert_intermediate_size": 96,
}
"""Key that tensor parallel sizes divide -> smallest value; rounded up to one that they divide."""
_EXPERT_KEYS = ("n_routed_experts", "num_local_experts", "num_experts")
_NUM_EXPERTS = 8

_LAYER_KEYS = ("num_hidden_layers", "n_layer")
_TOWER_LAYERS = ("depth", "num_hidden_layers")
_NUM_TOWER_LAYERS = 4
_TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class Divisors:
    """Parallel sizes of both layouts.

    Sizes that they divide in the model stay divisible when reduced.
    """

    tensor: Sequence[int] = ()
    expert: Sequence[int] = ()
    expert_tensor: Sequence[int] = ()


def prepare_model(model: Path, directory: Path, num_layers: int, divisors: Divisors) -> Path:
    """Write the reduced config of `model` and copy the files of its text and images to `directory`.

    Returns `directory`.

    Raises:
        ConfigError: the model takes images, and has no processor.
        UnknownModelError: if the architecture has no table.
    """
    config = reduced_config(config_of(model), num_layers, divisors)
    table_for(config)
    directory.mkdir(parents=True, exist_ok=True)
    copy_companions(model, directory)
    (directory / CONFIG).write_text(json.dumps(config, indent=2))
    return directory


def config_of(model: Path) -> dict[str, Any]:
    """Return the contents of a model's config.json."""
    config: dict[str, Any] = json.loads((model / CONFIG).read_text())
    return config


def copy_companions(model: Path, directory: Path) -> None:
    """Copy config.json, and for a model of images the tokenizer and the processor.

    Raises ConfigError if the model takes images and has no processor, without which vLLM builds
    no engine.
    """
    patterns = [CONFIG]
    if takes_images(config_of(model)):
        patterns += [*TOKENIZER, *PROCESSOR]
        if not any(files_like(model, PROCESSOR)):
            raise ConfigError.of(
                "model",
                f"{model} takes images and has no processor's files (*processor*.json)",
                "Put the files of the model's tokenizer and processor beside config.json",
                code="needs-processor",
            )
    for path in files_like(model, patterns):
        shutil.copyfile(path, directory / path.name)


def reduced_config(
    config: HfConfig,
    num_layers: int,
    divisors: Divisors = Divisors(),
) -> dict[str, Any]:
    """Return a config with reduced sizes.

    Args:
        config: contents of config.json.
        num_layers: decoder layers to keep, at most the model's.
        divisors: parallel sizes of the layouts.

    Raises:
        UnknownModelError: transformers has no class of a model of images.
    """
    if not takes_images(config):
        small = _reduced_text(config, num_layers, divisors)
        unit = math.lcm(64, *divisors.tensor)
        padded = -(-_PADDED_VOCABULARY // unit) * unit
        small["vocab_size"] = min(small["vocab_size"], padded - _PADDED_VOCABULARY + VOCABULARY)
        for key in _TOKEN_KEYS:
            if key in small:
                small[key] = _token_within(small[key], small["vocab_size"])
        # The default of a config class may be outside the small vocabulary.
        small.setdefault("pad_token_id", None)
        return small
    small = full_config(config)
    text = _reduced_text(small["text_config"], num_layers, divisors)
    tower = _reduced_tower(small["vision_config"], text["hidden_size"])
    small.pop("quantization_config", None)
    return {**small, "text_config": text, "vision_config": tower}


def _reduced_text(config: HfConfig, num_layers: int, divisors: Divisors) -> dict[str, Any]:
    small = dict(config)
    for key, largest in _SIZES.items():
        if isinstance(small.get(key), int):
            small[key] = min(small[key], largest)
    for key, width in _WIDTHS.items():
        if isinstance(small.get(key), int):
            tensor_sizes = (*divisors.tensor, *divisors.expert_tensor)
            small[key] = _reduced(small[key], width, 32, tensor_sizes)
    for key in _EXPERT_KEYS:
        if isinstance(small.get(key), int):
            fewest = max(_NUM_EXPERTS, *divisors.expert, 0)
            num_groups = small.get("n_group") or 1
            small[key] = _reduced(small[key], fewest, num_groups, divisors.expert)
    for key in _LAYER_KEYS:
        if key in small:
            small[key] = min(small[key], num_layers)
    for key, value in config.items():
        if isinstance(value, list) and len(value) == config.get("num_hidden_layers"):
            small[key] = value[:num_layers]  # one entry per layer
    dense = small.get("mlp_only_layers")
    if isinstance(dense, list):
        small["mlp_only_layers"] = [layer for layer in dense if layer < num_layers]
    _reduce_heads(small, divisors.tensor)
    small.pop("quantization_config", None)
    return small


def _reduced_tower(config: HfConfig, text_width: int) -> dict[str, Any]:
    """Return the config of a vision tower with few layers, for a text model of a width."""
    small = dict(config)
    (layer_key,) = (key for key in _TOWER_LAYERS if key in config)
    num_layers = config[layer_key]
    small[layer_key] = min(num_layers, _NUM_TOWER_LAYERS)
    for key, value in config.items():
        if key.endswith("_indexes"):
            # layers of a special kind, at the same places of the smaller tower
            small[key] = sorted({index * small[layer_key] // num_layers for index in value})
    # Qwen2-VL has the tower's own width under embed_dim.
    width_key = "hidden_size" if "embed_dim" in config else "out_hidden_size"
    if width_key in config:
        small[width_key] = text_width
    return small


def _reduced(size: int, least: int, multiple: int, divisors: Sequence[int]) -> int:
    """Return the smallest value from `least` on, at most `size`, that keeps `size`'s divisors."""
    kept = [divisor for divisor in divisors if size % divisor == 0]
    # Of 1,536, with TP=6, 192 or more, in multiples of 64: lcm(64, 6) is 192, which is enough.
    unit = math.lcm(multiple, *kept)
    return min(size, -(-least // unit) * unit)


def _token_within(token: Any, vocabulary: int) -> Any:
    """Return a token id, or a list of ids, mapped into the vocabulary."""
    if isinstance(token, list):
        return [_token_within(entry, vocabulary) for entry in token]
    return token if token is None or token < vocabulary else token % vocabulary


def _reduce_heads(small: dict[str, Any], tp_sizes: Sequence[int]) -> None:
    """Reduce to 4 key/value heads with 2 query heads each, or the nearest that TP sizes allow."""
    key = "n_head" if "n_head" in small else "num_attention_heads"
    num_heads = small[key]
    num_kv_heads = small.get("num_key_value_heads") or num_heads
    ratio = num_heads // num_kv_heads
    choices = []
    for kv_heads in range(1, num_kv_heads + 1):
        if num_kv_heads % kv_heads:
            continue
        for queries in range(1, ratio + 1):
            # All TP sizes must divide the query heads, and divide or replicate KV heads.
            if all(
                kv_heads * queries % tp == 0 and 0 in (kv_heads % tp, tp % kv_heads)
                for tp in tp_sizes
            ):
                # The nearest number of key/value heads counts first.
                distance = (abs(4 - kv_heads), abs(2 - queries))
                choices.append((distance, kv_heads, queries))
    # Without a choice, the check of the configuration has the reason.
    _, kv_heads, queries = min(choices, default=((0, 0), 4, 2))
    small[key] = kv_heads * queries
    if "num_key_value_heads" in small:
        small["num_key_value_heads"] = kv_heads
    width = "n_embd" if "n_embd" in small else "hidden_size"
    # Some classes require whole elements of the width for each head even with a `head_dim`: 6 heads
    # of SmolLM2 do not divide 128.
    is_implied = small.get("head_dim") in (None, small[width] / num_heads)
    divides = small.get("head_dim") is not None and 4 * HEAD_DIM % small[key] == 0
    small[width] = 4 * HEAD_DIM if divides or not is_implied else small[key] * HEAD_DIM
    if small.get("head_dim") is not None:
        small["head_dim"] = HEAD_DIM
    if "query_pre_attn_scalar" in small:
        small["query_pre_attn_scalar"] = HEAD_DIM
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(small.get(key), Mapping) and "mrope_section" in small[key]:
            small[key] = _with_sections_of(small[key])


def _with_sections_of(rotary: Mapping[str, Any]) -> dict[str, Any]:
    """Return rotary settings whose sections, of time, height and width, fit a head's elements."""
    sections = rotary["mrope_section"]
    num_pairs = int(HEAD_DIM * rotary.get("partial_rotary_factor", 1.0)) // 2
    scaled = [section * num_pairs // sum(sections) for section in sections]
    # What rounding leaves over goes to time.
    scaled[0] += num_pairs - sum(scaled)
    return {**rotary, "mrope_section": scaled}
