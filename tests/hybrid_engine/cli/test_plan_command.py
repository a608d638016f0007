"""`python -m hybrid_engine plan`: numbers, refusals, the page, and DeepSeek-V3 on 2,048 ranks."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner, Result

from hybrid_engine.advisor.cache_room import token_nbytes
from hybrid_engine.cli import app
from hybrid_engine.cli.output import progress
from hybrid_engine.layouts.parallelism import InferenceParallelism
from hybrid_engine.models.table import ModelDims
from tests.hybrid_engine.layouts.cases import DENSE, EXPERTS
from tests.zoo.published_configs import DEEPSEEK_V3, LLAMA_3_8B


def saved(directory: Path, config: dict[str, Any]) -> str:
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


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
    job = "--model", saved(tmp_path, LLAMA_3_8B), "--train", "tp=8,pp=2,dp=4", "--infer", "tp=4,dp=16"
    found = facts(*job, "--frozen", "model.embed_tokens.weight, lm_head.*, *.q_proj.weight")
    later, ends_nbytes = found["later_switches"], 2 * 2 * 128_256 * 4_096
    assert later["bytes"]["kept"]["max"] == ends_nbytes / 4
    assert later["incremental_mb"] == -(-ends_nbytes // 4 // 1024**2)
    assert later["bytes"]["received"] == later["bytes"]["least"]
    first, rest = found["bytes"], later["bytes"]
    read = (sum(moved[key]["mean"] for key in ("received", "copied_on_the_rank")) for moved in (first, rest))
    assert next(read) - next(read) == ends_nbytes / 4
    assert "later_switches" not in facts(*job)
    assert "kept on the device" in run(*job, "--frozen", "lm_head.*").output
    refused = run(*job, "--frozen", "lm_head.*,layers.*")
    assert refused.exit_code == 2
    assert "no tensor matches layers.*" in refused.output


def test_the_jobs_numbers(tmp_path: Path) -> None:
    """Llama-3 8B, 16.06 GB of bfloat16; half a model more on every rank than it holds."""
    model = saved(tmp_path, LLAMA_3_8B)
    found = facts("--model", model, "--train", "tp=8,pp=2,dp=4", "--infer", "tp=4,dp=16", "--hosts-of", "8")
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
    gather, broadcast, strided = found["peers"]
    assert gather["nbytes"] == pytest.approx(15 / 16 * found["model"]["served_bytes"], rel=1e-3)
    assert broadcast["nbytes"] == pytest.approx(bound)
    assert strided["nbytes"] == pytest.approx(bound)
    assert found["across_hosts"]["received"] == found["across_hosts"]["least"]
    total = found["across_hosts"]["least"]["mean"]
    assert moved["received_across_hosts"]["max"] == pytest.approx(total / 8, rel=0.01), "shared out in each host"
    links = moved["received_across_hosts"]["max"] / 45e9 + moved["received_same_host"]["max"] / 400e9
    assert found["seconds"]["max"] == pytest.approx(links, rel=0.05)


def test_options_are_used(tmp_path: Path) -> None:
    model = saved(tmp_path, DENSE)
    common = ("--model", model, "--train", "tp=2,dp=2", "--infer", "tp=1")
    one_host = facts(*common, "--order", "sequential", "--link-gbps", "host=1e-6,self=1e9", "--rank", "3")
    assert one_host["bytes"]["received_across_hosts"]["max"] == 0
    assert one_host["seconds"]["max"] == pytest.approx(one_host["bytes"]["received"]["max"] / 1e3)
    assert one_host["rank"]["received"]["host"] == one_host["bytes"]["received"]["max"]
    assert one_host["rank"]["staging"] == 0
    assert one_host["rank"]["transfers"] > 0
    assert one_host["rank"]["peers"] == 2
    apart = facts(*common, "--hosts-of", "1", "--dtype", "float32")
    assert apart["bytes"]["received_same_host"]["max"] == 0
    assert apart["bytes"]["received"]["max"] == 2 * one_host["bytes"]["received"]["max"]
    tiny = facts(*common, "--device-gib", "1e-5", "--host-gib", "1e-5")["memory"]
    assert (tiny["device"]["fits"], tiny["host"]["fits"]) == (False, False)
    assert one_host["memory"]["device"]["fits"]
    assert one_host["memory"]["host"]["fits"] is None


def test_what_the_peak_depends_on_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = ("--model", saved(tmp_path, LLAMA_3_8B), "--train", "tp=2,dp=8", "--infer", "tp=1")
    plain = facts(*job)["memory"]
    assert plain["assumed"] == {"release_weights": True, "elastic_buffers": True}
    kept = facts(*job, "--no-release-weights")["memory"]
    assert kept["assumed"] == {"release_weights": False, "elastic_buffers": True}
    together = sum(plain["device"][name]["max"] for name in ("training", "inference"))
    assert kept["device"]["peak"]["max"] == together > plain["device"]["peak"]["max"]
    exact = f"{(together - 1) / 2**30:.17g}"
    assert facts(*job, "--device-gib", exact)["memory"]["device"]["fits"]
    assert not facts(*job, "--no-release-weights", "--device-gib", exact)["memory"]["device"]["fits"]
    whole = facts(*job, "--no-elastic")["memory"]
    assert whole["assumed"] == {"release_weights": True, "elastic_buffers": False}
    assert whole["device"]["inelastic"] == plain["device"]["params"]
    assert whole["device"]["interleaved_switch"]["max"] == plain["device"]["switch"]["max"]
    output, page = run(*job, "--no-release-weights", "--html", str(tmp_path / "page.html")).output, "page.html"
    for text in (output, (tmp_path / page).read_text()):
        assert "stay on the device while it trains (release_weights: false)" in text.replace("\n", " ")
    for name, installed, expected in (("sda", False, True), ("nvidia0", True, True), ("nvidia1", False, False)):
        (tmp_path / name).touch()
        monkeypatch.setattr("hybrid_engine.cli.plan_command._DEVICES", tmp_path)
        found = "here" if installed else None
        monkeypatch.setattr("hybrid_engine.cli.plan_command.find_spec", lambda name, found=found: found)
        assert facts(*job)["memory"]["assumed"]["elastic_buffers"] is expected, name
    assert facts(*job, "--elastic")["memory"]["assumed"]["elastic_buffers"]
    assert "Without cuda-bindings parameters leave whole" in run(*job).output.replace("\n", " ")


def test_a_job_with_fsdp(tmp_path: Path) -> None:
    """Llama-3 8B in float32 over 16 ranks: an eighth of the rows of half a model on each; vLLM has bfloat16."""
    pytest.importorskip("transformers")
    model, page = saved(tmp_path, LLAMA_3_8B), tmp_path / "page.html"
    job = ("--model", model, "--train", "fsdp=8,replicas=2", "--infer", "tp=4,pp=2")
    found = facts(*job, "--html", str(page), "--rank", "3")
    numel = 8_030_261_248
    assert found["train"] == {"num_shards": 8, "replicas": 2, "data": 16}
    assert (found["model"]["train_dtype"], found["model"]["dtype"]) == ("float32", "bfloat16")
    moved = found["bytes"]
    assert moved["received"] == moved["least"]
    # inference has half of the layers, a quarter of each; of that a rank holds between nothing and its own eighth
    assert (1 / 8 - 1 / 16) * 2 * numel < moved["received"]["mean"] < 1 / 8 * 2 * numel * 1.07
    (peer,) = found["peers"]
    assert peer["system"] == "verl, TRL: full_tensor() of each parameter"
    assert peer["nbytes"] == pytest.approx(7 / 8 * 4 * numel), "gathered before they are cast"
    memory = {name: numbers["max"] for name, numbers in found["memory"]["device"].items() if isinstance(numbers, dict)}
    assert memory["params"] == memory["grads"] == memory["optimizer"] / 2 == 4 * numel / 8
    assert memory["inelastic"] == 0, "all of it splits evenly over 8 ranks"
    assert memory["interleaved_switch"] < memory["switch"] == memory["params"] + memory["inference"]
    assert found["rank"]["received"]["host"] + found["rank"]["received"]["network"] > 0
    content = Page(page.read_text())
    assert "verl, TRL: full_tensor() of each parameter" in content.cells
    assert len(content.data["pictures"][0]["columns"]) == 8, "replicas are one"
    result = run(*job, "--train-dtype", "bfloat16")
    saved_share = f"{1 - moved['received']['mean'] / (peer['nbytes'] / 2):.1%}"
    for text in ("of it leaving only at the end of a switch", "gradients, bfloat16", "saved here", saved_share):
        assert text in result.output, text
    narrow = run(*job, "--dtype", "float32", "--train-dtype", "bfloat16")
    assert "--train-dtype: bfloat16, but inference has float32" in narrow.stderr


def test_models_that_transformers_does_not_build(tmp_path: Path) -> None:
    """A checkpoint with code of its own; and one whose config says something else than its table."""
    pytest.importorskip("transformers")
    job = ("--train", "fsdp=2", "--infer", "tp=2")
    foreign = run("--model", saved(tmp_path, {**LLAMA_3_8B, "model_type": "unheard-of"}), *job)
    assert foreign.exit_code == 2
    assert "--model: transformers builds no model from its config.json: ValueError: " in foreign.stderr
    other = run("--model", saved(tmp_path, {**LLAMA_3_8B, "model_type": "qwen2"}), *job)
    assert other.exit_code == 2
    assert "--model: transformers builds another model from it: " in other.stderr
    assert "model.layers.0.self_attn.q_proj.bias: no tensor of a checkpoint of this config" in other.stderr


def test_the_answer_begins_with_the_verdict(tmp_path: Path) -> None:
    job = "--model", saved(tmp_path, LLAMA_3_8B), "--train", "tp=8,pp=2", "--infer", "tp=4"
    result = run(*job, "--device", "H100", "--host-gib", "60")
    assert result.exit_code == 0, result.output
    fits, cache, left_out, moves, takes, *_ = result.stdout.splitlines()
    device, host = fits.removesuffix(".").split("; ")
    assert device == "Fits: the peak of 8.42 GiB on a device, while training, leaves 70.7 GiB of its 79.1 GiB"
    assert host == "52.4 GiB of offloaded training state fit a host of 60 GiB"
    # 2 * 2 heads * 128 * 32 layers * 2 bytes a token
    assert cache == (
        "Cache: vLLM's 39.5 GiB (gpu_memory_utilization 0.5) hold its weights of 3.74 GiB and a KV cache of 35.8 GiB: "
        "1,173,430 tokens, 8.95 sequences of 131,072."
    )
    assert left_out.startswith("Left out: the peak does not count activations, KV cache, CUDA context and ")
    assert "2.81 GiB to a rank on average, the least that these two layouts allow, 80% less than all" in moves
    assert re.fullmatch(r"Takes: 0\.0\d+ s for the transfers of the slowest rank .*assumed, not measured\.", takes)
    result = run(*job, "--device-gib", "4", "--host-gib", "50")
    assert result.exit_code == 3
    device, cache, host = result.stdout.splitlines()[0].removesuffix(".").split("; ")
    assert cache.startswith("vLLM's 2 GiB (gpu_memory_utilization 0.5) are less than its weights of 3.74 GiB")
    assert device == "Does not fit: the peak of 8.42 GiB on a device, while training, is 4.42 GiB more than its 4 GiB"
    assert host == "52.4 GiB of offloaded training state do not fit a host of 50 GiB"
    result = run(*job, "--host-gib", "50")
    assert result.exit_code == 3, "a host that is too small is enough"
    assert result.stdout.startswith(
        "Does not fit: 52.4 GiB of offloaded training state do not fit a host of 50 GiB; the"
    )
    verdict = facts(*job, "--no-release-weights", "--device-gib", "3")["verdict"]
    assert (verdict["fits"], verdict["peak_during"]) == (False, "training")
    assert verdict["room"] < verdict["room_for_cache"] < 0


def test_the_verdict_is_of_the_switch_where_that_is_higher(tmp_path: Path) -> None:
    result = run(
        "--model", saved(tmp_path, LLAMA_3_8B), "--train", "tp=8,dp=16", "--infer", "tp=1", "--device-gib", "9"
    )
    assert result.exit_code == 3
    assert "on a device, at the switch, is " in result.stdout.splitlines()[0]


def test_a_job_whose_vllm_cannot_start_does_not_fit(tmp_path: Path) -> None:
    """Though training and the switch do: vLLM's weights and its cache are within its share of the device."""
    job = "--model", saved(tmp_path, LLAMA_3_8B), "--train", "tp=8", "--infer", "tp=1,dp=8", "--device-gib", "24"
    short = *job, "--max-model-len", "8192"  # 2 * 8 heads * 128 * 32 layers * 2 bytes a token: 1 GiB
    result = run(*short)
    assert result.exit_code == 3
    assert result.stdout.startswith(
        "Does not fit: vLLM's 12.0 GiB (gpu_memory_utilization 0.5) are less than its weights of 15.0 GiB; it starts "
        "from 0.67, or with a lower max_model_len; the peak of 16.8 GiB on a device, while training, leaves 7.16 GiB"
    )
    assert run(*short, "--gpu-memory-utilization", "0.67").exit_code == 0
    nearly = run(*short, "--gpu-memory-utilization", "0.66")
    assert nearly.exit_code == 3
    assert "a KV cache of 0.882 GiB: 7,229 tokens, 0.882 sequences of 8,192; it starts from 0.67" in nearly.stdout
    assert run(*job, "--gpu-memory-utilization", "0.66", "--max-model-len", "7229").exit_code == 0
    verdict = facts(*short)["verdict"]
    assert (verdict["fits"], verdict["cache_tokens"], verdict["least_gpu_memory_utilization"]) == (False, 0, 0.67)
    whole = run(*job)  # 131,072 tokens
    assert whole.exit_code == 3
    assert "No share of the device is enough: use a larger --infer tp or pp, or a lower max_model_len" in whole.stdout


