"""Records of attention: rotations at positions, and comparisons of all ranks' layers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hybrid_engine.compute_check.attention import (
    LENGTH,
    Attention,
    Rotary,
    attention_differences,
    compared_positions,
    differences,
    grouped,
    unread_layers,
)

FREQUENCIES = 5e5 ** -(torch.arange(0, 128, 2, dtype=torch.float64) / 128)
POSITIONS = compared_positions(
    16_383, {"rope_parameters": {"original_max_position_embeddings": 4096}}
)


def rotary(
    frequencies: torch.Tensor, dtype: torch.dtype = torch.float64, scale: float = 1.0
) -> Attention:
    angles = torch.outer(torch.tensor(POSITIONS, dtype=torch.float64), frequencies)
    rotated = ((scale * part).to(dtype) for part in (angles.cos(), angles.sin()))
    return Attention(1.0, rotary=Rotary.of_rotated(*rotated, POSITIONS))


def test_rotations_are_compared_around_the_original_length_and_at_the_last_position() -> None:
    assert POSITIONS == (0, 1, 4095, 4097, 16_383)
    assert compared_positions(100, {"original_max_position_embeddings": 4096}) == (0, 1, 100)


LATER = torch.where(
    FREQUENCIES < 1e-3, FREQUENCIES / 8, FREQUENCIES
)  # hardly visible in the first tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("frequencies", "scale", "name", "reach"),
    [
        (FREQUENCIES, 1.25, None, 0),
        (FREQUENCIES, 1.3, "the scale of rotated elements", 0),
        (FREQUENCIES[:32], 1.25, "the number of rotary frequencies", 0),
        (FREQUENCIES * 1.01, 1.25, "rotary", 16_383),
        (LATER, 1.25, "rotary frequency 63", 16_383),
    ],
)
def test_rotations_differ_by_more_than_rounding(
    frequencies: torch.Tensor, scale: float, name: str | None, reach: int, dtype: torch.dtype
) -> None:
    different = list(
        differences(rotary(FREQUENCIES, scale=1.25), rotary(frequencies, dtype, scale))
    )
    assert [difference.reach for difference in different] == ([] if name is None else [reach])
    assert all(name is not None and name in difference.name for difference in different)


def test_differences_that_a_run_reaches_are_kept_apart() -> None:
    """Log-probabilities of a run decide about those; none of its tokens shows the others."""
    plain = replace(rotary(FREQUENCIES), window=1000)
    odd = {
        0: replace(plain, scale=2.0, rotary=Rotary()),
        1: replace(plain, window=100),
        2: rotary(LATER),
    }
    sides = (grouped(dict.fromkeys(odd, plain)), grouped(odd))
    scale = "in layer 0, the scale of attention scores is 1 for the trainer and 2 for vLLM"
    frequencies = "the number of rotary frequencies (unless its module is unused)"
    rotated = f"in layer 0, {frequencies} is 64 for the trainer and 0 for vLLM"
    unreached, reached = attention_differences(*sides, None, 100 + LENGTH)
    assert sorted(reached[:2]) == sorted([scale, rotated])
    assert reached[2].startswith("in layer 1, the sliding window is 1000 tokens")
    assert ["in layer 2, rotary frequency 63" in text for text in unreached] == [True, False]
    unreached, reached = attention_differences(*sides, None, 99 + LENGTH)
    assert any("the sliding window is 1000 tokens" in text for text in unreached)
    unreached, reached = attention_differences(*sides, None)
    assert (len(unreached) > 3, reached) == (True, [])


def test_a_window_beyond_the_longest_sequence_has_no_effect() -> None:
    whole = grouped({0: Attention(1.0)})
    windowed = grouped({0: Attention(1.0, window=128)})
    for longest, num_differences in ((127, 0), (128, 1), (None, 1)):
        unreached, reached = attention_differences(whole, windowed, longest)
        assert (len(unreached), reached) == (num_differences, [])


def test_layers_of_all_ranks_are_compared() -> None:
    """Replicas must be equal too. Layers that a side cannot read are reported."""
    plain = Attention(1.0)
    scaled = Attention(2.0)
    unread = Attention(1.0, rotary=None)
    trainer = grouped({0: plain, 1: plain, 2: plain, 5: unread}) + grouped({1: scaled, 4: scaled})
    inference = grouped(dict.fromkeys(range(6), plain))
    scale = "the scale of attention scores is 2 for the trainer and 1 for vLLM"
    assert attention_differences(trainer, inference, None) == ([f"in layers 1, 4, {scale}"], [])
    assert unread_layers(trainer, inference) == [3, 5]
