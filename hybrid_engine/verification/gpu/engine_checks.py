"""Stage 2, one GPU with Megatron and vLLM: build, switches, failed wake-ups, and a second engine after the first.

    python -m hybrid_engine.verification.gpu.engine_checks JOB RESULTS      as one rank

Leaves a checkpoint and completions drawn with the same weights, for fresh_checks.py.
"""

from __future__ import annotations

import gc
import itertools
import json
import statistics
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from hybrid_engine.assembly import build_inference_engine
from hybrid_engine.backends.vllm import Sampling
from hybrid_engine.memory.cuda_driver import INSTALL_HINT, driver_of, taken_nbytes
from hybrid_engine.ranks.digests import box_digest
from hybrid_engine.switch.report import ReshardReport
from hybrid_engine.switch.states import State
from hybrid_engine.trainer.worker import ActorHybridWorker
from hybrid_engine.verification.comparison import cross_entropy, tokens_and_labels
from hybrid_engine.verification.gpu.checks import (
    CannotCheckError,
    Check,
    NothingToCheckError,
    Planned,
    judged,
    run_checks,
)
from hybrid_engine.verification.gpu.gpus import GIB
from hybrid_engine.verification.gpu.process_state import FROZEN, ProcessState
from hybrid_engine.verification.gpu.shortage import device_without_memory
from hybrid_engine.verification.gpu.small_job import MAX_TOKENS, SmallJob, differences
from hybrid_engine.verification.gpu.timings import plain_host_copies

if TYPE_CHECKING:
    from hybrid_engine.config import HybridConfig

NUM_SWITCHES = 5
_LEAST_SHARE = 0.05
_SLACK = 1.05
_MOST_LEFT = 0.75 * GIB
"""Device memory that libraries may have taken between the build and the end: half of vLLM's weights."""
_MIB = 2**20


@dataclass(frozen=True)
class Shortage:
    """A switch to vLLM in which one call finds no memory.

    Attributes:
        name: of what has none.
        owner, method: what is called.
        number: of the call, from 0.
        left: bytes that are there all the same.
    """

    name: str
    owner: object
    method: str
    number: int = 0
    left: int = 0


