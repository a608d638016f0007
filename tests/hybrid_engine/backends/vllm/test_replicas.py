"""Independent replicas, and failures of one replica. The ranks assert."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hybrid_engine.backends.vllm import InferenceEngine, InferenceSettings, Sampling
from hybrid_engine.config import GenerateConfig
from hybrid_engine.errors import (
    ConfigError,
    HybridEngineError,
    ModelError,
    RemoteError,
)
from tests.harness.launch import of_all_ranks, on_engines
from tests.hybrid_engine.backends.vllm import support
from tests.hybrid_engine.backends.vllm.asking import (
    PROMPTS,
    build,
    error_of,
    failing,
    job,
    restart,
    sizes,
)
from tests.zoo.checkpoint_shapes import checkpoint_shapes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

FOUR = Sampling(n=4, max_tokens=6, ignore_eos=True)


@on_engines(2, timeout=600)
def test_replicas_are_independent(tmp_path: Path) -> None:
    rank = job().rank
    config = support.LLAMA
    path = support.write_config(tmp_path / "llama", config)
    _refuse_builds(path, tmp_path)
    engine = build(path, config, sizes=sizes())
    assert (engine.place.dp_rank, engine.place.pp_rank, engine.place.tp_rank) == (rank, 0, 0)
    support.fill_by_records(engine.adaptor, support.random_weights(config, 0))
    num_prompts = 1 + 2 * rank  # unequal numbers; below, one replica has no prompts
    assert [len(engine.generate(PROMPTS[:num_prompts], FOUR)) for _ in range(2)] == [
        num_prompts
    ] * 2
    assert len(engine.generate(PROMPTS if rank == 0 else [], FOUR)) == (3 if rank == 0 else 0)
    first, second = of_all_ranks(
        [completion.token_ids for completion in engine.generate(PROMPTS[:1], FOUR)[0]]
    )
    assert first != second
    _fail_on_one(engine)
    stop_everywhere = Sampling(temperature=0.0, max_tokens=6, stop_token_ids=tuple(range(130)))
    stopped = engine.generate(PROMPTS[:1], stop_everywhere)[0][0]
    assert (stopped.finish_reason, len(stopped.token_ids), len(stopped.logprobs)) == ("stop", 1, 1)
    engine.shutdown()
    _fill_without_generating(tmp_path, support.LLAMA, pipeline=2)
    _fill_without_generating(tmp_path, support.QWEN3_MOE, expert=2)


def _refuse_builds(path: str, base: Path) -> None:
    """Refuse sizes, architectures and tensors that vLLM does not take, also on one rank."""
    shapes = checkpoint_shapes(support.LLAMA)
    misshapen = {**shapes, "model.layers.0.mlp.up_proj.weight": (95, 64)}
    unknown = support.write_config(
        base / "unknown", {**support.LLAMA, "architectures": ["NoSuchModel"]}
    )
    on_one = (ModelError, "0.mlp") if job().rank == 1 else (RemoteError, "rank 1")
    for where, tensors, chosen, kind, message in (
        (path, shapes, sizes(expert=2), ConfigError, "Number of experts"),
        (unknown, shapes, sizes(), ConfigError, "no class for .*NoSuchModel"),
        (path, misshapen if job().rank == 1 else shapes, sizes(), *on_one),
    ):
        settings = InferenceSettings(where, chosen, GenerateConfig(max_model_len=64))
        with pytest.raises(kind, match=message):
            InferenceEngine(settings, tensors, job())


def _fail_on_one(engine: InferenceEngine) -> None:
    """Fail one of two replicas half-way: both calls end, and the next call is unaffected."""

    def sample() -> list[Any]:
        return [
            [completion.token_ids for completion in row]
            for row in engine.generate_over_replicas(PROMPTS, FOUR)
        ]

    restart(engine, 5)
    expected = sample()
    restart(engine, 5)
    with failing(
        engine.llm.llm_engine, "step", MemoryError, after=2 if engine.place.dp_rank == 1 else 1000
    ):
        assert error_of(sample) == (
            "GenerationError" if engine.place.dp_rank == 1 else "RemoteError"
        )
    assert sample() == expected


def _fill_without_generating(base: Path, config: dict[str, Any], **chosen: int) -> None:
    """Pipelines and experts accept weights but cannot generate on a CPU."""
    path = support.write_config(base / config["model_type"], config)
    engine = build(path, config, sizes=sizes(**chosen))
    support.fill_by_records(engine.adaptor, support.random_weights(config, 0))
    assert support.is_ready(engine.adaptor)
    with pytest.raises(HybridEngineError, match="on CPU loads but cannot generate"):
        engine.generate(PROMPTS, Sampling())
    engine.shutdown()
