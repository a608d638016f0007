"""Models refused for training, weights-only models, a frozen stage, layers of a HybridModel.

test_experts.py and the matrix have models that compute.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import megatron.core
import pytest
import torch
import torch.distributed as dist
from packaging.version import Version

from hybrid_engine.backends.megatron.megatron_config import train_sizes, transformer_config
from hybrid_engine.backends.megatron.model_tensors import GlobalNames
from hybrid_engine.errors import ConfigError, ModelError
from hybrid_engine.models import table_for
from tests.harness.core_versions import INSTALLED
from tests.harness.errors import has_violations, refused
from tests.harness.launch import on_engines
from tests.harness.values import Values
from tests.zoo.families import read_config, served_config
from tests.zoo.megatron_models import SP2, TP2, actor_config, parallel_state_of
from tests.zoo.tiny_models import Zoo, read_canonical

# name -> (actor_config of a model with experts on two ranks, part of the error, least and largest
# share of the elements that a rank holds; (): it cannot be built). A tensor parallel rank holds
# about half of them, a context parallel rank all.
REFUSED: dict[str, tuple[Values, str, tuple[float, ...]]] = {
    "experts without sequence parallel": (
        {**TP2, "sequence_parallel": False},
        "sequence_parallel",
        (0.4, 1.0),
    ),
    "context": ({"context_parallel_size": 2}, "context_parallel_size 2", (0.99, 1.02)),
    "positions": ({"noop_layers": (1, 1)}, r"noop_layers: \[1, 1\] names a position twice", ()),
}
if Version("0.19.0") > INSTALLED:
    CUT_OTHERWISE = {**SP2, "expert_tensor_parallel_size": 1}
    REFUSED["experts cut otherwise"] = (
        CUT_OTHERWISE,
        "expert_tensor_parallel_size 1, tensor_model_parallel_size 2",
        (0.1, 1.0),
    )


@on_engines(2)
@pytest.mark.parametrize("name", REFUSED)
def test_an_unsupported_model_is_refused_for_training_but_can_hold_weights(
    zoo: Zoo, name: str
) -> None:
    from hybrid_engine.trainer.megatron.build import build_model

    settings, pattern, share = REFUSED[name]
    config = actor_config(**settings)
    path = zoo.path("deepseek_v2")
    model = read_config(path)
    table = table_for(model)
    whole = sum(tensor.numel() for tensor in read_canonical(path).values())
    with parallel_state_of(config):
        with pytest.raises(ConfigError, match=pattern):
            build_model(config, table, model, dist.get_world_size())
        # gloo connects in the background; a group must not end before both ranks have connected
        dist.barrier()
        if share:
            chunks, _ = build_model(config, table, model, dist.get_world_size(), weights_only=True)
            num_elements = sum(parameter.numel() for parameter in chunks[0].parameters())
            assert share[0] * whole < num_elements < share[1] * whole


def test_a_frozen_stage_counts_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    from hybrid_engine.backends.megatron.live_model import LiveModel
    from hybrid_engine.trainer.megatron.pipeline import Pipeline

    monkeypatch.setattr(
        "hybrid_engine.trainer.megatron.pipeline.is_true_anywhere", lambda flag: bool(flag)
    )

    optimizer = MagicMock(is_stub_optimizer=True, **{"step.return_value": (True, 0.0, 0)})

    class Stage(MagicMock):
        version = LiveModel.version
        weights = SimpleNamespace(model=SimpleNamespace(ddp_chunks=[]))

    stage = Stage(optimizer=optimizer)
    pipeline = MagicMock(
        _model=stage,
        _optimizer=SimpleNamespace(
            inner=optimizer, learning_rate=0.1, conclude_step=lambda *_: None
        ),
        _has_loss_scale=False,
        data_parallel=SimpleNamespace(device="cpu"),
        **{"run.return_value": [], "_average.side_effect": lambda _: {}},
    )
    for steps in (1, 2):
        report = Pipeline.step(pipeline, {"tokens": torch.zeros(1, 1)}, lambda *_: None)
        assert (report["skipped"], stage.version) == (0.0, steps)


def stand_in_chunk(pattern: str, positions: range) -> Any:
    """Build a stand-in for a HybridModel with the attributes that its names depend on."""
    layers = [SimpleNamespace(layer_number=position + 1) for position in positions]
    decoder = SimpleNamespace(layers=layers)
    return SimpleNamespace(
        hybrid_layer_pattern=pattern, decoder=decoder, named_modules=lambda: iter(())
    )


def test_attention_and_mlp_are_numbered_by_layer_of_the_checkpoint() -> None:
    names = GlobalNames(stand_in_chunk("*-*|-*-", range(3, 6)), 3, frozenset())
    assert (
        names.of("decoder.layers.0.mlp.linear_fc1.weight")
        == "decoder.layers.1.mlp.linear_fc1.weight"
    )
    assert names.of("decoder.layers.1.self_attention.linear_qkv.bias").startswith(
        "decoder.layers.2.self_attention."
    )
    assert (
        names.of("decoder.layers.2.pre_mlp_layernorm.weight")
        == "decoder.layers.2.pre_mlp_layernorm.weight"
    )
    assert names.of("decoder.final_norm.weight") == "decoder.final_norm.weight"


def test_a_live_model_with_mamba_layers_is_refused() -> None:
    with refused(ModelError, "unsupported-layers", "Mamba layers (M) in 'M*-'"):
        GlobalNames(stand_in_chunk("M*-", range(3)), 1, frozenset())


def test_hybrid_layers_are_refused_in_an_older_megatron_core(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(megatron.core, "__version__", "0.18.2")
    actor = actor_config(hybrid_layer_pattern="*-*-")
    expected = has_violations(("actor_config.hybrid_layer_pattern", "megatron-core-too-old"))
    with pytest.raises(ConfigError, match=r"0\.18\.2", check=expected):
        transformer_config(actor, train_sizes(actor, 1), table_for(served_config("llama")))
