"""Checks of models that need no ranks; the others are in test_sharded_model.py."""

from __future__ import annotations

import pytest
import torch

from hybrid_engine.backends.fsdp.model_checks import require_torch, weights_dtype
from hybrid_engine.errors import DependencyError, ModelError


@pytest.mark.parametrize("version", ["2.6.0", "2.12.9+cu128"])
def test_a_torch_older_than_tested_is_refused(version: str) -> None:
    with pytest.raises(DependencyError, match=rf"torch {version[:5]}.* tested with 2\.13\.0 and later: pip install"):
        require_torch(version)


@pytest.mark.parametrize("version", ["2.13.0+cpu", "2.13.0a0+gitdeadbee", "2.14.0.dev20261120+cu130"])
def test_the_tested_torch_and_later_ones_are_taken(version: str) -> None:
    require_torch(version)


def weights(**dtypes: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: torch.nn.Parameter(torch.zeros(1, dtype=dtype)) for name, dtype in dtypes.items()}


@pytest.mark.parametrize(
    ("dtypes", "wire", "kept"),
    [
        ({"a": torch.bfloat16}, None, "bfloat16"),
        ({"a": torch.bfloat16}, "float16", "bfloat16"),
        ({"a": torch.bfloat16, "b": torch.float32}, "bfloat16", "float32"),
    ],
)
def test_the_dtype_of_the_weights(dtypes: dict[str, torch.dtype], wire: str | None, kept: str) -> None:
    with_buffer = {**weights(**dtypes), "buffer": torch.zeros(1, dtype=torch.float64)}
    assert weights_dtype(with_buffer, wire) == kept


@pytest.mark.parametrize("wire", [None, "float16"])
def test_weights_of_several_dtypes_are_refused(wire: str | None) -> None:
    with pytest.raises(ModelError, match="1 in bfloat16, first a; 1 in float32, first b"):
        weights_dtype(weights(a=torch.bfloat16, b=torch.float32), wire)
