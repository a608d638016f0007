"""Stage 2, both engines in one process: build, switches, failed wake-ups, and a second engine after
the first.

Writes a checkpoint and completions of the same weights, for test_stage2c_fresh.py.
"""

from __future__ import annotations

import gc
import itertools
import json
import statistics
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch

from benchmarks.offload_figures import copied_nbytes
from benchmarks.timings import PeakOfDevice, plain_host_copies, taken_nbytes
from hybrid_engine.assembly import build_inference_engine
from hybrid_engine.errors import ConfigError, DeviceMemoryError
from hybrid_engine.memory.cuda_driver import INSTALL_HINT, CudaDriver, driver_of
from hybrid_engine.ranks.digests import box_digest
from hybrid_engine.switch.report import ReshardReport
from hybrid_engine.switch.states import State
from hybrid_engine.tools.verify.comparison import cross_entropy, tokens_and_labels
from hybrid_engine.tools.verify.machine import GIB
from hybrid_engine.trainer.worker import ActorHybridWorker
from tests.gpu.conftest import Note
from tests.gpu.process_state import FROZEN, ProcessState
from tests.gpu.sizes import NUM_SWITCHES, SLACK, is_software_gpu, most_in_switches
from tests.gpu.small_job import GREEDY, Answer, SmallJob, differences
from tests.harness.values import Values

if TYPE_CHECKING:
    from hybrid_engine.config import HybridConfig
    from tests.software_gpu.device import Timeline

pytestmark = [pytest.mark.engines, pytest.mark.slow]

MIN_SHARE = 0.05
MAX_LEFT = 0.75 * GIB
"""Device memory that libraries may keep after the end: half of vLLM's weights."""
_MIB = 2**20
_FIRST_SIZE = 2**36  # Bytes of the first attempt to take device memory.


@dataclass(frozen=True)
class Shortage:
    """A switch to vLLM in which a call runs out of memory.

    Attributes:
        owner, method: the method that is called.
        number: number of the call, from 0.
        left: bytes that are still free.
    """

    owner: object
    method: str
    number: int = 0
    left: int = 0


