"""Megatron's pattern of a HybridModel: layers that are attention or MLP alone, and the stages they are dealt to.

`*-*E|*-*-` is four layers of a checkpoint on two stages: each is an attention (`*`, latent `+`) and the MLP (`-`) or
experts (`E`) after it, with a position each. A stage may end between the two.

Source: megatron-core 0.19.2, `models/hybrid/hybrid_layer_allocation.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hybrid_engine.errors import Violation, clipped, shortened

_ATTENTION, _LATENT, _MLP, _EXPERTS, _PIPE, _MTP = "*", "+", "-", "E", "|", "/"
_REFUSED = {"M": "Mamba layers (M)", "G": "gated delta net layers (G)", "D": "sparse attention (D)"}
_KEY = "hybrid_layer_pattern"


@dataclass(frozen=True, slots=True)
class Share:
    """What one model chunk has of the layers.

    Attributes:
        positions: of its layers among all of the model; from 0.
        attention, mlp: the checkpoint's numbers of the layers whose attention, whose MLP or experts it has.
        has_mtp: the MTP (multi-token prediction) layers.
    """

    positions: range
    attention: tuple[int, ...]
    mlp: tuple[int, ...]
    has_mtp: bool = False


def checkpoint_layers(pattern: str) -> list[int]:
    """The checkpoint's number of the layer at every position. Raises ValueError for what `pattern_problems` finds."""
    if problems := list(pattern_problems(pattern)):
        raise ValueError("; ".join(problems))
    return [position // 2 for position in range(len(_symbols(pattern)))]


def hybrid_shares(pattern: str, pipeline: int) -> list[Share]:
    """Of all chunks, in the order in which their layers run; without `|`, stages of equal length."""
    shares, start = [], 0
    for segment in _segments(pattern, pipeline):
        positions = range(start, start + len(segment))
        by_half: tuple[list[int], list[int]] = ([], [])
        for position in positions:
            by_half[position % 2].append(position // 2)
        shares.append(Share(positions, tuple(by_half[0]), tuple(by_half[1])))
        start = positions.stop
    return shares


def num_hybrid_chunks(pattern: str, pipeline: int) -> int:
    """Chunks of each stage."""
    return max(1, (pattern.count(_PIPE) + 1) // pipeline)


def has_experts(pattern: str) -> list[bool]:
    """Whether there are experts, by position."""
    return [symbol == _EXPERTS for symbol in _symbols(pattern)]


def pattern_problems(pattern: str) -> Iterator[str]:
    """Everything for which a pattern is none of pairs of attention and MLP."""
    if _MTP in pattern:
        yield f"multi-token prediction ({_MTP}) in {shortened(pattern)}"
        return
    symbols = _symbols(pattern)
    refused = [text for symbol, text in _REFUSED.items() if symbol in symbols]
    if refused:
        yield f"{', '.join(refused)} in {shortened(pattern)}"
    known = {_ATTENTION, _LATENT, _MLP, _EXPERTS, *_REFUSED}
    if unknown := sorted(set(symbols) - known):
        yield f"{clipped(' '.join(unknown))} in {shortened(pattern)}; known are * + - E and |"
    if refused or unknown:
        return
    odd = next((at for at, symbol in enumerate(symbols) if (symbol in (_ATTENTION, _LATENT)) != (at % 2 == 0)), None)
    if odd is not None or len(symbols) % 2:
        at = len(symbols) - 1 if odd is None else odd
        yield f"position {at} of {shortened(pattern)}: a checkpoint's layers are pairs of attention and MLP, in turn"


def pattern_violations(
    pattern: str, pipeline: int, virtual: int | None, experts: list[bool], has_latent: bool
) -> Iterator[Violation]:
    """Everything for which a pattern does not fit a model and its stages.

    Args:
        pipeline, virtual: numbers of stages, and of chunks for each where that is given.
        experts: whether a layer of the checkpoint has experts, by layer.
        has_latent: the model's attention is latent (MLA).
    """
    if problems := list(pattern_problems(pattern)):
        yield from (Violation(_KEY, problem, "Use a GPTModel, or attention and MLP in turn") for problem in problems)
        return
    symbols = _symbols(pattern)
    if len(symbols) != 2 * len(experts):
        problem = f"{len(symbols) // 2} pairs of attention and MLP, the model has {len(experts)} layers"
        yield Violation(_KEY, problem, "Name each layer once")
    else:
        has = has_experts(pattern)[1::2]
        differing = [layer for layer, expected in enumerate(experts) if has[layer] != expected]
        if differing:
            expected = _EXPERTS if experts[differing[0]] else _MLP
            yield Violation(_KEY, f"layer {differing[0]} is {expected} in the model", f"Write {expected} there")
    attention = _LATENT if has_latent else _ATTENTION
    if set(symbols[::2]) != {attention}:
        yield Violation(_KEY, f"the model's attention is {attention}", f"Write {attention} for every attention")
    num_segments = pattern.count(_PIPE) + 1
    if num_segments == 1 and len(symbols) % pipeline:
        problem = f"{len(symbols)} positions do not divide into {pipeline} stages"
        yield Violation(_KEY, problem, "End every stage but the last with |")
    elif num_segments > 1 and pipeline == 1:
        problem = f"{num_segments} chunks without pipeline parallelism"
        yield Violation(_KEY, problem, "Leave out |, or raise pipeline_model_parallel_size")
    elif num_segments > 1 and num_segments % pipeline:
        yield Violation(_KEY, f"{num_segments} chunks on {pipeline} stages", "Give every stage as many chunks")
    elif virtual is not None and virtual != num_hybrid_chunks(pattern, pipeline):
        problem = f"{virtual}, but the pattern has {num_hybrid_chunks(pattern, pipeline)} chunks for each stage"
        yield Violation("virtual_pipeline", problem, "Leave it out, and end every chunk but the last with |")


def _symbols(pattern: str) -> str:
    return pattern.replace(_PIPE, "")


def _segments(pattern: str, pipeline: int) -> list[str]:
    if _PIPE in pattern:
        return pattern.split(_PIPE)
    length = len(pattern) // pipeline
    return [pattern[start : start + length] for start in range(0, len(pattern), length)]
