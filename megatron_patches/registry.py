"""Applies and reverts a set of patches: collect, check everything, then change.

    patches ──select by group──> claims ──check versions, targets, conflicts──> swap ──> records
                                              │ any violation: raise, unchanged             │
                                              └──────────── revert replays the originals <──┘

A function that other megatron modules imported by name (``from x import f``) is replaced there, too, and modules of
megatron that are imported later get the package-wide patches right after they were executed.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from packaging.version import Version

from megatron_patches.errors import (
    MissingMegatronError,
    MissingTargetError,
    PatchSetError,
    TargetConflictError,
    UnknownGroupError,
    UnsupportedVersionError,
)
from megatron_patches.patch import (
    GROUPS,
    MISSING,
    PYTHON_3_12_SINCE,
    Patch,
    Site,
    build_replacement,
    locate,
    release_of,
    sites,
)

logger = logging.getLogger(__name__)

_ROOT = "megatron"
_CORE = "megatron.core"


@dataclass(frozen=True)
class Applied:
    """A swap that was made; all that revert needs."""

    patch: Patch
    site: Site
    replacement: Any


@dataclass(frozen=True)
class PatchState:
    """A patch and where it stands.

    Attributes:
        num_sites: number of places where it is applied now; 0: not applied.
        is_needed: False if the imported megatron-core does without it: its target came later, or is gone.
    """

    patch: Patch
    num_sites: int
    is_needed: bool = True


class PatchRegistry:
    """A set of patches and which of them are applied. Not thread-safe."""

    def __init__(self, patches: Sequence[Patch] = ()) -> None:
        self._patches = list(patches)
        self._applied: list[Applied] = []
        self._finder: _MegatronFinder | None = None

    def register(self, patches: Iterable[Patch]) -> None:
        """Add patches, none of them applied."""
        self._patches += patches

    def apply(self, groups: Iterable[str], *, allow_version: bool = False) -> None:
        """Apply every patch of `groups` that is not applied yet; `allow_version`: to untested versions, too.

        Target modules are imported for the checks, and stay imported on failure.

        Raises:
            UnknownGroupError: for a group that does not exist.
            PatchSetError: with every violation found, before any attribute changes.
        """
        done = {applied.patch.name for applied in self._applied}
        selected = [patch for patch in self._select(groups) if patch.name not in done]
        if not selected:
            return
        version = _imported_version(selected)
        selected = [patch for patch in selected if patch.is_needed_by(version)]
        _check_version(version, selected, allow_version)
        claims = self._collect(selected)
        replacements = _build_all(claims)
        for applied in replacements:
            self._swap(applied)
        self._watch_imports()
        logger.info("applied %d megatron patches at %d places", len(selected), len(replacements))

    def check_version(self, groups: Iterable[str], *, allow_version: bool = False) -> None:
        """Raise UnsupportedVersionError unless all patches of `groups` were tested with this megatron-core."""
        selected = self._select(groups)
        _check_version(_imported_version(selected), selected, allow_version)

    def revert(self) -> None:
        """Restore every original, the last swap first. Does nothing when nothing is applied.

        Raises:
            TargetConflictError: when somebody else has replaced a replacement since, before any attribute changes.
        """
        violations = [
            f"{applied.site.label} (patch {applied.patch.name}) was replaced by somebody else after apply(); "
            "undo that first"
            for applied in self._applied
            if applied.site.current() is not applied.replacement
        ]
        if violations:
            raise TargetConflictError(violations)
        if self._finder is not None:
            sys.meta_path.remove(self._finder)
            self._finder = None
        self._revert_late_aliases()
        while self._applied:
            self._applied.pop().site.restore()

    def states(self) -> list[PatchState]:
        """Every patch in order of registration, with the number of places where it is applied."""
        names = [applied.patch.name for applied in self._applied]
        core = sys.modules.get(_CORE)
        return [
            PatchState(patch, names.count(patch.name), core is None or patch.is_needed_by(release_of(core.__version__)))
            for patch in self._patches
        ]

    def _select(self, groups: Iterable[str]) -> list[Patch]:
        wanted = set(groups)
        unknown = sorted(wanted - set(GROUPS))
        if unknown:
            raise UnknownGroupError(f"unknown patch groups {unknown}; the groups are {list(GROUPS)}")
        return [patch for patch in self._patches if patch.group in wanted]

    def _collect(self, selected: Sequence[Patch]) -> list[tuple[Patch, Site]]:
        """The sites of `selected`, aliases included. Raises one error with every violation."""
        own, missing = _targets(selected)
        claims = [*own, *_aliases(own)]
        conflicts = []
        claimed = {applied.site.key: applied.patch for applied in self._applied}
        for patch, site in claims:
            other = claimed.setdefault(site.key, patch)
            if other is not patch:
                conflicts.append(
                    f"{site.label} is claimed by both {other.name} and {patch.name}; merge the two patches"
                )
        _raise_violations(missing, conflicts)
        return claims

    def _swap(self, applied: Applied) -> None:
        applied.site.put(applied.replacement)
        self._applied.append(applied)

    def _watch_imports(self) -> None:
        if self._finder is None and any(applied.patch.covers_package for applied in self._applied):
            self._finder = _MegatronFinder(self._patch_new_module)
            sys.meta_path.insert(0, self._finder)

    def _patch_new_module(self, module: ModuleType) -> None:
        """Apply the package-wide patches to a module that has just been executed."""
        active = {applied.patch.name: applied.patch for applied in self._applied}
        for patch in active.values():
            if patch.covers_module(module.__name__) and patch.attr_path in vars(module):
                site = locate(module, patch.attr_path)
                if all(site.key != applied.site.key for applied in self._applied):
                    self._swap(Applied(patch, site, self._shared_replacement(patch, site)))

    def _shared_replacement(self, patch: Patch, site: Site) -> Any:
        for applied in self._applied:
            if applied.patch is patch and applied.site.value is site.value:
                return applied.replacement
        return build_replacement(patch, site.value)

    def _revert_late_aliases(self) -> None:
        """Restore the originals in modules that imported a replacement by name after apply()."""
        known = {applied.site.key for applied in self._applied}
        originals = {
            id(applied.replacement): applied.site.original
            for applied in self._applied
            if isinstance(applied.site.owner, ModuleType) and applied.site.original is not MISSING
        }
        for module in _megatron_modules():
            for attr, value in list(vars(module).items()):
                if id(value) in originals and (id(module), attr) not in known:
                    setattr(module, attr, originals[id(value)])


def _tested_versions(patches: Sequence[Patch]) -> list[str]:
    """Oldest first."""
    return sorted({version for patch in patches for version in patch.versions}, key=Version)


def _install_hint(tested: Sequence[str]) -> str:
    """How to get the newest of these versions, oldest first, that pip installs on this Python."""
    older = [version for version in tested if Version(version) < Version(PYTHON_3_12_SINCE)]
    fitting = tested if sys.version_info >= (3, 12) else older or tested
    return f"install it with: pip install megatron-core=={fitting[-1]}"


def _checkout() -> Path | None:
    """The source tree that megatron.core is imported from; None where it is what pip installed."""
    imported = Path(importlib.import_module(_CORE).__file__ or "").resolve()
    try:
        installed = importlib.metadata.distribution("megatron-core").locate_file("megatron/core/__init__.py")
    except importlib.metadata.PackageNotFoundError:
        return imported.parents[2]
    return None if imported == Path(str(installed)).resolve() else imported.parents[2]


def _version_hint(tested: Sequence[str]) -> str:
    """Say how to get one of these versions, oldest first, where another one is imported."""
    if (tree := _checkout()) is None:
        return _install_hint(tested)
    return f"{tree} is imported, whatever pip installs: check out one of these there, or allow this version"


def _imported_version(patches: Sequence[Patch]) -> str:
    """The release of the megatron.core that is imported, which in a checkout is not the installed one's."""
    try:
        return release_of(importlib.import_module(_CORE).__version__)
    except ModuleNotFoundError as error:
        if error.name not in (_ROOT, _CORE):
            raise
        hint = _install_hint(_tested_versions(patches))
        raise MissingMegatronError([f"megatron-core is not installed; {hint}"]) from error


