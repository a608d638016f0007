"""``python -m megatron_patches SCRIPT`` and the decorators of a patched source tree, on an imitated
source tree.

Its ``megatron.training`` is importable beside the installed ``megatron.core``: megatron is a
namespace package.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import megatron.core
import pytest
import torch
from packaging.version import Version

import megatron_patches
from megatron_patches import engines, script
from megatron_patches.__main__ import folder, run_script
from megatron_patches.engines import ReshardingOptions, add_arguments
from megatron_patches.patch import is_applied, patches_of, release_of
from tests.harness.launch import REPO_ROOT
from tests.harness.values import Values
from tests.hybrid_engine.tools.programs import read_lines, run_python

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
    parser.add_argument("--exit-at", "--exit-after", type=int, help=argparse.SUPPRESS)
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
    parse_args()  # Since 0.18 ft_integration also calls it, after validation.
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
    of_script = {"argv": sys.argv, "path": sys.path[0], "file": __file__}
    print(json.dumps({"loss": loss, "args": vars(get_args()), **of_script}))
""",
    "helper_beside_the_script.py": "",
    "recording_engine.py": """
import contextlib, json, os
from megatron_patches.errors import ScriptError

FAILS = os.environ.get("FAILS")

class Engine:
    def __init__(self, script):
        exits = {"--exit-at", "--exit-after", "--exit"} & script.flags
        has_flags = exits == {"--exit-at", "--exit-after"}
        self.record("created", script.options.interval, script.args.validated, has_flags)
    def record(self, *call):
        with open(os.environ["CALLS"], "a") as file:
            file.write(json.dumps(call) + "\\n")
        if call[0] == FAILS:
            raise OSError(f"{FAILS} and failed")
        if call[0] == os.environ.get("REFUSES"):
            raise ScriptError([f"{call[0]} is refused"])
    @contextlib.contextmanager
    def building(self):
        self.record("building")
        yield
    def model_built(self, chunks):
        self.record("model built", len(chunks))
    def attach(self, chunks, optimizer, num_steps):
        self.record("attached", optimizer, num_steps)
    def switch(self, iteration):
        self.record("switched", iteration)
    def detach(self):
        self.record("detached")

def refuse(script):
    raise ScriptError(["this is wrong", "that is wrong"])
""",
}


def write_tree(directory: Path) -> Path:
    """Write the tree below `directory`; return its script."""
    for name, content in _FILES.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content.lstrip("\n"))
    return directory / "pretrain_tiny.py"


def python(tree: Path, *arguments: str, status: int) -> subprocess.CompletedProcess[str]:
    """Run a new interpreter in another directory than the tree's."""
    paths = filter(None, (str(REPO_ROOT), os.environ.get("PYTHONPATH", "")))
    return run_python(
        *arguments, status=status, cwd=tree.parents[1], PYTHONPATH=os.pathsep.join(paths)
    )


INSTALLED = release_of(megatron.core.__version__)
SINCE_0_19 = Version(INSTALLED) >= Version("0.19")
Capture = pytest.CaptureFixture[str]

ENGINE = ("--enable-resharding", "--resharding-engine", "recording_engine:Engine")

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(),
    reason="the imitated tree calls .cuda(), which only the CPU patches let pass",
)


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Write the tree and return its script; unload the tree's modules at the end."""
    before = set(sys.modules)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setattr(sys, "argv", ["pytest"])
    monkeypatch.setattr(sys, "path", ["", *sys.path])  # As with python -m.
    monkeypatch.setattr(script, "_run", script._ScriptRun())
    yield write_tree(tmp_path / "checkout")
    for name in set(sys.modules) - before:
        if name.startswith(
            ("megatron.training", "megatron.legacy", "helper_beside", "recording_engine")
        ):
            del sys.modules[name]
    megatron_patches.revert()


def run(
    capsys: pytest.CaptureFixture[str], tree: Path, *flags: str, launcher: bool = True
) -> Values:
    """Run the script in this process; return the last line of its output."""
    if launcher:
        run_script(str(tree), flags)
    else:
        sys.argv = [str(tree), *flags]
        sys.path[0] = str(tree.parent)
        runpy.run_path(str(tree), run_name="__main__")
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def calls(tree: Path) -> list[list[object]]:
    path = tree.parents[1] / "calls"
    return read_lines(path) if path.exists() else []


