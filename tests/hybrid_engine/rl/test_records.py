"""Files of completions, trackers, signals, and the terminal."""

from __future__ import annotations

import math
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import prometheus_client.parser
import pytest
import torch
import torch.distributed as dist

from hybrid_engine.errors import ArgumentError, ComputationError, ConfigError, FileError
from hybrid_engine.rl import Conversation, trackers
from hybrid_engine.rl.completion_log import CompletionLog, ScoredCompletion, samples_table
from hybrid_engine.rl.step_metrics import require_exact
from hybrid_engine.rl.stop_signals import SIGNALS, StopSignals
from hybrid_engine.rl.trackers import SafeTracker, opened, tracker_violations
from tests.examples.launched import Terminal as Screen
from tests.harness.errors import has_violation, refused
from tests.harness.launch import REPO_ROOT
from tests.harness.small_disks import file_size_limit
from tests.harness.values import Values
from tests.hybrid_engine.tools.programs import read_lines


class WithoutTokenizer:
    token_ids = (5, 6)
    finish_reason = "length"

    @property
    def text(self) -> str:
        raise ConfigError([])


def sample(**changed: Any) -> ScoredCompletion:
    completion = SimpleNamespace(text="[red] 4", token_ids=(1, 2, 3), finish_reason="stop")
    values = {"prompt": {"prompt": "2 + 2", "answer": 4}, "completion": completion, "reward": 1.0}
    return ScoredCompletion(
        **{**values, "rewards": {"exact": 1.0}, "advantage": 0.5, "weight_version": 7, **changed}
    )


COLUMNS = {
    "file": "a\ud800",
    "image": b"\xff" * 9,
    "pixels": torch.zeros(300, 300),
    "\udfff": torch.ones(2),
}


def test_a_line_has_everything_about_a_completion(tmp_path: Path) -> None:
    log = CompletionLog(tmp_path)
    unscored = sample(completion=WithoutTokenizer(), reward=math.nan, rewards={"exact": math.nan})
    log.write(3, [sample(), unscored, sample(prompt={"prompt": "2 + 2", **COLUMNS})])
    first, second, third = read_lines(log.path(3))
    assert first == {
        "prompt": "2 + 2",
        "columns": {"answer": 4},
        "text": "[red] 4",
        "token_ids": [1, 2, 3],
        "reward": 1.0,
        "rewards": {"exact": 1.0},
        "advantage": 0.5,
        "finish_reason": "stop",
        "num_tokens": 3,
        "weight_version": 7,
    }
    assert (second["text"], second["reward"], second["rewards"]) == ("", None, {"exact": None})
    # JSON does not have these.
    assert third["columns"] == {
        "file": "a?",
        "image": "bytes of 9",
        "pixels": "Tensor of 300",
        "?": [1.0, 1.0],
    }


def test_a_table_has_different_prompts_first() -> None:
    samples = [sample(prompt=prompt) for prompt in ("first", "first", "second", "second")]
    _, _, prompts, texts = samples_table(samples, 2, 3).columns
    assert [str(cell) for cell in prompts.cells] == ["first", "second", "first"]
    assert [str(cell) for cell in texts.cells] == ["[red] 4"] * 3


def test_a_conversation_is_logged_whole() -> None:
    chat = ({"role": "user", "content": "2 + 2"}, {"role": "assistant", "content": "4"})
    turn: Any = mock.Mock(prompt_token_ids=(3,), token_ids=(5,), versions=(), temperature=1.0)
    line = sample(completion=Conversation((turn,), messages=chat), prompt=chat[:1]).line()
    assert (line["turns"], line["messages"], line["columns"]) == (1, chat, {})


def test_files_of_steps_that_are_repeated_go(tmp_path: Path) -> None:
    log = CompletionLog(tmp_path)
    log.cut_after(0)
    for step in (1, 10, 20):
        log.write(step, [sample()])
    (log.directory / "notes.txt").touch()
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "completions").symlink_to(log.directory)
    CompletionLog(tmp_path / "linked").cut_after(0)  # files of another run
    log.cut_after(10)
    assert sorted(path.name for path in log.directory.iterdir()) == [
        "notes.txt",
        "step-000001.jsonl",
        "step-000010.jsonl",
    ]


@pytest.fixture
def wandb() -> Iterator[mock.MagicMock]:
    """Stands in for wandb, which has a server. wandb, MLflow and trackio themselves were tried."""
    module = mock.MagicMock(spec=["init", "finish"], __spec__=ModuleSpec("wandb", None))
    with mock.patch.dict(sys.modules, {"wandb": module}):
        yield module


def record(name: str, out: Path, *rows: Values, **ending: Any) -> None:
    tracker = opened(name, out, {"steps": 5})
    for row in rows:
        tracker.add(row["step"], row)
    tracker.close(**ending)