def test_the_cache_is_counted_by_what_attention_keeps() -> None:
    infer = InferenceParallelism(8, tensor=4, pipeline=2)
    heads = ModelDims(5, 64, 128, 100, num_heads=8, num_kv_heads=2, head_dim=16, tied_embeddings=False)
    assert token_nbytes(heads, infer, "bfloat16") == 3 * 2 * 1 * 16 * 2, "three layers; a head for each two ranks"
    assert token_nbytes(heads, InferenceParallelism(1), "float32") == 5 * 2 * 2 * 16 * 4
    assert token_nbytes(replace(heads, latent_kv_size=40), infer, "bfloat16") == 3 * 40 * 2, "whole on every rank"


def test_the_tables_say_what_the_engine_does(tmp_path: Path) -> None:
    result = run(
        "--model", saved(tmp_path, EXPERTS), "--train", "tp=2,ep=2,etp=1,dp=3", "--infer", "tp=3,ep=6", "--rank", "1"
    )
    assert result.exit_code == 0, result.output
    for text in (
        "What a switch moves, MiB by rank: 6 ranks on 1 host ",
        "Memory, MiB by rank",
        "of it from other hosts",
        "verl with mbridge: gather",
        "M: bytes of the model; held: what of them a rank holds in training; t, p: tensor",
        "expert parallelism is not described",
        "a switch, if vLLM's weights came all at once",
        "a switch, as it is: bucket by bucket",
        "self 2000, host 400, network 45",
        "GiB are 2^30 bytes, MiB 2^20",
        "Rank 1",
    ):
        assert text in result.output, text


