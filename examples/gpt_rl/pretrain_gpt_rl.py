"""GRPO in the training loop of Megatron-LM, with its arguments, samplers, checkpoints and logging.

examples/gpt_rl/pretrain_gpt_rl.sh has the commands: `--rl-stage warm-up` imitates demonstrations,
`--rl-stage reward` has rollouts between its steps. Your own entry script can do the same with a
dataset, a forward step with your loss, and a callback.
"""

from __future__ import annotations

import functools
import json
import sys
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from gpt_builders import gpt_builder
from megatron.core.enums import ModelType
from megatron.core.utils import unwrap_model
from megatron.training import get_args, get_model, pretrain, print_rank_0
from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer
from model_provider import model_provider

from examples.gpt_rl import rollouts
from examples.gpt_rl.rollouts import Batch, Demonstrations, Rollouts, RolloutSettings
from hybrid_engine.backends.megatron.forward_probe import causal_inputs, model_device
from hybrid_engine.files.durable import naming, sync
from hybrid_engine.models import table_for
from hybrid_engine.rl import losses
from hybrid_engine.trainer.megatron.build import Actor
from hybrid_engine.trainer.megatron.train_engine import TrainEngine
from megatron_patches import script
from megatron_patches.engines import ReshardingOptions

DATA = Path(__file__).parent / "data"
CALLBACK = "examples.gpt_rl.rollouts:collect"


def add_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add the RL options to Megatron's parser."""
    group = parser.add_argument_group("reinforcement learning")
    group.add_argument("--rl-stage", choices=("warm-up", "reward"), required=True)
    group.add_argument(
        "--rl-data",
        type=str,
        default=str(DATA),
        help="Directory with train.jsonl and held_out.jsonl.",
    )
    group.add_argument("--rl-samples-per-prompt", type=int, default=8)
    group.add_argument(
        "--rl-max-tokens", type=int, default=5, help="Longest completion, including its end token."
    )
    group.add_argument("--rl-clip-ratio", type=float, default=0.2)
    group.add_argument("--rl-kl-coefficient", type=float, default=0.01)
    return parser


@functools.cache
def dataset(num_samples: int) -> torch.utils.data.Dataset[Batch]:
    """Return the training data of the stage; Megatron's samplers read it in order."""
    args = get_args()
    resharding = script.options()
    _check(args, resharding)
    if args.rl_stage == "warm-up":
        return Demonstrations(Path(args.rl_data), num_samples, args.seq_length, args.seed)
    settings = RolloutSettings(
        data=Path(args.rl_data),
        samples_per_prompt=args.rl_samples_per_prompt,
        max_tokens=args.rl_max_tokens,
        batch_size=args.global_batch_size,
        steps=resharding.interval,
        seq_length=args.seq_length,
        seed=args.seed,
    )
    score = None
    if args.rl_kl_coefficient:
        assert resharding.config is not None, "the attached engine requires --resharding-config"
        score = Reference(args, resharding.config).log_probs
    samples = Rollouts(settings, num_samples, args.consumed_train_samples, score, _report)
    return rollouts.install(samples)


def datasets(
    num_samples: Sequence[int], vp_stage: int | None = None
) -> tuple[torch.utils.data.Dataset[Batch], None, None]:
    """Return datasets for training, evaluation and test; virtual stages share them."""
    return dataset(num_samples[0]), None, None


datasets.is_distributed = True  # type: ignore[attr-defined]  # for Megatron


def _check(args: Any, resharding: ReshardingOptions) -> None:
    """Exit with all conflicting options; every rank has the same."""
    problems = []
    if args.rl_stage == "reward" and not (resharding.enabled and resharding.at_start):
        problems.append(
            "--rl-stage reward samples before its first step: "
            "add --enable-resharding --resharding-at-start"
        )
    if args.rl_stage == "reward" and resharding.callback != CALLBACK:
        problems.append(f"--resharding-callback {resharding.callback}: use {CALLBACK}")
    if args.fp16:
        problems.append("--fp16: a skipped step would consume samples; use --bf16 or neither")
    if args.num_workers:
        problems.append(
            f"--num-workers {args.num_workers}: samples exist in this process only; use 0"
        )
    if args.dataloader_type != "single":
        problems.append(
            f"--dataloader-type {args.dataloader_type}: samples are drawn in order; use single"
        )
    if args.rampup_batch_size is not None:
        problems.append("--rampup-batch-size: rollouts have a fixed size; remove it")
    if args.rl_stage == "reward" and args.global_batch_size % args.rl_samples_per_prompt:
        size = args.rl_samples_per_prompt
        problems.append(
            f"--global-batch-size {args.global_batch_size}: "
            f"not a multiple of --rl-samples-per-prompt {size}"
        )
    if problems:
        sys.exit("\n".join(problems))


