"""--enable-resharding on the engine's side, without Megatron: what it refuses, what it compares, what it writes."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import gelu, silu

from hybrid_engine.backends.vllm.engine_settings import Completion, Sampling
from hybrid_engine.errors import ConfigError, WeightError
from hybrid_engine.megatron_script import journal
from hybrid_engine.megatron_script.checked_weights import NUM_SAMPLED, CheckedWeights
from hybrid_engine.megatron_script.matching import _DEFAULTS, model_mismatches, vocabulary_mismatches
from hybrid_engine.megatron_script.script_settings import actor_values, read_settings
from hybrid_engine.models import table_for
from hybrid_engine.ports import InferenceWeights
from hybrid_engine.switch.report import ReshardReport
from hybrid_engine.switch.sharding_manager import ShardingManager, State
from megatron_patches.arguments import ReshardingOptions
from tests.harness.small_disks import file_size_limit
from tests.hybrid_engine.switch.fakes import Rig
from tests.zoo.families import served_config

LLAMA = served_config("llama")

# -- arguments of Megatron that describe LLAMA ------------------------------------------------------------------------

ARGS = {
    "world_size": 2,
    "rank": 0,
    "optimizer": "adam",
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
    "pipeline_model_parallel_layout": None,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": 2,
    "num_experts": None,
    "sequence_parallel": False,
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": False,
    "overlap_param_gather": False,
    "make_vocab_size_divisible_by": 8,
    "micro_batch_size": 1,
    "seq_length": 32,
    "seed": 1234,
    "params_dtype": torch.bfloat16,
    "position_embedding_type": "rope",
    "rotary_base": 10000,
    "rotary_percent": 1.0,
    "max_position_embeddings": 128,
    "untie_embeddings_and_output_weights": True,
    "mtp_num_layers": None,
    "use_rope_scaling": False,
    "padded_vocab_size": 10_000,
}


def transformer_config(**changes: Any) -> SimpleNamespace:
    values = {**_DEFAULTS, **table_for(LLAMA).transformer, "activation_func": silu, "bias_activation_fusion": True}
    return SimpleNamespace(**{**values, **changes})


def script_of(options: ReshardingOptions, config: SimpleNamespace | None = None, **changes: Any) -> Any:
    """A `MegatronScript` whose Megatron is not there."""
    return SimpleNamespace(
        options=options,
        args=Namespace(**{**ARGS, **changes}),
        transformer_config=lambda: config or transformer_config(),
    )


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """A model directory, the YAML that names it, and prompts."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(LLAMA))
    config = tmp_path / "config.yaml"
    config.write_text(f"model: {model}\ngenerate_config: {{max_model_len: 64}}\nsampling: {{max_tokens: 5}}\n")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": [1, 2]}\n\n{"prompt": "text", "id": 7}\n')
    return {"model": model, "config": config, "prompts": prompts, "output": tmp_path / "output"}


WRONG_SAMPLING = (
    *("max_tokens: abc", "max_tokens: -5", "max_tokens: 0", "n: 0", "temperature: .nan", "temperature: hot"),
    *("temperature: -1", "top_p: 7", "seed: x", "stop_token_ids: 5", "stop_token_ids: [a]", "logprobs: 1"),
)

# -- settings ---------------------------------------------------------------------------------------------------------


def test_flags_override_the_file_and_megatron_gives_the_training_side(files: dict[str, Path]) -> None:
    options = ReshardingOptions(
        enabled=True,
        config=files["config"],
        prompts=files["prompts"],
        output=files["output"],
        infer_tensor_parallel_size=2,
        offload_train_grad=False,
        callback="json:dumps",
    )
    settings = read_settings(script_of(options))
    assert settings.config.actor_config.tensor_model_parallel_size == 2
    assert settings.config.actor_config.params_dtype == "bfloat16"
    assert settings.config.generate_config.infer_tensor_parallel_size == 2
    assert settings.config.generate_config.max_model_len == 64
    assert not settings.config.generate_config.offload_train_grad
    assert settings.config.generate_config.offload_train_param
    assert settings.sampling == Sampling(max_tokens=5)
    assert settings.prompts == ((1, 2), "text")
    assert settings.callback is json.dumps


