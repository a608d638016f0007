"""Outputs of a script's switches; failures on one of two real ranks with fakes of both engines."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from hybrid_engine.backends.vllm.engine_settings import Completion, Sampling
from hybrid_engine.megatron_script import script_engine as engine
from hybrid_engine.megatron_script.script_engine import TIMERS, Journal
from hybrid_engine.ranks.job import Job
from hybrid_engine.switch.report import ReshardReport
from tests.harness.launch import on_engines
from tests.harness.small_disks import file_size_limit
from tests.harness.values import Values
from tests.hybrid_engine.ranks.test_agreement import outcome_of
from tests.hybrid_engine.switch.fakes import FakeInference, FakeTraining, Rig, Script
from tests.hybrid_engine.tools.programs import read_lines


class Timers:
    """Stand-in for Megatron's timers."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __call__(self, name: str, log_level: int) -> Any:
        return SimpleNamespace(
            start=lambda barrier=False: self.calls.append(f"start {name}"),
            stop=lambda: self.calls.append(f"stop {name}"),
        )

    def write(self, names: list[str], writer: Any, iteration: int, reset: bool) -> None:
        self.calls.append("write")

    def log(self, names: list[str]) -> None:
        self.calls.append("log")


def report(direction: str) -> ReshardReport:
    return ReshardReport(
        direction=direction,
        version=4,
        seconds=0.5,
        seconds_by_phase={},
        bytes_received=10,
        bytes_own=0,
        bytes_least=10,
        bytes_offloaded=0,
        bytes_onloaded=0,
        peak_bytes=3_000_000_000,
    )


class FakeWandb:
    """Stand-in for module `wandb`, which Megatron uses as its writer."""

    def __init__(self) -> None:
        self.logged: dict[int, Values] = {}

    def Table(self, columns: list[str], data: list[list[str]]) -> list[list[str]]:
        return [columns, *data]

    def log(self, values: Values, step: int) -> None:
        self.logged.setdefault(step, {}).update(values)


def test_one_rank_writes_samples_and_reports(tmp_path: Path) -> None:
    scalars = {}
    texts = {}
    wandb = FakeWandb()
    script = SimpleNamespace(
        timers=Timers(),
        tokenizer=SimpleNamespace(detokenize=lambda ids: " ".join(map(str, ids))),
        tensorboard_writer=SimpleNamespace(
            add_scalar=lambda name, value, at: scalars.update({name: value}),
            add_text=lambda name, value, at: texts.update({name: value}),
        ),
        wandb_writer=wandb,
    )
    completions = [
        [Completion((4, 5), (-1.0, -3.0), "length")],
        [Completion((6,), (-2.0,), "stop")],
    ]
    reports = [report("train->infer"), report("infer->train")]
    for is_writer in (True, False):
        notes = Journal(script, tmp_path / str(is_writer), is_writer)
        notes.record(8, reports, notes.samples(8, ["7 8", (1, 2)], [[7, 8], [1, 2]], completions))
        notes.log_times(8)
    written = tmp_path / "True"
    first, second = read_lines(written / "samples.jsonl")
    assert first == {
        "iteration": 8,
        "prompt": "7 8",
        "text": "4 5",
        "prompt_token_ids": [7, 8],
        "token_ids": [4, 5],
        "log_probs": [-1.0, -3.0],
        "finish_reason": "length",
    }
    assert "text" not in second
    assert second["token_ids"] == [6]
    switches = read_lines(written / "switches.jsonl")
    assert [switch["direction"] for switch in switches] == ["train->infer", "infer->train"]
    assert not (tmp_path / "False").exists()
    assert scalars["resharding/train->infer seconds"] == 0.5
    assert scalars["resharding/peak gigabytes"] == 3.0
    assert scalars["resharding/mean log-probability"] == -2.0
    assert scalars["resharding/completion tokens"] == 1.5
    assert texts == {"resharding/samples": "    7 8\n    => 4 5\n\n    [1, 2]\n    => [6]"}
    table = [
        ["prompt", "completion", "finish reason"],
        ["7 8", "4 5", "length"],
        ["[1, 2]", "[6]", "stop"],
    ]
    assert wandb.logged == {8: {**scalars, "resharding/samples": table}}
    assert script.timers.calls == ["write", "write", "log"] * 2


