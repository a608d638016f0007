"""Every rule of config/loading.py is broken at least once; valid configurations break none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import pytest
from _pytest.mark.structures import ParameterSet

from hybrid_engine.config import (
    ActorConfig,
    FsdpConfig,
    HybridConfig,
    LoraConfig,
    find_violations,
    load_config,
    training_rules,
)
from hybrid_engine.config.inference_rules import INFERENCE
from hybrid_engine.config.job_rules import CRITIC, critic_of
from hybrid_engine.config.loading import CONSTRAINTS, broken_rules
from hybrid_engine.config.rules import Constraint, JobContext, TrainingContext
from hybrid_engine.errors import ConfigError
from hybrid_engine.layouts.parallelism import ShardedParallelism
from hybrid_engine.models import table_for
from hybrid_engine.tools.verify.small_models import reduced_config
from tests.harness.values import Values
from tests.zoo import published_configs
from tests.zoo.families import write_config

DENSE = {
    **published_configs.QWEN3_8B,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
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
    """A configuration that breaks one rule.

    Attributes:
        rule: beginning of the rule's sentence.
        key: of the violation, if it is not the rule's own key.
        valid: changes to the nearest configuration that keeps the rule.
    """

    rule: str
    world_size: int = 4
    actor: Values = field(default_factory=dict)
    generate: Values = field(default_factory=dict)
    model: Values = field(default_factory=lambda: DENSE)
    critic: Values | None = None
    key: str = ""
    valid: Values = field(default_factory=dict)


TP2, TP3 = ({"tensor_model_parallel_size": size} for size in (2, 3))
PP2, PP3, PP4 = ({"pipeline_model_parallel_size": size} for size in (2, 3, 4))
VPP2 = {"virtual_pipeline_model_parallel_size": 2}
FIRST1 = {"num_layers_in_first_pipeline_stage": 1}
EP2, EP3, EP4 = ({"expert_model_parallel_size": size} for size in (2, 3, 4))
ETP1, ETP2, ETP3 = ({"expert_tensor_parallel_size": size} for size in (1, 2, 3))
SP = {"sequence_parallel": True}
INFER_TP3 = {"infer_tensor_parallel_size": 3}
INFER_PP = "infer_pipeline_parallel_size"
INFER_EP2, INFER_EP4, INFER_EP16 = ({"infer_expert_parallel_size": size} for size in (2, 4, 16))
FSDP = {"fsdp": {}}
LINEAR = {"lr_decay_style": "linear", "lr_decay_steps": 100}
WSD = {**LINEAR, "lr_decay_style": "WSD"}
SIX_HEADS = {"num_attention_heads": 6, "num_key_value_heads": 6}
SMALL_GPT2 = {**published_configs.GPT2, "n_head": 8, "n_embd": 64, "n_layer": 4}
TIED_MTP = {**reduced_config(published_configs.DEEPSEEK_V3, 4), "tie_word_embeddings": True}
MTP = reduced_config(published_configs.DEEPSEEK_V3, 4)
DRAFTS = {"vllm": {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}}
ADAPTER = {"lora_delivery": "adapter"}

ACTOR = "actor_config."
GENERATE = "generate_config."
WORLD = "TP x PP x CP and, with experts, ETP x EP x PP divide"
INFER_WORLD = "TP x PP divides the number of ranks; EP is 1"
HEADS = "num_heads % TP == 0"
CUTS = "TP, or ETP for experts, divides"
INFER_CUTS = "TP divides the projections"
EXPERT_SHARES = "num_experts % EP == 0"
STAGES = "The layers can be divided"
COUNTS = "PP <= num_layers"
LAYOUT = "pipeline_model_parallel_layout"
MODEL_BREAKS = (
    Break(
        "build_model() implements",
        model={**DENSE, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    ),
    Break("seq_length is at most", model={**SMALL_GPT2, "n_positions": 64}),
)
SIZE_BREAKS = (
    Break(WORLD, actor={**TP2, **PP4}),
    Break(
        WORLD, actor={**TP2, **SP, **EP4}, model=EXPERTS, key=ACTOR + "expert_model_parallel_size"
    ),
    Break(HEADS, 3, TP3),
    Break(HEADS, 3, generate=INFER_TP3),
    Break(CUTS, actor=TP2, model={**DENSE, "intermediate_size": 97}),
    Break(CUTS, 3, ETP3, model=EXPERTS, key=ACTOR + "expert_tensor_parallel_size"),
    Break(EXPERT_SHARES, actor=EP2),
    Break(EXPERT_SHARES, actor=ETP2, key=ACTOR + "expert_tensor_parallel_size"),
    Break(EXPERT_SHARES, 3, EP3, model=EXPERTS),
    Break(STAGES, actor=VPP2, key=ACTOR + "virtual_pipeline_model_parallel_size"),
    Break(STAGES, 3, PP3),
    Break(
        STAGES, actor={**PP2, **VPP2, **FIRST1}, key=ACTOR + "virtual_pipeline_model_parallel_size"
    ),
    Break(STAGES, actor=FIRST1, key=ACTOR + "num_layers_in_first_pipeline_stage"),
    Break(STAGES, actor={**PP2, LAYOUT: "Et|ttL"}, key=ACTOR + LAYOUT),
    Break(
        STAGES,
        actor={**PP2, **FIRST1, LAYOUT: "Et|t*3L"},
        key=ACTOR + "num_layers_in_first_pipeline_stage",
    ),
    *(
        Break("No-op layers have distinct", actor={"noop_layers": positions})
        for positions in ([2, 9], [2, 2])
    ),
    *(
        Break("A hybrid pattern has", actor={"hybrid_layer_pattern": pattern})
        for pattern in ("M-*-*-*-", "*-*-*-")
    ),
    Break("A hybrid pattern has", actor={"hybrid_layer_pattern": "*-" * 4}, model=EXPERTS),
    Break(
        "A hybrid pattern",
        actor={"noop_layers": [1], "hybrid_layer_pattern": "*-" * 4},
        key=ACTOR + "noop_layers",
    ),
    Break(
        "hybrid_layer_pattern consists",
        actor={"hybrid_layer_pattern": "*-" * 4},
        model={**DENSE, "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2},
    ),
    Break("context_parallel_size is 1", actor={"context_parallel_size": 2}),
    Break("expert_tensor_parallel_size is tensor", actor={**TP2, **SP, **ETP1}, model=EXPERTS),
    Break(
        "With tied embeddings, pipeline",
        3,
        {**PP3, LAYOUT: "Etttt|m|L"},
        model=TIED_MTP,
        valid={"actor": {**PP3, LAYOUT: "Ettt|t|mL"}},
    ),
    Break("sequence_parallel needs", actor=SP),
    Break("Training experts with", actor={**TP2, **ETP1}, model=EXPERTS),
    Break("With sequence_parallel, seq_length", actor={**TP2, **SP, "seq_length": 9}),
    Break(INFER_WORLD, generate={INFER_PP: 3}),
    Break(
        INFER_WORLD,
        generate={"infer_tensor_parallel_size": 4, **INFER_EP2},
        model=EXPERTS,
        key=GENERATE + "infer_expert_parallel_size",
    ),
    Break(
        INFER_WORLD,
        generate={**INFER_EP4, INFER_PP: 2},
        model=EXPERTS,
        key=GENERATE + "infer_expert_parallel_size",
    ),
    Break(INFER_CUTS, 3, generate=INFER_TP3, model={**EXPERTS, **SIX_HEADS}),
    Break(INFER_CUTS, 3, generate=INFER_TP3, model={**DENSE, **SIX_HEADS, "vocab_size": 60}),
    Break("infer_tensor_parallel_size x", generate={"infer_data_parallel_size": 3}),
    Break(COUNTS, 8, generate={INFER_PP: 8}),
    Break(COUNTS, generate=INFER_EP2, key=GENERATE + "infer_expert_parallel_size"),
    Break(
        COUNTS, 16, generate=INFER_EP16, model=EXPERTS, key=GENERATE + "infer_expert_parallel_size"
    ),
)
TRAINER_BREAKS = (
    Break("target_modules are linear layers", actor={"lora": {"target_modules": ["q_proj"]}}),
    Break(
        "target_modules are linear layers",
        actor={**FSDP, "lora": {"target_modules": ["linear_qkv"]}},
        valid={"actor": {**FSDP, "lora": {"target_modules": ["q_proj"]}}},
    ),
    *(
        Break(
            "With FSDP2 and params_dtype bfloat16, target_modules",
            model=model,
            actor={**FSDP, "params_dtype": "bfloat16", "lora": {"target_modules": [target]}},
            valid={"actor": {**FSDP, "params_dtype": dtype, "lora": {"target_modules": [valid]}}},
        )
        for model, target, dtype, valid in (
            (EXPERTS, "all-linear", "float32", "all-linear"),
            (EXPERTS, "down_proj", "bfloat16", "q_proj"),
            (DENSE, "embed_tokens", "bfloat16", "all-linear"),
        )
    ),
    Break("target_modules is not empty", actor={"lora": {"target_modules": []}}),
    Break(
        "overlap_param_gather needs",
        actor={
            "use_distributed_optimizer": False,
            "overlap_param_gather": True,
            "overlap_grad_reduce": True,
        },
    ),
    Break("overlap_param_gather needs", actor={"overlap_param_gather": True}),
    Break(
        "Every pattern matches a parameter",
        actor={"frozen_parameters": ["embedding.*", "decoder.layers.4.*"]},
    ),
    Break("At least one trained parameter", actor={"frozen_parameters": ["*"]}),
    Break(
        "At least one trained parameter", actor={"frozen_parameters": ["*.adapter.*"], "lora": {}}
    ),
    Break(
        "With fsdp, keys that only", actor={**FSDP, **TP2}, key=ACTOR + "tensor_model_parallel_size"
    ),
    *(
        Break("replicas divides the number of ranks", actor={"fsdp": fsdp})
        for fsdp in (
            {"sharding_strategy": "HYBRID_SHARD", "replicas": 3},
            {"replicas": 2},
            {"sharding_strategy": "HYBRID_SHARD"},
        )
    ),
    Break("With FSDP2, params_dtype is float32", actor={"fsdp": {}, "params_dtype": "bfloat16"}),
    Break("mixed_precision is not fp16", actor={"fsdp": {"mixed_precision": "fp16"}}),
    Break("recompute_granularity full needs", actor={"recompute_granularity": "full"}),
    Break(
        "recompute_method and recompute_num_layers go",
        actor={"recompute_modules": ["mlp"]},
        key=ACTOR + "recompute_modules",
    ),
    Break(
        "With recompute_method uniform",
        actor={
            **{**PP2, "num_layers_in_first_pipeline_stage": 2, "recompute_granularity": "full"},
            **{"recompute_method": "uniform", "recompute_num_layers": 2},
        },
        model={**DENSE, "num_hidden_layers": 5},
        valid={"model": DENSE},
    ),
    Break(
        "recompute_modules are parts",
        actor={"recompute_granularity": "selective", "recompute_modules": ["core_attn", "moe"]},
    ),
    *(
        Break(rule, actor={"optimizer": {"lr": 1e-3, "schedule": schedule}})
        for rule, schedule in (
            ("lr_warmup_init is at most", {"lr_warmup_init": 1e-2}),
            ("min_lr is at most", {**LINEAR, "min_lr": 1e-2}),
            ("A learning rate of lr_decay_style constant", {"min_lr": 1e-4}),
            ("Every lr_decay_style but constant", {"lr_decay_style": "cosine"}),
            ("Either lr_warmup", {**LINEAR, "lr_warmup_steps": 1, "lr_warmup_fraction": 0.1}),
            ("lr_warmup_fraction is a fraction", {"lr_warmup_fraction": 0.1}),
            ("lr_warmup_steps is less", {**LINEAR, "lr_warmup_steps": 100}),
            ("lr_decay_style WSD needs", WSD),
            ("lr_decay_style WSD needs", {**LINEAR, "lr_wsd_decay_steps": 50}),
            ("lr_warmup_steps and", {**WSD, "lr_wsd_decay_steps": 50, "lr_warmup_steps": 60}),
            ("end_weight_decay is at least", {"start_weight_decay": 0.1}),
            ("With weight_decay_incr_style constant", {"end_weight_decay": 0.1}),
            ("weight_decay_incr_style linear", {"weight_decay_incr_style": "linear"}),
        )
    ),
    Break(
        "overrides are fields of the installed",
        actor={"overrides": {"transformer": {"fp8": "hybrid"}}},
        key=ACTOR + "overrides.transformer.fp8",
    ),
    Break(
        "With expert_model_parallel_size > 1",
        actor={**EP2, "overrides": {"transformer": {"moe_token_dispatcher_type": "allgather"}}},
        model=EXPERTS,
    ),
)
GENERATE_BREAKS = (
    Break("dtype is the dtype in which", generate={"dtype": "float32"}),
    Break("compression_dtype is narrower", generate={"compress_reshard": True}),
    Break(
        "check_compute: exact needs",
        generate={"check_compute": "exact", "quantization": "fp8"},
        valid={"generate": {"check_compute": "exact", "quantization": "none"}},
    ),
    Break(
        "check_compute: exact needs",
        generate={"check_compute": "exact", "servers": ["http://127.0.0.1:1"]},
    ),
    Break(
        "check_compute: exact needs",
        actor={"params_dtype": "float32"},
        generate={"check_compute": "exact", "compress_reshard": True},
    ),
    Break("router_replay needs", generate={"router_replay": True}),
    Break("router_replay needs", actor=FSDP, generate={"router_replay": True}, model=EXPERTS),
    Break(
        "router_replay needs",
        generate={"router_replay": True, "servers": ["http://127.0.0.1:1"]},
        model=EXPERTS,
    ),
    Break("router_replay needs", generate={"router_replay": True, INFER_PP: 2}, model=EXPERTS),
    Break(
        "router_replay needs",
        generate={"router_replay": True, "vllm": {"enable_prefix_caching": False}},
        model=EXPERTS,
    ),
    Break(
        "router_replay needs",
        actor={"overrides": {"transformer": {"moe_router_fusion": True}}},
        generate={"router_replay": True},
        model=EXPERTS,
    ),
    Break(
        "With Megatron, check_compute is not off",
        generate={"check_compute": "off"},
        model={**DENSE, "architectures": ["MistralForCausalLM"], "model_type": "mistral"},
    ),
    Break(
        "Servers get whole weights",
        actor={"lora": {"rank": 4}},
        generate={"servers": ["http://127.0.0.1:1"], **ADAPTER},
        key="generate_config.servers",
        valid={"generate": ADAPTER},
    ),
    Break(
        "incremental delta shortens messages to servers",
        generate={"incremental": "delta"},
        valid={"generate": {"incremental": "delta", "servers": ["http://127.0.0.1:1"]}},
    ),
    Break("quantization is none, or", generate={"quantization": "awq"}),
    Break(
        "Weights are sent to servers unquantised",
        generate={"quantization": "fp8", "servers": ["http://127.0.0.1:1"]},
        valid={"generate": {"quantization": "fp8"}},
    ),
    Break("lora_delivery adapter needs lora", generate=ADAPTER),
    Break(
        "lora_delivery adapter needs a rank",
        actor={"lora": {"rank": 513}},
        generate=ADAPTER,
        valid={"actor": {"lora": {"rank": 512}}},
    ),
    *(
        Break(
            "lora_delivery adapter needs target_modules",
            actor={"lora": {}, "seq_length": 64},
            generate=ADAPTER,
            model=model,
        )
        for model in (EXPERTS, SMALL_GPT2)
    ),
    *(
        Break(rule, generate={"vllm": {name: value}}, key=f"{GENERATE}vllm.{key or name}")
        for rule, name, value, key in (
            ("vllm has no argument that", "tensor_parallel_size", 2, ""),
            ("vllm has no argument that", "max_model_len", 64, ""),
            ("vllm has no argument that", "cpu_offload_gb", 4, ""),
            ("vllm has no argument that", "kv_offloading_size", 1.0, ""),
            ("vllm has arguments whose values", "trust_remote_code", True, ""),
            ("vllm has arguments whose values", "worker_extension_cls", "somebody.Extension", ""),
            ("vllm has arguments whose values", "of_a_later_version", True, ""),
            ("vllm has arguments whose values", "block_siz", 32, ""),
            (
                "vllm has arguments",
                "compilation_config",
                {"backend": "somebody.make"},
                "compilation_config.backend",
            ),
            (
                "Speculative decoding has no draft",
                "speculative_config",
                {"method": "eagle", "model": "draft"},
                "",
            ),
            ("Speculative decoding has no draft", "speculative_config", {"model": "draft"}, ""),
            ("Speculative decoding has no draft", "spec_model", "draft", ""),
            ("Speculative decoding by mtp", "spec_method", "mtp", ""),
        )
    ),
)
CRITIC_BREAKS = (
    Break("A layout of stages needs", actor=PP2, critic={LAYOUT: "Ett|ttL"}),
    Break(
        "The critic has as many model chunks",
        actor={**PP2, **VPP2},
        critic={"model": ".", LAYOUT: "Ett|ttL"},
    ),
)
BREAKS = (*MODEL_BREAKS, *SIZE_BREAKS, *TRAINER_BREAKS, *GENERATE_BREAKS, *CRITIC_BREAKS)


def broken_by(case: Break, directory: Path) -> list[tuple[Constraint, str]]:
    write_config(directory, case.model)
    config = HybridConfig(**values_of(case, directory))
    context = JobContext(
        config.actor_config, table_for(config.hf_config()), case.world_size, config.generate_config
    )
    rules = (*training_rules.rules_of_trainer(context), *INFERENCE)
    broken = [(rule, violation.key) for rule in rules for violation in rule.find(context)]
    if case.critic is not None:
        critic = critic_of(config, case.world_size)
        broken += [(rule, violation.key) for rule in CRITIC for violation in rule.find(critic)]
    return broken


def values_of(case: Break, directory: Path) -> Values:
    """Return the configuration; a critic with its own model gets the same directory."""
    values = {"model": directory, "random_weights": True}
    values |= {"actor_config": case.actor, "generate_config": case.generate}
    critic_model = {"model": directory} if case.critic and "model" in case.critic else {}
    return values | ({} if case.critic is None else {"critic_config": case.critic | critic_model})


@pytest.fixture(autouse=True)
def _megatron_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fix the version of megatron-core, on which one rule depends."""
    monkeypatch.setattr(training_rules, "_megatron_core_version", lambda: "0.16.1")


