"""Attention settings of layers, read from the live modules of both sides, and their differences."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch

from hybrid_engine.files.model_files import HfConfig

POSITIONS = (0, 1)
"""Least positions at which rotations are compared; the angles of position 1 are the frequencies."""


@dataclass(frozen=True)
class Rotary:
    """Rotation of queries and keys at some positions.

    At each position the model computes a sequence that ends there: some frequencies depend on the
    length.

    Attributes:
        positions: compared positions, those of `POSITIONS` among them.
        angles: per position the angle in radians of each rotated pair of elements; no pairs if
            nothing is rotated.
        scales: per position the factor of rotated elements; 1 except with YaRN and its like.
        rounding: relative rounding error of cosines and sines.
    """

    positions: tuple[int, ...] = POSITIONS
    angles: tuple[tuple[float, ...], ...] = ((), ())
    scales: tuple[float, ...] = (1.0, 1.0)
    rounding: float = torch.finfo(torch.float32).eps

    @property
    def frequencies(self) -> tuple[float, ...]:
        """Radians per token of each pair."""
        return self.angles[self.positions.index(1)]

    @classmethod
    def of_frequencies(
        cls,
        frequencies: torch.Tensor,
        scale: float = 1.0,
        positions: Sequence[int] = POSITIONS,
    ) -> Rotary:
        """Return a rotation by constant frequencies [pairs], in radians per token."""
        angles = torch.outer(
            torch.tensor(positions, dtype=torch.float64), frequencies.double().cpu()
        )
        return cls.of_rotated(angles.cos(), angles.sin(), positions, scale)

    @classmethod
    def of_rotated(
        cls,
        cos: torch.Tensor,
        sin: torch.Tensor,
        positions: Sequence[int],
        scale: float = 1.0,
    ) -> Rotary:
        """Return the rotation that turns vectors (1, 0) into vectors (cos, sin).

        Args:
            cos, sin: [positions, pairs].
            scale: a factor besides that of the vectors' length.
        """
        rows = torch.complex(cos.double().cpu(), sin.double().cpu())
        lengths = rows.abs().mean(1) if rows.shape[1] else torch.ones(len(rows))
        return cls(
            tuple(positions),
            tuple(map(tuple, rows.angle().tolist())),
            tuple((scale * lengths).tolist()),
            torch.finfo(cos.dtype).eps,
        )


def compared_positions(max_length: int, settings: HfConfig) -> tuple[int, ...]:
    """Return the positions at which both sides' rotations are compared.

    Args:
        max_length: last position of the longest sequence.
        settings: contents of config.json.
    """
    original = original_length(settings)
    # 8,192: position 8,191 ends a sequence of 8,192 tokens, 8,193 one that is longer.
    around = () if original is None else (original - 1, original + 1)
    within = (position for position in around if position <= max_length)
    return tuple(sorted({*POSITIONS, max_length, *within}))


def original_length(settings: HfConfig) -> int | None:
    """Return `original_max_position_embeddings` of any section; None without one.

    Some frequencies and scales change there.
    """
    return min(_original_lengths(settings), default=None)


def _original_lengths(settings: HfConfig) -> Iterator[int]:
    for key, value in settings.items():
        if key == "original_max_position_embeddings" and isinstance(value, int):
            yield value
        elif isinstance(value, Mapping):
            yield from _original_lengths(value)


@dataclass(frozen=True)
class Attention:
    """Attention settings of one layer, read from the live modules.

    Attributes:
        scale: factor of the attention scores; None: scale, window and softcap cannot be read.
        window: number of tokens that a query attends to, including itself; None: all.
        softcap: scores s become softcap * tanh(s / softcap); None: scores are not capped.
        rotary: rotation, without pairs if nothing is rotated; None: it cannot be read.
    """

    scale: float | None
    window: int | None = None
    softcap: float | None = None
    rotary: Rotary | None = Rotary()


Attentions = Mapping[int, Attention]
"""Number of a decoder layer -> its attention."""


_RELATIVE_ERROR = 1e-5
"""Tolerance of frequencies and scales in float32.

