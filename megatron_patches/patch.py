"""A patch, a record of one replaced attribute of megatron; and how patches are applied and reverted, by groups.

A target is ``module:attr.path``. ``megatron.*:name`` is the module `name` wherever megatron's modules have it as a
global, in those imported later, too.

    apply    version, targets and conflicts are checked ── any violation: raise, unchanged
             each target is set, and exchanged wherever a module of megatron has the same object by name
    revert   each target is set back, and the replacements are exchanged for the originals

Modules of megatron that are imported later are exchanged in right after they were executed, if a patch covers them all.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import inspect
import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Final

import torch
from packaging.version import Version

from megatron_patches.errors import PatchSetError, UnknownGroupError, UnsupportedVersionError

logger = logging.getLogger(__name__)

GROUPS: Final = {
    "hooks": "megatron_patches.buffers",
    "without_te": "megatron_patches.without_te",
    "cpu": "megatron_patches.cpu.core",
    "cpu_training": "megatron_patches.cpu.training",
    "script": "megatron_patches.script",
    "rl": "megatron_patches.rl",
    "cpu_rl": "megatron_patches.cpu.rl",
}
"""Patches that are applied together -> the module that has them as PATCHES, imported when they are asked for."""
CORE_VERSIONS: Final = ("0.16.1", "0.19.2")
"""The megatron-core versions that the core tests pass with (`nox -s core-tests`), and whose scripts were run."""
SAME_AS: Final = {"0.19.1": "0.19.2"}
"""What a checkout calls itself -> the release in which all that is patched or reviewed is the same: Megatron-LM's tag
core_v0.19.0 has the `megatron.training` of 0.19.2, and says 0.19.1."""


MISSING: Final = object()
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
        for field in ("name", "reason", "remove_when"):
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


@dataclass(frozen=True)
class _Swap:
    """A patch on the attribute that it names.

    Attributes:
        owner: the module or class that has the attribute; None for a module that is replaced within megatron alone.
        own: the raw entry of the owner's own ``__dict__``, or `MISSING`.
        value: what a look-up on the owner finds, descriptors unresolved; differs from `own` where it is inherited.
        replacement: of `value`, in the same kind of descriptor.
    """

    patch: Patch
    owner: Any
    attr: str
    own: Any
    value: Any
    replacement: Any

    @classmethod
    def of(cls, patch: Patch) -> _Swap:
        """Look the target up, importing its module, and build its replacement.

        Raises ImportError or AttributeError for a target that does not exist.
        """
        owner: Any = importlib.import_module(patch.module_name)
        if patch.covers_megatron:
            return cls(patch, None, patch.attr_path, owner, owner, patch.build(owner))
        *path, attr = patch.attr_path.split(".")
        for name in path:
            owner = getattr(owner, name)
        value = inspect.getattr_static(owner, attr, MISSING)
        if value is MISSING and not patch.may_be_missing:
            raise AttributeError("it does not exist")
        is_wrapped = isinstance(value, (staticmethod, classmethod))
        replacement = type(value)(patch.build(value.__func__)) if is_wrapped else patch.build(value)
        return cls(patch, owner, attr, vars(owner).get(attr, MISSING), value, replacement)

    @property
    def is_shared(self) -> bool:
        """Whether other modules may have taken `value` over by name: megatron's own functions and classes."""
        if isinstance(self.owner, ModuleType):
            return str(getattr(self.value, "__module__", "")).startswith("megatron.")
        return self.owner is None

    @property
    def claims(self) -> set[tuple[int, str]]:
        """Tell the place, and an object that is exchanged elsewhere, whatever name it was reached by."""
        return {(id(self.owner), self.attr)} | ({(id(self.value), "")} if self.is_shared else set())

    def is_ours(self) -> bool:
        """Whether nobody else has replaced the replacement."""
        return self.owner is None or vars(self.owner).get(self.attr, MISSING) is self.replacement

    def put(self, entry: Any) -> None:
        """Set the attribute; `MISSING` deletes it."""
        if self.owner is not None:
            delattr(self.owner, self.attr) if entry is MISSING else setattr(self.owner, self.attr, entry)


class PatchRegistry:
    """The patches that are applied. Not thread-safe."""

    def __init__(self) -> None:
        self._swaps: list[_Swap] = []
        self._finder = _MegatronFinder(self._exchange_in)

    def apply(self, patches: Iterable[Patch], *, allow_version: bool = False) -> None:
        """Apply those that are not applied yet; `allow_version`: to an untested version, too.

        Target modules are imported for the checks, and stay imported on failure.

        Raises:
            PatchSetError: with every violation found, before any attribute changes.
        """
        selected = [patch for patch in patches if not self.has(patch)]
        if not selected:
            return
        version = check_version(allow_version=allow_version)
        swaps = self._checked([patch for patch in selected if patch.is_needed_by(version)])
        for swap in swaps:
            swap.put(swap.replacement)
        self._swaps += swaps
        for module in _megatron_modules():
            self._exchange_in(module)
        if self._finder not in sys.meta_path and any(swap.owner is None for swap in swaps):
            sys.meta_path.insert(0, self._finder)
        logger.info("applied %d megatron patches", len(swaps))

    def has(self, patch: Patch) -> bool:
        """Whether it is applied."""
        return any(swap.patch.name == patch.name for swap in self._swaps)

    def revert(self) -> None:
        """Restore every original, the last one first. Does nothing when nothing is applied.

        Raises:
            PatchSetError: when somebody else has replaced a replacement since, before any attribute changes.
        """
        violations = [
            f"{swap.patch.target} (patch {swap.patch.name}) was replaced by somebody else since; undo that first"
            for swap in self._swaps
            if not swap.is_ours()
        ]
        if violations:
            raise PatchSetError(violations)
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        originals = {id(swap.replacement): swap.value for swap in self._swaps if swap.is_shared}
        for module in _megatron_modules():
            _exchange(module, originals)
        while self._swaps:
            swap = self._swaps.pop()
            swap.put(swap.own)

    def _checked(self, patches: Sequence[Patch]) -> list[_Swap]:
        """What to change for these patches. Raises one error with every violation."""
        swaps, violations = [], []
        claimed = {claim: swap.patch for swap in self._swaps for claim in swap.claims}
        for patch in patches:
            try:
                swap = _Swap.of(patch)
            except (ImportError, AttributeError) as error:
                violations.append(
                    f"{patch.target} (patch {patch.name}) cannot be patched: {error}; the patch was tested with "
                    f"megatron-core {', '.join(CORE_VERSIONS)}; install one of these"
                )
                continue
            swaps.append(swap)
            for other in {claimed.setdefault(claim, patch).name for claim in swap.claims} - {patch.name}:
                violations.append(f"{patch.target} is claimed by both {other} and {patch.name}; merge the two patches")
        if violations:
            raise PatchSetError(violations)
        return swaps

    def _exchange_in(self, module: ModuleType) -> None:
        _exchange(module, {id(swap.value): swap.replacement for swap in self._swaps if swap.is_shared})


