"""Configurations of Megatron that do not go with a switch are refused, and so is what nobody has looked at."""

from __future__ import annotations

import dataclasses
import logging
from types import SimpleNamespace
from typing import Any

import megatron.core
import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import MLATransformerConfig, TransformerConfig

from megatron_patches.patch import release_of
from megatron_patches.review import ALLOW, Setting, live_settings, refusals
from megatron_patches.review.verdicts import FieldReview, review_of, reviewed_versions

INSTALLED = release_of(megatron.core.__version__)
SIZES = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4}
OTHER_VALUE = "a value that was not reviewed"


def live(transformer: Any = None, ddp: Any = None, optimizer: Any = None) -> list[Setting]:
    """The settings of objects as a live model has them, of Megatron's own classes where none are given."""
    chunk = torch.nn.Module()
    chunk.config = transformer or TransformerConfig(**SIZES)
    chunk.ddp_config = ddp or DistributedDataParallelConfig()
    member = SimpleNamespace(config=optimizer or OptimizerConfig())
    return live_settings([chunk, chunk], SimpleNamespace(chained_optimizers=[member, member]))


def test_a_layer_wise_optimizer_is_refused_whatever_its_configuration_says() -> None:
    """0.16 and 0.17 overwrite `dist_muon` with the name of a member while they build it."""
    layer_wise = pytest.importorskip("megatron.core.optimizer.layer_wise_optimizer").LayerWiseDistributedOptimizer
    member = SimpleNamespace(config=OptimizerConfig(optimizer="adam"))
    optimizer = layer_wise.__new__(layer_wise)  # its constructor takes optimizers of a model
    optimizer.config, optimizer.chained_optimizers = member.config, [member]
    for found in (optimizer, SimpleNamespace(chained_optimizers=[optimizer])):
        (refusal,) = refusals(live_settings([], found))
        assert str(refusal).startswith("OptimizerConfig.optimizer: dist_muon: ")
    assert refusals(live_settings([], SimpleNamespace(chained_optimizers=[member]))) == []


def refused_fields(version: str) -> list[tuple[str, str, FieldReview]]:
    sections = review_of(version).sections
    return [
        (section, field, found)
        for section, fields in sections.items()
        for field, found in fields.items()
        if found.verdict == "refused"
    ]


def test_megatrons_own_defaults_are_accepted() -> None:
    assert refusals(live()) == []
    assert refusals(live(MLATransformerConfig(**SIZES))) == []


def test_each_refused_field_of_a_live_object_is_one_message() -> None:
    for section, field, reviewed in refused_fields(INSTALLED):
        if section.endswith("Model"):
            continue  # its arguments are not attributes of a configuration
        objects = {
            "TransformerConfig": MLATransformerConfig(**SIZES),  # which has all of TransformerConfig's fields
            "DistributedDataParallelConfig": DistributedDataParallelConfig(),
            "OptimizerConfig": OptimizerConfig(),
        }
        setattr(objects[section], field, OTHER_VALUE)
        (found,) = refusals(live(*objects.values()))
        assert (found.section, found.field) == (section, field)
        assert found.problem == f"{OTHER_VALUE}: {reviewed.reason}"
        assert str(reviewed.default) in found.remedy


@pytest.mark.parametrize("version", reviewed_versions())
def test_each_refused_field_of_each_version_is_one_message(version: str) -> None:
    """Of versions that are not installed, too: all at once, as one configuration with everything wrong."""
    fields = refused_fields(version)
    settings = [Setting(section, field, OTHER_VALUE, found.default) for section, field, found in fields]
    found = refusals(settings, version=version)
    assert [(one.section, one.field) for one in found] == [(section, field) for section, field, _ in fields]
    accepted = [Setting(section, field, value, None) for section, field, one in fields for value in one.accepted]
    assert refusals(accepted, version=version) == []


def test_the_newest_version_refuses_by_name_what_lays_weights_out_otherwise() -> None:
    refused = {field for _, field, _ in refused_fields("0.19.2")}
    assert refused >= {
        *("moe_shared_expert_glu_interleave_size", "use_grouped_gemm_for_dense_mlp", "fp8_param", "fp4_param"),
        *("gtp_weight_remat_size", "expert_gtp_weight_remat_size", "mtp_hybrid_override_pattern"),
    }


