"""Patches of megatron's attributes, and their application and reversal by groups.

A target is ``module:attr.path``. ``megatron.*:name`` is the module `name` in every module of
megatron that has it as a global, including modules imported later.

    apply    version, targets and conflicts are checked; any violation raises before a change
             each target is set, and replaced in every module of megatron that imported it by name
    revert   each target is set back, and the replacements are replaced by the originals

Modules of megatron that are imported later get the replacements right after they have run, if one
of the patches covers all modules.
"""

from __future__ import annotations

import functools
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
    "routers": "megatron_patches.routers",
    "without_te": "megatron_patches.without_te",
    "cpu": "megatron_patches.cpu.core",
    "cpu_training": "megatron_patches.cpu.training",
    "script": "megatron_patches.script",
    "rl": "megatron_patches.rl",
    "cpu_rl": "megatron_patches.cpu.rl",
}
"""Group of patches -> module with their PATCHES, imported when the group is requested."""
CORE_VERSIONS: Final = ("0.16.1", "0.19.2")
"""Supported megatron-core versions.

With them the core tests pass (`nox -s core-tests`), and their scripts were run.
"""
SAME_AS: Final = {"0.19.1": "0.19.2"}
"""Version in a checkout -> release with the same patched or reviewed sources.

Megatron-LM's tag core_v0.19.0 has the `megatron.training` of 0.19.2, and the version 0.19.1.
"""

MISSING: Final = object()
"""Value of an attribute that does not exist."""

Function = Callable[..., Any]


def around(call: Function) -> Callable[[Function], Function]:
    """Return a `build` whose replacement calls `call(original, *args, **kwargs)`."""

    def build(original: Function) -> Function:
        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return call(original, *args, **kwargs)

        return replacement

    return build


def release_of(version: str) -> str:
    """Return the release of a `megatron.core.__version__`, without a commit; see also `SAME_AS`."""
    public = Version(version).public
    return SAME_AS.get(public, public)


@dataclass(frozen=True)
class Patch:
    """Replacement of an attribute.

    Attributes:
        name: unique, dotted lower case.
        group: one of `GROUPS`.
        target: ``module:attr.path`` or ``megatron.*:module``.
        reason: fault of the original, as a sentence with the target as its subject.
        remove_when: condition under which the patch becomes unnecessary.
        build: function that returns the replacement of the original. For static and class methods
            it gets the plain function, and its result is wrapped in the same descriptor. It gets
            `MISSING` if the attribute does not exist, which requires `may_be_missing`.
        may_be_missing: the attribute need not exist; it is then created, and deleted by revert.
        since: first megatron-core with the target; older ones do without the patch. Empty if all
            supported versions have it.
        until: first megatron-core without the target, or without need for the patch. Empty if there
            is none.
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
        label = f"patch {self.name!r}"
        if self.group not in GROUPS:
            raise ValueError(f"{label}: group {self.group!r} is not one of {tuple(GROUPS)}")
        is_complete = self.module_name and self.attr_path
        if not is_complete or (self.covers_megatron and "." in self.attr_path):
            raise ValueError(
                f"{label}: target {self.target!r} is not 'module:attr.path' or 'megatron.*:name'"
            )
        for field in ("name", "reason", "remove_when"):
            if not getattr(self, field):
                raise ValueError(f"{label}: {field} is empty")

    @property
    def module_name(self) -> str:
        """Module that has the original."""
        return self.attr_path if self.covers_megatron else self.target.partition(":")[0]

    @property
    def attr_path(self) -> str:
        return self.target.partition(":")[2]

    @property
    def covers_megatron(self) -> bool:
        """True for ``megatron.*:name``."""
        return self.target.startswith("megatron.*:")

    def is_needed_by(self, core_version: str) -> bool:
        """Return True if this megatron-core has the target and needs the patch."""
        version = Version(core_version)
        if self.since and version < Version(self.since):
            return False
        return not (self.until and version >= Version(self.until))


@dataclass(frozen=True)
class _Swap:
    """Patch with its resolved target and the built replacement.

    Attributes:
        owner: module or class that has the attribute; None if a module is replaced within megatron.
        own_entry: entry in the ``__dict__`` of `owner`, or `MISSING`.
        value: result of a look-up on `owner`, with descriptors unresolved; differs from `own_entry`
            if it is inherited.
        replacement: replacement of `value`, in the same kind of descriptor.
    """

    patch: Patch
    owner: Any
    attr: str
    own_entry: Any
    value: Any
    replacement: Any

    @classmethod
    def of(cls, patch: Patch) -> _Swap:
        """Import the target's module, look the target up, and build its replacement.

        Raises:
            ImportError, AttributeError: the target does not exist.
        """
        owner: Any = importlib.import_module(patch.module_name)
        if patch.covers_megatron:
            return cls(patch, None, patch.attr_path, owner, owner, patch.build(owner))
        *path, attr = patch.attr_path.split(".")
        for name in path:
            owner = getattr(owner, name)
        # A static look-up returns static and class methods as descriptors.
        value = inspect.getattr_static(owner, attr, MISSING)
        if value is MISSING and not patch.may_be_missing:
            raise AttributeError("it does not exist")
        if isinstance(value, (staticmethod, classmethod)):
            replacement = type(value)(patch.build(value.__func__))
        else:
            replacement = patch.build(value)
        own_entry = vars(owner).get(attr, MISSING)
        return cls(patch, owner, attr, own_entry, value, replacement)

    @property
    def is_shared(self) -> bool:
        """True for megatron's own functions and classes, which other modules may import by name."""
        if isinstance(self.owner, ModuleType):
            return str(getattr(self.value, "__module__", "")).startswith("megatron.")
        return self.owner is None

    @property
    def claims(self) -> set[tuple[int, str]]:
        """Keys that no two patches may share.

        One is the attribute. Another is a shared object, because patches may reach it by other
        names.
        """
        claims = {(id(self.owner), self.attr)}
        if self.is_shared:
            claims.add((id(self.value), ""))
        return claims

    def is_current(self) -> bool:
        """Return True unless other code has replaced the replacement since."""
        return self.owner is None or vars(self.owner).get(self.attr, MISSING) is self.replacement

    def put(self, entry: Any) -> None:
        """Set the attribute, or delete it if `entry` is `MISSING`."""
        if self.owner is None:
            return
        if entry is MISSING:
            delattr(self.owner, self.attr)
        else:
            setattr(self.owner, self.attr, entry)


