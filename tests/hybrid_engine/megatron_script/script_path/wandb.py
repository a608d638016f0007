"""Stand-in for package `wandb` as Megatron and we use it; logs to wandb.jsonl."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def _ignore(*args: Any, **kwargs: Any) -> None: ...


class Artifact:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    add_reference = add_file = _ignore


run = SimpleNamespace(log_artifact=_ignore, entity="nobody", project="nothing")
wandb_run = SimpleNamespace(Run=object)
plot = SimpleNamespace(histogram=_ignore)
config = SimpleNamespace(update=_ignore)
init = finish = _ignore


def Table(
    columns: list[str], data: list[list[str]] = (), rows: list[list[str]] = ()
) -> list[list[str]]:
    return [columns, *data, *rows]


def log(values: dict[str, Any], step: int) -> None:
    with Path("wandb.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, **values}, default=float) + "\n")
