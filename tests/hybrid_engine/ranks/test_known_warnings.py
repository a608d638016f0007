"""Warnings of pinned packages that are left out, and those beside them that are not."""

from __future__ import annotations

import logging
import os
import warnings
from unittest import mock

import pytest

from hybrid_engine.ranks.known_warnings import ignore_known_warnings, numa_binding_unsaid

APEX = "Transformer Engine and Apex are not installed."
COLLECTIVE = "`torch.distributed.all_gather_into_tensor` is deprecated."
SHOWN = [(APEX, "user.loop"), (COLLECTIVE, "user.loop"), ("new", "torch.distributed.c10d_logger")]
ON_A_GPU = [(APEX, "megatron.core.optimizer")]


@pytest.mark.parametrize("has_gpu", [False, True])
def test_a_warning_is_ignored_by_its_text_and_module(has_gpu: bool) -> None:
    """On a GPU it is worth knowing that Transformer Engine is missing."""
    with (
        mock.patch("torch.cuda.is_available", return_value=has_gpu),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.resetwarnings()
        ignore_known_warnings()
        for text, module in (*SHOWN, *ON_A_GPU, (COLLECTIVE, "torch.distributed.c10d_logger")):
            warnings.warn_explicit(text, FutureWarning, module, 1, module)
    shown = [(str(warning.message), warning.filename) for warning in caught]
    assert shown == SHOWN + ON_A_GPU * has_gpu


def test_a_record_is_left_out_by_its_text(caplog: pytest.LogCaptureFixture) -> None:
    ignore_known_warnings()
    logger = logging.getLogger("vllm.triton_utils.importing")
    with mock.patch.object(logging.getLogger("vllm"), "propagate", True):
        logger.warning("Triton is installed, but doesn't include CPU backend.")
        logger.warning("another")
    assert caplog.messages == ["another"]


def test_what_is_written_beside_the_line_about_numa_is_kept(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(KeyError), numa_binding_unsaid():
        os.write(2, b"before\n[rank0]: Warning: NUMA binding: Using MEMBIND policy for\nafter")
        raise KeyError
    assert capfd.readouterr().err == "before\nafter"
