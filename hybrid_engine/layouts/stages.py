"""Which layers megatron-core builds on which pipeline stage and virtual chunk.

Source: megatron-core 0.16.1 (and the same to 0.19.2), `transformer_block.get_num_layers_to_build`, `transformer_layer.
get_transformer_layer_offset`, `pipeline_parallel_layer_layout`, `multi_token_prediction.mtp_on_this_rank`,
`transformer_block.TransformerBlock.has_final_layernorm_in_this_stage`; of a HybridModel, 0.19.2,
`models/hybrid/hybrid_layer_allocation.py`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hybrid_engine.errors import Violation, clipped, shortened
from hybrid_engine.layouts.parallelism import TrainParallelism

EMBEDDING, LAYER, MTP, LOSS = "E", "t", "m", "L"
_REPEATED = (re.compile(r"\(([^()]+)\)\*([0-9]+)"), re.compile(r"([^*()])\*([0-9]+)"))
_MOST_LETTERS = 100_000
"""Limit of a layout's length with repeats written out."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """The contents of one model chunk.

    Attributes:
        stage, virtual: pipeline stage; number of the chunk among those of the stage.
        positions: of its layers among all that Megatron builds, no-op layers included; from 0.
        attention, mlp: the checkpoint's numbers of the layers whose attention, whose MLP or experts it has. They differ
            only for a HybridModel, where each is a layer of its own.
        has_embedding, has_head: it is the model's first, its last chunk.
        has_mtp: the MTP (multi-token prediction) layers, and an embedding for them.
        has_final_norm: the norm after the decoder.
    """

    stage: int
    virtual: int
    positions: range
    attention: tuple[int, ...]
    mlp: tuple[int, ...]
    has_embedding: bool
    has_head: bool
    has_mtp: bool
    has_final_norm: bool


def parse_layout(text: str) -> list[str]:
    """Megatron's notation as one string of E, t, m and L for every chunk, in the order in which layers run.

    `|` ends a chunk, `x*3` and `(xy|)*3` repeat, commas mean nothing. Raises ValueError for anything else.
    """
    unrolled = text.replace(",", "").replace(" ", "")
    for repeated in _REPEATED:
        counts = [len(found[1]) * int(found[2][:9]) for found in repeated.finditer(unrolled)]
        if len(unrolled) + sum(counts) > _MOST_LETTERS:
            raise ValueError(f"{shortened(text)} stands for more than {_MOST_LETTERS} layers")
        unrolled = repeated.sub(lambda found: found[1] * int(found[2]), unrolled)
    if unknown := sorted(set(unrolled) - {EMBEDDING, LAYER, MTP, LOSS, "|"}):
        known = "known are E, t, m, L, |, * and parentheses"
        raise ValueError(f"{clipped(' '.join(unknown))} in {shortened(text)}; {known}")
    return unrolled.split("|")


def chunks_of(sizes: TrainParallelism, num_layers: int, num_mtp_layers: int) -> list[Chunk]:
    """All chunks of a model, in the order in which its layers run. The sizes must be possible."""
    pattern = sizes.hybrid_layer_pattern
    if pattern is None:
        contents = _contents(sizes, num_layers + len(sizes.noop_layers), num_mtp_layers)
        lengths = [content.count(LAYER) for content in contents]
    else:
        contents = _segments(pattern, sizes.pipeline)
        lengths = [len(content) for content in contents]
    num_positions = sum(lengths)
    chunks: list[Chunk] = []
    for number, (content, length) in enumerate(zip(contents, lengths, strict=True)):
        start = chunks[-1].positions.stop if chunks else 0
        positions = range(start, start + length)
        if pattern is None:
            attention = mlp = _numbers_at(positions, sizes.noop_layers)
        else:
            attention, mlp = (tuple(at // 2 for at in positions if at % 2 == half) for half in range(2))
        is_last = number == len(contents) - 1
        chunks.append(
            Chunk(
                stage=number % sizes.pipeline,
                virtual=number // sizes.pipeline,
                positions=positions,
                attention=attention,
                mlp=mlp,
                has_embedding=number == 0,
                has_head=is_last,
                has_mtp=MTP in content,
                has_final_norm=num_positions - 1 in positions if num_mtp_layers else is_last,
            )
        )
    return chunks


def _numbers_at(positions: range, noop_layers: Sequence[int]) -> tuple[int, ...]:
    """The checkpoint numbers its layers without the no-op ones."""
    return tuple(
        position - sum(noop < position for noop in noop_layers) for position in positions if position not in noop_layers
    )


_FIRST, _LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
UNEVEN = (_FIRST, _LAST, "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
"""Sizes that make stages of different lengths, those that say how long before those that count more than layers."""


def split_violations(sizes: TrainParallelism, num_layers: int, num_mtp_layers: int) -> Iterator[Violation]:
    """Everything that keeps a model's layers from being dealt out; keys are those of `TrainParallelism`."""
    num_positions = num_layers + len(sizes.noop_layers)
    given = [key for key in UNEVEN if getattr(sizes, key) not in (None, False)]
    if sizes.pipeline_layout is not None:
        yield from (Violation(key, "set beside a layout of every stage", "Use one of the two") for key in given)
        yield from _layout_violations(sizes, num_positions, num_mtp_layers)
        return
    if sizes.virtual_pipeline is not None and sizes.pipeline == 1:
        yield Violation("virtual_pipeline", "virtual stages without pipeline parallelism", "Leave it out")
    if sizes.virtual_pipeline is not None and sizes.pipeline == 2 and {_FIRST, _LAST} <= set(given):
        problem = "virtual stages of a first and a last stage with none between, which megatron-core cannot number"
        yield Violation("virtual_pipeline", problem, "Give a layout of every stage")
    if sizes.pipeline == 1:
        yield from (Violation(key, "set for a pipeline of one stage", "Leave it out") for key in given)
    elif counting := [key for key in given if key not in (_FIRST, _LAST) and given[0] in (_FIRST, _LAST)]:
        problem = "set beside the number of layers of the first or last stage"
        yield from (Violation(key, problem, "Use one of the two") for key in counting)
    else:
        yield from _count_violations(sizes, num_positions)