A larger error changes the angle after some 10,000 tokens.
"""

LENGTH = 64
"""Tokens per sequence of a probe, more if a window is to be exceeded, and in a block of it."""


@dataclass(frozen=True)
class AlikeLayers:
    """Layers that share the same attention settings."""

    attention: Attention
    numbers: tuple[int, ...]


def grouped(attention: Attentions) -> tuple[AlikeLayers, ...]:
    """Group layers, given by number, by their settings, because most are alike."""
    numbers: dict[Attention, list[int]] = {}
    for number, settings in attention.items():
        numbers.setdefault(settings, []).append(number)
    return tuple(AlikeLayers(settings, tuple(layers)) for settings, layers in numbers.items())


@dataclass(frozen=True)
class Difference:
    """A property of a layer's attention, and its values on both sides.

    Attributes:
        values: value of the first side, and of the second.
        reach: position of the last token that it affects and that may need a longer run than those
            before it; 0: it affects every token.
    """

    name: str
    values: tuple[str, ...]
    reach: int = 0


def attention_differences(
    trainer: Iterable[AlikeLayers],
    inference: Iterable[AlikeLayers],
    max_length: int | None,
    num_run: int = 0,
) -> tuple[list[str], list[str]]:
    """Describe every difference between layers that both sides have, once for all such layers.

    A window of more than `max_length` tokens hides no token of any sequence, and counts as no
    window.

    Args:
        trainer, inference: layers of all ranks, which may differ.
        num_run: length of the sequences that both sides compute.

    Returns:
        the differences that those sequences do not reach, and the others, which change the
        log-probabilities if they have an effect.
    """
    layers: dict[Difference, set[int]] = {}
    pairs = product(_numbers(trainer).items(), _numbers(inference).items())
    for (first, numbers), (second, others) in pairs:
        for difference in differences(first, second, max_length) if numbers & others else ():
            layers.setdefault(difference, set()).update(numbers & others)
    texts: tuple[list[str], list[str]] = ([], [])
    for difference, common in sorted(layers.items(), key=lambda item: sorted(item[1])):
        by_trainer, by_vllm = difference.values
        values = f"{by_trainer} for the trainer and {by_vllm} for vLLM"
        is_reached = difference.reach < num_run  # the index: False is 0, True is 1
        texts[is_reached].append(f"in {ranges(sorted(common))}, {difference.name} is {values}")
    return texts


def unread_layers(trainer: Iterable[AlikeLayers], inference: Iterable[AlikeLayers]) -> list[int]:
    """Return the layers that `attention_differences` does not compare fully.

    A side of these layers cannot be read.
    """
    sides = [_numbers(trainer), _numbers(inference)]
    unread = [
        numbers
        for side in sides
        for attention, numbers in side.items()
        if None in (attention.scale, attention.rotary)
    ]
    # Layers that only one of the sides has cannot be compared, either.
    first, second = (set[int]().union(*side.values()) for side in sides)
    return sorted((first ^ second).union(*unread))


def _numbers(side: Iterable[AlikeLayers]) -> dict[Attention, set[int]]:
    """Return the numbers of the layers with each setting, on any rank of a side."""
    numbers: dict[Attention, set[int]] = {}
    for alike in side:
        numbers.setdefault(alike.attention, set()).update(alike.numbers)
    return numbers


def differences(
    first: Attention,
    second: Attention,
    max_length: int | None = None,
) -> Iterator[Difference]:
    """Yield the differences of two layers that exceed rounding."""

    if first.rotary is not None and second.rotary is not None:
        yield from _rotary_differences(first.rotary, second.rotary)
    if first.scale is None or second.scale is None:
        return
    # A window longer than any sequence hides nothing.
    sizes = [
        size if size is not None and (max_length is None or size <= max_length) else None
        for size in (first.window, second.window)
    ]
    if sizes[0] != sizes[1]:
        windows = tuple("none" if size is None else f"{size} tokens" for size in sizes)
        # A block of tokens beyond the window shows it.
        # A window of 128 hides something from positions 128 to 191, a whole block.
        reach = min(size for size in sizes if size is not None) + LENGTH - 1
        yield Difference("the sliding window", windows, reach)
    if first.softcap != second.softcap:
        caps = _numbers_of(first.softcap, second.softcap)
        yield Difference("the cap of attention scores", caps)
    scales = (first.scale, second.scale)
    if not math.isclose(*scales, rel_tol=_RELATIVE_ERROR):
        yield Difference("the scale of attention scores", _numbers_of(*scales))


def _rotary_differences(first: Rotary, second: Rotary) -> Iterator[Difference]:
    counts = tuple(str(len(side.frequencies)) for side in (first, second))
    if counts[0] != counts[1]:
        # One of the two may have a rotary module that it does not use. A run tells.
        unless = " (unless its module is unused)" if "0" in counts else ""
        yield Difference(f"the number of rotary frequencies{unless}", counts)
        return
    rounding = first.rounding + second.rounding
    turned: list[Difference] = []
    scaled: list[Difference] = []
    for position in sorted({*first.positions} & {*second.positions}):
        index, other = first.positions.index(position), second.positions.index(position)
        pairs = [*zip(first.angles[index], second.angles[other], strict=True)]
        wrong = [
            pair
            for pair, frequency in enumerate(first.frequencies)
            if not _is_same_angle(pairs[pair], position * abs(frequency), rounding)
        ]
        if wrong:
            # The lowest frequency, where rope scalings differ most.
            name, unit = f"the angle of rotary pair {wrong[-1]} at position {position}", "radians"
            # One token turns a pair by its frequency.
            if position == 1:
                name, unit = f"rotary frequency {wrong[-1]}", "radians per token"
            values = tuple(f"{angle} {unit}" for angle in _numbers_of(*pairs[wrong[-1]]))
            turned.append(Difference(name, values, position))
        scales = (first.scales[index], second.scales[other])
        if not math.isclose(*scales, rel_tol=_RELATIVE_ERROR + rounding):
            scaled.append(
                Difference("the scale of rotated elements", _numbers_of(*scales), position)
            )
    for alike in filter(None, (turned, scaled)):
        # From position 0 on it affects every token.
        yield replace(alike[0], reach=alike[-1].reach if alike[0].reach else 0)


def _is_same_angle(angles: tuple[float, float], turned: float, rounding: float) -> bool:
    """Return whether two angles in radians differ by rounding alone.

    Args:
        turned: angle without its whole turns, to which frequencies' errors are relative.
        rounding: relative error of cosines and sines; of a small angle it is relative as well.
    """
    # Angles of 3.1 and -3.1 are 0.083 apart, not 6.2: a whole turn changes nothing.
    difference = abs(math.remainder(angles[0] - angles[1], 2 * math.pi))
    return difference <= _RELATIVE_ERROR * turned + rounding * min(1.0, 2 * abs(angles[0]))


def _numbers_of(*values: float | None) -> tuple[str, ...]:
    return tuple("none" if value is None else f"{value:.6g}" for value in values)


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
