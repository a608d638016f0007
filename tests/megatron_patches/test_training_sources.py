"""Targets of the patches of scripts exist in `megatron.training` and `megatron.rl`, with the
parameters used.

The sources are read and not imported: of the checkout in MEGATRON_LM_PATH, and of the wheel if it
has them.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from packaging.version import Version

from megatron_patches import rl, script
from megatron_patches.cpu import rl as cpu_rl
from megatron_patches.cpu import training
from megatron_patches.patch import CORE_VERSIONS, Patch, release_of

PATCHES = (*script.PATCHES, *training.PATCHES, *rl.PATCHES, *cpu_rl.PATCHES)
PARAMETERS = {
    "script.with_arguments": ["extra_args_provider"],
    "script.with_validation": ["args"],
    "script.with_buffers": ["wrap_with_ddp"],
    "script.with_buffers.builders": ["wrap_with_ddp"],
    "script.with_engine": ["model", "optimizer", "opt_param_scheduler"],
    "cpu_training.initialize": ["allow_no_cuda"],
    "rl.with_rollouts": ["cls", "model"],
    "cpu_rl.one_sequence": ["input_ids", "packed_seq_params"],
}
"""Parameters that a replacement reads, or passes by name."""
Function = ast.FunctionDef | ast.AsyncFunctionDef

INHERITED = {"cpu_training.module"}
"""Patches whose target is inherited from torch by a class of megatron."""
CALLED_BY = {
    "training:pretrain": {"setup_model_and_optimizer", "train"},
    "training:setup_model_and_optimizer": {"get_model"},
    "training:train": {"train_step"},
}
"""Functions called by functions of megatron.training that are replaced or call replaced ones."""
CALLED_BEFORE_0_18 = {
    "training:pretrain": {"initialize_megatron"},
    "initialize:initialize_megatron": {"parse_args", "validate_args"},
}
CALLED_SINCE_0_18 = {"arguments:parse_and_validate_args": {"parse_args", "validate_args"}}
CALLED_SINCE_0_19 = {
    f"models.{module}:{model}ModelBuilder.build_distributed_models": {"unimodal_build_distributed_models"}
    for module, model in {"gpt": "GPT", "hybrid": "Hybrid"}.items()
}


def trees() -> dict[str, Path]:
    """Return the folders with `megatron/training`, of the checkout and of the wheel."""
    checkout = os.environ.get("MEGATRON_LM_PATH")
    core = importlib.util.find_spec("megatron.core")
    folders = {"checkout": Path(checkout)} if checkout else {}
    if core is not None and core.origin and (wheel := Path(core.origin).parents[2]) not in folders.values():
        folders["wheel"] = wheel
    return {name: path for name, path in folders.items() if (path / "megatron" / "training").is_dir()}


@pytest.fixture(params=sorted(trees()) or [pytest.param("", marks=pytest.mark.skip("no megatron.training to read"))])
def tree(request: pytest.FixtureRequest) -> Path:
    return trees()[request.param]


def release(tree: Path) -> str:
    text = (tree / "megatron" / "core" / "package_info.py").read_text()
    return release_of(".".join(re.search(rf"^{part} = (\d+)", text, re.M)[1] for part in ("MAJOR", "MINOR", "PATCH")))


@cache
def definitions(tree: Path, module: str) -> dict[str, ast.AST]:
    """Return the top-level names of a module that it defines or imports from megatron."""
    base = tree.joinpath(*module.split("."))
    path = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
    nodes: dict[str, ast.AST] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body if path.exists() else ():
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            nodes[node.name] = node
        elif isinstance(node, ast.ImportFrom) and str(node.module).startswith("megatron."):
            nodes.update({name.asname or name.name: node for name in node.names})
    return nodes


def defined(tree: Path, module: str, path: str) -> Function | None:
    """Return the function `path` of a module, following imports."""
    name, _, rest = path.partition(".")
    node = definitions(tree, module).get(name)
    if isinstance(node, ast.ImportFrom):
        return defined(tree, str(node.module), path)
    if isinstance(node, ast.ClassDef) and rest:
        methods = [part for part in node.body if isinstance(part, Function) and part.name == rest]
        return methods[0] if methods else None
    return node if isinstance(node, ast.FunctionDef) else None


def needed(tree: Path) -> list[Patch]:
    """Return the patches needed by the tree's version; wheels have no RL loop."""
    has_rl = (tree / "megatron" / "rl").is_dir()
    patches = [patch for patch in PATCHES if has_rl or not patch.module_name.startswith("megatron.rl.")]
    return [patch for patch in patches if patch.is_needed_by(release(tree))]


def names(function: Function) -> list[str]:
    return [argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)]


def test_every_target_exists_with_its_parameters(tree: Path) -> None:
    assert release(tree) in CORE_VERSIONS
    for patch in needed(tree):
        if patch.name in INHERITED:
            assert patch.attr_path.partition(".")[0] in definitions(tree, patch.module_name), patch.target
            continue
        function = defined(tree, patch.module_name, patch.attr_path)
        assert function is not None, patch.target
        assert set(PARAMETERS.get(patch.name, ())) <= set(names(function)), patch.target


def test_patches_that_ended_have_no_target_left(tree: Path) -> None:
    """Otherwise the target would silently stay unpatched."""
    for patch in PATCHES:
        if patch.until and Version(release(tree)) >= Version(patch.until):
            assert defined(tree, patch.module_name, patch.attr_path) is None, patch.target


def test_positional_arguments_and_results_are_as_expected(tree: Path) -> None:
    """Check arguments passed by position, and the first results of `train_step`."""
    arguments = "megatron.training.arguments"
    training = "megatron.training.training"
    assert names(defined(tree, arguments, "parse_args"))[0] == "extra_args_provider"
    assert names(defined(tree, arguments, "validate_args"))[0] == "args"
    returned = [node.value for node in ast.walk(defined(tree, training, "train_step")) if isinstance(node, ast.Return)]
    seconds = {ast.unparse(value.elts[1]) for value in returned if isinstance(value, ast.Tuple)}
    assert len(returned) >= 2
    assert seconds <= {"True", "skipped_iter"}


def called(version: Version) -> Iterator[tuple[str, set[str]]]:
    yield from CALLED_BY.items()
    yield from (CALLED_BEFORE_0_18 if version < Version("0.18") else CALLED_SINCE_0_18).items()
    if version >= Version("0.19"):
        yield from CALLED_SINCE_0_19.items()


def test_replaced_functions_are_called_as_the_engine_expects(tree: Path) -> None:
    """Otherwise the flag would be accepted without effect."""
    for caller, expected in called(Version(release(tree))):
        module, _, path = caller.partition(":")
        function = defined(tree, f"megatron.training.{module}", path)
        assert function is not None, caller
        calls = {ast.unparse(node.func) for node in ast.walk(function) if isinstance(node, ast.Call)}
        assert expected <= calls, caller
