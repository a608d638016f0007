"""Configurations of Megatron that prevent a switch are refused, and so are unknown fields."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import MLATransformerConfig, TransformerConfig

from megatron_patches.known_fields import KNOWN_FIELDS
from megatron_patches.refused_fields import (
    FUNCTION_FIELDS,
    READ_OFF_THE_MODEL,
    REFUSED,
    FieldRefusal,
    argument_refusals,
    declared_fields,
    live_refusals,
    refusal,
)

SIZES = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4}
OTHER_VALUE = "another value"


def refused(transformer: Any = None, ddp: Any = None, optimizer: Any = None) -> list[FieldRefusal]:
    """Return the refusals for a live model with these objects; defaults are Megatron's own."""
    chunk = torch.nn.Module()
    chunk.config = transformer or TransformerConfig(**SIZES)
    chunk.ddp_config = ddp or DistributedDataParallelConfig()
    member = SimpleNamespace(config=optimizer or OptimizerConfig())
    return live_refusals([chunk, chunk], SimpleNamespace(chained_optimizers=[member, member]))


def test_megatrons_own_defaults_are_accepted() -> None:
    assert refused() == []
    assert refused(MLATransformerConfig(**SIZES)) == []


OTHER_FIELDS = {
    # of the class for heterogeneous models
    "heterogeneous_block_specs",
    "heterogeneous_layers_config_path",
    "heterogeneous_layers_config_encoded_json",
    "per_block_parameters",
    "moe_use_legacy_grouped_gemm",  # Removed in 0.17.
    # added in 0.17 to 0.19
    "use_mup",
    "mla_down_proj_fusion",
    "mtp_use_repeated_layer",
    "mtp_hybrid_override_pattern",
    "fp4_param_gather",
    "moe_router_force_biased",
    "moe_single_grouped_bias",
    "moe_single_grouped_weight",
    "moe_mlp_glu_interleave_size",
    "moe_shared_expert_glu_interleave_size",
    "use_grouped_gemm_for_dense_mlp",
    "use_grouped_gemm_for_shared_expert",
    "gtp_weight_remat_size",
    "expert_gtp_weight_remat_size",
    "optimizer_cuda_graph",
    "tensor_parallel_num_weight_shards",
    "expert_tensor_parallel_num_weight_shards",
    "use_layer_wise_distributed_optimizer",
}


def test_the_list_contains_fields_of_the_installed_version_and_known_others() -> None:
    listed = {(section, field) for section, fields in REFUSED.items() for field in fields}
    listed |= {("TransformerConfig", field) for field in (*FUNCTION_FIELDS, *READ_OFF_THE_MODEL)}
    undeclared = {field for section, field in listed - declared_fields().keys()}
    assert undeclared <= OTHER_FIELDS
    assert len(listed) > 100


@pytest.mark.parametrize("section", REFUSED)
def test_all_refusals_are_reported_at_once_with_remedies(section: str) -> None:
    """Covers live objects, and fields of other versions."""
    objects = {
        "TransformerConfig": MLATransformerConfig(**SIZES),
        "DistributedDataParallelConfig": DistributedDataParallelConfig(),
        "OptimizerConfig": OptimizerConfig(),
    }
    expected = {}
    # Fields of settings that are refused only together with it.
    objects["DistributedDataParallelConfig"].overlap_param_gather = True
    objects["OptimizerConfig"].overlap_param_gather = True
    for field, rule in REFUSED[section].items():
        setattr(objects[section], field, OTHER_VALUE)
        expected[field] = (
            None
            if refusal(section, field, OTHER_VALUE) is None
            else f"{OTHER_VALUE}: {rule.reason}"
        )
    refusals = {item.field: item for item in refused(*objects.values())}
    assert {field: item.problem for field, item in refusals.items()} == {
        k: v for k, v in expected.items() if v
    }
    assert all(
        str(REFUSED[section][field].accepted[0]) in item.remedy for field, item in refusals.items()
    )
    for field, rule in REFUSED[section].items():
        for value in rule.accepted:
            assert refusal(section, field, value) is None


def test_a_field_that_later_versions_read_from_the_model_is_refused_before() -> None:
    before, since = (
        refusal("TransformerConfig", "moe_single_grouped_weight", True, version)
        for version in ("0.18.2", "0.19.2")
    )
    assert (before.section, before.field) == ("TransformerConfig", "moe_single_grouped_weight")
    assert before.remedy == "Leave it at False"
    assert since is None