def _check_version(version: str, patches: Sequence[Patch], allow_version: bool) -> None:
    """Raise UnsupportedVersionError, or log a warning, if any patch was not tested with this version."""
    refused = [patch for patch in patches if version not in patch.versions]
    if refused:
        tested = _tested_versions(refused)
        message = (
            f"megatron-core {version} is installed, but the patches were tested only with {', '.join(tested)}; "
            f"{_version_hint(tested)}"
        )
        if not allow_version:
            raise UnsupportedVersionError([message])
        logger.warning("%s. Continuing, since untested versions are allowed", message)


def _build_all(claims: Sequence[tuple[Patch, Site]]) -> list[Applied]:
    """Build one replacement per patch and original."""
    # modules that share an original go on sharing its replacement, so `is` between them stays true
    built: dict[tuple[str, int], Any] = {}
    result = []
    for patch, site in claims:
        key = (patch.name, id(site.value))
        if key not in built:
            built[key] = build_replacement(patch, site.value)
        result.append(Applied(patch, site, built[key]))
    return result


def _missing_message(patch: Patch, detail: str) -> str:
    return (
        f"{patch.target} (patch {patch.name}) cannot be patched: {detail}; "
        f"the patch was tested with megatron-core {', '.join(patch.versions)}; install one of these"
    )


