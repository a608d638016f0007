"""Records of undocumented names: of an imported name, and of a name replaced temporarily."""

from __future__ import annotations

import dis
import importlib
import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce, wraps
from typing import Any

from hybrid_engine.backends.vllm.version import TESTED_VERSION
from hybrid_engine.errors import DependencyError, StateError
from hybrid_engine.ranks.torch_internals import PrivateName

logger = logging.getLogger(__name__)

Function = Callable[..., Any]
"""Function or method with any arguments, as those that are replaced have."""


def around(call: Function) -> Callable[[Function], Function]:
    """Return a `build` whose replacement calls `call(original, *args, **kwargs)`."""

    def build(original: Function) -> Function:
        @wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return call(original, *args, **kwargs)

        return replacement

    return build


@dataclass(frozen=True)
class Internal(PrivateName):
    """A private name that is imported when it is used.

    Attributes:
        keywords: parameters that are passed to it by name.
        attributes: attributes that are read of it, or of its instances.
        otherwise: the target that replaces it in versions of vLLM without it.
    """

    keywords: tuple[str, ...] = ()
    otherwise: str = ""
    attributes: tuple[str, ...] = ()

    def load(self) -> Any:
        module, _, path = self.target.partition(":")
        try:
            return _find(module, path.split("."))
        except (ImportError, AttributeError):
            if not self.otherwise:
                raise
            return Internal(self.otherwise, self.reason).load()

    def problems(self) -> Iterator[str]:
        """Yield a description if it cannot be loaded, and of all that it lacks."""
        try:
            loaded = self.load()
        except (ImportError, AttributeError) as error:
            lacks_module = isinstance(error, ModuleNotFoundError)
            if lacks_module and not str(error.name).startswith(("vllm", "torch")):
                # The package may not be needed on this machine.
                logger.warning("%s was not looked up: %s", self.target, error)
            else:
                yield f"{self.target}: {error} ({self.reason})"
            return
        lacking = [f".{name} is missing" for name in self.attributes if not _has(loaded, name)]
        for keyword in self.keywords:
            if keyword not in inspect.signature(loaded).parameters:
                lacking.append(f" takes no {keyword}")
        yield from (f"{self.target}{problem} ({self.reason})" for problem in lacking)

    def is_type_of(self, instance: object) -> bool:
        """Return whether this is the exact class of an object, no base class; imports nothing."""
        kind = type(instance)
        return f"{kind.__module__}:{kind.__qualname__}" == self.target


@dataclass(frozen=True)
class Replacement(Internal):
    """A private name that is replaced for a while.

    Attributes:
        remove_when: the condition under which it can be deleted.
    """

    remove_when: str = ""

    @property
    def targets(self) -> tuple[str, ...]:
        """The target, and the one that replaces it in other versions."""
        return (self.target, self.otherwise) if self.otherwise else (self.target,)

    @contextmanager
    def replaced(self, build: Callable[[Any], Any], owner: Any = None) -> Iterator[None]:
        """Replace the target by `build(original)` in this context.

        With an `owner` the target is replaced in this object only. Contexts nest. If other code
        replaces the target in the context, its replacement stays.

        Raises DependencyError for a missing target, before anything changes, and StateError at the
        end if other code has replaced the target, unless the block raises.
        """
        owner, name, original = self._place(self.target, owner)
        replacement = build(original)
        is_inherited = name not in vars(owner)
        setattr(owner, name, replacement)
        try:
            yield
            if vars(owner).get(name) is not replacement:
                raise StateError(
                    f"{self.target} was replaced by other code in the meantime, "
                    "whose replacement stays",
                    code="replaced-by-other-code",
                )
        finally:
            if vars(owner).get(name) is replacement:
                if is_inherited:
                    # Not the original: a bound method in its owner would keep the owner alive.
                    delattr(owner, name)
                else:
                    setattr(owner, name, original)

    def _place(self, target: str, owner: Any) -> tuple[Any, str, Any]:
        """Return the target's owner, its name there, and its value."""
        module, _, path = target.partition(":")
        *owners, name = path.split(".")
        try:
            place = _find(module, owners) if owner is None else owner
            return place, name, getattr(place, name)
        except (ImportError, AttributeError) as error:
            if self.otherwise and target != self.otherwise:
                return self._place(self.otherwise, owner)
            raise DependencyError(
                f"{self.target} is missing: vLLM {TESTED_VERSION} has it; install that version",
                code="name-is-missing",
            ) from error


def _find(module: str, path: Sequence[str]) -> Any:
    return reduce(getattr, filter(None, path), importlib.import_module(module))


def _has(owner: object, name: str) -> bool:
    """Return whether a module, a class or the objects of a class have an attribute.

    An object's attributes are annotated in its class, or set in one of its methods.
    """
    if hasattr(owner, name) or not isinstance(owner, type):
        return hasattr(owner, name)
    namespaces = [vars(base) for base in owner.__mro__]
    if any(name in namespace.get("__annotations__", ()) for namespace in namespaces):
        return True
    for namespace in namespaces:
        for value in namespace.values():
            method = inspect.unwrap(value) if inspect.isfunction(value) else None
            # Disassembling is slow, so only methods that mention the name are disassembled.
            if method is None or name not in method.__code__.co_names:
                continue
            instructions = dis.get_instructions(method)
            if any(
                (instruction.opname, instruction.argval) == ("STORE_ATTR", name)
                for instruction in instructions
            ):
                return True
    return False