def test_a_list_of_accepted_values_is_accepted() -> None:
    name = "moe_router_load_balancing_type"
    assert refusal("TransformerConfig", name, ["aux_loss", "seq_aux_loss"]) is None
    item = refusal("TransformerConfig", name, ["aux_loss", "quantile_balancing"])
    assert item.remedy == "Use aux_loss or seq_aux_loss or global_aux_loss or none"


def test_a_layer_wise_optimizer_is_refused_with_any_configuration() -> None:
    """Megatron 0.16 overwrites `dist_muon` with a member's name while it builds the optimizer."""
    layer_wise = pytest.importorskip(
        "megatron.core.optimizer.layer_wise_optimizer"
    ).LayerWiseDistributedOptimizer
    member = SimpleNamespace(config=OptimizerConfig(optimizer="adam"))
    optimizer = layer_wise.__new__(layer_wise)  # Its constructor needs optimizers of a model.
    optimizer.config = member.config
    optimizer.chained_optimizers = [member]
    for outer in (optimizer, SimpleNamespace(chained_optimizers=[optimizer])):
        (item,) = live_refusals([], outer)
        assert (item.section, item.field) == ("OptimizerConfig", "optimizer")
        assert item.problem.startswith("dist_muon: ")
    assert live_refusals([], SimpleNamespace(chained_optimizers=[member])) == []


def test_fields_of_the_installed_version_are_known() -> None:
    unknown = [
        (section, name) for section, name in declared_fields() if name not in KNOWN_FIELDS[section]
    ]
    assert unknown == [], "review what they change, then add them to known_fields.py"


def newer_config(**values: Any) -> Any:
    """Return a TransformerConfig with two fields that a later megatron-core might declare."""
    fields = [
        ("weight_folding", Any, None),
        ("weight_lists", list[int], dataclasses.field(default_factory=list)),
    ]
    newer = dataclasses.make_dataclass("TransformerConfig", fields, bases=(TransformerConfig,))
    newer.__module__ = "megatron.core.transformer.transformer_config"
    return newer(**SIZES, bias_dropout_fusion=True, **values)


def test_fields_of_a_newer_version_must_have_their_defaults() -> None:
    assert refused(newer_config()) == []
    folding, lists = refused(newer_config(weight_folding=3, weight_lists=[5]))
    assert (folding.section, folding.field, lists.field) == (
        "TransformerConfig",
        "weight_folding",
        "weight_lists",
    )
    assert folding.problem.startswith("3: ")
    assert "None" in folding.remedy
    assert "[]" in lists.remedy


def test_fields_of_a_subclass_of_another_project_are_its_own() -> None:
    @dataclasses.dataclass
    class Provider(type(newer_config())):  # type: ignore[misc]
        checkpoint: str = ""

    assert refused(Provider(**SIZES, checkpoint="here")) == []
    (refusal_of_base,) = refused(Provider(**SIZES, checkpoint="here", weight_folding=3))
    assert refusal_of_base.field == "weight_folding"


def test_defaults_of_subclasses_are_not_accepted_as_defaults() -> None:
    @dataclasses.dataclass
    class Provider(TransformerConfig):
        checkpoint: str = ""
        quant_recipe: Any = "recipe"

    (item,) = refused(Provider(**SIZES, checkpoint="here"))
    assert item.field == "quant_recipe"


def test_arguments_of_a_script_include_fields_of_ddp_and_optimizer() -> None:
    core = TransformerConfig(**SIZES)
    core.fp4_param = True
    refusals = argument_refusals(Namespace(nccl_ub=True, optimizer="adamw", lr=1.0), core)
    assert [(item.section, item.field) for item in refusals] == [
        ("TransformerConfig", "fp4_param"),
        ("DistributedDataParallelConfig", "nccl_ub"),
        ("OptimizerConfig", "optimizer"),
    ]


def test_fp8_is_accepted_for_parameters_only() -> None:
    core = TransformerConfig(**SIZES)
    core.fp8 = "e4m3"
    ddp = Namespace(fp8_param_gather=True)
    assert [item.field for item in argument_refusals(ddp, core)] == ["fp8"]
    core.fp8_param = True
    assert argument_refusals(ddp, core) == []


@pytest.mark.parametrize("overlap", [False, True])
def test_a_buffer_of_weights_and_gradients_is_refused_if_gathers_stay_pending(
    overlap: bool,
) -> None:
    args = Namespace(reuse_grad_buf_for_mxfp8_param_ag=True, overlap_param_gather=overlap)
    refusals = argument_refusals(args, TransformerConfig(**SIZES))
    assert [item.section for item in refusals] == (
        ["DistributedDataParallelConfig", "OptimizerConfig"] if overlap else []
    )