@pytest.mark.parametrize(
    ("train", "infer", "num_ranks"),
    [
        ("tp=2", "tp=2", 2),
        ("tp=4,pp=2", "tp=2", 8),
        ("tp=2", "tp=4,pp=3", 12),
        ("pp=2", "tp=3", 6),
        ("tp=1", "tp=1", 1),
    ],
)
def test_without_dp_there_are_as_few_ranks_as_both_can_share_out(
    train: str, infer: str, num_ranks: int, tmp_path: Path
) -> None:
    assert facts("--model", saved(tmp_path, DENSE), "--train", train, "--infer", infer)["world_size"] == num_ranks


def test_a_model_is_a_directory_its_config_or_an_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = "--train", "dp=2", "--infer", "tp=2"
    directory = saved(tmp_path, DENSE)
    expected = facts("--model", directory, *job)["bytes"]
    assert facts("--model", f"{directory}/config.json", *job)["bytes"] == expected
    pytest.importorskip("huggingface_hub")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: {"org/small-1.5b": directory}[name])
    assert facts("--model", "org/small-1.5b", *job)["bytes"] == expected


def test_an_id_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("huggingface_hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    result = run("--model", "org/is-not-cached", "--train", "dp=2", "--infer", "tp=2")
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: --model: org/is-not-cached is not a directory, nor complete in the cache")


def test_everything_impossible_is_said_at_once(tmp_path: Path) -> None:
    model = saved(tmp_path, DENSE)
    page = str(tmp_path / "missing" / "page.html")
    result = run(
        *("--model", model, "--train", "tp=5,pp=3,dp=2,vpp=2,ep=2", "--infer", "tp=3,pp=10,ep=5"),
        *("--hosts-of", "0", "--dtype", "int3", "--link-gbps", "host=fast", "--html", page, "--rank", "99"),
    )
    assert result.exit_code == 2
    assert not result.stdout
    assert result.stderr.startswith("9 errors:\n  - ")
    for key, problem in {
        "--train tp": "5 does not divide the number of attention heads 12",
        "--train pp": "4 layers do not divide into 3 stages",
        "--train ep": "2, but the model has no experts",
        "--infer pp": "10 stages for 4 layers",
        "--infer ep": "5 is not a multiple of TP 3",
        "--hosts-of": "0 is not a valid size",
        "--dtype": "unknown dtype 'int3'",
        "--link-gbps": "'host=fast' cannot be read",
        "--html": "page.html cannot be written: No such file or directory",
    }.items():
        assert re.search(f"- {re.escape(key)}: .*{re.escape(problem)}", result.stderr), (key, result.stderr)


@pytest.mark.parametrize(
    ("train", "infer", "text"),
    [
        (
            "tp=5",
            "tp=2",
            "Error: --train tp: 5 does not divide the number of attention heads 12; "
            "5 does not divide the 72 indices of model.layers.0.self_attn.q_proj.weight; and 3 more. "
            "Use one of 1, 2, 3, 4, 6, 12\n",
        ),
        ("pp=3", "tp=1", "Error: --train pp: 4 layers do not divide into 3 stages. Try first=1,last=1, or a divisor"),
        ("tp=4", "tp=8", "Error: --infer tp: 8 does not divide the number of attention heads 12; "),
        ("tp=2,dp=3", "tp=4", "--infer tp: TP 4 x PP 1 = 4 does not divide the world size 6. Use one of 1, 2, 3, 6"),
        ("tp=2,dp=3", "tp=2,dp=4", "--infer dp: training has 6 ranks, inference 8"),
        ("tp=2 pp=2", "tp=2", "--train tp: '2 pp=2' cannot be read. Separate sizes by commas: tp=2,pp=2"),
        ("", "tp=2", "--train: names no size. For one rank pass tp=1"),
        ("tp=5", "tp=5,xx=2", "--train tp: 5 does not divide the number of attention heads"),
        ("tp=5", "tp=5,xx=2", "--infer xx: unknown key"),
        ("tp=2,dp=2,pd=1", "tp=2", "--train pd: unknown key. Known keys: tp, pp, vpp"),
        ("tp=two,dp=1", "tp=0", "--train tp: 'two' cannot be read"),
        ("tp=two,dp=1", "tp=0", "--infer tp: 0 is not a valid size"),
        ("tp=1,tp=2,dp=1", "tp=1", "--train tp: given twice"),
        ("fsdp=2", "tp=2,dp=2", "--infer dp: training has 2 ranks, inference 4"),
        ("fsdp=2,replicas=2", "tp=3,dp=1", "--infer dp: training has 4 ranks, inference 3"),
        ("fsdp=4,tp=2", "tp=2", "--train tp: Megatron's, but with fsdp or replicas FSDP2 trains. Known keys: fsdp"),
        ("replicas=2", "tp=2", "--train fsdp: not given. Say how many ranks shard a parameter"),
        ("fsdp=0,shards=2", "tp=2", "--train fsdp: 0 is not a valid size"),
        ("fsdp=0,shards=2", "tp=2", "--train shards: unknown key. Known keys: fsdp, replicas"),
        ("shards=2", "tp=2", "--train shards: unknown key. Known keys: tp, pp"),
        ("dp=2,layout=Et|ttL,pp=2", "tp=1", "--train layout: 3 layers (t), the model has 4"),
        ("dp=2,first=1,embedding=1,pp=2", "tp=1", "--train embedding: set beside the number of layers"),
        ("dp=4,etp=3", "tp=1", "--train etp: 3, but the model has no experts"),
        ("dp=4", "tp=12", "--infer tp: TP 12 x PP 1 = 12 does not divide the world size 4. Use one of 1, 2, 4"),
        *(("dp=1,tp=" + size, "tp=1", f"--train tp: '{size}' cannot be read") for size in ("２", "0_2", "1e1", "+1")),
        ("dp=1,noop=0_1", "tp=1", "--train noop: '0_1' cannot be read"),
        ("dp=1000000000", "tp=1", "--train dp: 1000000000 is not a valid size"),  # each before anything is planned
        ("dp=1000000", "tp=1", "--train dp: 1000000 ranks. Use sizes that make at most 131072"),
        ("dp=1,pp=1000000000", "tp=1", "--train pp: 1000000000 is not a valid size"),
        ("dp=1,layout=Et*999999999|L", "tp=1", "--train layout: 'Et*999999999|L' stands for more than 100000 layers"),
        ("dp=4,noop=9", "tp=4", "--train noop: [9] of 5 positions, counted from 0"),
    ],
)
def test_impossible_sizes(tmp_path: Path, train: str, infer: str, text: str) -> None:
    result = run("--model", saved(tmp_path, DENSE), "--train", train, "--infer", infer)
    assert result.exit_code == 2
    assert text in result.stderr


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("--bucket-mb", value) for value in ("1" + 23 * "0", "０", "2_0", "0", "-1", "2000000")),
        *((option, value) for option in ("--hosts-of", "--rank") for value in ("８", "1_0", "1" * 30)),
        *((option, value) for option in ("--device-gib", "--host-gib") for value in ("inf", "nan", "1e300")),
        *(("--link-gbps", value) for value in ("host=inf", "host=nan", "host=-1")),
        *(("--prefetch-gbps", value) for value in ("0", "inf", "nan")),
        ("--device", "h1000"),
        *(("--gpu-memory-utilization", value) for value in ("0", "1.1", "nan")),
    ],
)
def test_numbers_that_cannot_be_are_refused_at_once(option: str, value: str, tmp_path: Path) -> None:
    result = run("--model", saved(tmp_path, DENSE), "--train", "dp=1", "--infer", "tp=1", option, value)
    assert result.exit_code == 2
    assert option in result.stderr
    assert not result.stdout


