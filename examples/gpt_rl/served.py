"""Runs a training command with a vLLM server on the same machine.

    python -m examples.gpt_rl.served CONFIG -- COMMAND ...

Starts a server on a free loopback port, without weights, runs the command with
`generate_config.servers` added, and stops the server. Exits with the status of the command.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from hybrid_engine.serving.invitation import LOOPBACK, TOKEN

_SECONDS_TO_START = 600
_SECONDS_TO_END = 20


def main(arguments: Sequence[str]) -> int:
    """Start the server, run the command, return its status."""
    config, separator, *command = arguments
    if separator != "--" or not command:
        print(__doc__, file=sys.stderr)
        return 2
    values = yaml.safe_load(Path(config).read_text())
    model = (Path(config).parent / values["model"]).resolve()
    log = Path("runs") / "server.txt"
    log.parent.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault(TOKEN, secrets.token_hex(32))
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # also stops the server
    with serving(model, values, log) as url:
        print(f"server: {url}, log: {log}", flush=True)
        process = subprocess.Popen([*command, f"generate_config.servers=[{url}]"])
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: process.send_signal(number))
        status = process.wait()
    return status if status >= 0 else 128 - status


@contextmanager
def serving(model: Path, values: Mapping[str, Any], log: Path) -> Iterator[str]:
    """Yield the URL of a server that waits for weights; stop it at the end of the block."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        *server_arguments(model, values, port),
    ]
    environment = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        **os.environ,
    }
    with log.open("w") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env=environment, start_new_session=True
        )
    try:
        url = f"http://{LOOPBACK}:{port}"
        _wait(url, process, log)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def server_arguments(model: Path, values: Mapping[str, Any], port: int) -> list[str]:
    """Return the command line arguments of vLLM."""
    options: dict[str, Any] = {
        "host": LOOPBACK,
        "port": port,
        "load-format": "hybrid_engine",
        "weight-transfer-config": '{"backend": "hybrid_engine"}',
    }
    for name, value in engine_arguments(model, values).items():
        options[name.replace("_", "-")] = value
    arguments = [f"--{name}={value}" for name, value in options.items()]
    return [*arguments, "--enforce-eager", "--skip-tokenizer-init"]


def engine_arguments(model: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return vLLM's engine arguments, equal to those of a run without a server."""
    generate = values["generate_config"]
    return {
        "model": str(model),
        "dtype": values["actor_config"]["params_dtype"],
        "max_model_len": generate["max_model_len"],
        "max_num_seqs": generate["max_num_seqs"],
        "tensor_parallel_size": generate.get("infer_tensor_parallel_size", 1),
        "kv_cache_memory_bytes": generate["kv_cache_mb"] << 20,
    }


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _SECONDS_TO_START
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    sys.exit(f"the server did not start; the end of {log}:\n{log.read_text()[-3000:]}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
