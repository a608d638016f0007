"""deploy/: what it starts is what there is to start, in containers as it has them."""

from __future__ import annotations

import argparse
import json
import os
import re
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
from hybrid_engine.serving.invitation import TOKEN
from tests.harness.launch import REPO_ROOT
from tests.harness.vllm_server import ENVIRONMENT

DEPLOY = REPO_ROOT / "deploy"
IN_IMAGE = "/opt/hybrid-engine"
MANIFESTS = sorted(path.name for path in DEPLOY.glob("*.yaml"))


def documents(name: str) -> list[dict[str, Any]]:
    return [*yaml.safe_load_all((DEPLOY / name).read_text())]


def pod_of(name: str) -> dict[str, Any]:
    (job,) = [each for each in documents(name) if each["kind"] == "Job"]
    pod: dict[str, Any] = job["spec"]["template"]["spec"]
    return pod


def containers_of(name: str) -> dict[str, dict[str, Any]]:
    pod = pod_of(name)
    return {each["name"]: each for each in (*pod.get("initContainers", ()), *pod["containers"])}


def here(command: Sequence[str]) -> list[str]:
    """A command of a container as it is on this machine."""
    return [part.replace(IN_IMAGE, str(REPO_ROOT)) for part in command]


# -- command lines -----------------------------------------------------------------------------------------------------


def test_the_pod_has_the_server_that_make_rl_would_start() -> None:
    containers = containers_of("served.yaml")
    python, dash_m, module, *arguments = here(containers["server"]["command"])
    assert (python, dash_m, module) == ("python", "-m", "vllm.entrypoints.openai.api_server")
    config = REPO_ROOT / "examples/gpt_rl/configs/tp2_to_dp2.yaml"
    values = yaml.safe_load(config.read_text())
    assert sorted(arguments) == sorted(server_arguments(REPO_ROOT / "examples/gpt_rl/model", values, 8000))
    assert {"name": "VLLM_SERVER_DEV_MODE", "value": "1"} in containers["server"]["env"]


@pytest.mark.parametrize(("name", "world_size"), [("served.yaml", 2), ("several_hosts.yaml", 2)])
def test_torchrun_and_the_example_take_what_ranks_are_given(name: str, world_size: int) -> None:
    from torch.distributed.run import get_args_parser

    python, dash_m, module, *arguments = here(containers_of(name)["ranks"]["command"])
    assert (python, dash_m, module) == ("python", "-m", "examples.gpt_rl.torchrun")
    options = get_args_parser().parse_args(arguments)
    assert options.module
    assert options.training_script == "examples.gpt_rl.train"
    num_hosts = 1 if options.standalone else int(options.nnodes)
    assert num_hosts * int(options.nproc_per_node) == world_size
    check_settings(options.training_script_args, world_size)
    assert pod_of(name)["terminationGracePeriodSeconds"] == options.shutdown_timeout
    if num_hosts > 1:
        service, job, _ = documents(name)
        first = f"{job['metadata']['name']}-0.{service['metadata']['name']}"
        assert options.rdzv_endpoint == f"{first}:29500"
        assert job["spec"]["completions"] == job["spec"]["parallelism"] == num_hosts
        assert_found_by_name(name)


def check_settings(arguments: Sequence[str], world_size: int) -> None:
    """With the example's own command line."""
    from examples.gpt_rl import train

    def stop(self: argparse.ArgumentParser) -> Any:
        raise Parsed(self.parse_known_args(arguments))

    with pytest.raises(Parsed) as parsed, mock.patch.object(argparse.ArgumentParser, "parse_args", stop):
        train.main()
    options, unknown = parsed.value.args[0]
    assert not unknown
    load_settings(options.config, world_size, options.overrides)


class Parsed(Exception):
    """Options, and what was left of the command line."""


def assert_found_by_name(name: str) -> None:
    """Pods of the job have names that the service gives them, and are reached by each other alone."""
    service, job, policy = documents(name)
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    selector = {"matchLabels": service["spec"]["selector"]}
    assert (policy["kind"], policy["spec"]["podSelector"]) == ("NetworkPolicy", selector)
    assert policy["spec"]["ingress"] == [{"from": [{"podSelector": selector}]}]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # in what Ray imports
def test_ray_and_its_recipe_take_what_they_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    from ray.scripts.scripts import start

    from examples.recipes import on_ray

    assert_found_by_name("ray.yaml")
    node = containers_of("ray.yaml")["node"]
    shell, dash_c, script = node["command"]
    assert (shell, dash_c) == ("sh", "-c")
    subprocess.run(["sh", "-nc", script], check=True)
    lines = [line.strip().removeprefix("exec ") for line in script.splitlines()]
    starts = [shlex.split(line) for line in re.findall(r"ray start [^;\n]*", script)]
    heads = [start.make_context("start", words[2:], resilient_parsing=True).params for words in starts]
    assert [each["head"] for each in heads] == [True, False]
    assert heads[1]["address"] == f"on-ray-0.ray:{heads[0]['port']}"
    (recipe,) = [here(shlex.split(line)) for line in lines if line.startswith("python")]
    seen: list[Any] = []
    monkeypatch.setattr(sys, "argv", recipe[2:])
    monkeypatch.setattr(on_ray.ray, "init", lambda **options: seen.append(options))
    monkeypatch.setattr(on_ray, "run", lambda *job: seen.append(job))
    on_ray.main()
    options, (config, ranks, _, overrides) = seen
    assert options == {"address": "auto"}
    assert sum(each["num_cpus"] for each in heads) == ranks + 1, "a CPU for each actor"
    load_settings(config, ranks, overrides)
    assert [each["name"] for each in node["env"]] == [TOKEN]


