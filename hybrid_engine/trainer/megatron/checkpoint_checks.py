"""Whether a saved state fits a live actor, found out before the actor changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch


def differences(found: Any, live: Any, where: str = "") -> Iterator[str]:
    """What of a saved state cannot be restored into the `live` one, each with its place.

    Mappings need the same keys, sequences the same length, tensors the same shape and dtype, and other values the same
    type. Optimizers' own states, under "members", are left to `optimizer_differences`.
    """
    if isinstance(live, torch.Tensor):
        yield from _tensor_differences(found, live, where)
    elif isinstance(live, Mapping):
        if not isinstance(found, Mapping):
            yield f"{where or 'the file'} is a {type(found).__name__}"
            return
        for key in live.keys() | found.keys():
            if key not in found:
                yield f"{where}{key} is missing"
            elif key not in live:
                yield f"{where}{key} is unknown to this model"
            elif key != "members" and not str(key).endswith("_extra_state"):  # of fp8; its size may change
                yield from differences(found[key], live[key], f"{where}{key}: ")
    elif isinstance(live, Sequence) and not isinstance(live, str):
        if not isinstance(found, Sequence) or len(found) != len(live):
            size = f"{len(found)} items" if isinstance(found, Sequence) else f"a {type(found).__name__}"
            yield f"{where}{size}, expected {len(live)} items"
            return
        for index, (one, other) in enumerate(zip(found, live, strict=True)):
            yield from differences(one, other, f"{where}{index}: ")
    elif type(found) is not type(live):
        yield f"{where}a {type(found).__name__}, expected a {type(live).__name__}"


def _tensor_differences(found: Any, live: torch.Tensor, where: str) -> Iterator[str]:
    if not isinstance(found, torch.Tensor):
        yield f"{where}a {type(found).__name__}, expected a tensor"
    elif (found.shape, found.dtype) != (live.shape, live.dtype):
        yield f"{where}{tuple(found.shape)} of {found.dtype}, expected {tuple(live.shape)} of {live.dtype}"
    elif found.layout != live.layout:
        yield f"{where}{found.layout}, expected {live.layout}"


def optimizer_differences(found: Any, optimizer: torch.optim.Optimizer, where: str) -> Iterator[str]:
    """The same of a torch optimizer's state dict, where moments and a group's step appear with the first step."""
    live = optimizer.state_dict()
    if not isinstance(found, Mapping) or not {"state", "param_groups"} <= found.keys():
        yield f"{where}not the state of an optimizer"
        return
    groups = [group.get("params") for group in found["param_groups"]]
    if groups != [group["params"] for group in live["param_groups"]]:
        yield f"{where}{len(groups)} groups of {sum(map(len, groups))} parameters, not those of this optimizer"
        return
    for index, (group, now) in enumerate(zip(found["param_groups"], live["param_groups"], strict=True)):
        yield from (f"{where}group {index}: {key} is missing" for key in now.keys() - group.keys() - {"step"})
    params = [param for group in optimizer.param_groups for param in group["params"]]
    keys = {key for state in found["state"].values() for key in state}
    for index, state in found["state"].items():
        if index not in range(len(params)):
            yield f"{where}state of parameter {index}, but there are {len(params)} parameters"
            continue
        yield from (f"{where}parameter {index}: {key} is missing" for key in keys - state.keys())
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim() and value.shape != params[index].shape:
                yield f"{where}parameter {index}: {key} {tuple(value.shape)}, expected {tuple(params[index].shape)}"
