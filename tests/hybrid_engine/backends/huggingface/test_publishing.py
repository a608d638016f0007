"""Saves of Hugging Face checkpoints: on a full disk, killed at every step, beside files of others; one process."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from hybrid_engine.backends.huggingface import hf_checkpoint as checkpoint
from hybrid_engine.backends.huggingface import publishing
from hybrid_engine.backends.huggingface import safetensors_files as files
from hybrid_engine.errors import ConfigError, FileError, HybridEngineError
from hybrid_engine.files import model_files
from hybrid_engine.records.regions import contiguous_strides
from tests.harness.kills import kill_at_every_step
from tests.harness.launch import Ranks
from tests.harness.small_disks import file_size_limit
from tests.hybrid_engine.backends.huggingface.saves import ONE_FILE, SEVERAL_FILES, WANTED, begun, place, save


def our_files(directory: Path) -> list[Path]:
    found = files.stored_tensors(directory)
    return sorted({directory / tensor.file for tensor in found.values()})


def transformers_files(directory: Path) -> list[Path]:
    """transformers.modeling_utils._get_resolved_checkpoint_files"""
    if (directory / model_files.SINGLE).is_file():
        return [directory / model_files.SINGLE]
    return named_by_the_index(directory)


def vllm_files(directory: Path) -> list[Path]:
    """vllm.model_executor.model_loader.weight_utils.filter_duplicate_safetensors_files"""
    if (directory / model_files.INDEX).is_file():
        return named_by_the_index(directory)
    return sorted(directory.glob("*.safetensors"))


def named_by_the_index(directory: Path) -> list[Path]:
    index = json.loads((directory / model_files.INDEX).read_text())
    return sorted({directory / name for name in index["weight_map"].values()})


READERS = {"ours": our_files, "transformers": transformers_files, "vllm": vllm_files}


def seen_by(name: str, directory: Path) -> float | None:
    """The one value that a reader finds; None where it refuses the directory. Every tensor must be there, and once."""
    try:
        loaded = [load_file(path) for path in READERS[name](directory)]
    except (HybridEngineError, FileNotFoundError):
        return None
    if not loaded:
        return None
    assert sorted(name for tensors in loaded for name in tensors) == sorted(WANTED)
    (value,) = {value for tensors in loaded for tensor in tensors.values() for value in tensor.flatten().tolist()}
    return value


def really_read(directories: list[Path]) -> list[tuple[list[Path], list[Path]]]:
    """Of each directory, in a process that has both: what transformers reads, and what vLLM reads."""
    from transformers.modeling_utils import _get_resolved_checkpoint_files
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    found = []
    for path in directories:
        names, _ = _get_resolved_checkpoint_files(path, None, None, None, None, False)
        _, others, *_ = DefaultModelLoader(LoadConfig())._prepare_weights(str(path), None, None, True, None)
        found.append((sorted(map(Path, names)), sorted(map(Path, others))))
    return found


def test_the_readers_rules_are_those_of_the_readers(engines: Ranks, tmp_path: Path) -> None:
    """transformers prefers model.safetensors, vLLM the index; both at once are there between two steps of a save."""
    directories = [tmp_path / name for name in ("one file", "several files", "both")]
    for path in directories:
        save(path, ONE_FILE if path.name == "one file" else SEVERAL_FILES)
    save_file({"a": torch.ones(2)}, tmp_path / "both" / model_files.SINGLE)
    (found,) = engines.launch(really_read, 1, directories)
    assert found == [(transformers_files(path), vllm_files(path)) for path in directories]


@pytest.mark.parametrize("file_nbytes", [ONE_FILE, SEVERAL_FILES])
def test_files_have_safetensors_own_format(tmp_path: Path, file_nbytes: int) -> None:
    """Mixed widths: every tensor is aligned, and safetensors itself reads what was written in place."""
    stored = publishing.plan_files(WANTED, file_nbytes)
    publication = publishing.Publication(tmp_path, stored)
    publication.begin()
    with publishing.BoxWriter(tmp_path) as writer:
        for number, (name, (shape, _)) in enumerate(WANTED.items(), start=1):
            writer.write(stored[name], place(shape), torch.full(shape, number))
    publication.publish()
    assert files.stored_tensors(tmp_path) == stored
    for number, (name, (shape, dtype)) in enumerate(WANTED.items(), start=1):
        with safe_open(tmp_path / stored[name].file, framework="pt") as opened:
            assert torch.equal(opened.get_tensor(name), torch.full(shape, number, dtype=getattr(torch, dtype)))


def test_memory_that_was_written_can_still_leave_the_device(tmp_path: Path) -> None:
    """A numpy view would fix a storage's size for good."""
    (stored,) = publishing.plan_files({"a": ((3, 2), "float32")}, ONE_FILE).values()
    publishing.Publication(tmp_path, {"a": stored}).begin()
    weight = torch.ones(3, 2)
    with publishing.BoxWriter(tmp_path) as writer:
        writer.write(stored, place((3, 2)), weight)
    assert weight.untyped_storage().resizable()


