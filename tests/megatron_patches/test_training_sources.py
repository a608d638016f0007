"""What patches of scripts replace is in `megatron.training` and `megatron.rl`, with the parameters that they use.

Read, not imported: in the checkout that MEGATRON_LM_PATH names, and in the installed wheel where that has it.
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
"""What a replacement passes by name, or asks for."""
Function = ast.FunctionDef | ast.AsyncFunctionDef

INHERITED = {"cpu_training.module"}
"""Whose target a class of megatron has from torch."""
CALLED_BY = {
    "training:pretrain": {"setup_model_and_optimizer", "train"},
    "training:setup_model_and_optimizer": {"get_model"},
    "training:train": {"train_step"},
}
"""Function of megatron.training -> those that it calls, which are replaced or lead to such."""
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
    """Folder with `megatron/` of the checkout, and of the installed wheel if it has `megatron.training`."""
    checkout = os.environ.get("MEGATRON_LM_PATH")
    core = importlib.util.find_spec("megatron.core")
    found = {"checkout": Path(checkout)} if checkout else {}
    if core is not None and core.origin and (wheel := Path(core.origin).parents[2]) not in found.values():
        found["wheel"] = wheel
    return {name: path for name, path in found.items() if (path / "megatron" / "training").is_dir()}


@pytest.fixture(params=sorted(trees()) or [pytest.param("", marks=pytest.mark.skip("no megatron.training to read"))])
def tree(request: pytest.FixtureRequest) -> Path:
    return trees()[request.param]


def release(tree: Path) -> str:
    text = (tree / "megatron" / "core" / "package_info.py").read_text()
    return release_of(".".join(re.search(rf"^{part} = (\d+)", text, re.M)[1] for part in ("MAJOR", "MINOR", "PATCH")))


@cache
def definitions(tree: Path, module: str) -> dict[str, ast.AST]:
    """Names that are defined, or imported from another module of megatron, at the top of this one."""
    base = tree.joinpath(*module.split("."))
    path = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
    found: dict[str, ast.AST] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body if path.exists() else ():
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.ImportFrom) and str(node.module).startswith("megatron."):
            found.update({name.asname or name.name: node for name in node.names})
    return found


def defined(tree: Path, module: str, path: str) -> Function | None:
    """The function of this name, wherever the module has it from."""
    name, _, rest = path.partition(".")
    node = definitions(tree, module).get(name)
    if isinstance(node, ast.ImportFrom):
        return defined(tree, str(node.module), path)
    if isinstance(node, ast.ClassDef) and rest:
        methods = [part for part in node.body if isinstance(part, Function) and part.name == rest]
        return methods[0] if methods else None
    return node if isinstance(node, ast.FunctionDef) else None


def needed(tree: Path) -> list[Patch]:
    """By its version; wheels have no RL loop."""
    has_rl = (tree / "megatron" / "rl").is_dir()
    patches = [patch for patch in PATCHES if has_rl or not patch.module_name.startswith("megatron.rl.")]
    return [patch for patch in patches if patch.is_needed_by(release(tree))]


def names(function: Function) -> list[str]:
    return [argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)]


def test_every_target_is_there_with_its_parameters(tree: Path) -> None:
    assert release(tree) in CORE_VERSIONS
    for patch in needed(tree):
        if patch.name in INHERITED:
            assert patch.attr_path.partition(".")[0] in definitions(tree, patch.module_name), patch.target
            continue
        function = defined(tree, patch.module_name, patch.attr_path)
        assert function is not None, patch.target
        assert set(PARAMETERS.get(patch.name, ())) <= set(names(function)), patch.target


def test_patches_that_ended_have_no_target_left(tree: Path) -> None:
    """Else something would go unpatched without a word."""
    for patch in PATCHES:
        if patch.until and Version(release(tree)) >= Version(patch.until):
            assert defined(tree, patch.module_name, patch.attr_path) is None, patch.target


def test_the_first_arguments_are_those_that_are_passed_on_by_place(tree: Path) -> None:
    """`parse_args` gets a provider of ours first; the result of `train_step` begins with losses and `skipped_iter`."""
    arguments, training = "megatron.training.arguments", "megatron.training.training"
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


def test_they_are_called_where_the_engine_waits_for_them(tree: Path) -> None:
    """Else the flag would be accepted and do nothing."""
    for caller, expected in called(Version(release(tree))):
        module, _, path = caller.partition(":")
        function = defined(tree, f"megatron.training.{module}", path)
        assert function is not None, caller
        calls = {ast.unparse(node.func) for node in ast.walk(function) if isinstance(node, ast.Call)}
        assert expected <= calls, caller
