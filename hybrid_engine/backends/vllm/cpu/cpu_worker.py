"""vLLM's CPU worker, isolated from its process, and its steps where vLLM 0.32 gets them wrong.

vLLM imports this module by the class's name. Three things differ on a CPU:

Draws of seeded requests. A prompt may be computed in parts. After each part vLLM draws a token,
drops it, and moves the request's generator back. torch's CPU generators cannot be moved, and vLLM's
engine ends with "CPU Generator does not use offset". Here such tokens are drawn with spare
generators, and those of the requests stay where they are.

Drafts. vLLM accepts them by the temperatures of their requests, which its CPU kernel writes to a
copy of uninitialised memory. Here torch expands them from requests to tokens.

Experts of each token (`generate_config.router_replay`). vLLM returns them from its second model
runner only, which needs Triton. The CPU build has none, so `RouteCapture` makes the calls of that
runner to vLLM's own capture, around the steps of the first.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hybrid_engine.backends.vllm import internals
from hybrid_engine.backends.vllm.cpu.shm_cleanup import ENGINE_TOKEN
from hybrid_engine.backends.vllm.private_names import Function, around

_CPUWorker: Any = internals.CPU_WORKER

_patches = ExitStack()
"""Keeps vLLM's method replaced for the life of the process."""


class _SpareGenerator(torch.Generator):
    """A generator of tokens that are dropped; moving it has no effect."""

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> torch.Generator:
        return self


@around
def corrected(sample_tokens: Function, worker: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the method `sample_tokens` of a CPU worker, whose model runner is vLLM's first."""
    runner = worker.model_runner
    batch = runner.input_batch
    dropped = runner.discard_request_mask.np[: batch.num_reqs].nonzero()[0].tolist()
    generators = {row: batch.generators[row] for row in dropped if row in batch.generators}
    batch.generators.update({row: _SpareGenerator() for row in generators})
    try:
        with internals.EXPAND.replaced(lambda _: _by_token):
            return sample_tokens(worker, *args, **kwargs)
    finally:
        batch.generators.update(generators)


def _by_token(
    values: torch.Tensor,
    ends: torch.Tensor,
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> torch.Tensor:
    """Return a value per drafted token, from one per request; `ends` counts tokens up to each."""
    nums = ends.diff(prepend=ends.new_zeros(1))
    replaced = torch.where(values == replace_from, replace_to, values)
    return replaced.repeat_interleave(nums, output_size=num_tokens)


@dataclass(frozen=True)
class _CapturedStep:
    """A step as vLLM's capture reads it from the input batch of the second model runner.

    Attributes:
        req_ids: requests, in the order of their tokens.
        query_start_loc_np: [requests + 1] first row of each request, and the number of all rows.
        num_computed_tokens_np: [requests] tokens of each request before this step.
    """

    req_ids: list[str]
    query_start_loc_np: np.ndarray
    num_computed_tokens_np: np.ndarray


def attach(llm: Any) -> None:
    """Make `llm`, whose worker is an `IsolatedCPUWorker`, return the experts of each token."""
    worker = internals.worker_of(llm)
    worker.route_capture = RouteCapture(worker.model_runner)
    internals.core_of(llm).scheduler.aux_output_connector = internals.ROUTE_SCHEDULER()


class RouteCapture:
    """Experts of the tokens of each step, for the requests of the step.

    Args:
        runner: vLLM's first model runner, with its caches.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._drafts: dict[str, list[int]] = {}
        make = internals.ROUTE_WORKER
        self._connector = make(runner.model, runner.vllm_config, runner.kv_cache_config)

    def begin(self, scheduler_output: Any) -> None:
        """Register the requests of a step; call before it is computed."""
        self._drafts = scheduler_output.scheduled_spec_decode_tokens
        self._connector.begin_step(scheduler_output.aux_output_connector_metadata)

    def add_to(self, output: Any) -> None:
        """Add the experts of the step's tokens to its output, after sampling."""
        batch = self._runner.input_batch
        num_requests = len(batch.req_ids)
        step = _CapturedStep(
            list(batch.req_ids),
            self._runner.query_start_loc.np[: num_requests + 1].copy(),
            batch.num_computed_tokens_cpu[:num_requests].copy(),
        )
        pending = self._connector.prepare_output(step)
        sampled = [len(token_ids) for token_ids in output.sampled_token_ids]
        # of a draft of n tokens, a step with m sampled tokens has accepted m - 1
        rejected = [
            len(self._drafts[name]) + 1 - num if num and name in self._drafts else 0
            for name, num in zip(step.req_ids, sampled, strict=True)
        ]
        pending.enqueue_cpu_copy(np.array(sampled), np.array(rejected))
        output.aux_output_connector_output = pending.process_output()


class IsolatedCPUWorker(_CPUWorker):
    """A CPU worker that leaves its process unchanged.

    vLLM names its shared memory after the init method, which is `env://` for every engine on the
    host, so two jobs (or a killed one and its successor) would share memory in /dev/shm; the
    engine's token is appended. vLLM also replaces `torch.set_num_threads` for the whole process,
    which is undone, and binds all memory of the process to one node, which is left to the launcher
    (`--numa-binding`): training's memory is in the same process.

    The worker also corrects vLLM 0.32's rotary embedding: for queries [tokens, heads, elements], as
    multi-head latent attention passes them, the CPU kernel rotates the wrong elements; for
    [tokens, heads x elements] it is correct. Draws are corrected by `corrected`.

    Attributes:
        route_capture: adds the experts of each token to the output of a step, if set.
    """

    route_capture: RouteCapture | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with internals.BIND_MEMORY.replaced(lambda bind: lambda nodes: None):
            super().__init__(*args, **kwargs)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        # vLLM shares rotary embeddings among models, and each keeps the method it was made with.
        internals.ROPES.clear()
        with internals.ROTATE.replaced(_on_rows):
            super().load_model(*args, **kwargs)

    def execute_model(self, scheduler_output: Any) -> Any:
        if self.route_capture is not None:
            self.route_capture.begin(scheduler_output)
        return super().execute_model(scheduler_output)

    @corrected
    def sample_tokens(self, grammar_output: Any) -> Any:
        output = super().sample_tokens(grammar_output)
        if self.route_capture is not None:
            self.route_capture.add_to(output)
        return output

    def init_device(self) -> None:
        self.distributed_init_method = f"env://:{os.environ[ENGINE_TOKEN]}"
        set_num_threads = torch.set_num_threads
        try:
            super().init_device()
        finally:
            torch.set_num_threads = set_num_threads


@around
def _on_rows(
    rotate: Function,
    embedding: Any,
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None = None,
) -> Any:
    """Call a rotary embedding's method with queries and keys as one row per token."""
    rows = [None if tensor is None else tensor.flatten(1) for tensor in (query, key)]
    rotated = rotate(embedding, positions, *rows)
    return tuple(
        None if tensor is None else out.view(tensor.shape)
        for out, tensor in zip(rotated, (query, key), strict=True)
    )


def correct_workers() -> None:
    """Make this process's CPU workers of vLLM's own class draw like that."""
    _patches.close()
    _patches.enter_context(internals.SAMPLE_TOKENS.replaced(corrected))
