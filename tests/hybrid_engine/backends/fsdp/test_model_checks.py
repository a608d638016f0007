"""Checks of models against their config, and of private names; no ranks but in one test."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from operator import methodcaller
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
)

from hybrid_engine.assembly import _model_directory
from hybrid_engine.backends.fsdp.attention import live_attention, recorded
from hybrid_engine.backends.fsdp.internals import PRIVATE_NAMES
from hybrid_engine.backends.fsdp.model_checks import (
    require_configured,
    require_torch,
    weights_dtype,
)
from hybrid_engine.backends.fsdp.names import model_of_config
from hybrid_engine.backends.fsdp.sharded_tensors import mesh_of, shard_model
from hybrid_engine.config import FsdpConfig
from hybrid_engine.errors import ConfigError, DependencyError, ModelError
from hybrid_engine.models import table_for
from hybrid_engine.ranks.groups import end_groups
from hybrid_engine.ranks.torch_internals import PrivateName, TensorDict
from tests.harness.errors import has_code, has_violations, refused
from tests.harness.launch import on_ranks
from tests.harness.private_names import exists
from tests.harness.values import Values
from tests.hybrid_engine.backends.fsdp.test_names import compiled_layers, lora_on, model_of
from tests.hybrid_engine.models.small_configs import variant_config
from tests.zoo import sharded_models
from tests.zoo.families import SERVED_VARIANTS, read_config, served_config, write_config


def test_a_torch_older_than_tested_is_refused() -> None:
    for version in ("2.6.0", "2.10.9+cu128"):
        with refused(DependencyError, "torch-too-old", version, "2.11.0"):
            require_torch(version)
    for version in ("2.11.0+cpu", "2.11.0a0+gitdeadbee", "2.14.0.dev20261120+cu130"):
        require_torch(version)


def weights(**dtypes: torch.dtype) -> TensorDict:
    return {name: torch.nn.Parameter(torch.zeros(1, dtype=dtype)) for name, dtype in dtypes.items()}


@pytest.mark.parametrize("wire", [None, "float16"])
def test_weights_have_the_dtype_of_their_parameters(wire: str | None) -> None:
    # Buffers do not count.
    buffer = {"buffer": torch.zeros(1, dtype=torch.float64)}
    assert weights_dtype({**weights(a=torch.bfloat16), **buffer}, wire) == "bfloat16"
    mixed = weights(a=torch.bfloat16, b=torch.float32)
    assert weights_dtype(mixed, "bfloat16") == "float32"
    with refused(ModelError, "several-dtypes", "bfloat16, first a", "float32, first b"):
        weights_dtype(mixed, wire)


def differences(model: Any) -> list[str]:
    """Return a line for each difference between a model and its config."""
    try:
        require_configured(model)
    except ModelError as error:
        has_code("differs-from-config")(error)
        return str(error).splitlines()[1:]
    return []


def has_line(lines: list[str], *values: str) -> bool:
    """Return whether one of `lines` contains all of `values`."""
    return any(all(value in line for value in values) for line in lines)


def test_loading_in_another_dtype_rounds_only_weights(tmp_path: Path) -> None:
    model_of(tmp_path).save_pretrained(tmp_path)
    for dtype in (torch.bfloat16, torch.float16):
        require_configured(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype))


@pytest.mark.parametrize("variant", SERVED_VARIANTS)
def test_models_of_every_family_match_their_config(tmp_path: Path, variant: str) -> None:
    model = model_of(tmp_path, variant)
    model.set_attn_implementation("eager")
    require_configured(model)
    with ExitStack() as owner:
        written = read_config(_model_directory(model, owner))
        assert table_for(written) == table_for(served_config(variant))


@pytest.mark.parametrize(
    ("variant", "softcap", "implementation", "is_refused"),
    [
        ("gemma2", 50.0, "sdpa", True),  # the default implementation
        ("gemma2", 50.0, "paged|eager", True),
        ("gemma2", 50.0, "eager", False),
        ("gemma2", 50.0, "flex_attention", False),
        ("gemma2", None, "sdpa", False),
        ("gemma3", 50.0, "sdpa", False),  # its attention ignores the soft cap
    ],
)
def test_attention_without_the_configured_soft_cap_is_refused(
    tmp_path: Path, variant: str, softcap: float | None, implementation: str, is_refused: bool
) -> None:
    model = model_of(tmp_path, variant, attn_logit_softcapping=softcap)
    model.config._attn_implementation = implementation  # without transformers' own check
    lines = differences(model)
    assert bool(lines) == is_refused
    assert (
        has_line(lines, f"'{implementation}'", "softcap 50.0", "attn_implementation='eager'")
        == is_refused
    )
    assert model.config._attn_implementation == implementation


@pytest.mark.parametrize(("has_mask", "is_refused"), [(False, True), (True, False)])
def test_attention_without_masks_is_refused_for_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_mask: bool, is_refused: bool
) -> None:
    def attend(
        module: Any,
        query: Any,
        key: Any,
        value: Any,
        attention_mask: Any,
        **kwargs: Any,
    ) -> None:
        """Registered but never called."""

    monkeypatch.setitem(AttentionInterface._global_mapping, "ours", attend)
    if has_mask:
        monkeypatch.setitem(AttentionMaskInterface._global_mapping, "ours", attend)
    model = model_of(tmp_path, "mixtral", sliding_window=100)
    model.config._attn_implementation = "ours"
    assert has_line(differences(model), "'ours'", "sliding_window 100") == is_refused


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "dynamic", "factor": 2.0},
        {
            "rope_type": "longrope",
            "factor": 2.0,
            "short_factor": [1.0] * 16,
            "long_factor": [2.0] * 16,
        },
    ],
    ids=lambda scaling: scaling["rope_type"],
)
def test_rotary_frequencies_that_depend_on_the_length_are_read(
    tmp_path: Path,
    scaling: Values,
) -> None:
    model = model_of(
        tmp_path, "llama", rope_scaling=scaling | {"original_max_position_embeddings": 64}
    )
    short = model.model.rotary_emb.inv_freq.clone()
    model(
        torch.zeros(1, 140, dtype=torch.int64)
    )  # leaves the frequencies of its length in the buffers
    require_configured(model)
    (rotary,) = {
        attention.rotary for attention in live_attention(model, recorded(model).calls).values()
    }
    assert torch.allclose(torch.tensor(rotary.frequencies), short)
    assert not torch.allclose(short, model.model.rotary_emb.inv_freq)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"rope_scaling": {"rope_type": "of_others", "factor": 2.0}}, "KeyError: 'of_others'"),
        ({"pad_token_id": 2000}, "AssertionError: Padding_idx"),
    ],
    ids=str,
)
def test_a_config_that_transformers_cannot_build_is_refused(
    tmp_path: Path,
    change: Values,
    problem: str,
) -> None:
    path = write_config(tmp_path, served_config("llama") | change)
    with pytest.raises(
        ConfigError, match=problem, check=has_violations(("model", "builds-no-model"))
    ):
        model_of_config(path)


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
OVERRIDES: dict[str, Values] = {
    "base": {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    "llama3": {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 16}},
    "epsilon": {"rms_norm_eps": 0.5},
    "activation": {"hidden_act": "gelu"},
}


@pytest.mark.parametrize("name", OVERRIDES)
def test_overrides_passed_at_loading_are_written(tmp_path: Path, name: str) -> None:
    model_of(tmp_path).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, **OVERRIDES[name])
    require_configured(model)
    with ExitStack() as owner:
        directory = _model_directory(model, owner)
        # A model built from the written config computes the same, the config on disk does not.
        built = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory))
        built.load_state_dict(model.state_dict())
        tokens = torch.arange(24)[None]
        plain = AutoModelForCausalLM.from_pretrained(tmp_path)
        with torch.no_grad():
            assert torch.equal(built(tokens).logits, model(tokens).logits)
            assert not torch.allclose(plain(tokens).logits, model(tokens).logits, atol=1e-3)


def test_end_tokens_of_the_live_model_are_written(tmp_path: Path) -> None:
    model_of(tmp_path).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    model.generation_config.eos_token_id = [5, 6]  # vLLM stops by generation_config.json
    model.generation_config.temperature = 0.5  # without do_sample, which save_pretrained refuses
    with ExitStack() as owner:
        written = json.loads(
            (_model_directory(model, owner) / "generation_config.json").read_text()
        )
    assert written["eos_token_id"] == [5, 6]


def settings_of_training(model: Any) -> None:
    model.gradient_checkpointing_enable()
    model.config.use_cache = False
    model.config.pad_token_id = 3
    model.config.attention_dropout = 0.5
    model.train()


@pytest.mark.parametrize(
    "change",
    [
        settings_of_training,
        lora_on(r=2, modules_to_save=["norm"]),
        methodcaller("resize_token_embeddings", 140),
        compiled_layers,
        torch.nn.Module.eval,
    ],
)
def test_changes_without_effect_on_inference_are_accepted(
    tmp_path: Path,
    change: Callable[[Any], object],
) -> None:
    model = model_of(tmp_path)
    change(model)
    require_configured(model)


def another_base(model: Any) -> None:
    model.config.rope_parameters["rope_theta"] = 77.0


def another_epsilon(model: Any) -> None:
    model.config.rms_norm_eps = 0.5


def another_activation(model: Any) -> None:
    model.model.layers[1].mlp.act_fn = torch.nn.ReLU()


REFUSED: dict[str, tuple[Callable[[Any], object], tuple[str, ...]]] = {
    "base": (another_base, ("model.rotary_emb: inv_freq",)),
    "epsilon": (
        another_epsilon,
        ("model.layers.0.input_layernorm and 4 more", "variance_epsilon", "1e-05", "0.5"),
    ),
    "activation": (another_activation, ("model.layers.1.mlp.act_fn", "ReLU", "SiLU")),
    "dtype": (torch.nn.Module.bfloat16, ("model.rotary_emb: inv_freq", "torch.bfloat16", ".to()")),
}


def test_persistent_buffers_are_tensors_of_the_checkpoint(tmp_path: Path) -> None:
    model: Any = sharded_models.from_config(
        write_config(tmp_path, variant_config("LFM2-MoE, a router's bias"))
    )
    for name, buffer in model.named_buffers():
        if "expert_bias" in name:
            buffer.normal_()
    require_configured(model)


@pytest.mark.parametrize("name", REFUSED)
def test_differences_from_the_config_are_refused(tmp_path: Path, name: str) -> None:
    change, values = REFUSED[name]
    model = model_of(tmp_path)
    state = torch.get_rng_state()
    require_configured(model)
    assert torch.equal(
        torch.get_rng_state(), state
    )  # the check builds a model without drawing numbers
    change(model)
    assert has_line(differences(model), *values)


HYBRID = FsdpConfig(sharding_strategy="HYBRID_SHARD", replicas=2)


def test_gradients_are_summed_in_float32(job: None, tmp_path: Path) -> None:
    """A sum of three equal gradients of bfloat16 needs more bits than bfloat16 has."""
    model = model_of(tmp_path)
    shard_model(
        model, FsdpConfig(mixed_precision="bf16"), mesh_of(FsdpConfig(), torch.device("cpu"), 1)
    )
    gradients = []
    for number in (1, 3):
        model.zero_grad()
        for later in reversed(range(number)):
            model.set_requires_gradient_sync(later == 0)
            model(torch.arange(16)[None]).logits.square().mean().backward()
        gradients.append(model.lm_head.weight.grad.to_local())
    assert torch.equal(3 * gradients[0], gradients[1])


@on_ranks(4)
def test_replicas_train_after_groups_of_an_equal_mesh_have_ended() -> None:
    """torch caches reductions by mesh, with groups that have ended by then."""
    dist.init_process_group("gloo")
    norms = []
    for _ in range(2):
        mesh = mesh_of(HYBRID, torch.device("cpu"), dist.get_world_size())
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 8)
        fully_shard(model, mesh=mesh)
        model(torch.ones(2, 8)).sum().backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor().item())
        # The second model must not reduce over these.
        end_groups(*(group for group in mesh.get_all_groups() if group is not dist.group.WORLD))
    dist.destroy_process_group()
    first, second = norms
    assert first == second > 0


@on_ranks(2)
def test_a_router_in_float32_is_sharded_in_a_bfloat16_model(tmp_path: Path) -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        write_config(tmp_path, variant_config("Ernie4_5_MoeForCausalLM"))
    dist.barrier()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(tmp_path), dtype=torch.bfloat16
    ).eval()
    tokens = torch.arange(16)[None]
    with torch.no_grad():
        whole = model(tokens).logits
        mesh = mesh_of(FsdpConfig(), torch.device("cpu"), dist.get_world_size())
        shard_model(model, FsdpConfig(mixed_precision="no"), mesh)
        assert torch.equal(model(tokens).logits, whole)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16, torch.float32}


@pytest.mark.parametrize("private", PRIVATE_NAMES, ids=lambda private: private.target)
def test_private_names_exist_in_the_installed_versions(private: PrivateName) -> None:
    assert exists(private), private.reason
