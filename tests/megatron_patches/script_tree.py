"""A source tree that imitates the entry points of Megatron-LM's scripts, and an engine that writes down its calls.

Its ``megatron.training`` joins the installed ``megatron.core``: megatron is a namespace package.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

REPO_ROOT = Path(__file__).resolve().parents[2]

_FILES = {
    "megatron/training/__init__.py": "from megatron.training.training import pretrain\n",
    "megatron/training/global_vars.py": """
ARGS = None

def get_args():
    return ARGS
""",
    "megatron/training/arguments.py": """
import argparse

def parse_args(extra_args_provider=None, ignore_unknown_args=False):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--train-iters", type=int, default=4)
    parser.add_argument("--exit-at", type=int)
    parser.add_argument("--skipped", type=int, nargs="*", default=[])
    parser.add_argument("--load", type=int, nargs=2, default=[0, 0])
    parser.add_argument("--builder", action="store_true")
    if extra_args_provider is not None:
        parser = extra_args_provider(parser)
    return parser.parse_args()

def validate_args(args, defaults={}):
    args.iteration, args.global_batch_size, args.validated = args.load[0], 8, True
    args.consumed_train_samples = args.iteration * 8
    return args
""",
    "megatron/training/initialize.py": """
import torch
from megatron.training import global_vars
from megatron.training.arguments import parse_args, validate_args

def initialize_megatron(extra_args_provider=None, allow_no_cuda=False):
    assert allow_no_cuda or torch.cuda.is_available(), "allow_no_cuda"
    args = parse_args(extra_args_provider)
    validate_args(args, {})
    parse_args()  # since 0.18 also by ft_integration, after validation
    global_vars.ARGS = args

def _warmup_jit_function():
    raise AssertionError("compiles on a GPU")
""",
    "megatron/training/utils.py": """
def get_device_arch_version():
    raise AssertionError("reads a GPU")

def get_batch_on_this_tp_rank(data_iterator):
    return next(data_iterator).cuda()
""",
    "megatron/training/models/__init__.py": "",
    "megatron/training/models/dist_utils.py": """
def unimodal_build_distributed_models(provider, wrap_with_ddp=True):
    return [provider()]
""",
    "megatron/legacy/fused_kernels/__init__.py": """
def load(args):
    raise AssertionError("runs nvcc")
""",
    "megatron/training/training.py": """
import sys
import types
import torch
from megatron.training.global_vars import get_args
from megatron.core import __version__
from megatron.training.initialize import initialize_megatron
from megatron.training.models.dist_utils import unimodal_build_distributed_models
from megatron.training.utils import get_batch_on_this_tp_rank

def get_model(provider, model_type=None, wrap_with_ddp=True):
    return [provider()]

def build_train_valid_test_data_iterators(provider):
    torch.rand(1)
    return iter(provider())

def evaluate():
    return torch.tensor([1.0]).cuda()

def dummy_train_step(data_iterator):
    return next(data_iterator).cuda()

def train_step(iterator, model, iteration):
    skipped = iteration in get_args().skipped
    read = get_batch_on_this_tp_rank if __version__ < "0.18" else dummy_train_step
    model[0]["weight"] += 0 if skipped else float(read(iterator))
    return {"loss": model[0]["weight"]}, int(skipped), False, False, 0

def train(model, optimizer, opt_param_scheduler):
    args = get_args()
    iterator = build_train_valid_test_data_iterators(lambda: torch.ones(100))
    for args.curr_iteration in range(args.iteration, args.train_iters):
        loss, *_ = train_step(iterator, model, iteration=args.curr_iteration)
        if args.exit_at == args.curr_iteration + 1:
            sys.exit(7)
    return loss

def pretrain(provider):
    initialize_megatron()
    build = unimodal_build_distributed_models if get_args().builder else get_model
    model = build(provider)
    build(provider, wrap_with_ddp=False)
    return train(model, "optimizer", types.SimpleNamespace(num_steps=get_args().load[1]))
""",
    "pretrain_tiny.py": """
import json, sys
import helper_beside_the_script
from megatron.training import pretrain
from megatron.training.global_vars import get_args
from megatron.training.utils import get_batch_on_this_tp_rank

if __name__ == "__main__":
    loss = pretrain(lambda: {"weight": 0.0})
    print(json.dumps({"loss": loss, "args": vars(get_args()), "argv": sys.argv, "path": sys.path[0], "file": __file__}))
""",
    "helper_beside_the_script.py": "",
    "engine_that_notes.py": """
import contextlib, json, os
from megatron_patches.errors import ScriptError

FAILS = os.environ.get("FAILS")

class Engine:
    def __init__(self, script):
        self.note("made", script.options.interval, script.args.validated)
    def note(self, *what):
        with open(os.environ["NOTES"], "a") as file:
            file.write(json.dumps(what) + "\\n")
        if what[0] == FAILS:
            raise OSError(f"{FAILS} and failed")
        if what[0] == os.environ.get("REFUSES"):
            raise ScriptError([f"{what[0]} is refused"])
    @contextlib.contextmanager
    def building(self):
        self.note("building")
        yield
    def model_built(self, chunks):
        self.note("model built", len(chunks))
    def attach(self, chunks, optimizer, num_steps):
        self.note("attached", optimizer, num_steps)
    def switch(self, iteration):
        self.note("switched", iteration)
    def detach(self):
        self.note("detached")

def refuse(script):
    raise ScriptError(["this is wrong", "that is wrong"])
""",
}


def write_tree(directory: Path) -> Path:
    """Write the tree below `directory`; returns its script."""
    for name, content in _FILES.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content.lstrip("\n"))
    return directory / "pretrain_tiny.py"


def python(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run python with this repository importable."""
    paths = filter(None, (str(REPO_ROOT), os.environ.get("PYTHONPATH", "")))
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def last_line(result: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """What the script printed last, as JSON. Fails with the script's errors when it failed."""
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])
