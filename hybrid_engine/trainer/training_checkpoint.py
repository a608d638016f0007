"""Checkpoints of training state for any number of ranks and any layout.

Keys of the checkpoint (trainer/checkpoint_directory.py):

    model.lm_head.weight               canonical tensors, in the precision of the optimizer: each
    optimizer.lm_head.weight.exp_avg   rank writes and reads its boxes (canonical_state.py)
    values                             versions, and hyperparameters by canonical name
    rank0/values                       layout of a rank, in which alone it reads the following:
    rank0/generator.cpu                states of random generators
    rank0/part.NAME.exp_avg.0          what has no canonical name: padding, adapters
"""

from __future__ import annotations

import logging
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from hybrid_engine.backends.training_side import require_finite_to_save
from hybrid_engine.errors import StateError, first_of
from hybrid_engine.ranks.agreement import Agreement
from hybrid_engine.ranks.job import Job
from hybrid_engine.ranks.torch_internals import Tensors
from hybrid_engine.records.regions import Shapes
from hybrid_engine.trainer.canonical_state import (
    STEPPED,
    TENSOR,
    Boxes,
    Entries,
    Weight,
    add_boxes,
    add_parts,
    flat_part,
)
from hybrid_engine.trainer.checkpoint_directory import SavedCheckpoint, below, save

logger = logging.getLogger("hybrid_engine")

_VALUES = "values"
_MODEL = "model.{}"
_OPTIMIZER = "optimizer."
_GENERATOR = "generator."

_NOT_RESTORED = ("params", "max_lr", "min_lr")
"""Keys of a parameter group: its parameters, and limits that belong to the present configuration.

A schedule prefers these limits to its own settings, so they must not come from a checkpoint.
"""

_Group = tuple[dict[str, Any], list[str]]
"""Hyperparameters of a parameter group, and names of its weights."""

_OfRank = tuple[int, bool, list[_Group]]
"""Version of a rank's weights, whether it has adapters, and its parameter groups."""

_NUM_CHANGES = 4
"""Maximum number of differences of a layout in a message."""

_Kinds = Mapping[str, Mapping[str, TensorStorageMetadata | None]]
"""Key of a weight up to the kind of optimizer state -> kind -> its entry; None: a plain value."""


class CheckpointedState(Protocol):
    """State of a trainer on this rank, as a checkpoint has it."""

    @property
    def shapes(self) -> Shapes:
        """Canonical name -> shape of the whole tensor."""

    @property
    def version(self) -> int:
        """Number of optimizer steps that this rank's weights have taken."""

    def settle(self) -> None:
        """Finish what changes weights in the background. Raises StateError for absent state."""

    def weights(self) -> Sequence[Weight]:
        """Return all tensors of this rank, with the state of the optimizer for them."""

    def layout(self) -> Mapping[str, int | str]:
        """Return what must be equal for entries of a rank to be read again."""

    def generators(self) -> Tensors:
        """Return the states of this rank's random generators."""

    def values(self) -> dict[str, Any]:
        """Return further plain values, which all ranks have in common."""

    def restore(self, values: Mapping[str, Any], generators: Tensors) -> None:
        """Restore values and, if there are any, random generators, once all weights are restored.

        Copies what the optimizer steps on to weights in another precision. Collective.
        """


