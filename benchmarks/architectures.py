"""Architectures that are switched from FSDP2 and from Megatron to vLLM, compared bit by bit.

    python -m benchmarks.architectures [--only TEXT ...] [--json FILE]

Small random models, two training ranks (FSDP2, TP=2, EP=2 or PP=2) to vLLM with TP=2, three
switches with different weights:

    parameters   parameters of vLLM on both ranks, compared in all switches with those that vLLM's
                 own loader reads from a checkpoint of the same weights
    trainer, vLLM   largest difference of log-probabilities from transformers', in nats, in float32

The rows of FSDP2 use derived tables, also where there is a written one. A model that vLLM cannot
compute on this machine is planned instead: vLLM's own loader is traced on both ranks.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.launching import parser_of, write_figures
from hybrid_engine.errors import HybridEngineError
from hybrid_engine.tools.launching import run_ranks
from hybrid_engine.tools.plan.cluster_plan import plan_job
from hybrid_engine.tools.verify import verify
from hybrid_engine.tools.verify.cases import Case
from hybrid_engine.tools.verify.comparison import Verdict
from tests.hybrid_engine.backends.fsdp import test_derived_models
from tests.hybrid_engine.backends.fsdp.test_derived_models import EXCLUDED, TENSOR
from tests.hybrid_engine.end_to_end import test_derived_megatron
from tests.hybrid_engine.models.small_configs import SMALL, small_config
from tests.hybrid_engine.tools.verify.matrix import Combination
from tests.zoo.families import write_config
from tests.zoo.published_configs import PUBLISHED

ROWS_PER_LAUNCH = 6
SECONDS = 2400
"""Timeout of a launch."""
_FAMILIES = {PUBLISHED[name]["architectures"][0]: name for name in PUBLISHED}
"""Architecture -> a family with a written table."""
_SIZES = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "expert_model_parallel_size": "ep",
}
_WITH_EXPERTS = {"deepseek-v2", "deepseek-v3", "mixtral", "qwen3-moe"}


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        architecture: class of transformers.
        trainer: "FSDP2", "Megatron, name table" or "Megatron, by names".
        layout: training layout of two ranks.
        number: index in `test_derived_megatron.MODELS`, of a model by names.
    """

    architecture: str
    trainer: str
    layout: str
    number: int = 0

    @property
    def name(self) -> str:
        return f"{self.architecture}: {self.trainer}, {self.layout}"

    def case(self, directory: Path) -> Case:
        """Return the case of `verify`, with its model below `directory`."""
        family = _FAMILIES.get(self.architecture)
        if family is not None:
            return Combination(family, 2, self.layout, "tp2").case(directory)
        model = write_config(directory, small_config(self.architecture))
        return Case(self.name, str(model), {"fsdp": {}}, TENSOR)


def all_rows() -> list[Row]:
    """Return the rows of both trainers, in the order in which they run."""
    by_names = [
        Row(
            model.architecture,
            "Megatron, by names",
            " ".join(_SIZES[key] + str(size) for key, size in model.parallel.items()),
            number,
        )
        for number, model in enumerate(test_derived_megatron.MODELS)
        # these run in bfloat16, or with changes of vLLM (test_derived_megatron.py)
        if model.architecture not in EXCLUDED
    ]
    by_table = [
        Row(architecture, "Megatron, name table", "ep2" if family in _WITH_EXPERTS else "tp2")
        for architecture, family in _FAMILIES.items()
    ]
    by_fsdp = [Row(architecture, "FSDP2", "fsdp2") for architecture in sorted({*_FAMILIES, *SMALL})]
    return [*by_fsdp, *by_table, *by_names]


def results(rows: Sequence[Row]) -> Iterator[tuple[Row, Verdict]]:
    """Run rows one after the other, those of one program in few launches."""
    programs: Mapping[str, Any] = {
        "traced": _traced,
        "FSDP2": lambda rows: _compared(rows, test_derived_models.__name__),
        "Megatron, name table": lambda rows: _compared(rows, verify.__name__),
        "Megatron, by names": _by_names,
    }
    for program, run in programs.items():
        same = [row for row in rows if _program_of(row) == program]
        for start in range(0, len(same), ROWS_PER_LAUNCH):
            group = same[start : start + ROWS_PER_LAUNCH]
            try:
                verdicts = run(group)
            except HybridEngineError as error:
                verdicts = [Verdict(row.name, error=str(error)) for row in group]
            yield from zip(group, verdicts, strict=True)


def _program_of(row: Row) -> str:
    return "traced" if row.trainer == "FSDP2" and row.architecture in EXCLUDED else row.trainer


def _compared(rows: Sequence[Row], module: str) -> list[Verdict]:
    with tempfile.TemporaryDirectory() as directory:
        cases = [row.case(Path(directory, str(number))) for number, row in enumerate(rows)]
        return verify.run_cases(cases, 2, SECONDS, module)


def _by_names(rows: Sequence[Row]) -> list[Verdict]:
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "verdicts.json"
        numbers = [str(row.number) for row in rows]
        ended = run_ranks(["-m", test_derived_megatron.__name__, str(out), *numbers], 2, SECONDS)
        if ended.status != 0:
            return [Verdict(row.name, error=ended.output) for row in rows]
        return [Verdict(**values) for values in json.loads(out.read_text())]


def _traced(rows: Sequence[Row]) -> list[Verdict]:
    """Plan cases; every element of vLLM's parameters then has one source."""
    verdicts = []
    for row in rows:
        verdict = Verdict(row.name, remarks=[EXCLUDED[row.architecture]])
        with tempfile.TemporaryDirectory() as directory:
            try:
                job = plan_job(row.case(Path(directory)).config(2), 2)
                for rank in range(2):
                    job.plan_of(rank)
                    layout = job.destination.layout_of(rank)
                    verdict.num_parameters += len(layout.buffers)
            except (HybridEngineError, ImportError) as error:  # vLLM imports torchvision for some
                verdict.error = str(error)
        verdicts.append(verdict)
    return verdicts


def cells(verdict: Verdict) -> list[str]:
    """Return the figures of a row: compared, different, and both differences from transformers."""
    if verdict.error is not None:
        return ["failed", verdict.error.strip().splitlines()[-1], "", ""]
    differences = [
        "-" if value is None else f"{value:.1e}" for value in (verdict.training, verdict.vllm)
    ]
    if verdict.num_versions == 0:
        return [f"{verdict.num_parameters} traced", *verdict.remarks, "", ""]
    return [str(verdict.num_parameters), str(len(verdict.different)), *differences]


def main() -> None:
    """Run, print a row of Markdown for each model, write the figures."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="+", default=[""], help="rows whose name contains one")
    arguments = parser.parse_args()
    rows = [row for row in all_rows() if any(text in row.name for text in arguments.only)]
    figures = []
    print("| architecture | trainer | layout | parameters | different | trainer | vLLM |")
    print("|---|---|---|---|---|---|---|")
    for row, verdict in results(rows):
        figures.append({**asdict(row), **verdict.as_dict(), "faults": verdict.faults})
        columns = [row.architecture, row.trainer, row.layout, *cells(verdict)]
        print(f"| {' | '.join(columns)} |", flush=True)
        write_figures(arguments.json, figures)


if __name__ == "__main__":
    main()
