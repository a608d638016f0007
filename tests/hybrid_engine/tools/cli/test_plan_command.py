"""`python -m hybrid_engine plan`: figures, refusals, and DeepSeek-V3 on 2,048 ranks."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner, Result

from hybrid_engine.tools.cli import app
from tests.harness.imports import INTERRUPTED_IN
from tests.harness.values import Values
from tests.hybrid_engine.layouts.cases import DENSE, EXPERTS
from tests.hybrid_engine.tools.programs import invoke, run_python
from tests.zoo.block_formats import PUBLISHED_FP8
from tests.zoo.families import INFER_KEYS, TRAIN_KEYS, write_config
from tests.zoo.published_configs import DEEPSEEK_V3, LLAMA_3_8B

KEYS = {
    **{name: f"actor_config.{key}" for name, key in TRAIN_KEYS.items()},
    **{f"infer_{name}": f"generate_config.{key}" for name, key in INFER_KEYS.items()},
}


def job(model: Path | str, ranks: int, **sizes: int) -> tuple[str, ...]:
    """Return the arguments of a job without a configuration file."""
    return (
        f"model={model}",
        *(f"{KEYS[name]}={size}" for name, size in sizes.items()),
        "--ranks",
        str(ranks),
    )


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return write_config(tmp_path, LLAMA_3_8B)


def run(*arguments: str, status: int | None = None) -> Result:
    return invoke("plan", *arguments, status=status)


def plan_as_json(*arguments: str) -> Any:
    result = run(*arguments, "--json")
    facts = with_attributes(result.stdout or result.stderr)
    assert result.exit_code == (0 if facts.verdict.fits else 3)
    return facts


def with_attributes(text: str) -> Any:
    """Return JSON whose keys are attributes."""
    return json.loads(text, object_hook=lambda values: SimpleNamespace(**values))


def test_later_switches_skip_frozen_weights(llama: Path) -> None:
    """Embedding and head of Llama-3 8B have 128,256 x 4,096 elements each.

    Of q, k and v only q is frozen, so all three are sent.
    """
    arguments = job(llama, 64, tp=8, pp=2, infer_tp=4)
    facts = plan_as_json(
        *arguments, "--frozen", "model.embed_tokens.weight, lm_head.*, *.q_proj.weight"
    )
    later = facts.later_switches
    ends_nbytes = 2 * 2 * 128_256 * 4_096
    assert later.bytes.kept.max == ends_nbytes / 4
    assert later.incremental_mb == -(-ends_nbytes // 4 // 1024**2)
    assert later.bytes.received == later.bytes.least
    before, after = (
        part.bytes.received.mean + part.bytes.copied_on_the_rank.mean for part in (facts, later)
    )
    assert before - after == ends_nbytes / 4
    assert not hasattr(plan_as_json(*arguments), "later_switches")
    shown = run(*arguments, "--frozen", "lm_head.*").output
    assert "│ kept " in shown
    assert "incremental: auto and" in shown
    assert (
        "no tensor matches layers.*"
        in run(*arguments, "--frozen", "lm_head.*,layers.*", status=2).output
    )


def test_figures_of_a_job(llama: Path) -> None:
    """Llama-3 8B, 16.06 GB of bfloat16: each rank receives a part of its half model."""
    arguments = (*job(llama, 64, tp=8, pp=2, infer_tp=4), "--hosts-of", "8")
    facts = plan_as_json(*arguments)
    of_directory = plan_as_json(str(llama), *arguments[1:])
    of_directory.planning = facts.planning
    assert of_directory == facts
    assert (facts.world_size, facts.train.data, facts.infer.data) == (64, 4, 16)
    assert facts.model.served_bytes == 2 * 8_030_261_248
    nbytes = facts.bytes
    sequential = facts.sequential
    assert nbytes.received == nbytes.least
    assert nbytes.received.mean == pytest.approx(nbytes.sent.mean)
    assert (
        nbytes.received_same_host.mean + nbytes.received_across_hosts.mean == nbytes.received.mean
    )
    assert sequential.received.mean > 1.2 * nbytes.received.mean, "auto saves a fifth"
    # everything but the norms is cut: M * (1/4 - 1/16)
    bound = 3 / 16 * facts.model.served_bytes
    assert nbytes.received.mean == pytest.approx(bound, rel=1e-3)
    (gather,) = facts.peers
    assert gather.nbytes == pytest.approx(15 / 16 * facts.model.served_bytes, rel=1e-3)
    assert facts.across_hosts.received == facts.across_hosts.least
    total = facts.across_hosts.least.mean
    assert nbytes.received_across_hosts.max == pytest.approx(total / 8, rel=0.01), "equal shares"
    links = nbytes.received_across_hosts.max / 45e9 + nbytes.received_same_host.max / 400e9
    assert facts.seconds.max == pytest.approx(links, rel=0.05)


def test_options_are_used(tmp_path: Path) -> None:
    model = write_config(tmp_path, DENSE)
    common = job(model, 4, tp=2)
    one_host = plan_as_json(
        *common,
        "generate_config.infer_rank_order=sequential",
        "--link-gbps",
        "host=1e-6,self=1e9",
        "--rank",
        "3",
    )
    assert one_host.bytes.received_across_hosts.max == 0
    assert one_host.seconds.max == pytest.approx(one_host.bytes.received.max / 1e3)
    assert one_host.rank.received.host == one_host.bytes.received.max
    assert one_host.rank.staging == 0
    assert one_host.rank.transfers > 0
    assert one_host.rank.peers == 2
    apart = plan_as_json(*common, "--hosts-of", "1", "actor_config.params_dtype=float32")
    assert apart.bytes.received_same_host.max == 0
    assert apart.bytes.received.max == 2 * one_host.bytes.received.max
    assert one_host.memory.device.fits
    assert one_host.memory.host.fits is None


def test_assumptions_of_the_peak_are_reported(
    tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = job(llama, 16, tp=2)
    keeping = "generate_config.release_weights=false"
    plain = plan_as_json(*arguments).memory
    assert vars(plain.assumed) == {"release_weights": True, "elastic_buffers": True}
    kept = plan_as_json(*arguments, keeping).memory
    assert vars(kept.assumed) == {"release_weights": False, "elastic_buffers": True}
    device = plain.device
    together = device.training.max + device.activations.max + device.inference.max
    assert kept.device.peak.max == together > plain.device.peak.max
    assert kept.device.interleaved_switch == kept.device.switch
    exact = f"{(together - 1) / 2**30:.17g}"
    assert plan_as_json(*arguments, "--device-gib", exact).memory.device.fits
    assert not plan_as_json(*arguments, keeping, "--device-gib", exact).memory.device.fits
    whole = plan_as_json(*arguments, "--no-elastic").memory
    assert vars(whole.assumed) == {"release_weights": True, "elastic_buffers": False}
    assert whole.device.inelastic == plain.device.params
    assert whole.device.interleaved_switch.max == plain.device.switch.max
    stays = "stay on the device while it trains (release_weights: false)"
    assert stays in run(*arguments, keeping, "--explain").output
    monkeypatch.setattr("hybrid_engine.tools.cli.plan_command._DEVICES", tmp_path)
    for name, spec, expected in (
        ("sda", None, True),
        ("nvidia0", "installed", True),
        ("nvidia1", None, False),
    ):
        (tmp_path / name).touch()
        monkeypatch.setattr(
            "hybrid_engine.tools.cli.plan_command.find_spec", lambda _, spec=spec: spec
        )
        assert plan_as_json(*arguments).memory.assumed.elastic_buffers is expected, name
    assert plan_as_json(*arguments, "--elastic").memory.assumed.elastic_buffers
    assert "Without cuda-bindings parameters leave whole" in run(*arguments, "--explain").output


FSDP = (
    "actor_config.fsdp={sharding_strategy: HYBRID_SHARD, replicas: 2}",
    "actor_config.params_dtype=float32",
    "generate_config.compress_reshard=true",
)


def test_a_job_with_fsdp(llama: Path) -> None:
    """Llama-3 8B in float32 over 16 ranks, each with an eighth of the rows; vLLM has bfloat16."""
    pytest.importorskip("transformers")
    arguments = (*job(llama, 16, infer_tp=4, infer_pp=2), *FSDP)
    facts = plan_as_json(*arguments, "--rank", "3")
    numel = 8_030_261_248
    assert vars(facts.train) == {"num_shards": 8, "replicas": 2, "data": 16}
    assert (facts.model.train_dtype, facts.model.dtype) == ("float32", "bfloat16")
    assert facts.remarks == []
    nbytes = facts.bytes
    assert nbytes.received == nbytes.least
    # A rank needs half of the layers, a quarter of each, and holds none to an eighth of that.
    assert (1 / 8 - 1 / 16) * 2 * numel < nbytes.received.mean < 1 / 8 * 2 * numel * 1.07
    (peer,) = facts.peers
    assert peer.nbytes == pytest.approx(7 / 8 * 4 * numel), "gathered before the cast"
    memory = facts.memory.device
    params = memory.params.max
    assert params == memory.grads.max == memory.optimizer.max / 2 == 4 * numel / 8
    assert memory.inelastic.max == 0, "everything splits evenly over 8 ranks"
    training = memory.training.max
    assert memory.peak.max == training + memory.activations.max + memory.gathered.max
    switched = params + memory.inference.max
    assert memory.interleaved_switch.max < memory.switch.max == switched
    with_critic = plan_as_json(*arguments, "critic_config={offload: false}").memory.device
    head = (LLAMA_3_8B["vocab_size"] - 1) * LLAMA_3_8B["hidden_size"]
    more = with_critic.peak.max - memory.peak.max
    assert more == pytest.approx(training - 16 * head / 8, rel=1e-3), "all but the head"
    assert facts.rank.received.host + facts.rank.received.network > 0
    result = run(*arguments, "--explain")
    for text in (
        "│ inelastic ",
        "inelastic: parameters that leave only at",
        "a gather of all weights",
    ):
        assert text in result.output, text


@pytest.mark.parametrize("model_type", ["unheard-of", "qwen2"])
def test_a_model_that_transformers_builds_differently_is_refused(
    tmp_path: Path, model_type: str
) -> None:
    """The checkpoint has its own code, or its model_type contradicts its architecture."""
    pytest.importorskip("transformers")
    arguments = job(write_config(tmp_path, {**LLAMA_3_8B, "model_type": model_type}), 2)
    assert "model: transformers builds " in run(*arguments, "actor_config.fsdp={}", status=2).stderr


def test_the_output_begins_with_the_verdict(tmp_path: Path, llama: Path) -> None:
    arguments = job(llama, 16, tp=8, pp=2, infer_tp=4)
    result = run(*arguments, "--device", "H100", "--host-gib", "60", status=0)
    heads = [line.partition(":")[0] for line in result.stdout.splitlines()[:5]]
    assert heads == ["Fits", "Cache", "Host", "Moves", "Takes"]
    assert "a device, while vLLM generates, leaves 39.5 GiB of its 79.1 GiB" in result.stdout, (
        "the fullest phase"
    )
    # A token takes 2 * 2 heads * 128 * 32 layers * 2 bytes. A step takes as much as 33,060 tokens:
    # 2 * 16,384 * (3 * 4,096 + 3 * 14,336 / 4) bytes and 256 * 128,256 logits of 10.
    assert plan_as_json(*arguments, "--device", "H100").verdict.cache_tokens == 1_173_430 - 33_060
    for size in ("--device-gib", "--host-gib"):
        assert run(*arguments, size, "4", status=3).stdout.startswith("Does not fit: ")
    verdict = plan_as_json(
        *arguments, "generate_config.release_weights=false", "--device-gib", "3"
    ).verdict
    assert (verdict.fits, verdict.peak_during) == (False, "training")
    assert verdict.room < verdict.room_for_cache < 0
    assert (
        plan_as_json(*job(str(tmp_path), 128, tp=8), "--device-gib", "9").verdict.peak_during
        == "switch"
    )


LENGTH = "generate_config.max_model_len="
SHARE = "generate_config.gpu_memory_utilization="


@pytest.mark.parametrize(
    ("words", "beginning"),
    [
        # A twentieth of an H100 is left beside vLLM's share: 3.95 GiB.
        (
            ["0.95"],
            "Tight: the peak of 75.1 GiB on a device, while vLLM generates, leaves 3.95 GiB ",
        ),
        (["0.95", "--reserve-gib", "3.9"], "Fits: "),
        (["0.95", "--reserve-gib", "0"], "Fits: "),
        # The share has 2.8 GiB beside weights and a step, and a sequence takes 1.
        (["0.25", "--reserve-gib", "2"], "Tight: vLLM's 19.8 GiB "),
        (["0.25", "generate_config.kv_cache_mb=2048"], "Fits: "),
        (["0.22"], "Does not fit: vLLM's 17.4 GiB "),
        (
            ["0.1"],
            "Does not fit: vLLM's 7.91 GiB (gpu_memory_utilization 0.1) are 9.04 GiB too few",
        ),
    ],
    ids=" ".join,
)
def test_less_than_the_reserve_is_tight(words: list[str], beginning: str, llama: Path) -> None:
    model = job(llama, 8, tp=8)
    verdict = run(*model, LENGTH + "8192", "--device=h100", SHARE + words[0], *words[1:]).stdout
    assert verdict.startswith(beginning)
    assert (" GiB are reserved for what is not" in verdict) == beginning.startswith("Tight")
    assert ("infer_expert_parallel_size; it starts with" in verdict) == ("too few" in beginning)


def test_markdown_has_the_request_and_all_numbers(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = *job(llama, 8, tp=8), "actor_config.lora={}"
    monkeypatch.setattr(sys, "argv", ["", "plan", "two words"])
    shown, markdown = (run(*arguments, *words).stdout for words in ([], ["--markdown"]))
    request = f"**{llama}**, 8 x h200, which is assumed: `hybrid-engine plan 'two words'`\n\n"
    assert markdown.startswith(f"{request}- **Fits**: the peak of ")
    answer = re.sub("</?(details|summary)>", "", markdown.removeprefix(request))
    assert re.findall(r"[\w.]+", shown) == re.findall(r"[\w.]+", answer)
    head = "\n\n<details><summary>Memory</summary>\n\n| by rank | min | mean | max |\n| :- "
    assert head + "| -: | -: | -: |\n| params | 1.87 GiB | 1.87 GiB | 1.87 GiB |\n" in markdown


def test_a_job_whose_vllm_cannot_start_does_not_fit(llama: Path) -> None:
    """Training and the switch fit, but vLLM lacks memory for its longest sequence.

    A token takes 2 * 8 heads * 128 * 32 layers * 2 bytes: 8,192 per GiB. Weights take 14.957 GiB; a
    step takes 2 * 8,192 * (3 * 4,096 + 3 * 14,336) bytes and 256 * 128,256 logits of 10: 1.15 GiB.
    """
    arguments = *job(llama, 8, tp=8), "--device-gib", "24"
    length = LENGTH + "8192"
    verdict = plan_as_json(*arguments, length).verdict
    assert (verdict.cache_tokens, verdict.least_gpu_memory_utilization) == (0, 0.72)
    assert verdict.room > 0
    status = dict.fromkeys([(0.72, 8192), (0.71, 7642)], "tight")
    for utilization, tokens in (*status, (0.71, 8192), (0.71, 7643), (0.99, 131_072)):
        verdict = plan_as_json(*arguments, f"{SHARE}{utilization}", f"{LENGTH}{tokens}").verdict
        assert verdict.status == status.get((utilization, tokens), "does not fit")
    assert plan_as_json(*arguments).verdict.least_gpu_memory_utilization > 1, "full length"


def test_sequences_longer_than_the_models_positions_are_refused_as_by_vllm(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = *job(llama, 8, tp=8), LENGTH + "131073"
    assert "the model has 131,072 positions" in run(*arguments, status=2).stderr
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    run(*arguments, status=0)


def test_a_missing_solver_is_reported(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    assert "infer_rank_order auto needs scipy" in run(*job(llama, 8, tp=8), status=2).stderr


def test_resident_state_counts_on_the_device(llama: Path) -> None:
    """`offload_train_optimizer: false` moves 12 bytes per element from the host to the device."""
    arguments = job(llama, 16, tp=8, pp=2, infer_tp=1)
    plain = plan_as_json(*arguments)
    staying = plan_as_json(*arguments, "generate_config.offload_train_optimizer=false")
    before = plain.memory.device
    after = staying.memory.device
    assert plain.verdict.peak_during == staying.verdict.peak_during == "generate", "in vLLM's share"
    assert after.peak.max == before.peak.max + before.optimizer.max
    params = before.params.max
    assert staying.memory.host.per_rank.max == params
    assert plain.memory.host.per_rank.max == params + before.optimizer.max
    for size, choice in ("100", "false"), ("10", "true"):
        jobs = (f"generate_config.offload_train_optimizer={choice}" for choice in ("auto", choice))
        planned, same = (plan_as_json(*arguments, "--device-gib", size, key) for key in jobs)
        assert planned.memory.device == same.memory.device, size
        assert planned.memory.host == plain.memory.host, "before a step, and beside a critic"
    critic = plan_as_json(*arguments, "critic_config={offload: false}").memory.device
    assert critic.peak.max > before.training.max + before.training.max / 2


@pytest.mark.parametrize(
    ("config", "sizes", "words", "remarks"),
    [
        (
            EXPERTS,
            {"tp": 2, "ep": 3, "etp": 1, "infer_tp": 3, "infer_ep": 6},
            [],
            ["refused: actor_config.sequence_parallel: tensor_model_parallel_size 2"],
        ),
        (LLAMA_3_8B, {}, ["actor_config.lora={}"], ["as if every weight was trained"]),
        (LLAMA_3_8B, {}, ["generate_config.quantization=fp8"], ["sent quantised weights"]),
        (
            {**LLAMA_3_8B, "quantization_config": {"quant_method": "fp8"}},
            {},
            [],
            ["stored quantised ('fp8')"],
        ),
        (
            {**LLAMA_3_8B, "quantization_config": PUBLISHED_FP8},
            {},
            [],
            ["sent quantised weights; bytes are counted unquantised", "stored quantised ('fp8')"],
        ),
    ],
    ids=["refused", "adapters", "fp8 rollouts", "stored", "published fp8"],
)
def test_what_a_plan_ignores_is_remarked_on(
    config: Values, sizes: dict[str, int], words: list[str], remarks: list[str], tmp_path: Path
) -> None:
    actual = plan_as_json(*job(write_config(tmp_path, config), 6, **sizes), *words).remarks
    assert [text in remark for text, remark in zip(remarks, actual, strict=True)] == [True] * len(
        remarks
    )


def test_a_narrow_cache_has_twice_the_tokens(llama: Path) -> None:
    arguments = *job(llama, 8, tp=8), "generate_config.kv_cache_mb=2048"
    plans = (
        plan_as_json(*arguments, *words)
        for words in ([], ["generate_config.vllm.kv_cache_dtype=fp8"])
    )
    assert [plan.verdict.cache_tokens for plan in plans] == [2 * 8192, 4 * 8192]


def test_arguments_override_keys_of_a_file(tmp_path: Path) -> None:
    """The plan equals one without a file, in any working directory; `model` is relative to the
    file.
    """
    model = write_config(tmp_path / "model", DENSE)
    file = tmp_path / "job=1.yaml"
    file.write_text(
        "model: model\nactor_config:\n  tensor_model_parallel_size: 2\n  optimizer: {lr: 1.0e-5}\n"
    )
    keys = (
        "generate_config.infer_tensor_parallel_size=4",
        "actor_config.pipeline_model_parallel_size=2",
    )
    expected = plan_as_json(*job(model, 4, tp=2, pp=2, infer_tp=4))
    facts = plan_as_json(str(file), *keys, "--ranks", "4")
    facts.planning = expected.planning
    assert facts == expected


def test_invalid_arguments_are_refused_by_key(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("actor_config: {tp: 2}\nmodel: ./nowhere\n")
    job_file = str(tmp_path / "job.yaml")
    for words, key in {
        (job_file, "other.yaml"): "CONFIG",
        (str(tmp_path / "none.yaml"),): "CONFIG",
        (job_file, "model.path=x"): "model.path",
        (job_file, "seed=["): "seed",
        (job_file,): "actor_config.tp",
        ("actor_config.seed=1",): "model",
        ("model=x", "--ranks", "131073"): "--ranks",
    }.items():
        result = run("--ranks", "2", *words, status=2)
        assert f"{key}: " in result.stderr, (words, result.stderr)


def test_a_model_is_a_directory_its_config_or_an_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write_config(tmp_path, DENSE)
    expected = plan_as_json(*job(directory, 2, infer_tp=2)).bytes
    assert plan_as_json(*job(f"{directory}/config.json", 2, infer_tp=2)).bytes == expected
    pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", lambda name, **_: {"org/small-1.5b": directory}[name]
    )
    assert plan_as_json(*job("org/small-1.5b", 2, infer_tp=2)).bytes == expected


def test_all_violations_are_reported_at_once(tmp_path: Path) -> None:
    result = run(
        *job(
            write_config(tmp_path, DENSE), 6, tp=5, pp=3, ep=2, infer_tp=3, infer_pp=10, infer_ep=5
        ),
        *("--hosts-of", "0", "--link-gbps", "host=fast", "--rank", "99", "--markdown", "--json"),
        status=2,
    )
    keys = {violation["key"] for violation in json.loads(result.stdout)["violations"]}
    lines = result.stderr.splitlines()[1:]
    assert keys == {line.removeprefix("  - ").partition(":")[0] for line in lines}
    sizes = {KEYS[name] for name in ("tp", "pp", "ep", "infer_pp", "infer_ep")}
    assert keys >= {*sizes, "--hosts-of", "--link-gbps", "--rank", "--markdown"}


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(
            (option, value)
            for option in ("--hosts-of", "--ranks", "--rank")
            for value in ("８", "1_0", "1" * 30)
        ),
        *(
            (option, value)
            for option in ("--device-gib", "--host-gib", "--reserve-gib")
            for value in ("inf", "nan", "1e300", "-1")
        ),
        *(("--link-gbps", value) for value in ("host=inf", "host=nan", "host=-1")),
        ("--device", "h1000"),
    ],
)
def test_invalid_numbers_are_refused(option: str, value: str, tmp_path: Path) -> None:
    result = run(*job(write_config(tmp_path, DENSE), 1), option, value, status=2)
    assert option in result.stderr
    assert not result.stdout


@pytest.mark.parametrize("command", ["plan", "verify", "env"])
def test_help_is_complete_in_a_narrow_terminal(command: str) -> None:
    result = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "80"})
    options: set[str] = set()
    for parameter in get_command(app).commands[command].params:
        options.update(parameter.opts, parameter.secondary_opts)
    missing = options - set(result.stdout.split())
    assert {name for name in missing if name.startswith("--")} <= {"--help"}
    assert "…" not in result.stdout
    assert all(len(line) <= 80 for line in result.stdout.splitlines())


def run_in_a_process(directory: Path, stdout: IO[Any], *options: str) -> tuple[int, str]:
    """Plan a small job in another process; return its exit status and stderr."""
    model = job(write_config(directory, DENSE), 1)
    command = (sys.executable, "-m", "hybrid_engine", "plan", *model, *options)
    ended = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60)
    return ended.returncode, ended.stderr


def test_a_full_output_device_ends_with_an_error(tmp_path: Path) -> None:
    """Buffered output must not fail again when Python exits."""
    message = "writing the answer: No space left on device\n"
    with open("/dev/full", "w") as full:
        assert run_in_a_process(tmp_path, full, "--json") == (2, message)


@pytest.mark.parametrize(
    "options", [["--json"], ["--markdown"], []], ids=["json", "markdown", "tables"]
)
def test_a_closed_output_pipe_is_no_failure(options: list[str], tmp_path: Path) -> None:
    """`plan ... | head`: the reader closes the pipe before the first write."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as pipe:
        assert run_in_a_process(tmp_path, pipe, *options) == (0, "")


