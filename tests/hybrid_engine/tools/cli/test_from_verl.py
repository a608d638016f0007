"""`plan --from verl`: the same plan as from this project's keys, refusals, and remarks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from hybrid_engine.files.documents import section_at
from hybrid_engine.tools.cli.from_verl import _Reading
from tests.harness.values import Values
from tests.hybrid_engine.tools.cli.test_plan_command import plan_as_json, run
from tests.zoo.families import write_config
from tests.zoo.published_configs import DEEPSEEK_V3, LLAMA_3_8B, QWEN3_30B_A3B

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"


def write_verl_config(
    directory: Path, strategy: str, config: Values = LLAMA_3_8B, **actor: Any
) -> str:
    """Write the part of a `--cfg job` file that is read, with lengths interpolated as in verl's."""
    prompt = "${oc.select:data.max_prompt_length,512}"
    response = "${oc.select:data.max_response_length,512}"
    rollout = {
        "name": "vllm",
        "tensor_model_parallel_size": 4,
        "gpu_memory_utilization": 0.6,
        "max_model_len": 4096,
    }
    values = {
        "actor_rollout_ref": {
            "model": {
                "path": str(write_config(directory, config)),
                "enable_gradient_checkpointing": True,
            },
            "actor": {"strategy": strategy, "ppo_micro_batch_size_per_gpu": 2, **actor},
            "rollout": {**rollout, "prompt_length": prompt, "response_length": response},
        },
        "algorithm": {"adv_estimator": "grpo"},
        "data": {"max_prompt_length": 1024, "max_response_length": 3072},
        "trainer": {"nnodes": 2, "n_gpus_per_node": 4},
    }
    (directory / "verl.yaml").write_text(yaml.safe_dump(values))
    return str(directory / "verl.yaml")


OUR_KEYS = (
    "actor_config.micro_batch_size=2",
    "actor_config.seq_length=4096",
    "actor_config.optimizer={weight_decay: 0.01, adam_beta2: 0.999}",
    "generate_config.infer_tensor_parallel_size=4",
    "generate_config.gpu_memory_utilization=0.6",
    "generate_config.max_model_len=4096",
    "generate_config.vllm.max_num_batched_tokens=8192",
    "generate_config.offload_train_optimizer=false",
)


def same_plan(verl: Any, ours: Any) -> bool:
    compared_apart = {"planning": 0, "remarks": 0}
    return {**vars(verl), **compared_apart} == {**vars(ours), **compared_apart}


def test_a_megatron_file_gives_the_plan_of_our_keys(tmp_path: Path) -> None:
    sizes = {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "param_offload": True,
    }
    file = write_verl_config(tmp_path, "megatron", megatron=sizes)
    our_keys = (
        f"model={tmp_path}",
        "actor_config.tensor_model_parallel_size=2",
        "actor_config.pipeline_model_parallel_size=2",
        "actor_config.sequence_parallel=true",
        *OUR_KEYS,
    )
    facts = plan_as_json(file, "--from", "verl")
    assert (facts.world_size, facts.train.data, facts.infer.data) == (8, 2, 2)
    assert same_plan(facts, plan_as_json(*our_keys, "--ranks", "8", "--hosts-of", "4"))
    remark, unread = facts.remarks
    assert unread == "Not read:\n  actor_rollout_ref.model: enable_gradient_checkpointing"
    (tmp_path / "ours.yaml").write_text(remark.partition(":\n")[2])
    assert same_plan(
        facts, plan_as_json(str(tmp_path / "ours.yaml"), "--ranks", "8", "--hosts-of", "4")
    ), "valid file"


