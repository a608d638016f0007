"""`python -m hybrid_engine plan`: numbers, refusals, a search, and DeepSeek-V3 on 2,048 ranks."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner, Result

from hybrid_engine.layouts.parallelism import InferenceParallelism
from hybrid_engine.models.table import ModelDims
from hybrid_engine.tools.cli import app
from hybrid_engine.tools.cli.output import progress
from hybrid_engine.tools.plan.cluster_plan import token_nbytes
from tests.harness.interrupts import INTERRUPTED_IN
from tests.harness.launch import REPO_ROOT
from tests.hybrid_engine.layouts.cases import DENSE, EXPERTS
from tests.zoo.families import write_config
from tests.zoo.published_configs import DEEPSEEK_V3, LLAMA_3_8B
from tests.zoo.sizes import INFER_KEYS, TRAIN_KEYS

KEYS = {
    **{name: f"actor_config.{key}" for name, key in TRAIN_KEYS.items()},
    **{f"infer_{name}": f"generate_config.{key}" for name, key in INFER_KEYS.items()},
}


def job(model: Path | str, ranks: int, **sizes: int) -> tuple[str, ...]:
    """The arguments of a job without a file."""
    return f"model={model}", *(f"{KEYS[name]}={size}" for name, size in sizes.items()), "--ranks", str(ranks)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["plan", *arguments], env={"COLUMNS": "400"})


def facts(*arguments: str) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code in (0, 3), result.output
    found = json.loads(result.stdout)
    assert found["verdict"]["fits"] == (result.exit_code == 0)
    return found


def test_later_switches_leave_out_what_is_frozen(tmp_path: Path) -> None:
    """Embedding and head of Llama-3 8B, 128,256 x 4,096 each; of q, k and v only q is frozen, so all three are sent."""
    of_job = job(write_config(tmp_path, LLAMA_3_8B), 64, tp=8, pp=2, infer_tp=4)
    found = facts(*of_job, "--frozen", "model.embed_tokens.weight, lm_head.*, *.q_proj.weight")
    later, ends_nbytes = found["later_switches"], 2 * 2 * 128_256 * 4_096
    assert later["bytes"]["kept"]["max"] == ends_nbytes / 4
    assert later["incremental_mb"] == -(-ends_nbytes // 4 // 1024**2)
    assert later["bytes"]["received"] == later["bytes"]["least"]
    first, rest = found["bytes"], later["bytes"]
    read = (sum(moved[key]["mean"] for key in ("received", "copied_on_the_rank")) for moved in (first, rest))
    assert next(read) - next(read) == ends_nbytes / 4
    assert "later_switches" not in facts(*of_job)
    shown = run(*of_job, "--frozen", "lm_head.*").output
    assert "kept on the device" in shown
    assert "incremental: auto and" in shown
    shown = run(*of_job, "generate_config.incremental=delta", "--frozen", "lm_head.*").output
    assert "incremental: delta and" in shown
    assert "At most: delta sends less" in shown
    refused = run(*of_job, "--frozen", "lm_head.*,layers.*")
    assert refused.exit_code == 2
    assert "no tensor matches layers.*" in refused.output


def test_the_jobs_numbers(tmp_path: Path) -> None:
    """Llama-3 8B, 16.06 GB of bfloat16; half a model more on every rank than it holds."""
    model = write_config(tmp_path, LLAMA_3_8B)
    found = facts(*job(model, 64, tp=8, pp=2, infer_tp=4), "--hosts-of", "8")
    assert (found["world_size"], found["train"]["data"], found["infer"]["data"]) == (64, 4, 16)
    assert found["model"]["served_bytes"] == 2 * 8_030_261_248
    moved, before = found["bytes"], found["sequential"]
    assert moved["received"] == moved["least"]
    assert moved["received"]["mean"] == pytest.approx(moved["sent"]["mean"])
    assert moved["received_same_host"]["mean"] + moved["received_across_hosts"]["mean"] == moved["received"]["mean"]
    assert before["received"]["mean"] > 1.2 * moved["received"]["mean"], "auto saves a fifth here"
    # all but the norms is cut: M * (1/4 - 1/16)
    bound = 3 / 16 * found["model"]["served_bytes"]
    assert moved["received"]["mean"] == pytest.approx(bound, rel=1e-3)
    (gather,) = found["peers"]
    assert gather["nbytes"] == pytest.approx(15 / 16 * found["model"]["served_bytes"], rel=1e-3)
    assert found["across_hosts"]["received"] == found["across_hosts"]["least"]
    total = found["across_hosts"]["least"]["mean"]
    assert moved["received_across_hosts"]["max"] == pytest.approx(total / 8, rel=0.01), "shared out in each host"
    links = moved["received_across_hosts"]["max"] / 45e9 + moved["received_same_host"]["max"] / 400e9
    assert found["seconds"]["max"] == pytest.approx(links, rel=0.05)


def test_options_are_used(tmp_path: Path) -> None:
    model = write_config(tmp_path, DENSE)
    common = job(model, 4, tp=2)
    one_host = facts(
        *common, "generate_config.infer_rank_order=sequential", "--link-gbps", "host=1e-6,self=1e9", "--rank", "3"
    )
    assert one_host["bytes"]["received_across_hosts"]["max"] == 0
    assert one_host["seconds"]["max"] == pytest.approx(one_host["bytes"]["received"]["max"] / 1e3)
    assert one_host["rank"]["received"]["host"] == one_host["bytes"]["received"]["max"]
    assert one_host["rank"]["staging"] == 0
    assert one_host["rank"]["transfers"] > 0
    assert one_host["rank"]["peers"] == 2
    apart = facts(*common, "--hosts-of", "1", "actor_config.params_dtype=float32")
    assert apart["bytes"]["received_same_host"]["max"] == 0
    assert apart["bytes"]["received"]["max"] == 2 * one_host["bytes"]["received"]["max"]
    assert one_host["memory"]["device"]["fits"]
    assert one_host["memory"]["host"]["fits"] is None


def test_what_the_peak_depends_on_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_job, keeping = job(write_config(tmp_path, LLAMA_3_8B), 16, tp=2), "generate_config.release_weights=false"
    plain = facts(*of_job)["memory"]
    assert plain["assumed"] == {"release_weights": True, "elastic_buffers": True}
    kept = facts(*of_job, keeping)["memory"]
    assert kept["assumed"] == {"release_weights": False, "elastic_buffers": True}
    together = sum(plain["device"][name]["max"] for name in ("training", "activations", "inference"))
    assert kept["device"]["peak"]["max"] == together > plain["device"]["peak"]["max"]
    assert kept["device"]["interleaved_switch"] == kept["device"]["switch"]
    exact = f"{(together - 1) / 2**30:.17g}"
    assert facts(*of_job, "--device-gib", exact)["memory"]["device"]["fits"]
    assert not facts(*of_job, keeping, "--device-gib", exact)["memory"]["device"]["fits"]
    whole = facts(*of_job, "--no-elastic")["memory"]
    assert whole["assumed"] == {"release_weights": True, "elastic_buffers": False}
    assert whole["device"]["inelastic"] == plain["device"]["params"]
    assert whole["device"]["interleaved_switch"]["max"] == plain["device"]["switch"]["max"]
    output = run(*of_job, keeping).output.replace("\n", " ")
    assert "stay on the device while it trains (release_weights: false)" in output
    for name, installed, expected in (("sda", False, True), ("nvidia0", True, True), ("nvidia1", False, False)):
        (tmp_path / name).touch()
        monkeypatch.setattr("hybrid_engine.tools.cli.plan_command._DEVICES", tmp_path)
        found = "here" if installed else None
        monkeypatch.setattr("hybrid_engine.tools.cli.plan_command.find_spec", lambda name, found=found: found)
        assert facts(*of_job)["memory"]["assumed"]["elastic_buffers"] is expected, name
    assert facts(*of_job, "--elastic")["memory"]["assumed"]["elastic_buffers"]
    assert "Without cuda-bindings parameters leave whole" in run(*of_job).output.replace("\n", " ")


FSDP = (
    "actor_config.fsdp={sharding_strategy: HYBRID_SHARD, replicas: 2}",
    "actor_config.params_dtype=float32",
    "generate_config.compress_reshard=true",
)


def test_a_job_with_fsdp(tmp_path: Path) -> None:
    """Llama-3 8B in float32 over 16 ranks: an eighth of the rows of half a model on each; vLLM has bfloat16."""
    pytest.importorskip("transformers")
    of_job = (*job(write_config(tmp_path, LLAMA_3_8B), 16, infer_tp=4, infer_pp=2), *FSDP)
    found = facts(*of_job, "--rank", "3")
    numel = 8_030_261_248
    assert found["train"] == {"num_shards": 8, "replicas": 2, "data": 16}
    assert (found["model"]["train_dtype"], found["model"]["dtype"]) == ("float32", "bfloat16")
    assert found["remarks"] == []
    moved = found["bytes"]
    assert moved["received"] == moved["least"]
    # inference has half of the layers, a quarter of each; of that a rank holds between nothing and its own eighth
    assert (1 / 8 - 1 / 16) * 2 * numel < moved["received"]["mean"] < 1 / 8 * 2 * numel * 1.07
    (peer,) = found["peers"]
    assert peer["nbytes"] == pytest.approx(7 / 8 * 4 * numel), "gathered before they are cast"
    memory = {name: numbers["max"] for name, numbers in found["memory"]["device"].items() if isinstance(numbers, dict)}
    assert memory["params"] == memory["grads"] == memory["optimizer"] / 2 == 4 * numel / 8
    assert memory["inelastic"] == 0, "all of it splits evenly over 8 ranks"
    assert memory["interleaved_switch"] < memory["switch"] == memory["params"] + memory["inference"]
    assert found["rank"]["received"]["host"] + found["rank"]["received"]["network"] > 0
    result = run(*of_job)
    for text in ("of it leaving only at the end of a switch", "received by a gather of all weights"):
        assert text in result.output, text


@pytest.mark.parametrize("model_type", ["unheard-of", "qwen2"])
def test_models_that_transformers_does_not_build(tmp_path: Path, model_type: str) -> None:
    """A checkpoint with code of its own; and one whose config says something else than its table."""
    pytest.importorskip("transformers")
    refused = run(*job(write_config(tmp_path, {**LLAMA_3_8B, "model_type": model_type}), 2), "actor_config.fsdp={}")
    assert refused.exit_code == 2
    assert "model: transformers builds " in refused.stderr


def test_the_answer_begins_with_the_verdict(tmp_path: Path) -> None:
    of_job = job(write_config(tmp_path, LLAMA_3_8B), 16, tp=8, pp=2, infer_tp=4)
    result = run(*of_job, "--device", "H100", "--host-gib", "60")
    heads = [line.partition(":")[0] for line in result.stdout.splitlines()[:5]]
    assert heads == ["Fits", "Cache", "Left out", "Moves", "Takes"]
    assert result.exit_code == 0
    assert "a device, while vLLM generates, leaves 39.5 GiB of its 79.1 GiB" in result.stdout, "the fullest phase"
    # a token takes 2 * 2 heads * 128 * 32 layers * 2 bytes; a step 2 * 16,384 * (3 * 4,096 + 3 * 14,336 / 4) bytes and
    # 256 * 128,256 logits of 10, together 33,060 tokens
    assert facts(*of_job, "--device", "H100")["verdict"]["cache_tokens"] == 1_173_430 - 33_060
    for size in ("--device-gib", "--host-gib"):
        result = run(*of_job, size, "4")
        assert (result.exit_code, result.stdout.startswith("Does not fit: ")) == (3, True)
    verdict = facts(*of_job, "generate_config.release_weights=false", "--device-gib", "3")["verdict"]
    assert (verdict["fits"], verdict["peak_during"]) == (False, "training")
    assert verdict["room"] < verdict["room_for_cache"] < 0
    assert facts(*job(str(tmp_path), 128, tp=8), "--device-gib", "9")["verdict"]["peak_during"] == "switch"


LENGTH = "generate_config.max_model_len="


def test_a_job_whose_vllm_cannot_start_does_not_fit(tmp_path: Path) -> None:
    """Though training and the switch do. A token takes 2 * 8 heads * 128 * 32 layers * 2 bytes: 8,192 a GiB.

    Weights take 14.957 GiB, a step 2 * 8,192 * (3 * 4,096 + 3 * 14,336) bytes and 256 * 128,256 logits of 10: 1.15 GiB.
    """
    of_job = *job(write_config(tmp_path, LLAMA_3_8B), 8, tp=8), "--device-gib", "24"
    share, length = "generate_config.gpu_memory_utilization=", LENGTH + "8192"
    verdict = facts(*of_job, length)["verdict"]
    assert (verdict["fits"], verdict["cache_tokens"], verdict["least_gpu_memory_utilization"]) == (False, 0, 0.72)
    assert verdict["room"] > 0
    fits = {(0.72, 8192): True, (0.71, 8192): False, (0.71, 7642): True, (0.71, 7643): False, (0.99, 131_072): False}
    for (utilization, tokens), expected in fits.items():
        found = facts(*of_job, f"{share}{utilization}", f"{LENGTH}{tokens}")["verdict"]
        assert found["fits"] == expected, (utilization, tokens)
    assert facts(*of_job)["verdict"]["least_gpu_memory_utilization"] > 1, "the model's own length never fits"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("offload_train_param=false", "offload_train_optimizer=false"), ("offload_train_optimizer: true",)),
        ((), ("use more ranks, a larger tensor_model_parallel_size",)),
    ],
)
def test_what_would_help_is_said_of_the_side_that_does_not_fit(
    tmp_path: Path, words: tuple[str, ...], expected: tuple[str, ...]
) -> None:
    """8.03 G parameters of 2 + 4 + 12 bytes on a device of 79.1 GiB, where vLLM's weights take 15 GiB."""
    of_job = job(write_config(tmp_path, LLAMA_3_8B), 1)
    result = run(*of_job, "--device", "h100", *(f"generate_config.{word}" for word in words), f"{LENGTH}4096")
    sentence = result.stdout.replace("\n", " ").partition("Left out:")[0]
    assert sentence.startswith("Does not fit: the peak of 1"), sentence
    assert "while training, is" in sentence
    for text in expected:
        assert text in sentence
    assert "infer_tensor_parallel_size" not in sentence


