"""Guard for ranks of tests: modules of this project must not read or exchange pickles. Libraries
may.

The exception is a module that reads checkpoints and the pickled plans of torch's checkpoint writer;
it has a list of permitted classes.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from typing import Any

OURS = ("hybrid_engine", "megatron_patches")
READS_CHECKPOINTS = "hybrid_engine.trainer.checkpoint_directory"


def refuse_pickles() -> None:
    """Install the guard in this process."""
    import torch.distributed as dist  # Imported here because the launcher of ranks needs no torch.

    for name in (
        "all_gather_object",
        "broadcast_object_list",
        "gather_object",
        "scatter_object_list",
    ):
        setattr(dist, name, _refused(getattr(dist, name)))
    pickle.loads = _refused(pickle.loads)


def _refused(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        caller = sys._getframe(1).f_globals["__name__"]
        if caller.split(".")[0] in OURS and caller != READS_CHECKPOINTS:
            raise AssertionError(f"{caller} calls {function.__name__}")
        return function(*arguments, **named)

    return call