@pytest.mark.slow
def test_sizes_and_offloads_of_megatrons_actor_are_kept(tmp_path: Path) -> None:
    sizes = {"tensor": 2, "pipeline": 2, "context": 2, "expert": 4}
    kept = {
        f"{name}_model_parallel_size": size for name, size in sizes.items() if name != "context"
    }
    kept |= {
        "context_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": 2,
    }
    kept |= {"sequence_parallel": True, "use_distributed_optimizer": False}
    offloads = {"param_offload": True, "optimizer_offload": True}
    file = write_verl_config(tmp_path, "megatron", QWEN3_30B_A3B, megatron={**kept, **offloads})
    remark, *others = plan_as_json(file, "--from", "verl", "trainer.n_gpus_per_node=8").remarks
    config = yaml.safe_load(remark.partition(":\n")[2])
    assert {key: config["actor_config"][key] for key in kept} == kept
    offloaded = {
        key: config["generate_config"][f"offload_train_{key}"]
        for key in ("param", "grad", "optimizer")
    }
    assert offloaded == dict.fromkeys(offloaded, True)
    assert any("context" in remark for remark in others), "context parallelism is remarked on"


def test_an_fsdp_file_gives_the_plan_of_our_keys(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    file = write_verl_config(tmp_path, "fsdp2", fsdp_config={"fsdp_size": 4, "param_offload": True})
    fsdp = (
        "{sharding_strategy: HYBRID_SHARD, replicas: 2, mixed_precision: bf16, "
        "activation_checkpointing: true}"
    )
    wide = ("actor_config.params_dtype=float32", "generate_config.compress_reshard=true")
    our_keys = (f"model={tmp_path}", f"actor_config.fsdp={fsdp}", *wide, *OUR_KEYS)
    assert same_plan(
        plan_as_json(file, "--from", "verl"),
        plan_as_json(*our_keys, "--ranks", "8", "--hosts-of", "4"),
    )


def test_hybrid_shards_can_stay_gathered(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    sizes = {"fsdp_size": 4, "param_offload": True, "reshard_after_forward": False}
    (remark,) = plan_as_json(
        write_verl_config(tmp_path, "fsdp2", fsdp_config=sizes), "--from", "verl"
    ).remarks
    fsdp = yaml.safe_load(remark.partition(":\n")[2])["actor_config"]["fsdp"]
    assert (fsdp["sharding_strategy"], fsdp["replicas"]) == ("SHARD_GRAD_OP", 2)


def test_our_keys_override_verls(tmp_path: Path) -> None:
    """verl's keys may be arguments too, with or without a file; --ranks overrides the file's."""
    model = write_config(tmp_path, LLAMA_3_8B)
    of_verl = (
        f"actor_rollout_ref.model.path={model}",
        "model_engine=megatron",
        f"+{ROLLOUT}.name=vllm",
    )
    facts = plan_as_json(
        "--from", "verl", *of_verl, f"{ROLLOUT}.tensor_model_parallel_size=8", "--ranks", "16"
    )
    assert (facts.world_size, facts.infer.tensor) == (16, 8)
    facts = plan_as_json(
        "--from", "verl", f"actor_rollout_ref.model.path={model}", "trainer.n_gpus_per_node=4"
    )
    assert facts.world_size == 4  # verl's default is FSDP
    facts = plan_as_json("--from", "verl", *of_verl, "generate_config.infer_tensor_parallel_size=4")
    assert (facts.world_size, facts.infer.tensor) == (8, 4)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([f"{ACTOR}.strategy=veomni"], f"{ACTOR}.strategy: 'veomni'. Use megatron, fsdp2 or fsdp"),
        (
            [f"{ACTOR}.megatron.tensor_parallel_size=2"],
            f"Did you mean {ACTOR}.megatron.tensor_model_parallel_size?",
        ),
        (
            [f"+{ACTOR}.megatron.expert_model_paralel_size=2"],
            f"mean {ACTOR}.megatron.expert_model_parallel_size?",
        ),
        ([f"{ACTOR}.megatorn.param_offload=true"], f"{ACTOR}.megatorn: is not a key of verl"),
        (
            ["actor.megatron.param_offload=true"],
            f"actor: is not a key of verl. Did you mean {ACTOR}.",
        ),
        (
            ["trainer.n_gpu_per_node=8"],
            "trainer.n_gpu_per_node: is not a key of verl. Did you mean trainer.n_gpus_",
        ),
        (
            [f"{ACTOR}.megatron.tensor_model_parallel_size=3"],
            f"{ACTOR}.megatron.tensor_model_parallel_size",
        ),
        (
            [f"{ROLLOUT}.gpu_memory_utilization=lots"],
            f"{ROLLOUT}.gpu_memory_utilization (generate_config.gpu",
        ),
        ([f"{ROLLOUT}.dtype=int4"], f"{ROLLOUT}.dtype (generate_config.compression_dtype)"),
        (["trainer.nnodes=two"], "trainer.nnodes: 'two' is not a number. Use a whole number"),
        (["trainer.nnodes=${oc.env:NODES}"], "`--cfg job --resolve`"),
        (["actor_rollout_ref.hybrid_engine=false"], "Here they share devices"),
        (["actor_confg.seed=1"], "of this project. Did you mean actor_config?"),
    ],
)
def test_an_unplannable_key_is_refused(words: list[str], message: str, tmp_path: Path) -> None:
    refused = run(write_verl_config(tmp_path, "megatron"), "--from", "verl", *words, status=2)
    assert message in refused.stderr