def test_what_the_configuration_leaves_on_the_device_counts(tmp_path: Path) -> None:
    """`offload_train_optimizer: false` leaves 12 bytes of each shard beside a switch, and takes them off the host."""
    of_job = job(write_config(tmp_path, LLAMA_3_8B), 16, tp=8, pp=2, infer_tp=1)
    plain, staying = facts(*of_job), facts(*of_job, "generate_config.offload_train_optimizer=false")
    before, after = plain["memory"]["device"], staying["memory"]["device"]
    assert plain["verdict"]["peak_during"] == staying["verdict"]["peak_during"] == "generate", "in vLLM's share"
    assert after["peak"]["max"] == before["peak"]["max"] + before["optimizer"]["max"]
    params = before["params"]["max"]
    assert staying["memory"]["host"]["per_rank"]["max"] == params
    assert plain["memory"]["host"]["per_rank"]["max"] == params + before["optimizer"]["max"]
    critic = facts(*of_job, "critic_config={offload: false}")["memory"]["device"]
    assert critic["peak"]["max"] > before["training"]["max"] + before["training"]["max"] / 2


def test_what_a_job_would_refuse_is_said_beside_the_plan(tmp_path: Path) -> None:
    found = facts(*job(write_config(tmp_path, EXPERTS), 6, tp=2, ep=3, etp=1, infer_tp=3, infer_ep=6))
    (remark,) = found["remarks"]
    assert "refused: actor_config.sequence_parallel: false with TP 2" in remark
    lora = facts(*job(write_config(tmp_path, LLAMA_3_8B), 1), "actor_config.lora={}")
    assert "as if every weight was trained" in lora["remarks"][0]


