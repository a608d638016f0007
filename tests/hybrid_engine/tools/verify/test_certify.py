"""`certify` with a real vLLM that forgets a tensor, and the weights that it begins with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from hybrid_engine.tools.cli import app, certify_command
from hybrid_engine.tools.launching import Ended
from hybrid_engine.tools.verify import certify
from hybrid_engine.tools.verify.certificate import Cause, Finding, StateDifference
from hybrid_engine.tools.verify.certify import prepare
from tests.hybrid_engine.tools.verify.planted import STALE, planted
from tests.zoo.families import served_config, write_config


def test_the_former_weights_all_differ_and_copies_stay_copies(tmp_path: Path) -> None:
    model = write_config(tmp_path / "model", {"dtype": "bfloat16"})
    weights = {
        "a": torch.randn(5, 7, dtype=torch.bfloat16),
        "zero": torch.zeros(4),
        "packed": torch.arange(6).view(2, 3),
    }
    files = [{**weights, "copy": weights["a"].clone()}, {"b": torch.ones(3)}]
    for index, tensors in enumerate(files):
        save_file(tensors, model / f"{index}.safetensors")
    of_file = {name: f"{index}.safetensors" for index, tensors in enumerate(files) for name in tensors}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": of_file}))
    pair = prepare(model, "name", ["--seed", "1"], tmp_path / "scratch")
    assert pair.given == str(model)
    assert pair.words == ("--dtype", "bfloat16", "--seed", "1")
    former = {
        name: tensor for index in (0, 1) for name, tensor in load_file(f"{pair.former}/{index}.safetensors").items()
    }
    for name, tensor in (pair for tensors in files for pair in tensors.items()):
        assert (former[name].shape, former[name].dtype) == (tensor.shape, tensor.dtype)
        assert (former[name] != tensor).float().mean() > 0.9
    assert torch.equal(former["a"], former["copy"])
    assert sorted(path.name for path in Path(pair.former).glob("*.json")) == [
        "config.json",
        "model.safetensors.index.json",
    ]


def test_a_config_alone_gets_two_random_checkpoints(tmp_path: Path) -> None:
    model = write_config(tmp_path / "model", served_config("llama"))
    pair = prepare(model, "name", [], tmp_path / "scratch")
    given, former = (load_file(f"{directory}/model.safetensors") for directory in (pair.given, pair.former))
    assert given.keys() == former.keys()
    assert all(not torch.equal(given[name], former[name]) for name in given)


@pytest.mark.parametrize(
    ("words", "says"),
    [(["nowhere", "elsewhere"], "2 errors:"), (["--", "--dtype", "float32"], "MODEL: no model is named")],
)
def test_what_is_no_model_is_refused(words: list[str], says: str) -> None:
    ended = CliRunner().invoke(app, ["certify", *words])
    assert ended.exit_code == 2
    assert says in ended.stderr


@pytest.mark.parametrize(
    ("ended", "status", "says"),
    [
        (
            Ended(2, "usage: ...\nerror: unrecognized arguments: --x"),
            2,
            "VLLM ARGUMENTS: error: unrecognized arguments",
        ),
        (Ended(1, "boom"), 3, "certify ended with 1:\nboom"),
        (Ended(None, "..."), 3, "no answer within 1800 s"),
    ],
)
def test_engines_that_give_no_answer(
    ended: Ended, status: int, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certify, "run_ranks", lambda *_, **__: ended)
    model = write_config(tmp_path / "model", served_config("llama"))
    result = CliRunner().invoke(app, ["certify", str(model)])
    assert result.exit_code == status
    assert says in result.stderr


def test_a_cold_engine_that_fails_certifies_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(arguments: list[str], *_: object, **__: object) -> Ended:
        job = json.loads(Path(arguments[-1]).read_text())
        reasons = {pair["name"]: {"cold": {"status": "failed", "reason": "no kernel"}} for pair in job["pairs"]}
        Path(job["out"]).write_text(json.dumps(reasons))
        return Ended(0, "")

    monkeypatch.setattr(certify, "run_ranks", run)
    model = write_config(tmp_path / "model", served_config("llama"))
    result = CliRunner().invoke(app, ["certify", str(model)])
    assert result.exit_code == 1
    assert "a cold engine fails: no kernel" in result.stdout


def test_tensors_are_named_in_full_with_their_cause(capsys: pytest.CaptureFixture[str]) -> None:
    differences = [StateDifference(f"layers.{index}.weight", Cause.STALE, index / 2, 0.25) for index in range(6)]
    found = Finding("reload", "differs", num_tensors=9, logprobs=1.25, differences=differences)
    certify_command._print({"model": [found]})
    said = " ".join(capsys.readouterr().out.split())
    assert "6 of 9 differ" in said
    names = ", ".join(f"layers.{index}.weight" for index in range(4))
    assert f"model, reload, {Cause.STALE.value}, by up to 2.5, in up to 25% of the elements: {names} and 2 more" in said


@pytest.mark.slow
def test_the_switch_refuses_what_it_is_not_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rather than to compare two engines that were told to be different."""
    from hybrid_engine.backends.vllm import stock

    def arguments_of(_: str, words: Sequence[str]) -> SimpleNamespace:
        return SimpleNamespace(dtype="float32", quantization="fp8" if words else None)

    monkeypatch.setattr(stock, "arguments_of", arguments_of)
    certify._run(certify.CheckpointPair("name", "a", "b", ["--quantization", "fp8"], ""), certify.OWN, tmp_path)
    told = json.loads((tmp_path / "failure.json").read_text())
    assert "quantization: the switch does not take it" in told["reason"]
    assert told["status"] == "not run"


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.engines
def test_a_tensor_that_reload_forgets_is_found(tmp_path: Path) -> None:
    """By its name and cause; by nothing but vLLM's reload, and nothing else differs."""
    model = write_config(tmp_path / "llama", served_config("llama", torch_dtype="float32"))
    environment = {**os.environ, **planted(tmp_path)}
    command = [sys.executable, "-m", "hybrid_engine", "certify", str(model), "--json"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=550)
    assert ended.returncode == 1, ended.stderr
    reload, *sleeps, own = json.loads(ended.stdout)["models"]["llama"]
    (difference,) = reload["differences"]
    assert (difference["name"], difference["cause"]["name"], difference["share"]) == (STALE, "stale", 1.0)
    assert reload["logprobs"] > 0
    assert [each["status"] for each in sleeps] == ["not run", "not run"] or torch.cuda.is_available()
    assert own["status"] == "equal", own
    assert own["num_tensors"] == reload["num_tensors"] > 20
