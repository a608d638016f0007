"""Command `certify`: checks the request, runs tools/verify/certify.py, prints its findings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hybrid_engine.errors import Violation, first_of, shortened
from hybrid_engine.tools.cli.options import refuse, refusing
from hybrid_engine.tools.cli.output import Console, new_table, progress, write_answer

if TYPE_CHECKING:
    from hybrid_engine.tools.verify.certificate import Finding

_MOST_NAMES = 4


def certify(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL... [-- VLLM ARGUMENTS]",
            help="Directories of models: a config.json with safetensors, "
            "or alone for random weights. "
            "After `--` arguments of `vllm serve`, such as --dtype float32.",
            show_default=False,
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check that vLLM computes the same after a reload of weights as after a cold load, bit by bit.

    A stock vLLM loads other weights of the same shapes, then the model's by its own reload; it
    sleeps and wakes, if the build can; this project's own switch does the same. Parameters,
    buffers, values that kernels derive from them, and log-probabilities of fixed prompts are
    compared with a fresh engine's. Exits with 1 if anything differs or fails.
    """
    from hybrid_engine.files.scratch import scratch_directory, unwinding_on_sigterm
    from hybrid_engine.tools.verify import certify as verification

    options = [index for index, word in enumerate(words) if word.startswith("-")]
    num_models = options[0] if options else len(words)
    models = list(dict.fromkeys(words[:num_models]))
    missing = [shortened(model) for model in models if not Path(model, "config.json").is_file()]
    if missing or not models:
        problems = [f"{model} has no config.json" for model in missing] or ["no model is named"]
        remedy = "Name directories of models before `--`"
        refuse([Violation("MODEL", problem, remedy, code="no-model") for problem in problems])
    names = [Path(model).absolute().name for model in models]
    if len(set(names)) < len(names):
        names = models
    with (
        refusing(),
        unwinding_on_sigterm(),
        scratch_directory("hybrid-engine-certify-") as scratch,
        progress() as show_step,
    ):
        show_step("writing checkpoints")
        arguments = words[num_models:]
        pairs = [
            verification.prepare(Path(model), name, arguments, scratch / str(index))
            for index, (model, name) in enumerate(zip(models, names, strict=True))
        ]
        show_step(f"vLLM's engines, models: {len(models)}")
        findings = verification.certify(pairs, scratch)
    write_answer(_as_json(findings), lambda: _print(findings), as_json=as_json)
    statuses = {finding.status for of_model in findings.values() for finding in of_model}
    raise typer.Exit(1 if statuses & {"differs", "failed"} else 0)


def _as_json(findings: Mapping[str, Sequence[Finding]]) -> dict[str, Any]:
    from hybrid_engine.tools.verify.machine import versions

    models: dict[str, list[dict[str, Any]]] = {}
    for model, of_model in findings.items():
        models[model] = [asdict(finding) for finding in of_model]
        for facts in models[model]:
            for difference in facts["differences"]:
                cause = difference["cause"]
                difference["cause"] = {"name": cause.name.lower(), "text": cause.value}
    return {"versions": versions(), "models": models}


def _print(findings: Mapping[str, Sequence[Finding]]) -> None:
    """Print the matrix, the differing tensors by cause, and reasons for missing comparisons."""
    console = Console(highlight=False)
    ways = [finding.way for finding in next(iter(findings.values()))]
    matrix = new_table("Compared with a cold load, after ...", "", *ways)
    for model, of_model in findings.items():
        matrix.add_row(model, *map(_cell, of_model))
    console.print(matrix)
    for model, of_model in findings.items():
        for finding in of_model:
            for line in _notes(finding):
                console.print(f"{model}, {finding.way}, {line}", markup=False)


def _notes(finding: Finding) -> Iterator[str]:
    if finding.reason:
        yield f"{finding.status}: {finding.reason}"
    if finding.unseen:
        hidden = first_of(finding.unseen, _MOST_NAMES)
        yield f"cannot be read, only shows in what is computed: {hidden}"
    for cause in dict.fromkeys(difference.cause for difference in finding.differences):
        alike = [difference for difference in finding.differences if difference.cause is cause]
        largest = max(difference.max_abs for difference in alike)
        share = max(difference.share for difference in alike)
        names = first_of([difference.name for difference in alike], _MOST_NAMES)
        size = f"by up to {largest:.2g}, in up to {share:.0%} of the elements"
        yield f"{cause.value}, {size}: {names}"


def _cell(finding: Finding) -> str:
    if finding.status != "differs":
        return finding.status
    tensors = f"{len(finding.differences)} of {finding.num_tensors} differ"
    return f"{tensors}, log-probabilities by {finding.logprobs:.2g}"