def test_the_cache_is_counted_by_what_attention_keeps() -> None:
    infer = InferenceParallelism(8, tensor=4, pipeline=2)
    heads = ModelDims(5, 64, 128, 100, num_heads=8, num_kv_heads=2, head_dim=16, tied_embeddings=False)
    assert token_nbytes(heads, infer, 2) == 3 * 2 * 1 * 16 * 2, "three layers; a head for each two ranks"
    assert token_nbytes(heads, InferenceParallelism(1), 4) == 5 * 2 * 2 * 16 * 4
    assert token_nbytes(replace(heads, latent_kv_size=40), infer, 2) == 3 * 40 * 2, "whole on every rank"


def test_a_narrow_cache_has_twice_the_tokens(tmp_path: Path) -> None:
    of_job = *job(write_config(tmp_path, LLAMA_3_8B), 8, tp=8), "generate_config.kv_cache_mb=2048"
    plain, narrow = (facts(*of_job, *more)["verdict"] for more in ((), ("generate_config.vllm.kv_cache_dtype=fp8",)))
    assert narrow["cache_tokens"] == 2 * plain["cache_tokens"] == 2 * 2 * 8192


def test_a_checkpoint_that_is_stored_quantised_is_named(tmp_path: Path) -> None:
    model = write_config(tmp_path, {**LLAMA_3_8B, "quantization_config": {"quant_method": "fp8"}})
    for found in (facts(*job(model, 8, tp=8)), json.loads(run(*job(model, 8), "--search", "--json").stdout)):
        assert any("stored quantised ('fp8')" in remark for remark in found["remarks"])