def test_everything_wrong_is_reported_at_once(files: dict[str, Path]) -> None:
    files["prompts"].write_text('{"prompt": [1, 2]}\n{"text": "x"}\n[]\n')
    options = ReshardingOptions(
        enabled=True,
        config=files["config"],
        prompts=files["prompts"],
        infer_tensor_parallel_size=3,
        callback="json:nothing",
    )
    refused = {"use_torch_fsdp2": True, "nccl_ub": True, "optimizer": "dist_muon"}
    with pytest.raises(ConfigError) as caught:
        read_settings(script_of(options, transformer_config(hidden_size=1), **refused))
    keys = [finding.key for finding in caught.value.findings]
    assert {"--use-torch-fsdp2", "--use-nccl-ub", "--optimizer", "--resharding-output"} <= set(keys)
    assert "--resharding-prompts" in keys
    assert {"--resharding-callback", "--hidden-size"} <= set(keys)
    assert "generate_config.infer_tensor_parallel_size" in keys
    assert "lines 2, 3 are no prompts" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "--resharding-config: is missing"),
        ("model: [", "config.yaml is not YAML: "),
        ("- model", "must hold keys and values, found a list"),
        ("model: x\nactor_config: {}", "actor_config: is what Megatron's own arguments say"),
        ("model: x\nsampler: {}", "unknown keys sampler. Known keys: model, generate_config, sampling"),
        ("model: x\nsampling: {tokens: 3}", "sampling: unknown keys tokens"),
        *((f"model: x\nsampling: {{{value}}}", f"sampling.{value.split(':')[0]}: ") for value in WRONG_SAMPLING),
        *((f"model: x\nsampling: {value}", f"sampling: {value} is no section") for value in ("5", "[1]")),
        ('model: x\nsampling: "n"', "sampling: 'n' is no section"),
        ("model: x\nsampling: {5: 1}", "sampling: unknown keys 5. Known keys: n, temperature"),
        ("model: /nowhere", "config.json cannot be read: No such file"),
        ("model: x\ngenerate_config: {bucket: 3}", "Did you mean bucket_mb"),
    ],
)
def test_bad_files_are_named_with_a_remedy(tmp_path: Path, content: str | None, message: str) -> None:
    path = None
    if content is not None:
        path = tmp_path / "config.yaml"
        path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        read_settings(script_of(ReshardingOptions(enabled=True, config=path)))
    assert message in str(caught.value)


def test_an_output_that_cannot_be_a_directory_is_refused_where_it_would_be_written(files: dict[str, Path]) -> None:
    output = files["prompts"] / "below a file"
    options = ReshardingOptions(enabled=True, config=files["config"], output=output)
    with pytest.raises(ConfigError, match=f"--resharding-output: {output} cannot be written: {files['prompts']} is no"):
        read_settings(script_of(options))
    assert read_settings(script_of(options, rank=1)).output == output


def test_a_model_that_differs_is_refused_with_the_rest(files: dict[str, Path]) -> None:
    options = ReshardingOptions(enabled=True, config=files["config"], callback="json:nothing")
    with pytest.raises(ConfigError) as caught:
        read_settings(script_of(options, transformer_config(hidden_size=1)))
    assert {finding.key for finding in caught.value.findings} == {"--hidden-size", "--resharding-callback"}


def test_a_written_out_pipeline_layout_stands_for_the_virtual_stages() -> None:
    values = actor_values(
        Namespace(**{**ARGS, "pipeline_model_parallel_layout": "Et|tL", "virtual_pipeline_model_parallel_size": 2})
    )
    assert values["pipeline_model_parallel_layout"] == "Et|tL"
    assert values["virtual_pipeline_model_parallel_size"] is None


# -- matching ---------------------------------------------------------------------------------------------------------