def test_a_tracker_continues_the_run_of_a_directory(tmp_path: Path, wandb: mock.MagicMock) -> None:
    with mock.patch.dict(os.environ, {"WANDB_PROJECT": "mine", "WORLD_SIZE": "2"}):
        for _ in range(2):
            record("wandb", tmp_path, {"step": 1, "reward": 0.5})
    assert not dist.is_initialized(), "accelerate must make no process group"
    first, second = (call.kwargs for call in wandb.init.call_args_list)
    assert first == second
    assert first["id"].startswith(tmp_path.name)
    assert (first["project"], first["config"], first["resume"]) == ("mine", {"steps": 5}, "allow")
    run = wandb.init.return_value
    assert run.log.call_args == mock.call({"reward": 0.5}, step=1)
    assert run.finish.call_count == 2
    record("wandb", tmp_path, failure=ValueError)
    assert wandb.finish.call_args == mock.call(exit_code=1)


def test_prometheus_reads_the_last_row(tmp_path: Path) -> None:
    first = {"step": 1, "reward": 0.5, "held out/accuracy": 0.25, "kl": None}
    record("prometheus", tmp_path, first, {"step": 2, "reward": 0.75})
    text = (tmp_path / "metrics.prom").read_text()
    values = {
        family.name: family.samples[0].value
        for family in prometheus_client.parser.text_string_to_metric_families(text)
    }
    assert values == {"hybrid_engine_step": 2.0, "hybrid_engine_reward": 0.75}


class Faulty:
    """A tracker whose calls do something else."""

    def __init__(self, act: Callable[[], None]) -> None:
        self.add = self.close = lambda *_, **__: act()


@pytest.mark.parametrize(
    "error", [ConnectionError("no network"), SystemExit(0), KeyboardInterrupt()]
)
def test_a_tracker_that_fails_ends_no_run(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise error

    tracker = SafeTracker("wandb", lambda: Faulty(fail))
    tracker.add(7, {"step": 7})
    tracker.close()
    for what in ("step 7", "the end"):
        assert f"wandb has not recorded {what}: {error}" in caplog.text
    with pytest.raises(
        ArgumentError, check=has_violation("trackers", "callback-failed", type(error).__name__)
    ):
        SafeTracker("wandb", fail)  # type: ignore[arg-type]


def test_a_tracker_that_hangs_costs_its_own_rows(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trackers, "_MOST_CALLS", 2)
    monkeypatch.setattr(trackers, "_SECONDS_TO_END", 0.1)
    goes_on = threading.Event()
    tracker = SafeTracker("mlflow", lambda: Faulty(lambda: goes_on.wait(60) and None))
    for step in range(1, 9):
        tracker.add(step, {"step": step})
    tracker.close()
    goes_on.set()
    late, *others = [record.getMessage() for record in caplog.records]
    assert re.fullmatch("mlflow is late, and does not record step [34] and others like it", late)
    assert others == ["mlflow has not ended in 0.1 s"]


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        # As after a mismatch of protobuf.
        (
            mock.patch.dict(sys.modules, {"torch.utils.tensorboard": None}),
            "tensorboard has not recorded step 1",
        ),
        (file_size_limit(400), "File too large"),
    ],
)
def test_a_fault_of_tensorboard_ends_no_run(
    tmp_path: Path, fault: AbstractContextManager[None], text: str, caplog: pytest.LogCaptureFixture
) -> None:
    with fault:
        record("tensorboard", tmp_path, *({"step": step, "reward": 0.5} for step in range(1, 50)))
    assert text in caplog.text


