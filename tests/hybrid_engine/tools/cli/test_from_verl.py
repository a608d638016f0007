"""`plan --from verl`: the plan of the same job in keys of this project; what is refused, and what is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.hybrid_engine.tools.cli.test_plan_command import facts, run
from tests.zoo.families import write_config
from tests.zoo.published_configs import LLAMA_3_8B, QWEN3_30B_A3B

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def written(directory: Path, strategy: str, config: dict[str, Any] = LLAMA_3_8B, **actor: Any) -> str:
    """A file as `--cfg job` writes it, as far as it is read; its lengths are interpolated as in verl's own."""
    prompt, response = (f"${{oc.select:data.max_{each}_length,512}}" for each in ("prompt", "response"))
    rollout = {"name": "vllm", "tensor_model_parallel_size": 4, "gpu_memory_utilization": 0.6, "max_model_len": 4096}
    values = {
        "actor_rollout_ref": {
            "model": {"path": str(write_config(directory, config)), "enable_gradient_checkpointing": True},
            "actor": {"strategy": strategy, "ppo_micro_batch_size_per_gpu": 2, **actor},
            "rollout": {**rollout, "prompt_length": prompt, "response_length": response},
        },
        "algorithm": {"adv_estimator": "grpo"},
        "data": {"max_prompt_length": 1024, "max_response_length": 3072},
        "trainer": {"nnodes": 2, "n_gpus_per_node": 4},
    }
    (directory / "verl.yaml").write_text(yaml.safe_dump(values))
    return str(directory / "verl.yaml")


BY_HAND = (
    "actor_config.micro_batch_size=2",
    "actor_config.seq_length=4096",
    "actor_config.optimizer={weight_decay: 0.01, adam_beta2: 0.999}",
    "generate_config.infer_tensor_parallel_size=4",
    "generate_config.gpu_memory_utilization=0.6",
    "generate_config.max_model_len=4096",
    "generate_config.vllm.max_num_batched_tokens=8192",
    "generate_config.offload_train_optimizer=false",
)


def same_plan(verl: dict[str, Any], ours: dict[str, Any]) -> bool:
    return {**verl, "planning": 0, "remarks": 0} == {**ours, "planning": 0, "remarks": 0}


def test_megatron_has_the_plan_of_the_configuration_written_by_hand(tmp_path: Path) -> None:
    sizes = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "param_offload": True}
    file = written(tmp_path, "megatron", megatron=sizes)
    by_hand = (
        f"model={tmp_path}",
        "actor_config.tensor_model_parallel_size=2",
        "actor_config.pipeline_model_parallel_size=2",
        "actor_config.sequence_parallel=true",
        *BY_HAND,
    )
    found = facts(file, "--from", "verl")
    assert (found["world_size"], found["train"]["data"], found["infer"]["data"]) == (8, 2, 2)
    assert same_plan(found, facts(*by_hand, "--ranks", "8", "--hosts-of", "4"))
    (told,) = found["remarks"]
    (tmp_path / "ours.yaml").write_text(told.partition(":\n")[2])
    assert same_plan(found, facts(str(tmp_path / "ours.yaml"), "--ranks", "8", "--hosts-of", "4")), "can be pasted"


@pytest.mark.slow
def test_every_size_and_offload_of_megatrons_actor_is_kept(tmp_path: Path) -> None:
    sizes = {"tensor": 2, "pipeline": 2, "context": 2, "expert": 4}
    kept: dict[str, Any] = {f"{name}_model_parallel_size": size for name, size in sizes.items() if name != "context"}
    kept |= {"context_parallel_size": 2, "expert_tensor_parallel_size": 1, "virtual_pipeline_model_parallel_size": 2}
    kept |= {"sequence_parallel": True, "use_distributed_optimizer": False}
    offloads = {"param_offload": True, "optimizer_offload": True}
    file = written(tmp_path, "megatron", QWEN3_30B_A3B, megatron={**kept, **offloads})
    told, *others = facts(file, "--from", "verl", "trainer.n_gpus_per_node=8")["remarks"]
    found = yaml.safe_load(told.partition(":\n")[2])
    assert {key: found["actor_config"][key] for key in kept} == kept
    moved = {key: found["generate_config"][f"offload_train_{key}"] for key in ("param", "grad", "optimizer")}
    assert moved == dict.fromkeys(moved, True)
    assert any("context" in remark for remark in others), "which Megatron's own loop may use"


