"""Which layers megatron-core builds on which pipeline stage and virtual chunk.

Source: megatron-core 0.16.1, `transformer_block.get_num_layers_to_build`, `transformer_layer.
get_transformer_layer_offset`, `pipeline_parallel_layer_layout`, `multi_token_prediction.mtp_on_this_rank`,
`transformer_block.TransformerBlock.has_final_layernorm_in_this_stage`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hybrid_engine.errors import Violation, clipped, shortened

EMBEDDING, LAYER, MTP, LOSS = "E", "t", "m", "L"
_REPEATED = (re.compile(r"\(([^()]+)\)\*([0-9]+)"), re.compile(r"([^*()])\*([0-9]+)"))
_MOST_LETTERS = 100_000
"""Of a layout, repeats written out."""


@dataclass(frozen=True, slots=True)
class PipelineSplit:
    """How the layers are dealt out; fields as in `TrainParallelism`, with None or false for what is not set."""

    pipeline: int
    virtual: int | None
    first: int | None
    last: int | None
    counts_embedding: bool
    counts_loss: bool
    layout: str | None


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one model chunk has.

    Attributes:
        stage, virtual: pipeline stage; number of the chunk among those of the stage.
        positions: of its layers among all that Megatron builds, no-op ones included; from 0.
        has_embedding, has_head: it is the model's first, its last chunk.
        has_mtp: the layers for multi-token prediction, and an embedding for them.
        has_final_norm: the norm after the decoder.
    """

    stage: int
    virtual: int
    positions: range
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


def chunks_of(split: PipelineSplit, num_layers: int, num_mtp_layers: int) -> list[Chunk]:
    """All chunks in the order in which layers run; `num_layers` counts no-op layers. The split must be possible."""
    kinds = _contents(split, num_layers, num_mtp_layers)
    chunks, position = [], 0
    for number, kind in enumerate(kinds):
        count, is_last = kind.count(LAYER), number == len(kinds) - 1
        positions = range(position, position + count)
        ends_decoder = num_layers - 1 in positions
        chunks.append(
            Chunk(
                stage=number % split.pipeline,
                virtual=number // split.pipeline,
                positions=positions,
                has_embedding=number == 0,
                has_head=is_last,
                has_mtp=MTP in kind,
                has_final_norm=ends_decoder if num_mtp_layers else is_last,
            )
        )
        position += count
    return chunks


def split_violations(split: PipelineSplit, num_layers: int, num_mtp_layers: int) -> list[Violation]:
    """Everything that makes a split impossible; keys are those of `TrainParallelism`."""
    others = {
        "num_layers_in_first_pipeline_stage": split.first is not None,
        "num_layers_in_last_pipeline_stage": split.last is not None,
        "account_for_embedding_in_pipeline_split": split.counts_embedding,
        "account_for_loss_in_pipeline_split": split.counts_loss,
    }
    given = [key for key, is_set in others.items() if is_set]
    if split.layout is not None:
        found = [Violation(key, "set beside a layout of every stage", "Use one of the two") for key in given]
        return [*found, *_layout_violations(split, num_layers, num_mtp_layers)]
    found = []
    if split.virtual is not None and split.pipeline == 1:
        found.append(Violation("virtual_pipeline", "virtual stages without pipeline parallelism", "Leave it out"))
    if split.virtual is not None and split.pipeline == 2 and None not in (split.first, split.last):
        problem = "virtual stages of a first and a last stage with none between, which megatron-core 0.16 cannot number"
        found.append(Violation("virtual_pipeline", problem, "Give a layout of every stage"))
    if split.pipeline == 1:
        return found + [Violation(key, "set for a pipeline of one stage", "Leave it out") for key in given]
    if len(given) > 1 and given[0].startswith("num_layers") and given[-1].startswith("account"):
        problem = "set beside the number of layers of the first or last stage"
        return [*found, *(Violation(key, problem, "Use one of the two") for key in given if key.startswith("account"))]
    return [*found, *_count_violations(split, num_layers)]


