"""Questions by which a trainer and an inference engine are compared (switch/computation.py)."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
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


@dataclass(frozen=True)
class Rotary:
    """Rotation of queries and keys by their position.

    Attributes:
        frequencies: radians per token of every pair of elements that is rotated, the fastest first.
        scale: factor of the rotated elements, 1 but for YaRN.
        angle_error: rounding error of the angles at `num_positions`, in radians.
        num_positions: positions that the frequencies were read from.
    """

    frequencies: tuple[float, ...] = ()
    scale: float = 1.0
    angle_error: float = 0.0
    num_positions: int = 1


@dataclass(frozen=True)
class Attention:
    """What the attention of one layer computes beside its weights, as read from live modules.

    Attributes:
        scale: factor of the attention scores; None: neither it, nor window and softcap can be read.
        window: number of tokens a query sees, its own included; None: all.
        softcap: scores s become softcap * tanh(s / softcap); None: they do not.
        rotary: without frequencies where nothing is rotated; None: it cannot be read.
    """

    scale: float | None
    window: int | None = None
    softcap: float | None = None
    rotary: Rotary | None = Rotary()


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


@runtime_checkable
class WithAttention(Protocol):
    """A side whose layers can be read. Those of a trainer and an engine that both are one get compared."""

    def attention(self) -> Mapping[int, Attention]:
        """Return the attention of this rank's decoder layers, by number in the checkpoint.

        No collective. Layers whose attention cannot be read are left out.
        """


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


def rotary_of_table(cos: torch.Tensor, sin: torch.Tensor) -> Rotary:
    """Read the frequencies off a table of cosines and sines [positions, pairs] from position 0 on.

    An angle is known up to whole turns. The frequency by position 1 predicts the turns at position
    2, that by position 2 those at position 4, and so on; the table's rounding counts half as much
    each time.
    """
    positions = [2**power for power in range((len(cos) - 1).bit_length())]
    rows = torch.complex(cos[positions].double().cpu(), sin[positions].double().cpu())
    frequencies = torch.zeros(rows.shape[1], dtype=torch.float64)
    for position, angles in zip(positions, rows.angle(), strict=True):
        turns = ((position * frequencies - angles) / (2 * math.pi)).round()
        frequencies = (angles + 2 * math.pi * turns) / position
    return Rotary(
        tuple(sorted(frequencies.tolist(), reverse=True)),
        rows.abs().mean().item(),
        torch.finfo(cos.dtype).eps,
        positions[-1],
    )


# -- comparison --------------------------------------------------------------------------------------------------------

_RELATIVE_ERROR = 1e-5
"""Of frequencies and scales in float32. A larger one is another angle after some 10,000 tokens."""

Layers = Mapping[int, Collection[Attention]]
"""Layer number -> its attention, of all ranks with this layer; several where ranks differ."""


@dataclass(frozen=True)
class Difference:
    """A property of a layer's attention, and its values on both sides."""

    name: str
    first: str
    second: str


def attention_differences(trainer: Layers, inference: Layers, max_length: int | None) -> list[str]:
    """Describe every difference between the layers that both have, once for all layers that have it.

    A window of more than `max_length` tokens hides nothing from any sequence, and is none.
    """
    layers: dict[Difference, list[int]] = {}
    for layer in sorted(trainer.keys() & inference.keys()):
        pairs = product(trainer[layer], inference[layer])
        for found in dict.fromkeys(found for pair in pairs for found in differences(*pair, max_length)):
            layers.setdefault(found, []).append(layer)
    return [
        f"in {ranges(numbers)}, {found.name} is {found.first} for the trainer and {found.second} for vLLM"
        for found, numbers in layers.items()
    ]


def unread_layers(trainer: Layers, inference: Layers) -> list[int]:
    """Layers that `attention_differences` does not compare, or not wholly: a side cannot be read."""

    def is_whole(found: Collection[Attention]) -> bool:
        return bool(found) and all(None not in (attention.scale, attention.rotary) for attention in found)

    layers = trainer.keys() | inference.keys()
    return sorted(
        layer for layer in layers if not (is_whole(trainer.get(layer, ())) and is_whole(inference.get(layer, ())))
    )


def differences(first: Attention, second: Attention, max_length: int | None = None) -> Iterator[Difference]:
    """Find how two layers differ by more than rounding."""

    def window(size: int | None) -> str:
        return "none" if size is None or (max_length is not None and size > max_length) else f"{size} tokens"

    if first.rotary is not None and second.rotary is not None:
        yield from _rotary_differences(first.rotary, second.rotary)
    if first.scale is None or second.scale is None:
        return
    properties = [
        Difference("the sliding window", window(first.window), window(second.window)),
        Difference("the cap of attention scores", _number(first.softcap), _number(second.softcap)),
    ]
    yield from (found for found in properties if found.first != found.second)
    if not math.isclose(first.scale, second.scale, rel_tol=_RELATIVE_ERROR):
        yield Difference("the scale of attention scores", _number(first.scale), _number(second.scale))


def _rotary_differences(first: Rotary, second: Rotary) -> Iterator[Difference]:
    pairs = [*zip(first.frequencies, second.frequencies, strict=False)]
    rounding = sum(rotary.angle_error / rotary.num_positions for rotary in (first, second))
    wrong = [
        index for index, (one, other) in enumerate(pairs) if abs(one - other) > _RELATIVE_ERROR * abs(one) + rounding
    ]
    if len(first.frequencies) != len(second.frequencies):
        yield Difference("the number of rotary frequencies", str(len(first.frequencies)), str(len(second.frequencies)))
    elif wrong:
        index = wrong[-1]  # the slowest, where scalings differ most
        values = [f"{_number(frequency)} radians per token" for frequency in pairs[index]]
        yield Difference(f"rotary frequency {index}", *values)
    scale_error = _RELATIVE_ERROR + first.angle_error + second.angle_error
    if not math.isclose(first.scale, second.scale, rel_tol=scale_error):
        yield Difference("the scale of rotated elements", _number(first.scale), _number(second.scale))


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.6g}"


def ranges(layers: Sequence[int]) -> str:
    """Name sorted layer numbers: "layers 0 to 3, 7"."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    names = [str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    return f"layer{'s' if len(layers) > 1 else ''} {', '.join(names)}"
