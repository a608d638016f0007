"""Ranks of tests refuse to read a pickle, or exchange one, for a module of ours. Libraries do as they like.

One module reads checkpoints, and the plans of torch's own checkpoint writer, which come as pickles: with classes that
are listed there.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from typing import Any

OURS = ("hybrid_engine", "megatron_patches")
READS_CHECKPOINTS = "hybrid_engine.trainer.checkpoint_directory"


def refuse_pickles() -> None:
    """From here on, in this process."""
    import torch.distributed as dist  # whoever starts ranks needs no torch

    for name in ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list"):
        setattr(dist, name, _refused(getattr(dist, name)))
    pickle.loads = _refused(pickle.loads)


def _refused(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        caller = sys._getframe(1).f_globals["__name__"]
        if caller.split(".")[0] in OURS and caller != READS_CHECKPOINTS:
            raise AssertionError(f"{caller} calls {function.__name__}")
        return function(*arguments, **named)

    return call
