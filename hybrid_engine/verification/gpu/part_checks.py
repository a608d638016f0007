"""Stage 2, its parts before they come together: vLLM's libraries, Megatron alone, vLLM alone. Each takes seconds.

    python -m hybrid_engine.verification.gpu.part_checks PART JOB RESULTS      as one rank

Where both engines together do not even start, these say which of them is the reason.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from hybrid_engine.assembly import inference_settings
from hybrid_engine.attaching.preparing import apply_patches
from hybrid_engine.backends.vllm import InferenceEngine, Sampling
from hybrid_engine.memory import elastic
from hybrid_engine.memory.cuda_driver import taken_nbytes
from hybrid_engine.memory.offloader import Offloader
from hybrid_engine.models import table_for
from hybrid_engine.ranks.digests import box_digest
from hybrid_engine.ranks.job import Job
from hybrid_engine.trainer.batches.same_batches import agreed_share
from hybrid_engine.trainer.ports import ActorTrainer
from hybrid_engine.verification.comparison import cross_entropy, tokens_and_labels
from hybrid_engine.verification.gpu.checks import Check, NothingToCheckError, Planned, judged, run_checks
from hybrid_engine.verification.gpu.gpus import GIB
from hybrid_engine.verification.gpu.small_job import MAX_TOKENS, SmallJob, differences

_LIBRARIES = {
    "cuda": ("vllm", "vllm._C_stable_libtorch", "vllm._custom_ops", "vllm.cumem_allocator"),
    "cpu": ("vllm", "vllm._custom_ops"),
}
"""vLLM itself only logs that the second cannot be imported, and fails much later."""
_NUM_STEPS = 3
_SCALE = 0.02  # of random weights


def libraries(job: SmallJob) -> list[Planned]:
    """Whether what was compiled for another torch can be imported with this one."""
    return [Planned("vLLM's libraries", partial(_imported, job))]


def _imported(job: SmallJob) -> Iterator[Check]:
    started = time.perf_counter()
    for name in _LIBRARIES[job.device]:
        importlib.import_module(name)
    platform = importlib.import_module("vllm.platforms").current_platform
    seconds = time.perf_counter() - started
    note = f"it is for {platform.device_type}"
    figure = f"{type(platform).__name__}, {seconds:.1f} s"
    yield judged("vLLM's libraries", platform.device_type == job.device, figure, note=note, seconds=seconds)


def megatron(job: SmallJob) -> list[Planned]:
    """Steps with an offload of everything in between, and steps in ordinary memory."""
    fused = replace(job, eager=False)
    steps = "Megatron alone: steps"
    return [
        Planned(steps, partial(_trained, job)),
        Planned("Megatron alone: steps with fused kernels", partial(_trained_fused, fused), (steps,)),
    ]


def _trained(job: SmallJob) -> Iterator[Check]:
    started = time.perf_counter()
    found = _state_after_steps(job, nullcontext(), is_offloaded=True)
    seconds = time.perf_counter() - started
    yield judged("Megatron alone: steps with offloads", True, f"build and {_NUM_STEPS} steps {seconds:.1f} s")
    ordinary = mock.patch.object(elastic, "driver_of", return_value=None)
    is_same = _state_after_steps(job, ordinary, is_offloaded=False) == found
    note = "the parameters have other bits"
    yield judged("Megatron alone: as in ordinary memory", is_same, "the same bits", note=note)


def _trained_fused(job: SmallJob) -> Iterator[Check]:
    """By torch.compile, which needs Triton and a C compiler; only on a GPU."""
    if job.device != "cuda":
        raise NothingToCheckError("there are none on the CPU")
    started = time.perf_counter()
    _state_after_steps(job, nullcontext(), is_offloaded=False)
    figure = f"build, compilation and {_NUM_STEPS} steps {time.perf_counter() - started:.1f} s"
    yield judged("Megatron alone: steps with fused kernels", True, figure)


def _state_after_steps(job: SmallJob, memory: AbstractContextManager[Any], *, is_offloaded: bool) -> list[int]:
    """Digests of the parameters after the steps; each but the first step counts on what the optimizer keeps."""
    from hybrid_engine.trainer.megatron.actor import build_actor

    apply_patches()
    config = job.config()
    table = table_for(config.hf_config())
    with ExitStack() as ends, memory:
        ranks = ends.enter_context(closing(Job.join(config.generate_config.timeout_seconds)))
        torch.manual_seed(0)
        train: ActorTrainer = build_actor(config, table, ranks, ends)
        offloader = Offloader(train.offload_items, reachable=train.reachable_tensors)
        for number in range(_NUM_STEPS):
            batch = tokens_and_labels(number, table.dims.vocab_size, 4)
            share = agreed_share(batch, train.limits, ranks.agreement, "training step")
            train.train_step(share, cross_entropy)
            if is_offloaded:
                offloader.offload()
                offloader.onload()
        items = [item for item in train.offload_items() if (item.kind, item.action) == ("param", "copy")]
        return [box_digest(item.tensor) for item in items]


def vllm(job: SmallJob) -> list[Planned]:
    """Weights that are released and filled again, and a second engine after the first."""
    return [Planned("vLLM alone", partial(_served, job))]


def _served(job: SmallJob) -> Iterator[Check]:
    config = job.config()
    table, settings = table_for(config.hf_config()), inference_settings(config, 1)
    completions = []
    with closing(Job.join(config.generate_config.timeout_seconds)) as ranks:
        for which in ("vLLM alone", "vLLM alone, built again"):
            started = time.perf_counter()
            engine = InferenceEngine(settings, table.shapes, ranks, dtypes=table.dtypes)
            yield judged(f"{which}: build", True, f"{time.perf_counter() - started:.1f} s")
            _fill(engine)
            completions.append(_drawn(engine, job))
            awake = taken_nbytes(ranks.device)
            engine.release()
            if which == "vLLM alone":
                yield _memory_back(job, awake - taken_nbytes(ranks.device), engine.adaptor.nbytes)
                _fill(engine)
                yield _same(f"{which}: released and filled again", _drawn(engine, job), completions[0])
                engine.release()
            engine.shutdown()
    yield _same("vLLM alone, built again: completions", completions[1], completions[0])


def _memory_back(job: SmallJob, nbytes: int, least: int) -> Check:
    name, figure = "vLLM alone: release", f"{nbytes / GIB:.2f} GiB of the GPU are back"
    if job.device == "cpu":
        return judged(name, True)
    return judged(name, nbytes >= least, figure, f"at least {least / GIB:.2f}, the weights", nbytes=nbytes)


def _same(name: str, found: list[list[int]], expected: list[list[int]]) -> Check:
    note = differences(found, expected)
    return judged(name, not note, "the same completions", note=note)


def _fill(engine: InferenceEngine) -> None:
    """Each group by itself, with values that depend on its place only."""
    groups = sorted({buffer.group for buffer in engine.adaptor.layout().buffers.values()})
    for seed, group in enumerate(groups):
        generator = torch.Generator(engine.job.device).manual_seed(seed)
        for flat in engine.adaptor.allocate([group]).values():
            flat.normal_(std=_SCALE, generator=generator)
        engine.adaptor.commit([group])
    engine.adaptor.finish_fill()
    engine.wake_kv_cache()
    engine.reset_caches()


def _drawn(engine: InferenceEngine, job: SmallJob) -> list[list[int]]:
    sampling = Sampling(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    return [list(answers[0].token_ids) for answers in engine.generate(job.prompts(), sampling)]


PARTS: Mapping[str, Any] = {each.__name__: each for each in (libraries, megatron, vllm)}
"""In the order in which they run."""


def main(part: str, job: str, results: str) -> None:
    """Run the checks of one part in this process, the only rank of a job."""
    if torch.cuda.is_available():
        torch.cuda.set_device(0)
    run_checks(PARTS[part](SmallJob(**json.loads(job))), Path(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
