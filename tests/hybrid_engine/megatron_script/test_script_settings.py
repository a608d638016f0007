"""--enable-resharding: settings from flags, the YAML file and Megatron's arguments; violations."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer import TransformerConfig

from hybrid_engine.backends.vllm.engine_settings import Sampling
from hybrid_engine.compute_check.attention import Attention, Rotary
from hybrid_engine.errors import ConfigError
from hybrid_engine.megatron_script import make_engine, script_engine, script_settings
from hybrid_engine.megatron_script.rl_engine import RolloutEngine
from hybrid_engine.megatron_script.script_settings import actor_values, read_settings
from hybrid_engine.models import table_for
from megatron_patches.engines import ReshardingOptions
from megatron_patches.errors import ScriptError
from tests.harness.errors import has_violation, has_violations, violations_of
from tests.hybrid_engine.megatron_script.megatron_arguments import (
    ARGS,
    LLAMA,
    script_of,
    transformer_config,
)
from tests.zoo.families import served_config, write_config


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """A model directory, the YAML file that names it, and prompts."""
    model = write_config(tmp_path / "model", LLAMA)
    config = tmp_path / "config.yaml"
    config.write_text(
        f"model: {model}\ngenerate_config: {{max_model_len: 64}}\nsampling: {{max_tokens: 5}}\n"
    )
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": [1, 2]}\n\n{"prompt": "te\u2028x\x85t", "id": 7}\n')
    return {"model": model, "config": config, "prompts": prompts, "output": tmp_path / "output"}


WRONG_SAMPLING = (
    *("max_tokens: abc", "max_tokens: -5", "temperature: .nan", "temperature: hot"),
    *("seed: x", "stop_token_ids: 5", "stop_token_ids: [a]", "logprobs: 1"),
)


def enabled_by(files: dict[str, Path], **options: object) -> ReshardingOptions:
    return ReshardingOptions(enabled=True, config=files["config"], **options)


def test_flags_override_the_file(files: dict[str, Path]) -> None:
    options = enabled_by(
        files,
        prompts=files["prompts"],
        output=files["output"],
        infer_tensor_parallel_size=2,
        offload_train_grad=False,
        verify="sample",
        callback="json:dumps",
    )
    settings = read_settings(script_of(options))
    assert settings.config.actor_config.tensor_model_parallel_size == 2
    assert settings.config.actor_config.params_dtype == "bfloat16"
    assert settings.config.generate_config.infer_tensor_parallel_size == 2
    assert settings.config.generate_config.max_model_len == 64
    assert not settings.config.generate_config.offload_train_grad
    assert settings.config.generate_config.offload_train_param
    assert settings.config.generate_config.verify == "sample"
    assert settings.sampling == Sampling(max_tokens=5)
    assert settings.prompts == ((1, 2), "te\u2028x\x85t")
    assert settings.callback is json.dumps


def test_a_hybrid_pattern_is_compared_with_the_model(files: dict[str, Path]) -> None:
    """Megatron counts every layer of the pattern."""
    options = enabled_by(files)
    num_layers = LLAMA["num_hidden_layers"]
    core = transformer_config(num_layers=2 * num_layers)
    settings = read_settings(script_of(options, core, hybrid_layer_pattern="*-" * num_layers))
    assert settings.config.actor_config.hybrid_layer_pattern == "*-" * num_layers
    for pattern, part in (("*-", f"{num_layers} layers"), ("M-*-", "(M)")):
        with pytest.raises(ConfigError) as caught:
            read_settings(script_of(options, core, hybrid_layer_pattern=pattern))
        texts = [
            str(violation)
            for violation in caught.value.findings
            if "hybrid_layer_pattern" in violation.key
        ]
        assert any(part in text for text in texts)


def test_a_layout_may_omit_the_models_mtp_layer(files: dict[str, Path]) -> None:
    model = served_config("deepseek_v3", num_hidden_layers=4, num_nextn_predict_layers=1)
    write_config(files["model"], model)
    sizes = {
        "tensor_model_parallel_size": 1,
        "expert_tensor_parallel_size": 1,
        "pipeline_model_parallel_size": 2,
    }
    args = {"num_experts": model["n_routed_experts"], "rotary_base": model["rope_theta"], **sizes}
    options = enabled_by(files)
    core = transformer_config(model, mtp_num_layers=None)

    def read(layout: str, num_mtp_layers: int | None) -> None:
        changes = {"pipeline_model_parallel_layout": layout, "mtp_num_layers": num_mtp_layers}
        read_settings(script_of(options, core, **args, **changes))

    read("Ett|ttL", None)
    read("Ett|ttmL", 1)
    with pytest.raises(ConfigError, match="0 MTP layers"):
        read("Ett|ttL", 1)
    with pytest.raises(ConfigError, match="1 MTP layers"):
        read("Ett|ttmL", None)


@pytest.mark.parametrize("callback", ["json:nothing", "..json:dumps"])
def test_all_violations_are_reported_at_once(files: dict[str, Path], callback: str) -> None:
    files["prompts"].write_text('{"prompt": [1, 2]}\n{"text": "x"}\n[]\n')
    options = enabled_by(
        files,
        prompts=files["prompts"],
        infer_tensor_parallel_size=3,
        callback=callback,
    )
    refused = {
        "use_torch_fsdp2": True,
        "nccl_ub": True,
        "optimizer": "dist_muon",
        "optimizer_cpu_offload": True,
    }
    ours = has_violations(
        *((f"--{flag}", "refused-megatron-setting") for flag in ("use-torch-fsdp2", "use-nccl-ub")),
        *(
            (f"--{flag}", "refused-megatron-setting")
            for flag in ("optimizer", "optimizer-cpu-offload")
        ),
        ("--resharding-output", "missing-key"),
        ("--resharding-prompts", "invalid-prompt"),
        ("--resharding-callback", "import-failed"),
        exactly=False,
    )
    with pytest.raises(ConfigError, check=ours) as caught:
        read_settings(script_of(options, transformer_config(hidden_size=1), **refused))
    flags = {"use-torch-fsdp2", "use-nccl-ub", "optimizer", "optimizer-cpu-offload", "hidden-size"}
    flags |= {f"resharding-{name}" for name in ("output", "prompts", "callback")}
    assert {finding.key for finding in caught.value.findings} == {
        *(f"--{flag}" for flag in flags),
        "generate_config.infer_tensor_parallel_size",
    }
    assert "lines 2, 3 " in str(caught.value)


def test_settings_of_megatron_cores_configuration_are_refused(files: dict[str, Path]) -> None:
    core = TransformerConfig(num_layers=2, hidden_size=16, num_attention_heads=4)
    core.fp4 = "e2m1"
    core.fp4_param = True
    with pytest.raises(ConfigError) as caught:
        options = enabled_by(files)
        read_settings(script_of(options, core, fp4_param_gather=True))
    listed = violations_of(caught.value)
    for flag in ("--fp4-param-gather", "--fp4-format"):
        assert listed.count((flag, "refused-megatron-setting")) == 1, (
            "several configurations have this field"
        )
    (param_gather,) = (
        violation for violation in caught.value.findings if violation.key == "--fp4-param-gather"
    )
    assert "--enable-resharding" in param_gather.remedy


@pytest.mark.parametrize(
    ("content", "key", "code", "text"),
    [
        (None, "--resharding-config", "missing-key", ""),
        ("{}", "model", "", ""),
        ("model: [", "--resharding-config", "", "config.yaml"),
        ("- model", "--resharding-config", "", "a list"),
        ("model: x\nactor_config: {}", "actor_config", "has-no-effect", "config.yaml"),
        ("model: x\nsampler: {}", "--resharding-config", "unknown-key", "sampler"),
        ("model: x\nsampling: {tokens: 3}", "sampling", "unknown-key", "tokens"),
        *(
            (f"model: x\nsampling: {{{value}}}", f"sampling.{value.split(':')[0]}", "", "")
            for value in WRONG_SAMPLING
        ),
        *(
            (f"model: x\nsampling: {value}", "sampling", "not-a-mapping", value)
            for value in ("5", "[1]")
        ),
        ('model: x\nsampling: "n"', "sampling", "not-a-mapping", "'n'"),
        ("model: x\nsampling: {5: 1}", "sampling", "unknown-key", "max_tokens"),
        ("model: /nowhere", "model", "", "config.json"),
        ("model: x\ngenerate_config: {bucket: 3}", "generate_config.bucket", "", "bucket_mb"),
    ],
)
def test_invalid_files_are_reported_with_a_remedy(
    tmp_path: Path, content: str | None, key: str, code: str, text: str
) -> None:
    """If `code` is "", the package that reads the value defines it."""
    path = None
    if content is not None:
        path = tmp_path / "config.yaml"
        path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        read_settings(script_of(ReshardingOptions(enabled=True, config=path)))
    violations = [violation for violation in caught.value.findings if violation.key == key]
    assert violations, str(caught.value)
    assert not code or code in [violation.code for violation in violations]
    assert any(text in str(violation) for violation in violations)


def test_an_unusable_output_is_refused_on_the_writing_rank(files: dict[str, Path]) -> None:
    output = files["prompts"] / "below a file"
    options = enabled_by(files, output=output)
    refused = has_violation(
        "--resharding-output", "not-writable", str(output), f"{files['prompts']} is not"
    )
    with pytest.raises(ConfigError, check=refused):
        read_settings(script_of(options))
    assert read_settings(script_of(options, rank=1)).output == output


def test_the_built_model_is_compared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments that a script's builder drops are only visible in the model."""
    model = torch.nn.Module()
    model.config = transformer_config(glu_linear_offset=1.0)
    attention = {0: Attention(1.0, rotary=Rotary.of_frequencies(torch.ones(16)))}
    values = {"attention": attention, "padded_vocab_size": 10_000}
    monkeypatch.setattr(
        "hybrid_engine.backends.megatron.live_model.config_of", lambda chunk: chunk.config
    )
    monkeypatch.setattr(
        "hybrid_engine.backends.megatron.live_model.model_arguments",
        lambda chunk: Namespace(**{**ARGS, **values}),
    )
    monkeypatch.setattr("hybrid_engine.backends.megatron.live_model.own_class", lambda chunk: None)
    engine = script_engine.ScriptEngine.__new__(script_engine.ScriptEngine)
    engine.settings = SimpleNamespace(table=table_for(LLAMA), config=SimpleNamespace(model="llama"))
    with pytest.raises(ScriptError) as caught:
        engine.model_built([model, model])
    keys = [sentence.partition(":")[0] for sentence in caught.value.violations]
    assert keys == ["TransformerConfig.glu_linear_offset", "GPTModel.rotary_pos_emb"]


