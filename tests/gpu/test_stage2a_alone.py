"""Stage 2, the engines one by one: vLLM's libraries, Megatron alone, vLLM alone. Each takes
seconds.

If both engines together do not start, these checks show which of them is the reason.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch

from benchmarks.timings import taken_nbytes
from hybrid_engine.assembly import inference_settings
from hybrid_engine.attaching.attachment import apply_patches
from hybrid_engine.memory import elastic
from hybrid_engine.memory.offloader import Offloader
from hybrid_engine.models import table_for
from hybrid_engine.ranks.digests import box_digest
from hybrid_engine.ranks.job import Job
from hybrid_engine.records.layout import Layout
from hybrid_engine.tools.verify.comparison import cross_entropy, tokens_and_labels
from hybrid_engine.tools.verify.machine import GIB
from hybrid_engine.trainer.batches.batch_checks import agreed_share
from tests.gpu.conftest import Note
from tests.gpu.small_job import GREEDY, SmallJob, differences
from tests.harness.values import Values

if TYPE_CHECKING:
    from hybrid_engine.backends.vllm import InferenceEngine

pytestmark = [pytest.mark.engines, pytest.mark.slow]

LIBRARIES = {
    "cuda": ("vllm", "vllm._C_stable_libtorch", "vllm._custom_ops", "vllm.cumem_allocator"),
    "cpu": ("vllm", "vllm._custom_ops"),
}
"""If the second cannot be imported, vLLM only logs that and fails much later."""
NUM_STEPS = 3
SCALE = 0.02  # Standard deviation of random weights.


@pytest.fixture(scope="module")
def job(device: str, shared: Path, vllm_arguments: Values) -> SmallJob:
    return SmallJob(shared, device, eager=True, vllm=vllm_arguments)


class TestLibraries:
    def test_compiled_libraries_can_be_imported(self, device: str, note: Note) -> None:
        started = time.perf_counter()
        for name in LIBRARIES[device]:
            importlib.import_module(name)
        platform = importlib.import_module("vllm.platforms").current_platform
        note(f"{type(platform).__name__}, {time.perf_counter() - started:.1f} s")
        assert platform.device_type == device


class TestMegatron:
    @pytest.fixture(scope="class")
    def state(self, job: SmallJob) -> list[int]:
        return state_after_steps(job, nullcontext(), is_offloaded=True)

    def test_steps_with_offloads(self, state: list[int]) -> None:
        assert state

    def test_steps_in_ordinary_memory_give_the_same_bits(
        self, job: SmallJob, state: list[int]
    ) -> None:
        ordinary = mock.patch.object(elastic, "driver_of", return_value=None)
        assert state_after_steps(job, ordinary, is_offloaded=False) == state

    @pytest.mark.gpu
    def test_steps_with_fused_kernels(self, job: SmallJob, state: list[int]) -> None:
        """torch.compile fuses them, by Triton and a C compiler; the eager mode does not."""
        assert state_after_steps(replace(job, eager=False), nullcontext(), is_offloaded=False)


def state_after_steps(
    job: SmallJob, memory: AbstractContextManager[Any], *, is_offloaded: bool
) -> list[int]:
    """Return digests of the parameters after steps that depend on the optimizer's state."""
    from hybrid_engine.trainer.megatron.actor import build_actor

    apply_patches()
    config = job.config()
    table = table_for(config.hf_config())
    with ExitStack() as ends, memory:
        ranks = ends.enter_context(closing(Job.join(config.generate_config.timeout_seconds)))
        torch.manual_seed(0)
        engine = build_actor(config, table, ranks, ends).engine
        offloader = Offloader(engine.model)
        for number in range(NUM_STEPS):
            batch = tokens_and_labels(number, table.dims.vocab_size, 4)
            share = agreed_share(batch, engine.limits, ranks.agreement, "training step")
            engine.train_step(share, cross_entropy)
            if is_offloaded:
                offloader.offload()
                offloader.onload()
        items = [
            item
            for item in engine.model.offload_items()
            if (item.kind, item.action) == ("param", "copy")
        ]
        return [box_digest(item.tensor) for item in items]


