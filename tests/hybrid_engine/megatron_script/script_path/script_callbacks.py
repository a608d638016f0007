"""Callbacks for --resharding-callback in tests of Megatron's scripts."""

from __future__ import annotations

import itertools
import json
import os
import signal
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hybrid_engine import Sampling

_calls = itertools.count(1)


def sample(inference: Any) -> None:
    """Complete a prompt on every replica, and write the tokens to a file of the rank."""
    ((completion,),) = inference.generate(
        [[7, 8, 9]], Sampling(max_tokens=3, temperature=0.0, ignore_eos=True)
    )
    with Path(f"callback{dist.get_rank()}.jsonl").open("a") as file:
        file.write(json.dumps(completion.token_ids) + "\n")


def terminate(inference: Any) -> None:
    """Send SIGTERM to one rank in the second switch, like a scheduler."""
    if next(_calls) == 2 and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGTERM)


def fail(inference: Any) -> None:
    """Raise on one rank."""
    if dist.get_rank() == 1:
        raise ValueError("the callback failed on purpose")
