"""Attention settings of layers, read from the live modules of both sides, and their differences."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import torch


@dataclass(frozen=True)
class Rotary:
    """Rotary position embedding of queries and keys.

    Attributes:
        frequencies: radians per token of every rotated pair of elements, in descending order.
        scale: factor of the rotated elements; 1 except with YaRN.
        angle_error: rounding error of the angles at `num_positions`, in radians.
        num_positions: number of positions from which the frequencies were determined.
        may_be_unused: the layer's own code, which is the same on both sides, decides whether it
            rotates; with this, "nothing is rotated" on the other side is no difference.
    """

    frequencies: tuple[float, ...] = ()
    scale: float = 1.0
    angle_error: float = 0.0
    num_positions: int = 1
    may_be_unused: bool = False


@dataclass(frozen=True)
class Attention:
    """Attention settings of one layer, read from the live modules.

    Attributes:
        scale: factor of the attention scores; None: scale, window and softcap cannot be read.
        window: number of tokens that a query attends to, including itself; None: all.
        softcap: scores s become softcap * tanh(s / softcap); None: scores are not capped.
        rotary: rotary embedding, with empty frequencies if nothing is rotated; None: it cannot be
            read.
    """

    scale: float | None
    window: int | None = None
    softcap: float | None = None
    rotary: Rotary | None = Rotary()


def rotary_of_table(cos: torch.Tensor, sin: torch.Tensor) -> Rotary:
    """Determine frequencies from a table of cosines and sines [positions, pairs], from position 0.

    An angle is known only up to whole turns. The frequency by position 1 predicts the turns at
    position 2, that by position 2 those at position 4, and so on; the table's rounding counts half
    as much each time.
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


_RELATIVE_ERROR = 1e-5
"""Tolerance of frequencies and scales in float32.

A larger error changes the angle after some 10,000 tokens.
"""

Layers = Mapping[int, Collection[Attention]]
"""Layer number -> distinct attention settings of all ranks with this layer.

There is more than one if ranks differ.
"""


@dataclass(frozen=True)
class Difference:
    """A property of a layer's attention, and its values on both sides."""

    name: str
    first: str
    second: str


def attention_differences(trainer: Layers, inference: Layers, max_length: int | None) -> list[str]:
    """Describe every difference between layers that both sides have, once for all such layers.

    A window of more than `max_length` tokens hides no token of any sequence, and counts as no
    window.
    """
    layers: dict[Difference, list[int]] = {}
    for layer in sorted(trainer.keys() & inference.keys()):
        in_layer: dict[Difference, None] = {}  # an ordered set: several pairs may differ alike
        for first, second in product(trainer[layer], inference[layer]):
            in_layer |= dict.fromkeys(differences(first, second, max_length))
        for difference in in_layer:
            layers.setdefault(difference, []).append(layer)
    texts = []
    for difference, numbers in layers.items():
        values = f"{difference.first} for the trainer and {difference.second} for vLLM"
        texts.append(f"in {ranges(numbers)}, {difference.name} is {values}")
    return texts


def unread_layers(trainer: Layers, inference: Layers) -> list[int]:
    """Return the layers that `attention_differences` does not compare fully.

    A side of these layers cannot be read.
    """

    def is_read(side: Layers, layer: int) -> bool:
        kinds = side.get(layer, ())
        return bool(kinds) and all(
            None not in (attention.scale, attention.rotary) for attention in kinds
        )

    layers = trainer.keys() | inference.keys()
    return sorted(
        layer for layer in layers if not (is_read(trainer, layer) and is_read(inference, layer))
    )


def differences(
    first: Attention, second: Attention, max_length: int | None = None
) -> Iterator[Difference]:
    """Yield the differences of two layers that exceed rounding."""

    def window(size: int | None) -> str:
        return (
            "none"
            if size is None or (max_length is not None and size > max_length)
            else f"{size} tokens"
        )

    if first.rotary is not None and second.rotary is not None:
        yield from _rotary_differences(first.rotary, second.rotary)
    if first.scale is None or second.scale is None:
        return
    properties = [
        Difference("the sliding window", window(first.window), window(second.window)),
        Difference("the cap of attention scores", _number(first.softcap), _number(second.softcap)),
    ]
    yield from (difference for difference in properties if difference.first != difference.second)
    if not math.isclose(first.scale, second.scale, rel_tol=_RELATIVE_ERROR):
        yield Difference(
            "the scale of attention scores", _number(first.scale), _number(second.scale)
        )


def _rotary_differences(first: Rotary, second: Rotary) -> Iterator[Difference]:
    if second.may_be_unused and not first.frequencies:
        return
    pairs = [*zip(first.frequencies, second.frequencies, strict=False)]
    rounding = first.angle_error / first.num_positions + second.angle_error / second.num_positions
    wrong = []
    for index, (left, right) in enumerate(pairs):
        if abs(left - right) > _RELATIVE_ERROR * abs(left) + rounding:
            wrong.append(index)
    if len(first.frequencies) != len(second.frequencies):
        yield Difference(
            "the number of rotary frequencies",
            str(len(first.frequencies)),
            str(len(second.frequencies)),
        )
    elif wrong:
        index = wrong[-1]  # the lowest frequency, where rope scalings differ most
        values = [f"{_number(frequency)} radians per token" for frequency in pairs[index]]
        yield Difference(f"rotary frequency {index}", *values)
    scale_error = _RELATIVE_ERROR + first.angle_error + second.angle_error
    if not math.isclose(first.scale, second.scale, rel_tol=scale_error):
        yield Difference(
            "the scale of rotated elements", _number(first.scale), _number(second.scale)
        )


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.6g}"


def ranges(layers: Sequence[int]) -> str:
    """Format sorted layer numbers, as in "layers 0 to 3, 7"."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    names = [str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    return f"layer{'s' if len(layers) > 1 else ''} {', '.join(names)}"
