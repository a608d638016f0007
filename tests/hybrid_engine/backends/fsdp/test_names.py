"""Names inside PEFT's and torch's wrappers, refused adapters, and names of every family."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from hybrid_engine.backends.fsdp.adaptor import LoraDelivery, ModelReading, read_model_weights
from hybrid_engine.backends.fsdp.names import canonical_views
from hybrid_engine.errors import ConfigError, ModelError, ParameterMismatchError
from hybrid_engine.models import table_for
from hybrid_engine.ranks.torch_internals import TensorDict
from tests.harness.errors import refused, violations_of
from tests.zoo import sharded_models
from tests.zoo.families import SERVED_VARIANTS, read_config, served_config, write_config
from tests.zoo.tiny_models import read_canonical

ALL_LINEAR = {"r": 2, "lora_alpha": 4, "target_modules": "all-linear"}


def model_of(path: Path, variant: str = "llama", **changes: Any) -> Any:
    """Write the config of a model, and build it."""
    return sharded_models.from_config(
        write_config(path, served_config(variant, torch_dtype="float32", **changes))
    )


def read(path: Path, model: torch.nn.Module, delivery: LoraDelivery = "merge") -> ModelReading:
    return read_model_weights(
        model, model.state_dict(keep_vars=True), table_for(read_config(path)), delivery
    )


def with_lora(model: torch.nn.Module, **settings: Any) -> Any:
    peft = pytest.importorskip("peft", reason="pip install peft")
    return peft.get_peft_model(model, peft.LoraConfig(**{**ALL_LINEAR, **settings}))


def compiled(model: torch.nn.Module) -> Any:
    return torch.compile(model, backend="eager")


def compiled_layers(model: torch.nn.Module) -> torch.nn.Module:
    layers = sharded_models.decoder_layers(model)
    for index, layer in enumerate(layers):
        layers[index] = torch.compile(checkpoint_wrapper(layer), backend="eager")  # type: ignore[assignment]
    return model


@pytest.mark.parametrize(
    "wrap", [compiled, compiled_layers, lambda model: compiled(compiled_layers(model))]
)
def test_names_are_read_through_torch_wrappers(
    tmp_path: Path,
    wrap: Callable[[torch.nn.Module], Any],
) -> None:
    plain = model_of(tmp_path)
    parameters = plain.state_dict(keep_vars=True)
    expected = read(tmp_path, plain).packed
    wrapped = wrap(plain)
    packed = read(tmp_path, wrapped).packed
    state = wrapped.state_dict(keep_vars=True)
    tensors = {name: id(state[place.parameter]) for name, place in packed.items()}
    assert tensors == {name: id(parameters[place.parameter]) for name, place in expected.items()}


def test_weights_are_read_through_peft_wrappers(tmp_path: Path) -> None:
    model = with_lora(compiled_layers(model_of(tmp_path)), modules_to_save=["lm_head"])
    reading = read(tmp_path, model)
    assert reading.packed["lm_head.weight"].parameter.endswith(
        "lm_head.modules_to_save.default.weight"
    )
    assert len(reading.names.loras) == 14  # seven linear layers in each of two layers
    with model.disable_adapter():
        plain_reading = read(tmp_path, model)
    assert plain_reading.packed["lm_head.weight"].parameter.endswith(
        "lm_head.original_module.weight"
    )
    assert plain_reading.names.loras == ()


def lora_on(**settings: Any) -> Callable[[torch.nn.Module], Any]:
    return lambda model: with_lora(model, **settings)


def merged(model: torch.nn.Module) -> Any:
    model = with_lora(model)
    model.merge_adapter()
    return model


def two_adapters(model: torch.nn.Module) -> Any:
    from peft import LoraConfig

    model = with_lora(model)
    model.add_adapter("other", LoraConfig(**{**ALL_LINEAR, "target_modules": ["q_proj"]}))
    model.base_model.set_adapter(["default", "other"])
    return model


def ia3(model: torch.nn.Module) -> Any:
    peft = pytest.importorskip("peft", reason="pip install peft")
    return peft.get_peft_model(
        model, peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[])
    )


def adalora(model: torch.nn.Module) -> Any:
    """AdaLoRA: subclasses of LoRA's layers that compute W + B diag(E) A."""
    peft = pytest.importorskip("peft", reason="pip install peft")
    return peft.get_peft_model(
        model, peft.AdaLoraConfig(total_step=9, init_r=2, target_modules=["q_proj"])
    )


def one_more_tensor(model: torch.nn.Module) -> Any:
    """Plain LoRA with a non-persistent buffer, as a later PEFT might have."""
    model = with_lora(model, target_modules=["q_proj"])
    layer = model.get_submodule("base_model.model.model.layers.1.self_attn.q_proj")
    layer.register_buffer("lora_gate", torch.ones(2), persistent=False)
    return model


