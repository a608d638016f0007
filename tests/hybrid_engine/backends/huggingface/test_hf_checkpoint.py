"""Loading and saving Hugging Face checkpoints as Megatron shards, bitwise, on real ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
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
from hybrid_engine.errors import (
    ArgumentError,
    ConfigError,
    FileError,
    HybridEngineError,
    ParameterMismatchError,
    WeightError,
)
from hybrid_engine.files import model_files
from hybrid_engine.files.hub import HubSnapshot
from hybrid_engine.ranks.digests import text_digest
from hybrid_engine.ranks.job import Job
from hybrid_engine.ranks.torch_internals import TensorDict
from tests.harness.errors import failing, has_violation
from tests.harness.launch import on_engines
from tests.harness.small_disks import file_size_limit
from tests.harness.values import Values
from tests.zoo.megatron_models import PP2, TP2, VPP2, region_slices, running, view_of
from tests.zoo.tiny_models import TinyModel, Zoo, read_canonical, save_model

SMALL_FILES = 20_000  # bytes, so that a model takes several files


CASES: dict[str, tuple[TinyModel, Values]] = {
    "qwen3 tp2": (TinyModel("qwen3"), TP2),
    "qwen2 tied pp2": (TinyModel("qwen2", {"tie_word_embeddings": True}), PP2),
    "llama dp2": (TinyModel("llama"), {}),
    "llama dp2 replicated": (TinyModel("llama"), {"use_distributed_optimizer": False}),
    "qwen3 bf16 tp2 one kv head": (
        TinyModel("qwen3", {"num_key_value_heads": 1}),
        {**TP2, "params_dtype": "bfloat16"},
    ),
    "qwen2 pp2 vpp2": (TinyModel("qwen2", {"num_hidden_layers": 4}), VPP2),
}


@contextmanager
def unchanged(weights: Any) -> Iterator[None]:
    before = [tensor.clone() for tensor in weights.buffers().values()]
    yield
    assert all(map(torch.equal, before, weights.buffers().values()))


@on_engines(2)
@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_is_loaded_and_saved_bitwise(zoo: Zoo, tmp_path: Path, name: str) -> None:
    model, actor = CASES[name]
    path = zoo.saved(model)
    dtype = getattr(torch, actor.get("params_dtype", "float32"))
    canonical = read_canonical(path)
    with running(path, **actor) as run:
        job = Job.join(60)
        weights = run.engine.model.weights
        for tensor in weights.buffers().values():
            tensor.fill_(7)  # no weight is right before the load
        load_hf_checkpoint(path, weights, run.table, job)
        run.engine.model.reload_main_params()
        assert wrong_shards(weights, canonical) == []
        assert padding_values(weights) <= {0.0}
        assert not main_parameters_differ(run)
        # In the files every tensor is one box.
        hashes = [
            _box_hash(tensor.to(dtype), 0, tensor.stride(), text_digest(tensor_name))
            for tensor_name, tensor in canonical.items()
        ]
        assert weights_digest(weights, job) == f"{sum(hashes) % 2**64:016x}"
        save_hf_checkpoint(tmp_path / "out", weights, run.table, job, path, file_nbytes=SMALL_FILES)
    saved = read_canonical(tmp_path / "out")
    assert saved.keys() == canonical.keys()
    assert all(
        torch.equal(tensor.to(dtype), saved[tensor_name])
        for tensor_name, tensor in canonical.items()
    )
    assert (tmp_path / "out" / model_files.INDEX).is_file()  # of several files


def wrong_shards(weights: Any, canonical: TensorDict) -> list[str]:
    buffers = weights.buffers()
    layout = weights.layout()
    return [
        shard.region.tensor
        for shard in layout.shards
        if not torch.equal(
            view_of(buffers, shard),
            canonical[shard.region.tensor][region_slices(shard)].to(
                buffers[shard.place.buffer.name].dtype
            ),
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
    return any(
        not torch.equal(before[name], tensor)
        for name, tensor in run.engine.model.weights.buffers().items()
    )


# name -> (error, code of its violation, part of its message, changes of config.json; None: a
# checkpoint without files)
BROKEN: dict[str, tuple[type[HybridEngineError], str, str, Values | None]] = {
    "other sizes": (
        ParameterMismatchError,
        "",
        r"model\.layers\.0\.mlp\.gate_proj\.weight.*\(48, 24\)",
        {"intermediate_size": 48},
    ),
    "fewer layers": (
        ParameterMismatchError,
        "",
        r"model\.layers\.1\.mlp\.down_proj\.weight",
        {"num_hidden_layers": 1},
    ),
    "more layers": (
        ParameterMismatchError,
        "",
        r"model\.layers\.2\.mlp\.down_proj\.weight",
        {"num_hidden_layers": 3},
    ),
    "another architecture": (ParameterMismatchError, "", "Qwen2ForCausalLM.*Qwen3ForCausalLM", {}),
    "quantised": (
        ConfigError,
        "quantized-weights",
        r"1 tensors.*model\.norm\.weight in float8_e4m3fn",
        {},
    ),
    "no files": (
        ConfigError,
        "no-weights",
        r"model\.safetensors\.index\.json.*model\.safetensors",
        None,
    ),
}


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    paths = {name: tmp_path_factory.mktemp("broken") for name in BROKEN}
    for name, (*_, changes) in BROKEN.items():
        if changes is not None:
            save_model(
                paths[name], "qwen2" if name == "another architecture" else "qwen3", **changes
            )
    rewrite(paths["quantised"], "model.norm.weight", lambda tensor: tensor.to(torch.float8_e4m3fn))
    return paths


@on_engines(2)
@pytest.mark.parametrize("name", BROKEN)
def test_a_wrong_checkpoint_is_refused_and_weights_stay(
    zoo: Zoo, broken: dict[str, Path], name: str
) -> None:
    with running(zoo.path("qwen3"), **TP2) as run:
        weights = run.engine.model.weights
        with unchanged(weights), failing(*BROKEN[name][:3]):
            load_hf_checkpoint(broken[name], weights, run.table, Job.join(60))


@pytest.fixture(scope="module")
def two_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save_model(tmp_path_factory.mktemp("tied"), "qwen2", tie_word_embeddings=True)
    save_file(read_canonical(path) | {HEAD: torch.ones(6)}, path / model_files.SINGLE)
    return path


@on_engines(2)
def test_a_tied_head_other_than_the_embedding_is_refused(zoo: Zoo, two_heads: Path) -> None:
    with running(zoo.path("qwen2", tie_word_embeddings=True), **TP2) as run:
        weights = run.engine.model.weights
        differs = failing(
            ParameterMismatchError, "", rf"{HEAD}: 6 elements .* model\.embed_tokens\.weight", on=0
        )
        with unchanged(weights), differs:
            load_hf_checkpoint(two_heads, weights, run.table, Job.join(60))


def rewrite(path: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    """Change one tensor of a checkpoint, or remove it if `change` returns None."""
    tensors = read_canonical(path)
    changed = change(tensors.pop(name))
    save_file(tensors | ({} if changed is None else {name: changed}), path / model_files.SINGLE)


@pytest.fixture(scope="module")
def headless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save_model(tmp_path_factory.mktemp("headless"), "qwen3")
    rewrite(path, HEAD, lambda tensor: None)  # drops the tensor
    return path


@on_engines(2)
def test_load_pretrained_accepts_a_checkpoint_without_a_head(zoo: Zoo, headless: Path) -> None:
    model = zoo.path("qwen3")
    with running(model, **TP2) as run:
        weights = run.engine.model.weights
        (head,) = (shard for shard in weights.layout().shards if shard.region.tensor == HEAD)
        before = view_of(weights.buffers(), head).clone()
        with pytest.raises(ParameterMismatchError) as caught:
            load_hf_checkpoint(headless, weights, run.table, Job.join(60))
        assert [finding.split(":")[0] for finding in caught.value.findings] == [HEAD]
        load_pretrained(headless, weights, run.table, Job.join(60))
        assert wrong_shards(weights, read_canonical(model)) == [HEAD]
        assert torch.equal(view_of(weights.buffers(), head), before)


@on_engines(2)
def test_one_rank_of_each_host_downloads(tmp_path: Path) -> None:
    rank = int(os.environ["RANK"])
    snapshots = [tmp_path / "models--org--name" / "snapshots" / (digit * 40) for digit in "01"]
    for hosts, downloading in (("aa", (0,)), ("ab", (0, 1))):
        with (
            closing(Job.join(60, host=hosts[rank])) as job,
            mock.patch.object(HubSnapshot, "download", autospec=True) as download,
        ):
            fetch_weights(tmp_path, job)
            fetch_weights(snapshots[0], job, "critic_config.model")
        calls = [mock.call(HubSnapshot.at(snapshots[0]), "critic_config.model")]
        assert download.call_args_list == calls * (rank in downloading)
    with closing(Job.join(60)) as job:
        is_full = mock.patch.object(HubSnapshot, "download", side_effect=FileError("disk full"))
        with (
            is_full,
            failing(
                FileError,
                "",
                "^disk full$" if rank == 0 else "^downloading the model's weights",
                on=0,
            ),
        ):
            fetch_weights(snapshots[0], job)
        for key in ("model", "critic_config.model"):
            differ = has_violation(key, "ranks-differ", f"org/name@{'0' * 40}, org/name@{'1' * 40}")
            with pytest.raises(ConfigError, check=differ):
                fetch_weights(snapshots[job.rank], job, key)


@on_engines(2)
def test_a_damaged_file_is_refused_and_weights_stay(zoo: Zoo, tmp_path: Path) -> None:
    """A flipped bit, which rank 1 alone reads; test_safetensors_files.py has other damage."""
    model = zoo.path("qwen3")
    with running(model, **TP2) as run:
        job = Job.join(60)
        weights = run.engine.model.weights
        save_hf_checkpoint(tmp_path, weights, run.table, job, model, file_nbytes=SMALL_FILES)
        path = sorted(tmp_path.glob("*.safetensors"))[-1]
        if job.rank == 0:
            contents = bytearray(path.read_bytes())
            contents[-9] ^= 1
            path.write_bytes(contents)
        job.agreement.conclude("the file is damaged")
        for tensor in weights.buffers().values():
            tensor.fill_(7)
        with (
            unchanged(weights),
            failing(FileError, "different-checksum", rf"{path.name}.*checksum ", on=1),
        ):
            load_hf_checkpoint(tmp_path, weights, run.table, job)


@on_engines(2)
def test_a_failed_save_raises_on_all_ranks_and_changes_nothing(
    zoo: Zoo, broken: dict[str, Path], tmp_path: Path
) -> None:
    model = zoo.path("qwen3")
    other = broken["other sizes"]

    def contents() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in (*tmp_path.iterdir(), *other.iterdir())}

    with running(model, **TP2) as run:
        job = Job.join(60)
        before = contents()
        weights = run.engine.model.weights

        def refuse(failure: AbstractContextManager[None], path: Any, **settings: Any) -> None:
            with failure:
                save_hf_checkpoint(path, weights, run.table, job, model, **settings)
            job.agreement.conclude("rank 0 has cleaned up")
            assert contents() == before

        below = failing(FileError, "file-failed", "config.json/below.*: not a directory", on=0)
        refuse(below, other / "config.json" / "below")
        refuse(failing(ConfigError, "weights-of-another-model", "gate_proj.weight", on=0), other)
        # The limit applies to one rank; files of the other rank must go too.
        too_large = r"limited\.incomplete/model-00002-of-\d+\.safetensors: file too large"
        with file_size_limit(3000) if job.rank == 1 else nullcontext():
            refuse(
                failing(FileError, "file-failed", too_large, on=1),
                tmp_path / "limited",
                file_nbytes=SMALL_FILES,
            )
        refuse(
            failing(FileError, "file-failed", "x{300}.*: file name too long", on=0),
            tmp_path / ("x" * 300),
        )
        refuse(failing(ArgumentError, "not-a-path", "path: 5"), 5)
        for value, dtype, problem in (
            (torch.nan, None, r" as float32 on rank 1: 1 NaN of \d+ elements"),
            (7e4, "float16", r" as float16 on rank 1: 1 Inf of .*check_nan=False"),
        ):
            for tensor in weights.buffers().values():
                tensor[0] = value if job.rank == 1 else 0.0  # wrong on one rank only
            refuse(failing(WeightError, "", problem, on=1), tmp_path / "infinite", dtype=dtype)
        save_hf_checkpoint(
            tmp_path / "infinite", weights, run.table, job, model, "float16", check_nan=False
        )