class TrainingCheckpoints:
    """Checkpoints of a trainer, for any layout.

    All training state must be on the device.

    Args:
        state: of the trainer.
        job: of all ranks.
        owner: closes this.
    """

    def __init__(self, state: CheckpointedState, job: Job, owner: ExitStack) -> None:
        self._state = state
        self._job = job
        self._of_rank = f"rank{job.rank}/"
        self._written: Future[None] | None = None
        self._ends = ExitStack()
        owner.callback(self.close)

    def save(
        self,
        directory: str | Path,
        *,
        check_nan: bool = True,
        wait: bool = True,
    ) -> Future[None] | None:
        """Write parameters, optimizer state, generators and weight version. Collective.

        `checkpoint_directory.save` describes errors and the effect of a kill. Before anything is
        written, all ranks raise if any value is not finite on one of them, with a WeightError there
        that names the tensors; `check_nan=False` skips the check.

        With `wait=False` the state is copied to host memory, and a thread writes it while the
        caller goes on. Returns its future; the next save or load, or `close`, waits for it and
        raises its error, on all ranks.
        """
        self._finish()
        job = self._job
        state = self._state
        with job.agreement.phase("looking for values that are not finite"):
            state.settle()
            weights = state.weights()
            entries = self._entries_to_save(weights, copies=False)
            if check_nan:
                require_finite_to_save(lambda: _tensors_in(entries, job.rank))
            if not wait:
                entries = self._entries_to_save(weights, copies=True)
            groups = list(_groups_of(weights, self._of_rank))
            of_rank = (state.version, bool(_nameless(weights)), groups)
        by_rank = job.agreement.gather(of_rank, _OfRank, "hyperparameters", sys.maxsize)
        if job.rank == 0:
            versions, are_nameless, all_groups = zip(*by_rank, strict=True)
            entries[_VALUES] = {
                **state.values(),
                "weight_version": max(versions),
                "has_adapters": any(are_nameless),
                "groups": list(chain(*all_groups)),
            }
        if wait:
            save(directory, entries, job)
        else:
            self._written = self._save_in_thread(directory, entries)
        return self._written

    def close(self) -> None:
        """Wait for a save that is being written. Raises its error on all ranks."""
        with self._ends:
            self._finish()

    def _finish(self) -> None:
        written = self._written
        self._written = None
        if written is not None:
            written.result()

    @cached_property
    def _save_in_thread(self) -> Callable[..., Future[None]]:
        """`save` in a thread, with an agreement for it alone: the main thread's goes on meanwhile.

        `torch.distributed.checkpoint.async_save` would exchange pickles in the default group, and
        its stager copies whole storages, which fails for those of elastic memory.
        """
        job = self._job
        agreement = Agreement(job.world, job.hosts, job.timeout_seconds)
        self._ends.callback(agreement.close)
        job_of_thread = replace(job, agreement=agreement)
        thread = self._ends.enter_context(ThreadPoolExecutor(1, "checkpoint writer"))
        return lambda directory, entries: thread.submit(save, directory, entries, job_of_thread)

    @torch.no_grad()
    def load(self, directory: str | Path) -> None:
        """Restore a checkpoint, bit by bit in the same layout. Collective.

        In another layout random generators and the padding of the vocabulary stay as they are.
        Parameters and main parameters keep their storage. Moments get new storage, so both old and
        new moments are in memory until all are restored. Before any rank changes anything, all
        entries are verified by checksum, compared with the trainer, and read into host memory;
        errors are raised only until then, on all ranks.

        Raises:
            StateError: if there is no such checkpoint, if it belongs to another model, or if state
                without canonical names, of adapters, was saved in another layout.
            FileError: names a file that cannot be read or differs from the file that was written.
        """
        self._finish()
        job = self._job
        state = self._state
        with job.agreement.phase("reading the checkpoint"):
            state.settle()
        saved = SavedCheckpoint(directory, job)
        with job.agreement.phase("reading the checkpoint"):
            weights = state.weights()
            shapes = state.shapes
            values = _values_in(saved)
            changes = self._layout_changes(saved, weights)
        flags = [bool(changes), bool(_nameless(weights))]
        has_changed, has_adapters = job.agreement.any_of(flags, "reading the checkpoint")
        with job.agreement.phase("reading the checkpoint"):
            may_lose = has_changed and has_adapters
            if may_lose or has_adapters != values["has_adapters"]:
                raise StateError(
                    f"{saved.path} was written in another layout "
                    f"({first_of(changes, _NUM_CHANGES) or 'of other ranks'}), or only one of it "
                    "and this model has adapters: resume with that layout and adapters",
                    code="checkpoint-of-another-layout",
                )
            of_rank = "" if has_changed else self._of_rank
            kinds = _kinds_in(saved, self._of_rank)
            copies = [_HostCopy(weight, kinds, of_rank) for weight in weights]
            entries: Entries = {}
            for copy in copies:
                copy.add_to(entries, shapes)
            saved.require_fit(
                [
                    *_differences(saved, entries, shapes),
                    *_different_steps(weights, kinds, values["groups"]),
                    *_different_values(values, state.values()),
                ]
            )
            saved.read(entries)
            for copy in copies:
                copy.take_numbers(entries)
            generators = f"{of_rank}{_GENERATOR}"
            saved_generators = below(saved.read_all(generators), generators) if of_rank else {}
            # The last allocation of device memory, so restoring cannot fail for lack of it.
            for copy in copies:
                copy.move_moments()
        with job.agreement.phase("restoring the checkpoint"):
            for copy in copies:
                copy.restore()
            _restore_groups(weights, values["groups"], self._of_rank)
            state.restore(values, saved_generators)
        if has_changed and job.rank == 0:
            logger.warning(
                "%s was written in another layout (%s): random generators are not restored",
                saved.path,
                first_of(changes, _NUM_CHANGES) or "of other ranks",
            )

    def _entries_to_save(self, weights: Iterable[Weight], *, copies: bool) -> Entries:
        """Return all tensors and values of this rank: copies, or views of live memory."""
        state = self._state
        shapes = state.shapes
        entries: Entries = {}
        for weight in weights:
            part = f"{self._of_rank}part.{weight.name}."
            for kind, value in weight.saved.items():
                key = _key_of(kind)
                if copies and isinstance(value, torch.Tensor):
                    value = value.detach().to("cpu", copy=True)
                if not (isinstance(value, torch.Tensor) and value.dim()):
                    # Under all names: another layout may have one of these tensors
                    # without the others.
                    for name in weight.names:
                        entries[key.format(name)] = value
                    if not weight.names:
                        entries[part + kind] = value
                    continue
                add_parts(entries, part + kind, weight, value)
                if not weight.is_copy:
                    add_boxes(entries, key, shapes, weight, value)
        for key, value in state.generators().items():
            entries[f"{self._of_rank}{_GENERATOR}{key}"] = value
        entries[self._of_rank + _VALUES] = dict(state.layout())
        return entries

    def _layout_changes(self, saved: SavedCheckpoint, weights: Iterable[Weight]) -> list[str]:
        """Return the differences of the layout in which this rank's entries were saved."""
        entries = saved.entries(self._of_rank)
        if _VALUES not in entries:
            return [f"it has no rank {self._job.rank}"]
        layout = saved.value(self._of_rank + _VALUES)
        changes = [
            f"{name} {layout.get(name)}, now {value}"
            for name, value in self._state.layout().items()
            if layout.get(name) != value
        ]
        # Padding depends on the size of the vocabulary, and its parts on the size of buckets.
        parts: Entries = {}
        for weight in weights:
            (kind, live), *_ = weight.saved.items()
            add_parts(parts, f"part.{weight.name}.{kind}", weight, live)
        for key, part in parts.items():
            entry = entries.get(key)
            if entry is None or entry.size != part.shape:
                changes.append(f"other elements of {key}")
        return changes