def test_boxes_are_written_where_they_belong(tmp_path: Path) -> None:
    """A box inside of a tensor: in pieces of its last dim, of several dims, and of one element."""
    shape = (4, 3, 6)
    strides = contiguous_strides(shape)
    (stored,) = publishing.plan_files({"a": (shape, "bfloat16")}, ONE_FILE).values()
    expected = torch.zeros(shape, dtype=torch.bfloat16)
    publication = publishing.Publication(tmp_path, {"a": stored})
    publication.begin()
    with publishing.BoxWriter(tmp_path) as writer:
        for offsets, lengths in [((1, 0, 2), (2, 2, 3)), ((3, 1, 0), (1, 2, 6)), ((0, 0, 5), (4, 3, 1))]:
            box = torch.randn(lengths[::-1]).permute(2, 1, 0)  # not contiguous
            expected[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))] = box
            offset = sum(o * s for o, s in zip(offsets, strides, strict=True))
            writer.write(stored, place(shape, offset), box)
        writer.write(stored, place(shape), torch.empty(0, 3, 6))
    publication.publish()
    assert torch.equal(load_file(tmp_path / model_files.SINGLE)["a"], expected)


# what is there before: a save of files of that size, nothing, or "foreign": one file without an index or a checksum
OLDER = {"nothing": None, "one file": ONE_FILE, "several files": SEVERAL_FILES, "foreign": "foreign"}


def make_older(directory: Path, kind: int | str | None) -> None:
    directory.mkdir()
    if kind == "foreign":
        tensors = {name: torch.ones(shape, dtype=getattr(torch, dtype)) for name, (shape, dtype) in WANTED.items()}
        save_file(tensors, directory / model_files.SINGLE)
    elif kind is not None:
        save(directory, kind, value=1)


@pytest.fixture
def quick_path() -> Iterator[Path]:
    """In memory where there is such a place: hundreds of saves wait for no disk."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as directory:
        yield Path(directory)


@pytest.mark.parametrize("newer", [ONE_FILE, SEVERAL_FILES], ids=["to one file", "to several"])
@pytest.mark.parametrize("older", OLDER)
def test_a_killed_save_leaves_the_old_set_or_the_new(quick_path: Path, older: str, newer: int) -> None:
    """Killed before every call that changes a file, from the first to the last; and the next save cleans up."""
    make_older(quick_path / "older", OLDER[older])
    old = None if OLDER[older] is None else 1.0
    directory = quick_path / "hf"

    def prepare() -> None:
        shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(quick_path / "older", directory)

    seen: dict[str, list[float | None]] = {name: [] for name in READERS}
    for step in kill_at_every_step(lambda: save(directory, newer, 2), prepare):
        for name in READERS:
            seen[name].append(seen_by(name, directory))
        if step % 4 == 0:
            save(directory, newer, 3)
            assert {seen_by(name, directory) for name in READERS} == {3.0}
            assert set(directory.iterdir()) == {directory / model_files.INDEX, *our_files(directory)}
    for name, values in seen.items():
        changes = [old] * values.count(old) + [2.0] * values.count(2.0)
        assert values == changes, f"{name} saw neither the old set nor the new one"
        assert values[0] == old
        assert values[-1] == 2


@pytest.mark.parametrize("dtypes", [("float32", "bfloat16"), ("bfloat16", "float32"), ("bfloat16", "float16")])
def test_the_config_of_a_killed_save_rounds_no_weights(quick_path: Path, dtypes: tuple[str, str]) -> None:
    """config.json cannot change in one step with the weights, so in between it asks for what holds both."""
    model, older, directory = (quick_path / name for name in ("model", "older", "hf"))
    model.mkdir()
    (model / "config.json").write_text('{"dtype": "float64", "quantization_config": {}, "hidden_size": 8}')
    stored = [publishing.plan_files({"a": ((3,), dtype)}, ONE_FILE) for dtype in dtypes]

    def save_as(place: Path, number: int) -> None:
        publication = publishing.Publication(place, stored[number])
        publication.abandon()
        before = checkpoint.older_weights(place, table_of(a=(3,)))
        publication.begin()
        checkpoint.publish(publication, place, model, stored[number], before)

    save_as(older, 0)

    def prepare() -> None:
        shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(older, directory)

    configs = []
    for _ in kill_at_every_step(lambda: save_as(directory, 1), prepare):
        config = json.loads((directory / "config.json").read_text())
        asked, held = (getattr(torch, name) for name in (config["dtype"], files.stored_tensors(directory)["a"].dtype))
        assert torch.promote_types(asked, held) == asked
        configs.append(config)
    assert [configs[0], configs[-1]] == [{"dtype": dtype, "hidden_size": 8} for dtype in dtypes]


def table_of(**shapes: tuple[int, ...]) -> Any:
    """What a save asks of a model's name table."""
    return SimpleNamespace(
        shapes=shapes,
        copies={},
        dims=SimpleNamespace(tied_embeddings=False),
        match=lambda name: None,
        is_served=shapes.__contains__,
        may_be_new=frozenset(),
        left_out=frozenset(),
    )


