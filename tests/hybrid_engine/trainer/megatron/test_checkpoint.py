"""Checkpoints on two real ranks: what is loaded is bitwise what was saved, and so is the step that follows."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybrid_engine.config import ActorConfig
from hybrid_engine.errors import ConfigError, HybridEngineError, StateError
from hybrid_engine.memory.offloader import MegatronOffloader
from hybrid_engine.ranks.job import Job
from tests.harness.kills import kill_at_every_step
from tests.harness.launch import Outcomes, Ranks
from tests.harness.small_disks import file_size_limit
from tests.zoo.megatron_models import DENSE_FLOAT32, negative_log_likelihood, running
from tests.zoo.shares import share_of
from tests.zoo.tiny_models import save_model, token_batch

TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
BFLOAT16 = {"params_dtype": "bfloat16"}
PLAIN = {"use_distributed_optimizer": False}

# name -> (family, model changes, actor settings)
LAYOUTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "tp2, distributed optimizer": ("qwen3", {}, TP2),
    "dp2, distributed optimizer, bfloat16": ("qwen3", {}, BFLOAT16),
    "tp2, plain optimizer": ("llama", {}, {**TP2, **PLAIN}),
    "dp2, plain optimizer, bfloat16": ("llama", {}, {**BFLOAT16, **PLAIN}),
    "pp2 vpp2, tied": (
        "qwen3",
        {"tie_word_embeddings": True, "num_hidden_layers": 4},
        {**PP2, "virtual_pipeline_model_parallel_size": 2},
    ),
    "tp2, adapters": ("qwen3", {}, {**TP2, "lora": {"rank": 4}}),
}


def without(key: str, *place: str) -> Callable[[Any], None]:
    """A change of a rank's state: no `key` in what lies at `place`."""

    def change(state: Any) -> None:
        for name in place:
            state = state[name]
        del state[key]

    return change


def reshape_one(state: Any) -> None:
    name = sorted(state["chunks"][0])[0]
    state["chunks"][0][name] = state["chunks"][0][name].reshape(-1, 1)[1:]


def rename_one(state: Any) -> None:
    name = sorted(state["chunks"][0])[0]
    state["chunks"][0]["other"] = state["chunks"][0].pop(name)


def shorten_a_moment(state: Any) -> None:
    moments = state["optimizer"]["members"][0]["state"][0]
    moments["exp_avg"] = moments["exp_avg"][1:]


def make_one_sparse(state: Any) -> None:
    name = sorted(state["chunks"][0])[0]
    state["chunks"][0][name] = state["chunks"][0][name].to_sparse()


# name -> (part of the message, change of the state that rank 1 finds, its checksum being right)
OTHER_STATE: dict[str, tuple[str, Callable[[Any], object]]] = {
    "no optimizer": ("optimizer is missing", without("optimizer")),
    "no generators": ("generators is missing", without("generators")),
    "no tracker": ("generators: tracker is missing", without("tracker", "generators")),
    "bad generator": ("not a state of torch's generator", lambda state: state["generators"]["torch"].fill_(255)),
    "no main parameters": ("optimizer: main_params is missing", without("main_params", "optimizer")),
    "no version": ("optimizer: weight_version is missing", without("weight_version", "optimizer")),
    "a version below 0": ("weight_version is -1", lambda state: state["optimizer"].update(weight_version=-1)),
    "a sparse tensor": ("torch.sparse_coo, expected torch.strided", make_one_sparse),
    "no members": ("optimizer: 0 members, expected 1", lambda state: state["optimizer"]["members"].clear()),
    "no moments": ("not the state of an optimizer", lambda state: state["optimizer"]["members"][0].clear()),
    "a short moment": ("member 0: parameter 0: exp_avg (", shorten_a_moment),
    "one moment less": (
        "parameter 0: exp_avg_sq is missing",
        lambda state: without("exp_avg_sq")(state["optimizer"]["members"][0]["state"][0]),
    ),
    "another shape": ("of torch.bfloat16, expected (", reshape_one),
    "another name": ("other is unknown to this model", rename_one),
    "no chunk": ("chunks: 0 items, expected 1", lambda state: state["chunks"].clear()),
    "no layout": ("layout is missing", without("layout")),
}