class _HostCopy:
    """Saved values of a weight, in host memory.

    Args:
        weight: the weight.
        kinds: kinds of saved optimizer state.
        of_rank: prefix of this rank's entries; "": they are not read.
    """

    def __init__(self, weight: Weight, kinds: _Kinds, of_rank: str) -> None:
        self._weight = weight
        self._part = f"{of_rank}part.{weight.name}."
        self._reads_parts = bool(of_rank)
        # Key of its optimizer state, without the kind. Its canonical tensors have equal numbers.
        self._state_key = _key_of("").format(*weight.names[:1]) if weight.names else self._part
        self._numbers: dict[str, Any] = {}
        (first_kind, live), *_ = weight.saved.items()
        # Elements that are not read keep their values.
        first = live.detach().to("cpu", copy=True)
        self._values = {first_kind: first}
        if weight.optimizer is None:
            return
        for kind, entry in kinds.get(self._state_key, {}).items():
            if entry is None:
                self._numbers[kind] = None
            elif not entry.size:
                # torch's Adam counts steps in a tensor without dims.
                self._numbers[kind] = torch.empty((), dtype=entry.properties.dtype)
            else:
                dtype = entry.properties.dtype
                # What no entry has, such as padding in another layout, has moments of 0.
                self._values[kind] = torch.zeros_like(first, dtype=dtype)

    def add_to(self, entries: Entries, shapes: Shapes) -> None:
        """Add what is to be read."""
        weight = self._weight
        for kind, values in self._values.items():
            add_boxes(entries, _key_of(kind), shapes, weight, values)
            if self._reads_parts:
                add_parts(entries, self._part + kind, weight, values)
        for kind, value in self._numbers.items():
            entries[self._state_key + kind] = value

    def take_numbers(self, entries: Entries) -> None:
        """Take numbers that were read; each weight has its own."""
        for kind in self._numbers:
            value = entries[self._state_key + kind]
            self._numbers[kind] = value.clone() if isinstance(value, torch.Tensor) else value

    def move_moments(self) -> None:
        """Move the state of the optimizer to the device."""
        for kind, values in self._values.items():
            if kind not in (TENSOR, STEPPED):
                self._values[kind] = values.to(self._weight.tensor.device)

    def restore(self) -> None:
        """Write the weight, or what is stepped, and the state of the optimizer."""
        weight = self._weight
        (kind, first), *moments = self._values.items()
        flat_part(weight.saved[kind]).copy_(flat_part(first))
        if weight.stepped is not None and weight.optimizer is not None:
            weight.optimizer.state.pop(weight.stepped, None)
            if state := {**self._numbers, **dict(moments)}:
                weight.optimizer.state[weight.stepped] = state


