"""torch's modes, default dtype and device as in a new process, whatever the caller has set."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def torch_defaults() -> Iterator[None]:
    """Compute as outside `torch.autocast` and `torch.inference_mode`, with the default dtype and device of torch.

    For what must give the same bits wherever it is called: vLLM's construction and its answers, sums of weights, and a
    switch, whose tensors outlive the caller's modes. A decorator too. What holds outside is back at the end.
    """
    with ExitStack() as ends:
        for device_type in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device_type):
                ends.enter_context(torch.autocast(device_type, enabled=False))
        if torch.is_inference_mode_enabled():
            ends.enter_context(torch.inference_mode(False))
        if torch.get_default_device().type != "cpu":
            ends.enter_context(torch.device("cpu"))
        if (dtype := torch.get_default_dtype()) is not torch.float32:
            ends.callback(torch.set_default_dtype, dtype)
            torch.set_default_dtype(torch.float32)
        yield
