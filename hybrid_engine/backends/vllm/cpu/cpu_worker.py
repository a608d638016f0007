"""vLLM's CPU worker, isolated from its process. vLLM imports this module by the class's name."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from hybrid_engine.backends.vllm import internals
from hybrid_engine.backends.vllm.cpu.route_capture import RouteCapture
from hybrid_engine.backends.vllm.cpu.seeded_draws import corrected
from hybrid_engine.backends.vllm.cpu.shm_cleanup import ENGINE_TOKEN

_CPUWorker: Any = internals.CPU_WORKER.load()


class IsolatedCPUWorker(_CPUWorker):
    """A CPU worker that leaves its process unchanged.

    vLLM names its shared memory after the init method, which is `env://` for every engine on the
    host, so two jobs (or a killed one and its successor) would share memory in /dev/shm; the
    engine's token is appended. vLLM also replaces `torch.set_num_threads` for the whole process,
    which is undone, and binds all memory of the process to one node, which is left to the launcher
    (`--numa-binding`): training's memory is in the same process.

    The worker also corrects vLLM 0.32's rotary embedding: for queries [tokens, heads, elements], as
    multi-head latent attention passes them, the CPU kernel rotates the wrong elements; for
    [tokens, heads x elements] it is correct. Draws are corrected by seeded_draws.py.

    Attributes:
        route_capture: adds the experts of each token to the output of a step, if set.
    """

    route_capture: RouteCapture | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with internals.BIND_MEMORY.replaced(lambda bind: lambda nodes: None):
            super().__init__(*args, **kwargs)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        # vLLM shares rotary embeddings among models, and each keeps the method it was made with.
        internals.ROPES.load().clear()
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


def _on_rows(rotate: Callable[..., Any]) -> Callable[..., Any]:
    """Return a rotary embedding's method that passes queries and keys as one row per token."""

    def forward(
        self: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> Any:
        rows = [None if tensor is None else tensor.flatten(1) for tensor in (query, key)]
        rotated = rotate(self, positions, *rows)
        return tuple(
            None if tensor is None else out.view(tensor.shape)
            for out, tensor in zip(rotated, (query, key), strict=True)
        )

    return forward
