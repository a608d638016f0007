"""What a patch is: a record of one replaced attribute of megatron.

A target is ``module:attr.path``. The module may end in ``.*`` (``megatron.*:torch``): then the target is that attribute
of every module below the package that has it, including modules imported later.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

from packaging.version import Version

GROUPS: Final = ("hooks", "cpu", "cpu_training", "script")
CORE_VERSIONS: Final = ("0.16.1", "0.19.2")
"""The megatron-core versions that the core tests pass with (`make core-tests-all`), and whose scripts were run."""
SAME_AS: Final = {"0.19.1": "0.19.2"}
"""What a checkout calls itself -> the release in which all that is patched or reviewed is the same: Megatron-LM's tag
core_v0.19.0 has the `megatron.training` of 0.19.2, and says 0.19.1."""
PYTHON_3_12_SINCE: Final = "0.17.0"
"""The megatron-core from which on wheels ask for Python 3.12."""


class _Missing(enum.Enum):
    MISSING = enum.auto()


MISSING: Final = _Missing.MISSING
"""The value of an attribute that does not exist."""


def release_of(version: str) -> str:
    """The release that a `megatron.core.__version__` stands for: without what names a commit, and see `SAME_AS`."""
    public = Version(version).public
    return SAME_AS.get(public, public)


@dataclass(frozen=True)
class Patch:
    """One replaced attribute.

    Attributes:
        name: unique, dotted lower case.
        group: one of `GROUPS`; groups are applied separately.
        target: ``module:attr.path`` or ``package.*:attr``.
        reason: what is wrong with the original, one sentence with the target as its subject.
        versions: the megatron-core versions that it was tested with (before `since` and from `until` on: that they
            work without it).
        remove_when: the condition under which it becomes unnecessary.
        build: makes the replacement from the original. For static and class methods it gets the plain function, and
            its result is wrapped in the same descriptor. Gets `MISSING` if the attribute does not exist, which is
            only allowed with `may_be_missing`.
        may_be_missing: the attribute need not exist; it is then created, and deleted on revert.
        since: the megatron-core that brought the target; older ones do without the patch. Empty if all tested versions
            have it.
        until: the megatron-core from which on the target is gone, or no longer needs the patch. Empty if that is none.
    """

    name: str
    group: str
    target: str
    reason: str
    versions: tuple[str, ...]
    remove_when: str
    build: Callable[[Any], Any]
    may_be_missing: bool = False
    since: str = ""
    until: str = ""

    def __post_init__(self) -> None:
        if self.group not in GROUPS:
            raise ValueError(f"patch {self.name!r}: group {self.group!r} is not one of {GROUPS}")
        module_name, separator, attr_path = self.target.partition(":")
        if not (module_name and separator and attr_path):
            raise ValueError(f"patch {self.name!r}: target {self.target!r} is not 'module:attr.path'")
        if self.covers_package and "." in attr_path:
            raise ValueError(f"patch {self.name!r}: a package-wide target takes a plain attribute, not {attr_path!r}")
        for field in ("name", "reason", "versions", "remove_when"):
            if not getattr(self, field):
                raise ValueError(f"patch {self.name!r}: {field} is empty")

    @property
    def module_name(self) -> str:
        """The module, or the package without its ``.*``."""
        return self.target.partition(":")[0].removesuffix(".*")

    @property
    def attr_path(self) -> str:
        return self.target.partition(":")[2]

    @property
    def covers_package(self) -> bool:
        """True for ``package.*:attr``."""
        return self.target.partition(":")[0].endswith(".*")

    def is_needed_by(self, core_version: str) -> bool:
        """Whether this megatron-core has the target, and needs the patch."""
        version = Version(core_version)
        is_early, is_late = self.since and version < Version(self.since), self.until and version >= Version(self.until)
        return not (is_early or is_late)

    def covers_module(self, name: str) -> bool:
        """Whether a module of this name is inside the package of a package-wide target."""
        return self.covers_package and name.startswith(f"{self.module_name}.")


@dataclass(frozen=True)
class Site:
    """One place where an attribute is: `attr` of `owner`, a module or a class.

    Attributes:
        original: the raw entry of the owner's own ``__dict__`` (descriptors included), or `MISSING` if the attribute
            is inherited or does not exist.
        value: what a look-up on the owner finds, descriptors unresolved; differs from `original` only for an inherited
            attribute.
    """

    owner: Any
    attr: str
    original: Any
    value: Any

    @property
    def key(self) -> tuple[int, str]:
        """Identifies the place, whatever name it was reached by."""
        return (id(self.owner), self.attr)

    @property
    def label(self) -> str:
        if isinstance(self.owner, ModuleType):
            return f"{self.owner.__name__}:{self.attr}"
        return f"{self.owner.__module__}:{self.owner.__qualname__}.{self.attr}"

    def current(self) -> Any:
        """The raw entry there now, or `MISSING`."""
        return vars(self.owner).get(self.attr, MISSING)

    def put(self, replacement: Any) -> None:
        """Set the attribute to `replacement`."""
        setattr(self.owner, self.attr, replacement)

    def restore(self) -> None:
        """Set the original; delete the attribute if the owner had none of its own."""
        if self.original is MISSING:
            delattr(self.owner, self.attr)
        else:
            setattr(self.owner, self.attr, self.original)


def locate(owner: Any, attr: str) -> Site:
    """The site of `attr` on `owner`; its value is `MISSING` when nothing is found."""
    return Site(owner, attr, vars(owner).get(attr, MISSING), inspect.getattr_static(owner, attr, MISSING))


def sites(patch: Patch) -> Iterator[Site]:
    """The sites of `patch` in the modules loaded now; imports the module of a plain target.

    The last attribute of the path may be missing: its value is then `MISSING`.

    Raises:
        ImportError: if the module cannot be imported.
        AttributeError: if a class on the path does not exist.
    """
    if patch.covers_package:
        for name, module in sorted(sys.modules.items()):
            if patch.covers_module(name) and isinstance(module, ModuleType) and patch.attr_path in vars(module):
                yield locate(module, patch.attr_path)
        return
    owner: Any = importlib.import_module(patch.module_name)
    *path, attr = patch.attr_path.split(".")
    for name in path:
        owner = getattr(owner, name)
    yield locate(owner, attr)


def build_replacement(patch: Patch, value: Any) -> Any:
    """The replacement for `value`, inside the same kind of descriptor (static or class method)."""
    if isinstance(value, (staticmethod, classmethod)):
        return type(value)(patch.build(value.__func__))
    return patch.build(value)
