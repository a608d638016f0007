"""Entry point `vllm.general_plugins`: vLLM calls `register` in each of its processes, maybe more than once.

It registers names, and imports little: also an engine that has nothing to do with this project calls it.
"""

from __future__ import annotations

import importlib

from hybrid_engine.backends.vllm import internals

NAME = "hybrid_engine"
"""Of the load format and of the weight transfer engine."""

_HERE = "hybrid_engine.backends.vllm.server"


def register() -> None:
    """Make vLLM know the load format, the weight transfer engine and the gate. Idempotent."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    if NAME not in internals.TRANSFER_ENGINES.load():
        WeightTransferEngineFactory.register_engine(NAME, f"{_HERE}.receiver", "HybridEngineReceiver")
        importlib.import_module(f"{_HERE}.capture").register_loader(NAME)
        importlib.import_module(f"{_HERE}.gate").close_gate(NAME)
