"""A patch: a record of one replaced attribute of megatron, and the versions that patches are for.

A target is ``module:attr.path``. ``megatron.*:name`` is the module `name` wherever megatron's modules have it as a
global, in those imported later, too.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from packaging.version import Version

GROUPS: Final = {
    "hooks": "megatron_patches.buffers",
    "cpu": "megatron_patches.cpu.core",
    "cpu_training": "megatron_patches.cpu.training",
    "script": "megatron_patches.script",
}
"""Patches that are applied together -> the module that has them as PATCHES, imported when they are asked for."""
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
        group: one of `GROUPS`.
        target: ``module:attr.path`` or ``megatron.*:module``.
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
            raise ValueError(f"patch {self.name!r}: group {self.group!r} is not one of {tuple(GROUPS)}")
        if not (self.module_name and self.attr_path) or (self.covers_megatron and "." in self.attr_path):
            raise ValueError(
                f"patch {self.name!r}: target {self.target!r} is not 'module:attr.path' or 'megatron.*:name'"
            )
        for field in ("name", "reason", "versions", "remove_when"):
            if not getattr(self, field):
                raise ValueError(f"patch {self.name!r}: {field} is empty")

    @property
    def module_name(self) -> str:
        """The module that has the original."""
        return self.attr_path if self.covers_megatron else self.target.partition(":")[0]

    @property
    def attr_path(self) -> str:
        return self.target.partition(":")[2]

    @property
    def covers_megatron(self) -> bool:
        """True for ``megatron.*:name``."""
        return self.target.startswith("megatron.*:")

    def is_needed_by(self, core_version: str) -> bool:
        """Whether this megatron-core has the target, and needs the patch."""
        version = Version(core_version)
        is_early, is_late = self.since and version < Version(self.since), self.until and version >= Version(self.until)
        return not (is_early or is_late)