class PatchRegistry:
    """Applied patches. Not thread-safe."""

    def __init__(self) -> None:
        self._swaps: list[_Swap] = []
        self._finder = _MegatronFinder(self._exchange_in)

    def apply(self, patches: Iterable[Patch], *, allow_version: bool = False) -> None:
        """Apply the patches that are not applied yet.

        Target modules are imported for the checks, and stay imported on failure.

        Args:
            patches: patches to apply.
            allow_version: apply them to an untested version also.

        Raises:
            PatchSetError: listing every violation, before any attribute changes.
        """
        selected = [patch for patch in patches if not self.has(patch)]
        if not selected:
            return
        version = check_version(allow_version=allow_version)
        swaps = self._checked([patch for patch in selected if patch.is_needed_by(version)])
        for swap in swaps:
            swap.put(swap.replacement)
        self._swaps += swaps
        # Modules may have imported an original by name.
        for module in _megatron_modules():
            self._exchange_in(module)
        if self._finder not in sys.meta_path and any(swap.owner is None for swap in swaps):
            # First, because an earlier finder would load the module without a call.
            sys.meta_path.insert(0, self._finder)
        logger.info("applied %d megatron patches", len(swaps))

    def has(self, patch: Patch) -> bool:
        """Return True if a patch is applied."""
        return any(swap.patch.name == patch.name for swap in self._swaps)

    def revert(self) -> None:
        """Restore every original, the last one first. Does nothing if no patch is applied.

        Raises:
            PatchSetError: other code has replaced a replacement since. Raised before any attribute
                changes.
        """
        violations = [
            f"{swap.patch.target} (patch {swap.patch.name}) has been replaced by other code since; "
            "undo that first"
            for swap in self._swaps
            if not swap.is_current()
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
            swap.put(swap.own_entry)

    def _checked(self, patches: Sequence[Patch]) -> list[_Swap]:
        """Resolve the targets of patches.

        Raises:
            PatchSetError: listing every missing target and every conflict.
        """
        swaps = []
        violations = []
        claimed = {claim: swap.patch for swap in self._swaps for claim in swap.claims}
        for patch in patches:
            try:
                swap = _Swap.of(patch)
            except (ImportError, AttributeError) as error:
                violations.append(
                    f"{patch.target} (patch {patch.name}) cannot be patched: {error}; the patch "
                    f"was tested with megatron-core {', '.join(CORE_VERSIONS)}; install one"
                )
                continue
            swaps.append(swap)
            # The first patch keeps a claim, so that later ones conflict with it.
            owners = {claimed.setdefault(claim, patch).name for claim in swap.claims}
            for other in owners - {patch.name}:
                violations.append(
                    f"{patch.target} is claimed by both {other} and {patch.name}; merge the two "
                    "patches"
                )
        if violations:
            raise PatchSetError(violations)
        return swaps

    def _exchange_in(self, module: ModuleType) -> None:
        replacements = {id(swap.value): swap.replacement for swap in self._swaps if swap.is_shared}
        _exchange(module, replacements)


def check_version(*, allow_version: bool = False) -> str:
    """Return the release of the imported megatron.core.

    It may be a checkout of another version than the installed package.

    Args:
        allow_version: log a warning for an untested version instead of raising.

    Raises:
        PatchSetError: there is no megatron.core.
        UnsupportedVersionError: its version was not tested.
    """
    try:
        version = release_of(importlib.import_module("megatron.core").__version__)
    except ModuleNotFoundError as error:
        if error.name not in ("megatron", "megatron.core"):
            raise
        raise PatchSetError(
            ["megatron-core is not installed; install it, or add a checkout to PYTHONPATH"]
        ) from error
    if version not in CORE_VERSIONS:
        message = (
            f"megatron-core {version} is imported from {sys.modules['megatron.core'].__file__}, "
            f"but the patches were tested only with {', '.join(CORE_VERSIONS)}: install or check "
            "out one of these, or allow this version"
        )
        if not allow_version:
            raise UnsupportedVersionError([message])
        logger.warning("%s. Continuing, since untested versions are allowed", message)
    return version


def _megatron_modules() -> list[ModuleType]:
    return [
        module
        for name, module in sorted(sys.modules.items())
        if name.startswith("megatron.") and isinstance(module, ModuleType)
    ]


def _exchange(module: ModuleType, replacements: dict[int, Any]) -> None:
    """Replace the globals of a module whose ids are in `replacements`."""
    for attr, value in list(vars(module).items()):
        if id(value) in replacements:
            setattr(module, attr, replacements[id(value)])


class _MegatronFinder(importlib.abc.MetaPathFinder):
    """Finder that calls back after each module of megatron has run.

    It leaves finding the modules to the other finders.
    """

    def __init__(self, on_executed: Callable[[ModuleType], None]) -> None:
        self._on_executed = on_executed

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith("megatron."):
            return None
        # The other finders decide which file the module comes from.
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next(filter(None, specs), None)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                # The module keeps its loader unchanged.
                vars(loader).pop("exec_module", None)
                execute(module)
                self._on_executed(module)

            loader.exec_module = exec_module
        return spec


_registry = PatchRegistry()


def default_groups() -> tuple[str, ...]:
    """Return hooks, corrections, and the stand-ins for missing libraries and devices.

    Patches of megatron.training are applied on request only.
    """
    return ("hooks", "routers", *stand_in_groups())


def stand_in_groups() -> tuple[str, ...]:
    """Return the groups that replace what this machine lacks: Transformer Engine, a CUDA device."""
    lacks = {
        "without_te": find_spec("transformer_engine") is None,
        "cpu": not torch.cuda.is_available(),
    }
    return tuple(group for group, is_lacking in lacks.items() if is_lacking)


def patches_of(groups: Iterable[str] = GROUPS) -> list[Patch]:
    """Import the modules of some groups and return their patches.

    Raises:
        UnknownGroupError: a group does not exist.
    """
    groups = list(dict.fromkeys(groups))
    unknown = sorted(set(groups) - set(GROUPS))
    if unknown:
        raise UnknownGroupError(f"unknown patch groups {unknown}; the groups are {list(GROUPS)}")
    modules = [importlib.import_module(GROUPS[group]) for group in groups]
    return [patch for module in modules for patch in module.PATCHES]


def apply(groups: Iterable[str] | None = None, *, allow_version: bool = False) -> None:
    """Apply the patches of some groups. Idempotent.

    Args:
        groups: names of groups; None: `default_groups`.
        allow_version: accept an untested megatron-core, and log a warning.

    Raises:
        UnknownGroupError: a group does not exist.
        PatchSetError: the version is not supported, or listing every missing target and conflict.
            Raised before any attribute changes.
    """
    patches = patches_of(default_groups() if groups is None else groups)
    _registry.apply(patches, allow_version=allow_version)


def revert() -> None:
    """Restore every original attribute of megatron. Idempotent.

    Raises:
        PatchSetError: other code has replaced an attribute since. Raised before anything changes.
    """
    _registry.revert()


def is_applied(patch: Patch) -> bool:
    """Return True if a patch is applied now."""
    return _registry.has(patch)


def hooks_applied() -> bool:
    """Return True if group "hooks" is applied, so that Megatron uses a buffer allocator."""
    return all(map(is_applied, patches_of(["hooks"])))


def require_supported_version() -> None:
    """Raise UnsupportedVersionError for an untested megatron-core, unless `apply` accepted it."""
    # `apply` has checked the version already.
    if not hooks_applied():
        check_version()
