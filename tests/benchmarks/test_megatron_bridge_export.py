"""Substitute of Transformer Engine for imports of Megatron-Bridge."""

from __future__ import annotations

import importlib
import importlib.util
import sys

import pytest

from benchmarks.resharding import bridges
from hybrid_engine.errors import DependencyError

pytestmark = [
    pytest.mark.slow,  # Imports Megatron.
    pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is not None, reason="the real one is installed"),
]


def test_empty_classes_exist_only_during_an_import() -> None:
    with bridges._importable_transformer_engine():
        te = importlib.import_module("transformer_engine.pytorch")
        importlib.import_module("transformer_engine.pytorch.module.grouped_linear")

        class Fused(te.ops.Sequential):  # type: ignore[name-defined]
            pass

    assert not [name for name in sys.modules if name.startswith("transformer_engine")]
    assert importlib.util.find_spec("transformer_engine") is None
    assert issubclass(Fused, bridges.torch.nn.Module)


@pytest.mark.skipif(importlib.util.find_spec("megatron.bridge") is not None, reason="Megatron-Bridge is installed")
def test_a_missing_megatron_bridge_is_reported_with_a_hint() -> None:
    with pytest.raises(DependencyError, match=r"cannot be imported \(.*megatron.bridge.*\): pip install 'megatron"):
        bridges._auto_bridge()
