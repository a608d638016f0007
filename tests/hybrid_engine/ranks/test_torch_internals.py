"""Private names of torch that the engine uses exist; known warnings are left out, and no others."""

from __future__ import annotations

import logging
import warnings
from unittest import mock

import pytest
import torch

from hybrid_engine.ranks.torch_internals import (
    PRIVATE_NAMES,
    PrivateName,
    is_alive,
    storage_id,
    torch_defaults,
)
from hybrid_engine.ranks.uncaught import ignore_known_warnings
from tests.harness.private_names import exists
from tests.harness.torch_modes import other_torch_modes


@pytest.mark.parametrize("private", PRIVATE_NAMES, ids=lambda private: private.target)
def test_the_installed_torch_has_the_name(private: PrivateName) -> None:
    assert exists(private), private.reason


def test_storages_without_memory_are_distinguished() -> None:
    first, second = (torch.zeros(4).untyped_storage() for _ in range(2))
    view = torch.empty(0).set_(first)
    for storage in (first, second):
        storage.resize_(0)
    assert storage_id(view.untyped_storage()) == storage_id(first) != storage_id(second)


def test_a_missing_group_is_not_alive() -> None:
    assert not is_alive(None)


@torch_defaults()
def product() -> torch.Tensor:
    return torch.full((2, 2), 1.001) @ torch.ones(2, 2)


def test_modes_of_the_caller_are_suspended_and_restored() -> None:
    expected = product()
    with other_torch_modes():
        for _ in range(2):
            result = product()
            assert result.dtype is torch.float32
            assert torch.equal(result, expected)
            assert not result.is_inference()
            outside = torch.ones(2, 2, dtype=torch.float32) @ torch.ones(2, 2, dtype=torch.float32)
            assert outside.is_inference()
            assert outside.dtype is torch.ones(1).dtype is torch.bfloat16
    with torch.no_grad(), torch_defaults():
        assert not torch.is_grad_enabled()


# -- known warnings --------------------------------------------------------------------------------

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
    assert {*caplog.messages} == {"another"}  # twice, if vLLM has set its logger up