def cases() -> Iterator[ParameterSet]:
    """Yield the cases; Megatron's own fields are known only if it is installed."""
    needs_megatron = pytest.mark.skipif(
        find_spec("megatron") is None, reason="without megatron-core"
    )
    for case in BREAKS:
        marks = [needs_megatron, pytest.mark.slow] if "overrides" in case.actor else []
        yield pytest.param(case, id=f"{case.rule}: {case.key}", marks=marks)


@pytest.mark.parametrize("case", list(cases()))
def test_a_broken_rule_is_found(case: Break, tmp_path: Path) -> None:
    broken = [
        (rule.key, key)
        for rule, key in broken_by(case, tmp_path)
        if rule.rule.startswith(case.rule)
    ]
    assert any(key == (case.key or rule_key) for rule_key, key in broken), broken
    with pytest.raises(ConfigError) as caught:
        load_config(values_of(case, tmp_path), case.world_size)
    assert {key for _, key in broken} <= {violation.key for violation in caught.value.findings}
    if case.valid:
        kept = broken_by(replace(case, **case.valid), tmp_path)
        assert not [rule for rule, _ in kept if rule.rule.startswith(case.rule)]


@pytest.mark.parametrize(
    "constraint", CONSTRAINTS, ids=lambda constraint: f"{constraint.key}: {constraint.rule}"
)
def test_every_rule_has_a_case_that_breaks_it(constraint: Constraint) -> None:
    assert any(constraint.rule.startswith(case.rule) for case in BREAKS)


