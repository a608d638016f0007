"""Experts of each token (`generate_config.router_replay`) from vLLM's first model runner.

vLLM returns them from its second model runner only, which needs Triton. The CPU build has none, so
this module makes the calls of that runner to vLLM's own capture, around the steps of the first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hybrid_engine.backends.vllm import internals


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
    internals.core_of(llm).scheduler.aux_output_connector = internals.ROUTE_SCHEDULER.load()()


class RouteCapture:
    """Experts of the tokens of each step, for the requests of the step.

    Args:
        runner: vLLM's first model runner, with its caches.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._drafts: dict[str, list[int]] = {}
        make = internals.ROUTE_WORKER.load()
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
