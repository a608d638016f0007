"""Interfaces of a trainer and an inference engine that are compared, and their data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from inspect import ismethod
from typing import Any, Protocol, runtime_checkable

import torch

from hybrid_engine.compute_check.attention import POSITIONS, Attentions
from hybrid_engine.compute_check.config_reads import Reads
from hybrid_engine.compute_check.routes import LayerRoutes
from hybrid_engine.files.model_files import HfConfig
from hybrid_engine.ranks.torch_internals import Tensors


@dataclass(frozen=True)
class ProbeLimits:
    """Limits of the token sequences that a side can compute in a probe.

    Attributes:
        refusal: reason for which the side cannot be probed at all; "" if it can.
        max_length: maximum tokens per sequence; None: unlimited.
        multiple: the sequence length must be a multiple of this.
        vocab_size: exclusive upper bound of token ids.
        positions: positions of longer sequences at which rotations are compared.
    """

    refusal: str = ""
    max_length: int | None = None
    multiple: int = 1
    vocab_size: int = 2**31
    positions: tuple[int, ...] = POSITIONS


@dataclass(frozen=True)
class ProbeAnswer:
    """Answer of a side to tokens [B, L].

    Attributes:
        log_probs: [B, L - 1] float32 on the host: log-probability of every token but the first,
            given its prefix.
        dtype: coarsest dtype in which the side computes.
        routes: experts of the tokens in each layer with experts; empty if they are unknown.
    """

    log_probs: torch.Tensor
    dtype: torch.dtype
    routes: Sequence[LayerRoutes] = ()


@dataclass(frozen=True, eq=False)
class ProbeImage:
    """A prompt with an image, for models that take images.

    Attributes:
        tokens: [1, L] token ids as the model computes them.
        inputs: tensors that the model's processor makes of the image.
        prompt: the same in the inference engine's form.
    """

    tokens: torch.Tensor
    inputs: Tensors
    prompt: Any


@runtime_checkable
class Probed(Protocol):
    """Interface of a side that can be probed.

    A trainer and an engine are compared if both implement it.
    """

    def probe_limits(self) -> ProbeLimits:
        """Return the limits of a probe. No collective; ranks may differ."""

    def probe(self, tokens: torch.Tensor) -> ProbeAnswer:
        """Compute log-probabilities of `tokens` [B, L] int64 on the host, the same on all ranks.

        Collective. Must not change gradients, random generators, counters or flags of the model.
        When a trainer is called, its parameters are on the device, and its `guard` permits the
        call.
        """

    def computed_settings(self) -> HfConfig:
        """Return settings that affect the computation, with their names in config.json if any."""


@runtime_checkable
class ProbedWithImages(Protocol):
    """Interface of a side that computes images; both are compared if the engine has a prompt."""

    def probe_image(self, image: ProbeImage) -> ProbeAnswer:
        """Compute log-probabilities of `image.tokens`; otherwise as `Probed.probe`."""


@runtime_checkable
class WithImagePrompt(ProbedWithImages, Protocol):
    """Interface of an inference engine of a model that takes images."""

    def image_prompt(self) -> ProbeImage | None:
        """Return a made-up prompt with an image, the same on all ranks.

        None if the model takes no images here, or lacks a processor or a chat template.
        """


@runtime_checkable
class WithAttention(Protocol):
    """Interface of a side whose layers can be read.

    Layers are compared if trainer and engine implement it.
    """

    def attention(self, positions: Sequence[int] = POSITIONS) -> Attentions:
        """Return the attention of this rank's decoder layers, by number in the checkpoint.

        No collective. Layers whose attention cannot be read are left out. Rotations are read at
        `positions`, which include POSITIONS.
        """


@runtime_checkable
class WithConfigReads(Protocol):
    """Interface of a side whose code reads a config.json, and records which of its keys."""

    def config_reads(self) -> Reads:
        """Return the first reads of keys by this rank's code. No collective."""


@contextmanager
def attributes_set(owners: Iterable[Any], **values: object) -> Iterator[None]:
    """Set attributes inside the context, on owners that have them, and restore them afterwards.

    Methods of the class become so again.
    """
    with ExitStack() as undo:
        for owner in owners:
            for name, value in values.items():
                if hasattr(owner, name):
                    before = getattr(owner, name)
                    is_of_class = ismethod(before) and name not in vars(owner)
                    setattr(owner, name, value)
                    if is_of_class:
                        undo.callback(delattr, owner, name)
                    else:
                        undo.callback(setattr, owner, name, before)
        yield


def following_log_probs(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    vocab_size: int,
) -> torch.Tensor:
    """Return log-probabilities [B, L - 1] float32 of all `tokens` [B, L] but the first.

    `logits`: [B, L, V], with V >= vocab_size.
    """
    log_probs = logits[:, :-1, :vocab_size].float().log_softmax(-1)
    return log_probs.gather(-1, tokens[:, 1:, None].to(log_probs.device)).squeeze(-1)
