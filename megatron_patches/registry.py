"""Puts patches on megatron and takes them off again: first all are checked and built, then all attributes change.

    apply    versions, targets and conflicts are checked ── any violation: raise, unchanged
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
from types import ModuleType
from typing import Any

from packaging.version import Version

from megatron_patches.errors import PatchSetError, UnsupportedVersionError
from megatron_patches.patch import MISSING, Patch, release_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Swap:
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


def _swap(patch: Patch) -> Swap:
    """Look the target up, importing its module, and build its replacement.

    Raises ImportError or AttributeError for a target that does not exist.
    """
    owner: Any = importlib.import_module(patch.module_name)
    if patch.covers_megatron:
        return Swap(patch, None, patch.attr_path, owner, owner, patch.build(owner))
    *path, attr = patch.attr_path.split(".")
    for name in path:
        owner = getattr(owner, name)
    value = inspect.getattr_static(owner, attr, MISSING)
    if value is MISSING and not patch.may_be_missing:
        raise AttributeError("it does not exist")
    if isinstance(value, (staticmethod, classmethod)):
        replacement: Any = type(value)(patch.build(value.__func__))
    else:
        replacement = patch.build(value)
    return Swap(patch, owner, attr, vars(owner).get(attr, MISSING), value, replacement)


class PatchRegistry:
    """The patches that are applied. Not thread-safe."""

    def __init__(self) -> None:
        self._swaps: list[Swap] = []
        self._finder = _MegatronFinder(self._exchange_in)

    def apply(self, patches: Iterable[Patch], *, allow_version: bool = False) -> None:
        """Apply those that are not applied yet; `allow_version`: to untested versions, too.

        Target modules are imported for the checks, and stay imported on failure.

        Raises:
            PatchSetError: with every violation found, before any attribute changes.
        """
        selected = [patch for patch in patches if not self.has(patch)]
        if not selected:
            return
        version = imported_version()
        selected = [patch for patch in selected if patch.is_needed_by(version)]
        check_version(selected, allow_version=allow_version)
        swaps = self._checked(selected)
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

    def _checked(self, patches: Sequence[Patch]) -> list[Swap]:
        """What to change for these patches. Raises one error with every violation."""
        swaps, violations = [], []
        claimed = {claim: swap.patch for swap in self._swaps for claim in swap.claims}
        for patch in patches:
            try:
                swap = _swap(patch)
            except (ImportError, AttributeError) as error:
                violations.append(
                    f"{patch.target} (patch {patch.name}) cannot be patched: {error}; the patch was tested with "
                    f"megatron-core {', '.join(patch.versions)}; install one of these"
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


def imported_version() -> str:
    """The release of the megatron.core that is imported, which in a checkout is not the installed one's."""
    try:
        return release_of(importlib.import_module("megatron.core").__version__)
    except ModuleNotFoundError as error:
        if error.name not in ("megatron", "megatron.core"):
            raise
        raise PatchSetError(["megatron-core is not installed; install it, or add a checkout to PYTHONPATH"]) from error


def check_version(patches: Iterable[Patch], *, allow_version: bool = False) -> None:
    """Raise UnsupportedVersionError, or log a warning, unless all patches were tested with this megatron-core."""
    version = imported_version()
    refused = [patch for patch in patches if version not in patch.versions]
    if refused:
        tested = sorted({each for patch in refused for each in patch.versions}, key=Version)
        message = (
            f"megatron-core {version} is imported from {sys.modules['megatron.core'].__file__}, but the patches were "
            f"tested only with {', '.join(tested)}: install or check out one of these, or allow this version"
        )
        if not allow_version:
            raise UnsupportedVersionError([message])
        logger.warning("%s. Continuing, since untested versions are allowed", message)


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