def test_a_search_fits_80_columns_and_its_keys_can_be_pasted(tmp_path: Path) -> None:
    of_job = *job(write_config(tmp_path, LLAMA_3_8B), 16), LENGTH + "8192", "--device", "h100"
    shown = CliRunner().invoke(app, ["plan", *of_job, "--search"], env={"COLUMNS": "80"})
    assert shown.exit_code == 0
    before, _, after = shown.stdout.partition("# 1\n")
    assert all(len(line) <= 80 for line in before.splitlines())
    assert "…" not in before
    assert all(head in before for head in ("training", "generation", "state", "act.", "tokens", "recv.", "cost"))
    found = json.loads(run(*of_job, "--search", "--json").stdout)
    first, (pasted, *_) = found["rows"][0], after.split("# 2\n")
    (tmp_path / "job.yaml").write_text(pasted)
    row = facts(str(tmp_path / "job.yaml"), *of_job, "--host-gib", "1e5")
    assert (row["train"], row["infer"]) == (first["train"], first["infer"])
    memory, verdict = row["memory"]["device"], row["verdict"]
    terms = {"training": memory["training"], "activations": memory["activations"], "peak": memory["peak"]}
    assert {name: numbers["max"] for name, numbers in terms.items()} == {name: first[name] for name in terms}
    assert (verdict["cache_tokens"], verdict["fits"]) == (first["cache_tokens"], True)
    assert (row["seconds"]["max"], row["bytes"]["received"]["mean"]) == (first["seconds"], first["received"])