def patch_source(tree: Path) -> None:
    """Change the imitated tree as the patch set would."""
    decorated = {
        "arguments.py": {"parse_args": "with_arguments", "validate_args": "with_validation"},
        "training.py": {
            "get_model": "with_buffers",
            "train": "with_engine",
            "train_step": "with_switch",
        },
        "models/dist_utils.py": {"unimodal_build_distributed_models": "with_buffers"},
    }
    for name, functions in decorated.items():
        path = tree.parent / "megatron" / "training" / name
        source = "from megatron.training import resharding\n" + path.read_text()
        for function, decorator in functions.items():
            source = source.replace(f"def {function}(", f"@resharding.{decorator}\ndef {function}(")
        path.write_text(source)
    training = tree.parent / "megatron" / "training"
    with (training / "__init__.py").open("a") as file:
        file.write("from megatron.training import resharding\nresharding.prepare()\n")
    patch = (folder() / "core_v0.16.1" / "0001-arguments.patch").read_text()
    new_file = patch.partition("+++ b/megatron/training/resharding.py\n")[2].splitlines()[1:]
    (training / "resharding.py").write_text("\n".join(line.removeprefix("+") for line in new_file))


@pytest.mark.slow  # imports Megatron
def test_without_the_flag_the_script_runs_as_by_python(tree: Path) -> None:
    result = python(tree, "-m", "megatron_patches", str(tree), "--train-iters", "3", status=0)
    assert json.loads(result.stdout.splitlines()[-1]) == {
        "loss": {"loss": 3.0},
        "args": {
            "train_iters": 3,
            "exit_at": None,
            "skipped": [],
            "load": [0, 0],
            "iteration": 0,
            "validated": True,
        }
        | {
            "builder": False,
            "global_batch_size": 8,
            "consumed_train_samples": 0,
            "curr_iteration": 2,
        },
        "argv": [str(tree), "--train-iters", "3"],
        "path": str(tree.parent),
        "file": str(tree),
    }
    assert calls(tree) == []


@pytest.mark.parametrize("is_patched", [False, True], ids=["launcher", "patched source"])
def test_both_ways_call_the_engine_at_the_same_points(
    tree: Path, capsys: Capture, is_patched: bool
) -> None:
    """Skipped steps do not count, and Megatron's arguments do not contain ours."""
    if is_patched:
        patch_source(tree)
    flags = (*ENGINE, "--resharding-interval", "2", "--train-iters", "5", "--skipped", "2")
    output = run(capsys, tree, *flags, launcher=not is_patched)
    assert output["loss"] == {"loss": 4.0}
    assert not [
        name for name in output["args"] if "reshard" in name or "infer" in name or "offload" in name
    ]
    assert calls(tree) == [
        ["created", 2, True, True],
        ["building"],
        ["model built", 1],
        ["attached", "optimizer", 0],
        ["switched", 2],
        ["switched", 5],
        ["detached"],
    ]


@pytest.mark.parametrize("is_patched", [False, True], ids=["launcher", "patched source"])
def test_a_model_of_a_builder_gets_the_engines_buffers(
    tree: Path, capsys: Capture, is_patched: bool
) -> None:
    if is_patched:
        patch_source(tree)
    elif not SINCE_0_19:
        pytest.skip("megatron.training has no builders that scripts use before 0.19")
    run(capsys, tree, *ENGINE, "--builder", "--train-iters", "1", launcher=not is_patched)
    assert calls(tree)[1:4] == [["building"], ["model built", 1], ["attached", "optimizer", 0]]


def test_a_patched_source_under_the_launcher_calls_the_engine_once(
    tree: Path, capsys: Capture
) -> None:
    patch_source(tree)
    run(capsys, tree, *ENGINE, "--train-iters", "1")
    assert [call for call, *_ in calls(tree)] == [
        "created",
        "building",
        "model built",
        "attached",
        "switched",
        "detached",
    ]


@pytest.mark.parametrize("version", [INSTALLED, "0.99.0"])
def test_a_patched_source_without_the_flag_behaves_as_unpatched(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture, version: str
) -> None:
    """Holds for any version, and without CUDA, as on machines that convert checkpoints."""
    monkeypatch.setattr(megatron.core, "__version__", version)
    patch_source(tree)
    with pytest.raises(
        AssertionError, match="allow_no_cuda"
    ):  # Megatron's own check, which the CPU patches would disable.
        run(capsys, tree, "--train-iters", "2", launcher=False)
    assert not [patch.name for patch in patches_of() if is_applied(patch)]
    assert calls(tree) == []


