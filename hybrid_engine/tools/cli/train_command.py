"""Command `train`: a whole run from one file, on this machine or as a program of `run`.

hybrid-engine train run.yaml run.grpo.steps=10 --ranks 2
hybrid-engine run --nnodes 2 ... -m hybrid_engine train run.yaml         several nodes
hybrid-engine train run.yaml --ranks 8 --dry-run                         starts no engine
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hybrid_engine.errors import Violation
from hybrid_engine.tools.cli.options import OVERRIDE, integer_option, refuse, refusing, split_words
from hybrid_engine.tools.cli.plan_command import plan
from hybrid_engine.tools.cli.run_command import start_ranks
from hybrid_engine.tools.plan.cluster_plan import Cluster

if TYPE_CHECKING:
    from hybrid_engine.rl.run_settings import RunSettings

_SECONDS_FOR_REWARD = 60.0


def train(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="CONFIG.yaml KEY=VALUE",
            help="The run's file, and keys to set in it, for example run.grpo.steps=10.",
            show_default=False,
        ),
    ],
    ranks: Annotated[
        int | None,
        integer_option("Ranks to start on this machine; default: one for each GPU, or one."),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Check everything; print the first prompt, its rewards, and the plan.",
        ),
    ] = False,
) -> None:
    """Train a model by GRPO or PPO: engines, data, reward and algorithm in one file.

    The same command goes on with a run that was stopped.
    """
    violations: list[Violation] = []
    files, overrides = split_words(words, OVERRIDE, violations)
    if violations or not files:
        missing = Violation("CONFIG", "is missing", "Name the run's file", code="is-missing")
        refuse(violations or [missing])
    is_rank = "RANK" in os.environ
    if is_rank and (dry_run or ranks is not None):
        problem = "is an option of the command that starts the ranks, and this is one of them"
        key = "--dry-run" if dry_run else "--ranks"
        refuse([Violation(key, problem, "Leave it out, or unset RANK", code="not-supported")])
    if is_rank:
        from hybrid_engine.rl.run_settings import RunSettings

        # Errors end the rank as those of any program do (ranks/uncaught.py).
        RunSettings.read(files[0], overrides).train()
        return
    if ranks is None:
        from torch import accelerator

        ranks = max(accelerator.device_count(), 1)
    if dry_run:
        from hybrid_engine.rl.run_settings import RunSettings

        with refusing():
            settings = RunSettings.read(files[0], overrides, ranks)
            settings.require_runnable(ranks)
            _show_prompt(settings)
        typer.echo(f"Planned for {Cluster().device_gib:g} GiB a device; `plan` has --device:")
        plan(words, ranks)
    start_ranks(["--nproc-per-node", str(ranks), "-m", "hybrid_engine", "train", *words])


def _show_prompt(settings: RunSettings) -> None:
    """Print the first prompt as the model reads it, and rewards of two answers to it."""
    from hybrid_engine.backends.vllm.engine_settings import Completion
    from hybrid_engine.backends.vllm.prompts import ModelTokenizer, form_of
    from hybrid_engine.rl.rewards import named_rewards
    from hybrid_engine.rl.user_callbacks import run_callbacks

    first = settings.prompts[0]
    prompt: Any = first["prompt"]
    if form_of(prompt) == "a chat":
        tokenizer = ModelTokenizer(str(settings.engines.model)).loaded
        prompt = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    typer.echo(f"{len(settings.prompts)} prompts. The first:\n{prompt}")
    for name, function in named_rewards(settings.reward).items():
        calls = []
        for text in (str(first["answer"]), ""):
            completion = Completion((), (), "stop", drawn_text=text)
            calls.append((repr(text), function, (first, completion)))
        rewards = run_callbacks("reward", calls, _SECONDS_FOR_REWARD)
        for (text, *_), reward in zip(calls, rewards, strict=True):
            typer.echo(f"{name} of the completion {text}: {reward}")