def _contents(sizes: TrainParallelism, num_positions: int, num_mtp_layers: int) -> list[str]:
    """Return the contents of each chunk in the letters of Megatron's notation."""
    if sizes.pipeline_layout is not None:
        return parse_layout(sizes.pipeline_layout)
    virtual = sizes.virtual_pipeline or 1
    counts = [count // virtual for count in _stage_lengths(sizes, num_positions)] * virtual
    counts[0] -= sizes.account_for_embedding_in_pipeline_split
    counts[-1] -= sizes.account_for_loss_in_pipeline_split
    kinds = [LAYER * count for count in counts]
    kinds[-1] += MTP * num_mtp_layers
    return kinds


def _stage_lengths(sizes: TrainParallelism, num_positions: int) -> list[int]:
    """Layers of each stage, with embedding and head counted where the split counts them."""
    first, last = sizes.num_layers_in_first_pipeline_stage, sizes.num_layers_in_last_pipeline_stage
    left = num_positions + _num_counted(sizes) - (first or 0) - (last or 0)
    num_even = sizes.pipeline - (first is not None) - (last is not None)
    lengths = [left // num_even] * num_even if num_even else []
    lengths = lengths if first is None else [first, *lengths]
    return lengths if last is None else [*lengths, last]


def _num_counted(sizes: TrainParallelism) -> int:
    """Number of embeddings and heads that the split counts as layers."""
    return sizes.account_for_embedding_in_pipeline_split + sizes.account_for_loss_in_pipeline_split


def _count_violations(sizes: TrainParallelism, num_positions: int) -> Iterator[Violation]:
    first, last = sizes.num_layers_in_first_pipeline_stage, sizes.num_layers_in_last_pipeline_stage
    lengths, counted = _stage_lengths(sizes, num_positions), num_positions + _num_counted(sizes)
    if sum(lengths) != counted or min(lengths) < 0:
        key, ends, remedy = "pipeline", "", "Use a divisor, first/last stage sizes or a layout"
        if first is not None or last is not None:
            key, remedy = (_LAST if first is None else _FIRST), "Choose stages that add up"
            ends = f", {first or 'even'} in the first and {last or 'even'} in the last"
        beside = f", {counted} with embedding and head counted," if counted > num_positions else ""
        yield Violation(key, f"{num_positions} layers{beside} do not divide into {sizes.pipeline} stages{ends}", remedy)
        return
    virtual = sizes.virtual_pipeline or 1
    if bad := sorted({length for length in lengths if length % virtual}):
        yield Violation(
            "virtual_pipeline",
            f"{virtual} chunks do not divide a stage of {', '.join(map(str, bad))} layers",
            "Choose a number of chunks that divides every stage",
        )
    elif lengths[0] < sizes.account_for_embedding_in_pipeline_split or lengths[-1] < (
        sizes.account_for_loss_in_pipeline_split
    ):
        yield Violation("pipeline", "more stages than layers", "Use fewer stages")


def _layout_violations(sizes: TrainParallelism, num_positions: int, num_mtp_layers: int) -> Iterator[Violation]:
    key = "pipeline_layout"
    try:
        chunks = parse_layout(sizes.pipeline_layout or "")
    except ValueError as error:
        yield Violation(key, str(error), "Correct the layout")
        return
    if len(chunks) % sizes.pipeline:
        yield Violation(key, f"{len(chunks)} chunks on {sizes.pipeline} stages", "Give every stage as many chunks")
        return
    virtual = len(chunks) // sizes.pipeline
    if sizes.pipeline == 1 and virtual > 1:
        yield Violation(key, f"{virtual} chunks without pipeline parallelism", "Leave out |")
    if sizes.virtual_pipeline is not None and sizes.virtual_pipeline != virtual:
        problem = f"{sizes.virtual_pipeline}, but the layout has {virtual} chunks for each stage"
        yield Violation("virtual_pipeline", problem, "Leave it out")
    whole = "".join(chunks)
    counts = Counter(whole)
    for letter, expected, what in ((LAYER, num_positions, "layers"), (MTP, num_mtp_layers, "MTP layers")):
        if counts[letter] != expected:
            yield Violation(key, f"{counts[letter]} {what} ({letter}), the model has {expected}", "Name each once")
    if not (whole.startswith(EMBEDDING) and whole.endswith(LOSS) and counts[EMBEDDING] == counts[LOSS] == 1):
        yield Violation(key, "it must begin with its only E and end with its only L", "Correct the layout")
    yield from _mtp_violations(chunks, sizes.pipeline, num_mtp_layers)


def _mtp_violations(chunks: Sequence[str], pipeline: int, num_mtp_layers: int) -> Iterator[Violation]:
    """Megatron wants all of them in one chunk, the last of its stage, after the decoder."""
    numbers = [number for number, chunk in enumerate(chunks) if MTP in chunk]
    if not numbers:
        return
    whole = "".join(chunks)
    is_together = len(numbers) == 1 and chunks[numbers[0]].count(MTP) == num_mtp_layers
    if not is_together or numbers[0] < len(chunks) - pipeline or LAYER in whole[whole.index(MTP) :]:
        problem = "MTP layers (m) must be together in the last chunk of a stage, after all other layers"
        yield Violation("pipeline_layout", problem, "Move them to the end")


# -- HybridModel: layers are attention or MLP alone ----------------------------------------------------------------

# `*-*E|*-*-` is four layers of a checkpoint on two stages: each is an attention (`*`, latent `+`) and the MLP (`-`) or
# experts (`E`) after it, with a position each. A stage may end between the two.
_ATTENTION, _LATENT, _MLP, _EXPERTS, _PIPE = "*", "+", "-", "E", "|"
_REFUSED = {
    "M": "Mamba layers (M)",
    "G": "gated delta net layers (G)",
    "D": "sparse attention (D)",
    "/": "multi-token prediction (/)",
}
_PATTERN = "hybrid_layer_pattern"


def checkpoint_layers(pattern: str) -> list[int]:
    """Return the checkpoint's number of the layer at every position. Raises ValueError for other kinds of layers."""
    if problem := _pattern_problem(pattern):
        raise ValueError(problem)
    return [position // 2 for position in range(len(_symbols(pattern)))]


def num_hybrid_chunks(pattern: str, pipeline: int) -> int:
    """Chunks of each stage."""
    return max(1, (pattern.count(_PIPE) + 1) // pipeline)


def has_experts(pattern: str) -> list[bool]:
    """Whether there are experts, by position."""
    return [symbol == _EXPERTS for symbol in _symbols(pattern)]


def _segments(pattern: str, pipeline: int) -> list[str]:
    """Return the symbols of every chunk; without `|`, stages of equal length."""
    if _PIPE in pattern:
        return pattern.split(_PIPE)
    length = len(pattern) // pipeline
    return [pattern[start : start + length] for start in range(0, len(pattern), length)]


def _pattern_problem(pattern: str) -> str | None:
    """Why a pattern is none of pairs of attention and MLP; None if it is."""
    symbols = _symbols(pattern)
    if refused := [text for symbol, text in _REFUSED.items() if symbol in symbols]:
        return f"{', '.join(refused)} in {shortened(pattern)}"
    if not re.fullmatch(r"(?:[*+][-E])+", symbols):
        return f"{shortened(pattern)} is not attention (* or +) and MLP (- or E) in turn, with | at the ends of stages"
    return None


def pattern_violations(
    pattern: str, pipeline: int, virtual: int | None, experts: list[bool], has_latent: bool
) -> Iterator[Violation]:
    """Everything for which a pattern does not fit a model and its stages.

    Args:
        pipeline, virtual: numbers of stages, and of chunks for each where that is given.
        experts: whether a layer of the checkpoint has experts, by layer.
        has_latent: the model's attention is latent (MLA).
    """
    if problem := _pattern_problem(pattern):
        yield Violation(_PATTERN, problem, "Use a GPTModel, or attention and MLP in turn")
        return
    symbols = _symbols(pattern)
    attention = _LATENT if has_latent else _ATTENTION
    expected = "".join(attention + (_EXPERTS if has else _MLP) for has in experts)
    if len(symbols) != len(expected):
        problem = f"{len(symbols) // 2} pairs of attention and MLP, the model has {len(experts)} layers"
        yield Violation(_PATTERN, problem, "Name each layer once")
    elif symbols != expected:
        position = next(at for at, symbol in enumerate(symbols) if symbol != expected[at])
        problem = f"{symbols[position]} at position {position}, where the model has {expected[position]}"
        yield Violation(_PATTERN, problem, f"Write {shortened(expected)}, with | at the ends of stages")
    num_segments = pattern.count(_PIPE) + 1
    if num_segments == 1 and len(symbols) % pipeline:
        problem = f"{len(symbols)} positions do not divide into {pipeline} stages"
        yield Violation(_PATTERN, problem, "End every stage but the last with |")
    elif num_segments > 1 and pipeline == 1:
        problem = f"{num_segments} chunks without pipeline parallelism"
        yield Violation(_PATTERN, problem, "Leave out |, or raise pipeline_model_parallel_size")
    elif num_segments > 1 and num_segments % pipeline:
        yield Violation(_PATTERN, f"{num_segments} chunks on {pipeline} stages", "Give every stage as many chunks")
    elif virtual is not None and virtual != num_hybrid_chunks(pattern, pipeline):
        problem = f"{virtual}, but the pattern has {num_hybrid_chunks(pattern, pipeline)} chunks for each stage"
        yield Violation("virtual_pipeline", problem, "Leave it out, and end every chunk but the last with |")


def _symbols(pattern: str) -> str:
    return pattern.replace(_PIPE, "")
