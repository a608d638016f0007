"""Layers of each pipeline stage and virtual chunk in megatron-core.

Sources: megatron-core 0.16.1 (and the same to 0.19.2),
`transformer_block.get_num_layers_to_build`,
`transformer_layer.get_transformer_layer_offset`,
`pipeline_parallel_layer_layout`,
`multi_token_prediction.mtp_on_this_rank`,
`transformer_block.TransformerBlock.has_final_layernorm_in_this_stage`;
for a HybridModel, 0.19.2, `models/hybrid/hybrid_layer_allocation.py`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from hybrid_engine.errors import Violation, Violations, clipped, shortened
from hybrid_engine.layouts.parallelism import TrainParallelism

EMBEDDING, LAYER, MTP, LOSS = "E", "t", "m", "L"
_REPEATED = (re.compile(r"\(([^()]+)\)\*([0-9]+)"), re.compile(r"([^*()])\*([0-9]+)"))
_MAX_LETTERS = 100_000
"""Limit of a layout's length after expanding repeats."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """The contents of one model chunk.

    Attributes:
        stage: pipeline stage.
        virtual: number of the chunk within its stage.
        positions: positions of its layers among all layers that Megatron builds, no-op layers
            included, from 0.
        attention: checkpoint numbers of the layers with attention in the chunk.
        mlp: checkpoint numbers of the layers with MLP or experts in the chunk. It differs from
            `attention` only in a HybridModel, which builds these as separate layers, for a
            checkpoint that does not.
        has_embedding: True for the first chunk of the model.
        has_head: True for the last chunk of the model.
        has_mtp: True if it has the MTP (multi-token prediction) layers, with an embedding for them.
        has_final_norm: True if it has the norm after the decoder.
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
    """Expand Megatron's layout notation into a string of E, t, m and L per chunk.

    Chunks are in the order in which their layers run. `|` ends a chunk, `x*3` and `(xy|)*3`
    repeat, commas and spaces are ignored.

    Raises:
        ValueError: the notation is invalid or expands to too many layers.
    """
    expanded = text.replace(",", "").replace(" ", "")
    # Parentheses first: (t*2|)*3 becomes t*2|t*2|t*2|, and then each t*2 becomes tt.
    for repeated in _REPEATED:
        # Nine digits suffice to exceed the limit. `int` refuses numbers of thousands of digits.
        added = [len(match[1]) * int(match[2][:9]) for match in repeated.finditer(expanded)]
        if len(expanded) + sum(added) > _MAX_LETTERS:
            raise ValueError(f"{shortened(text)} stands for more than {_MAX_LETTERS} layers")
        expanded = repeated.sub(lambda match: match[1] * int(match[2]), expanded)
    unknown = sorted(set(expanded) - {EMBEDDING, LAYER, MTP, LOSS, "|"})
    if unknown:
        known = "known are E, t, m, L, |, * and parentheses"
        raise ValueError(f"{clipped(' '.join(unknown))} in {shortened(text)}; {known}")
    return expanded.split("|")


