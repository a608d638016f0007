"""Checkpoints of the FSDP2 trainer: bitwise what was saved, on as many ranks, twice and half as many; or untouched."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_engine.backends.fsdp.sharded_tensors import local_of
from hybrid_engine.errors import HybridEngineError
from hybrid_engine.memory.offload_items import KINDS
from hybrid_engine.memory.offloader import Offloader
from hybrid_engine.trainer import checkpoint_directory
from tests.harness.launch import Outcomes, Ranks
from tests.harness.small_disks import file_size_limit
from tests.hybrid_engine.backends.fsdp.actors import (
    TIED_WITH_ODD_ROWS,
    State,
    actor,
    assert_same,
    state_of,
    train,
)
from tests.zoo.families import tiny_config, write_config

HYBRID = {"sharding_strategy": "HYBRID_SHARD", "replicas": 2}


def save(path: Path, root: Path) -> dict[str, Any]:
    """Two steps, a checkpoint, another step; and the same from the checkpoint, by one that began otherwise."""
    found: dict[str, Any] = {}
    with actor(path) as engine:
        engine.save_checkpoint(root / "untrained")
        found["untrained"] = state_of(engine)
        for step in range(2):
            train(engine, step)
        engine.set_learning_rate(3e-3)
        torch.manual_seed(40 + engine.dp_rank)
        engine.save_checkpoint(root / "trained")
        found["trained"] = state_of(engine)
        found["report"] = train(engine, 2)
        found["continued"] = state_of(engine)
    with actor(path, seed=99) as engine:
        engine.load_checkpoint(root / "trained")
        offloader = Offloader(engine.offload_items)
        offloader.offload(KINDS)
        offloader.onload(KINDS)
        found["loaded"] = state_of(engine)
        train(engine, 2)
        found["resumed"] = state_of(engine)
        engine.load_checkpoint(root / "untrained")  # onto optimizer state that exists
        found["reloaded"] = state_of(engine)
        engine.save_checkpoint(root / "untrained")  # replaces
        engine.load_checkpoint(root / "untrained")
        found["replaced"] = state_of(engine)
    return found


def resume(path: Path, root: Path, onto: str, **settings: Any) -> dict[str, Any]:
    """Take up the checkpoint `trained` on these ranks, take a step, and write one called `onto`."""
    with actor(path, seed=5, **settings) as engine:
        engine.load_checkpoint(root / "trained")
        loaded = state_of(engine)
        engine.save_checkpoint(root / onto)
        return {"loaded": loaded, "report": train(engine, 2)}


def load(path: Path, directory: Path) -> State:
    with actor(path) as engine:
        engine.load_checkpoint(directory)
        return state_of(engine)


def flip(path: Path) -> None:
    contents = bytearray(path.read_bytes())
    contents[len(contents) // 2] ^= 255
    path.write_bytes(contents)


def rewrite(path: Path, text: str) -> None:
    """Other contents, with a manifest that says so."""
    path.write_text(text)
    names = checkpoint_directory.names_in_manifest(path.parent)
    checkpoint_directory.write_manifest(
        path.parent, {name: checkpoint_directory.contents_of(path.parent / name) for name in names}
    )


def forget(directory: Path, name: str) -> None:
    names = set(checkpoint_directory.names_in_manifest(directory)) - {name}
    checkpoint_directory.write_manifest(
        directory, {name: checkpoint_directory.contents_of(directory / name) for name in names}
    )


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


# name -> (part of the message, what happens to a copy of the checkpoint)
DAMAGE: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a bit": ("__1_0.distcp: ", lambda path: flip(path / "__1_0.distcp")),
    "metadata": (".metadata: ", lambda path: flip(path / ".metadata")),
    "a file gone": ("__0_0.distcp: no such file", lambda path: (path / "__0_0.distcp").unlink()),
    "no metadata": ("no checkpoint of an FSDP2 trainer", lambda path: (path / ".metadata").unlink()),
    "no manifest": ("it has no manifest.json", lambda path: (path / "manifest.json").unlink()),
    "a manifest of nothing": (
        "manifest.json: damaged or cut short (ValueError: it has no entry for ",
        lambda path: (path / "manifest.json").write_text('{"files": {}}'),
    ),
    "a file that it does not list": ("it has no entry for __1_0.distcp", lambda path: forget(path, "__1_0.distcp")),
    "a pipe": ("it is not a regular file", lambda path: replace_by_pipe(path / "counters.json")),
    "counters": ("counters.json has other entries", lambda path: rewrite(path / "counters.json", "{}")),
    "nothing": ("no checkpoint of an FSDP2 trainer", shutil.rmtree),
}


def fail(path: Path, other: Path, root: Path) -> dict[str, tuple[str, bool]]:
    """By case, on this rank: the error, and whether all of the state is what it was."""
    found = {}
    with actor(path) as engine:
        train(engine, 0)
        before = state_of(engine)
        job = engine._job
        engine.save_checkpoint(root / "good")

        def outcome(action: Callable[[], None]) -> tuple[str, bool]:
            with pytest.raises(HybridEngineError) as caught:
                action()
            assert_same(before, state_of(engine))
            return str(caught.value), True

        for name, (_, damage) in DAMAGE.items():
            if job.rank == 0:
                shutil.copytree(root / "good", root / name)
                damage(root / name)
            job.agreement.gather(None)
            found[name] = outcome(partial(engine.load_checkpoint, root / name))
        with file_size_limit(5000) if job.rank == 1 else nullcontext():
            found["full"] = outcome(partial(engine.save_checkpoint, root / "good"))
        job.agreement.gather(None)  # rank 0 cleans up
        engine.load_checkpoint(root / "good")
        assert_same(before, state_of(engine))
        found["left"] = ", ".join(sorted(each.name for each in root.glob("good*"))), True
        if job.rank == 0:
            (root / "notes").mkdir()
            (root / "notes" / "precious.txt").touch()
        job.agreement.gather(None)
        found["precious"] = outcome(partial(engine.save_checkpoint, root / "notes"))
        moments = next(state["exp_avg"] for state in engine.trained_by.state.values() if "exp_avg" in state)
        local_of(moments).view(-1)[0] = float("nan") if job.rank == 1 else 0.0
        with pytest.raises(HybridEngineError) as caught:
            engine.save_checkpoint(root / "nan")
        found["not finite"] = str(caught.value), not list(root.glob("nan*"))
        job.agreement.gather(None)
        engine.save_checkpoint(root / "nan", check_nan=False)
        found["asked for"] = str((root / "nan" / "manifest.json").is_file()), True
    with actor(other) as engine:
        before = state_of(engine)
        found["another model"] = outcome(partial(engine.load_checkpoint, root / "good"))
    return found


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two models."""
    changes: dict[str, dict[str, Any]] = {"qwen2": TIED_WITH_ODD_ROWS, "gpt2": {}}
    return {
        family: write_config(tmp_path_factory.mktemp(family), tiny_config(family, **of_family))
        for family, of_family in changes.items()
    }


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def on_two(ranks: Ranks, paths: dict[str, Path], root: Path) -> Outcomes:
    wrong = root / "wrong"
    wrong.mkdir()
    calls = {"saved": (save, (paths["qwen2"], root)), "failed": (fail, (paths["qwen2"], paths["gpt2"], wrong))}
    return ranks.launch_in_turn(2, calls)