UNSUPPORTED: dict[str, tuple[Callable[[torch.nn.Module], Any], LoraDelivery, tuple[str, ...]]] = {
    "tied": (
        lora_on(target_modules=["embed_tokens"]),
        "merge",
        ("model.embed_tokens, adapter default", "lm_head"),
    ),
    "dora": (lora_on(use_dora=True), "merge", ("Dora", "use_dora=False")),
    "bias of B": (
        lora_on(lora_bias=True, target_modules=["q_proj"]),
        "merge",
        ("lora_bias=False",),
    ),
    "merged": (merged, "merge", ("default", "unmerge_adapter")),
    "another method": (ia3, "merge", ("model.layers.0.self_attn.k_proj: Linear",)),
    "adaptive ranks": (
        adalora,
        "merge",
        (
            "model.layers.0.self_attn.q_proj: SVDLinear",
            "lora_A.default, lora_B.default, lora_E.default",
        ),
    ),
    "one more tensor": (
        one_more_tensor,
        "adapter",
        ("model.layers.1.self_attn.q_proj: Linear", "lora_gate"),
    ),
    "tokens": (lora_on(trainable_token_indices=[1, 2]), "merge", ("TrainableTokensWrapper",)),
}
NOT_SEPARATE: dict[str, tuple[Callable[[torch.nn.Module], Any], str, tuple[str, ...]]] = {
    "an embedding": (
        lora_on(target_modules=["embed_tokens", "q_proj"]),
        "cannot-deliver-adapter",
        ("embed_tokens",),
    ),
    "two": (two_adapters, "several-adapters", ("2 weights", "q_proj")),
    "none": (lambda model: model, "no-adapters", ()),
    "experts": (
        lora_on(target_modules=["q_proj"], target_parameters=["mlp.experts.down_proj"]),
        "cannot-deliver-adapter",
        ("it adapts experts. Use merge",),
    ),
    "a rank": (lora_on(r=600, target_modules=["q_proj"]), "cannot-deliver-adapter", ("600", "512")),
}


def test_inactive_adapters_are_ignored(tmp_path: Path) -> None:
    model = two_adapters(model_of(tmp_path))
    model.base_model.set_adapter("other")  # "default" does not compute
    assert len(read(tmp_path, model, "adapter").names.loras) == 2


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_adapters_are_refused(tmp_path: Path, name: str) -> None:
    change, delivery, values = UNSUPPORTED[name]
    model = change(model_of(tmp_path, "llama tied" if name == "tied" else "llama"))
    with refused(ModelError, "unsupported-adapters", *values):
        read(tmp_path, model, delivery)


@pytest.mark.parametrize("name", NOT_SEPARATE)
def test_adapters_that_cannot_be_delivered_separately_are_refused(
    tmp_path: Path,
    name: str,
) -> None:
    change, code, values = NOT_SEPARATE[name]
    model = change(model_of(tmp_path, "qwen3_moe" if name == "experts" else "llama"))
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, model, "adapter")
    assert set(violations_of(caught.value)) == {("generate_config.lora_delivery", code)}
    assert all(value in str(caught.value) for value in values)


def test_an_adapter_on_a_parameter_is_read_as_one_on_its_layer(tmp_path: Path) -> None:
    on_layers = with_lora(model_of(tmp_path), target_modules=["q_proj"])
    settings = {"target_modules": [], "target_parameters": ["q_proj.weight"]}
    on_parameters = with_lora(model_of(tmp_path), **settings)
    for delivery in ("merge", "adapter"):
        reading, expected = (
            read(tmp_path, on_parameters, delivery),
            read(tmp_path, on_layers, delivery),
        )
        assert (reading.packed, reading.lora) == (expected.packed, expected.lora)
        assert reading.names.loras == expected.names.loras != ()


def test_a_trained_copy_of_a_tied_head_is_refused(tmp_path: Path) -> None:
    model = with_lora(model_of(tmp_path, "llama tied"), modules_to_save=["lm_head"])
    with pytest.raises(ParameterMismatchError, match=r"lm_head\.weight:"):
        read(tmp_path, model)


@pytest.mark.parametrize("variant", SERVED_VARIANTS)
def test_every_tensor_of_a_checkpoint_has_a_view(variant: str, tmp_path: Path) -> None:
    model = model_of(tmp_path, variant)
    state = model.state_dict(keep_vars=True)
    views = canonical_views(model, state, table_for(read_config(tmp_path)))
    model.save_pretrained(tmp_path)
    saved = read_canonical(tmp_path)
    assert views.keys() == saved.keys()
    for name, packed in views.items():
        whole = state[packed.parameter].detach().contiguous()
        tensor = whole.as_strided(packed.view.shape, packed.view.strides, packed.view.offset)
        assert torch.equal(tensor, saved[name]), name


def test_a_model_of_another_config_is_refused_with_all_differences(tmp_path: Path) -> None:
    model = model_of(tmp_path / "one", "llama", num_hidden_layers=1)
    write_config(tmp_path / "other", served_config("qwen2", hidden_size=128))
    table = table_for(read_config(tmp_path / "other"))
    with pytest.raises(ParameterMismatchError) as caught:
        canonical_views(model, model.state_dict(keep_vars=True), table)
    findings = dict(finding.split(": ", 1) for finding in caught.value.findings)
    assert all(
        shape in findings["model.embed_tokens.weight"] for shape in ("(130, 64)", "(130, 128)")
    )
    assert "model.layers.0.self_attn.q_proj.bias" in findings


def test_a_tensor_computed_from_several_parameters_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = model_of(tmp_path, "llama")

    # No conversion of transformers adds tensors yet.
    def convert(_model: torch.nn.Module, state: TensorDict) -> TensorDict:
        return {**state, "model.norm.weight": state["model.norm.weight"] + 1}

    monkeypatch.setattr("hybrid_engine.backends.fsdp.names.revert_weight_conversion", convert)
    with pytest.raises(ParameterMismatchError, match=r"model\.norm\.weight: "):
        canonical_views(model, model.state_dict(keep_vars=True), table_for(read_config(tmp_path)))
