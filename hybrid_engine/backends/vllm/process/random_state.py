"""Whose random numbers: sampling must neither disturb training's generators nor depend on what training drew.

All ranks of a replica must draw the same tokens, while training may have drawn different numbers on each; so the
engine keeps a state of its own and sets it only while it generates.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch


def get_state() -> tuple[Any, ...]:
    """The random state of this process: Python, numpy, torch and the current device."""
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda


def set_state(state: tuple[Any, ...]) -> None:
    """Set a state of `get_state`."""
    python, numpy, cpu, cuda = state
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(cpu)
    if cuda is not None:
        torch.cuda.set_rng_state(cuda)


def seeded_state(seed: int) -> tuple[Any, ...]:
    """Seed every generator and return their state."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    return get_state()


@contextlib.contextmanager
def random_state_kept() -> Iterator[None]:
    """Whatever vLLM draws or seeds inside, training draws as if it had not: dropout and data order stay bitwise."""
    state = get_state()
    try:
        yield
    finally:
        set_state(state)