def test_keys_of_rules_exist() -> None:
    for constraint in CONSTRAINTS:
        section: Any = HybridConfig
        for key in constraint.key.split("."):
            assert key in section.model_fields, constraint.key
            annotation = section.model_fields[key].annotation
            section = next(
                kind for kind in (*get_args(annotation), annotation) if kind is not type(None)
            )


@pytest.mark.parametrize(
    ("actor", "generate", "model", "num_mtp_layers", "reason"),
    [
        ({}, {}, DENSE, None, "has no MTP layers"),
        ({}, {}, MTP, 0, "has no MTP layers"),
        (FSDP, {}, MTP, None, "transformers' models"),
        ({}, {"servers": ["http://127.0.0.1:1"]}, MTP, None, "by its --speculative-config"),
        ({}, {INFER_PP: 2}, MTP, None, "with one pipeline stage, not with 2"),
        ({"lora": {"rank": 4}}, ADAPTER, MTP, None, "would not use the adapter"),
        ({}, {"router_replay": True}, MTP, None, "would be returned"),
        ({}, {"quantization": "fp8"}, MTP, None, "not quantised"),
        (
            {},
            {"vllm": {"spec_method": "mtp", "spec_model": "draft"}},
            MTP,
            None,
            "is named as well",
        ),
    ],
)
def test_a_drafter_of_mtp_layers_is_refused_by_name(
    actor: Values,
    generate: Values,
    model: Values,
    num_mtp_layers: int | None,
    reason: str,
    tmp_path: Path,
) -> None:
    values = values_of(
        Break("", actor=actor, generate={**DRAFTS, **generate}, model=model), tmp_path
    )
    write_config(tmp_path, model)
    with pytest.raises(ConfigError) as caught:
        load_config(values, 4, num_mtp_layers=num_mtp_layers)
    (violation,) = [
        finding for finding in caught.value.findings if finding.code == "mtp-unsupported"
    ]
    assert violation.key.startswith("generate_config.vllm.spec")
    assert reason in violation.problem


