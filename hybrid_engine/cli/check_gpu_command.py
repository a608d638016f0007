"""`check-gpu`: check the request, run the stages of `hybrid_engine.verification.gpu`, print a line for each check."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hybrid_engine.cli.options import collect, refuse
from hybrid_engine.cli.output import Console, unwritable, writing
from hybrid_engine.errors import ConfigError, FileError, Violation, shortened
from hybrid_engine.files.durable import write_text

if TYPE_CHECKING:
    from hybrid_engine.verification.gpu.check_gpu import StageResult
    from hybrid_engine.verification.gpu.checks import Check

_STYLES = {"green": "green", "red": "bold red", "missing": "yellow", "left out": "dim"}
_SIMULATED = (
    "Without a GPU: stage 1 runs over a model of CUDA's driver, and stage 2 with both engines on the CPU. Contents and "
    "bytes are checked, times mean nothing, and no line of CUDA runs."
)


class Device(StrEnum):
    """Where the stages run."""

    CUDA = "cuda"
    CPU = "cpu"


def check_gpu(
    stage: Annotated[
        list[int] | None, typer.Option(help="1: a GPU without vLLM, 2: with Megatron and vLLM, 3: two GPUs or more.")
    ] = None,
    device: Annotated[Device, typer.Option(help="cpu: stages 1 and 2 without a GPU, to see that they work.")] = (
        Device.CUDA
    ),
    vllm: Annotated[
        list[str] | None, typer.Option(help="Engine arguments of vLLM: attention_backend=TRITON_ATTN. May be repeated.")
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(help="Seconds for all stages together; default: 600 for 1 and 2, 3000 more where 3 can run."),
    ] = None,
    as_json: Annotated[Path | None, typer.Option("--json", help="Also write facts and figures to this file.")] = None,
) -> None:
    """Check on this machine's GPUs what was written for GPUs; run it first there. At most 10 minutes on one GPU.

    Facts of the machine, then a line for each check: green, red, missing (it could not run, and why) or left out.
    docs/gpu.md says what each means, and what to do.
    """
    from hybrid_engine.files.scratch import unwinding_on_sigterm
    from hybrid_engine.verification.gpu.check_gpu import (
        TITLES,
        Budget,
        StageResult,
        default_budget,
        exit_status,
        run_stage,
    )
    from hybrid_engine.verification.gpu.machine import facts_of, this_machine

    found = [
        Violation("--stage", f"there is no stage {number}", "Use 1, 2 or 3")
        for number in stage or ()
        if number not in TITLES
    ]
    arguments = collect(found, _engine_arguments, vllm or ())
    if as_json is not None and (problem := unwritable(as_json)):
        found.append(Violation("--json", problem, "Name a file in a directory that can be written to"))
    if budget is not None and not 0 < budget < math.inf:
        found.append(Violation("--budget", f"{budget:g} seconds", "Give a number above 0"))
    if found or arguments is None:
        refuse(found)
    numbers = sorted(set(stage or TITLES)) if device is Device.CUDA else sorted(set(stage or (1, 2)))
    machine, console = this_machine(), Console(soft_wrap=True, highlight=False)
    facts, seconds = facts_of(machine), budget or default_budget(numbers, machine.num_gpus)
    record = _Record(console, as_json, {"device": device, "budget_seconds": seconds, "facts": facts})
    try:
        with writing(), unwinding_on_sigterm():
            _print_facts(console, facts, device)
            console.print(f"time for all stages: {seconds:g} s (--budget)", markup=False)
            remaining = Budget.beginning_now(seconds)
            for number in numbers:
                simulated = ", simulated" * (device is Device.CPU)
                console.print(f"\nStage {number}, {TITLES[number]}{simulated}", style="bold")
                record.tell(StageResult(number, is_over=False))
                record.end(run_stage(number, device.value, machine, arguments, remaining, record.tell))
    except FileError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    raise typer.Exit(exit_status(record.results))


def _engine_arguments(texts: Sequence[str]) -> dict[str, Any]:
    """Values as in JSON, or else texts. Raises ConfigError with every text that gives none."""
    found = [
        Violation("--vllm", f"{shortened(text)} cannot be read", "Write name=value")
        for text in texts
        if not text.partition("=")[0] or not text.partition("=")[2]
    ]
    if found:
        raise ConfigError(found)
    return {name: _value_of(value) for name, _, value in (text.partition("=") for text in texts)}


def _value_of(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _print_facts(console: Console, facts: Mapping[str, str], device: Device) -> None:
    for name, value in facts.items():
        console.print(f"{name}: {value}", markup=False)
    if device is Device.CPU:
        console.print(_SIMULATED, style="bold", markup=False)


class _Record:
    """Results, printed and written as they come, so that whatever ends this process loses none of them.

    Args:
        console: gets a line for each check.
        path: of the file of `--json`; None: there is none.
        head: of that file.

    Attributes:
        results: of the stages that are over.
    """

    def __init__(self, console: Console, path: Path | None, head: Mapping[str, Any]) -> None:
        self._console, self._path, self._head = console, path, head
        self._num_printed = 0  # checks of the stage that is under way
        self.results: list[StageResult] = []

    def tell(self, so_far: StageResult) -> None:
        """Raises FileError."""
        for check in so_far.checks[self._num_printed :]:
            _print_check(self._console, check)
        self._num_printed = len(so_far.checks)
        if self._path is not None:
            write_text(self._path, _document(self._head, [*self.results, so_far]))

    def end(self, result: StageResult) -> None:
        """Raises FileError."""
        for reason in result.missing:
            self._console.print(f"{'missing':9} {reason}", style=_STYLES["missing"], markup=False)
        self.tell(result)
        self.results.append(result)
        self._num_printed = 0
        self._console.print(f"Stage {result.number}: {result.colour}, {result.seconds:.0f} s", style="bold")
        if result.output:
            self._console.print(f"\n{result.output}", markup=False)


def _print_check(console: Console, check: Check) -> None:
    figures = f"{check.figure}{'; ' * bool(check.figure and check.floor)}{check.floor}"
    line = f"{check.colour:9} {check.name:50} {figures}"
    console.print(line.rstrip(), style=_STYLES[check.colour], markup=False)
    for note in check.note.splitlines():
        console.print(f"{'':9}   {note}", markup=False)


def _document(head: Mapping[str, Any], results: Sequence[StageResult]) -> str:
    from hybrid_engine.verification.gpu.check_gpu import exit_status

    stages = [result.as_dict() for result in results]
    note = _SIMULATED if head["device"] is Device.CPU else ""
    return json.dumps({"status": exit_status(results), "note": note, **head, "stages": stages}, indent=2)
