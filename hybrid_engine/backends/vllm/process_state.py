"""Random numbers and settings of the process: vLLM's are kept apart from training's.

While vLLM is built and while it generates, it has the settings that it has in a process of its own.
Sampling must neither disturb training's generators nor depend on training's draws: all ranks of a
replica must draw the same tokens, while training may have drawn different numbers on each. So the
engine keeps a separate random state and sets it only while it generates.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class ProcessSettings:
    """Settings of the process at one time; None for a setting that does not matter.

    Attributes:
        matmul_precision: precision of float32 products; vLLM needs "highest", a script may set
            "high".
        num_threads: threads of CPU operations; vLLM takes one unless OMP_NUM_THREADS is set.
        cudnn_attention: whether scaled dot products may use cuDNN.
        stream: the current stream on the GPU. With tensor parallelism vLLM makes another stream
            current for good.
        environment: environment variables. vLLM sets some that torch, NCCL and later processes read
            as well.
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

    def enter(self, present: ProcessSettings | None = None) -> None:
        """Apply the settings that differ from the present ones.

        Setting the number of threads restarts the threads, even if it does not change. Work on a
        stream that becomes current waits for the work queued on the stream before.

        `present`: the present settings if known: reading the environment takes longer than the
        rest.
        """
        present = present or ProcessSettings.now()
        changed = {
            field.name
            for field in fields(self)
            if getattr(self, field.name) not in (None, getattr(present, field.name))
        }
        if "matmul_precision" in changed:
            torch.set_float32_matmul_precision(self.matmul_precision)
        if "num_threads" in changed and self.num_threads is not None:
            torch.set_num_threads(self.num_threads)
        if "cudnn_attention" in changed:
            torch.backends.cuda.enable_cudnn_sdp(self.cudnn_attention)
        if "environment" in changed:
            # Only differences are written: each assignment calls setenv.
            for name in present.environment.keys() - self.environment.keys():
                del os.environ[name]
            os.environ.update(dict(self.environment.items() - present.environment.items()))
        # Last, because it raises after an error of the device.
        if "stream" in changed and self.stream is not None:
            torch.cuda.set_stream(self.stream)
            if present.stream is not None:
                self.stream.wait_stream(present.stream)


@contextmanager
def process_settings_kept(inside: ProcessSettings | None = None) -> Iterator[None]:
    """Restore the process's settings after this context; apply `inside` at its beginning."""
    before = ProcessSettings.now()
    try:
        if inside is not None:
            inside.enter(before)
        yield
    finally:
        before.enter()


RandomState = tuple[Any, ...]
"""States of the generators of Python, NumPy and torch, on CPU and GPU."""


def get_state() -> RandomState:
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda


def set_state(state: RandomState) -> None:
    python, numpy, cpu, cuda = state
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(cpu)
    if cuda is not None:
        torch.cuda.set_rng_state(cuda)


def seeded_state(seed: int) -> RandomState:
    """Seed every generator and return their state."""
    random.seed(seed)
    # numpy takes 32 bits.
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    return get_state()


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Restore training's random state after this context: dropout and data order stay bitwise."""
    state = get_state()
    try:
        yield
    finally:
        set_state(state)