class Engines:
    """Both engines, with states of the device and the process at several times."""

    def __init__(self, job: SmallJob) -> None:
        self.job = job
        self.on_gpu = job.device == "cuda"
        if self.on_gpu:
            torch.cuda.set_device(0)
        self.device = torch.device("cuda", 0) if self.on_gpu else torch.device("cpu")
        self.config: HybridConfig = job.config()
        self.taken = {"before": self.observe()}  # Creates the context, which changes the process.
        self.copied_nbytes = 0  # Of training state, to the host and back.
        self.before_vllm = self.at_first = ProcessState.now()
        self.peak = PeakOfDevice(self.device)
        # Calls and timeline of the last switch to each state, on the software GPU.
        self.calls: dict[State, tuple[Counter[str], Timeline]] = {}
        self.calls_of_switches = self.calls  # Of the last of `switches`.
        started = time.perf_counter()
        with mock.patch(
            "hybrid_engine.assembly.build_inference_engine",
            self._with_state_noted(build_inference_engine),
        ):
            self.worker = ActorHybridWorker(self.config)
        self.build_seconds = time.perf_counter() - started

    def _with_state_noted(self, build: Callable[..., Any]) -> Callable[..., Any]:
        """Return `build`, preceded by a snapshot: Megatron changes variables before."""

        def build_and_note(*arguments: Any) -> Any:
            self.before_vllm = ProcessState.now()
            return build(*arguments)

        return build_and_note

    def observe(self) -> int:
        """Return the device memory of all processes, without unused memory of torch."""
        if not self.on_gpu:
            return 0
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return taken_nbytes(self.device)

    def changed_settings(self, *but: str) -> list[str]:
        """Return the settings of the process that have changed since before vLLM was built."""
        return ProcessState.now().changes(self.before_vllm, but=("$PYTEST_CURRENT_TEST", *but))

    def train(self, seed: int) -> None:
        self.worker.update(
            tokens_and_labels(seed, self.worker.table.dims.vocab_size, 4), cross_entropy
        )

    def enter(self, state: State) -> ReshardReport:
        with self._counted(state):
            report = self.worker.sharding.enter(state)
        assert report is not None, "another state"
        return report

    @contextmanager
    def _counted(self, state: State) -> Iterator[None]:
        """Keep the switch's calls of the driver, on the software GPU."""
        if not is_software_gpu():
            yield
            return
        from tests.software_gpu.device import counted, timed

        with counted() as calls, timed() as timeline:
            yield
        self.calls[state] = calls, timeline

    def draw(self) -> list[list[int]]:
        return [answer.tokens for answer in self.draw_answers()]

    def draw_answers(self) -> list[Answer]:
        # A prefix cached by an earlier call would be computed by other kernels.
        self.worker.inference.reset_caches()
        completions = self.worker.generate_sequences(self.job.prompts(), GREEDY)
        return [Answer(list(group[0].token_ids), list(group[0].logprobs)) for group in completions]

    def drawn_after_a_switch(self) -> list[list[int]]:
        self.enter(State.INFER)
        completions = self.draw()
        self.enter(State.TRAIN)
        return completions

    def digests(self) -> list[int]:
        self.worker.train.guard(
            ["optimizer"]
        )  # It may still be on its way, and no hook sees a direct read.
        items = [item for item in self.worker.train.offload_items() if item.action == "copy"]
        return [box_digest(item.tensor) for item in items]

    def shortages(self) -> Mapping[str, Shortage]:
        """Return shortages when vLLM wakes up, at later weights, and at the KV cache."""
        inference = self.worker.inference
        num_calls = sum(bool(bucket.groups) for bucket in self.worker.sharding.plan.buckets)
        half_of_cache = (self.config.generate_config.kv_cache_mb or 0) * _MIB // 2
        shortages = (
            Shortage(inference.adaptor, "allocate"),
            Shortage(inference.adaptor, "allocate", num_calls // 2),
            Shortage(inference, "wake_kv_cache", left=half_of_cache),
        )
        return dict(zip(SHORTAGES, shortages, strict=True))

    def error_of(self, shortage: Shortage) -> Exception | None:
        replacement = self.starved(getattr(shortage.owner, shortage.method), shortage)
        with mock.patch.object(shortage.owner, shortage.method, replacement):
            try:
                self.enter(State.INFER)
            except Exception as error:
                return error
        return None

    def starved(self, call: Callable[..., Any], shortage: Shortage) -> Callable[..., Any]:
        """Return the call without free memory on the device; on the CPU, with an error instead."""
        numbers = itertools.count()

        def starved(*arguments: Any) -> Any:
            if next(numbers) != shortage.number:
                return call(*arguments)
            if not self.on_gpu:
                raise RuntimeError("CUDA Error: out of memory (put in by this check)")
            driver = driver_of(self.device.index)
            assert driver is not None
            with device_without_memory(driver, shortage.left):
                return call(*arguments)

        return starved

    def shut_down(self) -> list[str]:
        """Shut the worker down while vLLM sleeps; return leftovers, except device memory."""
        models = {
            "vLLM's model": weakref.ref(self.worker.inference.adaptor.model),
            "the trainer": weakref.ref(self.worker.train),
        }
        self.worker.shutdown()
        del self.worker
        for name in (
            "last_exc",
            "last_type",
            "last_value",
            "last_traceback",
        ):  # Of a check that failed before.
            setattr(sys, name, None)
        gc.collect()
        left = ProcessState.now().left_behind(self.at_first)
        if not self.on_gpu:  # On a GPU another check measures device memory.
            left += [
                f"{name} is still referred to"
                for name, model in models.items()
                if model() is not None
            ]
        return left


Switches = tuple[list[ReshardReport], list[ReshardReport]]
"""Reports of switches to vLLM, each after a training step, and of switches back."""
SHORTAGES = ("weights", "weights half-way", "KV cache")


class Together:
    eager: bool

    @pytest.fixture(scope="class")
    def engines(
        self, request: pytest.FixtureRequest, device: str, shared: Path, vllm_arguments: Values
    ) -> Engines:
        return Engines(SmallJob(shared, device, request.cls.eager, vllm_arguments))

    @pytest.fixture(scope="class")
    def switches(self, engines: Engines) -> Switches:
        to_vllm, to_training = switches = ([], [])
        for number in range(NUM_SWITCHES):
            engines.train(number)
            engines.taken["train"] = engines.observe()
            engines.copied_nbytes = copied_nbytes(engines.worker.train.offload_items())
            with (
                engines.peak.watched()
            ):  # By the driver: most memory is outside of torch's allocator.
                to_vllm.append(engines.enter(State.INFER))
            engines.taken["infer"] = engines.observe()
            to_training.append(engines.enter(State.TRAIN))
        engines.calls_of_switches = dict(engines.calls)
        return switches

    @pytest.fixture(scope="class")
    def drawn(self, engines: Engines, switches: Switches) -> list[list[list[int]]]:
        """Save the weights, switch, and draw completions twice."""
        engines.worker.save_hf_checkpoint(engines.job.checkpoint)
        engines.enter(State.INFER)
        answers = engines.draw_answers()
        again = engines.draw()
        engines.enter(State.TRAIN)
        engines.job.answers.write_text(json.dumps(answers))
        return [[answer.tokens for answer in answers], again]

    @pytest.fixture(scope="class")
    def completions(self, drawn: list[list[list[int]]]) -> list[list[int]]:
        return drawn[0]

    @pytest.fixture(scope="class")
    def left(self, engines: Engines, completions: list[list[int]]) -> list[str]:
        return engines.shut_down()

    def test_build(self, engines: Engines, note: Note) -> None:
        note(f"{engines.build_seconds:.1f} s", seconds=engines.build_seconds)

    def test_settings_after_the_build(self, engines: Engines) -> None:
        assert engines.changed_settings(FROZEN) == []

    def test_all_weights_are_compared_in_the_switch(
        self, engines: Engines, switches: Switches, note: Note
    ) -> None:
        table = engines.worker.table
        compared = [report.tensors_verified for report in switches[0]]
        served = sum(map(table.is_served, table.shapes))
        note(
            f"{compared[0]} tensors, {switches[0][0].bytes_verified / GIB:.3f} GiB, "
            f"{NUM_SWITCHES} times"
        )
        assert compared == [served] * NUM_SWITCHES, f"of {served} that vLLM reads"

    def test_seconds_to_vllm(self, engines: Engines, switches: Switches, note: Note) -> None:
        """The first switch is not judged: it page-locks host memory, which stage 1 measures."""
        first, *later = switches[0]
        judge_seconds(engines, later, note, first=first.seconds)

    def test_seconds_to_training(self, engines: Engines, switches: Switches, note: Note) -> None:
        judge_seconds(engines, switches[1][1:], note)

    @pytest.mark.gpu
    def test_most_device_memory_in_a_switch(
        self, engines: Engines, switches: Switches, note: Note
    ) -> None:
        judge_peak(engines, note)

    @pytest.mark.gpu
    @pytest.mark.parametrize("state", [State.INFER, State.TRAIN])
    def test_calls_of_a_switch(
        self, state: State, engines: Engines, switches: Switches, note: Note
    ) -> None:
        """A switch makes no more launches, copies and waits than recorded."""
        if not is_software_gpu():
            pytest.skip("only the software GPU counts calls")
        from tests.software_gpu.switch_calls import RECORDED, by_kind

        counts, timeline = engines.calls_of_switches[state]
        calls = by_kind(counts)
        note(
            f"{', '.join(f'{number} {kind}' for kind, number in calls.items())}; {timeline}",
            **calls,
        )
        recorded = RECORDED[state.name.lower()]
        assert {
            kind: number for kind, number in calls.items() if number > recorded.get(kind, 0)
        } == {}

    def test_completions_twice_the_same(self, drawn: list[list[list[int]]]) -> None:
        assert not differences(*drawn)

    def test_settings_after_completions(
        self, engines: Engines, completions: list[list[int]]
    ) -> None:
        assert engines.changed_settings(FROZEN) == []

    @pytest.mark.parametrize("name", SHORTAGES)
    def test_failed_wake_up(
        self, name: str, engines: Engines, completions: list[list[int]]
    ) -> None:
        """On a full device weights find training's memory; a failed wake-up changes nothing."""
        if engines.on_gpu and driver_of(engines.device.index) is None:
            pytest.skip(f"its memory cannot be taken without cuda-bindings: {INSTALL_HINT}")
        before = engines.digests()
        error = engines.error_of(engines.shortages()[name])
        if error is None:
            engines.enter(State.TRAIN)
        # Only the cache may be larger than the memory that training leaves it.
        assert name == "KV cache" or (error is None) == engines.on_gpu, error
        assert engines.worker.sharding.state is State.TRAIN, f"after: {error}"
        assert engines.digests() == before, f"training's contents changed, after: {error}"
        more = engines.observe() - engines.taken["train"]
        assert more <= engines.taken["infer"] // 4, (
            f"{more / GIB:.2f} GiB more are taken than in training"
        )
        assert not differences(engines.drawn_after_a_switch(), completions)

    def test_shut_down_asleep_leaves_nothing(self, left: list[str]) -> None:
        assert left == []

    def test_settings_after_the_end(self, engines: Engines, left: list[str]) -> None:
        assert engines.changed_settings() == []

    @pytest.mark.gpu
    def test_shut_down_asleep_gives_memory_back(
        self, engines: Engines, left: list[str], note: Note
    ) -> None:
        judge_memory_back(engines.observe() - engines.taken["before"], note)