def test_a_list_of_values_is_accepted_where_each_of_them_is() -> None:
    def found(value: object) -> list[Any]:
        return refusals([Setting("TransformerConfig", "moe_router_load_balancing_type", value, None)], version="0.19.2")

    assert found(["aux_loss", "seq_aux_loss"]) == []
    assert found(["aux_loss", "quantile_balancing"]) != []


def later_config(value: object) -> Any:
    """As a later megatron-core would declare its TransformerConfig."""
    fields = [("weight_folding", Any, None), ("weight_lists", list[int], dataclasses.field(default_factory=list))]
    later = dataclasses.make_dataclass("TransformerConfig", fields, bases=(TransformerConfig,))
    later.__module__ = TransformerConfig.__module__
    return later(**SIZES, weight_folding=value)


def test_a_field_that_nobody_has_seen_is_refused_unless_it_has_its_default(caplog: pytest.LogCaptureFixture) -> None:
    assert refusals(live(later_config(None))) == []
    settings = live(later_config(3))
    (found,) = refusals(settings)
    assert (found.section, found.field) == ("TransformerConfig", "weight_folding")
    assert found.problem.startswith("3: ")
    assert INSTALLED in found.problem
    assert found.remedy == f"Leave it at None, or name it in {ALLOW}"
    with caplog.at_level(logging.WARNING):
        assert refusals(settings, ["weight_folding"]) == []
    assert "weight_folding" in caplog.text


def test_an_unseen_version_is_held_against_the_last_review_before_it() -> None:
    setting = Setting("TransformerConfig", "use_grouped_gemm_for_dense_mlp", True, False)
    assert "was not reviewed (last reviewed: 0.17.1)" in refusals([setting], version="0.17.3")[0].problem
    assert "interleaved" in refusals([setting], version="9.0.0")[0].problem


def test_allowing_a_name_needs_a_field_that_was_not_reviewed() -> None:
    config = TransformerConfig(**SIZES)
    config.fp8_param = True
    refused, unknown = refusals(live(config), ["fp8_param", "hidden_sizes"])
    assert "does not help" in refused.remedy
    assert (unknown.section, unknown.field, unknown.remedy) == (ALLOW, "hidden_sizes", "Did you mean hidden_size")


def test_a_name_can_be_allowed_where_its_configuration_is_not_there() -> None:
    """A reference model has neither DDP nor an optimizer, and gets the names that its actor gets."""
    reference = torch.nn.Module()
    reference.config = TransformerConfig(**SIZES)
    settings = live_settings([reference], None)
    assert {setting.section for setting in settings} == {"TransformerConfig"}
    assert refusals(settings, ["lr", "bucket_size", "rope_scaling"]) == []
    (unknown,) = refusals(settings, ["bucket_sizes"])
    assert unknown.remedy == "Did you mean bucket_size"


def test_fields_that_a_class_of_ones_own_adds_are_its_own() -> None:
    @dataclasses.dataclass
    class Provider(TransformerConfig):
        checkpoint: str = ""
        quant_recipe: Any = "recipe"  # the default of Megatron's class is what counts

    (found,) = refusals(live(Provider(**SIZES, checkpoint="here")))
    assert found.field == "quant_recipe"


def test_a_models_argument_that_cannot_be_seen_is_refused() -> None:
    class GPTModel(torch.nn.Module):
        def __init__(self, vocab_size: int, folded: bool = False, twisted: bool = False) -> None:
            super().__init__()
            self.vocab_size, self.folded = vocab_size, folded

    GPTModel.__module__ = "megatron.core.models.gpt.gpt_model"
    (found,) = refusals(live_settings([GPTModel(8)], None))
    assert (found.section, found.field) == ("GPTModel", "twisted")
    assert found.problem.startswith("a value that the model does not keep: ")
    folded, _ = refusals(live_settings([GPTModel(8, folded=True)], None))
    assert folded.field == "folded"