@pytest.mark.parametrize("name", ["it's mine", "long" * 40])
def test_names_of_runs_can_be_read_again(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    first = trackers._run_name(tmp_path / name)
    assert re.fullmatch(r"[A-Za-z0-9_.-]{10,80}", first)
    assert trackers._run_name(tmp_path / name) == first
    trackers.forget_run(tmp_path / name)
    assert trackers._run_name(tmp_path / name) != first
    for damaged in (b"", b"../../etc-01234567", b"a\nb-01234567", b"\xff-01234567", b"x" * 10_000):
        (tmp_path / name / "tracker-run").write_bytes(damaged)
        with refused(FileError, "file-failed", "tracker-run"):
            trackers._run_name(tmp_path / name)


def test_trackers_are_checked(tmp_path: Path) -> None:
    with mock.patch(
        "importlib.util.find_spec", lambda name: None if name == "mlflow" else object()
    ):
        codes = [
            violation.code
            for violation in tracker_violations(["mlflow", "wandb", "tensorboard", "x"], None)
        ]
    assert codes == ["tracker-not-installed", "needs-out", "unknown-tracker"]
    assert list(tracker_violations(["tensorboard"], tmp_path)) == []


@pytest.fixture
def _default_handlers() -> Iterator[None]:
    """Other tests of this process may have left handlers."""
    previous = {number: signal.signal(number, signal.SIG_DFL) for number in SIGNALS}
    yield
    for number, handler in previous.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("_default_handlers")
def test_children_end_by_a_signal_as_ever() -> None:
    """As the processes of a reward that runs programs."""
    with StopSignals():
        context = multiprocessing.get_context("fork")
        process = context.Process(target=time.sleep, args=(60,))
        process.start()
        process.terminate()
        process.join(20)
        assert process.exitcode == -signal.SIGTERM


@pytest.mark.parametrize(
    ("is_broken", "numbers"), [(True, "signal.SIGTERM,"), (False, "signal.SIGINT, signal.SIGTERM")]
)
def test_a_rank_ends_at_once_if_another_has_failed_or_by_a_second_signal(
    is_broken: bool, numbers: str
) -> None:
    program = f"""
import os, signal, time
from hybrid_engine.rl.stop_signals import StopSignals
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
with StopSignals(lambda: {is_broken}):
    for number in ({numbers}):
        os.kill(os.getpid(), number)
    time.sleep(60)
"""
    ended = subprocess.run([sys.executable, "-c", program], timeout=50, check=False)
    assert ended.returncode == -signal.SIGTERM


@pytest.mark.usefixtures("_default_handlers")
def test_a_signal_while_handlers_are_restored_is_noted() -> None:
    set_handler = signal.signal
    arriving = [signal.SIGTERM]

    def interrupted(number: int, handler: Any) -> Any:
        if arriving:
            os.kill(os.getpid(), arriving.pop())
        return set_handler(number, handler)

    with StopSignals(lambda: False) as signals, mock.patch("signal.signal", interrupted):
        signals.restore()
    assert signals.came
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    for thread in threading.enumerate():
        if thread.name == "stop signals":  # it would end this process after a later failure
            thread.join(20)
            assert not thread.is_alive()


def test_a_rank_of_torchrun_ends_with_it() -> None:
    with (
        mock.patch.dict(os.environ, {"TORCHELASTIC_RUN_ID": "1"}),
        mock.patch("hybrid_engine.rl.stop_signals.end_with_parent") as end,
        StopSignals(),
    ):
        end.assert_called_once_with(os.getppid())


@pytest.mark.usefixtures("_default_handlers")
def test_handlers_of_the_program_are_left_alone() -> None:
    seen: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGUSR1)
    assert (signals.came, seen) == (False, [signal.SIGUSR1])


@pytest.mark.parametrize(
    ("log_prob", "mask", "numbers"),
    [
        (0, 1, ()),
        (2e-6, 1, ("1 of 12 drawn", "2e-06 nats", "for CPUs")),
        (torch.nan, 1, ("nan",)),
        (torch.nan, 0, ()),
    ],
)
def test_exact_rollouts_have_no_difference(
    log_prob: float, mask: int, numbers: tuple[str, ...]
) -> None:
    """One token of many is enough, which a share in float32 would not show."""
    drawn = torch.zeros(3, 4)
    batch = {"mask": torch.ones(3, 4), "sampled_log_probs": drawn, "old_log_probs": drawn.clone()}
    batch["old_log_probs"][1, 2] = log_prob
    batch["mask"][1, 2] = mask
    unequal = refused(ComputationError, "rollout-unequal", *numbers)
    with unequal if numbers else nullcontext():
        require_exact(batch, torch.device("cpu"))


# -- lines, table and bar of a run, in a file and in a pseudo-terminal
# ------------------------------

OF_A_TERMINAL = """
import os
from hybrid_engine.rl import terminal as module
from hybrid_engine.rl.terminal import Column, Terminal

module._SECONDS_BETWEEN_LINES = 0
megabytes = Column("MB", "nbytes", ".1f", 4, 1e-6)
columns = [Column("step", "step", "", 5), Column("reward", "reward", ".3f", 7), megabytes]
terminal = Terminal(columns)
terminal.print("built [bold]")
with terminal:
    for step in (0, 1, 2):
        terminal.begins(f"step {step}: generate", max(step - 1, 0), 2)
        print("of a reward")
        if not os.fork():
            print("of its child")
            os._exit(0)
        os.wait()
        row = {"step": f"{step}/2", "reward": step / 4}
        terminal.add({**row, "nbytes": 2e6} if step == 2 else row, "  accuracy 1")
terminal.print("ended")
"""
LINES = """\
built [bold]
step 0: generate ...
of a reward
of its child
 step   reward    MB
  0/2    0.000     -  accuracy 1
step 1: generate ...
of a reward
of its child
  1/2    0.250     -  accuracy 1
of a reward
of its child
  2/2    0.500   2.0  accuracy 1
ended
"""
COMMAND = (sys.executable, "-u", "-c", OF_A_TERMINAL)
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPO_ROOT), "TERM": "xterm"}


def test_lines_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "output"
    with path.open("w") as file:
        subprocess.run(COMMAND, env=ENVIRONMENT, stdout=file, stderr=file, check=True, timeout=60)
    assert path.read_text() == LINES


def test_the_same_lines_beside_a_bar() -> None:
    """A forked process, which has no bar, prints after it."""
    screen = Screen(columns=100)
    subprocess.run(COMMAND, env=ENVIRONMENT, stdout=screen.theirs, check=True, timeout=60)
    lines = screen.lines()
    assert any("step 2: generate" in line and "\u2501" in line for line in lines)
    shown = [re.sub(r".*\u2501 \d:\d\d:\d\d *", "", line) for line in lines]
    expected = re.sub(r".*\.\.\.\n", "", LINES).splitlines()
    assert [line for line in shown if line] == expected
