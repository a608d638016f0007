"""The hook into vLLM's start-up: a load format whose loader traces the new model and reads no file.

    with capturing(trace, inspecting, keep):
        LLM(load_format=LOAD_FORMAT, ...)    constructed -> trace -> processed by vLLM -> inspected
                                             in `inspecting` -> keep

vLLM makes loaders by name from a registry and passes them none of our objects. Inside the context
the name is registered for a class that refers to these functions. A server's workers register such
a class under a different name (vllm_plugin.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from hybrid_engine.backends.vllm import internals
from hybrid_engine.backends.vllm.weights.processed_model import ProcessedModel, inspect_model
from hybrid_engine.backends.vllm.weights.processing_barrier import (
    ProcessingBarrier,
    channels_taken,
)
from hybrid_engine.backends.vllm.weights.traced_model import TracedModel

LOAD_FORMAT = "hybrid_engine_colocated"

Trace = Callable[[torch.nn.Module, Any], TracedModel]
Inspecting = Callable[[bool], AbstractContextManager[ProcessingBarrier]]
Keep = Callable[[torch.nn.Module, ProcessedModel], None]


@contextmanager
def capturing(trace: Trace, inspecting: Inspecting, keep: Keep) -> Iterator[None]:
    """Trace and process models that vLLM loads with `LOAD_FORMAT` in this context; load no file.

    Args:
        trace: called with a model before its weights are processed, and its vLLM `ModelConfig`.
        inspecting: context in which a processed model is inspected and kept, of the barrier of the
            ranks that process it together. It is called with whether ranks communicated during the
            processing.
        keep: called with the model and what was found.
    """
    from vllm.model_executor.model_loader import register_model_loader

    register = register_model_loader(LOAD_FORMAT)
    register(loader_class(trace, inspecting, keep))
    try:
        yield
    finally:
        # vLLM has no function that removes a load format.
        del internals.LOADERS[LOAD_FORMAT]


@contextmanager
def configured(vllm_config: Any, dtype: torch.dtype) -> Iterator[None]:
    """Make a configuration vLLM's current one in this context, and a dtype torch's default."""
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(vllm_config), internals.DEFAULT_DTYPE(dtype):
        yield


def loader_class(trace: Trace, inspecting: Inspecting, keep: Keep) -> type:
    """Return a vLLM loader class that traces and inspects; see `capturing`."""
    from vllm.model_executor.model_loader import BaseModelLoader

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
            self,
            vllm_config: Any,
            model_config: Any,
            prefix: str = "",
        ) -> torch.nn.Module:
            """Load as vLLM does, then inspect the model that its base class has processed."""
            self._watching = ExitStack()
            with self._watching:
                model = super().load_model(vllm_config, model_config, prefix)

            context = partial(configured, vllm_config, model_config.dtype)
            traced = self._traced
            device = next(iter(traced.storages.values())).device
            keeps_addresses = device.type != "cpu"
            # vLLM captures no graphs on a CPU.
            has_graphs = keeps_addresses and not vllm_config.model_config.enforce_eager
            # Filled between tracing and the end of the processing, when the first real processing
            # ran.
            is_collective = bool(self._taken)
            dtype = model_config.dtype
            with inspecting(is_collective) as barrier:
                keep(
                    model,
                    inspect_model(traced, context, dtype, keeps_addresses, barrier, has_graphs),
                )
            return model

    return CapturingLoader