def test_fsdp_has_the_plan_of_the_configuration_written_by_hand(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    file = written(tmp_path, "fsdp2", fsdp_config={"fsdp_size": 4, "param_offload": True})
    fsdp = "{sharding_strategy: HYBRID_SHARD, replicas: 2, mixed_precision: bf16, activation_checkpointing: true}"
    wide = ("actor_config.params_dtype=float32", "generate_config.compress_reshard=true")
    by_hand = (f"model={tmp_path}", f"actor_config.fsdp={fsdp}", *wide, *BY_HAND)
    assert same_plan(facts(file, "--from", "verl"), facts(*by_hand, "--ranks", "8", "--hosts-of", "4"))


def test_shards_in_groups_stay_gathered_after_the_forward_pass(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    sizes = {"fsdp_size": 4, "param_offload": True, "reshard_after_forward": False}
    (told,) = facts(written(tmp_path, "fsdp2", fsdp_config=sizes), "--from", "verl")["remarks"]
    fsdp = yaml.safe_load(told.partition(":\n")[2])["actor_config"]["fsdp"]
    assert (fsdp["sharding_strategy"], fsdp["replicas"]) == ("SHARD_GRAD_OP", 2)


def test_keys_of_either_are_set_and_ours_win(tmp_path: Path) -> None:
    """verl's as on its command line, without a file too; --ranks in place of the file's."""
    model = write_config(tmp_path, LLAMA_3_8B)
    of_verl = (f"actor_rollout_ref.model.path={model}", "model_engine=megatron", f"+{ROLLOUT}.name=vllm")
    found = facts("--from", "verl", *of_verl, f"{ROLLOUT}.tensor_model_parallel_size=8", "--ranks", "16")
    assert (found["world_size"], found["infer"]["tensor"]) == (16, 8)
    found = facts("--from", "verl", f"actor_rollout_ref.model.path={model}", "trainer.n_gpus_per_node=4")
    assert found["world_size"] == 4  # by verl's default, FSDP
    found = facts("--from", "verl", *of_verl, "generate_config.infer_tensor_parallel_size=4")
    assert (found["world_size"], found["infer"]["tensor"]) == (8, 4)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([f"{ACTOR}.strategy=veomni"], f"{ACTOR}.strategy: 'veomni'. Use megatron, fsdp2 or fsdp"),
        ([f"{ACTOR}.megatron.tensor_parallel_size=2"], f"Did you mean {ACTOR}.megatron.tensor_model_parallel_size?"),
        ([f"+{ACTOR}.megatron.expert_model_paralel_size=2"], f"mean {ACTOR}.megatron.expert_model_parallel_size?"),
        ([f"{ACTOR}.megatorn.param_offload=true"], f"{ACTOR}.megatorn.param_offload: is not a key of verl"),
        (["actor.megatron.param_offload=true"], f"is not a key of verl. Did you mean {ACTOR}.megatron.param_offload?"),
        (["trainer.n_gpu_per_node=8"], "trainer.n_gpu_per_node: is not a key of verl. Did you mean trainer.n_gpus_"),
        ([f"{ACTOR}.megatron.tensor_model_parallel_size=3"], f"{ACTOR}.megatron.tensor_model_parallel_size"),
        ([f"{ROLLOUT}.gpu_memory_utilization=lots"], f"{ROLLOUT}.gpu_memory_utilization (generate_config.gpu"),
        ([f"{ROLLOUT}.dtype=int4"], f"{ROLLOUT}.dtype (generate_config.compression_dtype)"),
        (["trainer.nnodes=two"], "trainer.nnodes: 'two' is not a number. Use a whole number"),
        (["trainer.nnodes=${oc.env:NODES}"], "`--cfg job --resolve`"),
        (["actor_rollout_ref.hybrid_engine=false"], "Here they share devices"),
        (["actor_confg.seed=1"], "of this project. Did you mean actor_config?"),
        (["--search"], "--from: cannot be combined with --search"),
    ],
)
def test_what_cannot_be_planned_is_refused_by_its_key(words: list[str], message: str, tmp_path: Path) -> None:
    refused = run(written(tmp_path, "megatron"), "--from", "verl", *words)
    assert refused.exit_code == 2, refused.output
    assert message in refused.stderr


