"""Commands in an environment without torch, as after `pip install .` without extras."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.hybrid_engine.tools.programs import run_python
from tests.zoo.families import write_config
from tests.zoo.published_configs import LLAMA_3_8B

WITHOUT = "import sys; sys.modules['torch'] = None; "
COMMAND = "from hybrid_engine.__main__ import main; main()"


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_python("-c", WITHOUT + code, *arguments)


@pytest.mark.slow
def test_a_job_is_planned(tmp_path: Path) -> None:
    result = run(
        COMMAND,
        "plan",
        f"model={write_config(tmp_path, LLAMA_3_8B)}",
        "--device",
        "h100",
        "--ranks",
        "8",
    )
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [["certify", "model", "--", "--dtype", "float32"], ["env"]], ids=lambda words: words[0]
)
def test_commands_that_need_torch_name_the_extra(words: list[str]) -> None:
    result = run(COMMAND, *words)
    assert result.returncode == 1
    assert result.stderr.startswith(
        "Error: this command needs torch and both engines: pip install '.[gpu]'"
    )


@pytest.mark.slow
def test_library_names_report_the_missing_extra() -> None:
    result = run("from hybrid_engine import HybridEngine")
    assert (
        "DependencyError: HybridEngine needs torch and an engine: in a checkout pip"
        in result.stderr
    )