def _report(iteration: int, figures: dict[str, float]) -> None:
    """Log the figures of the rollout after an iteration to Megatron's loggers."""
    text = " | ".join(f"{name}: {value:.3f}" for name, value in figures.items())
    print_rank_0(f" rollout after iteration {iteration:8d} | {text}")
    tensorboard = get_tensorboard_writer()
    wandb = get_wandb_writer()
    for name, value in figures.items():
        if tensorboard is not None:
            tensorboard.add_scalar(f"rl/{name}", value, iteration)
        if wandb is not None:
            wandb.log({f"rl/{name}": value}, iteration)


class Reference:
    """Frozen copy of the model at the start of the reward stage, saved for resumed runs."""

    def __init__(self, args: Any, config: Path) -> None:
        """`config` is the file of --resharding-config, with the path of the model."""
        self._args = args
        self._model = Path(yaml.safe_load(config.read_text())["model"])
        self._engine: TrainEngine | None = None

    @torch.no_grad()
    def log_probs(self, batch: Batch, policy: Sequence[torch.nn.Module]) -> torch.Tensor:
        """Return log-probs [B, S] fp32 of the labels; data parallel ranks share the work."""
        if self._engine is None:
            self._engine = self._build(policy)
        engine = self._engine
        ranks = engine.data_parallel
        rows = slice(ranks.rank, None, ranks.size)
        share = engine.log_probs({name: batch[name][rows] for name in ("tokens", "labels")})
        gathered = ranks.gather(share).to("cpu")
        log_probs = torch.empty_like(gathered)
        for rank, part in enumerate(gathered.chunk(ranks.size)):
            log_probs[rank :: ranks.size] = part
        return log_probs

    def _build(self, policy: Sequence[torch.nn.Module]) -> TrainEngine:
        weights = self._weights(policy)
        chunks = get_model(provider, ModelType.encoder_or_decoder, wrap_with_ddp=False)
        for chunk, saved in zip(unwrap_model(chunks), weights, strict=True):
            for name, tensor in _tensors(chunk).items():
                tensor.copy_(saved[name])
        table = table_for(json.loads((self._model / "config.json").read_text()))
        actor = Actor(chunks, None, unwrap_model(chunks)[0].config)
        return TrainEngine(actor, table, self._args.micro_batch_size)

    def _weights(self, policy: Sequence[torch.nn.Module]) -> list[dict[str, torch.Tensor]]:
        """Load the weights of a resumed run, or save those of the unchanged policy. Collective."""
        args = self._args
        path = Path(args.save or ".", "reference", f"rank{args.rank}.pt")
        if args.curr_iteration:
            has_file: list[Any] = [None] * args.world_size
            torch.distributed.all_gather_object(has_file, path.is_file())
            if not all(has_file):
                missing = [rank for rank, exists in enumerate(has_file) if not exists]
                raise RuntimeError(
                    f"{path.parent} lacks ranks {missing}: "
                    "resume with the --save of the first start"
                )
            with naming(
                "reading the reference", path, "Restore it from a copy, or start the run again"
            ):
                return torch.load(path, map_location="cpu", weights_only=True)
        weights = [_tensors(chunk) for chunk in unwrap_model(policy)]
        if args.save:
            path.parent.mkdir(parents=True, exist_ok=True)
            with naming("writing the reference", path):
                copies = [
                    {name: tensor.cpu().clone() for name, tensor in chunk.items()}
                    for chunk in weights
                ]
                torch.save(copies, path)
                sync(path)
        return weights


def _tensors(chunk: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and buffers, without the extra state of layers."""
    return {
        name: value.detach()
        for name, value in chunk.state_dict().items()
        if isinstance(value, torch.Tensor)
    }


def forward_step(iterator: Iterator[Batch], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    """Run the model on a micro batch. Called by Megatron's schedules."""
    batch = {name: tensor.to(model_device()) for name, tensor in next(iterator).items()}
    tokens = batch["tokens"]
    output = model(tokens, *causal_inputs(tokens), labels=batch["labels"])
    return output, partial(loss_function, batch)


def loss_function(
    batch: Batch, output: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return the sum of the loss, the number of tokens, and figures; `output` [b, S] is -log p."""
    args = get_args()
    mask = batch["mask"]
    num_tokens = mask.sum()
    # losses average over sequences; these weights turn the average into a sum over tokens
    sums = {**batch, "weights": mask * mask.shape[0]}
    if args.rl_stage == "warm-up":
        loss, report = losses.cross_entropy(sums, -output.float())
    else:
        loss, report = losses.policy_loss(args.rl_clip_ratio, args.rl_kl_coefficient)(
            sums, -output.float()
        )
    # cloned, because Megatron divides the loss in place
    figures = {name: torch.stack([value.clone(), num_tokens]) for name, value in report.items()}
    return loss, num_tokens.int(), figures


provider = partial(model_provider, gpt_builder)

if __name__ == "__main__":
    pretrain(
        datasets,
        provider,
        ModelType.encoder_or_decoder,
        forward_step,
        args_defaults={"tokenizer_type": "NullTokenizer"},
        extra_args_provider=add_arguments,
    )