@dataclass(frozen=True)
class Served:
    """A vLLM with random weights and its completions.

    Attributes:
        taken_nbytes: device memory while it is awake.
        traced: layout of its position, traced before the engine was built.
        traced_nbytes: device memory taken by the trace.
    """

    engine: InferenceEngine
    completions: list[list[int]]
    taken_nbytes: int
    traced: Layout
    traced_nbytes: int


class TestVllm:
    @pytest.fixture(scope="class")
    def ranks(self, job: SmallJob) -> Iterator[Job]:
        with closing(Job.join(job.config().generate_config.timeout_seconds)) as ranks:
            yield ranks

    @pytest.fixture(scope="class")
    def first(self, job: SmallJob, ranks: Job) -> Served:
        return served(job, ranks)

    @pytest.fixture(scope="class")
    def freed_nbytes(self, first: Served, ranks: Job) -> int:
        first.engine.release()
        return first.taken_nbytes - taken_nbytes(ranks.device)

    @pytest.fixture(scope="class")
    def drawn_again(self, job: SmallJob, first: Served, freed_nbytes: int) -> list[list[int]]:
        fill(first.engine)
        return drawn(first.engine, job)

    def test_build(self, first: Served) -> None:
        assert first.completions

    def test_its_position_was_traced_without_memory(self, first: Served, note: Note) -> None:
        note(
            f"{first.traced_nbytes / GIB:.2f} GiB of the GPU taken",
            "less than weights",
            nbytes=first.traced_nbytes,
        )
        held = first.engine.adaptor.layout()
        assert (first.traced.buffers, {*first.traced.shards}) == (held.buffers, {*held.shards})
        assert first.traced_nbytes < first.engine.adaptor.nbytes

    def test_release(self, device: str, first: Served, freed_nbytes: int, note: Note) -> None:
        weights = first.engine.adaptor.nbytes
        figure = f"{freed_nbytes / GIB:.2f} GiB of the GPU are back"
        note(figure, f"at least {weights / GIB:.2f}, the weights", nbytes=freed_nbytes)
        assert device == "cpu" or freed_nbytes >= weights

    def test_released_and_filled_again(self, first: Served, drawn_again: list[list[int]]) -> None:
        assert not differences(drawn_again, first.completions)

    def test_built_again(
        self, job: SmallJob, first: Served, drawn_again: list[list[int]], ranks: Job
    ) -> None:
        first.engine.release()
        first.engine.shutdown()
        second = served(job, ranks)
        second.engine.release()
        second.engine.shutdown()
        assert not differences(second.completions, first.completions)


def served(job: SmallJob, ranks: Job) -> Served:
    from hybrid_engine.backends.vllm import InferenceEngine, layout_of_position

    config = job.config()
    table = table_for(config.hf_config())
    before = taken_nbytes(ranks.device)
    traced = layout_of_position(
        inference_settings(config, 1), ranks, table.shapes, dtypes=table.dtypes
    )
    traced_nbytes = taken_nbytes(ranks.device) - before
    engine = InferenceEngine(
        inference_settings(config, 1), table.shapes, ranks, dtypes=table.dtypes
    )
    fill(engine)
    return Served(engine, drawn(engine, job), taken_nbytes(ranks.device), traced, traced_nbytes)


def fill(engine: InferenceEngine) -> None:
    """Fill each group separately, with values that depend on its position only."""
    groups = sorted({buffer.group for buffer in engine.adaptor.layout().buffers.values()})
    for seed, group in enumerate(groups):
        generator = torch.Generator(engine.job.device).manual_seed(seed)
        for flat in engine.adaptor.allocate([group]).values():
            flat.normal_(std=SCALE, generator=generator)
        engine.adaptor.commit([group])
    engine.adaptor.finish_fill()
    engine.wake_kv_cache()
    engine.reset_caches()


def drawn(engine: InferenceEngine, job: SmallJob) -> list[list[int]]:
    return [list(answers[0].token_ids) for answers in engine.generate(job.prompts(), GREEDY)]
