"""Methods of vLLM that are replaced in the processes of a server.

    unname_queues      in all: queues in shared memory are unlinked once all have mapped them
    correct_workers    workers of vLLM 0.24, which start and finish updates of weights themselves

A file psm_* in /dev/shm outlives a server that is killed, and does not show which process it
belongs to. Unlinked memory is freed by the kernel.

Since 0.25 the transfer engine starts and finishes updates. In 0.24 the worker wraps each in a
reload of its layers, and calls the engine with a function that loads tensors; here it leaves the
update to the engine, if that is this package's.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from hybrid_engine.backends.vllm import internals
from hybrid_engine.backends.vllm.private_names import Function, around
from hybrid_engine.errors import StateError

_patches = ExitStack()
"""Keeps vLLM's methods replaced for the life of the process."""


def unname_queues() -> None:
    """Unlink the queues that this process makes from now on."""
    _patches.enter_context(internals.AWAIT_READERS.replaced(_unnamed))


@around
def _unnamed(await_readers: Function, queue: Any) -> None:
    await_readers(queue)
    for buffer in (queue.buffer, getattr(queue, "tensor_arena", None)):
        if buffer is not None and buffer.is_creator:
            buffer.shared_memory.unlink()
            buffer.is_creator = False  # or vLLM would unlink it again at the end


def start_weight_update(worker: Any, **_: Any) -> None:
    if worker._weight_update_active:
        raise StateError("an update of the weights is active", code="update-active")
    worker._weight_update_active = True


def update_weights(worker: Any, update_info: dict[str, Any]) -> None:
    from vllm.config import set_current_vllm_config

    if not worker._weight_update_active:
        raise StateError("no update of the weights was started", code="update-inactive")
    engine = worker.weight_transfer_engine
    try:
        with set_current_vllm_config(worker.vllm_config):
            engine.receive_weights(engine.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()  # the next step uses the weights
    except BaseException:
        worker._weight_update_active = False
        raise


def finish_weight_update(worker: Any) -> None:
    if not worker._weight_update_active:
        raise StateError("no update of the weights was started", code="update-inactive")
    worker._weight_update_active = False
    worker.weight_transfer_engine.finish_weight_update()


def correct_workers() -> None:
    """Make this process's workers leave updates to this package's transfer engine."""
    methods: tuple[Function, ...] = (start_weight_update, update_weights, finish_weight_update)
    for record, method in zip(internals.UPDATES_OF_WORKERS, methods, strict=True):
        _patches.enter_context(record.replaced(around(partial(_chosen, method))))


def _chosen(ours: Function, original: Function, worker: Any, *args: Any, **kwargs: Any) -> None:
    from hybrid_engine.backends.vllm.server.receiver import HybridEngineReceiver

    is_ours = isinstance(worker.weight_transfer_engine, HybridEngineReceiver)
    (ours if is_ours else original)(worker, *args, **kwargs)
