"""`certify` with a real vLLM that skips a tensor, and the weights with which it starts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybrid_engine.tools.launching import Ended
from hybrid_engine.tools.verify import certify
from hybrid_engine.tools.verify.certify import prepare
from tests.hybrid_engine.tools.programs import (
    STALE,
    environment_with,
    invoke,
    run_python,
    skip_a_tensor,
)
from tests.zoo.families import served_config, write_config


def test_former_weights_differ_and_copies_stay_equal(tmp_path: Path) -> None:
    model = write_config(tmp_path / "model", {"dtype": "bfloat16"})
    weights = {
        "a": torch.randn(5, 7, dtype=torch.bfloat16),
        "zero": torch.zeros(4),
        "packed": torch.arange(6).view(2, 3),
    }
    files = [{**weights, "copy": weights["a"].clone()}, {"b": torch.ones(3)}]
    for index, tensors in enumerate(files):
        save_file(tensors, model / f"{index}.safetensors")
    weight_map = {
        name: f"{index}.safetensors" for index, tensors in enumerate(files) for name in tensors
    }
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    pair = prepare(model, "name", ["--seed", "1"], tmp_path / "scratch")
    assert pair.given == str(model)
    assert pair.words == ("--dtype", "bfloat16", "--seed", "1")
    former = {}
    for index in (0, 1):
        former |= load_file(f"{pair.former}/{index}.safetensors")
    for name, tensor in {**files[0], **files[1]}.items():
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
    given, former = (
        load_file(f"{directory}/model.safetensors") for directory in (pair.given, pair.former)
    )
    assert given.keys() == former.keys()
    assert all(not torch.equal(given[name], former[name]) for name in given)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere", "elsewhere"], "2 errors:"),
        (["--", "--dtype", "float32"], "MODEL: no model is named"),
    ],
)
def test_an_invalid_model_is_refused(words: list[str], message: str) -> None:
    assert message in invoke("certify", *words, status=2).stderr


@pytest.mark.parametrize(
    ("ended", "status", "message"),
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
def test_engines_without_result_are_reported(
    ended: Ended, status: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certify, "run_ranks", lambda *_, **__: ended)
    model = write_config(tmp_path / "model", served_config("llama"))
    result = invoke("certify", model, "--json", status=status)
    assert message in result.stderr
    assert message in json.loads(result.stdout)["error"]


def test_a_cold_engine_that_fails_certifies_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(arguments: list[str], *_: object, **__: object) -> Ended:
        job = json.loads(Path(arguments[-1]).read_text())
        reasons = {
            pair["name"]: {"cold": {"status": "failed", "reason": "no kernel"}}
            for pair in job["pairs"]
        }
        Path(job["out"]).write_text(json.dumps(reasons))
        return Ended(0, "")

    monkeypatch.setattr(certify, "run_ranks", run)
    model = write_config(tmp_path / "model", served_config("llama"))
    assert "a cold engine fails: no kernel" in invoke("certify", model, status=1).stdout


@pytest.mark.slow
def test_the_switch_refuses_unsupported_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise two engines with different arguments would be compared."""
    from hybrid_engine.backends.vllm import stock

    def arguments_of(_: str, words: Sequence[str]) -> SimpleNamespace:
        return SimpleNamespace(dtype="float32", quantization="fp8" if words else None)

    monkeypatch.setattr(stock, "arguments_of", arguments_of)
    certify._run(
        certify.CheckpointPair("name", "a", "b", ["--quantization", "fp8"], ""),
        certify.OWN,
        tmp_path,
    )
    failure = json.loads((tmp_path / "failure.json").read_text())
    assert "quantization: the switch does not take it" in failure["reason"]
    assert failure["status"] == "not run"


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.engines
def test_a_tensor_skipped_by_reload_is_reported(tmp_path: Path) -> None:
    """Only vLLM's reload differs, in one tensor that is reported with its cause."""
    model = write_config(tmp_path / "llama", served_config("llama", torch_dtype="float32"))
    environment = environment_with(skip_a_tensor, tmp_path)
    result = run_python(
        "-m", "hybrid_engine", "certify", model, "--json", status=1, timeout=550, **environment
    )
    reload, *sleeps, own = json.loads(result.stdout)["models"]["llama"]
    (difference,) = reload["differences"]
    assert (difference["name"], difference["cause"]["name"], difference["share"]) == (
        STALE,
        "stale",
        1.0,
    )
    assert reload["logprobs"] > 0
    assert [sleep["status"] for sleep in sleeps] == [
        "not run",
        "not run",
    ] or torch.cuda.is_available()
    assert own["status"] == "equal", own
    assert own["num_tensors"] == reload["num_tensors"] > 20