def chunks_of(sizes: TrainParallelism, num_layers: int, num_mtp_layers: int) -> list[Chunk]:
    """Return all chunks of a model, in the order in which its layers run.

    `sizes` must satisfy the size rules.
    """
    pattern = sizes.hybrid_layer_pattern
    if pattern is None:
        contents = _contents(sizes, num_layers + len(sizes.noop_layers), num_mtp_layers)
        lengths = [content.count(LAYER) for content in contents]
    else:
        contents = _segments(pattern, sizes.pipeline)
        lengths = [len(content) for content in contents]
    num_positions = sum(lengths)
    chunks: list[Chunk] = []
    start = 0
    for number, (content, length) in enumerate(zip(contents, lengths, strict=True)):
        positions = range(start, start + length)
        start += length
        if pattern is None or num_positions == num_layers:
            attention = _checkpoint_numbers(positions, sizes.noop_layers)
            mlp = attention
        else:
            # Attention and MLP in turn share a checkpoint layer.
            attention = tuple(position // 2 for position in positions if position % 2 == 0)
            mlp = tuple(position // 2 for position in positions if position % 2 == 1)
        is_last = number == len(contents) - 1
        has_last_layer = num_positions - 1 in positions
        chunks.append(
            Chunk(
                # Consecutive chunks are on consecutive stages; each round is a virtual stage.
                # PP 2 with 2 chunks each: chunks 0 1 2 3 are on stages 0 1 0 1, in virtual stages 0
                # 0 1 1.
                stage=number % sizes.pipeline,
                virtual=number // sizes.pipeline,
                positions=positions,
                attention=attention,
                mlp=mlp,
                has_embedding=number == 0,
                has_head=is_last,
                has_mtp=MTP in content,
                # megatron-core puts the norm behind the last decoder layer if MTP layers follow,
                # which may be on a later stage; else into the last chunk.
                has_final_norm=has_last_layer if num_mtp_layers else is_last,
            )
        )
    return chunks


def _checkpoint_numbers(positions: range, noop_layers: Sequence[int]) -> tuple[int, ...]:
    """Return the checkpoint's numbers of layers. The checkpoint does not count no-op layers."""
    numbers = []
    for position in positions:
        if position not in noop_layers:
            # Positions 0 1 2 3 4 with a no-op at 1: checkpoint layers 0, none, 1, 2, 3.
            numbers.append(position - sum(noop < position for noop in noop_layers))
    return tuple(numbers)


_FIRST, _LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
UNEVEN = (
    _FIRST,
    _LAST,
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
"""Sizes that make stages uneven: first the explicit lengths, then the additional counts."""


def split_violations(
    sizes: TrainParallelism,
    num_layers: int,
    num_mtp_layers: int,
) -> Violations:
    """Yield the violations of sizes that cannot divide a model's layers into stages.

    Keys are attributes of `TrainParallelism`.
    """
    num_positions = num_layers + len(sizes.noop_layers)
    uneven = [key for key in UNEVEN if getattr(sizes, key) not in (None, False)]
    if sizes.pipeline_layout is not None:
        for key in uneven:
            yield Violation(
                key,
                "cannot be combined with a layout of every stage",
                "Use one of the two",
                code="conflicting-keys",
            )
        yield from _layout_violations(sizes, num_positions, num_mtp_layers)
        return
    if sizes.virtual_pipeline is not None:
        if sizes.pipeline == 1:
            yield Violation(
                "virtual_pipeline",
                "virtual stages without pipeline parallelism",
                "Leave it out",
                code="needs-pipeline",
            )
        if sizes.pipeline == 2 and {_FIRST, _LAST} <= set(uneven):
            yield Violation(
                "virtual_pipeline",
                "megatron-core cannot number virtual stages if the first and the last stage are "
                "given and there is no stage between them",
                "Give a layout of every stage",
                code="unsupported-split",
            )
    # Explicit lengths come first in `uneven`; they exclude the counts.
    has_lengths = bool(uneven) and uneven[0] in (_FIRST, _LAST)
    counts = [key for key in uneven if key not in (_FIRST, _LAST)]
    if sizes.pipeline == 1:
        for key in uneven:
            yield Violation(
                key,
                "set for a pipeline of one stage",
                "Leave it out",
                code="needs-pipeline",
            )
    elif has_lengths and counts:
        for key in counts:
            yield Violation(
                key,
                "cannot be combined with the number of layers of the first or last stage",
                "Use one of the two",
                code="conflicting-keys",
            )
    else:
        yield from _count_violations(sizes, num_positions)


def _contents(sizes: TrainParallelism, num_positions: int, num_mtp_layers: int) -> list[str]:
    """Return the contents of each chunk in the letters of Megatron's notation."""
    if sizes.pipeline_layout is not None:
        return parse_layout(sizes.pipeline_layout)
    virtual = sizes.virtual_pipeline or 1
    lengths = _stage_lengths(sizes, num_positions)
    # Stages of 4 layers with 2 chunks each: 2, 2 in the first round and 2, 2 in the second.
    counts = [length // virtual for length in lengths] * virtual
    # An embedding or head that counts as a layer takes the place of one.
    counts[0] -= sizes.account_for_embedding_in_pipeline_split
    counts[-1] -= sizes.account_for_loss_in_pipeline_split
    contents = [LAYER * count for count in counts]
    contents[-1] += MTP * num_mtp_layers
    return contents


def _stage_lengths(sizes: TrainParallelism, num_positions: int) -> list[int]:
    """Return the layers of each stage, including an embedding and a head that count as layers."""
    first = sizes.num_layers_in_first_pipeline_stage
    last = sizes.num_layers_in_last_pipeline_stage
    # 11 layers on 4 stages with 2 in the first: 2, 3, 3, 3.
    remaining = num_positions + _num_counted(sizes) - (first or 0) - (last or 0)
    num_even = sizes.pipeline - (first is not None) - (last is not None)
    lengths = [remaining // num_even] * num_even if num_even else []
    if first is not None:
        lengths.insert(0, first)
    if last is not None:
        lengths.append(last)
    return lengths


def _num_counted(sizes: TrainParallelism) -> int:
    """Return the number of embeddings and heads that count as layers."""
    return sizes.account_for_embedding_in_pipeline_split + sizes.account_for_loss_in_pipeline_split


def _count_violations(sizes: TrainParallelism, num_positions: int) -> Violations:
    first = sizes.num_layers_in_first_pipeline_stage
    last = sizes.num_layers_in_last_pipeline_stage
    lengths = _stage_lengths(sizes, num_positions)
    num_counted = num_positions + _num_counted(sizes)
    if sum(lengths) != num_counted or min(lengths) < 0:
        key = "pipeline"
        ends = ""
        remedy = "Use a divisor, first/last stage sizes or a layout"
        if first is not None or last is not None:
            key = _LAST if first is None else _FIRST
            ends = f", {first or 'even'} in the first and {last or 'even'} in the last"
            remedy = "Choose stages that add up"
        with_ends = ""
        if num_counted > num_positions:
            with_ends = f", {num_counted} with embedding and head counted,"
        yield Violation(
            key,
            f"{num_positions} layers{with_ends} do not divide into {sizes.pipeline} stages{ends}",
            remedy,
            code="not-divisible",
        )
        return
    virtual = sizes.virtual_pipeline or 1
    indivisible = sorted({length for length in lengths if length % virtual})
    if indivisible:
        yield Violation(
            "virtual_pipeline",
            f"{virtual} chunks do not divide a stage of {', '.join(map(str, indivisible))} layers",
            "Choose a number of chunks that divides every stage",
            code="not-divisible",
        )
        return
    # An end stage has to be at least as long as the embedding or head that counts as its layer.
    is_first_short = lengths[0] < sizes.account_for_embedding_in_pipeline_split
    is_last_short = lengths[-1] < sizes.account_for_loss_in_pipeline_split
    if is_first_short or is_last_short:
        yield Violation(
            "pipeline",
            "more stages than layers",
            "Use fewer stages",
            code="more-stages-than-layers",
        )


def _layout_violations(
    sizes: TrainParallelism,
    num_positions: int,
    num_mtp_layers: int,
) -> Violations:
    key = "pipeline_layout"
    try:
        chunks = parse_layout(sizes.pipeline_layout or "")
    except ValueError as error:
        yield Violation(key, str(error), "Correct the layout", code="invalid-layout")
        return
    yield from _chunk_violations(key, len(chunks), sizes.pipeline, sizes.virtual_pipeline)
    if len(chunks) % sizes.pipeline:
        return
    order = "".join(chunks)
    counts = Counter(order)
    for letter, expected, kind in (
        (LAYER, num_positions, "layers"),
        (MTP, num_mtp_layers, "MTP layers"),
    ):
        if counts[letter] != expected:
            yield Violation(
                key,
                f"{counts[letter]} {kind} ({letter}), the model has {expected}",
                "Name each layer once",
                code="different-number-of-layers",
            )
    is_once = counts[EMBEDDING] == counts[LOSS] == 1
    if not (is_once and order.startswith(EMBEDDING) and order.endswith(LOSS)):
        yield Violation(
            key,
            "it must begin with its only E and end with its only L",
            "Correct the layout",
            code="invalid-layout",
        )
    # Megatron requires all MTP layers in one chunk, the last of its stage, after the decoder.
    mtp_chunks = [number for number, chunk in enumerate(chunks) if MTP in chunk]
    if not mtp_chunks:
        return
    first = mtp_chunks[0]
    is_together = len(mtp_chunks) == 1 and chunks[first].count(MTP) == num_mtp_layers
    # The last chunks of all stages are the last `pipeline` chunks.
    is_last_of_stage = first >= len(chunks) - sizes.pipeline
    if not is_together or not is_last_of_stage or LAYER in order[order.index(MTP) :]:
        yield Violation(
            key,
            "MTP layers (m) must be together in the last chunk of a stage, after all other layers",
            "Move them to the end",
            code="invalid-layout",
        )


def _chunk_violations(key: str, num_chunks: int, pipeline: int, virtual: int | None) -> Violations:
    """Yield the violations of a number of chunks that does not fit the stages.

    Args:
        key: the size that has `|` between chunks.
        num_chunks: number of chunks in it.
        pipeline: number of stages.
        virtual: number of chunks of each stage; None if it is not configured.
    """
    of_stage, rest = divmod(num_chunks, pipeline)
    if rest:
        yield Violation(
            key,
            f"{num_chunks} chunks on {pipeline} stages",
            "Give every stage as many chunks",
            code="not-divisible",
        )
    elif pipeline == 1 and num_chunks > 1:
        yield Violation(
            key,
            f"{num_chunks} chunks without pipeline parallelism",
            "Leave out |, or raise pipeline_model_parallel_size",
            code="needs-pipeline",
        )
    elif virtual not in (None, of_stage):
        yield Violation(
            "virtual_pipeline",
            f"{virtual}, but there are {of_stage} chunks for each stage",
            "Leave it out, and end every chunk but the last with |",
            code="different-chunks",
        )


# -- HybridModel: every layer is either attention or MLP -------------------------------------------

# `*-*E|*-*-` is four layers of a checkpoint on two stages. Each is an attention (`*`, latent `+`)
# followed by an MLP (`-`) or experts (`E`), at a position each. A stage may end between the two.
_ATTENTION, _LATENT, _MLP, _EXPERTS, _PIPE = "*", "+", "-", "E", "|"
_REFUSED = {
    "M": "Mamba layers (M)",
    "G": "gated delta net layers (G)",
    "D": "sparse attention (D)",
    "/": "multi-token prediction (/)",
}
_PATTERN = "hybrid_layer_pattern"


def checkpoint_layers(pattern: str, num_layers: int) -> list[int]:
    """Return the checkpoint's number of the layer at every position.

    Args:
        pattern: layers of a HybridModel.
        num_layers: number of layers of the checkpoint. If it has one for every position, they may
            be of any kind.

    Raises:
        ValueError: the pattern has other kinds of layers.
    """
    if len(_symbols(pattern)) == num_layers:
        return list(range(num_layers))
    problem = _pattern_problem(pattern)
    if problem:
        raise ValueError(problem)
    return [position // 2 for position in range(len(_symbols(pattern)))]


def num_hybrid_chunks(pattern: str, pipeline: int) -> int:
    """Return the number of chunks of each stage."""
    return max(1, (pattern.count(_PIPE) + 1) // pipeline)


def has_experts(pattern: str) -> list[bool]:
    """Return whether there are experts at each position."""
    return [symbol == _EXPERTS for symbol in _symbols(pattern)]


def _segments(pattern: str, pipeline: int) -> list[str]:
    """Return the symbols of every chunk; without `|`, stages have equal lengths."""
    if _PIPE in pattern:
        return pattern.split(_PIPE)
    length = len(pattern) // pipeline
    return [pattern[start : start + length] for start in range(0, len(pattern), length)]


def _pattern_problem(pattern: str) -> str | None:
    """Return a message if a pattern is not pairs of attention and MLP."""
    symbols = _symbols(pattern)
    refused = [text for symbol, text in _REFUSED.items() if symbol in symbols]
    if refused:
        return f"{', '.join(refused)} in {shortened(pattern)}"
    if re.fullmatch(r"(?:[*+][-E])+", symbols):
        return None
    return (
        f"{shortened(pattern)} is not attention (* or +) and MLP (- or E) in turn, "
        "with | at the ends of stages"
    )


def pattern_violations(
    pattern: str,
    pipeline: int,
    virtual: int | None,
    experts: list[bool],
    has_latent: bool,
) -> Violations:
    """Yield the violations of a pattern that does not fit a model and its stages.

    Args:
        pattern: layers of a HybridModel.
        pipeline: number of stages.
        virtual: number of chunks of each stage; None if it is not configured.
        experts: for each layer of the checkpoint, True if it has experts.
        has_latent: True if the model's attention is latent (MLA).
    """
    problem = _pattern_problem(pattern)
    if problem:
        yield Violation(
            _PATTERN,
            problem,
            "Use a GPTModel, or attention and MLP in turn",
            code="unsupported-layers",
        )
        return
    symbols = _symbols(pattern)
    attention = _LATENT if has_latent else _ATTENTION
    expected = "".join(attention + (_EXPERTS if is_moe else _MLP) for is_moe in experts)
    if len(symbols) != len(expected):
        yield Violation(
            _PATTERN,
            f"{len(symbols) // 2} pairs of attention and MLP, the model has {len(experts)} layers",
            "Name each layer once",
            code="different-number-of-layers",
        )
    elif symbols != expected:
        position = next(at for at, symbol in enumerate(symbols) if symbol != expected[at])
        yield Violation(
            _PATTERN,
            f"{symbols[position]} at position {position}, where the model has {expected[position]}",
            f"Write {shortened(expected)}, with | at the ends of stages",
            code="different-layers",
        )
    yield from stage_violations(pattern, pipeline, virtual)


def stage_violations(pattern: str, pipeline: int, virtual: int | None) -> Violations:
    """Yield the violations of a pattern that does not fit the stages."""
    num_positions = len(_symbols(pattern))
    if _PIPE not in pattern and num_positions % pipeline:
        yield Violation(
            _PATTERN,
            f"{num_positions} positions do not divide into {pipeline} stages",
            "End every stage but the last with |",
            code="not-divisible",
        )
        return
    # Without `|` every stage is one chunk.
    num_chunks = pattern.count(_PIPE) + 1 if _PIPE in pattern else pipeline
    yield from _chunk_violations(_PATTERN, num_chunks, pipeline, virtual)


def _symbols(pattern: str) -> str:
    return pattern.replace(_PIPE, "")
