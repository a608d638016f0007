"""Two replicas: refused settings, unequal and missing prompts, a failure on one of them, other orders of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybrid_engine.backends.vllm import Completion, InferenceEngine, InferenceSettings, Sampling
from hybrid_engine.config import GenerateConfig
from hybrid_engine.layouts.parallelism import InferenceParallelism
from tests.hybrid_engine.backends.vllm import support
from tests.hybrid_engine.backends.vllm.scenarios.asking import (
    GREEDY,
    PROMPTS,
    Answers,
    Drawn,
    Refusal,
    answers_of,
    build,
    job,
    refusal_of,
    sizes,
)
from tests.hybrid_engine.backends.vllm.scenarios.cycles import error_of, failing
from tests.zoo.checkpoint_shapes import checkpoint_shapes

FOUR = Sampling(n=4, max_tokens=6, ignore_eos=True)


@dataclass(frozen=True)
class NotBuilt:
    """Engines that cannot be: sizes, experts in a model without, architecture, and tensors, on all ranks or one."""

    world: Refusal
    no_experts: Refusal
    unknown: Refusal
    lacking: Refusal
    one_rank: Refusal


@dataclass(frozen=True)
class CannotGenerate:
    """An engine that takes weights but cannot generate on CPU."""

    took_weights: bool
    refusal: Refusal


@dataclass(frozen=True)
class Replica:
    """What one rank brought back.

    Attributes:
        not_built: see there.
        place: replica, stage and shard.
        num_completed: prompts of calls with unequal numbers of them.
        num_completed_alone: of a call in which the other replica has none.
        drawn: samples of one prompt.
        raised: the error here when the second replica fails.
        draws_as_before: whether the next call draws as if there had been no failure.
        seeded: with a seed of the request.
        stopped: with every token a stop token.
        cannot_generate: see there.
    """

    not_built: NotBuilt
    place: tuple[int, int, int]
    num_completed: list[int]
    num_completed_alone: int
    drawn: list[tuple[int, ...]]
    raised: str | None
    draws_as_before: bool
    seeded: tuple[int, ...]
    stopped: Completion
    cannot_generate: list[CannotGenerate]


@dataclass(frozen=True)
class Ordered:
    """Who is where in an order, and greedy answers: of all prompts, of one's own, and of all by way of all replicas."""

    dp_rank: int
    tp_rank: int
    answers: Answers
    local: Drawn
    over_replicas: Drawn


def run(directory: str) -> Replica:
    """All of it, on two ranks."""
    rank, config, base = job().rank, support.LLAMA, Path(directory)
    path = support.write_config(base / "llama", config)
    not_built = _build_what_cannot_be(path, base)
    engine = build(path, config, sizes=sizes())
    support.fill_by_records(engine.adaptor, support.random_weights(config, 0))
    num_completed = [len(engine.generate(PROMPTS[: 1 + 2 * rank], FOUR)) for _ in range(2)]
    num_alone = len(engine.generate(PROMPTS if rank == 0 else [], FOUR))
    first = [completion.token_ids for completion in engine.generate(PROMPTS[:1], FOUR)[0]]
    raised, as_before = _fail_on_one(engine)
    seeded = engine.generate(PROMPTS[:1], Sampling(max_tokens=6, ignore_eos=True, seed=3))[0][0].token_ids
    stop_everywhere = Sampling(temperature=0.0, max_tokens=6, stop_token_ids=tuple(range(130)))
    stopped = engine.generate(PROMPTS[:1], stop_everywhere)[0][0]
    place = (engine.dp_rank, engine.pp_rank, engine.tp_rank)
    engine.shutdown()
    cannot = [
        _fill_and_generate(base, support.LLAMA, pipeline=2),
        _fill_and_generate(base, support.QWEN3_MOE, expert=2),
    ]
    return Replica(not_built, place, num_completed, num_alone, first, raised, as_before, seeded, stopped, cannot)


def orders(directory: str, chosen: Sequence[tuple[int, ...] | None]) -> list[Ordered]:
    """Two replicas of two ranks each, in several orders."""
    job()
    config, results = support.LLAMA, []
    path = support.write_config(Path(directory) / "llama", config)
    for order in chosen:
        engine = build(path, config, sizes=sizes(tensor=2, rank_order=order))
        support.fill_by_records(engine.adaptor, support.random_weights(config, 0))
        local = engine.generate_over_replicas(PROMPTS[: job().rank], GREEDY, data="local")
        whole = engine.generate_over_replicas(PROMPTS, GREEDY)
        drawn = [[[one.token_ids for one in of_prompt] for of_prompt in each] for each in (local, whole)]
        results.append(Ordered(engine.dp_rank, engine.tp_rank, answers_of(engine), *drawn))
        engine.shutdown()
    return results


def _build_what_cannot_be(path: str, base: Path) -> NotBuilt:
    shapes = checkpoint_shapes(support.LLAMA)
    lacking = {name: shape for name, shape in shapes.items() if "layers.1.self_attn.k_proj" not in name}
    misshapen = {**shapes, "model.layers.0.mlp.up_proj.weight": (95, 64)}
    unknown = support.write_config(base / "unknown", {**support.LLAMA, "architectures": ["NoSuchModel"]})

    def attempt(where: str, tensors: Mapping[str, tuple[int, ...]], chosen: InferenceParallelism) -> Refusal:
        return refusal_of(
            lambda: InferenceEngine(InferenceSettings(where, chosen, GenerateConfig(max_model_len=64)), tensors, job())
        )

    return NotBuilt(
        world=attempt(path, shapes, InferenceParallelism(3)),
        no_experts=attempt(path, shapes, sizes(expert=2)),
        unknown=attempt(unknown, shapes, sizes()),
        lacking=attempt(path, lacking, sizes()),
        one_rank=attempt(path, misshapen if job().rank == 1 else shapes, sizes()),
    )


def _fail_on_one(engine: InferenceEngine) -> tuple[str | None, bool]:
    """One of two replicas fails half-way: the error here, and whether the next call draws as if there had been none."""

    def sample() -> list[Any]:
        return [[completion.token_ids for completion in row] for row in engine.generate_over_replicas(PROMPTS, FOUR)]

    engine.manual_seed(5)
    expected = sample()
    engine.manual_seed(5)
    with failing(engine.llm.llm_engine, "step", MemoryError, after=2 if engine.dp_rank == 1 else 1000):
        raised = error_of(sample)
    return raised, sample() == expected


def _fill_and_generate(base: Path, config: dict[str, Any], **chosen: int) -> CannotGenerate:
    path = support.write_config(base / config["model_type"], config)
    engine = build(path, config, sizes=sizes(**chosen))
    support.fill_by_records(engine.adaptor, support.random_weights(config, 0))
    took_weights = support.is_ready(engine.adaptor)
    refusal = refusal_of(lambda: engine.generate(PROMPTS, Sampling()))
    engine.shutdown()
    return CannotGenerate(took_weights, refusal)
