"""What an architecture computes and megatron-core has no setting for.

A table gives it as data; `trainer/megatron/model_variants.py` adds it to Megatron's layers and models. It has no part
in the layout, but for the names that `post_norms` brings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RotaryScaling:
    """How rotary frequencies are stretched for contexts longer than `original_max_position_embeddings` tokens.

    `linear` divides all of them by `factor`. `llama3` divides those whose wavelength is longer than the original
    context over `low_freq_factor`, leaves those shorter than it over `high_freq_factor`, and blends in between.
    """

    rope_type: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True, slots=True)
class Extras:
    """Everything off by default.

    Attributes:
        rotary_scaling: of the model's rotary frequencies.
        windows: for each layer the number of tokens a query sees, its own included; None sees all. Empty: all see all.
        window_rotary_base: rotary base of the layers that have a window, unscaled; None: the model's own.
        attention_softcap: attention scores s become cap * tanh(s / cap).
        logit_softcap: likewise the logits.
        embedding_scale: word embeddings are multiplied by it, rounded to their dtype.
        post_norms: the outputs of attention and MLP pass a norm before they are added to the residual.
        experts_per_group_score: a group of experts is ranked by the sum of its top-k scores (k = this value).
    """

    rotary_scaling: RotaryScaling | None = None
    windows: tuple[int | None, ...] = ()
    window_rotary_base: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float | None = None
    post_norms: bool = False
    experts_per_group_score: int | None = None

    @property
    def layer_spec(self) -> str:
        """`ModelTable.layer_spec` of a model whose layers are Megatron's but for these."""
        return "extended" if self.windows or self.attention_softcap or self.post_norms else "default"


def rope_parameters(config: Config) -> dict[str, Any]:
    """Rotary settings of a config written by transformers 4 (`rope_theta`, `rope_scaling`) or 5 (`rope_parameters`).

    Always has `rope_type`; has `rope_theta` where the config has it.
    """
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    top_level = {"rope_theta": config["rope_theta"]} if config.get("rope_theta") else {}
    return {**top_level, **given, "rope_type": given.get("rope_type") or given.get("type") or "default"}


def rotary_scaling(config: Config) -> RotaryScaling | None:
    """The scaling that the config asks for; None without, and for a type that `unknown_scaling` names."""
    rope = rope_parameters(config)
    if rope["rope_type"] == "linear":
        return RotaryScaling("linear", rope["factor"])
    if rope["rope_type"] == "llama3":
        original = rope.get("original_max_position_embeddings") or config["max_position_embeddings"]
        return RotaryScaling("llama3", rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"], original)
    return None


def unknown_scaling(config: Config) -> Iterator[str]:
    """A sentence for `ModelTable.not_built` when the type of rotary scaling is not implemented."""
    rope_type = rope_parameters(config)["rope_type"]
    if rope_type not in ("default", "linear", "llama3"):
        yield f"rotary scaling of type {rope_type!r} (supported: linear, llama3)"


def windows_by_type(layer_types: Sequence[str], window: int | None) -> tuple[int | None, ...]:
    """`Extras.windows` from the kind of every layer, by transformers' names."""
    windows = tuple(window if layer_type == "sliding_attention" else None for layer_type in layer_types)
    return windows if any(windows) else ()