def test_prompts_need_a_layout_that_can_generate(files: dict[str, Path]) -> None:
    options = enabled_by(files, infer_pipeline_parallel_size=2)
    assert (
        read_settings(script_of(options)).config.generate_config.infer_pipeline_parallel_size == 2
    )
    key = "generate_config.infer_pipeline_parallel_size"
    refused = has_violation(key, "cannot-generate", "2", "--resharding-prompts")
    with pytest.raises(ConfigError, check=refused):
        read_settings(script_of(replace(options, prompts=files["prompts"], output=files["output"])))


def test_violations_end_a_script_without_a_traceback(files: dict[str, Path]) -> None:
    """megatron_patches ends the script with the message of a ScriptError."""
    options = enabled_by(files, infer_tensor_parallel_size=3)
    with pytest.raises(
        ScriptError, match=r"enable-resharding:\n- generate_config\.infer_tensor_parallel_size: "
    ):
        make_engine(script_of(options))


def test_a_pipeline_layout_replaces_virtual_stages() -> None:
    values = actor_values(
        Namespace(
            **{
                **ARGS,
                "pipeline_model_parallel_layout": "Et|tL",
                "virtual_pipeline_model_parallel_size": 2,
            }
        )
    )
    assert values["pipeline_model_parallel_layout"] == "Et|tL"
    assert values["virtual_pipeline_model_parallel_size"] is None