def test_a_drafter_reads_the_mtp_layers(tmp_path: Path) -> None:
    values = values_of(Break("", model=write_config(tmp_path, MTP) and MTP), tmp_path)
    unserved = [
        load_config({**values, "generate_config": generate}, 4).table().unserved
        for generate in ({}, DRAFTS)
    ]
    assert unserved == [("model.layers.4.",), ()]


def test_loading_weights_only_skips_rules_of_computing(tmp_path: Path) -> None:
    actor = {**TP2, "context_parallel_size": 2}
    values = {
        "model": write_config(tmp_path, EXPERTS),
        "random_weights": True,
        "actor_config": actor,
    }
    config = load_config(values, 4, weights_only=True)
    assert {violation.key for violation in find_violations(config, 4)} == {
        "actor_config.context_parallel_size",
        "actor_config.sequence_parallel",
    }


def test_a_training_model_is_checked_without_an_inference_side() -> None:
    table = table_for(EXPERTS)
    assert broken_rules(TrainingContext(ActorConfig(**TP2, **SP), table, 4)) == []
    context = TrainingContext(
        ActorConfig(**TP2, context_parallel_size=2, noop_layers=(1, 1)), table, 4
    )
    computes: tuple[dict[str, bool], ...] = ({}, {"weights_only": True}, {"own_loop": True})
    keys = [[violation.key for violation in broken_rules(context, **flags)] for flags in computes]
    assert keys == [
        [
            "actor_config.noop_layers",
            "actor_config.context_parallel_size",
            "actor_config.sequence_parallel",
        ],
        ["actor_config.noop_layers"],
        ["actor_config.noop_layers"],
    ]