def _key_of(kind: str) -> str:
    """Return the key of a canonical tensor's values of this kind, with {} for its name."""
    return _MODEL if kind in (TENSOR, STEPPED) else f"{_OPTIMIZER}{{}}.{kind}"


def _tensors_in(entries: Entries, rank: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of entries that may have values which are not finite, with their keys."""
    for key, value in entries.items():
        views = value.views.values() if isinstance(value, Boxes) else [value]
        for view in views:
            if isinstance(view, torch.Tensor):
                yield f"{key} on rank {rank}", view


def _kinds_in(saved: SavedCheckpoint, of_rank: str) -> _Kinds:
    kinds: defaultdict[str, dict[str, TensorStorageMetadata | None]] = defaultdict(dict)
    for key, entry in saved.entries(_OPTIMIZER).items():
        # "lm_head.weight.exp_avg" is kind exp_avg of "lm_head.weight".
        name, _, kind = key.rpartition(".")
        kinds[f"{_OPTIMIZER}{name}."][kind] = entry
    for key, entry in saved.entries(f"{of_rank}part.").items():
        name, _, kind = key.rpartition(".")
        if kind.isdigit():
            # A run of elements. All runs of a kind have its dtype.
            name, _, kind = name.rpartition(".")
        if kind not in (TENSOR, STEPPED):
            kinds[f"{of_rank}part.{name}."][kind] = entry
    return kinds


def _values_in(saved: SavedCheckpoint) -> dict[str, Any]:
    """Return the values of all ranks. Raises StateError if there are none."""
    values = saved.value(_VALUES) if _VALUES in saved.entries("") else {}
    if "groups" not in values:
        raise StateError(
            f"no checkpoint of this version: {saved.path}. Load it with the version that saved it",
            code="checkpoint-of-another-trainer",
        )
    return dict(values)


def _nameless(weights: Iterable[Weight]) -> list[str]:
    """Return the weights without canonical names that are trained: adapters."""
    return [weight.name for weight in weights if weight.stepped is not None and not weight.names]


def _different_steps(
    weights: Iterable[Weight],
    kinds: _Kinds,
    groups: Iterable[_Group],
) -> Iterator[str]:
    """Yield the problem of an optimizer that counts its steps elsewhere than the one saved."""
    counts_by_group = any("step" in settings for settings, _ in groups)
    counts_by_weight = any("step" in of_weight for of_weight in kinds.values())
    for optimizer in _optimizers(weights):
        is_of_torch = type(optimizer).__module__.startswith("torch.optim")
        if (is_of_torch and counts_by_group) or (not is_of_torch and counts_by_weight):
            yield f"{type(optimizer).__name__} counts its steps elsewhere than the optimizer saved"


def _different_values(saved: Mapping[str, Any], live: Mapping[str, Any]) -> Iterator[str]:
    if (saved["grad_scaler"] is None) != (live["grad_scaler"] is None):
        yield "grad_scaler: only one of the checkpoint and this optimizer has a state of it"
    # Neither older checkpoints nor those of Megatron have these.
    key = "adapters"
    # What one side lacks is compared with itself.
    if saved.get(key, live.get(key)) != live.get(key, saved.get(key)):
        yield f"{key}: their modules or scaling, alpha / rank, differ"
    if saved["norms_minus_one"] != live["norms_minus_one"]:
        yield "factors of norms are stored minus 1 in only one of the checkpoint and this model"


def _differences(saved: SavedCheckpoint, entries: Entries, shapes: Shapes) -> Iterator[str]:
    """Yield the problems that prevent reading these entries."""
    known = saved.entries("")
    prefix = _MODEL.format("")
    for key in below(known, prefix).keys() - shapes.keys():
        yield f"{prefix}{key} is unknown to this model"
    for key, value in entries.items():
        if key not in known:
            yield f"{key} is missing"
            continue
        entry = known[key]
        if value is None or entry is None:
            continue
        size = value.size()
        dtype = entry.properties.dtype
        if size != entry.size or value.dtype != dtype:
            yield f"{key}: {tuple(entry.size)} of {dtype}, expected {tuple(size)} of {value.dtype}"


def _groups_of(weights: Sequence[Weight], of_rank: str) -> Iterator[_Group]:
    """Yield the hyperparameters of each parameter group, and the names of its weights."""
    by_stepped = {id(weight.stepped): weight for weight in weights}
    for optimizer in _optimizers(weights):
        for group in optimizer.param_groups:
            settings = {key: value for key, value in group.items() if key not in _NOT_RESTORED}
            members = [by_stepped[id(stepped)] for stepped in group["params"]]
            names = [name for weight in members for name in weight.names or [of_rank + weight.name]]
            yield settings, names


def _restore_groups(weights: Sequence[Weight], saved: Sequence[_Group], of_rank: str) -> None:
    by_name = {name: settings for settings, names in saved for name in names}
    by_identity = {_identity(settings): settings for settings, _ in saved}
    # In the order of the optimizers' groups.
    live = _groups_of(weights, of_rank)
    groups = (group for optimizer in _optimizers(weights) for group in optimizer.param_groups)
    for group, (settings, names) in zip(groups, live, strict=True):
        # A rank may have no part of a group's weights.
        restored = by_identity.get(_identity(settings), {})
        # All weights of a group have the same settings, so the first one tells them.
        for name in names[:1]:
            restored = by_name.get(name, {})
        for key, value in restored.items():
            # The first step adds a key of some optimizers. They have tuples, e.g. Adam's betas.
            if key in group or key == "step":
                group[key] = tuple(value) if isinstance(value, list) else value


def _identity(settings: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what distinguishes the groups of Megatron's optimizers."""
    keys = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr", "default_config")
    return tuple(settings.get(key) for key in keys)


def _optimizers(weights: Iterable[Weight]) -> list[torch.optim.Optimizer]:
    optimizers = {id(weight.optimizer): weight.optimizer for weight in weights}
    return list(filter(None, optimizers.values()))
