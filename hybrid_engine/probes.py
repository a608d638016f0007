"""Questions by which a trainer and an inference engine are compared (switch/computation.py)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch


@dataclass(frozen=True)
class ProbeLimits:
    """Limits of the tokens by which a side can be compared.

    Attributes:
        refusal: why it computes none of any length; empty where it does.
        max_length: most tokens of a row; None: any number.
        multiple: what the length is a multiple of.
        vocab_size: token ids are below it.
    """

    refusal: str = ""
    max_length: int | None = None
    multiple: int = 1
    vocab_size: int = 2**31


@dataclass(frozen=True)
class ProbeAnswer:
    """Answer of a side to tokens [B, L].

    Attributes:
        log_probs: [B, L - 1] float32 on the host, of every token but the first after those before it.
        dtype: what it computes in: the coarsest there is.
    """

    log_probs: torch.Tensor
    dtype: torch.dtype


@runtime_checkable
class Probed(Protocol):
    """A side that can be asked what it computes. A trainer and an engine that both are one get compared."""

    def probe_limits(self) -> ProbeLimits:
        """Return what it can compute. No collective; ranks may differ."""

    def probe(self, tokens: torch.Tensor) -> ProbeAnswer:
        """Log-probabilities of `tokens` [B, L] int64 on the host, the same on all ranks. Collective.

        Neither gradients, generators, counters nor flags of the model are changed by it. Of a trainer, parameters are
        on the device while it is called, and its `guard` lets it pass.
        """

    def computed_settings(self) -> Mapping[str, Any]:
        """Return the settings that decide what it computes, by their names in config.json where they have such."""


@contextmanager
def attributes_set(owners: Iterable[Any], **values: object) -> Iterator[None]:
    """Give attributes, where there are such, other values inside the context."""
    before = [(owner, name, getattr(owner, name)) for owner in owners for name in values if hasattr(owner, name)]
    for owner, name, _ in before:
        setattr(owner, name, values[name])
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def following_log_probs(logits: torch.Tensor, tokens: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Log-probabilities [B, L - 1] float32 of `tokens` [B, L] but the first, by logits [B, L, >= vocab_size]."""
    log_probs = logits[:, :-1, :vocab_size].float().log_softmax(-1)
    return log_probs.gather(-1, tokens[:, 1:, None].to(log_probs.device)).squeeze(-1)