def mismatches(
    hf: dict[str, Any], config: dict[str, Any] | None = None, args: dict[str, Any] | None = None
) -> dict[str, str]:
    """Flag -> what is wrong, of a model `hf` and a Megatron model that is LLAMA but for `config` and `args`."""
    found = model_mismatches(
        table_for({**LLAMA, **hf}), Namespace(**{**ARGS, **(args or {})}), transformer_config(**(config or {}))
    )
    return {violation.key: violation.problem for violation in found}


def test_the_same_model_matches() -> None:
    assert mismatches({}) == {}


@pytest.mark.parametrize(
    ("hf", "flags"),
    [
        ({"num_hidden_layers": 7}, {"--num-layers"}),
        ({"intermediate_size": 32}, {"--ffn-hidden-size"}),
        ({"num_key_value_heads": 1}, {"--group-query-attention --num-query-groups"}),
        ({"rms_norm_eps": 1e-3}, {"--norm-epsilon"}),
        ({"attention_bias": True, "mlp_bias": True}, {"--disable-bias-linear", "--add-qkv-bias"}),
        ({"rope_theta": 5e5}, {"--rotary-base"}),
        ({"tie_word_embeddings": True}, {"--untie-embeddings-and-output-weights"}),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, {"--use-rope-scaling"}),
    ],
)
def test_every_difference_is_under_its_flag(hf: dict[str, Any], flags: set[str]) -> None:
    assert set(mismatches(hf)) == flags


def test_differences_of_megatron_alone_are_found() -> None:
    found = mismatches({}, {"qk_layernorm": True, "activation_func": gelu, "gated_linear_unit": False})
    assert set(found) == {"--qk-layernorm", "--swiglu", next(flag for flag in found if "--squared-relu" in flag)}
    assert set(mismatches({}, args={"mtp_num_layers": 1, "rotary_percent": 0.5})) == {
        "--mtp-num-layers",
        "--rotary-percent",
    }


def test_megatrons_own_rope_scaling_is_llamas() -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert mismatches({"rope_scaling": scaling}, args={"use_rope_scaling": True}) == {}
    assert "factor=32.0" in mismatches({"rope_scaling": {**scaling, "factor": 32.0}})["--use-rope-scaling"]


def test_fused_bias_and_gelu_is_the_approximation_by_tanh() -> None:
    gpt2 = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 64, "n_head": 2, "n_layer": 2}
    table = table_for({**gpt2, "vocab_size": 64, "n_positions": 128})
    values = {**_DEFAULTS, **table.transformer, "activation_func": gelu, "softmax_scale": None}
    args = Namespace(
        **{**ARGS, "position_embedding_type": "learned_absolute", "untie_embeddings_and_output_weights": False}
    )
    assert model_mismatches(table, args, SimpleNamespace(**values, bias_activation_fusion=True)) == []
    found = model_mismatches(table, args, SimpleNamespace(**values, bias_activation_fusion=False))
    assert [violation.problem for violation in found] == [
        "Megatron has gelu, the Hugging Face config asks for gelu_tanh"
    ]


def test_balancing_of_experts_is_trainings_own_affair() -> None:
    table = table_for(served_config("qwen3_moe"))
    values = {**_DEFAULTS, **table.transformer, "activation_func": silu, "bias_activation_fusion": True}
    own = {"moe_router_load_balancing_type": "aux_loss", "moe_router_dtype": None, "ffn_hidden_size": 7}
    args = Namespace(**{**ARGS, "rotary_base": table.gpt["rotary_base"]})
    args.untie_embeddings_and_output_weights = not table.dims.tied_embeddings
    every_layer = SimpleNamespace(**{**values, **own, "moe_layer_freq": 1})
    assert model_mismatches(table, args, every_layer) == []
    fewer = SimpleNamespace(**{**values, "moe_layer_freq": 2, "num_moe_experts": 3})
    assert {found.key for found in model_mismatches(table, args, fewer)} == {"--moe-layer-freq", "--num-experts"}


def test_what_megatrons_script_cannot_compute_is_named() -> None:
    qwen = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": True}
    found = mismatches({**qwen, "sliding_window": 16, "max_window_layers": 0}, {"add_qkv_bias": True})
    assert "windows" in found["model"] and "Megatron's GPT model does not compute this" in found["model"]