class Absent:
    """Finder that makes imports of megatron_patches fail."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] == "megatron_patches":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def test_a_patched_source_imports_without_the_package(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch_source(tree)
    monkeypatch.syspath_prepend(str(tree.parent))
    for name in [name for name in sys.modules if name.partition(".")[0] == "megatron_patches"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Absent(), *sys.meta_path])
    training = importlib.import_module("megatron.training.training")
    assert not hasattr(training.train_step, "__wrapped__")
    arguments = importlib.import_module("megatron.training.arguments")
    monkeypatch.setattr(sys, "argv", ["script", "--enable-resharding"])
    with pytest.raises(SystemExit):  # The argument is unknown.
        arguments.parse_args()


def test_a_resumed_run_counts_successful_steps(tree: Path, capsys: Capture) -> None:
    """Two of the first six iterations were skipped, so that steps 5, 6 and 7 follow."""
    run(
        capsys,
        tree,
        *ENGINE,
        "--resharding-interval",
        "2",
        "--load",
        "6",
        "32",
        "--train-iters",
        "9",
    )
    assert calls(tree)[3:] == [["attached", "optimizer", 4], ["switched", 8], ["detached"]]


def test_an_exit_detaches_even_if_the_engine_fails_to(
    tree: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without an exit in progress the script ends with the engine's error."""
    monkeypatch.setenv("FAILS", "detached")
    with pytest.raises(SystemExit) as caught:
        run(capsys, tree, *ENGINE, "--exit-at", "2")
    assert caught.value.code == 7
    assert calls(tree)[-2:] == [["switched", 2], ["detached"]]
    assert "could not be detached" in caplog.text
    assert "OSError: detached and failed" in caplog.text
    sys.path[0] = ""
    with pytest.raises(OSError, match="detached and failed"):
        run(capsys, tree, *ENGINE)


@pytest.mark.parametrize(
    ("how", "error", "call"),
    [
        *(("FAILS", OSError, call) for call in ("model built", "attached", "switched")),
        *(("REFUSES", SystemExit, call) for call in ("building", "model built")),
    ],
)
def test_an_error_of_the_engine_ends_the_script_without_further_calls(
    tree: Path,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
    error: type[BaseException],
    call: str,
) -> None:
    monkeypatch.setenv(how, call)
    with pytest.raises(error, match=f"{call} (and failed|is refused)"):
        run(capsys, tree, *ENGINE)
    assert calls(tree)[-1][0] == call