def flip(path: Path) -> None:
    contents = bytearray(path.read_bytes())
    contents[len(contents) // 2 : len(contents) // 2 + 8] = bytes(
        byte ^ 255 for byte in contents[len(contents) // 2 : len(contents) // 2 + 8]
    )
    path.write_bytes(contents)


# name -> (part of the message, what happens to rank 1's file)
OTHER_FILE: dict[str, tuple[str, Callable[[Path], object]]] = {
    "eight bytes": ("bytes with checksum ", flip),
    "cut": ("rank0001.pt: 100 bytes with checksum ", lambda path: os.truncate(path, 100)),
    "empty": ("rank0001.pt: 0 bytes with checksum ", lambda path: os.truncate(path, 0)),
    "another rank's": ("bytes with checksum ", lambda path: shutil.copy(path.with_name("rank0000.pt"), path)),
    "gone": ("no checkpoint of rank 1: ", lambda path: path.unlink()),
    "no manifest": ("it has no manifest.json", lambda path: path.with_name("manifest.json").unlink()),
    "manifest": ("manifest.json: damaged or cut short", lambda path: path.with_name("manifest.json").write_text("{")),
    "manifest of others": (
        "manifest.json: damaged or cut short (ValueError: it has no entry for rank000",
        lambda path: path.with_name("manifest.json").write_text('{"files": {"rank0000.pt": 5}}'),
    ),
}  # fmt: skip


def load_what_is_wrong(model: Path, root: Path) -> dict[str, tuple[str, str, bool]]:
    """By case, on this rank: error, message, and whether all of the state is bitwise what it was."""
    from hybrid_engine.trainer import checkpoint_directory
    from hybrid_engine.trainer.megatron import rank_files
    from hybrid_engine.trainer.megatron.rank_checkpoint import load_checkpoint, save_checkpoint
    from megatron_patches.optimizers import optimizer_tensors

    results = {}
    config = ActorConfig(**{**DENSE_FLOAT32, **BFLOAT16, "optimizer": {"lr": 1e-2}})
    with running(model, config) as run:
        job = Job.join(60)

        def outcome(action: Callable[[], None]) -> tuple[str, str, bool]:
            with pytest.raises(HybridEngineError) as caught:
                action()
            try:
                assert_same(before, state_of(run))
            except AssertionError:
                return type(caught.value).__name__, str(caught.value), False
            return type(caught.value).__name__, str(caught.value), True

        def load_damaged(name: str) -> tuple[str, str, bool]:
            damaged = root / name
            if dist.get_rank() == 1:
                shutil.copytree(root / "saved", damaged)
                path = damaged / "rank0001.pt"
                if name in OTHER_FILE:
                    OTHER_FILE[name][1](path)
                else:
                    state = torch.load(path, weights_only=True)
                    OTHER_STATE[name][1](state)
                    contents = rank_files.write_rank_file(path, state)
                    checkpoint_directory.write_manifest(damaged, {**manifest, path.name: contents})
            job.agreement.gather(None)
            return outcome(lambda: load_checkpoint(damaged, run.actor, job))

        train(run, 0)
        save_checkpoint(root / "saved", run.actor, job)
        saved = state_of(run)
        manifest = {path.name: checkpoint_directory.contents_of(path) for path in (root / "saved").glob("rank*.pt")}
        train(run, 1)
        before = state_of(run)
        for name in (*OTHER_STATE, *OTHER_FILE):
            results[name] = load_damaged(name)
        with file_size_limit(5000) if dist.get_rank() == 1 else nullcontext():
            results["full"] = outcome(lambda: save_checkpoint(root / "saved", run.actor, job))
        job.agreement.gather(None)  # rank 0 cleans up
        results["left"] = sorted(path.name for path in root.glob("saved*"))
        (root / "file").touch()
        results["below a file"] = outcome(lambda: save_checkpoint(root / "file" / "a", run.actor, job))
        load_checkpoint(root / "saved", run.actor, job)
        assert_same(saved, state_of(run))
        manifest_before = (root / "saved" / "manifest.json").read_bytes()
        moment = next(one.tensor for one in optimizer_tensors(run.actor.optimizer) if one.key == "exp_avg")
        moment.view(-1)[0] = float("inf") if dist.get_rank() == 1 else 0.0
        with pytest.raises(HybridEngineError) as caught:
            save_checkpoint(root / "saved", run.actor, job)
        is_kept = (root / "saved" / "manifest.json").read_bytes() == manifest_before
        results["not finite"] = (type(caught.value).__name__, str(caught.value), is_kept)
        save_checkpoint(root / "infinite", run.actor, job, check_nan=False)
        results["asked for"] = sorted(path.name for path in root.glob("infinite*"))
    return results


def save_and_load(paths: dict[str, Path], root: Path) -> dict[str, dict[str, Any]]:
    """On every rank: the states of a run, and of a fresh one that took up its checkpoint."""
    return {name: round_trip(paths[name], settings, root / name) for name, (_, _, settings) in LAYOUTS.items()}


def round_trip(path: Path, settings: dict[str, Any], root: Path) -> dict[str, Any]:
    config = ActorConfig(**{**DENSE_FLOAT32, **settings, "optimizer": {"lr": 1e-2}})
    result: dict[str, Any] = {}
    with running(path, config) as run:
        job = Job.join(60)
        from hybrid_engine.trainer.megatron.rank_checkpoint import load_checkpoint, save_checkpoint

        save_checkpoint(root / "untrained", run.actor, job)
        result["untrained"] = state_of(run)
        for step in range(2):
            train(run, step)
        run.engine.set_learning_rate(3e-3)
        save_checkpoint(root / "trained", run.actor, job)
        result["saved"] = state_of(run)
        train(run, 2)
        result["continued"] = state_of(run)
    with running(path, ActorConfig(**{**config.model_dump(), "seed": 99})) as run:
        load_checkpoint(root / "trained", run.actor, job)
        offload_and_back(run)
        result["loaded"] = state_of(run)
        train(run, 2)
        result["resumed"] = state_of(run)
        load_checkpoint(root / "untrained", run.actor, job)  # back again, onto optimizer state that exists
        result["reloaded"] = state_of(run)
        save_checkpoint(root / "untrained", run.actor, job)  # replaces
        load_checkpoint(root / "untrained", run.actor, job)
        result["replaced"] = state_of(run)
    return result


SCHEDULE = {"lr_decay_style": "linear", "lr_warmup_steps": 2, "lr_decay_steps": 12, "lr_warmup_init": 1e-3}


def resume_schedule(path: Path, root: Path) -> dict[str, Any]:
    """Learning rates of a run, of one that took up its checkpoint, and of one whose checkpoint has no schedule."""
    from hybrid_engine.trainer.megatron.rank_checkpoint import load_checkpoint, save_checkpoint

    plain = ActorConfig(**{**DENSE_FLOAT32, "optimizer": {"lr": 1e-2}})
    config = ActorConfig(**{**DENSE_FLOAT32, "optimizer": {"lr": 1e-2, "schedule": SCHEDULE}})
    other_limits = {"lr": 2e-2, "schedule": {"lr_decay_style": "linear", "lr_decay_steps": 10, "min_lr": 1e-3}}
    changed = ActorConfig(**{**DENSE_FLOAT32, "optimizer": other_limits})
    job, found = Job.join(60), {}
    with running(path, config) as run:
        found["rates"] = [train(run, step)["learning_rate"] for step in range(4)]
        save_checkpoint(root / "scheduled", run.actor, job)
        found["next"] = run.engine.learning_rate
        with pytest.raises(StateError) as caught:
            run.engine.set_learning_rate(1e-3)
        found["refused"] = str(caught.value)
    with running(path, plain) as run:
        save_checkpoint(root / "plain", run.actor, job)
        load_checkpoint(root / "scheduled", run.actor, job)
        found["by hand"] = run.engine.learning_rate
        run.engine.set_learning_rate(1e-3)
    with running(path, config) as run:
        load_checkpoint(root / "scheduled", run.actor, job)
        found["resumed"] = run.engine.learning_rate
        load_checkpoint(root / "plain", run.actor, job)
        found["begun"] = [train(run, step)["learning_rate"] for step in range(4)]
    with running(path, changed) as run:
        for name in ("scheduled", "plain"):
            load_checkpoint(root / name, run.actor, job)
            found[f"changed, from {name}"] = run.engine.learning_rate
    return found


def offload_and_back(run: Any) -> None:
    """A loaded state must be able to leave the device like any other."""
    offloader = MegatronOffloader(run.engine.offload_items)
    offloader.offload({"param", "grad", "optimizer"})
    offloader.onload({"param", "grad", "optimizer"})


def train(run: Any, step: int) -> dict[str, float]:
    batch = token_batch(step, num_sequences=4, length=12)
    return run.engine.train_step(share_of(run.engine, batch), negative_log_likelihood)


def state_of(run: Any) -> dict[str, Any]:
    """All that has to come back, copied."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    from megatron_patches.optimizers import optimizer_tensors

    tensors = {name: p.detach().clone() for name, p in run.engine.weights.model.named_parameters()}
    for state in optimizer_tensors(run.actor.optimizer):
        if state.kind != "main_grad":
            tensors[f"{state.path}.{state.key}"] = state.tensor.detach().clone()
    tensors["generator"] = torch.get_rng_state()
    tensors.update({f"tracker.{name}": s.clone() for name, s in get_cuda_rng_tracker().get_states().items()})
    groups = [{k: v for k, v in group.items() if k != "params"} for group in run.actor.optimizer.param_groups]
    return {"tensors": tensors, "groups": groups, "version": run.engine.version}


def assert_same(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert first["version"] == second["version"]
    assert [group["lr"] for group in first["groups"]] == [group["lr"] for group in second["groups"]]
    assert first["tensors"].keys() == second["tensors"].keys()
    different = [name for name, tensor in first["tensors"].items() if not torch.equal(tensor, second["tensors"][name])]
    assert not different


@pytest.fixture(scope="module")
def launched(engines: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """By rank: layout -> states; case -> how a load or a save failed."""
    paths = {
        name: save_model(tmp_path_factory.mktemp("model"), family, **changes)
        for name, (family, changes, _) in LAYOUTS.items()
    }
    root = tmp_path_factory.mktemp("checkpoints")
    calls = {
        "good": (save_and_load, (paths, root)),
        "schedule": (resume_schedule, (paths["tp2, distributed optimizer"], root)),
        "wrong": (load_what_is_wrong, (paths["dp2, distributed optimizer, bfloat16"], root)),
    }
    return engines.launch_in_turn(2, calls)


@pytest.fixture
def results(launched: Outcomes) -> list[dict[str, dict[str, Any]]]:
    """By rank: layout -> states."""
    return launched["good"]


@pytest.mark.parametrize("name", [*OTHER_STATE, *OTHER_FILE])
def test_a_load_that_fails_changes_nothing_on_any_rank(launched: Outcomes, name: str) -> None:
    message = {**OTHER_STATE, **OTHER_FILE}[name][0]
    for _, text, is_kept in (results[name] for results in launched["wrong"]):
        assert message in text
        assert str(Path(name)) in text  # the directory's name is that of the case
        assert is_kept
    if name in OTHER_STATE:
        assert [results[name][0] for results in launched["wrong"]] == ["RemoteError", "StateError"]


def test_a_save_that_fails_leaves_the_old_checkpoint_and_nothing_else(launched: Outcomes) -> None:
    for rank, results in enumerate(launched["wrong"]):
        error, text, _ = results["full"]
        assert error == ["RemoteError", "FileError"][rank]
        assert re.search(r"saved\.incomplete/rank0001\.pt: file too large \(limit 5,000\)", text)
        assert results["left"] == ["saved"]
        error, text, _ = results["below a file"]
        assert error == ["FileError", "RemoteError"][rank]
        assert "file/a: not a directory" in text


def test_what_is_not_finite_is_saved_only_if_asked_for(launched: Outcomes) -> None:
    for rank, results in enumerate(launched["wrong"]):
        error, text, is_kept = results["not finite"]
        assert error == ["RemoteError", "WeightError"][rank]
        assert re.search(r"rank 1: optimizer: members: 0: state: \d+: exp_avg: 1 Inf of \d+ elements", text)
        assert "go back to a checkpoint, or save them with check_nan=False" in text
        assert is_kept
        assert results["asked for"] == ["infinite"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("expected", "actual"),
    [("saved", "loaded"), ("continued", "resumed"), ("untrained", "reloaded"), ("untrained", "replaced")],
)
def test_bitwise(results: list[dict[str, dict[str, Any]]], layout: str, expected: str, actual: str) -> None:
    for by_layout in results:
        states = by_layout[layout]
        assert_same(states[expected], states[actual])
        assert states["saved"]["version"] == 2


class LoneAgreement:
    """An agreement of one rank."""

    def phase(self, name: str) -> Any:
        return nullcontext()

    def gather(self, value: object, phase: str) -> list[object]:
        return [value]


LONE_JOB = SimpleNamespace(rank=0, world_size=1, agreement=LoneAgreement())


@pytest.fixture
def save(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, str], None]:
    """Saves one value, as the only rank."""
    from hybrid_engine.trainer.megatron import rank_checkpoint as checkpoint

    monkeypatch.setattr(checkpoint, "_saved_state", lambda actor, job: actor)
    return lambda directory, value: checkpoint.save_checkpoint(directory, {"value": value}, LONE_JOB)


def test_a_schedule_goes_on_where_it_was_saved(launched: Outcomes) -> None:
    for found in launched["schedule"]:
        assert found["rates"] == pytest.approx([1e-3, 5.5e-3, 1e-2, 9e-3])
        assert found["next"] == found["resumed"] == found["by hand"] == pytest.approx(8e-3)
        assert found["begun"] == pytest.approx(found["rates"])  # an older checkpoint, or one of a run without
        assert found["changed, from scheduled"] == pytest.approx(1e-3 + 0.6 * 1.9e-2)  # after four of ten
        assert found["changed, from plain"] == pytest.approx(2e-2)


def test_a_schedule_and_a_rate_set_by_hand_exclude_each_other(launched: Outcomes) -> None:
    assert all("follows optimizer.schedule of the configuration" in found["refused"] for found in launched["schedule"])


@pytest.mark.parametrize("name", ["results", "results.incomplete", "results.replaced", "results.replaced.removed"])
def test_files_of_others_are_refused_and_stay(tmp_path: Path, save: Callable[[Path, str], None], name: str) -> None:
    """In the directory itself, and where a save puts things beside it."""
    save(tmp_path / "results", "old")
    (tmp_path / name).mkdir(exist_ok=True)
    (tmp_path / name / "precious.txt").write_text("precious")
    before = {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}
    with pytest.raises(ConfigError, match=rf"{tmp_path / name} holds files that are not a checkpoint.s: precious\.txt"):
        save(tmp_path / "results", "new")
    assert {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")} == before


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_link_to_the_directory_stays_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: Callable[[Path, str], None], can_exchange: bool
) -> None:
    from hybrid_engine.files import durable as durable_files
    from hybrid_engine.trainer.megatron import rank_checkpoint as checkpoint
    from hybrid_engine.trainer.megatron import rank_files

    if not can_exchange:
        monkeypatch.setattr(durable_files, "_exchange", lambda first, second: False)
    real, link = tmp_path / "disk" / "weights", tmp_path / "link"
    link.symlink_to(real)
    for value in ("old", "new"):
        save(link, value)
        assert link.is_symlink()
        assert rank_files.read_rank_file(real, 0)["value"] == value
    assert list(real.parent.iterdir()) == [real]
    real.rename(real.with_name("weights.replaced"))  # as a kill between two renames leaves it

    def refuse(state: Any, actor: object, job: object, path: Path) -> None:
        raise StateError(f"{state} in {path}")

    monkeypatch.setattr(checkpoint, "_require_fit", refuse)  # there is no actor
    with pytest.raises(StateError, match=rf"'new'.* in {real}\.replaced/rank0000\.pt"):
        checkpoint.load_checkpoint(link, None, LONE_JOB)


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_killed_save_leaves_the_old_checkpoint_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: Callable[[Path, str], None], can_exchange: bool
) -> None:
    """Killed before every call that changes a file; then it is loaded, and saved once more."""
    from hybrid_engine.files import durable as durable_files
    from hybrid_engine.trainer.megatron import rank_files

    directory = tmp_path / "weights"
    if not can_exchange:
        monkeypatch.setattr(durable_files, "_exchange", lambda first, second: False)

    def loaded() -> str:
        return rank_files.read_rank_file(durable_files.current_directory(directory), 0)["value"]

    seen = []
    for _ in kill_at_every_step(lambda: save(directory, "new"), lambda: save(directory, "old")):
        seen.append(loaded())
    assert seen == ["old"] * seen.count("old") + ["new"] * seen.count("new")
    assert [seen[0], seen[-1]] == ["old", "new"]
    assert list(tmp_path.iterdir()) == [directory]
