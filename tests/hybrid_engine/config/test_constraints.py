"""Every rule of config/loading.py is broken at least once, and all are kept by a sound configuration."""

from __future__ import annotations

import json
import runpy
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import pytest
from _pytest.mark.structures import ParameterSet

from hybrid_engine.config import ActorConfig, HybridConfig, find_violations, load_config
from hybrid_engine.config import training_rules as training_rules_module
from hybrid_engine.config.critic_rules import CRITIC, WITH_FSDP, critic_of
from hybrid_engine.config.loading import CONSTRAINTS, GENERATES, broken_rules, training_rules
from hybrid_engine.config.rules import Constraint, JobContext, TrainingContext
from hybrid_engine.errors import ConfigError
from hybrid_engine.layouts.parallelism import ShardedParallelism
from hybrid_engine.models import table_for
from hybrid_engine.verification.small_model import reduced_config
from tests.zoo import published_configs

REPO_ROOT = Path(__file__).resolve().parents[3]

DENSE = {**published_configs.QWEN3_8B, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4}
DENSE |= {"hidden_size": 64, "head_dim": 8, "intermediate_size": 96}
EXPERTS = {
    **published_configs.QWEN3_30B_A3B,
    **DENSE,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
}
EXPERTS |= {"num_experts": 8, "moe_intermediate_size": 32}


@dataclass(frozen=True)
class Break:
    """A configuration that breaks one rule, and part of what is said about it."""

    rule: str
    says: str
    world_size: int = 4
    actor: dict[str, Any] = field(default_factory=dict)
    generate: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=lambda: DENSE)
    critic: dict[str, Any] | None = None


TP2, PP2 = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
PP4, VPP2 = {"pipeline_model_parallel_size": 4}, {"virtual_pipeline_model_parallel_size": 2}
ETP1, FIRST1 = {"expert_tensor_parallel_size": 1}, {"num_layers_in_first_pipeline_stage": 1}
ODD_WIDTH, TOKENS = {"intermediate_size": 97}, {"vocab_size": 60}

TP3, SP = {"tensor_model_parallel_size": 3}, {"sequence_parallel": True}
FSDP = {"fsdp": {}, "params_dtype": "float32"}
LINEAR = {"lr_decay_style": "linear", "lr_decay_steps": 100}
FULL_RECOMPUTATION = {"recompute_granularity": "full", "recompute_method": "uniform"}
HYBRID3 = {"sharding_strategy": "HYBRID_SHARD", "replicas": 3}
INFER_TP3 = {"infer_tensor_parallel_size": 3}
SIX_HEADS = {"num_attention_heads": 6, "num_key_value_heads": 6}
WORLD = "TP x PP x CP and, with experts, ETP x EP x PP divide"
INFER_WORLD = "TP x PP divides the number of ranks; EP is 1"
HEADS = "num_heads % TP == 0"
CUTS = "TP, or ETP for experts, divides"
INFER_CUTS = "TP divides the projections"
EXPERT_SHARES = "num_experts % EP == 0"
STAGES = "The layers can be divided"
COUNTS = "PP <= num_layers"

