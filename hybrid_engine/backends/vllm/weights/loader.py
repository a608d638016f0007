"""The hook into vLLM's start-up: a load format whose loader reads no file but traces the fresh model.

vLLM makes loaders from a registry by name and passes them nothing of ours, so the caller says in a context variable
how the model that is built inside `capturing` is to be traced, and finds it there afterwards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from hybrid_engine.backends.vllm import internals
from hybrid_engine.backends.vllm.weights.collective_processing import channels_taken
from hybrid_engine.backends.vllm.weights.traced_model import Context, ProcessedModel, TracedModel
from hybrid_engine.errors import StateError

LOAD_FORMAT = "hybrid_engine"

Look = Callable[[TracedModel, Context, torch.dtype, bool], ProcessedModel]


@dataclass
class Capture:
    """The model that vLLM loads inside `capturing`.

    Attributes:
        trace: called with the model, whose weights are not processed.
        look: called once they are, with what `looking.look` takes first, and whether ranks communicated meanwhile.
        model: once vLLM has loaded it.
    """

    trace: Callable[[torch.nn.Module], TracedModel]
    look: Look
    model: ProcessedModel | None = None


_capture: ContextVar[Capture | None] = ContextVar("hybrid_engine_vllm_capture", default=None)


@contextlib.contextmanager
def capturing(trace: Callable[[torch.nn.Module], TracedModel], look: Look) -> Iterator[Capture]:
    """Within this context a model that vLLM loads with `LOAD_FORMAT` is traced and processed, not loaded."""
    _register()
    capture = Capture(trace, look)
    token = _capture.set(capture)
    try:
        yield capture
    finally:
        _capture.reset(token)


def _register() -> None:
    from vllm.model_executor.model_loader import register_model_loader

    if LOAD_FORMAT not in internals.LOADERS.load():
        register_model_loader(LOAD_FORMAT)(_loader_class())


def _loader_class() -> type:
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import BaseModelLoader

    default_dtype = internals.DEFAULT_DTYPE.load()

    class CapturingLoader(BaseModelLoader):
        """Loads nothing: the weights come with the first reshard."""

        def download_model(self, model_config: Any) -> None:
            """There is nothing to download."""

        def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
            """Called by vLLM between the model's construction and its post-load processing."""
            capture = _capture.get()
            if capture is None:
                raise StateError(f"load format {LOAD_FORMAT!r} works only inside InferenceEngine")
            self._capture, self._traced = capture, capture.trace(model)
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

            self._capture.model = self._capture.look(self._traced, context, model_config.dtype, bool(self._taken))
            return model

    return CapturingLoader
