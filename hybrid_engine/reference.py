"""What transformers computes from a checkpoint, in a process of its own: vLLM replaces some of its classes."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class Reference:
    """Log-probabilities by transformers in float32, on the CPU. A context manager; its process ends with it."""

    def __init__(self) -> None:
        self._process = ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn"))

    def __enter__(self) -> Reference:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.shutdown(cancel_futures=True)

    def log_probs(self, checkpoint: Path, tokens: torch.Tensor, timeout: float = 600) -> torch.Tensor:
        """Of every token of the vocabulary after every position: [B, S] int64 -> [B, S, vocabulary] float32."""
        import torch

        values = self._process.submit(_log_probs, str(checkpoint), tokens.tolist()).result(timeout)
        return torch.from_numpy(values)


def _log_probs(checkpoint: str, tokens: list[list[int]]):
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    # eager: the other implementations leave out what they cannot do (Gemma-2's soft caps)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        return model(torch.tensor(tokens)).logits.log_softmax(-1).numpy()