def test_expert_tensor_parallelism_without_ep_needs_megatron_core_0_19(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    context = TrainingContext(ActorConfig(**TP2, **SP, **ETP1), table_for(EXPERTS), 2)
    keys = {}
    for version in ("0.18.2", "0.19.0", ""):  # "": not installed
        monkeypatch.setattr(
            training_rules, "_megatron_core_version", lambda version=version: version
        )
        keys[version] = [violation.key for violation in broken_rules(context)]
        assert keys[version] == [
            violation.key for violation in broken_rules(context, own_loop=True)
        ]
        assert broken_rules(context, weights_only=True) == []
    assert keys == {"0.18.2": ["actor_config.expert_tensor_parallel_size"], "0.19.0": [], "": []}


def test_fsdp_excludes_keys_of_megatron(tmp_path: Path) -> None:
    write_config(tmp_path, EXPERTS)
    megatron_keys = {
        "tensor_model_parallel_size": 3,  # breaks Megatron's rules, which do not apply
        "use_distributed_optimizer": False,
        "make_vocab_size_divisible_by": 8,
        "noop_layers": [9],
        "recompute_granularity": "selective",
        "overrides": {"ddp": {"bucket_size": 1}},
    }
    with pytest.raises(ConfigError) as caught:
        load_config(
            {"model": tmp_path, "random_weights": True, "actor_config": {**FSDP, **megatron_keys}},
            4,
        )
    assert {violation.key for violation in caught.value.findings} == {
        f"actor_config.{key}" for key in megatron_keys
    }
    for names in ({}, {"target_modules": "all-linear"}):
        config = load_config(
            {
                "model": tmp_path,
                "random_weights": True,
                "actor_config": {
                    **FSDP,
                    "tensor_model_parallel_size": 1,
                    "lora": {"rank": 4, **names},
                },
            },
            4,
        )
        assert config.actor_config.lora == LoraConfig(rank=4, target_modules=("all-linear",))
    in_python = ActorConfig(fsdp=FsdpConfig(), lora=LoraConfig(rank=4))
    assert in_python.lora == config.actor_config.lora
    assert config.train_sizes(4) == ShardedParallelism(4)


@pytest.mark.parametrize(
    ("pattern", "lora", "is_known"),
    [
        (
            "decoder.layers.3.mlp.experts.linear_fc1.weight7",
            False,
            True,
        ),  # Transformer Engine's name
        ("decoder.layers.3.mlp.experts.local_experts.7.linear_fc1.weight", False, True),
        ("decoder.layers.3.mlp.experts.local_experts.8.*", False, False),
        ("*.linear_qkv.weight", False, True),
        ("*.linear_qkv.weight", True, False),
        ("*.linear_qkv.to_wrap.weight", True, True),
        ("*.linear_qkv.adapter.linear_in.weight", True, True),
        ("*.linear_fc1.adapter.*", True, False),
    ],
)
def test_frozen_parameters_match_names_of_megatron(
    pattern: str, lora: bool, is_known: bool
) -> None:
    adapters = {"lora": {"target_modules": ["linear_qkv"]}} if lora else {}
    actor = ActorConfig(frozen_parameters=[pattern], **adapters)
    violations = broken_rules(TrainingContext(actor, table_for(EXPERTS), 1))
    assert [violation.key for violation in violations] == (
        [] if is_known else ["actor_config.frozen_parameters"]
    )