def test_the_padded_vocabulary_must_hold_the_models() -> None:
    table = table_for(LLAMA)
    assert vocabulary_mismatches(table, Namespace(padded_vocab_size=table.dims.vocab_size)) == []
    (found,) = vocabulary_mismatches(table, Namespace(padded_vocab_size=8))
    assert f"8 rows after padding, the Hugging Face config has {table.dims.vocab_size}" in str(found)


# -- checked weights --------------------------------------------------------------------------------------------------


def checked(rig: Rig) -> tuple[CheckedWeights, ShardingManager]:
    weights = CheckedWeights(rig.inference, rig.job.agreement)
    manager = ShardingManager(
        trainer=rig.training,
        inference=weights,
        caches=rig.inference,
        offloader=rig.offloader,
        config=rig.config,
        job=rig.job,
    )
    return weights, manager


def test_a_switch_that_brings_every_bit_is_clean(job: None) -> None:
    rig = Rig(build=False)
    weights, manager = checked(rig)
    assert isinstance(weights, InferenceWeights)
    for _ in range(3):
        rig.training.step()
        weights.expect(rig.training, sample=False)
        manager.enter(State.INFER)
        weights.require_same()
        assert weights.num_checked == 2
        manager.enter(State.TRAIN)


def test_one_bit_is_found_and_named(job: None) -> None:
    rig = Rig(build=False)
    weights, manager = checked(rig)
    weights.expect(rig.training, sample=False)
    rig.training.param[-1:].view(torch.int32).bitwise_xor_(1)  # what arrives is not what was expected
    manager.enter(State.INFER)
    with pytest.raises(WeightError, match="second: differs from Megatron's weights") as caught:
        weights.require_same()
    assert "first" not in str(caught.value)


def test_what_never_came_is_missed(job: None) -> None:
    rig = Rig(build=False)
    weights, _ = checked(rig)
    weights.expect(rig.training, sample=False)
    with pytest.raises(WeightError, match="2 of 2 shards were never committed"):
        weights.require_same()


def test_samples_go_round(job: None) -> None:
    rig = Rig(build=False)
    weights, _ = checked(rig)
    names = [f"tensor{number:02}" for number in range(NUM_SAMPLED + 3)]
    first, second = (weights._chosen(names, sample=True) for _ in range(2))
    assert first == names[:NUM_SAMPLED]
    assert second[:3] == names[NUM_SAMPLED:] and len(second) == NUM_SAMPLED
    assert weights._chosen(names, sample=False) == names


# -- journal ----------------------------------------------------------------------------------------------------------