class TestEager(Together):
    eager = True

    @pytest.mark.gpu
    def test_a_job_larger_than_the_device_is_refused(
        self, engines: Engines, left: list[str]
    ) -> None:
        """Before anything is built."""
        tiny = mock.patch("torch.cuda.mem_get_info", return_value=(2**20, 2**20))
        with tiny, pytest.raises(ConfigError, match="the phase train takes"):
            ActorHybridWorker(engines.config)

    def test_built_again(
        self, engines: Engines, completions: list[list[int]], left: list[str]
    ) -> None:
        engines.worker = ActorHybridWorker(engines.config)
        engines.worker.load_hf_checkpoint(engines.job.checkpoint)
        engines.enter(State.INFER)
        again = engines.draw()
        engines.worker.shutdown()
        del engines.worker
        assert not differences(again, completions)


@pytest.mark.gpu
class TestGraphs(Together):
    eager = False


def judge_seconds(
    engines: Engines, reports: list[ReshardReport], note: Note, **more: float
) -> None:
    """Compare with a plain copy of the same bytes; the verification of weights does not count."""
    verified = [report.seconds_by_phase.get("verify", 0.0) for report in reports]
    seconds = statistics.median(
        report.seconds - more for report, more in zip(reports, verified, strict=True)
    )
    direction = "offload" if reports[-1].bytes_offloaded else "onload"
    moved = min(report.bytes_offloaded + report.bytes_onloaded for report in reports)
    # What no request needed the memory of does not come back: it is still there.
    assert direction == "onload" or moved >= engines.copied_nbytes, (
        "a switch did not move all training state"
    )
    floor = seconds_of_plain_copy(engines.device, direction, engines.copied_nbytes)
    is_judged = engines.job.sizes.are_times_judged
    limit = f"at least {MIN_SHARE:.0%}" if is_judged else "not judged"
    beside = (
        f"{floor / seconds:.0%} of the rate of plain page-locked copies, {floor:.3f} s; {limit}"
    )
    figure = f"{seconds:.3f} s, and {statistics.median(verified):.3f} to compare"
    figure += "".join(f"; the {name} {value:.3f} s" for name, value in more.items())
    note(figure, beside, seconds=seconds, floor_seconds=floor, **more)
    assert not is_judged or floor / seconds >= MIN_SHARE


