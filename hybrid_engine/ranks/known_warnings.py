"""Warnings of pinned packages that say nothing about a job: each by its text and its source.

A list and no rule, so that what a newer version says, and what the user's own code says, is shown.
"""

from __future__ import annotations

import logging
import warnings

import torch

_EVERYWHERE = (
    (r"Apex is not installed", r"megatron\.core\."),
    (r"full scope is deprecated", r"megatron\.core\.transformer\.transformer_config$"),
    (r"The \.grad attribute of a Tensor that is not a leaf", r"megatron\.core\.optimizer\."),
    # megatron-core's collectives in every step
    (r"`torch\.distributed\.\w+` is deprecated", r"torch\.distributed\.c10d_logger$"),
    (r"`torch\.distributed\.reduce_op` is deprecated", r"vllm\.triton_utils\.dispatcher$"),
)
"""Text and module of warnings."""
_WITHOUT_A_GPU = (
    (r"Transformer Engine and Apex are not installed", r"megatron\.core\."),
    (r"When using async grad allreduce", r"megatron\.core\.tensor_parallel\.layers$"),
)
"""Those that are worth knowing on a GPU."""
_RECORDS = {"vllm.triton_utils.importing": "Triton is installed, but doesn't include CPU backend"}
"""Beginnings of records by their logger."""


def ignore_known_warnings() -> None:
    """Ignore the warnings of this list from now on. Filters of the user's go before them."""
    without_gpu = () if torch.cuda.is_available() else _WITHOUT_A_GPU
    for text, module in (*_EVERYWHERE, *without_gpu):
        warnings.filterwarnings("ignore", message=text, module=module, append=True)
    for name in _RECORDS:
        logging.getLogger(name).addFilter(_is_not_known)


def _is_not_known(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(_RECORDS[record.name])