def test_unneeded_keys_are_ignored(tmp_path: Path) -> None:
    """Names of verl 0.9.1 close to names that are read, sections of recipes, and deeper
    sections."""
    megatron = {
        "grad_offload": True,
        "override_mcore_model_config": {},
        "override_ddp_config": {"average": True},
    }
    optim = {
        "lr_warmup_init": 0.0,
        "lr_decay_steps": None,
        "lr_wsd_decay_steps": None,
        "lr_wsd_decay_style": "cosine",
    }
    more = {"ppo_mini_batch_size": 64, "ppo_epochs": 1, "profiler": {"enable": False}}
    file = write_verl_config(tmp_path, "megatron", megatron=megatron, optim=optim, **more)
    words = (
        "async_training.staleness_threshold=0.5",
        "+trainer.val_before_train=false",
        "critic.strategy=megatron",
    )
    rollout = (
        f"{ROLLOUT}.moe_tensor_parallel_size=1",
        f"{ROLLOUT}.engine_kwargs.vllm.kv_cache_dtyp=fp8",
    )
    assert plan_as_json(file, "--from", "verl", *words, *rollout).world_size == 8


def test_the_printed_configuration_has_lengths_batch_and_optimizer(tmp_path: Path) -> None:
    """Dynamic batches count whole sequences. Lines of the configuration are not wrapped."""
    actor = {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 16384}
    optim = {
        "lr": 1e-5,
        "weight_decay": 0.1,
        "betas": [0.9, 0.98],
        "clip_grad": 0.5,
        "lr_warmup_steps": 10,
    }
    long_directory = tmp_path / ("long" * 30)
    long_directory.mkdir()
    file = write_verl_config(long_directory, "megatron", optim=optim, **actor)
    result = run(file, "--from", "verl", f"{ROLLOUT}.max_model_len=null")
    text = result.stdout.partition("configuration as:\n")[2]
    markdown = run(file, "--from", "verl", f"{ROLLOUT}.max_model_len=null", "--markdown").stdout
    shown = text[: text.index("\nactor_rollout_ref")]
    assert f"\n```\nRead from verl's configuration as:\n{shown}\n```\n" in markdown
    config = yaml.safe_load(shown)
    assert config["model"] == str(long_directory)
    trained = config["actor_config"]
    assert (trained["seq_length"], trained["micro_batch_size"]) == (4096, 4)
    assert trained["optimizer"] == {
        "lr": 1e-5,
        "weight_decay": 0.1,
        "clip_grad": 0.5,
        "adam_beta1": 0.9,
        "adam_beta2": 0.98,
    }
    assert config["generate_config"]["max_model_len"] == 4096
    assert "micro batches of 4 sequences of 4096 tokens" in result.stdout.replace("\n", " ")
    assert "actor_rollout_ref.actor.optim: lr_warmup_steps" in result.stdout