def _raise_violations(missing: Sequence[str], conflicts: Sequence[str]) -> None:
    if missing and conflicts:
        raise PatchSetError([*missing, *conflicts])
    if missing:
        raise MissingTargetError(missing)
    if conflicts:
        raise TargetConflictError(conflicts)


def _megatron_modules() -> Iterator[ModuleType]:
    for name, module in sorted(sys.modules.items()):
        if name.startswith(f"{_ROOT}.") and isinstance(module, ModuleType):
            yield module


def _targets(selected: Sequence[Patch]) -> tuple[list[tuple[Patch, Site]], list[str]]:
    """The sites that the patches name, and a message for each target that does not exist."""
    found: list[tuple[Patch, Site]] = []
    missing = []
    # package-wide ones last: looking for the others imports modules, in which these have sites too
    for patch in sorted(selected, key=lambda patch: patch.covers_package):
        try:
            found += [(patch, site) for site in sites(patch)]
        except (ImportError, AttributeError) as error:
            missing.append(_missing_message(patch, str(error)))
    missing += [
        _missing_message(patch, "it does not exist")
        for patch, site in found
        if site.value is MISSING and not patch.may_be_missing
    ]
    return found, missing


def _aliases(claims: Sequence[tuple[Patch, Site]]) -> Iterator[tuple[Patch, Site]]:
    """Where other megatron modules hold the same functions and classes (``from x import f``)."""
    # only of megatron's own definitions: an alias of, say, `torch` is a package-wide patch's business
    patches = {
        id(site.value): patch
        for patch, site in claims
        if isinstance(site.owner, ModuleType) and str(getattr(site.value, "__module__", "")).startswith(f"{_ROOT}.")
    }
    own = {site.key for _, site in claims}
    for module in _megatron_modules():
        for attr, value in sorted(vars(module).items()):
            if id(value) in patches and (id(module), attr) not in own:
                yield patches[id(value)], locate(module, attr)


class _MegatronFinder(importlib.abc.MetaPathFinder):
    """Calls back after each module of megatron has been executed; finding the modules is left to the other finders."""

    def __init__(self, on_executed: Callable[[ModuleType], None]) -> None:
        self._on_executed = on_executed

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(f"{_ROOT}."):
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _NotifyingLoader(spec.loader, self._on_executed)
                return spec
        return None


class _NotifyingLoader(importlib.abc.Loader):
    """Executes a module with its real loader, then calls back; the module keeps the real loader as its own."""

    def __init__(self, loader: Any, on_executed: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._on_executed = on_executed

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._on_executed(module)
