"""Programs in a new interpreter, commands in this one, `verify` on ranks, and plug-ins of vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typer.testing import CliRunner, Result

from hybrid_engine.tools.cli import app
from tests.harness.launch import REPO_ROOT, Ranks

if TYPE_CHECKING:
    from hybrid_engine.tools.verify.cases import Case
    from hybrid_engine.tools.verify.comparison import Verdict

STALE = "model.layers.1.input_layernorm.weight"
"""The tensor that `skip_a_tensor` leaves unchanged."""


def run_python(
    *arguments: object,
    status: int | None = None,
    timeout: float | None = 120,
    cwd: Path = REPO_ROOT,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Run a new interpreter, by default in the repository; return its output as text.

    `status`: exit status with which it must end.
    """
    command = [sys.executable, *map(str, arguments)]
    variables = {**os.environ, **environment}
    ended = subprocess.run(
        command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=timeout
    )
    assert status in (None, ended.returncode), ended.stdout + ended.stderr
    return ended


def read_lines(path: Path) -> list[Any]:
    """Return the values in a file of JSON lines, which programs write."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def invoke(*words: object, status: int | None = 0) -> Result:
    """Run a command of hybrid-engine in this process. `status`: as of `run_python`."""
    result = CliRunner().invoke(app, [*map(str, words)], env={"COLUMNS": "400"})
    assert status in (None, result.exit_code), result.output
    return result


def run_forked(
    engines: Ranks,
    main: Callable[..., list[Verdict]],
    directory: Path,
    cases: Sequence[Case],
    num_ranks: int,
) -> list[Verdict]:
    """Run `main`, a form of `verify.main`, on ranks that have imported both engines."""
    job = directory / "cases.json"
    job.write_text(json.dumps([asdict(case) for case in cases]))
    out = directory / "verdicts.json"
    return engines.launch(main, num_ranks, str(job), str(out), timeout=1000)[0]


def environment_with(plug_in: Callable[[], None], directory: Path) -> dict[str, str]:
    """Return the PYTHONPATH of processes whose vLLM calls `plug_in`, perhaps more than once.

    It is installed in the directory as the entry point of a distribution.
    """
    metadata = directory / "planted-0.1.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    entry = f"planted = {plug_in.__module__}:{plug_in.__name__}"
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 0.1\n")
    (metadata / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{entry}\n")
    paths = [str(directory), str(REPO_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths)}


def skip_a_tensor() -> None:
    """Patch vLLM's reload, so that it leaves `STALE` unchanged."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    original = GPUModelRunner.reload_weights
    if original.__module__ == __name__:
        return

    def reload_weights(self: Any, *args: Any, **kwargs: Any) -> None:
        before = self.model.get_parameter(STALE).detach().clone()
        original(self, *args, **kwargs)
        self.model.get_parameter(STALE).data.copy_(before)

    GPUModelRunner.reload_weights = reload_weights