RUN_COMMAND = """
sys.argv[1:] = [sys.argv[2], "model=none", "--ranks", "1"]
from hybrid_engine.__main__ import main
main()
"""


@pytest.mark.parametrize(
    ("command", "module"),
    [
        ("verify", "hybrid_engine.tools.cli"),
        ("verify", "pydantic"),
        ("verify", "hybrid_engine.tools.verify.cases"),
        ("run", "torch"),
        ("run", "torch.distributed.elastic.multiprocessing"),
    ],
)
def test_ctrl_c_ends_a_command_with_one_line(command: str, module: str) -> None:
    """Interrupt the import of the command line, of its dependency or of the running command."""
    result = run_python("-c", INTERRUPTED_IN + RUN_COMMAND, module, command)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "Interrupted.\n")


@pytest.mark.slow
def test_deepseek_v3_on_2048_ranks_without_any_engine(tmp_path: Path) -> None:
    """torch, Megatron and vLLM cannot be imported."""
    code = """
import sys
for name in ("torch", "megatron", "vllm"):
    sys.modules[name] = None
from hybrid_engine.tools.cli import app
app()
"""
    sizes = {"tp": 8, "pp": 16, "ep": 32, "etp": 1, "last": 1, "infer_tp": 8, "infer_ep": 32}
    arguments = *job(write_config(tmp_path, DEEPSEEK_V3), 2048, **sizes), "--json", "--rank", "77"
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    result = run_python("-c", code, "plan", *arguments, status=0, timeout=300)
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 20, (
        "takes 7 s on an idle core"
    )
    facts = with_attributes(result.stdout)
    assert facts.world_size == 2048
    assert facts.bytes.received == facts.bytes.least
    assert facts.bytes.sent.mean == pytest.approx(facts.bytes.received.mean)
    assert facts.rank.transfers > 1000
    most_at_once = facts.rank.received.network + facts.rank.sent.network
    assert 0 < facts.rank.staging < most_at_once
    assert facts.planning.peak_memory < 2**30
