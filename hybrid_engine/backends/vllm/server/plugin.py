"""Entry point `vllm.general_plugins`: vLLM calls `register` in each of its processes, maybe more than once.

It registers names, and imports little: also an engine that has nothing to do with this project calls it.
"""

from __future__ import annotations

import importlib

from hybrid_engine.backends.vllm import internals

NAME = "hybrid_engine"
"""Of the load format and of the weight transfer engine."""

_is_registered = False

_HERE = "hybrid_engine.backends.vllm.server"


def register() -> None:
    """Make vLLM know the load format, the weight transfer engine and the gate. Idempotent.

    A vLLM that lacks what they need refuses the load format when a server is started, and nothing else.
    """
    global _is_registered
    if _is_registered:
        return
    _is_registered, gate = True, importlib.import_module(f"{_HERE}.gate")
    if lacking := internals.missing_for_servers():
        gate.refuse_servers(NAME, lacking)
        return
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    WeightTransferEngineFactory.register_engine(NAME, f"{_HERE}.receiver", "HybridEngineReceiver")
    importlib.import_module(f"{_HERE}.capture").register_loader(NAME)
    gate.close_gate(NAME)
    importlib.import_module(f"{_HERE}.queues").unname_in_children()
