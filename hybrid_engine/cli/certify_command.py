"""`certify`: check the request, run `hybrid_engine.verification.certify`, print what each way to reload came to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hybrid_engine.cli.options import refuse, refusing
from hybrid_engine.cli.output import Console, new_table, progress, write_answer
from hybrid_engine.errors import Violation, first_of, shortened

if TYPE_CHECKING:
    from hybrid_engine.verification.certificate import Finding

_MOST_NAMES = 4


def certify(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL... [-- VLLM ARGUMENTS]",
            help="Directories of models: a config.json with safetensors, or alone, then the weights are random. After "
            "`--` arguments of `vllm serve`, such as --dtype float32.",
            show_default=False,
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Say whether vLLM computes after a reload of weights what it computes after a cold load, bit by bit.

    A stock vLLM loads other weights of the same shapes, then the model's by its own reload; it sleeps and wakes, where
    the build can; this project's own switch does the same. Parameters, buffers, what kernels derive from them, and
    log-probabilities of fixed prompts are compared with a fresh engine's. Exits with 1 if anything differs or fails.
    """
    from hybrid_engine.files.scratch import scratch_directory, unwinding_on_sigterm
    from hybrid_engine.verification import certify as verification

    first = next((index for index, word in enumerate(words) if word.startswith("-")), len(words))
    models, remedy = [*dict.fromkeys(words[:first])], "Name directories of models before `--`"
    missing = [shortened(model) for model in models if not Path(model, "config.json").is_file()]
    if missing or not models:
        problems = [f"{model} has no config.json" for model in missing] or ["none is named"]
        refuse([Violation("MODEL", problem, remedy) for problem in problems])
    names = [Path(model).absolute().name for model in models]
    names = names if len({*names}) == len(names) else models
    with (
        refusing(),
        unwinding_on_sigterm(),
        scratch_directory("hybrid-engine-certify-") as scratch,
        progress() as doing,
    ):
        doing("writing checkpoints")
        pairs = [
            verification.prepare(Path(model), name, words[first:], scratch / str(index))
            for index, (model, name) in enumerate(zip(models, names, strict=True))
        ]
        doing(f"vLLM's engines, models: {len(models)}")
        findings = verification.certify(pairs, scratch)
    write_answer(_as_json(findings), lambda: _print(findings), as_json=as_json)
    statuses = {each.status for own in findings.values() for each in own}
    raise typer.Exit(1 if statuses & {"differs", "failed"} else 0)


def _as_json(findings: Mapping[str, Sequence[Finding]]) -> dict[str, Any]:
    from hybrid_engine.verification.machine import versions

    models = {model: [asdict(each) for each in own] for model, own in findings.items()}
    for difference in (one for own in models.values() for each in own for one in each["differences"]):
        difference["cause"] = {"name": difference["cause"].name.lower(), "text": difference["cause"].value}
    return {"versions": versions(), "models": models}


def _print(findings: Mapping[str, Sequence[Finding]]) -> None:
    """Print the matrix, then the tensors that differ by cause, and why anything was not compared."""
    console = Console(highlight=False)
    matrix = new_table(
        "Compared with a cold load, after ...", "", *(each.way for each in next(iter(findings.values())))
    )
    for model, own in findings.items():
        matrix.add_row(model, *map(_cell, own))
    console.print(matrix)
    for model, each in ((model, each) for model, own in findings.items() for each in own):
        title = f"{model}, {each.way}"
        if each.reason:
            console.print(f"{title}, {each.status}: {each.reason}", markup=False)
        if each.unseen:
            hidden = first_of(each.unseen, _MOST_NAMES)
            console.print(f"{title}, cannot be read, only shows in what is computed: {hidden}", markup=False)
        for cause in dict.fromkeys(one.cause for one in each.differences):
            having = [one for one in each.differences if one.cause is cause]
            largest, share = max(one.max_abs for one in having), max(one.share for one in having)
            names = first_of([one.name for one in having], _MOST_NAMES)
            size = f"by up to {largest:.2g}, in up to {share:.0%} of the elements"
            console.print(f"{title}, {cause.value}, {size}: {names}", markup=False)


def _cell(finding: Finding) -> str:
    if finding.status != "differs":
        return finding.status
    return f"{len(finding.differences)} of {finding.num_tensors} differ, log-probabilities by {finding.logprobs:.2g}"
