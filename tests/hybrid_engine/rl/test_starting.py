"""Errors found before the engines of a run are built."""

from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hybrid_engine import load_config
from hybrid_engine.errors import ConfigError
from hybrid_engine.ranks.job import Job
from hybrid_engine.ranks.world import World
from hybrid_engine.rl import GrpoConfig, train
from hybrid_engine.rl.run_checks import RunArguments, require_runnable
from hybrid_engine.rl.run_files import Progress, RunFiles
from tests.harness.errors import has_violation, has_violations, violated
from tests.harness.launch import REPO_ROOT
from tests.hybrid_engine.rl.stand_ins import ALONE

PROMPTS = [[1, 2, 3]] * 4
MODEL = REPO_ROOT / "examples" / "gpt_rl" / "model"


class UnbuildableWorker:
    """Stand-in for `ActorHybridWorker`; raises when it is built."""

    def __init__(self, *arguments: object, **named: object) -> None:
        raise Exception("engines are built")  # all checks have passed


def start(
    *,
    prompts: Any = PROMPTS,
    reward: Any = lambda prompt, completion: 1.0,
    algorithm: Any = GrpoConfig,
    model: Path = MODEL,
    engines: dict[str, Any] | None = None,
    out: Path | None = None,
    **arguments: Any,
) -> None:
    """Call `train`; `arguments` have settings of `algorithm`, too."""
    values = load_config({"model": str(model), "random_weights": True, **(engines or {})}, 1)
    settings = {
        name: arguments.pop(name) for name in list(arguments) if name in algorithm.model_fields
    }
    config = algorithm(**{"max_tokens": 8, **settings})
    with (
        mock.patch("hybrid_engine.rl.loop.Job", SimpleNamespace(join=lambda seconds: ALONE)),
        mock.patch("hybrid_engine.rl.loop.ActorHybridWorker", UnbuildableWorker),
    ):
        train(values, prompts, reward, config, out=out, **arguments)


def begin_run(out: Path) -> RunFiles:
    """Write the files of a run after one step."""
    files = RunFiles(out)
    check = RunFiles.check

    def check_and_begin(self: RunFiles, settings: Any, **named: Any) -> None:
        check(self, settings, **named)
        self.out.mkdir()
        self.begin(settings)

    with (
        mock.patch.object(RunFiles, "check", check_and_begin),
        pytest.raises(Exception, match="engines are built"),
    ):
        start(out=out)
    files.checkpoint(1).mkdir(parents=True)
    files.complete(Progress({"step": 1}))
    return files


@pytest.mark.parametrize(
    "name", ["README.md", ".nfs0001", "model.safetensors.index.json", "optimizer.pt"]
)
def test_an_unusable_export_directory_is_refused_before_training(tmp_path: Path, name: str) -> None:
    begin_run(tmp_path / "run")
    (tmp_path / "run" / "model").mkdir()
    (tmp_path / "run" / "model" / name).write_text("{}")
    with pytest.raises(ConfigError) as caught:
        start(out=tmp_path / "run")
    assert str(tmp_path / "run" / "model") in str(caught.value)


def test_a_locked_or_foreign_directory_is_refused(tmp_path: Path) -> None:
    locked = has_violation("out", "run-is-locked")
    with RunFiles(tmp_path / "run").lock(), pytest.raises(ConfigError, check=locked):
        start(out=tmp_path / "run")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").touch()
    with pytest.raises(
        ConfigError, check=has_violation("out", "not-a-run", "mine.txt", "run.json")
    ):
        start(out=tmp_path / "notes")
    (tmp_path / "file").touch()
    with pytest.raises(
        ConfigError, check=has_violation("out", "not-a-run", str(tmp_path / "file"))
    ):
        start(out=tmp_path / "file")


def test_servers_that_do_not_respond_are_refused(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{unused.getsockname()[1]}"
    with pytest.raises(
        ConfigError, check=has_violation("generate_config.servers", "silent-server", address)
    ):
        start(out=tmp_path / "run", engines={"generate_config": {"servers": (address,)}})


def test_ranks_wait_longer_for_silent_servers_than_for_each_other() -> None:
    store = dist.HashStore()
    arguments = RunArguments.of(
        PROMPTS, lambda prompt, completion: 1.0, GrpoConfig(max_tokens=8), {}
    )
    # Both accept connections and never respond: longer, together, than ranks wait for each other.
    here = ("127.0.0.1", 0)
    with socket.create_server(here) as first, socket.create_server(here) as second:
        ports = [server.getsockname()[1] for server in (first, second)]
        servers = [f"http://127.0.0.1:{port}" for port in ports]
        keys = {"servers": servers, "timeout_seconds": 2}
        values = {"model": str(MODEL), "random_weights": True, "generate_config": keys}
        engines = load_config(values, 2)
        silent = ("generate_config.servers", "silent-server")

        def check(rank: int) -> None:
            world = World(store, rank, 2)
            with (
                closing(Job.join(2, world=world, device=torch.device("cpu"))) as job,
                pytest.raises(ConfigError, check=has_violations(silent, silent)),
            ):
                require_runnable(engines, arguments, job, None)

        with ThreadPoolExecutor() as ranks:
            list(ranks.map(check, range(2)))


def test_changed_engine_settings_are_refused(tmp_path: Path) -> None:
    begin_run(tmp_path / "run")
    optimizer = {"weight_decay": 0.9, "adam_beta2": 0.5, "lr": 0.5}
    changed = {"seed": 2, "params_dtype": "float32"}
    keys = [*(f"optimizer.{name}" for name in optimizer), *changed]
    refused = has_violations(*((f"actor_config.{key}", "differs-from-run") for key in keys))
    with pytest.raises(ConfigError, check=refused):
        start(out=tmp_path / "run", engines={"actor_config": {**changed, "optimizer": optimizer}})


def test_a_run_older_than_an_option_resumes_with_the_default(tmp_path: Path) -> None:
    begin_run(tmp_path / "run")
    path = tmp_path / "run" / "run.json"
    settings = json.loads(path.read_text())
    del settings["critic_config"]
    del settings["generate_config"]["server_pause"]
    del settings["GrpoConfig"]["redraws"]
    path.write_text(json.dumps(settings))
    with pytest.raises(Exception, match="engines are built"):
        start(out=tmp_path / "run")
    differs = has_violation("GrpoConfig.redraws", "differs-from-run", "has 0, this one 2")
    with pytest.raises(ConfigError, check=differs):
        start(out=tmp_path / "run", redraws=2)


def test_another_model_is_refused_and_a_moved_model_accepted(tmp_path: Path) -> None:
    begin_run(tmp_path / "run")
    moved = tmp_path / "model"
    moved.mkdir()
    for path in MODEL.iterdir():
        (moved / path.name).write_bytes(path.read_bytes())
    with pytest.raises(Exception, match="engines are built"):
        start(out=tmp_path / "run", model=moved)
    (moved / "tokenizer_config.json").write_text("{}")
    with violated(ConfigError, ("model", "differs-from-run")):
        start(out=tmp_path / "run", model=moved)