@pytest.fixture(scope="module")
def on_four(ranks: Ranks, on_two: Outcomes, paths: dict[str, Path], root: Path) -> list[dict[str, Any]]:
    assert on_two["saved"]
    return ranks.launch(partial(resume, fsdp=HYBRID), 4, paths["qwen2"], root, "of four")


@pytest.fixture(scope="module")
def back_on_two(ranks: Ranks, on_four: list[dict[str, Any]], paths: dict[str, Path], root: Path) -> list[State]:
    return ranks.launch(load, 2, paths["qwen2"], root / "of four")


def test_what_is_loaded_is_what_was_saved(on_two: Outcomes) -> None:
    for found in on_two["saved"]:
        for expected, actual in (
            ("trained", "loaded"),
            ("continued", "resumed"),
            ("untrained", "reloaded"),
            ("untrained", "replaced"),
        ):
            assert_same(found[expected], found[actual])
        assert found["trained"]["version"] == 2
        assert found["trained"]["groups"][0]["lr"] == 3e-3
        assert any("exp_avg" in name for name in found["trained"]["tensors"])
    first, second = on_two["saved"]
    assert not torch.equal(first["loaded"]["generator"], second["loaded"]["generator"])


def test_resumed_on_twice_and_on_half_as_many_ranks(
    on_two: Outcomes, on_four: list[dict[str, Any]], back_on_two: list[State]
) -> None:
    """With replicas, too. All of the state is bitwise; the step after it adds up in another order."""
    saved = on_two["saved"]
    for rank, found in enumerate(on_four):
        assert_same(saved[0]["trained"], found["loaded"], generators=False)
        assert torch.equal(found["loaded"]["generator"], saved[rank % 2]["trained"]["generator"])
        for name, value in saved[0]["report"].items():
            assert found["report"][name] == pytest.approx(value, rel=1e-5)
    for rank, state in enumerate(back_on_two):
        assert_same(saved[0]["trained"], state, generators=False)
        assert torch.equal(state["generator"], saved[rank]["trained"]["generator"])


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_checkpoint_changes_nothing_on_any_rank(on_two: Outcomes, name: str) -> None:
    for text, is_kept in (found[name] for found in on_two["failed"]):
        assert DAMAGE[name][0] in text
        assert str(Path(name)) in text  # the directory's name is that of the case
        assert is_kept


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("full", "good.incomplete: file too large (limit 5,000)"),
        ("precious", "holds files that are not a checkpoint's: precious.txt"),
        ("another model", "belongs to another model: "),
    ],
)
def test_what_cannot_be_done_says_why(on_two: Outcomes, name: str, message: str) -> None:
    for found in on_two["failed"]:
        assert message in found[name][0]
        assert found["left"][0] == "good"


def test_what_is_not_finite_is_saved_only_if_asked_for(on_two: Outcomes) -> None:
    for found in on_two["failed"]:
        text, is_nothing_written = found["not finite"]
        assert re.search(r"optimizer\.\S+\.exp_avg on rank 1: 1 NaN of \d+ elements", text)
        assert "go back to a checkpoint, or save them with check_nan=False" in text
        assert is_nothing_written
        assert found["asked for"][0] == "True"
