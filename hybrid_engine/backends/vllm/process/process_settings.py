"""torch's settings and the environment of the whole process, which vLLM changes: training must find its own afterwards.

vLLM has its own ones while it is built and while it generates, as it has them where it is alone.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

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
        """Those in force."""
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