class Timers:
    """Megatron's, as far as they are used."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __call__(self, name: str, log_level: int) -> Any:
        return SimpleNamespace(
            start=lambda barrier=False: self.calls.append(f"start {name}"),
            stop=lambda: self.calls.append(f"stop {name}"),
        )

    def write(self, names: list[str], writer: Any, iteration: int, reset: bool) -> None:
        self.calls.append("write")

    def log(self, names: list[str]) -> None:
        self.calls.append("log")


def report(direction: str) -> ReshardReport:
    return ReshardReport(
        direction=direction,
        version=4,
        seconds=0.5,
        seconds_by_phase={},
        bytes_received=10,
        bytes_own=0,
        bytes_least=10,
        bytes_offloaded=0,
        bytes_onloaded=0,
        peak_bytes=3_000_000_000,
    )


class StandInForWandb:
    """The module `wandb`, which Megatron uses as its writer, as far as it is used."""

    def __init__(self) -> None:
        self.logged: dict[int, dict[str, Any]] = {}

    def Table(self, columns: list[str], data: list[list[str]]) -> list[list[str]]:
        return [columns, *data]

    def log(self, values: dict[str, Any], step: int) -> None:
        self.logged.setdefault(step, {}).update(values)


def test_samples_and_reports_are_written_by_one_rank_and_by_megatrons_writers(tmp_path: Path) -> None:
    scalars: dict[str, float] = {}
    texts: dict[str, str] = {}
    wandb = StandInForWandb()
    script = SimpleNamespace(
        timers=Timers(),
        tokenizer=SimpleNamespace(detokenize=lambda ids: " ".join(map(str, ids))),
        tensorboard_writer=SimpleNamespace(
            add_scalar=lambda name, value, at: scalars.update({name: value}),
            add_text=lambda name, value, at: texts.update({name: value}),
        ),
        wandb_writer=wandb,
    )
    completions = [[Completion((4, 5), (-1.0, -3.0), "length")], [Completion((6,), (-2.0,), "stop")]]
    reports = [report("train->infer"), report("infer->train")]
    for is_writer in (True, False):
        notes = journal.Journal(script, tmp_path / str(is_writer), is_writer)
        notes.note(8, reports, notes.samples(8, ["7 8", (1, 2)], [[7, 8], [1, 2]], completions))
        notes.log_times(8)
    written = tmp_path / "True"
    first, second = (json.loads(line) for line in (written / "samples.jsonl").read_text().splitlines())
    assert first == {
        "iteration": 8,
        "prompt": "7 8",
        "text": "4 5",
        "prompt_token_ids": [7, 8],
        "token_ids": [4, 5],
        "log_probs": [-1.0, -3.0],
        "finish_reason": "length",
    }
    assert "text" not in second and second["token_ids"] == [6]
    switches = [json.loads(line) for line in (written / "switches.jsonl").read_text().splitlines()]
    assert [switch["direction"] for switch in switches] == ["train->infer", "infer->train"]
    assert not (tmp_path / "False").exists()
    assert scalars["resharding/train->infer seconds"] == 0.5
    assert scalars["resharding/peak gigabytes"] == 3.0
    assert scalars["resharding/mean log-probability"] == -2.0
    assert scalars["resharding/completion tokens"] == 1.5
    assert texts == {"resharding/samples": "    7 8\n    => 4 5\n\n    [1, 2]\n    => [6]"}
    table = [["prompt", "completion", "finish reason"], ["7 8", "4 5", "length"], ["[1, 2]", "[6]", "stop"]]
    assert wandb.logged == {8: {**scalars, "resharding/samples": table}}
    assert script.timers.calls == ["write", "write", "log"] * 2


def test_a_full_disk_drops_lines_and_not_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whole lines, counted; a line that was cut short is not appended to."""
    script = SimpleNamespace(tensorboard_writer=None, wandb_writer=None)
    notes = journal.Journal(script, tmp_path, True)
    path = tmp_path / "samples.jsonl"
    path.write_text('{"iteration": 1}\n{"iterat')
    one = {"iteration": 2, "token_ids": [1], "log_probs": [], "prompt_token_ids": [], "finish_reason": "stop"}
    with file_size_limit(100):
        notes.note(2, [report("train->infer")], [one, one])
    assert notes.num_dropped == {"samples.jsonl": 2, "switches.jsonl": 1}
    assert f"appending to {path}: file too large (limit 100)" in caplog.text
    assert "2 lines dropped so far, training goes on" in caplog.text
    assert path.read_text() == '{"iteration": 1}\n'
    notes.note(3, [report("train->infer")], [one])
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"iteration": 1}, one]


def test_without_prompts_there_are_no_samples_to_show() -> None:
    wandb = StandInForWandb()
    script = SimpleNamespace(tensorboard_writer=None, wandb_writer=wandb)
    journal.Journal(script, None, True).note(2, [report("train->infer")], [])
    assert "resharding/samples" not in wandb.logged[2] and "resharding/completion tokens" not in wandb.logged[2]


def test_megatrons_interval_time_pauses_also_when_a_switch_fails() -> None:
    timers = Timers()
    notes = journal.Journal(SimpleNamespace(timers=timers), None, True)
    with pytest.raises(ValueError), notes.apart_from_training(), notes.timed(journal.TIMERS[0]):
        raise ValueError
    assert timers.calls == [
        "stop interval-time",
        "start resharding-to-inference",
        "stop resharding-to-inference",
        "start interval-time",
    ]
