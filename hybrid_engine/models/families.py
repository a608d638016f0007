"""Name tables by architecture: written ones, which Megatron needs, and derived ones for the rest.

A family that Megatron is to train is added to `TABLES`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from hybrid_engine.errors import ConfigError, UnknownModelError, Violation, clipped, shortened
from hybrid_engine.files.documents import read_json
from hybrid_engine.files.model_files import HfConfig
from hybrid_engine.models import deepseek, gpt2, llama, moe
from hybrid_engine.models.config_json import ConfigClass, read_config
from hybrid_engine.models.derived import derived_table
from hybrid_engine.models.table import ModelTable


class Architecture(NamedTuple):
    """A function that returns a table, and the class of the config that it takes."""

    table: Callable[[Any], ModelTable]
    config_class: ConfigClass


_SILU = {"hidden_act": "silu"}
"""The only activation of experts in vLLM."""
_CAUSAL = {"use_bidirectional_attention": False}
"""vLLM computes no other attention of texts."""

TABLES: dict[str, Architecture] = {
    "DeepseekV2ForCausalLM": Architecture(
        deepseek.deepseek_v2,
        ConfigClass(
            "DeepseekV2Config",
            # transformers reads neither of the last two.
            implied={**_SILU, "scoring_func": "softmax", "norm_topk_prob": False},
            others=deepseek.OTHER_KEYS,
            relations=deepseek.v2_relations,
        ),
    ),
    "DeepseekV3ForCausalLM": Architecture(
        deepseek.deepseek_v3,
        ConfigClass(
            "DeepseekV3Config",
            implied={
                **_SILU,
                # vLLM does not read it.
                "rope_interleave": True,
                # transformers does not read these. Without them, vLLM uses softmax and no router
                # bias.
                "topk_method": "noaux_tc",
                "scoring_func": "sigmoid",
            },
            others=deepseek.OTHER_KEYS,
            relations=deepseek.v3_relations,
        ),
    ),
    "GPT2LMHeadModel": Architecture(gpt2.gpt2, ConfigClass("GPT2Config")),
    "Gemma2ForCausalLM": Architecture(llama.gemma2, ConfigClass("Gemma2Config", _CAUSAL)),
    "Gemma3ForCausalLM": Architecture(
        llama.gemma3,
        ConfigClass(
            "Gemma3TextConfig",
            _CAUSAL,
            others={
                "sliding_window_pattern": 6,
                "rope_local_base_freq": 10000.0,
                "num_attention_heads": 8,
                "vocab_size": 262208,
            },
        ),
    ),
    "Glm4ForCausalLM": Architecture(
        llama.glm4,
        ConfigClass("Glm4Config", rotates_part=True),
    ),
    "GlmForCausalLM": Architecture(llama.glm, ConfigClass("GlmConfig", rotates_part=True)),
    "LlamaForCausalLM": Architecture(llama.llama, ConfigClass("LlamaConfig")),
    "MixtralForCausalLM": Architecture(moe.mixtral, ConfigClass("MixtralConfig", _SILU)),
    "Qwen2ForCausalLM": Architecture(llama.qwen2, ConfigClass("Qwen2Config")),
    "Qwen2MoeForCausalLM": Architecture(moe.qwen2_moe, ConfigClass("Qwen2MoeConfig", _SILU)),
    "Qwen3ForCausalLM": Architecture(llama.qwen3, ConfigClass("Qwen3Config")),
    "Qwen3MoeForCausalLM": Architecture(moe.qwen3_moe, ConfigClass("Qwen3MoeConfig", _SILU)),
}
"""Name tables by an entry of config.json's `architectures`."""


def table_for(config: HfConfig, source: str | Path = "config.json") -> ModelTable:
    """Return the table for a Hugging Face config.

    Args:
        config: contents of config.json.
        source: name of the file in error messages.

    Raises:
        UnknownModelError: none of the `architectures` has a table, and none can be derived.
        ConfigError: lists every fault of the config, under the keys of config.json.
    """
    source = clipped(str(source))
    name = architecture_of(config.get("architectures"), source)
    if name not in TABLES:
        return derived_table(config, name)
    architecture = TABLES[name]
    table = architecture.table(read_config(config, architecture.config_class, source))
    return replace(table, architecture=name)


def architecture_of(names: object, source: str = "config.json") -> str:
    """Return the counting entry of `architectures`: the first with a written table, else the first.

    Args:
        names: value of the key, from a file.
        source: name of the file in error messages.

    Raises:
        UnknownModelError: there are no names.
        ConfigError: the value is not a list of names.
    """
    names = names or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError.of(
            "architectures",
            f"Input should be a list of names, found {shortened(names)}, in {source}",
            "Name one of transformers' model classes",
            code="invalid-value",
        )
    if not names:
        raise UnknownModelError(
            f"{source} names no architectures, so neither a name table nor a class of transformers "
            "follows from it",
            code="unknown-architecture",
        )
    return next((name for name in names if name in TABLES), names[0])


def read_model(directory: Path, key: str = "model") -> tuple[ModelTable, dict[str, Any]]:
    """Return the table and the contents of config.json of a model directory.

    Raises:
        ConfigError: there is no valid config.json, or no table for it (under `key`).
    """
    path = directory / "config.json"
    config = read_json(path, key, "Name a Hugging Face model directory")
    try:
        return table_for(config, path), config
    except UnknownModelError as error:
        raise ConfigError.of(
            key,
            str(error),
            "Choose a model that transformers has a class for",
            code="unknown-architecture",
        ) from None


def require_rules(table: ModelTable) -> None:
    """Raise ConfigError, under `model`, for a table without rules of Megatron's parameters."""
    if not table.rules:
        raise ConfigError(
            [
                _without_name_table(
                    table, "model", "Train it with FSDP2 (actor_config.fsdp), or add a name table"
                )
            ]
        )


def require_written(table: ModelTable, key: str) -> None:
    """Raise ConfigError, under `key`, for a derived table, where layouts follow from rules."""
    if table.is_derived:
        raise ConfigError(
            [
                _without_name_table(
                    table, key, "Name a model with a name table, or measure this one in a job"
                )
            ]
        )


def _without_name_table(table: ModelTable, key: str, remedy: str) -> Violation:
    known = ", ".join(TABLES)
    return Violation(
        key,
        f"{table.architecture} has no name table with Megatron's parameters; known: {known}",
        remedy,
        code="unknown-architecture",
    )