@pytest.mark.parametrize("command", ["plan", "verify", "check-gpu", "example"])
def test_help_cuts_nothing_off_in_a_narrow_terminal(command: str) -> None:
    result = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "80"})
    options = {name for one in get_command(app).commands[command].params for name in (*one.opts, *one.secondary_opts)}
    assert {name for name in options if name.startswith("--") and name not in result.stdout.split()} <= {"--help"}
    assert "…" not in result.stdout
    assert all(len(line) <= 80 for line in result.stdout.splitlines())


def test_prefetch_is_estimated_when_asked(tmp_path: Path) -> None:
    arguments = ("--model", saved(tmp_path, DENSE), "--train", "dp=2", "--infer", "tp=2")
    plain, ahead = facts(*arguments), facts(*arguments, "--prefetch-gbps", "50")
    estimate = ahead.pop("prefetch")
    assert plain.keys() == ahead.keys()
    assert estimate["bytes"]["returning"] == plain["memory"]["host"]["per_rank"]
    assert estimate["seconds_left"]["off"] == estimate["bytes"]["returning"]["max"] / 50e9
    assert estimate["seconds_left"]["with_room"] == 0
    tables = run(*arguments, "--prefetch-gbps", "50").stdout
    assert "with a large prefetch_mb" in tables