def check_version(*, allow_version: bool = False) -> str:
    """The release of the megatron.core that is imported, which in a checkout is not the installed one's.

    Raises PatchSetError without one, and UnsupportedVersionError, or logs a warning, for one that was not tested.
    """
    try:
        version = release_of(importlib.import_module("megatron.core").__version__)
    except ModuleNotFoundError as error:
        if error.name not in ("megatron", "megatron.core"):
            raise
        raise PatchSetError(["megatron-core is not installed; install it, or add a checkout to PYTHONPATH"]) from error
    if version not in CORE_VERSIONS:
        message = (
            f"megatron-core {version} is imported from {sys.modules['megatron.core'].__file__}, but the patches were "
            f"tested only with {', '.join(CORE_VERSIONS)}: install or check out one of these, or allow this version"
        )
        if not allow_version:
            raise UnsupportedVersionError([message])
        logger.warning("%s. Continuing, since untested versions are allowed", message)
    return version


def _megatron_modules() -> list[ModuleType]:
    found = sorted(sys.modules.items())
    return [module for name, module in found if name.startswith("megatron.") and isinstance(module, ModuleType)]


def _exchange(module: ModuleType, others: dict[int, Any]) -> None:
    """Replace those globals of a module that are one of these objects, given by their ids."""
    for attr, value in list(vars(module).items()):
        if id(value) in others:
            setattr(module, attr, others[id(value)])


class _MegatronFinder(importlib.abc.MetaPathFinder):
    """Calls back after each module of megatron has been executed; finding the modules is left to the other finders."""

    def __init__(self, on_executed: Callable[[ModuleType], None]) -> None:
        self._on_executed = on_executed

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith("megatron."):
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next((found for finder in others if (found := finder.find_spec(fullname, path, target))), None)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                vars(loader).pop("exec_module", None)  # the module keeps its loader as it was
                execute(module)
                self._on_executed(module)

            loader.exec_module = exec_module
        return spec


_registry = PatchRegistry()


def default_groups() -> tuple[str, ...]:
    """The hooks, and stand-ins for what is missing. Patches of megatron.training are applied on request only."""
    return ("hooks", *stand_in_groups())


def stand_in_groups() -> tuple[str, ...]:
    """Groups for what this machine lacks: Transformer Engine, a CUDA device."""
    lacks = {"without_te": find_spec("transformer_engine") is None, "cpu": not torch.cuda.is_available()}
    return tuple(group for group, is_lacking in lacks.items() if is_lacking)


def patches_of(groups: Iterable[str] = GROUPS) -> list[Patch]:
    """The patches of some groups, whose modules are imported. Raises UnknownGroupError."""
    groups = list(dict.fromkeys(groups))
    unknown = sorted(set(groups) - set(GROUPS))
    if unknown:
        raise UnknownGroupError(f"unknown patch groups {unknown}; the groups are {list(GROUPS)}")
    modules = [importlib.import_module(GROUPS[group]) for group in groups]
    return [patch for module in modules for patch in module.PATCHES]


def apply(groups: Iterable[str] | None = None, *, allow_version: bool = False) -> None:
    """Apply the patches of some groups. Idempotent.

    Args:
        groups: default: `default_groups`.
        allow_version: accept a megatron-core that the patches were not tested with, and log a warning.

    Raises:
        UnknownGroupError: for a group that does not exist.
        PatchSetError: for an unsupported version, or with every missing target and conflict, before anything changes.
    """
    _registry.apply(patches_of(default_groups() if groups is None else groups), allow_version=allow_version)


def revert() -> None:
    """Restore every original attribute of megatron. Idempotent.

    Raises:
        PatchSetError: if an attribute was replaced by somebody else since, before anything changes.
    """
    _registry.revert()


def is_applied(patch: Patch) -> bool:
    """Whether a patch is applied now."""
    return _registry.has(patch)


def hooks_applied() -> bool:
    """Whether group "hooks" is applied: Megatron asks for buffers."""
    return all(map(is_applied, patches_of(["hooks"])))


def require_supported_version() -> None:
    """Raise UnsupportedVersionError for a megatron-core that was not tested, unless `apply` took it."""
    if not hooks_applied():
        check_version()
