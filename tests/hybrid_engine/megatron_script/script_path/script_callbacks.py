"""What tests of Megatron's own script name by --resharding-callback."""

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
    """Complete one prompt on every replica, and note on which rank."""
    ((completion,),) = inference.generate([[7, 8, 9]], Sampling(max_tokens=3, temperature=0.0, ignore_eos=True))
    with Path(f"callback{dist.get_rank()}.jsonl").open("a") as file:
        file.write(json.dumps(completion.token_ids) + "\n")


def terminate(inference: Any) -> None:
    """In the second switch, ask one rank to end as a scheduler does."""
    if next(_calls) == 2 and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGTERM)


def fail(inference: Any) -> None:
    """On one rank only."""
    if dist.get_rank() == 1:
        raise ValueError("the callback failed on purpose")
