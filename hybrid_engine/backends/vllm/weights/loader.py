"""The hook into vLLM's start-up: a load format whose loader traces the new model and reads no file.

    with capturing(trace, inspect) as models:
        LLM(load_format=LOAD_FORMAT, ...)    constructed -> trace -> processed by vLLM -> inspect
    models[0]

vLLM makes loaders by name from a registry and passes them none of our objects. Inside the context
the name is registered for a class that refers to both functions. A server's workers register such a
class under a different name (vllm_plugin.py).
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
    """Trace and process a model that vLLM loads with `LOAD_FORMAT` in this context; load no file.

    Args:
        trace: called with the model before its weights are processed, and its vLLM `ModelConfig`.
        inspect: called after the processing with the first arguments of `inspect_model`, and
            whether ranks communicated during the processing.
    """
    from vllm.model_executor.model_loader import register_model_loader

    models: list[ProcessedModel] = []

    def keep(_: torch.nn.Module, processed: ProcessedModel) -> None:
        models.append(processed)

    register = register_model_loader(LOAD_FORMAT)
    register(loader_class(trace, inspect, keep))
    try:
        yield models
    finally:
        # vLLM has no function that removes a load format.
        del internals.LOADERS.load()[LOAD_FORMAT]


def loader_class(
    trace: Trace,
    inspect: Inspect,
    keep: Callable[[torch.nn.Module, ProcessedModel], None],
) -> type:
    """Return a vLLM loader class that traces and inspects; see `capturing`.

    `keep` is called with the loaded model and the result of `inspect`.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import BaseModelLoader

    default_dtype = internals.DEFAULT_DTYPE.load()

    class CapturingLoader(BaseModelLoader):
        """A loader that reads no file: the weights arrive with the first reshard."""

        def download_model(self, model_config: Any) -> None:
            """Do nothing; there is no file to download."""

        def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
            """Trace the model; vLLM calls this between construction and post-load processing."""
            self._traced = trace(model, model_config)
            # load_model leaves this context once the processing is over.
            self._taken = self._watching.enter_context(channels_taken())

        def load_model(
            self, vllm_config: Any, model_config: Any, prefix: str = ""
        ) -> torch.nn.Module:
            """Load as vLLM does, then inspect the model that its base class has processed."""
            self._watching = contextlib.ExitStack()
            with self._watching:
                model = super().load_model(vllm_config, model_config, prefix)

            @contextlib.contextmanager
            def context() -> Iterator[None]:
                with set_current_vllm_config(vllm_config), default_dtype(model_config.dtype):
                    yield

            # Filled between tracing and the end of the processing, when the first real processing
            # ran.
            is_collective = bool(self._taken)
            processed = inspect(self._traced, context, model_config.dtype, is_collective)
            keep(model, processed)
            return model

    return CapturingLoader