def test_a_full_disk_drops_lines_without_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whole lines are dropped and counted. A truncated line is removed before the next one."""
    script = SimpleNamespace(tensorboard_writer=None, wandb_writer=None)
    notes = Journal(script, tmp_path, True)
    path = tmp_path / "samples.jsonl"
    path.write_text('{"iteration": 1}\n{"iterat')
    sample = {
        "iteration": 2,
        "token_ids": [1],
        "log_probs": [],
        "prompt_token_ids": [],
        "finish_reason": "stop",
    }
    with file_size_limit(100):
        notes.record(2, [report("train->infer")], [sample, sample])
    assert notes.num_dropped == {"samples.jsonl": 2, "switches.jsonl": 1}
    assert f"appending to {path}: file too large" in caplog.text
    assert "2 lines dropped so far, training goes on" in caplog.text
    assert path.read_text() == '{"iteration": 1}\n'
    notes.record(3, [report("train->infer")], [sample])
    assert read_lines(path) == [
        {"iteration": 1},
        sample,
    ]


def test_megatrons_interval_timer_resumes_after_a_failed_switch() -> None:
    timers = Timers()
    notes = Journal(SimpleNamespace(timers=timers), None, True)
    with (
        pytest.raises(ValueError, match="no switch"),
        notes.apart_from_training(),
        notes.timed(TIMERS[0]),
    ):
        raise ValueError("no switch")
    assert timers.calls == [
        "stop interval-time",
        "start resharding-to-inference",
        "stop resharding-to-inference",
        "start interval-time",
    ]


SILENCE_SECONDS = 15.0  # timeout where a peer has left; it bounds set-up too, on a busy machine
PATIENCE_SECONDS = 60.0  # timeout everywhere else


class FakeVllm(FakeInference):
    """Fake of the `InferenceEngine` that a script uses."""

    settings = SimpleNamespace(sizes=SimpleNamespace(data=1))
    tokenizer = None

    def __init__(self, script: Script, job: Job) -> None:
        super().__init__(script, job.rank)
        self.job = job

    @property
    def adaptor(self) -> FakeVllm:
        return self

    def check_prompts(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> None: ...

    def params_of(self, sampling: Sampling) -> None: ...

    def generate_over_replicas(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling
    ) -> list[list[Completion]]:
        return [[Completion((4,), (-1.0,), "stop")] for _ in prompts]


class Engine(engine.ScriptEngine):
    """The real engine between fakes. A failure is a function that raises at a named point."""

    def __init__(
        self, output: Path, timeout: float = PATIENCE_SECONDS, **failures: Callable[..., Any]
    ) -> None:
        self.failures = failures
        self.rig = Rig(build=False, timeout_seconds=timeout)
        self.settings = SimpleNamespace(
            config=SimpleNamespace(
                generate_config=self.rig.config,
                actor_config=SimpleNamespace(fsdp="any"),
            ),
            table=None,
            sampling=Sampling(max_tokens=1),
            prompts=("text",),
            output=output,
            callback=lambda inference: self._at("callback"),
        )
        self._script = SimpleNamespace(
            timers=Timers(),
            tokenizer=SimpleNamespace(
                tokenize=lambda text: self._at("tokenize") or [1], detokenize=str
            ),
            tensorboard_writer=SimpleNamespace(
                add_scalar=lambda *_: self._at("write"), add_text=lambda *_: None
            ),
            wandb_writer=None,
        )

    def _at(self, point: str) -> Any:
        return self.failures.get(point, lambda: None)()

    def _live_model(self, *_: Any) -> FakeTraining:
        self._at("model")
        self.rig.training.chunks = ["chunk"]
        return self.rig.training

    def build(self) -> None:
        def vllm(config: Any, table: Any, layouts: Any, job: Job, *_: Any) -> FakeVllm:
            self._at("vllm")
            return FakeVllm(self.rig.script, job)

        with (
            mock.patch("hybrid_engine.assembly.build_inference_engine", vllm),
            mock.patch(
                "hybrid_engine.assembly.quantised_table", lambda config, weights, table, job: table
            ),
        ):
            self.attach(["chunk"], None, 0)


def raising(error: BaseException) -> Callable[[], Any]:
    def fail() -> Any:
        raise error

    return fail


def on(rank: int, **failures: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    return failures if dist.get_rank() == rank else {}


def built(output: Path, failures: dict[str, Callable[..., Any]]) -> Engine:
    script_engine = Engine(output, **failures)
    script_engine.build()
    return script_engine


def refuse_chunks(chunks: list[str]) -> None:
    raise ValueError(str(chunks))


FULL = OSError("disk full")
CALLBACK_EXITS = "StateError: --resharding-callback asked to exit: 3"
OF_FUNCTION = "ReshardError: callback: ValueError: ['chunk']"
# point -> rank that fails, its failure, the outcome there
IN_A_SWITCH: dict[str, tuple[int, dict[str, Callable[..., Any]], str]] = {
    "callback": (
        1,
        {"callback": raising(ValueError("no"))},
        "ReshardError: callback: ValueError: no",
    ),
    "callback exits": (1, {"callback": raising(SystemExit(3))}, CALLBACK_EXITS),
    "callback's own function": (0, {"callback": lambda: refuse_chunks}, OF_FUNCTION),
    "tensorboard": (1, {"write": raising(FULL)}, "ReshardError: journal: OSError: disk full"),
    "samples": (0, {}, "FileError: appending to "),
}
IN_THE_BUILD: dict[str, tuple[int, dict[str, Callable[..., Any]], str]] = {
    "output": (0, {}, "FileError: creating "),
    "model": (
        1,
        {"model": raising(FULL)},
        "ReshardError: looking at the training model: OSError: disk full",
    ),
    "prompts": (
        1,
        {"tokenize": raising(KeyError("text"))},
        "ReshardError: prompts and output: KeyError: 'text'",
    ),
}


@on_engines({2: [*IN_A_SWITCH, *IN_THE_BUILD]}, timeout=120)
def test_an_error_reaches_the_other_rank(tmp_path: Path, case: str) -> None:
    rank, failures, expected = {**IN_A_SWITCH, **IN_THE_BUILD}[case]
    join()
    output = tmp_path / "output"
    if case in IN_A_SWITCH:
        script_engine = built(output, on(rank, **failures))
        if case == "samples":
            (output / "samples.jsonl").mkdir(exist_ok=True)
            dist.barrier()
        outcome = outcome_of(lambda: script_engine.switch(2))
        script_engine.detach()
    else:
        output.touch()
        below = output / "below" if case == "output" else tmp_path
        outcome = outcome_of(Engine(below, **on(rank, **failures)).build)
    if dist.get_rank() == rank:
        assert outcome.startswith(expected)
    else:
        assert outcome.startswith("RemoteError: ")
        assert f"rank {rank}: " in outcome
        assert expected.rpartition(": ")[2] in outcome


@on_engines(2, timeout=120)
def test_without_a_failure_there_is_no_error(tmp_path: Path) -> None:
    join()
    script_engine = built(tmp_path, {})
    assert outcome_of(lambda: script_engine.switch(2)) == "returned None"
    script_engine.detach()


@on_engines(2, timeout=120)
def test_a_failed_rank_ends_the_wait_of_the_other(tmp_path: Path) -> None:
    join()
    started = time.monotonic()
    outcome = outcome_of(Engine(tmp_path, SILENCE_SECONDS, **on(1, vllm=raising(FULL))).build)
    assert time.monotonic() - started < PATIENCE_SECONDS / 2
    if dist.get_rank() == 1:
        assert outcome == "OSError: disk full"
    else:
        assert outcome.startswith(
            "LostRankError: delivering adapters: rank 1, building: OSError: disk full"
        )
    dist.barrier()


def join() -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
