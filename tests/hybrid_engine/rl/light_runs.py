"""Runs of `train` with real files and ranks, but with a number in place of engines and learning."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from hybrid_engine import ActorHybridWorker, load_config
from hybrid_engine.files.durable import write_text
from hybrid_engine.rl import GrpoConfig, Loop, train
from hybrid_engine.rl.completion_log import ScoredCompletion
from hybrid_engine.rl.run_files import Row
from hybrid_engine.rl.run_record import RunRecord
from hybrid_engine.rl.step_metrics import StepMeter
from tests.harness.launch import REPO_ROOT
from tests.hybrid_engine.rl.stand_ins import ALONE, stand_in
from tests.hybrid_engine.rl.test_prompt_source import Stream

MODEL = REPO_ROOT / "examples" / "gpt_rl" / "model"
SETTINGS: dict[str, Any] = {
    "steps": 4,
    "prompts_per_step": 2,
    "samples_per_prompt": 2,
    "save_every": 2,
    "export_every": 2,
    "evaluate_every": 1,
    "keep_best": "accuracy",
    "log_completions_every": 1,
}
OF_ATTEMPTS = {"lock", "tracker-run", "first-checkpoint", "metrics.1.jsonl", "metrics.2.jsonl"}
"""Files that name a process, or a run that was disturbed."""


class LightWorker(ActorHybridWorker):
    """A worker whose weights are `value`."""

    sharding: Any = mock.Mock()
    on_export: Any = bool
    train: Any = SimpleNamespace(weights=None)
    rollout_context = train_context = on_reshard_end = set_learning_rate = lambda *_: nullcontext()  # type: ignore[assignment]

    def __init__(self, job: Any, model: Path = MODEL, **actor: Any) -> None:
        self.config = load_config(
            {"model": str(model), "random_weights": True, "actor_config": actor}, 1
        )
        self.job = job
        self.value = 1
        self.actor = stand_in().actor
        self.inference = mock.Mock()

    def save_checkpoint(self, directory: Any, **_: Any) -> None:
        with self.job.agreement.phase("writing weights"):
            if self.rank == 0:
                directory.mkdir(parents=True, exist_ok=True)
                write_text(directory / "value", str(self.value))

    def save_hf_checkpoint(self, path: Any, **_: Any) -> None:
        with self.job.agreement.phase("exporting"):
            self.on_export()
        self.save_checkpoint(path)

    def load_checkpoint(self, directory: Any) -> None:
        self.value = int((directory / "value").read_text())


def learn(loop: Loop, number: int) -> Row:
    """Stand in for `Loop.learn`: learn the numbers in the prompts."""
    _, prompts = loop.queue.prompts_of(number)
    loop._unsaved = None
    worker: Any = loop.worker
    worker.value = worker.value * 31 + sum(int(prompt[2:]) for prompt in prompts)
    completion = SimpleNamespace(text="four", token_ids=(4,), finish_reason="stop")
    loop.samples = [ScoredCompletion(prompt, completion, 1.0) for prompt in prompts]
    loop.done = number
    return {"step": number, "value": worker.value}


def run(
    out: Path,
    job: Any = ALONE,
    *,
    on_call: Callable[[str, int], object] = lambda place, step: None,
    worker: LightWorker | None = None,
    changed: Any = (),
    **settings: Any,
) -> list[Row]:
    """Train. `on_call` is called in each of the user's functions, with its name and the step."""
    worker = worker or LightWorker(job)
    rows: list[Row] = []

    def called(place: str, result: Any = None) -> Any:
        on_call(place, len(rows) + 1)
        return result

    class Prompts(Stream):
        def state_dict(self) -> dict[str, int]:
            return called("prompts", super().state_dict())

    add = RunRecord.add

    def add_and_count(record: RunRecord, row: Row) -> None:
        add(record, row)
        rows.append(row)

    worker.on_export = lambda: called("export")
    wandb = mock.MagicMock(__spec__=ModuleSpec("wandb", None))
    wandb.init.side_effect = lambda **_: called("tracker") or mock.DEFAULT
    with (
        mock.patch.object(Loop, "learn", learn),
        mock.patch.object(RunRecord, "add", add_and_count),  # of all ranks
        mock.patch.object(StepMeter, "take", return_value={"seconds": 0.5, "grad_norm": 0.0}),
        mock.patch.dict(sys.modules, {"wandb": wandb}),
        mock.patch("hybrid_engine.rl.run_record.require_target"),
        mock.patch("hybrid_engine.rl.group_queue.require_room"),
    ):
        return train(
            worker,
            Prompts(5, has_passes=True),
            lambda prompt, completion: 1.0,
            GrpoConfig(**{**SETTINGS, **settings}),
            out=out,
            evaluate=lambda _: called("evaluate", {"accuracy": worker.value % 7}),
            on_step=lambda row: on_call("on_step", row["step"]),
            should_stop=lambda: called("should_stop"),
            trackers=["wandb"],
            changed=changed,
        )


def contents(out: Path) -> dict[str, bytes]:
    """Return the files of a run but `OF_ATTEMPTS`."""
    names = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    return {name: (out / name).read_bytes() for name in names - OF_ATTEMPTS}