class EngineChecks:
    """The checks of one mode: eager, or with CUDA graphs."""

    def __init__(self, job: SmallJob) -> None:
        self._job, self._on_gpu = job, job.device == "cuda"
        self._device = torch.device("cuda", torch.cuda.current_device()) if self._on_gpu else torch.device("cpu")
        self._config: HybridConfig = job.config()
        self._worker: ActorHybridWorker | None = None
        self._taken = {"before": self._observe()}  # makes the context, which changes the process
        self._before_vllm = self._at_first = ProcessState.now()
        self._completions: list[list[int]] = []
        self._peaks: list[int] = []

    def planned(self) -> list[Planned]:
        """In order."""
        mode = self._job.mode
        build, settings, switches, completions, still, failed, again = (
            f"{mode}: {what}"
            for what in (
                *("build", "settings", "switches", "completions", "settings still", "failed wake-ups", "shut down"),
            )
        )
        return [
            Planned(build, self._build),
            Planned(settings, partial(self._settings_kept, "after the build"), (build,)),
            Planned(switches, self._switches, (build,)),
            Planned(completions, self._complete, (switches,)),
            Planned(still, partial(self._settings_kept, "after completions"), (completions,)),
            Planned(failed, self._failed_wake_ups, (completions,)),
            Planned(again, self._built_again, (completions,)),
        ]

    def _build(self) -> Iterator[Check]:
        started = time.perf_counter()
        with mock.patch("hybrid_engine.trainer.worker.build_inference_engine", self._noting(build_inference_engine)):
            self._worker = ActorHybridWorker(self._config)
        seconds = time.perf_counter() - started
        self._taken["build"] = self._observe()
        yield self._check("build", True, f"{seconds:.1f} s", seconds=seconds)

    def _settings_kept(self, moment: str) -> Iterator[Check]:
        changed = ProcessState.now().changes(self._before_vllm, but=(FROZEN,))
        yield self._check(f"settings and environment as before, {moment}", not changed, note="; ".join(changed))

    def _switches(self) -> Iterator[Check]:
        """Train, switch, compare all weights, and back."""
        there, back = [], []
        for number in range(NUM_SWITCHES):
            self._train(number)
            self._taken["train"] = self._observe()
            with self._peak_observed():
                there.append(self._enter(State.INFER))
            self._taken["infer"] = self._observe()
            back.append(self._enter(State.TRAIN))
        table, compared = self._require().table, [each.tensors_verified for each in there]
        served = sum(map(table.is_served, table.shapes))
        figure = f"{compared[0]} of {served} tensors, {there[0].bytes_verified / GIB:.3f} GiB, {NUM_SWITCHES} times"
        note = f"{compared} in turn, of {served} that vLLM reads"
        yield self._check("all weights compared in the switch", set(compared) == {served}, figure, note=note)
        yield self._timed("switch to vLLM, the first", [there[0]], is_judged=False)  # it takes host memory, page-locked
        yield self._timed("switch to vLLM", there[1:])
        yield self._timed("switch to training", back[1:])
        if self._on_gpu:
            yield self._peak()

    def _complete(self) -> Iterator[Check]:
        worker = self._require()
        worker.save_hf_checkpoint(self._job.checkpoint)
        self._enter(State.INFER)
        self._completions = self._draw()
        self._job.answers.write_text(json.dumps(self._completions))
        again = self._draw()
        self._enter(State.TRAIN)
        note = differences(again, self._completions)
        figure = f"{len(self._completions)} of {MAX_TOKENS} tokens"
        yield self._check("completions, twice the same", not note, figure, note=note)

    def _failed_wake_ups(self) -> Iterator[Check]:
        """No memory is left when something of vLLM's wakes: all is as before, and the next switch goes well."""
        if self._on_gpu and driver_of(self._device.index) is None:
            raise CannotCheckError(f"its memory cannot be taken without cuda-bindings: {INSTALL_HINT}")
        before = self._digests()
        for shortage in self._shortages():
            name, error = f"failed wake-up, {shortage.name}", self._error_of(shortage)
            if error is None:
                self._enter(State.TRAIN)
                yield self._check(name, False, note="it did not fail, though there was no memory for it")
                continue
            faults = []
            if (state := self._require().sharding.state) is not State.TRAIN:
                faults.append(f"the state is {state.value}")
            elif self._digests() != before:
                faults.append("training's contents changed")
            if (more := self._observe() - self._taken["train"]) > (self._taken["infer"] // 4):
                faults.append(f"{more / GIB:.2f} GiB more are taken than in training")
            note = f"{'; '.join(faults)}, after: {error}"
            figure = "by a device without memory" if self._on_gpu else "by an error put in its place"
            yield self._check(f"{name}: training is as before", not faults, figure, note=note)
            self._enter(State.INFER)
            found = self._draw()
            self._enter(State.TRAIN)
            note = differences(found, self._completions)
            yield self._check(f"{name}: the next switch", not note, "the same completions", note=note)

    def _built_again(self) -> Iterator[Check]:
        """Shut down while vLLM sleeps, as it does in training; then another engine in the same process."""
        yield from self._shut_down_asleep()
        if not self._job.eager:
            raise NothingToCheckError("built again: with eager engines")
        self._worker = worker = ActorHybridWorker(self._config)
        worker.load_hf_checkpoint(self._job.checkpoint)
        self._enter(State.INFER)
        note = differences(self._draw(), self._completions)
        worker.shutdown()
        self._worker = None
        yield self._check("built again", not note, "the same completions", note=note)

    def _shut_down_asleep(self) -> Iterator[Check]:
        worker = self._require()
        models: dict[str, weakref.ref[object]] = {
            "vLLM's model": weakref.ref(worker.inference.adaptor.model),
            "the trainer": weakref.ref(worker.train),
        }
        worker.shutdown()
        self._worker = None
        del worker
        gc.collect()
        now = ProcessState.now()
        faults = now.left_behind(self._at_first)
        if not self._on_gpu:  # there the driver counts
            faults += [f"{name} is still referred to" for name, model in models.items() if model() is not None]
        figure = "no process, no shared memory"
        yield self._check("shut down asleep: nothing is left", not faults, figure, note="; ".join(faults))
        changed = now.changes(self._before_vllm)
        yield self._check("settings and environment as before, after the end", not changed, note="; ".join(changed))
        if self._on_gpu:
            yield self._memory_back(self._observe() - self._taken["before"])

    def _memory_back(self, left: int) -> Check:
        figure = f"{left / GIB:.2f} GiB more are taken than before the build"
        floor = f"at most {_MOST_LEFT / GIB:g} GiB"
        return self._check("shut down asleep: memory is back", left <= _MOST_LEFT, figure, floor, nbytes=left)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _noting(self, build: Callable[..., Any]) -> Callable[..., Any]:
        """`build`, which finds the process as training has it: Megatron sets variables too."""

        def noted(*arguments: Any) -> Any:
            self._before_vllm = ProcessState.now()
            return build(*arguments)

        return noted

    def _require(self) -> ActorHybridWorker:
        assert self._worker is not None
        return self._worker

    def _check(
        self, name: str, is_good: bool, figure: str = "", floor: str = "", note: str = "", **values: float
    ) -> Check:
        return judged(f"{self._job.mode}: {name}", is_good, figure, floor, note, **values)

    def _train(self, seed: int) -> None:
        vocabulary = self._require().table.dims.vocab_size
        self._require().update(tokens_and_labels(seed, vocabulary, 4), cross_entropy)

    def _enter(self, state: State) -> ReshardReport:
        report = self._require().sharding.enter(state)
        assert report is not None, "another state"
        return report

    def _draw(self) -> list[list[int]]:
        """Without what is cached of an earlier call, whose kernels would be others."""
        self._require().inference.reset_caches()
        sampling = Sampling(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
        completions = self._require().generate_sequences(self._job.prompts(), sampling)
        return [list(answers[0].token_ids) for answers in completions]

    def _timed(self, name: str, reports: list[ReshardReport], *, is_judged: bool = True) -> Check:
        """Beside plain copies of what is offloaded and onloaded; the comparison of all weights does not count."""
        verified = [each.seconds_by_phase.get("verify", 0.0) for each in reports]
        seconds = statistics.median(each.seconds - more for each, more in zip(reports, verified, strict=True))
        moved = {"offload": reports[-1].bytes_offloaded, "onload": reports[-1].bytes_onloaded}
        floors = [self._plain_copy(name, nbytes) for name, nbytes in moved.items() if nbytes]
        floor, figure = sum(floors), f"{seconds:.3f} s, and {statistics.median(verified):.3f} to compare"
        is_judged = is_judged and self._on_gpu
        limit = f"at least {_LEAST_SHARE:.0%}" if is_judged else "not judged"
        beside = f"{floor / seconds:.0%} of the rate of plain page-locked copies, {floor:.3f} s; {limit}"
        is_good = floor / seconds >= _LEAST_SHARE or not is_judged
        return self._check(name, is_good, figure, beside, seconds=seconds, floor_seconds=floor)

    def _plain_copy(self, name: str, nbytes: int) -> float:
        """Seconds, from those of a part: host memory for all of it may not be there."""
        part = min(nbytes, GIB)
        return plain_host_copies(self._device, part, 1)[name] * nbytes / part

    def _peak(self) -> Check:
        """Of all switches to vLLM: at most what is there on either side of them, and two buckets."""
        most = max(self._taken["train"], self._taken["infer"]) + 2 * self._config.generate_config.bucket_mb * _MIB
        peak = max(self._peaks)
        figure = (
            f"{peak / GIB:.2f} GiB (training {self._taken['train'] / GIB:.2f}, vLLM {self._taken['infer'] / GIB:.2f})"
        )
        values = {"nbytes": peak, "training_nbytes": self._taken["train"], "infer_nbytes": self._taken["infer"]}
        floor = f"at most {_SLACK:g} times the larger and two buckets, {most / GIB:.2f} GiB"
        return self._check(
            "device memory in a switch, most at once", peak <= _SLACK * most, figure, floor, note="", **values
        )

    def _observe(self) -> int:
        """Bytes taken on the device by everybody, without what torch keeps for later."""
        if not self._on_gpu:
            return 0
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return taken_nbytes(self._device)

    @contextmanager
    def _peak_observed(self) -> Iterator[None]:
        """Asks the driver all the while: our buffers and vLLM's are outside of torch's allocator."""
        if not self._on_gpu:
            yield
            return
        done, seen = threading.Event(), [0]

        def observe() -> None:
            while not done.wait(0.002):
                seen.append(taken_nbytes(self._device))

        thread = threading.Thread(target=observe)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
        self._peaks.append(max(seen))

    def _shortages(self) -> Sequence[Shortage]:
        """When vLLM itself wakes up, at weights that wake later, and when the KV cache wakes."""
        inference, buckets = self._require().inference, self._require().sharding.plan.buckets
        num_calls = sum(bool(bucket.groups) for bucket in buckets)
        half_of_cache = (self._config.generate_config.kv_cache_mb or 0) * _MIB // 2
        return (
            Shortage("weights", inference.adaptor, "allocate"),
            Shortage("weights half-way", inference.adaptor, "allocate", num_calls // 2),
            Shortage("KV cache", inference, "wake_kv_cache", left=half_of_cache),
        )

    def _error_of(self, shortage: Shortage) -> Exception | None:
        """What a switch to vLLM raises then."""
        replacement = self._starved(getattr(shortage.owner, shortage.method), shortage)
        with mock.patch.object(shortage.owner, shortage.method, replacement):
            try:
                self._enter(State.INFER)
            except Exception as error:
                return error
        return None

    def _starved(self, call: Callable[..., Any], shortage: Shortage) -> Callable[..., Any]:
        """The call, without memory on the device; where there is no device, an error in its place."""
        numbers = itertools.count()

        def starved(*arguments: Any) -> Any:
            if next(numbers) != shortage.number:
                return call(*arguments)
            if not self._on_gpu:
                raise RuntimeError("CUDA Error: out of memory (put in by check-gpu)")
            driver = driver_of(self._device.index)
            assert driver is not None, "asked before"
            with device_without_memory(driver, shortage.left):
                return call(*arguments)

        return starved

    def _digests(self) -> list[int]:
        """Of all that an offload copies."""
        items = [item for item in self._require().train.offload_items() if item.action == "copy"]
        return [box_digest(item.tensor) for item in items]


def main(job: str, results: str) -> None:
    """Run the checks in this process, the only rank of a job."""
    if torch.cuda.is_available():
        torch.cuda.set_device(0)
    run_checks(EngineChecks(SmallJob(**json.loads(job))).planned(), Path(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