def test_files_of_others_stay(tmp_path: Path) -> None:
    """Also those that look like weights; what the index names is replaced, and model.safetensors: see older_weights."""
    others = ["model_ema.safetensors", "model-best-of-2024.safetensors", "adapter.safetensors", "notes.txt"]
    for file_nbytes in (ONE_FILE, SEVERAL_FILES, SEVERAL_FILES, ONE_FILE):
        for name in others:
            (tmp_path / name).write_text(name)
        save(tmp_path, file_nbytes)
    assert [(tmp_path / name).read_text() for name in others] == others
    assert len(list(tmp_path.iterdir())) == len(others) + 2


def test_weights_that_came_after_a_killed_save_stay(tmp_path: Path) -> None:
    """It had not put any file in place, so what has such a name is somebody else's."""
    killed = begun(tmp_path)
    (tmp_path / model_files.SINGLE).write_text("of a user")
    killed.abandon()
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(model_files.SINGLE, "of a user")]


def test_the_clean_up_of_a_killed_first_save_can_be_killed(quick_path: Path) -> None:
    """Between its files' final names, and whenever its removal is killed: the next one removes the rest."""
    directory = quick_path / "hf"

    def prepare() -> None:
        shutil.rmtree(directory, ignore_errors=True)
        save(directory, SEVERAL_FILES)
        made = [path.name for path in our_files(directory)]
        (directory / made[-1]).unlink()
        (directory / publishing.RECORD).write_text(json.dumps({"made": made, "replaced": []}))

    def abandon() -> None:
        publishing.Publication(directory, {}).abandon()

    for _ in kill_at_every_step(abandon, prepare):
        assert {seen_by(name, directory) for name in READERS} == {None}
        abandon()
        assert not list(directory.iterdir())


def test_other_weights_beside_the_index_are_refused(tmp_path: Path) -> None:
    """transformers would take them, and a save would remove them."""
    tensors = {"a": ((3,), "float32"), "b": ((2,), "float32")}
    publication = publishing.Publication(tmp_path, publishing.plan_files(tensors, 1))
    publication.begin()
    publication.publish()
    table = table_of(a=(3,), b=(2,))
    save_file({"a": torch.ones(3), "b": torch.ones(2)}, tmp_path / model_files.SINGLE)
    assert checkpoint.older_weights(tmp_path, table).keys() == {"a", "b"}
    save_file({"a": torch.ones(3), "b": torch.ones(2), "other": torch.ones(1)}, tmp_path / model_files.SINGLE)
    with pytest.raises(
        ConfigError, match=rf"{tmp_path / model_files.SINGLE} holds other weights .*\(other: in the check"
    ):
        checkpoint.older_weights(tmp_path, table)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint of one file."""
    save(tmp_path)
    return tmp_path


def test_a_full_disk_is_an_error_before_anything_is_written(small_disk: Path) -> None:
    save(small_disk)
    before = {path.name: path.read_bytes() for path in small_disk.iterdir()}
    publication = publishing.Publication(small_disk, publishing.plan_files({"a": ((1 << 20,), "float32")}, ONE_FILE))
    assert all(map(files.verify_checksum, our_files(small_disk)))
    message = r"creating .*model\.safetensors\.incomplete: no space left on device \(\d\.\d MB free on "
    with pytest.raises(FileError, match=message):
        publication.begin()
    publication.abandon()
    assert {path.name: path.read_bytes() for path in small_disk.iterdir()} == before


def test_a_limit_on_file_sizes_is_an_error_before_anything_is_written(saved: Path) -> None:
    before = {path.name: path.read_bytes() for path in saved.iterdir()}
    publication = publishing.Publication(saved, publishing.plan_files({"a": ((1 << 10,), "float32")}, ONE_FILE))
    with file_size_limit(4000), pytest.raises(FileError, match=r"model\.safetensors\.incomplete: file too large"):
        publication.begin()
    publication.abandon()
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before


@pytest.mark.parametrize("text", ["[]", "{", '{"made": ["../x"], "replaced": []}', '{"made": [null], "replaced": []}'])
def test_a_damaged_record_removes_nothing(saved: Path, text: str) -> None:
    (saved / publishing.RECORD).write_text(text)
    before = sorted(os.listdir(saved))
    with pytest.raises(FileError, match=f"{saved / publishing.RECORD}: damaged or cut short"):
        save(saved)
    assert sorted(os.listdir(saved)) == before