def test_helpers_are_compiled_if_they_are_missing_or_have_a_makefile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wheel has compiled helpers but no Makefile: `make` would end the script."""
    called = []
    namespace = {"__file__": str(tmp_path / "utils.py"), "called": called}
    exec("def compile_helpers(): called.append('make')", namespace)
    (patch,) = (patch for patch in script.PATCHES if patch.name == "script.compiled_helpers")
    compile_helpers = patch.build(namespace["compile_helpers"])
    specs = [object()]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: specs[0])
    compile_helpers()
    assert called == []
    specs[0] = None
    compile_helpers()
    (tmp_path / "Makefile").touch()
    specs[0] = object()
    compile_helpers()
    assert called == ["make", "make"]


def install(tree: Path, monkeypatch: pytest.MonkeyPatch, *references: str) -> None:
    """Install these engines and no others, by a distribution beside the script."""
    info = tree.parent / "recording_engine-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: recording-engine\nVersion: 1\n")
    lines = [f"number{number} = {reference}" for number, reference in enumerate(references)]
    (info / "entry_points.txt").write_text("\n".join([f"[{engines.ENTRY_POINT_GROUP}]", *lines]))
    entry_points = importlib.metadata.entry_points

    def only_these(**query: str) -> list[Any]:
        return [point for point in entry_points(**query) if point.dist.name == "recording-engine"]

    monkeypatch.setattr(importlib.metadata, "entry_points", only_these)


def test_the_only_installed_engine_is_used(
    tree: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tree, monkeypatch, "recording_engine:Engine")
    run(capsys, tree, "--enable-resharding", "--train-iters", "1")
    assert calls(tree)[0] == ["created", 1, True, True]


@pytest.mark.parametrize(
    ("references", "message"),
    [
        ([], r"no resharding engine is installed: pip install '\.\[train,infer\]'"),
        (
            ["one:Engine", "two:Engine"],
            "several resharding engines are installed: choose one of one:E.*, two:E",
        ),
    ],
)
def test_no_engine_or_several_engines_are_refused(
    tree: Path, monkeypatch: pytest.MonkeyPatch, references: list[str], message: str
) -> None:
    install(tree, monkeypatch, *references)
    with pytest.raises(SystemExit, match=message):
        run_script(str(tree), ["--enable-resharding"])
    assert calls(tree) == []


@pytest.mark.slow  # imports Megatron
@pytest.mark.parametrize("is_patched", [False, True], ids=["launcher", "patched source"])
def test_a_refusal_of_the_engine_ends_the_script_before_any_build(
    tree: Path, is_patched: bool
) -> None:
    """Only the violations are printed, without a traceback, which every rank would print."""
    if is_patched:
        patch_source(tree)
    launcher = [] if is_patched else ["-m", "megatron_patches"]
    flags = ["--enable-resharding", "--resharding-engine", "recording_engine:refuse"]
    result = python(tree, *launcher, str(tree), *flags, status=1)
    assert "ScriptError: --enable-resharding:\n- this is wrong\n- that is wrong\n" in result.stderr
    assert "Traceback" not in result.stderr
    assert calls(tree) == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ("--resharding-interval", "3"),
            "--resharding-interval: no effect without --enable-resharding",
        ),
        (
            ("--enable-resharding", "--resharding-engine", "nowhere:make"),
            "--resharding-engine nowhere:make cannot be",
        ),
        (
            ("--enable-resharding", "--resharding-engine", "json"),
            "--resharding-engine json cannot be imported",
        ),
    ],
)
def test_bad_options_are_refused(tree: Path, flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        run_script(str(tree), flags)


def test_rank_0_reports_errors_before_the_other_ranks(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher then ends the other ranks; a rank that fails alone reports after the wait."""
    waits = []
    # of the script alone: a thread of another test may sleep in a loop
    monkeypatch.setattr(script, "time", SimpleNamespace(sleep=waits.append))
    for rank, expected in (("0", []), ("1", [10.0])):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit, match="--resharding-engine json cannot be imported"):
            run_script(str(tree), ["--enable-resharding", "--resharding-engine", "json"])
        assert waits == expected


def test_untested_versions_are_refused_or_allowed_and_logged(
    tree: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(megatron.core, "__version__", "0.99.0")
    message = r"megatron-core 0\.99\.0 is imported.*tested only with 0\.16\.1, .*0\.19\.2"
    with pytest.raises(SystemExit, match=message):
        run_script(str(tree), ["--enable-resharding"])
    sys.path[0] = ""
    with pytest.raises(
        AssertionError, match="allow_no_cuda"
    ):  # The script's own error: it runs unpatched.
        run_script(str(tree), [])
    assert "the script runs unpatched" in caplog.text
    sys.path[0] = ""
    assert run(capsys, tree, "--resharding-allow-version", "--train-iters", "1")["loss"] == {
        "loss": 1.0
    }
    assert "megatron-core 0.99.0 is imported" in caplog.text


@pytest.mark.skipif(
    Version(INSTALLED) >= Version("0.17"), reason="the wheel has megatron.training since 0.17"
)
def test_scripts_without_megatron_training_are_refused(tree: Path) -> None:
    lonely = tree.parents[1] / "lonely.py"
    lonely.write_text("raise AssertionError('started')\n")
    with pytest.raises(SystemExit, match=r"megatron\.training is missing"):
        run_script(str(lonely), [])


def test_options_contain_exactly_the_given_flags() -> None:
    parser = argparse.ArgumentParser()
    flags = add_arguments(parser)
    command = (
        "--enable-resharding --no-offload-train-grad --offload-train-param "
        "--infer-tensor-parallel-size 2"
    )
    assert vars(parser.parse_args(command.split())) == {}
    options = ReshardingOptions.of(flags)
    assert options == ReshardingOptions(
        enabled=True,
        offload_train_grad=False,
        offload_train_param=True,
        infer_tensor_parallel_size=2,
    )
    assert options.offload_train_optimizer is None


def test_an_engine_that_was_not_created_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron does not call validate_args with --yaml-cfg."""
    monkeypatch.setattr(script, "_run", script._ScriptRun(options=ReshardingOptions(enabled=True)))
    with pytest.raises(SystemExit, match="--yaml-cfg"):
        script.with_buffers(lambda provider, wrap_with_ddp=True: [])(None)
