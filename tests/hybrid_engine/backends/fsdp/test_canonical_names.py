"""Views of a model's parameters are the tensors of the checkpoint that transformers writes, for every family."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hybrid_engine.backends.fsdp.canonical_names import canonical_views
from hybrid_engine.errors import ParameterMismatchError
from hybrid_engine.models import table_for
from tests.zoo import sharded_models
from tests.zoo.families import SERVED_VARIANTS, read_config, served_config, write_config
from tests.zoo.tiny_models import read_canonical


def model_of(path: Path, variant: str, **changes: object) -> torch.nn.Module:
    write_config(path, served_config(variant, torch_dtype="float32", **changes))
    return sharded_models.from_config(path)


@pytest.mark.parametrize("variant", SERVED_VARIANTS)
def test_every_tensor_of_a_checkpoint_is_found(variant: str, tmp_path: Path) -> None:
    model = model_of(tmp_path, variant)
    state = model.state_dict(keep_vars=True)
    views = canonical_views(model, state, table_for(read_config(tmp_path)))
    model.save_pretrained(tmp_path)
    saved = read_canonical(tmp_path)
    assert views.keys() == saved.keys()
    for name, packed in views.items():
        whole = state[packed.parameter].detach().contiguous()
        found = whole.as_strided(packed.view.shape, packed.view.strides, packed.view.offset)
        assert torch.equal(found, saved[name]), name


def test_a_model_of_another_config_is_refused_with_all_that_differs(tmp_path: Path) -> None:
    model = model_of(tmp_path / "one", "llama", num_hidden_layers=1)
    write_config(tmp_path / "other", served_config("qwen2", hidden_size=128))
    table = table_for(read_config(tmp_path / "other"))
    with pytest.raises(ParameterMismatchError) as caught:
        canonical_views(model, model.state_dict(keep_vars=True), table)
    findings = "\n".join(caught.value.findings)
    assert "model.embed_tokens.weight: shape (130, 64) in the model, (130, 128) in a checkpoint" in findings
    assert "model.layers.0.self_attn.q_proj.bias: the model has no such tensor" in findings


def test_a_tensor_computed_from_several_parameters_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversion that adds two tensors stands in for one that transformers may have some day."""
    model = model_of(tmp_path, "llama")

    def convert(_model: torch.nn.Module, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {**state, "model.norm.weight": state["model.norm.weight"] + 1}

    monkeypatch.setattr("hybrid_engine.backends.fsdp.canonical_names.revert_weight_conversion", convert)
    with pytest.raises(ParameterMismatchError, match=r"model\.norm\.weight: transformers computes it"):
        canonical_views(model, model.state_dict(keep_vars=True), table_for(read_config(tmp_path)))