def _contents(split: PipelineSplit, num_layers: int, num_mtp_layers: int) -> list[str]:
    """What each chunk has, in the letters of Megatron's notation."""
    if split.layout is not None:
        return parse_layout(split.layout)
    virtual = split.virtual or 1
    counts = [count // virtual for count in _stage_sizes(split, num_layers)] * virtual
    counts[0] -= split.counts_embedding
    counts[-1] -= split.counts_loss
    kinds = [LAYER * count for count in counts]
    kinds[-1] += MTP * num_mtp_layers
    return kinds


def _stage_sizes(split: PipelineSplit, num_layers: int) -> list[int]:
    """Layers of each stage, with embedding and head counted where the split counts them."""
    left = num_layers + split.counts_embedding + split.counts_loss - (split.first or 0) - (split.last or 0)
    num_even = split.pipeline - (split.first is not None) - (split.last is not None)
    sizes = [left // num_even] * num_even if num_even else []
    sizes = sizes if split.first is None else [split.first, *sizes]
    return sizes if split.last is None else [*sizes, split.last]


def _count_violations(split: PipelineSplit, num_layers: int) -> Iterator[Violation]:
    sizes = _stage_sizes(split, num_layers)
    total = num_layers + split.counts_embedding + split.counts_loss
    uneven = split.first is not None or split.last is not None
    key = "num_layers_in_first_pipeline_stage" if split.first is not None else "num_layers_in_last_pipeline_stage"
    if sum(sizes) != total or min(sizes) < 0:
        counted = f"{num_layers} layers" + (f", {total} with embedding and head counted," if total > num_layers else "")
        remedy = "Choose stages that add up" if uneven else "Use a divisor, first/last stage sizes or a layout"
        yield Violation(
            key if uneven else "pipeline",
            f"{counted} do not divide into {split.pipeline} stages"
            + (f", {split.first or 'even'} in the first and {split.last or 'even'} in the last" if uneven else ""),
            remedy,
        )
        return
    virtual = split.virtual or 1
    if bad := sorted({size for size in sizes if size % virtual}):
        yield Violation(
            "virtual_pipeline",
            f"{virtual} chunks do not divide a stage of {', '.join(map(str, bad))} layers",
            "Choose a number of chunks that divides every stage",
        )
    elif (split.counts_embedding and sizes[0] == 0) or (split.counts_loss and sizes[-1] == 0):
        yield Violation("pipeline", "more stages than layers", "Use fewer stages")


def _layout_violations(split: PipelineSplit, num_layers: int, num_mtp_layers: int) -> Iterator[Violation]:
    key = "pipeline_layout"
    try:
        chunks = parse_layout(split.layout or "")
    except ValueError as error:
        yield Violation(key, str(error), "Correct the layout")
        return
    if len(chunks) % split.pipeline:
        yield Violation(key, f"{len(chunks)} chunks on {split.pipeline} stages", "Give every stage as many chunks")
        return
    virtual = len(chunks) // split.pipeline
    if split.virtual is not None and split.virtual != virtual:
        problem = f"{split.virtual}, but the layout has {virtual} chunks for each stage"
        yield Violation("virtual_pipeline", problem, "Leave it out")
    whole = "".join(chunks)
    counts = Counter(whole)
    for letter, expected, what in ((LAYER, num_layers, "layers"), (MTP, num_mtp_layers, "layers for further tokens")):
        if counts[letter] != expected:
            yield Violation(key, f"{counts[letter]} {what} ({letter}), the model has {expected}", "Name each once")
    if not (whole.startswith(EMBEDDING) and whole.endswith(LOSS) and counts[EMBEDDING] == counts[LOSS] == 1):
        yield Violation(key, "it must begin with its only E and end with its only L", "Correct the layout")
    yield from _mtp_violations(chunks, split.pipeline, num_mtp_layers)


def _mtp_violations(chunks: Sequence[str], pipeline: int, num_mtp_layers: int) -> Iterator[Violation]:
    """Megatron wants all of them in one chunk, the last of its stage, after the decoder."""
    numbers = [number for number, chunk in enumerate(chunks) if MTP in chunk]
    if not numbers:
        return
    whole = "".join(chunks)
    is_together = len(numbers) == 1 and chunks[numbers[0]].count(MTP) == num_mtp_layers
    if not is_together or numbers[0] < len(chunks) - pipeline or LAYER in whole[whole.index(MTP) :]:
        problem = "layers for further tokens (m) that are not together in the last chunk of a stage, after all others"
        yield Violation("pipeline_layout", problem, "Put them at the end")
