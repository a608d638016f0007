"""Stage 2, a server: vLLM in separate processes on the GPU of the trainer, which publishes and
withdraws weights.

Its completions equal those of both engines. While the trainer trains, it holds no memory of weights
and cache. It keeps captured graphs over switches.
"""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.timings import PeakOfDevice, taken_nbytes
from hybrid_engine.config import HybridConfig, load_config
from hybrid_engine.tools.verify.machine import GIB
from hybrid_engine.trainer.worker import ActorHybridWorker
from tests.gpu.conftest import Note
from tests.gpu.sizes import MEMORY_SHARE, NUM_SWITCHES, SLACK, most_in_switches
from tests.gpu.small_job import GREEDY, Answer, SmallJob, differences_of_answers
from tests.harness.values import Values
from tests.harness.vllm_server import FILLED, serving

pytestmark = [pytest.mark.engines, pytest.mark.slow]

INHERITED = ("VLLM_USE_FLASHINFER_SAMPLER",)
"""The only variables of vLLM that a server inherits; they describe the installation."""
MAX_KEPT = 0.25 * GIB
"""Device memory that a sleeping server's allocators may keep."""


def server_arguments(job: SmallJob) -> list[str]:
    """Return the arguments of a server like the engine of the other checks."""
    on_gpu = job.device == "cuda"
    arguments = [*FILLED, "--skip-tokenizer-init", "--max-num-seqs", "16", "--max-model-len", "64"]
    arguments += ["--dtype", job.sizes.params_dtype, *(["--enforce-eager"] if job.eager else [])]
    nbytes = job.sizes.kv_cache_mb << 20
    arguments += [
        "--kv-cache-memory-bytes",
        str(nbytes),
        "--gpu-memory-utilization",
        str(MEMORY_SHARE),
    ]
    flags = [part for name, value in job.vllm.items() for part in _flag(name, value)]
    return [*arguments, *(["--enable-sleep-mode"] if on_gpu else []), *flags]


def _flag(name: str, value: Any) -> list[str]:
    """Return an engine argument in the form of `vllm serve`."""
    flag = f"--{name.replace('_', '-')}"
    if isinstance(value, bool):
        return [flag] if value else []
    return [flag, value if isinstance(value, str) else json.dumps(value)]


def config_of(job: SmallJob, url: str) -> HybridConfig:
    values = job.config().model_dump(exclude_unset=True)
    del values["random_weights"]
    keys = ("verify", "bucket_mb", "timeout_seconds")
    generate = {key: value for key, value in values["generate_config"].items() if key in keys}
    values |= {"model": str(job.checkpoint), "generate_config": {**generate, "servers": [url]}}
    return load_config(values, world_size=1)


def fill_and_empty(job: SmallJob, directory: Path, note: Note) -> None:
    """Publish and withdraw repeatedly; compare the first and last completions."""
    expected = job.read_answers()
    training = []
    inferring = []
    device = torch.device(job.device, 0) if job.device == "cuda" else torch.device("cpu")
    with ExitStack() as ends:
        inherited = {name: value for name, value in os.environ.items() if name in INHERITED}
        arguments = server_arguments(job)
        server = ends.enter_context(
            serving(str(job.checkpoint), directory, *arguments, environment=inherited)
        )
        before = taken_nbytes(device)  # The server sleeps, and there is no trainer.
        worker = ends.enter_context(ActorHybridWorker(config_of(job, server.url)))
        at_first = taken_nbytes(device)
        reports = []
        peak = PeakOfDevice(device)
        for number in range(NUM_SWITCHES):
            with peak.watched():  # Of trainer and server together.
                with worker.rollout_context():
                    reports.append(worker.sharding.last_report)
                    if number in (0, NUM_SWITCHES - 1):
                        answers = worker.generate_sequences(job.prompts(), GREEDY)
                        actual = [
                            Answer(list(group[0].token_ids), list(group[0].logprobs))
                            for group in answers
                        ]
                        assert differences_of_answers(actual, expected) == ""
                    inferring.append(taken_nbytes(device))
                with worker.train_context():
                    training.append(taken_nbytes(device))
        bucket_mb = worker.config.generate_config.bucket_mb
    kept = max(training) - at_first
    most = most_in_switches(max(training), max(inferring), bucket_mb)
    last = reports[-1]
    note(
        f"a publish {last.seconds:.2f} s, {last.bytes_own / GIB:.2f} GiB on the "
        f"device, {last.bytes_received} bytes "
        f"from elsewhere; {kept / GIB:.2f} GiB more taken while training than "
        "before the first one; at most "
        f"{peak.nbytes / GIB:.3f} GiB taken (training {max(training) / GIB:.3f}, "
        f"vLLM {max(inferring) / GIB:.3f})",
        f"at most {MAX_KEPT / GIB:.2f} GiB more, and {SLACK:g} times {most / GIB:.3f} GiB",
        seconds=last.seconds,
        bytes_own=last.bytes_own,
        kept=kept,
        server=before,
        peak=peak.nbytes,
        training=max(training),
        inferring=max(inferring),
    )
    assert last.bytes_received == last.bytes_least
    if job.device == "cuda":
        assert last.bytes_received == 0 < last.bytes_own
        assert kept <= MAX_KEPT
        assert peak.nbytes <= SLACK * most


class TestEager:
    def test_filled_and_emptied(
        self, device: str, shared: Path, vllm_arguments: Values, note: Note
    ) -> None:
        fill_and_empty(
            SmallJob(shared, device, eager=True, vllm=vllm_arguments), shared / "server", note
        )


@pytest.mark.gpu
class TestGraphs:
    def test_filled_and_emptied(
        self, device: str, shared: Path, vllm_arguments: Values, note: Note
    ) -> None:
        fill_and_empty(
            SmallJob(shared, device, eager=False, vllm=vllm_arguments), shared / "server", note
        )
