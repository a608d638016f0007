"""Loading and saving Hugging Face checkpoints as Megatron shards, bitwise, on real ranks."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from hybrid_engine.backends.huggingface import (
    fetch_weights,
    load_hf_checkpoint,
    load_pretrained,
    save_hf_checkpoint,
    weights_digest,
)
from hybrid_engine.backends.huggingface.loading import HEAD
from hybrid_engine.backends.huggingface.weights_digest import _box_hash
from hybrid_engine.config import ActorConfig
from hybrid_engine.errors import ConfigError, FileError, HybridEngineError, ParameterMismatchError
from hybrid_engine.files import model_files
from hybrid_engine.files.hub import HubSnapshot
from hybrid_engine.ranks.digests import text_digest
from hybrid_engine.ranks.job import Job
from hybrid_engine.ranks.torch_internals import TensorDict
from tests.harness.errors import has_violations, violations_of
from tests.harness.launch import Outcomes, Ranks
from tests.harness.small_disks import file_size_limit
from tests.harness.values import Values
from tests.zoo.megatron_models import DENSE_FLOAT32, region_slices, running, view_of
from tests.zoo.tiny_models import read_canonical, save_model

TP2 = {"tensor_model_parallel_size": 2}
SMALL_FILES = 20_000  # bytes, so that a model takes several files


@dataclass(frozen=True)
class Case:
    """A model on disk and the layout that reads and writes it."""

    family: str
    actor: Values
    model: Values = field(default_factory=dict)


CASES = {
    "qwen3 tp2": Case("qwen3", TP2),
    "qwen2 tied pp2": Case("qwen2", {"pipeline_model_parallel_size": 2}, {"tie_word_embeddings": True}),
    "llama dp2": Case("llama", {}),
    "llama dp2 replicated": Case("llama", {"use_distributed_optimizer": False}),
    "qwen3 bf16 tp2 one kv head": Case("qwen3", {**TP2, "params_dtype": "bfloat16"}, {"num_key_value_heads": 1}),
    "qwen2 pp2 vpp2": Case(
        "qwen2",
        {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
        {"num_hidden_layers": 4},
    ),
}


# name -> (error with the codes of its violations, parts of its message, changes of config.json;
# None: a checkpoint without files)
BROKEN: dict[str, tuple[str, tuple[str, ...], Values | None]] = {
    "other sizes": (
        "ParameterMismatchError",
        ("model.layers.0.mlp.gate_proj.weight", "(48, 24)"),
        {"intermediate_size": 48},
    ),
    "fewer layers": ("ParameterMismatchError", ("model.layers.1.mlp.down_proj.weight",), {"num_hidden_layers": 1}),
    "more layers": ("ParameterMismatchError", ("model.layers.2.mlp.down_proj.weight",), {"num_hidden_layers": 3}),
    "another architecture": ("ParameterMismatchError", ("Qwen2ForCausalLM", "Qwen3ForCausalLM"), {}),
    "quantised": ("ConfigError quantized-weights", ("1 tensors", "model.norm.weight in float8_e4m3fn"), {}),
    "no files": ("ConfigError no-weights", ("model.safetensors.index.json", "model.safetensors"), None),
}


# name -> (error, part of its message, damage to the last file of a saved checkpoint)
DAMAGED: dict[str, tuple[str, str, Callable[[bytearray], object]]] = {
    "cut": ("FileError", "file not fully covered", lambda contents: contents.__delitem__(slice(-9, None))),
    "flipped": ("FileError", "checksum ", lambda contents: contents.__setitem__(-9, contents[-9] ^ 1)),
    "header": ("FileError", "header too large", lambda contents: contents.__setitem__(6, 255)),
}

# Saves that fail and change nothing: name -> (errors of the ranks, part of every message)
REFUSED = {
    "below a file": ({"FileError", "RemoteError"}, "config.json/below.*: not a directory"),
    "another model": ({"ConfigError weights-of-another-model", "RemoteError"}, "gate_proj.weight"),
    "limited": ({"FileError", "RemoteError"}, r"limited\.incomplete/model-00002-of-\d+\.safetensors: file too large"),
    "too long": ({"FileError", "RemoteError"}, "x{300}.*: file name too long"),
    "no path": ({"ArgumentError not-a-path"}, "path: 5"),
    "nan": ({"WeightError", "RemoteError"}, r" as float32 on rank 1: 1 NaN of \d+ elements"),
    "too large for float16": ({"WeightError", "RemoteError"}, r" as float16 on rank 1: 1 Inf of .*check_nan=False"),
}


def kind_of(error: BaseException) -> str:
    """Return the type of an error with the codes of its violations."""
    return " ".join([type(error).__name__, *(code for _, code in violations_of(error))])


def load_and_save(paths: dict[str, Path], out: Path) -> dict[str, Values]:
    """Load and save every case; return the differences found on this rank."""
    results = {}
    for name, case in CASES.items():
        with running(paths[name], ActorConfig(**{**DENSE_FLOAT32, **case.actor})) as run:
            job = Job.join(60)
            weights = run.engine.model.weights
            for tensor in weights.buffers().values():
                tensor.fill_(7)  # no weight is right before the load
            load_hf_checkpoint(paths[name], weights, run.table, job)
            run.engine.model.reload_main_params()
            results[name] = {
                "wrong": wrong_shards(weights, read_canonical(paths[name])),
                "padding": padding_values(weights),
                "main": main_parameters_differ(run),
                "digest": weights_digest(weights, job),
            }
            save_hf_checkpoint(out / name, weights, run.table, job, paths[name], file_nbytes=SMALL_FILES)
            save_hf_checkpoint(out / f"{name} half", weights, run.table, job, paths[name], dtype=torch.bfloat16)
            for dtype in ("bf16", torch.int8, 16):
                with pytest.raises(ConfigError, check=has_violations(("dtype", "unsupported-dtype"))):
                    save_hf_checkpoint(out / "refused", weights, run.table, job, paths[name], dtype=dtype)
    return results


def wrong_shards(weights: Any, canonical: TensorDict) -> list[str]:
    buffers = weights.buffers()
    layout = weights.layout()
    return [
        shard.region.tensor
        for shard in layout.shards
        if not torch.equal(
            view_of(buffers, shard),
            canonical[shard.region.tensor][region_slices(shard)].to(buffers[shard.place.buffer.name].dtype),
        )
    ]


def padding_values(weights: Any) -> set[float]:
    buffers = weights.buffers()
    return {
        value
        for buffer_id, buffer in weights.layout().buffers.items()
        for extent in buffer.padding
        for value in buffers[buffer_id.name][extent.start : extent.stop].tolist()
    }


def main_parameters_differ(run: Any) -> bool:
    """Return whether a step with learning rate 0 changes weights."""
    before = {name: tensor.clone() for name, tensor in run.engine.model.weights.buffers().items()}
    run.engine.optimizer.set_learning_rate(0.0)
    for chunk in run.actor.chunks:
        chunk.zero_grad_buffer()
    run.actor.optimizer.step()  # writes the optimizer's main parameters back
    run.engine.model.weights.prepare()
    return any(not torch.equal(before[name], tensor) for name, tensor in run.engine.model.weights.buffers().items())


@pytest.fixture(scope="module")
def launched(engines: Ranks, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Path], Path, Outcomes]:
    """Paths of the models, the directory of the saved models, and the results of all calls."""
    directory = tmp_path_factory.mktemp("hf")
    paths = {name: save_model(directory / name, case.family, **case.model) for name, case in CASES.items()}
    model = save_model(directory / "model", "qwen3")
    broken = {name: directory / name for name in BROKEN}
    for name, (_, _, changes) in BROKEN.items():
        broken[name].mkdir() if changes is None else save_model(broken[name], "qwen3", **changes)
    save_model(broken["another architecture"], "qwen2")
    rewrite(broken["quantised"], "model.norm.weight", lambda tensor: tensor.to(torch.float8_e4m3fn))
    headless = save_model(directory / "headless", "qwen3")
    rewrite(headless, HEAD, lambda tensor: None)  # drops the tensor
    tied = save_model(directory / "tied", "qwen2", tie_word_embeddings=True)
    save_file(read_canonical(tied) | {HEAD: torch.ones(6)}, tied / model_files.SINGLE)
    calls = {
        "good": (load_and_save, (paths, directory / "out")),
        "broken": (load_broken, (model, broken)),
        "two heads": (load_broken, (paths["qwen2 tied pp2"], {"tied": tied})),
        "headless": (load_without_a_head, (model, headless)),
        "damaged": (load_damaged, (model, directory / "damaged")),
        "fetched": (fetch_from_the_hub, (directory,)),
        "refused": (refuse_saves, (model, broken["other sizes"])),
    }
    return paths, directory / "out", engines.launch_in_turn(2, calls)


@pytest.fixture
def outcome(launched: Any) -> tuple[dict[str, Path], Path, list[Values]]:
    paths, out, outcomes = launched
    return paths, out, outcomes["good"]


@pytest.mark.parametrize("name", CASES)
def test_every_shard_equals_the_checkpoint(outcome: Any, name: str) -> None:
    _, _, results = outcome
    assert [result[name]["wrong"] for result in results] == [[], []]
    assert all(result[name]["padding"] <= {0.0} for result in results)
    assert [result[name]["main"] for result in results] == [False, False]


@pytest.mark.parametrize("name", CASES)
def test_a_saved_checkpoint_equals_the_loaded_one(outcome: Any, name: str) -> None:
    paths, out, _ = outcome
    dtype = getattr(torch, CASES[name].actor.get("params_dtype", "float32"))
    before = read_canonical(paths[name])
    after = read_canonical(out / name)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[tensor].to(dtype), after[tensor]) for tensor in before)
    index = json.loads((out / name / model_files.INDEX).read_text())
    assert len(set(index["weight_map"].values())) > 1  # several files
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in after.values())
    assert not list((out / name).glob("*.incomplete"))
    half = read_canonical(out / f"{name} half")
    assert all(torch.equal(before[tensor].to(torch.bfloat16), half[tensor]) for tensor in before)
    assert (out / f"{name} half" / model_files.SINGLE).is_file()


@pytest.mark.parametrize("name", CASES)
def test_the_digest_of_weights_is_independent_of_the_layout(outcome: Any, name: str) -> None:
    paths, _, results = outcome
    dtype = torch.bfloat16 if "bf16" in name else torch.float32
    # In the files every tensor is one box.
    hashes = [
        _box_hash(tensor.to(dtype), 0, tensor.stride(), text_digest(tensor_name))
        for tensor_name, tensor in read_canonical(paths[name]).items()
    ]
    assert {result[name]["digest"] for result in results} == {f"{sum(hashes) % 2**64:016x}"}


def test_transformers_loads_a_saved_checkpoint(outcome: Any) -> None:
    from transformers import AutoModelForCausalLM

    paths, out, _ = outcome
    tokens = torch.arange(12)[None]
    for name in ("qwen3 tp2", "qwen2 tied pp2"):
        models = [AutoModelForCausalLM.from_pretrained(path).eval() for path in (paths[name], out / name)]
        with torch.no_grad():
            assert torch.equal(models[0](tokens).logits, models[1](tokens).logits)


def load_broken(model: Path, broken: dict[str, Path]) -> dict[str, tuple[str, str, bool]]:
    """Return (kind of error, message, whether weights are unchanged) per checkpoint."""
    results = {}
    with running(model, ActorConfig(**{**DENSE_FLOAT32, **TP2})) as run:
        before = [tensor.clone() for tensor in run.engine.model.weights.buffers().values()]
        for name, path in broken.items():
            with pytest.raises(HybridEngineError) as caught:
                load_hf_checkpoint(path, run.engine.model.weights, run.table, Job.join(60))
            kept = all(map(torch.equal, before, run.engine.model.weights.buffers().values()))
            results[name] = (kind_of(caught.value), str(caught.value), kept)
    return results


@pytest.mark.parametrize("name", BROKEN)
def test_a_wrong_checkpoint_is_refused_and_weights_stay(launched: Any, name: str) -> None:
    error, values, _ = BROKEN[name]
    for results in launched[2]["broken"]:
        kind, message, is_kept = results[name]
        assert kind == error
        assert all(value in message for value in values), message
        assert is_kept


def test_a_tied_head_other_than_the_embedding_is_refused_on_all_ranks(launched: Any) -> None:
    results = [results["tied"] for results in launched[2]["two heads"]]
    assert {error for error, _, _ in results} == {"ParameterMismatchError", "RemoteError"}
    for _, text, is_kept in results:
        assert re.search(rf"{HEAD}: 6 elements .* model\.embed_tokens\.weight", text)
        assert is_kept


def rewrite(path: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    """Change one tensor of a checkpoint, or remove it if `change` returns None."""
    tensors = read_canonical(path)
    changed = change(tensors.pop(name))
    save_file(tensors | ({} if changed is None else {name: changed}), path / model_files.SINGLE)


def load_without_a_head(model: Path, headless: Path) -> tuple[list[str], list[str], bool]:
    """Return the findings, the wrong shards after `load_pretrained`, whether the head stayed."""
    with running(model, ActorConfig(**{**DENSE_FLOAT32, **TP2})) as run:
        weights = run.engine.model.weights
        (head,) = (shard for shard in weights.layout().shards if shard.region.tensor == HEAD)
        before = view_of(weights.buffers(), head).clone()
        with pytest.raises(ParameterMismatchError) as caught:
            load_hf_checkpoint(headless, weights, run.table, Job.join(60))
        load_pretrained(headless, weights, run.table, Job.join(60))
        wrong = wrong_shards(weights, read_canonical(model))
        findings = list(caught.value.findings)
        return findings, wrong, torch.equal(view_of(weights.buffers(), head), before)


def test_load_pretrained_accepts_a_checkpoint_without_a_head(launched: Any) -> None:
    for findings, wrong, is_kept in launched[2]["headless"]:
        assert [finding.split(":")[0] for finding in findings] == [HEAD]
        assert (wrong, is_kept) == ([HEAD], True)


def fetch_from_the_hub(directory: Path) -> Values:
    """Return which ranks download on one host and on two, and the errors of failures."""
    snapshots = [directory / "models--org--name" / "snapshots" / (digit * 40) for digit in "01"]
    results: Values = {}
    for name, hosts in (("one host", "aa"), ("two hosts", "ab")):
        with closing(Job.join(60, host=hosts[int(os.environ["RANK"])])) as job:
            with mock.patch.object(HubSnapshot, "download", autospec=True) as download:
                fetch_weights(directory, job)
                fetch_weights(snapshots[0], job, "critic_config.model")
            results[name] = download.call_args_list == [mock.call(HubSnapshot.at(snapshots[0]), "critic_config.model")]
    with closing(Job.join(60)) as job:
        full = FileError("disk full")
        with mock.patch.object(HubSnapshot, "download", side_effect=full), pytest.raises(HybridEngineError) as failed:
            fetch_weights(snapshots[0], job)
        with pytest.raises(ConfigError, check=has_violations(("model", "ranks-differ"))) as differing:
            fetch_weights(snapshots[job.rank], job)
        with pytest.raises(ConfigError, check=has_violations(("critic_config.model", "ranks-differ"))):
            fetch_weights(snapshots[job.rank], job, "critic_config.model")
    return results | {"failed": f"{failed.type.__name__}: {failed.value}", "differing": str(differing.value)}


def test_one_rank_of_each_host_downloads(launched: Any) -> None:
    results = launched[2]["fetched"]
    assert [result["one host"] for result in results] == [True, False]
    assert [result["two hosts"] for result in results] == [True, True]
    assert results[0]["failed"] == "FileError: disk full"
    assert results[1]["failed"].startswith("RemoteError: downloading the model's weights failed on 1 rank(s)")
    assert all(f"org/name@{'0' * 40}, org/name@{'1' * 40}" in result["differing"] for result in results)


def load_damaged(model: Path, directory: Path) -> dict[str, tuple[str, str, bool]]:
    """Return (kind of error, message, whether weights are unchanged) per kind of damage."""
    results = {}
    with running(model, ActorConfig(**{**DENSE_FLOAT32, **TP2})) as run:
        job = Job.join(60)
        save_hf_checkpoint(directory, run.engine.model.weights, run.table, job, model, file_nbytes=SMALL_FILES)
        path = sorted(directory.glob("*.safetensors"))[-1]
        whole = path.read_bytes()
        for tensor in run.engine.model.weights.buffers().values():
            tensor.fill_(7)
        before = [tensor.clone() for tensor in run.engine.model.weights.buffers().values()]
        for name, (_, _, damage) in DAMAGED.items():
            job.agreement.conclude("all ranks have read")  # before rank 0 writes the file again
            contents = bytearray(whole)
            damage(contents)
            if dist.get_rank() == 0:
                path.write_bytes(contents)
            job.agreement.conclude("all ranks have read")
            with pytest.raises(HybridEngineError) as caught:
                load_hf_checkpoint(directory, run.engine.model.weights, run.table, job)
            kept = all(map(torch.equal, before, run.engine.model.weights.buffers().values()))
            results[name] = (kind_of(caught.value), str(caught.value), kept)
    return results


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_refused_and_weights_stay(launched: Any, name: str) -> None:
    error, message, _ = DAMAGED[name]
    results = [results[name] for results in launched[2]["damaged"]]
    # Ranks that do not read the damaged part raise RemoteError.
    assert error in {kind for kind, _, _ in results} <= {error, "RemoteError"}
    for _, text, is_kept in results:
        assert message in text
        assert re.search(r"damaged/model-.*\.safetensors", text)
        assert is_kept


def refuse_saves(model: Path, other: Path) -> dict[str, tuple[str, str]]:
    """Return (kind of error, message) per save; a refused save leaves the directory unchanged."""
    results = {}
    with running(model, ActorConfig(**{**DENSE_FLOAT32, **TP2})) as run:
        job = Job.join(60)
        before = contents_below(other.parent)

        def expect_refusal(name: str, path: Any, *args: Any, **settings: Any) -> None:
            with pytest.raises(HybridEngineError) as caught:
                save_hf_checkpoint(path, run.engine.model.weights, run.table, job, model, *args, **settings)
            results[name] = (kind_of(caught.value), str(caught.value))
            job.agreement.conclude("rank 0 has cleaned up")
            assert contents_below(other.parent) == before

        expect_refusal("below a file", other / "config.json" / "below")
        expect_refusal("another model", other)
        # The limit applies to one rank; files of the other rank must go too.
        with file_size_limit(3000) if dist.get_rank() == 1 else nullcontext():
            expect_refusal("limited", other.with_name("limited"), file_nbytes=SMALL_FILES)
        expect_refusal("too long", other.with_name("x" * 300))
        expect_refusal("no path", 5)
        infinite = other.with_name("infinite")
        for name, value, dtype in (("nan", float("nan"), None), ("too large for float16", 7e4, "float16")):
            for tensor in run.engine.model.weights.buffers().values():
                tensor[0] = value if dist.get_rank() == 1 else 0.0  # wrong on one rank only
            expect_refusal(name, infinite, dtype)
        save_hf_checkpoint(infinite, run.engine.model.weights, run.table, job, model, "float16", check_nan=False)
    return results


def contents_below(directory: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in directory.iterdir()}


@pytest.mark.parametrize("name", REFUSED)
def test_a_failed_save_raises_on_all_ranks(launched: Any, name: str) -> None:
    errors, message = REFUSED[name]
    results = [results[name] for results in launched[2]["refused"]]
    assert {kind for kind, _ in results} == errors
    assert all(re.search(message, text, re.DOTALL) for _, text in results)
