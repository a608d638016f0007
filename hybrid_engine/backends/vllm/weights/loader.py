"""The hook into vLLM's start-up: a load format whose loader reads no file but hands the fresh model to an adaptor.

vLLM makes loaders from a registry by name and passes them nothing of ours, so the caller says in a context variable
what is to be done with the model that is built inside `capturing`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch

from hybrid_engine.backends.vllm.weights.adaptor import VllmAdaptor
from hybrid_engine.errors import StateError

LOAD_FORMAT = "hybrid_engine"

Capture = Callable[[torch.nn.Module, Any], VllmAdaptor]
"""Makes the adaptor from a model whose weights are not processed and vLLM's model configuration."""

_capture: ContextVar[Capture | None] = ContextVar("hybrid_engine_vllm_capture", default=None)


@contextlib.contextmanager
def capturing(capture: Capture) -> Iterator[None]:
    """Within this context a model that vLLM loads with `LOAD_FORMAT` goes to `capture`."""
    _register()
    token = _capture.set(capture)
    try:
        yield
    finally:
        _capture.reset(token)


def _register() -> None:
    from vllm.model_executor import model_loader

    if LOAD_FORMAT not in model_loader._LOAD_FORMAT_TO_MODEL_LOADER:
        model_loader.register_model_loader(LOAD_FORMAT)(_loader_class())


def _loader_class() -> type:
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    class CapturingLoader(BaseModelLoader):
        """Loads nothing: the weights come with the first reshard."""

        adaptor: VllmAdaptor | None = None

        def download_model(self, model_config: Any) -> None:
            """There is nothing to download."""

        def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
            """Called by vLLM between the model's construction and its post-load processing."""
            capture = _capture.get()
            if capture is None:
                raise StateError(f"load format {LOAD_FORMAT!r} works only inside InferenceEngine")
            self.adaptor = capture(model, model_config)

        def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> torch.nn.Module:
            """Called by vLLM; the post-load processing is over when the base class returns."""
            model = super().load_model(vllm_config, model_config, prefix)
            assert self.adaptor is not None
            self.adaptor.context = lambda: set_current_vllm_config(vllm_config)
            self.adaptor.note_processed()
            return model

    return CapturingLoader
