"""Records of attention: frequencies from rotary tables, and comparisons of all ranks' layers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hybrid_engine.compute_check.attention import (
    Attention,
    Rotary,
    attention_differences,
    differences,
    rotary_of_table,
    unread_layers,
)


def table(frequencies: torch.Tensor, num_positions: int, dtype: torch.dtype, scale: float = 1.0) -> Rotary:
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float64), frequencies)
    return rotary_of_table((scale * angles.cos()).to(dtype), (scale * angles.sin()).to(dtype))


FREQUENCIES = 5e5 ** -(torch.arange(0, 128, 2, dtype=torch.float64) / 128)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_frequencies_are_read_from_a_table(dtype: torch.dtype) -> None:
    exact = Attention(1.0, rotary=Rotary(tuple(FREQUENCIES.tolist()), 1.25))

    def differing(frequencies: torch.Tensor, scale: float = 1.25) -> list[str]:
        read = table(frequencies, 16_384, dtype, scale)
        return [difference.name for difference in differences(exact, replace(exact, rotary=read))]

    assert differing(FREQUENCIES) == []
    assert differing(FREQUENCIES, 1.3) == ["the scale of rotated elements"]
    assert differing(FREQUENCIES[:32]) == ["the number of rotary frequencies"]
    (name,) = differing(FREQUENCIES * 1.01)
    assert name.startswith("rotary frequency ")
    later = torch.where(FREQUENCIES < 1e-3, FREQUENCIES / 8, FREQUENCIES)  # hardly visible in the first tokens
    assert differing(later) == ["rotary frequency 63"]


def test_a_window_beyond_the_longest_sequence_has_no_effect() -> None:
    whole = {0: [Attention(1.0)]}
    windowed = {0: [Attention(1.0, window=128)]}
    assert attention_differences(whole, windowed, 127) == []
    assert len(attention_differences(whole, windowed, 128)) == 1
    assert len(attention_differences(whole, windowed, None)) == 1


def test_layers_of_all_ranks_are_compared() -> None:
    """Replicas must be equal too. Layers that a side cannot read are reported."""
    plain = Attention(1.0)
    scaled = Attention(2.0)
    unread = Attention(1.0, rotary=None)
    trainer = {0: [plain], 1: [plain, scaled], 2: [plain], 4: [scaled], 5: [unread]}
    inference = {number: [plain] for number in (0, 1, 2, 3, 4, 5)}
    scale = "the scale of attention scores is 2 for the trainer and 1 for vLLM"
    assert attention_differences(trainer, inference, None) == [f"in layers 1, 4, {scale}"]
    assert unread_layers(trainer, inference) == [3, 5]