def test_a_search_says_what_is_lacking(tmp_path: Path) -> None:
    of_job = *job(write_config(tmp_path, LLAMA_3_8B), 2), LENGTH + "1024", "--device", "a100-40", "--search"
    result = run(*of_job)
    assert result.exit_code == 3
    assert "Does not fit. The nearest pair:" in result.stdout
    assert "GiB for training on a device; a device has 39.3 GiB" in result.stdout
    assert "--ranks 4" in result.stdout
    nearest = json.loads(run(*of_job, "--json").stdout)["nearest"]
    assert nearest["lacks"].keys() == {"training"}
    assert nearest["mended_by"] == ["--ranks 4"]
    refused = run(*of_job, "--rank", "1", "--frozen", "lm_head.*")
    assert refused.exit_code == 2
    refused_options = {line[4:].partition(":")[0] for line in refused.stderr.splitlines()}
    assert {"--rank", "--frozen"} <= refused_options


def test_the_tables_have_the_numbers(tmp_path: Path) -> None:
    sizes = {"tp": 2, "ep": 2, "etp": 1, "infer_tp": 3, "infer_ep": 6}
    result = run(*job(write_config(tmp_path, EXPERTS), 6, **sizes), "--rank", "1")
    assert result.exit_code == 0, result.output
    for text in ("What a switch moves, MiB by rank", "Memory, MiB by rank", "self 2000, host 400", "Rank 1"):
        assert text in result.output, text


def test_a_file_is_read_and_keys_are_set_in_it(tmp_path: Path) -> None:
    """The same as without the file, wherever the command is called; `model` begins at the file."""
    model, file = write_config(tmp_path / "model", DENSE), tmp_path / "job=1.yaml"
    file.write_text("model: model\nactor_config:\n  tensor_model_parallel_size: 2\n  optimizer: {lr: 1.0e-5}\n")
    keys = ("generate_config.infer_tensor_parallel_size=4", "actor_config.pipeline_model_parallel_size=2")
    expected = facts(*job(model, 4, tp=2, pp=2, infer_tp=4))
    found = facts(str(file), *keys, "--ranks", "4")
    assert {**found, "planning": 0} == {**expected, "planning": 0}


def test_words_that_are_no_configuration(tmp_path: Path) -> None:
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
        result = run("--ranks", "2", *words)
        assert result.exit_code == 2
        assert f"{key}: " in result.stderr, (words, result.stderr)


def test_a_model_is_a_directory_its_config_or_an_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_config(tmp_path, DENSE)
    expected = facts(*job(directory, 2, infer_tp=2))["bytes"]
    assert facts(*job(f"{directory}/config.json", 2, infer_tp=2))["bytes"] == expected
    pytest.importorskip("huggingface_hub")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: {"org/small-1.5b": directory}[name])
    assert facts(*job("org/small-1.5b", 2, infer_tp=2))["bytes"] == expected