@pytest.mark.parametrize(("flag", "in_file"), [(False, False), (True, False), (False, True)])
def test_the_flag_or_the_file_allows_an_unknown_vllm(
    flag: bool, in_file: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    config = SimpleNamespace(generate_config=SimpleNamespace(allow_version=in_file, servers=()))
    monkeypatch.setattr(
        script_engine, "read_settings", lambda script: SimpleNamespace(config=config)
    )
    monkeypatch.setattr(
        "hybrid_engine.backends.vllm.require_vllm", lambda **arguments: calls.append(arguments)
    )
    script_engine.ScriptEngine(
        SimpleNamespace(options=ReshardingOptions(enabled=True, allow_version=flag))
    )
    assert calls == [{"allow_version": flag or in_file}]


RL = {
    **{
        "perform_rl_step": True,
        "inference_max_seq_length": 64,
        "global_batch_size": 8,
        "rl_prompts_per_eval": 2,
    },
    **{"grpo_prompts_per_step": 4, "grpo_group_size": 4, "grpo_iterations": 3},
}
SERVED = (
    "model: {model}\ngenerate_config: {{servers: ['http://127.0.0.1:1'], release_weights: false}}\n"
)


@pytest.fixture
def newer_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script_settings, "check_version", lambda **_: "0.19.2")