BREAKS = (
    Break("build_model() implements", "yarn", model={**DENSE, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}),
    Break(WORLD, "TP 2 x PP 4 x CP 1 = 8 does not divide the world size 4", actor={**TP2, **PP4}),
    Break(
        WORLD,
        "ETP 2 x EP 4 x PP 1 = 8 does not divide the world size 4",
        actor={**TP2, **SP, "expert_model_parallel_size": 4},
        model=EXPERTS,
    ),
    Break(HEADS, "3 does not divide the number of attention heads 8", 3, TP3),
    Break(HEADS, "3 neither divides nor is a multiple of the 4 key/value heads", 3, generate=INFER_TP3),
    Break(CUTS, "does not divide the 97 indices of model.layers.0.mlp", actor=TP2, model={**DENSE, **ODD_WIDTH}),
    Break(
        CUTS,
        "3 does not divide the 32 indices of model.layers.0.mlp.experts.0",
        3,
        {"expert_tensor_parallel_size": 3},
        model=EXPERTS,
    ),
    Break(EXPERT_SHARES, "2, but the model has no experts", actor={"expert_model_parallel_size": 2}),
    Break(EXPERT_SHARES, "2, but the model has no experts", actor={"expert_tensor_parallel_size": 2}),
    Break(
        EXPERT_SHARES,
        "3 does not divide the number of experts 8",
        3,
        {"expert_model_parallel_size": 3},
        model=EXPERTS,
    ),
    Break(STAGES, "virtual stages without", actor={"virtual_pipeline_model_parallel_size": 2}),
    Break(STAGES, "4 layers do not divide into 3 stages", 3, {"pipeline_model_parallel_size": 3}),
    Break(STAGES, "2 chunks do not divide a stage of 1, 3 layers", actor={**PP2, **VPP2, **FIRST1}),
    Break(STAGES, "set for a pipeline of one stage", actor=FIRST1),
    Break(STAGES, "3 layers (t), the model has 4", actor={**PP2, "pipeline_model_parallel_layout": "Et|ttL"}),
    Break(STAGES, "set beside a layout", actor={**PP2, **FIRST1, "pipeline_model_parallel_layout": "Et|t*3L"}),
    Break("No-op layers have distinct positions", "[9] of 6 positions", actor={"noop_layers": [2, 9]}),
    Break("No-op layers have distinct positions", "[2, 2] names a position twice", actor={"noop_layers": [2, 2]}),
    *(
        Break("A hybrid pattern has", text, actor={**more, "hybrid_layer_pattern": pattern}, model=model or DENSE)
        for pattern, text, more, model in (
            ("M-*-*-*-", "Mamba layers (M) in 'M-*-*-*-'", {}, None),
            ("*-*-*-", "3 pairs of attention and MLP, the model has 4 layers", {}, None),
            ("*-" * 4, "set beside a hybrid pattern", {"noop_layers": [1]}, None),
            ("*-" * 4, "layer 0 is E in the model", {}, EXPERTS),
        )
    ),
    Break(
        "A HybridModel is built of",
        "parts that Megatron's do not have",
        actor={"hybrid_layer_pattern": "*-" * 4},
        model={**DENSE, "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2},
    ),
    Break(
        "target_modules are linear layers",
        "q_proj: Megatron has no linear layers",
        actor={"lora": {"target_modules": ["q_proj"]}},
    ),
    Break("target_modules are linear layers", "target_modules is empty", actor={"lora": {"target_modules": []}}),
    Break(
        "target_modules are linear layers",
        "linear_fc1, linear_fc2 are parts of experts",
        actor={"lora": {}},
        model=EXPERTS,
    ),
    Break(
        "Adapters of weights that are stored transposed",
        "has transposed weights",
        actor={"lora": {}, "seq_length": 64},
        generate={"lora_delivery": "adapter"},
        model={**published_configs.GPT2, "n_head": 8, "n_embd": 64, "n_layer": 4},
    ),
    Break("CP is 1", "TrainEngine does not split sequences", actor={"context_parallel_size": 2}),
    Break("Sequence parallelism needs", "needs tensor parallelism", actor=SP),
    Break("Training experts with TP > 1", "false with TP 2", actor={**TP2, **ETP1}, model=EXPERTS),
    Break(
        "With sequence parallelism, seq_length",
        "2 does not divide the sequence length 9",
        actor={**TP2, **SP, "seq_length": 9},
    ),
    Break(
        "seq_length is at most",
        "1024, but the model has 64 positions",
        model={**published_configs.GPT2, "n_positions": 64, "n_head": 8, "n_embd": 64, "n_layer": 4},
    ),
    Break(
        "overlap_param_gather needs use_distributed_optimizer",
        "only the distributed optimizer gathers",
        actor={"use_distributed_optimizer": False, "overlap_param_gather": True, "overlap_grad_reduce": True},
    ),
    Break("overlap_param_gather needs overlap_grad", "only if it overlaps", actor={"overlap_param_gather": True}),
    Break(
        INFER_WORLD,
        "TP 1 x PP 3 = 3 does not divide the world size 4",
        generate={"infer_pipeline_parallel_size": 3},
    ),
    Break(
        INFER_WORLD,
        "2 is not a multiple of TP 4",
        generate={"infer_tensor_parallel_size": 4, "infer_expert_parallel_size": 2},
        model=EXPERTS,
    ),
    Break(
        INFER_WORLD,
        "EP 4 x PP 2 = 8 does not divide the world size 4",
        generate={"infer_expert_parallel_size": 4, "infer_pipeline_parallel_size": 2},
        model=EXPERTS,
    ),
    Break(
        INFER_CUTS,
        "3 does not divide the 32 indices of model.layers.0.mlp.experts.0",
        3,
        generate=INFER_TP3,
        model={**EXPERTS, **SIX_HEADS},
    ),
    Break(INFER_CUTS, "3 does not divide the 64 rows", 3, generate=INFER_TP3, model={**DENSE, **SIX_HEADS, **TOKENS}),
    Break(
        "If given, DP satisfies",
        "TP 1 x PP 1 x DP 3 is not the world size 4",
        generate={"infer_data_parallel_size": 3},
    ),
    Break(COUNTS, "8 stages for 4 layers", 8, generate={"infer_pipeline_parallel_size": 8}),
    Break(COUNTS, "2, but the model has no experts", generate={"infer_expert_parallel_size": 2}),
    Break(COUNTS, "16, but the model has 8 experts", 16, generate={"infer_expert_parallel_size": 16}, model=EXPERTS),
    Break(
        "dtype is the one in which weights are sent",
        "float32, but weights are sent in bfloat16",
        generate={"dtype": "float32"},
    ),
    Break(
        "compression_dtype is narrower",
        "bfloat16 is not narrower than the training dtype bfloat16",
        generate={"compress_reshard": True},
    ),
    Break(
        "ETP is TP where EP is 1",
        "1 with TP 2 and EP 1",
        actor={**TP2, **SP, **ETP1},
        model=EXPERTS,
    ),
    Break(
        "With adapter, the rank",
        "rank 1000 is above vLLM's 512",
        actor={"lora": {"rank": 1000}},
        generate={"lora_delivery": "adapter"},
    ),
    Break(
        "Every pattern matches a parameter",
        "no parameter matches decoder.layer.*, decoder.layers.4.*",
        actor={"frozen_parameters": ["embedding.*", "decoder.layer.*", "*.linear_proj.weight", "decoder.layers.4.*"]},
    ),
    Break("At least one trained parameter", "would freeze every trained", actor={"frozen_parameters": ["*"]}),
    Break(
        "The method quantises while loading",
        "method 'awq' needs a checkpoint that is quantised",
        generate={"quantization": "awq"},
    ),
    Break(
        "With tied embeddings, MTP layers",
        "Etttt|m|L: the embedding is tied",
        3,
        {"pipeline_model_parallel_size": 3, "pipeline_model_parallel_layout": "Etttt|m|L"},
        model={**reduced_config(published_configs.DEEPSEEK_V3, 4), "tie_word_embeddings": True},
    ),
    Break(
        "Beside fsdp, keys that only Megatron has",
        "actor_config.tensor_model_parallel_size: 2, but this key is Megatron's",
        actor={**FSDP, **TP2},
    ),
    Break("replicas divides the number of ranks", "3 do not divide 4 ranks", actor={**FSDP, "fsdp": {**HYBRID3}}),
    Break(
        "replicas divides the number of ranks",
        "2 with sharding_strategy FULL_SHARD",
        actor={**FSDP, "fsdp": {"replicas": 2}},
    ),
    Break("With fsdp, params_dtype is float32", "bfloat16 would round", actor={"fsdp": {}}),
    Break("mixed_precision is not fp16", "fp16: gradients", actor={**FSDP, "fsdp": {"mixed_precision": "fp16"}}),
    Break("recompute_granularity full needs", "full needs it", actor={"recompute_granularity": "full"}),
    Break(
        "recompute_granularity full needs",
        "it has no meaning where recompute_granularity is left out",
        actor={"recompute_modules": ["mlp"]},
    ),
    Break(
        "With recompute_method uniform",
        "2 does not divide a chunk of 1, 3 layers",
        actor={**PP2, **FIRST1, **FULL_RECOMPUTATION, "recompute_num_layers": 2},
    ),
    Break(
        "recompute_modules are parts",
        "moe, but the model has no experts",
        actor={"recompute_granularity": "selective", "recompute_modules": ["core_attn", "moe"]},
    ),
    *(
        Break("A schedule's warm-up and decays", text, actor={"optimizer": {"lr": 1e-3, "schedule": schedule}})
        for text, schedule in (
            ("min_lr: 0.01 is above the learning rate 0.001", {**LINEAR, "min_lr": 1e-2}),
            ("a constant learning rate does not come down", {"min_lr": 1e-4}),
            ("lr_decay_steps: lr_decay_style cosine needs it", {"lr_decay_style": "cosine"}),
            ("lr_warmup_steps says it, too", {**LINEAR, "lr_warmup_steps": 1, "lr_warmup_fraction": 0.1}),
            ("it is a share of lr_decay_steps", {"lr_warmup_fraction": 0.1}),
            ("100 updates of warm-up leave none of 100", {**LINEAR, "lr_warmup_steps": 100}),
            ("lr_wsd_decay_steps: WSD needs it", {**LINEAR, "lr_decay_style": "WSD"}),
            ("50, but lr_decay_style is linear", {**LINEAR, "lr_wsd_decay_steps": 50}),
            (
                "50 updates of decay and 60 of warm-up are more than 100",
                {**LINEAR, "lr_decay_style": "WSD", "lr_wsd_decay_steps": 50, "lr_warmup_steps": 60},
            ),
            ("0.0 is below the 0.1 of the first update", {"start_weight_decay": 0.1}),
            ("constant, but weight decay is to grow from 0.0 to 0.1", {"end_weight_decay": 0.1}),
            ("weight_decay_incr_style linear needs it", {"weight_decay_incr_style": "linear"}),
        )
    ),
    Break(
        "overrides are fields of the installed",
        "has no such field. Did you mean attention_dropout",
        actor={"overrides": {"transformer": {"atention_dropout": 0.1}}},
    ),
    Break(
        "overrides leave alone what",
        "Use actor_config.optimizer.lr",
        actor={"overrides": {"optimizer": {"lr": 0.1}}},
    ),
    Break(
        "overrides are fields that go with a switch",
        "which a switch does not offload. Leave it at None",
        actor={"overrides": {"transformer": {"fp8": "hybrid"}}},
    ),
    Break(
        "With EP > 1, moe_token_dispatcher_type",
        "allgather with EP 2: it takes as many tokens from every rank",
        actor={
            "expert_model_parallel_size": 2,
            "overrides": {"transformer": {"moe_token_dispatcher_type": "allgather"}},
        },
        model=EXPERTS,
    ),
    *(
        Break("vllm has no argument that", text, generate={"vllm": arguments})
        for text, arguments in (
            ("Use generate_config.infer_tensor_parallel_size", {"tensor_parallel_size": 2}),
            ("Use generate_config.max_model_len", {"max_model_len": 64}),
            ("are not where a switch fills them", {"cpu_offload_gb": 4}),
            ("outlives the weights", {"kv_offloading_size": 1.0}),
        )
    ),
    *(
        Break("vllm has arguments whose values", text, generate={"vllm": arguments})
        for text, arguments in (
            ("vllm.trust_remote_code: a configuration file cannot set it", {"trust_remote_code": True}),
            ("vllm.worker_extension_cls: a configuration file", {"worker_extension_cls": "somebody.Extension"}),
            ("vllm.logits_processors: a configuration file", {"logits_processors": ["somebody:Processor"]}),
            ("vllm.compilation_config.backend: a configuration", {"compilation_config": {"backend": "somebody.make"}}),
            ("vllm.of_a_later_version: a configuration file", {"of_a_later_version": True}),
            ("Did you mean block_size?", {"block_siz": 32}),
        )
    ),
    *(
        Break("Speculative decoding drafts without", "a switch brings no weights", generate={"vllm": arguments})
        for arguments in (
            {"speculative_config": {"method": "eagle", "model": "draft", "num_speculative_tokens": 2}},
            {"speculative_config": {"model": "draft", "num_speculative_tokens": 2}},
            {"spec_model": "draft", "spec_tokens": 2},
        )
    ),
    Break("prefetch_mb needs prefetch", "64, but nothing is prefetched", generate={"prefetch_mb": 64}),
    Break("Megatron trains a critic", "FSDP2 trains the actor, and has no value models", actor=FSDP, critic={}),
    Break(
        "A layout of stages is that of a model of its own",
        "without critic_config.model the stages are the actor's",
        actor=PP2,
        critic={"pipeline_model_parallel_layout": "Ett|ttL"},
    ),
    Break(
        "The critic has as many model chunks",
        "1 chunks on each stage, the actor has 2",
        actor={**PP2, **VPP2},
        critic={"model": ".", "pipeline_model_parallel_layout": "Ett|ttL"},
    ),
    Break("adapter needs actor_config.lora", "no adapters are trained", generate={"lora_delivery": "adapter"}),
)


def broken_by(case: Break, directory: Path) -> list[tuple[Constraint, str]]:
    (directory / "config.json").write_text(json.dumps(case.model))
    config = HybridConfig(**values_of(case, directory))
    context = JobContext(config.actor_config, table_for(config.hf_config()), case.world_size, config.generate_config)
    found = [(rule, str(one)) for rule in (*training_rules(context), *GENERATES) for one in rule.find(context)]
    if case.critic is not None:
        critic = critic_of(config, case.world_size)
        found += [(rule, str(one)) for rule in (*WITH_FSDP, *CRITIC) for one in rule.find(critic)]
    return found


def values_of(case: Break, directory: Path) -> dict[str, Any]:
    """The configuration; the model of a critic, where it has one of its own, is the same."""
    values = {"model": directory, "random_weights": True}
    values |= {"actor_config": case.actor, "generate_config": case.generate}
    own = {"model": directory} if case.critic and "model" in case.critic else {}
    return values | ({} if case.critic is None else {"critic_config": case.critic | own})


@pytest.fixture(autouse=True)
def _megatron_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rule goes by its version; whichever is installed, if any, is the same to these tests."""
    monkeypatch.setattr(training_rules_module, "_megatron_core_version", lambda: "0.16.1")


def cases() -> Iterator[ParameterSet]:
    """Megatron's own fields are known where it is installed."""
    needs_megatron = pytest.mark.skipif(find_spec("megatron") is None, reason="without megatron-core")
    for case in BREAKS:
        marks = [needs_megatron] if "overrides" in case.actor else []
        yield pytest.param(case, id=f"{case.rule}: {case.says}", marks=marks)


@pytest.mark.parametrize("case", list(cases()))
def test_what_breaks_a_rule_is_found(case: Break, tmp_path: Path) -> None:
    found = [text for rule, text in broken_by(case, tmp_path) if rule.rule.startswith(case.rule)]
    assert any(case.says in text for text in found), found
    with pytest.raises(ConfigError) as caught:
        load_config(values_of(case, tmp_path), case.world_size)
    assert case.says in str(caught.value)


@pytest.mark.parametrize("constraint", CONSTRAINTS, ids=lambda constraint: f"{constraint.key}: {constraint.rule}")
def test_every_rule_is_broken_here(constraint: Constraint) -> None:
    assert any(constraint.rule.startswith(case.rule) for case in BREAKS)


def test_rules_have_sections_that_exist() -> None:
    for constraint in CONSTRAINTS:
        section: Any = HybridConfig
        for key in constraint.key.split("."):
            assert key in section.model_fields, constraint.key
            annotation = section.model_fields[key].annotation
            section = next(one for one in (*get_args(annotation), annotation) if one is not type(None))


def test_weights_alone_need_not_compute(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(EXPERTS))
    values = {"model": tmp_path, "random_weights": True, "actor_config": {**TP2, "context_parallel_size": 2}}
    config = load_config(values, 4, weights_only=True)
    assert {violation.key for violation in find_violations(config, 4)} == {
        "actor_config.context_parallel_size",
        "actor_config.sequence_parallel",
    }


def test_a_training_model_alone_keeps_the_rules_of_training() -> None:
    """Nothing is asked of an inference side that nobody has."""
    table = table_for(EXPERTS)
    assert broken_rules(TrainingContext(ActorConfig(**TP2, **SP), table, 4)) == []
    context = TrainingContext(ActorConfig(**TP2, context_parallel_size=2, noop_layers=(1, 1)), table, 4)
    computes: tuple[dict[str, bool], ...] = ({}, {"weights_only": True}, {"own_loop": True})
    keys = [[one.key for one in broken_rules(context, **who)] for who in computes]
    assert keys == [
        ["actor_config.noop_layers", "actor_config.context_parallel_size", "actor_config.sequence_parallel"],
        ["actor_config.noop_layers"],
        ["actor_config.noop_layers"],
    ]


def test_experts_are_cut_by_themselves_where_megatron_can(monkeypatch: pytest.MonkeyPatch) -> None:
    context = TrainingContext(ActorConfig(**TP2, **SP, **ETP1), table_for(EXPERTS), 2)
    found = {}
    for version in ("0.18.2", "0.19.0", ""):
        monkeypatch.setattr(training_rules_module, "_megatron_core_version", lambda version=version: version)
        found[version] = [one.key for one in broken_rules(context)]
        assert found[version] == [one.key for one in broken_rules(context, own_loop=True)]
        assert broken_rules(context, weights_only=True) == []
    assert found == {"0.18.2": ["actor_config.expert_tensor_parallel_size"], "0.19.0": [], "": []}


def test_fsdp_and_megatrons_keys_exclude_each_other(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(EXPERTS))
    set_too = {
        "tensor_model_parallel_size": 3,  # of Megatron's own rules none applies
        "use_distributed_optimizer": False,
        "make_vocab_size_divisible_by": 8,
        "noop_layers": [9],
        "frozen_parameters": ["nothing.*"],
        "lora": {},
        "recompute_granularity": "selective",
        "overrides": {"ddp": {"bucket_size": 1}},
    }
    with pytest.raises(ConfigError) as caught:
        load_config({"model": tmp_path, "random_weights": True, "actor_config": {**FSDP, **set_too}}, 4)
    assert {violation.key for violation in caught.value.findings} == {f"actor_config.{key}" for key in set_too}
    config = load_config(
        {"model": tmp_path, "random_weights": True, "actor_config": {**FSDP, "tensor_model_parallel_size": 1}}, 4
    )
    assert config.train_sizes(4) == ShardedParallelism(4)


@pytest.mark.parametrize(
    ("pattern", "lora", "is_known"),
    [
        ("decoder.layers.3.mlp.experts.linear_fc1.weight7", False, True),  # Transformer Engine's name
        ("decoder.layers.3.mlp.experts.local_experts.7.linear_fc1.weight", False, True),
        ("decoder.layers.3.mlp.experts.local_experts.8.*", False, False),
        ("*.linear_qkv.weight", False, True),
        ("*.linear_qkv.weight", True, False),
        ("*.linear_qkv.to_wrap.weight", True, True),
        ("*.linear_qkv.adapter.linear_in.weight", True, True),
        ("*.linear_fc1.adapter.*", True, False),
    ],
)
def test_frozen_parameters_go_by_megatrons_names(pattern: str, lora: bool, is_known: bool) -> None:
    adapters = {"lora": {"target_modules": ["linear_qkv"]}} if lora else {}
    actor = ActorConfig(frozen_parameters=[pattern], **adapters)
    found = broken_rules(TrainingContext(actor, table_for(EXPERTS), 1))
    assert [one.key for one in found] == ([] if is_known else ["actor_config.frozen_parameters"])


def test_nothing_is_found_in_a_sound_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(EXPERTS))
    actor = {**TP2, **PP2, "sequence_parallel": True, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
    generate = {"infer_tensor_parallel_size": 2, "infer_expert_parallel_size": 4}
    config = load_config(
        {"model": tmp_path, "random_weights": True, "actor_config": actor, "generate_config": generate}, 4
    )
    assert config.generate_config.infer_rank_order == "auto"


def test_the_page_is_that_of_the_table() -> None:
    pytest.importorskip("torch")  # megatron_patches, which that file reads, too
    made = runpy.run_path(str(REPO_ROOT / "docs" / "make_configuration.py"))["constraints_page"]()
    assert (REPO_ROOT / "docs" / "constraints.md").read_text() == made