def test_everything_impossible_is_said_at_once(tmp_path: Path) -> None:
    result = run(
        *job(write_config(tmp_path, DENSE), 6, tp=5, pp=3, ep=2, infer_tp=3, infer_pp=10, infer_ep=5),
        *("--hosts-of", "0", "--link-gbps", "host=fast", "--rank", "99"),
    )
    assert (result.exit_code, result.stdout) == (2, "")
    keys = {line.removeprefix("  - ").partition(":")[0] for line in result.stderr.splitlines()[1:]}
    sizes = {KEYS[name] for name in ("tp", "pp", "ep", "infer_pp", "infer_ep")}
    assert keys >= {*sizes, "--hosts-of", "--link-gbps", "--rank"}


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *((option, value) for option in ("--hosts-of", "--ranks", "--rank") for value in ("８", "1_0", "1" * 30)),
        *((option, value) for option in ("--device-gib", "--host-gib") for value in ("inf", "nan", "1e300")),
        *(("--link-gbps", value) for value in ("host=inf", "host=nan", "host=-1")),
        ("--device", "h1000"),
    ],
)
def test_numbers_that_cannot_be_are_refused_at_once(option: str, value: str, tmp_path: Path) -> None:
    result = run(*job(write_config(tmp_path, DENSE), 1), option, value)
    assert result.exit_code == 2
    assert option in result.stderr
    assert not result.stdout


@pytest.mark.parametrize("command", ["plan", "verify", "env"])
def test_help_cuts_nothing_off_in_a_narrow_terminal(command: str) -> None:
    result = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "80"})
    options = {name for one in get_command(app).commands[command].params for name in (*one.opts, *one.secondary_opts)}
    assert {name for name in options if name.startswith("--") and name not in result.stdout.split()} <= {"--help"}
    assert "…" not in result.stdout
    assert all(len(line) <= 80 for line in result.stdout.splitlines())


def test_an_answer_that_cannot_be_written_ends_in_a_sentence(tmp_path: Path) -> None:
    """A real full device: what is left in the buffers must not fail again when Python ends."""
    command = (sys.executable, "-m", "hybrid_engine", "plan", *job(write_config(tmp_path, DENSE), 1), "--json")
    with open("/dev/full", "w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (2, "writing the answer: No space left on device\n")


@pytest.mark.parametrize("options", [["--json"], []], ids=["json", "tables"])
def test_a_reader_that_has_seen_enough_is_no_failure(options: list[str], tmp_path: Path) -> None:
    """`plan ... | head`: here the reader is gone before anything is written."""
    command = (sys.executable, "-m", "hybrid_engine", "plan", *job(write_config(tmp_path, DENSE), 1), *options)
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as pipe:
        ended = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_is_shown_on_terminals_only(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", str(int(is_terminal)))
    with progress() as doing:
        doing("counting bytes")
    found = capsys.readouterr()
    assert ("counting bytes" in found.err) == is_terminal
    assert found.out == ""


INTERRUPTED = """
sys.argv[1:] = ["verify", "model=none", "--ranks", "1"]
from hybrid_engine.__main__ import main
main()
"""


@pytest.mark.parametrize("module", ["hybrid_engine.tools.cli", "pydantic", "hybrid_engine.tools.verify.cases"])
def test_ctrl_c_ends_a_command_with_one_line(module: str) -> None:
    """Where a module is imported: of the command line, of what it imports, and of the command that is running."""
    ended = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_IN + INTERRUPTED, module],
        cwd=REPO_ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "Interrupted.\n")


@pytest.mark.slow
def test_deepseek_v3_on_2048_ranks_without_any_engine(tmp_path: Path) -> None:
    """Also where torch, Megatron and vLLM are not installed."""
    code = """
import sys
for name in ("torch", "megatron", "vllm", "transformers"):
    sys.modules[name] = None
from hybrid_engine.tools.cli import app
app()
"""
    sizes = {"tp": 8, "pp": 16, "ep": 32, "etp": 1, "last": 1, "infer_tp": 8, "infer_ep": 32}
    arguments = *job(write_config(tmp_path, DEEPSEEK_V3), 2048, **sizes), "--json", "--rank", "77"
    command = [sys.executable, "-c", code, "plan", *arguments]
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 20, "7 s of a quiet core"
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["world_size"] == 2048
    assert found["bytes"]["received"] == found["bytes"]["least"]
    assert found["bytes"]["sent"]["mean"] == pytest.approx(found["bytes"]["received"]["mean"])
    assert found["rank"]["transfers"] > 1000
    most_at_once = sum(found["rank"][way]["network"] for way in ("received", "sent"))
    assert 0 < found["rank"]["staging"] < most_at_once
    assert found["planning"]["peak_memory"] < 2**30
