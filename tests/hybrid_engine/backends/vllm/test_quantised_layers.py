"""A quantization method that leaves layers as they are is reported or refused."""

from __future__ import annotations

import logging

import pytest
import torch

from hybrid_engine.backends.vllm.weights.postload import require_quantised
from hybrid_engine.errors import ConfigError
from tests.harness.errors import has_violation

pytestmark = pytest.mark.slow  # imports vLLM


def layer(dtype: torch.dtype | None) -> torch.nn.Module:
    """Return a linear layer as vLLM has processed it; dtype None: it has packed the weights."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    module = torch.nn.Module()
    module.quant_method = UnquantizedLinearMethod()
    if dtype is not None:
        module.weight = torch.nn.Parameter(torch.zeros(2, 2).to(dtype), requires_grad=False)
    return module


def test_layers_that_are_left_out_are_named_or_refused(caplog: pytest.LogCaptureFixture) -> None:
    quantised = {
        "fp8": layer(torch.float8_e4m3fn),
        "int8": layer(torch.int8),
        "packed": layer(torch.uint8),
    }
    untouched = {
        "first": layer(torch.bfloat16),
        "second": layer(None),
        "norm": torch.nn.LayerNorm(2),
    }
    caplog.clear()  # vLLM logs when it is first imported in a process, as by the layers above
    with caplog.at_level(logging.WARNING, "hybrid_engine"):
        require_quantised(quantised, "some_method", logs=True)
        require_quantised({**quantised, **untouched}, "some_method", logs=False)
        assert caplog.messages == []
        require_quantised({**quantised, **untouched}, "some_method", logs=True)
    (message,) = caplog.messages
    assert "some_method leaves 2 of 5 layers as they are: first, second" in message
    with pytest.raises(
        ConfigError, check=has_violation("quantization", "quantises-nothing", "some_method", "2")
    ):
        require_quantised(untouched, "some_method", logs=True)
