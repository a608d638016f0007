"""A made-up package: where its names are defined, what they take, and whether its code has changed."""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path

import pytest

from hybrid_engine.backends.vllm.surface.source_reader import Source, digest

FILES = {
    "__init__.py": """
        from typing import TYPE_CHECKING
        LAZY = {"Engine": ".core.engine:Engine"}
        if TYPE_CHECKING:
            current: int
        """,
    "core/__init__.py": """
        from .engine import Engine as Renamed, build
        from elsewhere import Foreign
        """,
    "core/engine.py": """
        from dataclasses import dataclass, field
        from ..base import Base

        @dataclass
        class Settings:
            size: int
            names: list = field(default_factory=list)

        class Engine(Base[int]):
            kind: str
            def __init__(self, settings, *, quiet=False):
                self.settings = settings
                settings.foreign = 1
            def step(self, a, b=1, *rest, c, d=2, **more): ...
            @staticmethod
            def free(x): ...

        def build(a, /, b): ...
        """,
    "base.py": """
        class Base:
            def inherited(self): ...
        """,
}


@pytest.fixture
def source(tmp_path: Path) -> Source:
    for name, text in FILES.items():
        path = tmp_path / "made" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return Source(tmp_path, "made")


@pytest.mark.parametrize(
    "target",
    [
        "made:Engine",
        "made:current",
        "made:core.engine.build",
        "made.core:Renamed.step",
        "made.core:Foreign.anything",
        "made.core.engine:Engine.settings",
        "made.core.engine:Engine.kind",
        "made.core.engine:Engine.inherited",
        "made.core.engine:Engine.__getattribute__",
        "made.core.engine:Settings.names",
    ],
)
def test_a_name_is_found_where_it_is_defined(source: Source, target: str) -> None:
    assert source.find(target) is not None


@pytest.mark.parametrize(
    "target", ["made:Other", "made.other:Engine", "made:Engine.foreign", "made.core.engine:Engine.quiet", "made:core.x"]
)
def test_a_name_that_is_not_there_is_not_found(source: Source, target: str) -> None:
    assert source.find(target) is None


@pytest.mark.parametrize(
    ("target", "num_positional", "keywords", "faults"),
    [
        ("made:Engine", 1, ("quiet",), []),
        ("made:Engine", 0, (), ["needs settings"]),
        ("made:Engine", 2, (), ["takes 1 positional arguments, not 2"]),
        ("made:Engine", 1, ("loud",), ["takes no loud"]),
        ("made:Engine.step", 3, ("c", "anything"), []),
        ("made:Engine.step", 1, (), ["needs c"]),
        ("made:Engine.free", 1, (), []),
        ("made.core.engine:Settings", 1, ("names",), []),
        ("made.core.engine:Settings", 0, ("length",), ["takes no length", "needs size"]),
        ("made.core:build", 0, ("a", "b"), ["takes no a"]),
    ],
)
def test_what_can_be_passed(
    source: Source, target: str, num_positional: int, keywords: tuple[str, ...], faults: list[str]
) -> None:
    found = source.find(target)
    assert found is not None
    signature = source.signature(found)
    assert signature is not None
    assert signature.faults(num_positional, keywords) == faults


def test_a_digest_is_of_what_code_does() -> None:
    def of(text: str) -> str:
        return digest(ast.parse(textwrap.dedent(text)).body[0])

    plain = of("def f(a):\n    return a + 1")
    assert of('def f(a):\n    """Of a."""\n    # more\n    return (a +\n        1)') == plain
    assert of("def f(a):\n    return a + 2") != plain
    assert of("def f(a=0):\n    return a + 1") != plain
