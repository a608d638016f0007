"""The hook into vLLM's start-up: a load format whose loader reads no file but traces the fresh model.

    with capturing(trace, inspect) as models:
        LLM(load_format=LOAD_FORMAT, ...)    model constructed -> trace -> processed by vLLM -> inspect
    models[0]

vLLM makes loaders from a registry by name and passes them nothing of ours: within the context the name is registered
for a class that knows both functions. A server's workers have such a class under a name of its own (server/plugin.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from hybrid_engine.backends.vllm import internals
from hybrid_engine.backends.vllm.weights.processed_model import ProcessedModel
from hybrid_engine.backends.vllm.weights.processing_barrier import channels_taken
from hybrid_engine.backends.vllm.weights.traced_model import Context, TracedModel

LOAD_FORMAT = "hybrid_engine_colocated"

Trace = Callable[[torch.nn.Module, Any], TracedModel]
Inspect = Callable[[TracedModel, Context, torch.dtype, bool], ProcessedModel]


@contextlib.contextmanager
def capturing(trace: Trace, inspect: Inspect) -> Iterator[list[ProcessedModel]]:
    """Within this context a model that vLLM loads with `LOAD_FORMAT` is traced and processed, not loaded.

    Args:
        trace: called with the model, whose weights are not processed, and vLLM's `ModelConfig` of it.
        inspect: called once they are, with what `inspect_model` takes first, and whether ranks communicated meanwhile.
    """
    from vllm.model_executor.model_loader import register_model_loader

    models: list[ProcessedModel] = []
    register_model_loader(LOAD_FORMAT)(loader_class(trace, inspect, lambda _, found: models.append(found)))
    try:
        yield models
    finally:
        del internals.LOADERS.load()[LOAD_FORMAT]


def loader_class(trace: Trace, inspect: Inspect, keep: Callable[[torch.nn.Module, ProcessedModel], None]) -> type:
    """A loader of vLLM's that traces and inspects, and has what was found kept; see `capturing`."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import BaseModelLoader

    default_dtype = internals.DEFAULT_DTYPE.load()

    class CapturingLoader(BaseModelLoader):
        """Loads nothing: the weights come with the first reshard."""

        def download_model(self, model_config: Any) -> None:
            """There is nothing to download."""

        def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
            """Called by vLLM between the model's construction and its post-load processing."""
            self._traced = trace(model, model_config)
            self._taken = self._watching.enter_context(channels_taken())

        def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> torch.nn.Module:
            """Called by vLLM; the post-load processing is over when the base class returns."""
            self._watching = contextlib.ExitStack()
            with self._watching:
                model = super().load_model(vllm_config, model_config, prefix)

            @contextlib.contextmanager
            def context() -> Iterator[None]:
                with set_current_vllm_config(vllm_config), default_dtype(model_config.dtype):
                    yield

            keep(model, inspect(self._traced, context, model_config.dtype, bool(self._taken)))
            return model

    return CapturingLoader
