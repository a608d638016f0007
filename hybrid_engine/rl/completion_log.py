"""Completions of a step as lines of JSON, and a table of a few of them in the terminal.

    OUT/completions/step-000010.jsonl

One line per completion: prompt, its further columns, text, token_ids, reward, rewards by function,
advantage (mean over its tokens), finish_reason, num_tokens, weight_version, and if servers drew it
weight_versions and logprobs by token; of a conversation turns, their number, and if it is a chat
all its messages. pandas and datasets read the files as they are.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.table import Table
from rich.text import Text

from hybrid_engine.errors import ConfigError, clipped
from hybrid_engine.files.durable import naming, write_text
from hybrid_engine.ports import Batch
from hybrid_engine.rl.conversation_state import Conversation, prompt_of

if TYPE_CHECKING:
    from hybrid_engine.rl.rewards import Scores

_NAME = re.compile(r"step-(\d{6,})\.jsonl")
_MOST_NBYTES = 1 << 16
"""Size of an array from which only its length is logged."""
_MAX_CHARACTERS = 400
"""Length at which texts are cut in the terminal."""


@dataclass(frozen=True)
class ScoredCompletion:
    """A completion of a step.

    Attributes:
        prompt: the element of `prompts`.
        completion: a `Completion` or a `Conversation`.
        reward: total reward; NaN if the completion was left out.
        rewards: rewards by name, if there are several functions.
        advantage: mean over its tokens.
        weight_version: version of the weights that drew it, or its first token.
    """

    prompt: Any
    completion: Any
    reward: float
    rewards: Mapping[str, float] = field(default_factory=dict)
    advantage: float = 0.0
    weight_version: int = 0

    @property
    def text(self) -> str:
        """Text of the completion; "" if the model has no tokenizer."""
        try:
            return str(self.completion.text)
        except ConfigError:
            return ""

    def line(self) -> dict[str, Any]:
        """Return the sample as a JSON object."""
        completion = self.completion
        columns = self.prompt if isinstance(self.prompt, Mapping) else {}
        values = {
            "prompt": prompt_of(self.prompt),
            "columns": {name: value for name, value in columns.items() if name != "prompt"},
            "text": self.text,
            "token_ids": list(completion.token_ids),
            "reward": self.reward,
            "rewards": dict(self.rewards),
            "advantage": self.advantage,
            "finish_reason": completion.finish_reason,
            "num_tokens": len(completion.token_ids),
            "weight_version": self.weight_version,
        }
        if getattr(completion, "versions", ()):
            values["weight_versions"] = list(completion.versions)
            values["logprobs"] = list(completion.logprobs)
        if isinstance(completion, Conversation):
            values["turns"] = len(completion.turns)
            values["messages"] = completion.messages
        return values


def samples_of(
    prompts: Sequence[Any],
    groups: Sequence[Sequence[Any]],
    scores: Scores,
    batch: Batch,
    version: int,
) -> list[ScoredCompletion]:
    """Return the completions of a step with their rewards and mean advantages.

    `version`: version of the weights, of completions that do not have their own.
    """
    # 0 outside the mask
    means = batch["advantages"].sum(dim=1) / batch["mask"].sum(dim=1).clamp(min=1)
    columns = [scores.totals, means.view_as(scores.totals), *scores.by_name.values()]
    figures = iter(torch.stack(columns, dim=-1).flatten(0, 1).tolist())
    samples = []
    for prompt, group in zip(prompts, groups, strict=True):
        for completion in group:
            total, advantage, *rewards = next(figures)
            by_name = dict(zip(scores.by_name, rewards, strict=True))
            # Of tokens of several versions the first one's.
            drawn = next(iter(getattr(completion, "versions", ())), version)
            samples.append(ScoredCompletion(prompt, completion, total, by_name, advantage, drawn))
    return samples


class CompletionLog:
    """Files of completions in the directory of a run. Only rank 0 writes."""

    def __init__(self, out: Path) -> None:
        self.directory = out / "completions"

    def path(self, step: int) -> Path:
        """Return the file of a step."""
        return self.directory / f"step-{step:06d}.jsonl"

    def write(self, step: int, samples: Sequence[ScoredCompletion]) -> None:
        """Write the completions of a step, completely or not at all. Raises FileError."""
        with naming("writing completions in", self.directory):
            self.directory.mkdir(exist_ok=True)
        lines = (json.dumps(_plain(sample.line()), ensure_ascii=False) for sample in samples)
        write_text(self.path(step), "".join(f"{line}\n" for line in lines))

    def cut_after(self, last: int) -> None:
        """Remove the files of steps after `last`, which are repeated. Raises FileError.

        Not in a directory that is a link: another run may write there, too.
        """
        if not self.directory.is_dir() or self.directory.is_symlink():
            return
        with naming("removing completions in", self.directory):
            for path in self.directory.iterdir():
                match = _NAME.fullmatch(path.name)
                if match and int(match[1]) > last:
                    path.unlink()


def samples_table(samples: Sequence[ScoredCompletion], num_prompts: int, most: int) -> Table:
    """Return a table of `most` completions: the first of each prompt, then the second of each."""
    num_samples = len(samples) // num_prompts
    table = Table("reward", "end", "prompt", "completion", show_lines=True)
    # Of prompts a and b with two samples each: a1, b1, a2, b2.
    mixed = [sample for first in range(num_samples) for sample in samples[first::num_samples]]
    for sample in mixed[:most]:
        cells = (
            f"{sample.reward:.4g}",
            sample.completion.finish_reason,
            _shown(sample.prompt),
            sample.text or str(list(sample.completion.token_ids)),
        )
        # As texts, so that brackets in them are no markup.
        table.add_row(*(Text(clipped(cell, _MAX_CHARACTERS)) for cell in cells))
    return table


def _shown(prompt: Any) -> str:
    """Return a prompt as one text; of a chat its last message."""
    plain = prompt_of(prompt)
    is_chat = isinstance(plain, Sequence) and plain and isinstance(plain[-1], Mapping)
    return str(plain[-1].get("content")) if is_chat else str(plain)


def _plain(value: Any) -> Any:
    """Return a value that JSON has: null in place of NaN, lists and texts in place of others.

    Bytes and large arrays, such as images, become their size.
    """
    if isinstance(value, Mapping):
        return {_plain(str(key)): _plain(part) for key, part in value.items()}
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, str):
        # Half a surrogate pair, as in a name of a file, has no UTF-8.
        return value.encode(errors="replace").decode()
    if isinstance(value, bytes) or getattr(value, "nbytes", 0) > _MOST_NBYTES:
        return f"{type(value).__name__} of {len(value)}"
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, Sequence):
        return [_plain(part) for part in value]
    return str(value)
