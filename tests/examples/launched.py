"""Launch of the example by its command, with a short configuration."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import termios
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from examples.gpt_rl import settings
from hybrid_engine.tools.launching import kill_tree
from tests.harness.launch import REPO_ROOT

CONFIGS = Path(settings.__file__).parent / "configs"


def short_config(
    name: str,
    directory: Path,
    micro_batch_size: int = 16,
    generate: Mapping[str, Any] | None = None,
    rl: Mapping[str, Any] | None = None,
) -> Path:
    """Write a committed configuration, shortened and with a checkpoint per iteration; return its
    path.

    `generate` and `rl` are changed keys of `generate_config` and `rl_config`.
    """
    values = yaml.safe_load((CONFIGS / name).read_text())
    values["model"] = str((CONFIGS / values["model"]).resolve())
    values["actor_config"]["micro_batch_size"] = micro_batch_size
    values["rl_config"].update(
        data=str((CONFIGS / values["rl_config"]["data"]).resolve()),
        iterations=1000,
        prompts_per_iteration=16,
        samples_per_prompt=4,
        minibatches=2,
        temperature=0.7,
        checkpoint_every=1,
        warm_up={"max_steps": 10, "batch_size": 32},
    )
    values["generate_config"].update(generate or {})
    values["rl_config"].update(rl or {})
    path = directory / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def start(
    config: Path,
    out: Path,
    *options: str,
    num_ranks: int = 2,
    modules: Path | None = None,
) -> subprocess.Popen[str]:
    """Start a run.

    Args:
        modules: directory of modules that take precedence over the repository and the environment.
    """
    launcher = [sys.executable, "-m", "hybrid_engine", "run", "--nproc-per-node", str(num_ranks)]
    python_path = [str(REPO_ROOT)] if modules is None else [str(modules), str(REPO_ROOT)]
    return subprocess.Popen(
        [
            *launcher,
            "-m",
            "examples.gpt_rl.train",
            "--config",
            str(config),
            "--out",
            str(out),
            *options,
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(python_path)},
        cwd=REPO_ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


class Terminal:
    """A pseudo-terminal and its contents."""

    def __init__(self, columns: int) -> None:
        self._ours, self.theirs = pty.openpty()
        termios.tcsetwinsize(self.theirs, (50, columns))
        self._shown = bytearray()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def lines(self) -> list[str]:
        """Return the lines on the terminal, after the writer has ended."""
        os.close(self.theirs)
        self._reader.join(20)
        os.close(self._ours)
        text = self._shown.decode()
        text = re.sub(r"[^\n]*(\r\x1b\[2K|\x1b\[1A\x1b\[2K)", "", text)  # An erased progress bar.
        return [
            line.rstrip("\r") for line in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text).split("\n")
        ]

    def _read(self) -> None:
        while True:
            try:
                self._shown += os.read(self._ours, 4096)
            except OSError:  # The other end is closed.
                return


def finish(process: subprocess.Popen[str]) -> str:
    """Wait for the end and return the output; kill all processes after 200 s."""
    try:
        return process.communicate(timeout=200)[0]
    finally:
        if process.poll() is None:
            kill_tree(process)
            process.communicate()
