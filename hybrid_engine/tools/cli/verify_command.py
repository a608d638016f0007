"""Commands `verify` and `certify`: check the request, run tools/verify/, print what it finds."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hybrid_engine.config.inference_rules import UNQUANTISED
from hybrid_engine.errors import Violation, Violations, collect, first_of, shortened
from hybrid_engine.layouts.memory import GIB
from hybrid_engine.models.quantization_configs import block_config, format_in
from hybrid_engine.tools.cli.options import (
    CONFIG_ARGUMENT,
    integer_option,
    read_config,
    refuse,
    refusing,
)
from hybrid_engine.tools.cli.output import (
    Block,
    end_without_answer,
    new_table,
    timed,
    write_answer,
)

if TYPE_CHECKING:
    from hybrid_engine.tools.verify.certificate import Finding
    from hybrid_engine.tools.verify.comparison import Verdict

_RANKS_PER_CORE = 8  # with more, ranks that wait for each other run into their timeouts
_GIB_PER_RANK = 1.0  # libraries of both engines and a small model
_MAX_NAMES = 4


def verify(
    words: Annotated[list[str], CONFIG_ARGUMENT],
    ranks: Annotated[
        int,
        integer_option("Number of ranks: as many processes are started here."),
    ],
    layers: Annotated[
        int | None,
        integer_option(
            "Decoder layers of the small model; default: 4, or as many as the layouts need."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdict as JSON.")] = False,
    oversubscribe: Annotated[
        bool,
        typer.Option(help="Start more processes than this machine has room for."),
    ] = False,
) -> None:
    """Switch a small model of the same architecture between two layouts, and compare.

    Both engines are real; random weights; three switches with changing weights. Every vLLM
    parameter must be bitwise equal to that loaded by vLLM itself, and the log-probabilities of the
    trainer (Megatron, or FSDP2 if actor_config.fsdp is set) and of vLLM must match those of
    transformers. Layouts, dtypes and adapters are the configuration's; memory, speed and batch
    settings are small.
    """
    from hybrid_engine.files.scratch import scratch_directory, unwinding_on_sigterm
    from hybrid_engine.tools.verify.cases import case_of, values_to_verify
    from hybrid_engine.tools.verify.verify import SCRATCH_PREFIX, run_cases

    violations: list[Violation] = []
    if layers is not None and layers < 1:
        violations.append(
            Violation(
                "--layers",
                f"{layers}, but must be at least 1",
                "Use 1 or more",
                code="out-of-range",
            )
        )
    config = collect(violations, read_config, words, ranks)
    if config is not None and not oversubscribe:
        violations += _too_many_ranks(ranks)
    if violations or config is None:
        refuse(violations, as_json)
    name = f"{' '.join(words)} on {ranks} {'rank' if ranks == 1 else 'ranks'}"
    with refusing(as_json), unwinding_on_sigterm(), scratch_directory(SCRATCH_PREFIX) as scratch:
        actor, generate = values_to_verify(config)
        case = case_of(name, config.model, scratch, ranks, actor, generate, layers)
        case.config(ranks)  # raises with every violation before a process is started
        with timed(f"three switches on {ranks} processes"):
            (verdict,) = run_cases([case], ranks)
    if verdict.status > 1:
        end_without_answer(f"No verdict: {verdict.error}", verdict.status, as_json)
    method = config.generate_config.quantization
    published = block_config(config.hf_config(), method)
    if method is None and published is not None:
        method = f"{format_in(published).method}, by config.json"
    if method not in (None, UNQUANTISED):
        verdict.remarks.append(
            f"Compared without generate_config.quantization ({method}), which rounds weights"
        )
    facts = {**verdict.as_dict(), "faults": verdict.faults}
    write_answer(facts, _verdict_blocks(verdict), as_json=as_json)
    raise typer.Exit(verdict.status if verdict.faults else 0)


def _too_many_ranks(num_ranks: int) -> Violations:
    """Yield a violation if this machine has too few cores or memory for the processes."""
    num_cores = len(os.sched_getaffinity(0))
    memory_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB
    most = max(1, min(_RANKS_PER_CORE * num_cores, int(memory_gib / _GIB_PER_RANK)))
    if num_ranks > most:
        yield Violation(
            "--ranks",
            f"{num_ranks} processes of {_GIB_PER_RANK:g} GiB or more, on {num_cores} cores and "
            f"{memory_gib:.0f} GiB; there is room for {most}",
            "Use fewer with smaller sizes, or --oversubscribe to start them anyway",
            code="too-many-ranks",
        )


def _verdict_blocks(verdict: Verdict) -> Iterator[Block]:
    outcome = "Not the same" if verdict.faults else "The same"
    trainer = {"megatron": "Megatron", "fsdp2": "FSDP2"}[verdict.trainer]
    differences = {
        f"log-probabilities, {name}, {verdict.statistic} difference from transformers": (
            "not computed" if difference is None else f"{difference:.1e}"
        )
        for name, difference in ((trainer, verdict.training), ("vLLM", verdict.vllm))
    }
    rows = {
        "vLLM parameters compared, all switches and ranks": str(verdict.num_parameters),
        "of them not the bits that vLLM loads itself": str(len(verdict.different)),
        "switches with changed weights": str(verdict.num_versions),
        **differences,
        "bytes received, least possible": f"{verdict.bytes_received}, {verdict.bytes_least}",
        "seconds": f"{verdict.seconds:.1f}",
    }
    yield new_table(f"{outcome}: {verdict.name}", ("", ""), rows.items())
    yield from verdict.remarks
    yield from verdict.faults


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
        refused = [Violation("MODEL", problem, remedy, code="no-model") for problem in problems]
        refuse(refused, as_json)
    names = [Path(model).absolute().name for model in models]
    if len(set(names)) < len(names):
        names = models
    with (
        refusing(as_json),
        unwinding_on_sigterm(),
        scratch_directory("hybrid-engine-certify-") as scratch,
    ):
        with timed("writing checkpoints"):
            arguments = words[num_models:]
            pairs = [
                verification.prepare(Path(model), name, arguments, scratch / str(index))
                for index, (model, name) in enumerate(zip(models, names, strict=True))
            ]
        with timed(f"vLLM's engines, models: {len(models)}"):
            findings = verification.certify(pairs, scratch)
    write_answer(_as_json(findings), _finding_blocks(findings), as_json=as_json)
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
            for figures in (facts, *facts["differences"]):
                # JSON has no infinity.
                figures |= dict.fromkeys(key for key, value in figures.items() if value == math.inf)
    return {"versions": versions(), "models": models}


def _finding_blocks(findings: Mapping[str, Sequence[Finding]]) -> Iterator[Block]:
    """Yield the matrix, the differing tensors by cause, and reasons for missing comparisons."""
    ways = [finding.way for finding in next(iter(findings.values()))]
    rows = [(model, *map(_cell, of_model)) for model, of_model in findings.items()]
    yield new_table("Compared with a cold load, after ...", ("", *ways), rows)
    for model, of_model in findings.items():
        for finding in of_model:
            for line in _notes(finding):
                yield f"{model}, {finding.way}, {line}"


def _notes(finding: Finding) -> Iterator[str]:
    if finding.reason:
        yield f"{finding.status}: {finding.reason}"
    if finding.unseen:
        hidden = first_of(finding.unseen, _MAX_NAMES)
        yield f"cannot be read, only shows in what is computed: {hidden}"
    for cause in dict.fromkeys(difference.cause for difference in finding.differences):
        alike = [difference for difference in finding.differences if difference.cause is cause]
        largest = max(difference.max_abs for difference in alike)
        share = max(difference.share for difference in alike)
        names = first_of([difference.name for difference in alike], _MAX_NAMES)
        size = f"by up to {largest:.2g}, in up to {share:.0%} of the elements"
        yield f"{cause.value}, {size}: {names}"


def _cell(finding: Finding) -> str:
    if finding.status != "differs":
        return finding.status
    tensors = f"{len(finding.differences)} of {finding.num_tensors} differ"
    return f"{tensors}, log-probabilities by {finding.logprobs:.2g}"
