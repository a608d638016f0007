"""The example as its users start it, with a short configuration."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import yaml

from examples.gpt_rl import settings
from hybrid_engine.ranks.launching import kill_tree
from tests.harness.launch import REPO_ROOT

CONFIGS = Path(settings.__file__).parent / "configs"


def short_config(name: str, directory: Path, micro_batch_size: int = 16) -> Path:
    """A committed configuration, made short."""
    values = yaml.safe_load((CONFIGS / name).read_text())
    values["model"] = str((CONFIGS / values["model"]).resolve())
    values["actor_config"]["micro_batch_size"] = micro_batch_size
    values["rl_config"].update(
        data=str((CONFIGS / values["rl_config"]["data"]).resolve()),
        iterations=1000,
        prompts_per_iteration=16,
        samples_per_prompt=4,
        minibatches=2,
        checkpoint_every=1,
        warm_up={"max_steps": 10, "batch_size": 32},
    )
    path = directory / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def start(
    config: Path, out: Path, *options: str, num_ranks: int = 2, modules: Path | None = None
) -> subprocess.Popen[str]:
    """Start a run; `modules` come before those of the repository and the environment."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    found_in = [str(REPO_ROOT)] if modules is None else [str(modules), str(REPO_ROOT)]
    return subprocess.Popen(
        [*launcher, "-m", "examples.gpt_rl.train", "--config", str(config), "--out", str(out), *options],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(found_in)},
        cwd=REPO_ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], timeout: float = 200) -> str:
    """Everything printed; the processes are gone afterwards, whatever happened."""
    try:
        return process.communicate(timeout=timeout)[0]
    finally:
        if process.poll() is None:
            kill_tree(process)
            process.communicate()
