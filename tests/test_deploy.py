"""The files of deploy/: manifest, image, and the pod as processes in namespaces."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml

from examples.gpt_rl.served import server_arguments
from examples.gpt_rl.settings import load_settings
from tests.harness.launch import REPO_ROOT
from tests.harness.vllm_server import ENVIRONMENT

DEPLOY = REPO_ROOT / "deploy"
IN_IMAGE = "/opt/hybrid-engine"


def pod() -> dict[str, Any]:
    job = yaml.safe_load((DEPLOY / "served.yaml").read_text())
    template: dict[str, Any] = job["spec"]["template"]["spec"]
    return template


def containers() -> dict[str, dict[str, Any]]:
    template = pod()
    return {container["name"]: container for container in (*template["initContainers"], *template["containers"])}


def on_this_machine(command: Sequence[str]) -> list[str]:
    """Return a container's command with the paths of this machine."""
    return [part.replace(IN_IMAGE, str(REPO_ROOT)) for part in command]


# -- command lines
# -----------------------------------------------------------------------------------------------------


def test_the_pod_starts_the_same_server_as_make_rl() -> None:
    server = containers()["server"]
    python, dash_m, module, *arguments = on_this_machine(server["command"])
    assert (python, dash_m, module) == ("python", "-m", "vllm.entrypoints.openai.api_server")
    config = REPO_ROOT / "examples/gpt_rl/configs/tp2_to_dp2.yaml"
    values = yaml.safe_load(config.read_text())
    assert sorted(arguments) == sorted(server_arguments(REPO_ROOT / "examples/gpt_rl/model", values, 8000))
    assert {"name": "VLLM_SERVER_DEV_MODE", "value": "1"} in server["env"]


def test_torchrun_and_the_example_accept_the_arguments_of_the_ranks() -> None:
    from torch.distributed.run import get_args_parser

    python, dash_m, module, *arguments = on_this_machine(containers()["ranks"]["command"])
    assert (python, dash_m, module) == ("python", "-m", "examples.gpt_rl.torchrun")
    options = get_args_parser().parse_args(arguments)
    assert options.module
    assert options.standalone
    assert options.training_script == "examples.gpt_rl.train"
    check_settings(options.training_script_args, int(options.nproc_per_node))
    assert pod()["terminationGracePeriodSeconds"] == options.shutdown_timeout


def check_settings(arguments: Sequence[str], world_size: int) -> None:
    """Parse arguments by the example's command line and load the settings."""
    from examples.gpt_rl import train

    def stop(self: argparse.ArgumentParser) -> Any:
        raise Parsed(self.parse_known_args(arguments))

    with pytest.raises(Parsed) as parsed, mock.patch.object(argparse.ArgumentParser, "parse_args", stop):
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
        dry = command.replace("/opt/venv", str(tmp_path / "venv")).replace("make ", "make --dry-run ", 1)
        subprocess.run(shlex.split(dry), cwd=REPO_ROOT, check=True, stdout=subprocess.DEVNULL)
    for line in lines:
        if line.startswith("COPY"):
            assert all((REPO_ROOT / source).exists() for source in line.split()[1:-1]), line
    (command,) = {line.removeprefix("CMD ") for line in lines if line.startswith("CMD")}
    assert json.loads(command) == ["hybrid-engine", "env"]
    assert "hybrid-engine" in (REPO_ROOT / "pyproject.toml").read_text().partition("[project.scripts]")[2]


# -- the manifest
# ------------------------------------------------------------------------------------------------------


# -- a pod
# -------------------------------------------------------------------------------------------------------------


@contextmanager
def container(command: Sequence[str], volume: Path, log: Path, environment: dict[str, str]) -> Iterator[Any]:
    """Run a command in new namespaces without capabilities; `/tmp` is the volume."""
    enter = 'mount --bind "$0" /tmp; mount -t tmpfs -o size=1g,mode=1777 shm /dev/shm; exec "$@"'
    bare = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"]
    spaces = ["unshare", "--mount", "--ipc", "--pid", "--fork", "--mount-proc", "--kill-child=SIGTERM"]
    with log.open("w") as out:
        process = subprocess.Popen(
            [*spaces, "sh", "-ec", enter, str(volume), *bare, *command],
            **{"stdout": out, "stderr": out, "env": environment, "cwd": REPO_ROOT, "start_new_session": True},
        )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.kill()  # Its child, process 1 of the namespace, gets SIGTERM and all processes end with it.
        process.wait()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def used_of_shared_memory(process: Any) -> int:
    """Return the bytes used in the container's /dev/shm."""
    (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    status = os.statvfs(f"/proc/{child}/root/dev/shm")
    return (status.f_blocks - status.f_bfree) * status.f_frsize


@pytest.mark.long
@pytest.mark.engines
@pytest.mark.skipif(os.geteuid() != 0, reason="namespaces of containers require root")
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="requires the command setpriv")
def test_the_pod_trains_with_only_tmp_shared(tmp_path: Path) -> None:
    volume = tmp_path / "shared"
    volume.mkdir(mode=0o1777)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    commands = {
        name: [sys.executable, *(part.replace("8000", str(port)) for part in on_this_machine(spec["command"])[1:])]
        for name, spec in containers().items()
    }
    short = ["rl_config.iterations=3", "rl_config.warm_up.max_steps=20", "generate_config.verify=full"]
    short.append("generate_config.transport=shared_memory")  # Sending messages would be an error.
    ranks = [part.replace("/home/hybrid/runs", "/tmp/runs") for part in commands["ranks"]] + short
    path = os.pathsep.join([str(REPO_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": path}
    peaks = {"server": 0, "ranks": 0}
    logs = {name: tmp_path / f"{name}.log" for name in peaks}
    with container(commands["server"], volume, logs["server"], environment) as server:
        wait_for(f"http://127.0.0.1:{port}/health", server, logs["server"])
        with container(ranks, volume, logs["ranks"], environment) as training:
            while training.poll() is None:
                for name, process in (("server", server), ("ranks", training)):
                    with suppress(OSError, ValueError):
                        peaks[name] = max(peaks[name], used_of_shared_memory(process))
                time.sleep(0.05)
    assert training.returncode == 0, logs["ranks"].read_text()[-5000:]
    rows = [json.loads(line) for line in (volume / "runs/metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 4
    assert all(row["logprob_diff"] < 1e-4 for row in rows[1:])
    print({name: f"{nbytes / 2**10:.0f} KiB of /dev/shm" for name, nbytes in peaks.items()})
    assert max(peaks.values()) < 2**30


def wait_for(url: str, process: Any, log: Path, seconds: float = 400) -> None:
    deadline = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < deadline:
        with suppress(urllib.error.URLError, OSError), urllib.request.urlopen(url, timeout=5):
            return
        time.sleep(0.2)
    raise AssertionError(f"the server did not start:\n{log.read_text()[-5000:]}")
