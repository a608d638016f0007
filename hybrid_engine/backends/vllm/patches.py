"""What of vLLM's and torch's is replaced at run time: a record each, and the one way to do it.

    with RANK.replaced(lambda rank: "0"):           # undone at the end, also by an error
        ... vLLM makes a configuration ...
    LOAD_LORA.replace(build, owner=manager)         # on one object, for as long as it lives

A record of its own and not `megatron_patches.Patch`: that one is for names that stay replaced, in every module that
took them over, by versions of megatron-core; here names change for the time in which groups are built.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from hybrid_engine.backends.vllm.version import TESTED_VERSION, require_vllm
from hybrid_engine.errors import DependencyError, StateError


@dataclass(frozen=True)
class Patch:
    """One name that is replaced.

    Attributes:
        target: "module:attr.path", or "os:environ[NAME]".
        reason: why, one sentence.
        remove_when: the condition under which it may go.
        versions: of vLLM, that it was tested with.
    """

    target: str
    reason: str
    remove_when: str
    versions: tuple[str, ...] = (TESTED_VERSION,)

    def replace(self, build: Callable[[Any], Any], owner: Any = None) -> Replaced:
        """Put `build(original)` in place of the original, in `owner` if one is given, else where the target says.

        Raises DependencyError for another vLLM or a missing target and StateError when it is replaced already; both
        before anything changes.
        """
        if require_vllm().partition("+")[0] not in self.versions:
            raise DependencyError(f"{self.target} is replaced with vLLM {', '.join(self.versions)} only: {self.reason}")
        place = self._place(owner)
        _active[:] = [other for other in _active if other.place.owner() is not None]
        if any(other.place == place for other in _active):
            raise StateError(f"{self.target} is replaced already: undo that first")
        original = place.get()
        replaced = Replaced(self, place, original, build(original))
        place.put(replaced.replacement)
        _active.append(replaced)
        return replaced

    def is_replaced(self, owner: Any) -> bool:
        """Whether this patch replaced the attribute of `owner`."""
        return any(other.patch is self and other.place.owner() is owner for other in _active)

    @contextlib.contextmanager
    def replaced(self, build: Callable[[Any], Any], owner: Any = None) -> Iterator[None]:
        """Within this context the target is `build(original)`. Raises as `replace`."""
        replaced = self.replace(build, owner)
        try:
            yield
        finally:
            replaced.revert()

    def _place(self, owner: Any) -> _Place:
        module, _, path = self.target.partition(":")
        if path.startswith("environ["):
            return _Place(weakref.ref(os.environ), path.removeprefix("environ[").removesuffix("]"))
        *owners, attribute = path.split(".")
        if owner is None:
            owner = importlib.import_module(module)
            for name in owners:
                owner = getattr(owner, name, None)
        if not hasattr(owner, attribute):
            raise DependencyError(f"{self.target} is missing: this vLLM differs from {', '.join(self.versions)}")
        return _Place(weakref.ref(owner), attribute)


@dataclass(frozen=True)
class Replaced:
    """A replacement that was made; to undo it nothing else is needed."""

    patch: Patch
    place: _Place
    original: Any
    replacement: Any

    def revert(self) -> None:
        """Put the original back. Raises StateError, and changes nothing, when somebody else replaced it since."""
        if self.place.get() != self.replacement:
            raise StateError(f"{self.patch.target} was replaced by somebody else meanwhile: undo that first")
        self.place.put(self.original)
        _active.remove(self)


@dataclass(frozen=True)
class _Place:
    """An attribute of an object, which need not live on, or a variable of the environment."""

    owner: Callable[[], Any]
    name: str

    def get(self) -> Any:
        owner = self.owner()
        return owner[self.name] if owner is os.environ else getattr(owner, self.name)

    def put(self, value: Any) -> None:
        owner = self.owner()
        if owner is os.environ:
            owner[self.name] = value
        else:
            setattr(owner, self.name, value)


_active: list[Replaced] = []

RANK = Patch(
    "os:environ[RANK]",
    "vLLM takes RANK for a number within one instance, of which the world may hold several",
    "the external launcher takes a rank and a world of its own",
)
MAKE_GROUP = Patch(
    "vllm.distributed.parallel_state:init_model_parallel_group",
    "Groups are made of the ranks that take the listed positions, and without a queue in shared memory",
    "vLLM takes an order of ranks, and makes no queue for ranks that never broadcast objects",
)
NEW_GROUP = Patch(
    "torch.distributed:new_group",
    "Process groups of vLLM's must count their members as listed; torch sorts them, and gathers come in that order",
    "vLLM passes sort_ranks=False",
)
SHARE_MEMORY = Patch(
    "vllm.distributed.device_communicators.cpu_communicator:_CPUSHMDistributed._init_cpu_shm",
    "Shared memory loses its name once all have mapped it, so that nothing stays when all ranks are killed",
    "vLLM unlinks it itself",
)
ROTATE = Patch(
    "vllm.model_executor.custom_op:CustomOp._forward_method",
    "The CPU kernel rotates the wrong elements of queries given as [tokens, heads, elements], as MLA does",
    "the kernel follows strides",
)
LOAD_LORA = Patch(
    "vllm.lora.worker_manager:WorkerLoRAManager._load_adapter",
    "The one place in which a worker reads a LoRA's directory; its tensors come from memory",
    "vLLM's requests carry tensors",
)
PATCHES = (RANK, MAKE_GROUP, NEW_GROUP, SHARE_MEMORY, ROTATE, LOAD_LORA)