def test_settings_without_counterpart_are_remarked_on(tmp_path: Path) -> None:
    words = (
        f"{ROLLOUT}.name=sglang",
        f"{ROLLOUT}.free_cache_engine=false",
        f"{ACTOR}.use_kl_loss=true",
        "actor_rollout_ref.model.lora_rank=8",
        "algorithm.adv_estimator=gae",
        f"{ACTOR}.megatron.qat.enable=true",
        f"{ACTOR}.megatron.dynamic_context_parallel=true",
        f"{ACTOR}.optim.use_precision_aware_optimizer=true",
        f"+{ACTOR}.megatron.override_transformer_config.moe_shared_expert_overlap=true",
        f"+{ROLLOUT}.engine_kwargs.vllm.kv_cache_dtype=fp8",
        f"+{ACTOR}.optim.override_optimizer_config="
        "{optimizer_cpu_offload: true, use_gloo_process_groups: false}",
        f"+{ACTOR}.megatron.override_ddp_config.nccl_ub=true",
    )
    plain = plan_as_json(write_verl_config(tmp_path, "megatron"), "--from", "verl")
    assert len(plain.remarks) == 2
    remarks = plan_as_json(
        write_verl_config(tmp_path, "megatron"), "--from", "verl", *words
    ).remarks[1:]
    parts = (
        "sglang",
        "KV cache",
        "reference",
        "all weights",
        "critic",
        "moe_shared_expert_overlap",
        "kv_cache_d",
    )
    for part in (
        *parts,
        "quantization",
        "sequences that no",
        "moments",
        "use_gloo",
        "optimizer_cpu_",
        "nccl_ub",
    ):
        assert sum(part in remark for remark in remarks) == 1, part
    refused = [
        remark for remark in remarks if "a job with this project's engines is refused" in remark
    ]
    names = ("qat", "use_precision_aware_optimizer", "optimizer_cpu_offload True", "nccl_ub True")
    assert [name for name in names if not any(name in remark for remark in refused)] == []


@pytest.mark.parametrize("enable", [False, True])
def test_layers_for_multi_token_prediction_are_counted_if_verl_trains_them(
    enable: bool, tmp_path: Path
) -> None:
    model = {**DEEPSEEK_V3, "num_hidden_layers": 4, "first_k_dense_replace": 1}
    words = (
        f"+actor_rollout_ref.model.mtp.enable={str(enable).lower()}",
        f"{ROLLOUT}.max_model_len=2048",
    )
    sizes = {"pipeline_model_parallel_size": 2, "expert_model_parallel_size": 4}
    facts = plan_as_json(
        write_verl_config(tmp_path, "megatron", model, megatron=sizes), "--from", "verl", *words
    )
    config = facts.remarks[0].partition(":\n")[2]
    (tmp_path / "ours.yaml").write_text(config)
    ours = plan_as_json(str(tmp_path / "ours.yaml"), "--ranks", "8", "--hosts-of", "4")
    assert same_plan(facts, ours) == enable
    assert any("mtp.enable is not set" in remark for remark in facts.remarks) == (not enable)


@given(
    st.dictionaries(
        st.sampled_from([ACTOR, f"{ACTOR}.megatron", "data", "x.y"]), st.text("abc_", min_size=1)
    )
)
def test_every_key_is_converted_or_named(more: dict[str, str]) -> None:
    tree = {"actor_rollout_ref": {"actor": {"strategy": "megatron"}}}
    for section, name in more.items():
        section_at(tree, section.split("."))[name] = 1
    reading = _Reading(tree, [])
    reading.translate()
    named = "\n".join(reading.remarks())
    for section, name in more.items():
        # `x` as a whole, because none of its keys was read.
        assert re.search(
            rf"^  (sections: .*\bx\b|{section}: (.*, )?{name}(,|$))", named, re.MULTILINE
        ), (section, name)
