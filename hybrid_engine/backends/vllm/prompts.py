"""Prompts and completions in the forms that transformers' `generate` and chat programs use.

[B, S] tensor     -> [B * n, S + longest] tensor: each prompt and its completion, padded on the right
texts             -> for each prompt, n texts
lists of ids      -> for each prompt, n `Completion`s
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from hybrid_engine.errors import ConfigError, Violation

if TYPE_CHECKING:
    from hybrid_engine.backends.vllm.engine_settings import Completion, Sampling

Prompts = torch.Tensor | Sequence[str] | Sequence[Sequence[int]]
Generate = Callable[[Sequence[Sequence[int]], "Sampling"], "list[list[Completion]]"]


def complete(
    prompts: Prompts,
    sampling: Sampling,
    generate: Generate,
    model_dir: str,
    pad_token_id: int,
    attention_mask: torch.Tensor | None = None,
) -> Any:
    """Completions of the prompts, in the form that theirs is answered in.

    Args:
        prompts: see above; token ids [B, S] int64.
        sampling: `n` completions each.
        generate: completes lists of token ids.
        model_dir: where texts find their tokenizer.
        pad_token_id: fills the rows of a tensor.
        attention_mask: [B, S]: 0 where a prompt is padded, on either side. None: no padding.

    Raises ConfigError for prompts of no such form, a mask of another shape, or texts without a tokenizer.
    """
    if isinstance(prompts, torch.Tensor):
        return _complete_rows(prompts, sampling, generate, pad_token_id, attention_mask)
    if prompts and all(isinstance(prompt, str) for prompt in prompts):
        tokenizer = _tokenizer(model_dir)
        completions = generate([tokenizer(prompt)["input_ids"] for prompt in prompts], sampling)
        return [
            [tokenizer.decode(one.token_ids, skip_special_tokens=True) for one in of_prompt]
            for of_prompt in completions
        ]
    return generate(prompts, sampling)  # type: ignore[arg-type]  # lists of ids, or refused there by name


def _complete_rows(
    prompts: torch.Tensor, sampling: Sampling, generate: Generate, pad: int, mask: torch.Tensor | None
) -> torch.Tensor:
    if prompts.dim() != 2 or prompts.is_floating_point() or (mask is not None and mask.shape != prompts.shape):
        masked = "" if mask is None else f" with a mask of shape {tuple(mask.shape)}"
        problem = f"{prompts.dtype} of shape {tuple(prompts.shape)}{masked}"
        raise ConfigError([Violation("prompts", problem, "Pass token ids [B, S], and a mask of that shape")])
    kept = torch.ones_like(prompts, dtype=torch.bool) if mask is None else mask.bool()
    completions = generate([row[keep].tolist() for row, keep in zip(prompts, kept, strict=True)], sampling)
    rows = [
        torch.cat([prompt, prompt.new_tensor(one.token_ids)])
        for prompt, of_prompt in zip(prompts, completions, strict=True)
        for one in of_prompt
    ]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad)


def _tokenizer(model_dir: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    except (OSError, ValueError) as error:
        problem = f"texts, but {model_dir} has no tokenizer ({error})"
        raise ConfigError([Violation("prompts", problem, "Save the tokenizer there, or pass token ids")]) from error
