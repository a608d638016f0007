"""Keeps the state of the process, random numbers and torch's settings, as training has it, and vLLM's apart from it.

vLLM has its own settings while it is built and while it generates, as it has them where it is alone. Sampling must
neither disturb training's generators nor depend on what training drew: all ranks of a replica must draw the same
tokens, while training may have drawn different numbers on each. So the engine keeps a random state of its own and sets
it only while it generates.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class ProcessSettings:
    """As they are at one time; None for one that is of no concern.

    Attributes:
        matmul_precision: of float32 products; a script's "high" becomes vLLM's "highest".
        num_threads: of operations on the CPU; vLLM takes one unless OMP_NUM_THREADS says otherwise.
        cudnn_attention: whether scaled dot products may use cuDNN.
        stream: the current one on the GPU; vLLM makes its own current, for good, with tensor parallelism.
        environment: vLLM sets variables that torch and NCCL read, too, and processes started later inherit them.
    """

    matmul_precision: str
    num_threads: int | None
    cudnn_attention: bool
    stream: torch.cuda.Stream | None
    environment: Mapping[str, str]

    @classmethod
    def now(cls) -> ProcessSettings:
        return cls(
            torch.get_float32_matmul_precision(),
            torch.get_num_threads(),
            torch.backends.cuda.cudnn_sdp_enabled(),
            torch.cuda.current_stream() if torch.cuda.is_initialized() else None,
            dict(os.environ),
        )

    def enter(self) -> None:
        """Put them in force; what is as it should be is not touched, since threads would start anew."""
        present = ProcessSettings.now()
        wanted = {each.name: getattr(self, each.name) for each in fields(self)}
        changed = {name for name, value in wanted.items() if value is not None and value != getattr(present, name)}
        if "matmul_precision" in changed:
            torch.set_float32_matmul_precision(self.matmul_precision)
        if "num_threads" in changed and self.num_threads is not None:
            torch.set_num_threads(self.num_threads)
        if "cudnn_attention" in changed:
            torch.backends.cuda.enable_cudnn_sdp(self.cudnn_attention)
        if "stream" in changed and self.stream is not None:
            torch.cuda.set_stream(self.stream)
        if "environment" in changed:
            for name in present.environment.keys() - self.environment.keys():
                del os.environ[name]
            os.environ.update(self.environment)


@contextlib.contextmanager
def process_settings_kept(inside: ProcessSettings | None = None) -> Iterator[None]:
    """Whatever is set within this context, afterwards everything is as before; `inside`: put in force first."""
    before = ProcessSettings.now()
    try:
        if inside is not None:
            inside.enter()
        yield
    finally:
        before.enter()


def get_state() -> tuple[Any, ...]:
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda


def set_state(state: tuple[Any, ...]) -> None:
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