@pytest.mark.usefixtures("newer_megatron")
def test_megatrons_rl_loop_uses_servers(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No vLLM is needed in this process.

    Servers that keep their weights lag by the steps between two collections, unless the file sets a
    lag.
    """
    monkeypatch.setattr(
        "hybrid_engine.backends.vllm.require_vllm", lambda **_: pytest.fail("vLLM is required")
    )
    files["config"].write_text(SERVED.format(model=files["model"]))
    options = enabled_by(files)
    engine = make_engine(script_of(options, **RL))
    assert isinstance(engine, RolloutEngine)
    assert engine.settings.config.generate_config.server_max_lag == 6
    assert engine.most_requests == 16
    engine.switch(1)
    engine.detach()
    files["config"].write_text(
        SERVED.format(model=files["model"]).replace("false", "false, server_max_lag: 2")
    )
    assert read_settings(script_of(options, **RL)).config.generate_config.server_max_lag == 2


@pytest.mark.usefixtures("newer_megatron")
def test_unsupported_settings_of_megatrons_rl_loop_are_refused(files: dict[str, Path]) -> None:
    options = enabled_by(
        files,
        prompts=files["prompts"],
        output=files["output"],
        interval=2,
        at_start=True,
        callback="json:dumps",
    )
    axes = ("tensor", "pipeline", "expert", "expert_tensor")
    sizes = {f"rl_inference_{axis}_model_parallel_size": 2 for axis in axes}
    flags = (
        "rl_offload_optimizer_during_inference",
        "rl_verify_model_weights_swap",
        "rl_partial_rollouts",
    )
    refused = {**sizes, **dict.fromkeys(flags, True), "rl_inference_parsers": ["name"]}
    with pytest.raises(ConfigError) as caught:
        read_settings(script_of(options, **{**RL, **refused, "inference_max_seq_length": 128}))
    our_flags = {
        "--resharding-interval",
        "--resharding-at-start",
        "--resharding-prompts",
        "--resharding-callback",
    }
    keys = {"generate_config.servers", "generate_config.max_model_len", "sampling"}
    megatron_flags = {"--" + name.replace("_", "-") for name in refused}
    assert {finding.key for finding in caught.value.findings} == {
        *our_flags,
        *keys,
        *megatron_flags,
    }
    refused_flags = ((flag, "refused-megatron-setting") for flag in megatron_flags)
    listed = has_violations(
        *refused_flags,
        ("generate_config.servers", "missing-key"),
        ("sampling", "has-no-effect"),
        exactly=False,
    )
    assert listed(caught.value)


@pytest.mark.usefixtures("newer_megatron")
def test_rollouts_longer_than_the_model_are_refused(files: dict[str, Path]) -> None:
    """The length defaults to that in config.json."""
    files["config"].write_text(SERVED.format(model=files["model"]))
    options = enabled_by(files)
    limit = LLAMA["max_position_embeddings"]
    read_settings(script_of(options, **{**RL, "inference_max_seq_length": limit}))
    key = "generate_config.max_model_len"
    with pytest.raises(
        ConfigError, check=has_violation(key, "shorter-than-rollouts", str(limit), str(limit + 1))
    ):
        read_settings(script_of(options, **{**RL, "inference_max_seq_length": limit + 1}))


def test_context_parallelism_and_older_rl_loops_are_refused(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script_settings, "check_version", lambda **_: "0.16.1")
    options = enabled_by(files)
    args = Namespace(**{**ARGS, **RL, "context_parallel_size": 2})
    first, *_, last = script_settings.rl_refusals(args, options, {})
    assert (first.key, first.code) == ("--perform-rl-step", "untested-version")
    assert "0.16.1" in first.problem
    assert (last.key, last.code) == ("--context-parallel-size", "refused-megatron-setting")
