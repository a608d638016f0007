"""The files of deploy/: commands of the manifest, and the image."""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml

from examples.gpt_rl.served import server_arguments
from examples.gpt_rl.settings import load_settings
from tests.harness.launch import REPO_ROOT
from tests.harness.values import Values

DEPLOY = REPO_ROOT / "deploy"
IN_IMAGE = "/opt/hybrid-engine"


def pod() -> Values:
    job = yaml.safe_load((DEPLOY / "served.yaml").read_text())
    return job["spec"]["template"]["spec"]


def containers() -> dict[str, Values]:
    template = pod()
    return {
        container["name"]: container
        for container in (*template["initContainers"], *template["containers"])
    }


def on_this_machine(command: Sequence[str]) -> list[str]:
    """Return a container's command with the paths of this machine."""
    return [part.replace(IN_IMAGE, str(REPO_ROOT)) for part in command]


def test_the_pod_starts_the_same_server_as_make_rl() -> None:
    server = containers()["server"]
    python, dash_m, module, *arguments = on_this_machine(server["command"])
    assert (python, dash_m, module) == ("python", "-m", "vllm.entrypoints.openai.api_server")
    config = REPO_ROOT / "examples/gpt_rl/configs/tp2_to_dp2.yaml"
    values = yaml.safe_load(config.read_text())
    assert sorted(arguments) == sorted(
        server_arguments(REPO_ROOT / "examples/gpt_rl/model", values, 8000)
    )
    assert {"name": "VLLM_SERVER_DEV_MODE", "value": "1"} in server["env"]


def test_the_launcher_and_the_example_accept_the_arguments_of_the_ranks() -> None:
    from torch.distributed.run import get_args_parser

    words = on_this_machine(containers()["ranks"]["command"])
    launcher = words[:4]
    arguments = words[4:]
    assert launcher == ["python", "-m", "hybrid_engine", "run"]
    options = get_args_parser().parse_args(arguments)
    assert options.module
    assert options.training_script == "examples.gpt_rl.train"
    check_settings(options.training_script_args, int(options.nproc_per_node))
    assert pod()["terminationGracePeriodSeconds"] == options.shutdown_timeout


def check_settings(arguments: Sequence[str], world_size: int) -> None:
    """Parse arguments by the example's command line and load the settings."""
    from examples.gpt_rl import train

    def stop(self: argparse.ArgumentParser) -> Any:
        raise Parsed(self.parse_known_args(arguments))

    with (
        pytest.raises(Parsed) as parsed,
        mock.patch.object(argparse.ArgumentParser, "parse_args", stop),
    ):
        train.main()
    options, unknown = parsed.value.args[0]
    assert not unknown
    load_settings(options.config, world_size, options.overrides)


class Parsed(Exception):
    """Carries the parsed options and the unknown arguments."""


def test_the_image_is_built_by_targets_of_the_makefile(tmp_path: Path) -> None:
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    instructions = {line.split()[0] for line in lines}
    assert instructions <= {"FROM", "RUN", "WORKDIR", "ENV", "ARG", "COPY", "USER", "CMD"}
    makes = [line.removeprefix("RUN ") for line in lines if line.startswith("RUN make")]
    assert len(makes) == 4, "expected packages and project, for CPU and for GPU"
    for command in makes:
        dry = command.replace("/opt/venv", str(tmp_path / "venv")).replace(
            "make ", "make --dry-run ", 1
        )
        subprocess.run(shlex.split(dry), cwd=REPO_ROOT, check=True, stdout=subprocess.DEVNULL)
    for line in lines:
        if line.startswith("COPY"):
            assert all((REPO_ROOT / source).exists() for source in line.split()[1:-1]), line
    (command,) = {line.removeprefix("CMD ") for line in lines if line.startswith("CMD")}
    assert json.loads(command) == ["hybrid-engine", "env"]
    assert (
        "hybrid-engine"
        in (REPO_ROOT / "pyproject.toml").read_text().partition("[project.scripts]")[2]
    )
