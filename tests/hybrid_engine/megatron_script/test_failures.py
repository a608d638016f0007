"""--enable-resharding on two real ranks, with fakes of both engines: what fails on one rank is an error on both."""

from __future__ import annotations

import tempfile
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
from hybrid_engine.ranks.job import Job
from tests.harness.launch import Ranks
from tests.hybrid_engine.megatron_script.test_journal import Timers
from tests.hybrid_engine.ranks.test_agreement import outcome_of
from tests.hybrid_engine.switch.fakes import FakeInference, FakeTraining, Rig, Script

SILENCE_SECONDS = 2.0  # of the agreement whose peer has left
PATIENCE_SECONDS = 60.0  # of all others


class FakeVllm(FakeInference):
    """Also what a script asks of an `InferenceEngine` beside its weights."""

    settings = SimpleNamespace(sizes=SimpleNamespace(data=1))
    tokenizer = None

    def __init__(self, script: Script, job: Job) -> None:
        super().__init__(script, job.rank)
        self.job = job

    @property
    def adaptor(self) -> FakeVllm:
        return self

    def check_prompts(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> None: ...

    def manual_seed(self, seed: int) -> None: ...

    def generate_over_replicas(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[Completion]]:
        return [[Completion((4,), (-1.0,), "stop")] for _ in prompts]

    def shutdown(self) -> None: ...


class Engine(engine.ScriptEngine):
    """The real one between the fakes; a failure is a function that raises at its point, on the ranks that have it."""

    def __init__(self, output: Path, timeout: float = PATIENCE_SECONDS, **failures: Callable[..., Any]) -> None:
        self.failures = failures
        self.rig = Rig(build=False, timeout_seconds=timeout)
        self.settings = SimpleNamespace(
            config=SimpleNamespace(generate_config=self.rig.config),
            table=None,
            sampling=Sampling(max_tokens=1),
            prompts=("text",),
            output=output,
            callback=lambda inference: self._at("callback"),
        )
        self._script = SimpleNamespace(
            timers=Timers(),
            tokenizer=SimpleNamespace(tokenize=lambda text: self._at("tokenize") or [1], detokenize=str),
            tensorboard_writer=SimpleNamespace(add_scalar=lambda *_: self._at("write"), add_text=lambda *_: None),
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

        with mock.patch("hybrid_engine.assembly.build_inference_engine", vllm):
            self.attach(["chunk"], None, 0)


def raising(error: BaseException) -> Callable[[], Any]:
    def fail() -> Any:
        raise error

    return fail


def on(rank: int, **failures: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    return failures if dist.get_rank() == rank else {}


def fail_on_one_rank() -> dict[str, str]:
    """Each way in which a rank fails, with an engine of its own; what became of it here."""
    dist.init_process_group("gloo")
    full = OSError("disk full")
    callbacks = {
        "callback": on(1, callback=raising(ValueError("no"))),
        "callback exits": on(1, callback=raising(SystemExit(3))),
        "callback's own function": on(0, callback=lambda: lambda chunks: raising(ValueError(f"{chunks}"))()),
        "tensorboard": on(1, write=raising(full)),
        "nothing": {},
    }
    found = {}
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory)
        for name, failures in callbacks.items():
            one = Engine(output / name, **failures)
            one.build()
            found[name] = outcome_of(lambda one=one: one.switch(2))
            one.detach()
        one = Engine(output / "written")
        one.build()
        (output / "written" / "samples.jsonl").mkdir(parents=True)
        found["samples"] = outcome_of(lambda: one.switch(2))
        one.detach()
        (output / "file").touch()
        found["output"] = outcome_of(Engine(output / "file" / "below").build)
        found["model"] = outcome_of(Engine(output, **on(1, model=raising(full))).build)
        found["prompts"] = outcome_of(Engine(output, **on(1, tokenize=raising(KeyError("text")))).build)
        started = time.monotonic()
        found["vllm"] = outcome_of(Engine(output, SILENCE_SECONDS, **on(1, vllm=raising(full))).build)
        found["vllm's end"] = "in time" if time.monotonic() - started < PATIENCE_SECONDS / 2 else "late"
        dist.barrier()
    return found


@pytest.fixture(scope="module")
def outcomes(engines: Ranks) -> list[dict[str, str]]:
    return engines.launch(fail_on_one_rank, 2, timeout=120)


@pytest.mark.parametrize(
    ("case", "rank", "own"),
    [
        ("callback", 1, "ReshardError: callback: ValueError: no"),
        ("callback exits", 1, "StateError: --resharding-callback asked to exit: 3"),
        ("callback's own function", 0, "ReshardError: callback: ValueError: ['chunk']"),
        ("tensorboard", 1, "ReshardError: journal: OSError: disk full"),
        ("samples", 0, "FileError: appending to "),
        ("output", 0, "FileError: creating "),
        ("model", 1, "ReshardError: looking at Megatron's model: OSError: disk full"),
        ("prompts", 1, "ReshardError: prompts and output: KeyError: 'text'"),
    ],
)
def test_the_other_rank_is_told(outcomes: list[dict[str, str]], case: str, rank: int, own: str) -> None:
    here, there = outcomes[rank][case], outcomes[1 - rank][case]
    assert here.startswith(own)
    assert there.startswith("RemoteError: ")
    assert f"rank {rank}: " in there
    assert own.rpartition(": ")[2] in there


def test_a_rank_that_left_between_two_agreements_ends_the_wait_of_the_other(outcomes: list[dict[str, str]]) -> None:
    assert [one["vllm's end"] for one in outcomes] == ["in time", "in time"]
    assert outcomes[1]["vllm"] == "OSError: disk full"
    assert outcomes[0]["vllm"].startswith("LostRankError: delivering adapters: rank 1, building: OSError: disk full")


def test_without_a_failure_there_is_no_error(outcomes: list[dict[str, str]]) -> None:
    assert [one["nothing"] for one in outcomes] == ["returned None", "returned None"]