def test_misspelt_keys_of_the_file_are_refused_all_at_once(tmp_path: Path) -> None:
    file = written(tmp_path, "megatron", megatron={"tensor_model_parralel_size": 2, "optimzer_offload": True})
    refused = run(file, "--from", "verl")
    assert refused.exit_code == 2, refused.output
    for meant in ("tensor_model_parallel_size", "optimizer_offload"):
        assert f"Did you mean {ACTOR}.megatron.{meant}?" in refused.stderr


def test_keys_that_a_plan_does_not_need_are_left_alone(tmp_path: Path) -> None:
    """Names of verl 0.9.1 that are close to some that are read, sections of recipes, and keys of deeper sections."""
    megatron = {"grad_offload": True, "override_mcore_model_config": {}, "override_ddp_config": {"average": True}}
    optim = {"lr_warmup_init": 0.0, "lr_decay_steps": None, "lr_wsd_decay_steps": None, "lr_wsd_decay_style": "cosine"}
    more = {"ppo_mini_batch_size": 64, "ppo_epochs": 1, "profiler": {"enable": False}}
    file = written(tmp_path, "megatron", megatron=megatron, optim=optim, **more)
    words = ("async_training.staleness_threshold=0.5", "+trainer.val_before_train=false", "critic.strategy=megatron")
    rollout = (f"{ROLLOUT}.moe_tensor_parallel_size=1", f"{ROLLOUT}.engine_kwargs.vllm.kv_cache_dtyp=fp8")
    assert facts(file, "--from", "verl", *words, *rollout)["world_size"] == 8


def test_the_configuration_to_paste_has_lengths_batch_and_optimizer(tmp_path: Path) -> None:
    """With dynamic batches, as many whole sequences as their tokens hold; each line is one of the terminal's too."""
    actor = {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 16384}
    optim = {"lr": 1e-5, "weight_decay": 0.1, "betas": [0.9, 0.98], "clip_grad": 0.5, "lr_warmup_steps": 10}
    deep = tmp_path / ("long" * 30)
    deep.mkdir()
    file = written(deep, "megatron", optim=optim, **actor)
    result = run(file, "--from", "verl", f"{ROLLOUT}.max_model_len=null")
    text = result.stdout.partition("configuration as:\n")[2]
    found = yaml.safe_load(text[: text.index("\nactor_rollout_ref")])
    assert found["model"] == str(deep)
    trained = found["actor_config"]
    assert (trained["seq_length"], trained["micro_batch_size"]) == (4096, 4)
    assert trained["optimizer"] == {
        **{"lr": 1e-5, "weight_decay": 0.1, "clip_grad": 0.5},
        **{"adam_beta1": 0.9, "adam_beta2": 0.98},
    }
    assert found["generate_config"]["max_model_len"] == 4096
    assert "micro batches of 4 sequences of 4096 tokens" in result.stdout.replace("\n", " ")
    assert "optim.lr_warmup_steps 10: not read" in result.stdout


def test_ranks_are_needed_without_a_file_that_has_them(tmp_path: Path) -> None:
    refused = run(f"model={write_config(tmp_path, LLAMA_3_8B)}")
    assert (refused.exit_code, "--ranks: is missing" in refused.stderr) == (2, True)


def test_what_has_no_counterpart_is_said(tmp_path: Path) -> None:
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
    )
    plain = facts(written(tmp_path, "megatron"), "--from", "verl")
    assert len(plain["remarks"]) == 1
    result = run(written(tmp_path, "megatron"), "--from", "verl", *words, "--json")
    remarks = json.loads(result.stdout)["remarks"][1:]
    parts = ("sglang", "KV cache", "reference", "all weights", "critic", "moe_shared_expert_overlap", "kv_cache_d")
    for part in (*parts, "quantization", "sequences that no", "moments"):
        assert sum(part in remark for remark in remarks) == 1, part