def test_the_image_is_made_by_targets_of_the_makefile(tmp_path: Path) -> None:
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    words = {line.split()[0] for line in lines}
    assert words <= {"FROM", "RUN", "WORKDIR", "ENV", "ARG", "COPY", "USER", "CMD"}
    makes = [line.removeprefix("RUN ") for line in lines if line.startswith("RUN make")]
    assert len(makes) == 4, "packages and project, on CPU and on GPU"
    for command in makes:
        dry = command.replace("/opt/venv", str(tmp_path / "venv")).replace("make ", "make --dry-run ", 1)
        subprocess.run(shlex.split(dry), cwd=REPO_ROOT, check=True, stdout=subprocess.DEVNULL)
    for line in lines:
        if line.startswith("COPY"):
            assert all((REPO_ROOT / source).exists() for source in line.split()[1:-1]), line
    (command,) = {line.removeprefix("CMD ") for line in lines if line.startswith("CMD")}
    assert json.loads(command) == ["hybrid-engine", "env"]
    assert "hybrid-engine" in (REPO_ROOT / "pyproject.toml").read_text().partition("[project.scripts]")[2]


# -- manifests ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MANIFESTS)
def test_containers_have_their_volumes_and_no_capability(name: str) -> None:
    for document in documents(name):
        assert {"apiVersion", "kind", "metadata", "spec"} <= document.keys()
    pod = pod_of(name)
    volumes = {each["name"] for each in pod["volumes"]}
    for container in containers_of(name).values():
        mounts = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
        assert set(mounts.values()) <= volumes
        assert "/dev/shm" in mounts
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        assert (container["image"], container["imagePullPolicy"]) == ("hybrid-engine", "IfNotPresent")
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["automountServiceAccountToken"] is False


# -- a pod -------------------------------------------------------------------------------------------------------------


@contextmanager
def container(command: Sequence[str], volume: Path, log: Path, environment: dict[str, str]) -> Iterator[Any]:
    """A command in mount and process namespaces of its own, without capabilities; `/tmp` is the volume."""
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
            process.kill()  # its child gets SIGTERM, and what is left then ends with the child: that is process 1
        process.wait()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def used_of_shared_memory(process: Any) -> int:
    """Bytes that are taken in the container's /dev/shm."""
    (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    there = os.statvfs(f"/proc/{child}/root/dev/shm")
    return (there.f_blocks - there.f_bfree) * there.f_frsize


@pytest.mark.long
@pytest.mark.engines
@pytest.mark.skipif(os.geteuid() != 0, reason="namespaces as containers have them need root")
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="there is no command setpriv")
def test_the_pod_trains_with_a_shared_tmp_alone(tmp_path: Path) -> None:
    volume = tmp_path / "meeting"
    volume.mkdir(mode=0o1777)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    commands = {
        name: [sys.executable, *(part.replace("8000", str(port)) for part in here(each["command"])[1:])]
        for name, each in containers_of("served.yaml").items()
    }
    short = ["rl_config.iterations=3", "rl_config.warm_up.max_steps=20", "generate_config.verify=full"]
    short.append("generate_config.transport=shared_memory")  # or an error: nothing is sent
    ranks = [part.replace("/home/hybrid/runs", "/tmp/runs") for part in commands["ranks"]] + short
    path = os.pathsep.join([str(REPO_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": path}
    most = {"server": 0, "ranks": 0}
    logs = {name: tmp_path / f"{name}.log" for name in most}
    with container(commands["server"], volume, logs["server"], environment) as server:
        wait_for(f"http://127.0.0.1:{port}/health", server, logs["server"])
        with container(ranks, volume, logs["ranks"], environment) as training:
            while training.poll() is None:
                for name, process in (("server", server), ("ranks", training)):
                    with suppress(OSError, ValueError):
                        most[name] = max(most[name], used_of_shared_memory(process))
                time.sleep(0.05)
    said = logs["ranks"].read_text()
    assert training.returncode == 0, said[-5000:]
    rows = [json.loads(line) for line in (volume / "runs/metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 4
    assert all(row["logprob_diff"] < 1e-4 for row in rows[1:])
    print({name: f"{nbytes / 2**10:.0f} KiB of /dev/shm" for name, nbytes in most.items()})
    assert max(most.values()) < 2**30


def wait_for(url: str, process: Any, log: Path, seconds: float = 400) -> None:
    deadline = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < deadline:
        with suppress(urllib.error.URLError, OSError), urllib.request.urlopen(url, timeout=5):
            return
        time.sleep(0.2)
    raise AssertionError(f"the server is not up:\n{log.read_text()[-5000:]}")
