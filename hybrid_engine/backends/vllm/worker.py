"""vLLM's workers, as guests of a process that somebody else set up. vLLM imports this module by the class's name."""

from __future__ import annotations

import os

import torch
from vllm.v1.worker.cpu_worker import CPUWorker

from hybrid_engine.backends.vllm.names import ENGINE_TOKEN


class GuestCPUWorker(CPUWorker):
    """A CPU worker that leaves the process as it found it.

    vLLM names its shared memory after the init method, which is `env://` for every engine on the host, so two jobs
    (or a killed one and its successor) would meet in /dev/shm; the engine's own token is appended. And it replaces
    `torch.set_num_threads` for the whole process, which is undone.
    """

    def init_device(self) -> None:
        """Called by vLLM's executor once."""
        self.distributed_init_method = f"env://:{os.environ[ENGINE_TOKEN]}"
        set_num_threads = torch.set_num_threads
        try:
            super().init_device()
        finally:
            torch.set_num_threads = set_num_threads
