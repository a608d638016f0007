"""HybridModel: how its layers are named, and what is said where there is none.

Live ones are among the cases of `expert_cases.py` and of the matrix, where megatron-core has them.
"""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import megatron.core
import pytest

from hybrid_engine.backends.megatron.megatron_config import train_sizes, transformer_config
from hybrid_engine.backends.megatron.model_tensors import GlobalNames
from hybrid_engine.config import ActorConfig
from hybrid_engine.errors import ConfigError, ModelError
from hybrid_engine.models import table_for
from tests.zoo.families import served_config
from tests.zoo.megatron_models import DENSE_FLOAT32


def stand_in(pattern: str, positions: range) -> Any:
    """What is read of a chunk for its names, in place of a HybridModel."""
    layers = [SimpleNamespace(layer_number=position + 1) for position in positions]
    decoder = SimpleNamespace(layers=layers)
    return SimpleNamespace(hybrid_layer_pattern=pattern, decoder=decoder, named_modules=lambda: iter(()))


def test_attention_and_mlp_have_the_number_of_their_layer_in_the_checkpoint() -> None:
    names = GlobalNames(stand_in("*-*|-*-", range(3, 6)), 3, frozenset())
    assert names.of("decoder.layers.0.mlp.linear_fc1.weight") == "decoder.layers.1.mlp.linear_fc1.weight"
    assert names.of("decoder.layers.1.self_attention.linear_qkv.bias").startswith("decoder.layers.2.self_attention.")
    assert names.of("decoder.layers.2.pre_mlp_layernorm.weight") == "decoder.layers.2.pre_mlp_layernorm.weight"
    assert names.of("decoder.final_norm.weight") == "decoder.final_norm.weight"


def test_a_live_model_of_other_layers_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match=re.escape("a HybridModel with Mamba layers (M) in 'M*-'")):
        GlobalNames(stand_in("M*-", range(3)), 1, frozenset())


def test_before_it_came_it_is_refused_with_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron.core, "__version__", "0.18.2")
    actor = ActorConfig(**{**DENSE_FLOAT32, "hybrid_layer_pattern": "*-*-"})
    with pytest.raises(ConfigError, match=r"pattern: megatron-core 0\.18\.2 has no HybridModel.*Install 0\.19"):
        transformer_config(actor, train_sizes(actor, 1), table_for(served_config("llama")))