def seconds_of_plain_copy(device: torch.device, name: str, nbytes: int) -> float:
    """Return the time of a plain copy, extrapolated from a part to save host memory."""
    part = min(nbytes, GIB)
    return plain_host_copies(device, part, 1)[name] * nbytes / part


def judge_peak(engines: Engines, note: Note) -> None:
    """Check the peak of all switches to vLLM: at most the larger side, and two buckets."""
    taken = engines.taken
    peak = engines.peak.nbytes
    most = most_in_switches(
        taken["train"], taken["infer"], engines.config.generate_config.bucket_mb
    )
    figure = (
        f"{peak / GIB:.2f} GiB (training {taken['train'] / GIB:.2f}, vLLM "
        f"{taken['infer'] / GIB:.2f})"
    )
    limit = f"at most {SLACK:g} times the larger and two buckets, {most / GIB:.2f} GiB"
    note(figure, limit, nbytes=peak, training_nbytes=taken["train"], infer_nbytes=taken["infer"])
    assert peak <= SLACK * most


def judge_memory_back(nbytes: int, note: Note) -> None:
    figure = f"{nbytes / GIB:.2f} GiB more are taken than before the build"
    note(figure, f"at most {MAX_LEFT / GIB:g} GiB", nbytes=nbytes)
    assert nbytes <= MAX_LEFT


@contextmanager
def device_without_memory(driver: CudaDriver, left: int = 0) -> Iterator[None]:
    """Take all device memory for the block, except `left` bytes, rounded up to the driver's unit.

    This includes unused memory of torch's allocator, which returns it to the device before a call
    fails.
    """
    with ExitStack() as taken:
        with ExitStack() as reserved:
            _take(driver, left, reserved)
            _take(driver, sys.maxsize, taken)
        yield


def _take(driver: CudaDriver, nbytes: int, taken: ExitStack) -> None:
    """Allocate `nbytes` of unmapped physical memory, or all there is, until `taken` ends."""
    unit = driver.granularity()
    size = _FIRST_SIZE
    missing = nbytes
    while missing > 0 and size:
        size = min(size, -(-missing // unit) * unit)
        try:
            handle = driver.create(size)
        except DeviceMemoryError as error:
            if not error.is_out_of_memory:
                raise
            size = size // 2 // unit * unit
        else:
            taken.callback(driver.release, handle)
            missing -= size