@pytest.mark.parametrize("place", [".", "/dev/full", "/proc/page.html", "x" * 300, "missing/page.html"])
def test_a_page_that_cannot_be_written_is_refused_before_planning(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybrid_engine.cli.plan_command.plan_job", lambda *_, **__: pytest.fail("it was planned"))
    monkeypatch.chdir(tmp_path)
    result = run("--model", saved(tmp_path, DENSE), "--train", "dp=1", "--infer", "tp=1", "--html", place)
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: --html: ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json"]


def test_an_answer_that_cannot_be_written_ends_in_a_sentence(tmp_path: Path) -> None:
    """A real full device: what is left in the buffers must not fail again when Python ends."""
    command = (sys.executable, "-m", "hybrid_engine", "plan", "--model", saved(tmp_path, DENSE), "--json")
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [*command, "--train", "dp=1", "--infer", "tp=1"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert (ended.returncode, ended.stderr) == (2, "writing the answer: No space left on device\n")


@pytest.mark.parametrize("options", [["--json"], []], ids=["json", "tables"])
def test_a_reader_that_has_seen_enough_is_no_failure(options: list[str], tmp_path: Path) -> None:
    """`plan ... | head`: here the reader is gone before anything is written."""
    command = (sys.executable, "-m", "hybrid_engine", "plan", "--model", saved(tmp_path, DENSE), *options)
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as pipe:
        ended = subprocess.run(
            [*command, "--train", "dp=1", "--infer", "tp=1"], stdout=pipe, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert (ended.returncode, ended.stderr) == (0, "")


def test_models_that_cannot_be_read(tmp_path: Path) -> None:
    sizes = ("--train", "dp=1,tp=x", "--infer", "tp=1")
    missing = run("--model", str(tmp_path), *sizes)
    assert missing.exit_code == 2
    assert "config.json cannot be read: No such file" in missing.stderr
    assert "'x' cannot be read" in missing.stderr
    unknown = run("--model", saved(tmp_path, {"architectures": ["Unknown"]}), *sizes)
    assert unknown.exit_code == 2
    assert "no name table for architectures ['Unknown']" in unknown.stderr
    incomplete = run("--model", saved(tmp_path, {"architectures": ["LlamaForCausalLM"]}), *sizes)
    assert incomplete.exit_code == 2
    assert "hidden_size: is missing, in" in incomplete.stderr


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


@pytest.mark.parametrize(
    ("train", "said"),
    [
        ("tp=8,pp=16,ep=32", "--train pp: 61 layers do not divide into 16 stages. Try first=3,last=2, or a divisor"),
        (
            "tp=8,pp=16,ep=32,first=3,last=2",
            "--train ep: ETP 8 x EP 32 x PP 16 = 4096 does not divide the world size 2048. "
            "ETP is TP unless it is given: try ETP 1",
        ),
    ],
)
def test_advice_for_a_large_model_can_be_followed(train: str, said: str, tmp_path: Path) -> None:
    result = run("--model", saved(tmp_path, DEEPSEEK_V3), "--train", train, "--infer", "tp=8,ep=32,dp=256")
    assert result.exit_code == 2
    assert result.stderr.startswith(f"Error: {said}")
    assert len(result.stderr.splitlines()) == 1


# -- the page ----------------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Elements and texts of a page; fails on elements that are not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.cells: list[str] = []
        self.references: list[str] = []
        self.data: dict[str, Any] = {}
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag != "meta":
            self.open.append(tag)
        values = dict(attrs)
        self.references += [values[key] or "" for key in ("src", "href", "data-src") if key in values]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in ("rect", "path"), tag

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.cells.append(data)
        elif self.open and self.open[-1] == "script" and data.startswith("{"):
            self.data = json.loads(data)


def test_the_page_shows_who_holds_what(tmp_path: Path) -> None:
    page_file = tmp_path / "page.html"
    model = saved(tmp_path, EXPERTS)
    facts("--model", model, "--train", "tp=2,pp=2,ep=3,etp=1,dp=3", "--infer", "tp=3,ep=6", "--html", str(page_file))
    text = page_file.read_text()
    page = Page(text)
    assert page.open == []
    assert page.references == []
    assert "http" not in text.replace("http://www.w3.org/2000/svg", ""), "the page loads nothing"
    labels, (picture,), described = page.data["rows"], page.data["pictures"], page.data["texts"]
    assert labels == [
        *("embedding", "layer 0", "layer 1", "layers 2-3", "norm and head"),
        *("layer 0, experts", "layers 2-3, experts"),
    ]
    assert picture["columns"] == [f"rank {number}" for number in range(12)]
    covered: dict[tuple[int, int], set[int]] = {}
    for column, first, count, side, number in picture["bars"]:
        covered.setdefault((side, column), set()).update(range(first, first + count))
        assert ("experts " in described[number]) == labels[first].endswith("experts")
    for column in range(12):
        assert covered[1, column] == set(range(len(labels))), "every inference rank has all layers"
        assert covered[2, column] <= covered[0, column] < covered[1, column]
    assert any("self_attn.q_proj.weight [0:12, :]" in each for each in described)
    assert any(each.startswith("experts 0-1, of each\ngate_proj.weight [:, :]") for each in described)
    for cell in ("  of it from other hosts", "verl with mbridge: gather", "M - held", "host 1", "0-5", "6-11"):
        assert cell in page.cells, cell


# -- scale -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_deepseek_v3_on_2048_ranks_without_any_engine(tmp_path: Path) -> None:
    """Also where torch, Megatron and vLLM are not installed."""
    code = """
import sys
for name in ("torch", "megatron", "vllm", "transformers"):
    sys.modules[name] = None
from hybrid_engine.cli import app
app()
"""
    page = tmp_path / "page.html"
    command = [
        *(sys.executable, "-c", code, "plan", "--model", saved(tmp_path, DEEPSEEK_V3), "--json", "--html", str(page)),
        *("--train", "tp=8,pp=16,ep=32,etp=1,last=1", "--infer", "tp=8,ep=32,dp=256", "--rank", "77"),
    ]
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
    overview, *stages = Page(page.read_text()).data["pictures"]
    assert [columns.partition(": ")[2] for columns in overview["columns"]] == [
        f"{start}-{start + 127}" for start in range(0, 2048, 128)
    ]
    assert sum(len(stage["columns"]) for stage in stages) == 512
    assert page.stat().st_size < 2e6


def test_the_benchmark_measures_what_it_says() -> None:
    from benchmarks.planning import Figures, Point, exponents, measure

    figures = measure(Point("small", 8, EXPERTS, "tp=2,pp=2,dp=2,etp=1,ep=2", "tp=2"))
    assert (figures.num_ranks, figures.size) == (8, 8)
    assert figures.transfers > 0
    assert min(figures.layouts, figures.summary, figures.order, figures.rank_plan) > 0
    rows = [Figures("made up", size, size, 1, size, 1.0, size**2, size, 1, 1) for size in (2, 4, 1)]
    grown = exponents(rows)
    assert (grown["layouts"], grown["summary"], grown["order"]) == pytest.approx((1, 0, 2))
