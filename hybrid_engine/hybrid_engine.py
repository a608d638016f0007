"""`HybridEngine`: one object that trains and generates in turn with one set of weights."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, Unpack, cast, overload
from weakref import WeakSet

import torch

from hybrid_engine.assembly import EngineParts, build_parts, check_inference, put_beside
from hybrid_engine.config import HybridConfig
from hybrid_engine.errors import StateError
from hybrid_engine.memory.offload_items import held_nbytes
from hybrid_engine.memory.offloader import Offloader
from hybrid_engine.models import table_for
from hybrid_engine.models.table import ModelTable
from hybrid_engine.ports import Batch, Companion, Data, InferenceWeights, LossFunction, NearEnd, Trainer
from hybrid_engine.ranks.job import Job
from hybrid_engine.ranks.process import Ends
from hybrid_engine.records.sides import Side
from hybrid_engine.switch.sharding_manager import ShardingManager, SwitchContexts
from hybrid_engine.switch.states import State, Switch

if TYPE_CHECKING:
    from hybrid_engine.backends.fsdp import ShardedModel
    from hybrid_engine.backends.vllm import Completion, InferenceEngine
    from hybrid_engine.backends.vllm.prompts import ChatArguments, Prompts
    from hybrid_engine.backends.vllm.requests import Samplings

TrainerT = TypeVar("TrainerT", bound=Trainer)


class HybridEngine(SwitchContexts, Generic[TrainerT]):
    """Trains and generates in turn with one set of weights. All methods are collective.

    Around a transformers model, which FSDP2 shards here (or the caller has, then without `train_config`):

        with HybridEngine(model=model, rollout_config={"tp_size": 2}, train_config={"fsdp_config": {}}) as engine:
            optimizer = torch.optim.AdamW(model.parameters())
            with engine.rollout_context():
                sequences = engine.generate(prompts, Sampling(max_tokens=64))
            with engine.train_context():
                model(sequences, labels=labels).loss.backward()
                optimizer.step()

    Around Megatron's model, optimizer and a loop of your own: `hybrid_engine.attach`. Of parts that the caller has
    built and ends: `HybridEngine(train, inference, config)`. `ActorHybridWorker` is one whose trainer is built from a
    configuration: that trainer updates, scores and writes checkpoints, which a loop of the caller's does by itself.

    Args:
        model: a transformers causal LM, or PEFT's around one; sharded in place, it stays the caller's, who trains it in
            his own loop. LoRA is added to the weights on their way, or delivered apart (`lora_delivery: adapter`).
        rollout_config: `tp_size`, `pp_size`, `dp_type`, and the keys of `generate_config`; see `config.loading`.
        train_config: `fsdp_config`, see `config.FsdpConfig`; None: the model is sharded already.
        shard: False leaves the model as it is. One that is not sharded is whole on every rank then, and the caller's
            loop keeps the copies alike, as DDP does.
        enable_reshard: False is refused: there is no other way to bring the weights to vLLM.
        compress_reshard: send weights in `compression_dtype`, which vLLM then computes in.
        compression_dtype: a torch dtype or its name.

        train: whoever trains: a `TrainEngine`, a `LiveModel` where somebody else's loop trains Megatron's model, a
            `ShardedModel`, or another `ports.Trainer`.
        inference: an `InferenceEngine`; the switch is one of its job.
        config: the checked configuration.
        offloader: of the trainer's state; made here when there is none.
        weights: what is written at a switch; default: the inference engine's weights alone.
        training_side: what all ranks hold for training, where that is known (`rendezvous.gather_side`).

    Attributes:
        adapter: the LoRA that completions are drawn with, where it is delivered by itself.
        ends: what ends with this engine, the last first.

    Training and scoring outside these contexts, on memory that was given away, raise StateError.
    """

    train: TrainerT
    inference: InferenceEngine
    config: HybridConfig
    adapter: str | None = None

    @overload
    def __init__(
        self: HybridEngine[ShardedModel],
        *,
        model: torch.nn.Module,
        rollout_config: Mapping[str, Any] | None = None,
        train_config: Mapping[str, Any] | None = None,
        shard: bool = True,
        enable_reshard: bool = True,
        compress_reshard: bool = False,
        compression_dtype: torch.dtype | str = torch.bfloat16,
    ) -> None: ...

    @overload
    def __init__(
        self,
        train: TrainerT,
        inference: InferenceEngine,
        config: HybridConfig,
        *,
        offloader: Offloader | None = None,
        weights: InferenceWeights | None = None,
        training_side: Side | None = None,
    ) -> None: ...

    def __init__(
        self,
        train: Any = None,
        inference: Any = None,
        config: Any = None,
        *,
        offloader: Offloader | None = None,
        weights: InferenceWeights | None = None,
        training_side: Side | None = None,
        model: torch.nn.Module | None = None,
        **settings: Any,
    ) -> None:
        with Ends() as undo:
            if model is not None:
                self._take(cast(EngineParts[TrainerT], build_parts(model, undo, **settings)), undo)
            elif settings:
                raise TypeError(f"only with a model: {', '.join(settings)}")
            else:
                offloader = offloader or Offloader(train)
                weights = weights or inference.adaptor
                self._take(EngineParts(train, inference, config, offloader, training_side, weights))
            self.take_over(undo)

    @classmethod
    def around(cls, make_trainer: Callable[[Job], TrainerT], config: HybridConfig) -> HybridEngine[TrainerT]:
        """An engine around a trainer of the caller's own, in state TRAIN. Collective.

        Args:
            make_trainer: makes the trainer for this rank of the job; its `close`, if it has one, is called at the end.
                `backends.training_side` has what is common to trainers, and examples/own_trainer.py is one of 40 lines.
            config: of `load_config(..., own_loop=True, own_weights=True)`.

        Raises, on all ranks, what `make_trainer` raises on one, and what keeps vLLM from being built.
        """
        with Ends() as owner:
            job = owner.enter_context(closing(Job.join(config.generate_config.timeout_seconds)))
            with job.agreement.building():
                with job.agreement.phase("checking what is installed"):
                    check_inference(config, job)

                def made() -> TrainerT:
                    train = make_trainer(job)
                    owner.callback(getattr(train, "close", lambda: None))
                    return train

                engine = cls.beside(made, config, table_for(config.hf_config()), job, owner)
            engine.take_over(owner)
        return engine

    @classmethod
    def beside(
        cls, find_trainer: Callable[[], TrainerT], config: HybridConfig, table: ModelTable, job: Job, owner: ExitStack
    ) -> HybridEngine[TrainerT]:
        """An engine of a job that is there, in state TRAIN. Collective, within `job.agreement.building()`.

        `find_trainer` may fail on one rank; `owner` ends what is built here. If anything fails, on any rank, training
        state is back on the device.
        """
        with job.agreement.phase("looking at the training model"):
            train = find_trainer()
        engine = cls.__new__(cls)
        engine._take(put_beside(train, config, table, job, owner), owner)
        return engine

    def _take(self, parts: EngineParts[TrainerT], owner: ExitStack | None = None) -> None:
        """Drive these parts; `owner` closes the switch. Without one that is left to whoever has built them."""
        self.ends = Ends()
        self.companions: WeakSet[Companion] = WeakSet()
        train, inference, config = parts.train, parts.inference, parts.config
        self.train, self.inference, self.config, self.job = (
            train,
            cast("InferenceEngine", inference),
            config,
            inference.job,
        )
        self.adapter = parts.adapter
        self._sharding = _switch_of(parts)
        if config.generate_config.prefetch == "auto":
            # weak: the switch refers to the model, whose hooks in autograd Python's collector does not see through
            near_end = weakref.WeakMethod(self.sharding.near_end)
            inference.near_end = NearEnd(
                # on the CPU a copy would take a core from decoding
                config.generate_config.prefetch_share if self.job.device.type == "cuda" else 0.0,
                lambda: (begin := near_end()) and begin(),
            )
        if owner is not None:
            owner.callback(self.sharding.close)
            self.start()  # model and optimizer are their owner's, and have left the device while vLLM was built

    def generate(
        self,
        prompts: Prompts,
        sampling: Samplings | None = None,
        attention_mask: torch.Tensor | None = None,
        *,
        data: Data = "global",
        **chat: Unpack[ChatArguments],
    ) -> Any:
        """Completions of prompts, in the form of the prompts, spread over the inference replicas. In `rollout_context`.

        Args:
            prompts: token ids [B, S] int64, which are answered by a tensor [B * n, S + longest] of prompts and
                completions, padded on the right; texts or chats, by n texts each; or lists of token ids, by n
                `Completion`s each.
            sampling: how, ours or `vllm.SamplingParams`, one for all prompts or a list with one for each; default:
                `Sampling()`.
            attention_mask: [B, S], 0 where a prompt of a tensor is padded, on either side.
            data: "global": all ranks pass the same prompts and get all completions; "local": each rank passes its own,
                any number of them, and gets theirs.
            chat: of chats, as transformers' `apply_chat_template` takes it: `tools`, `chat_template_kwargs`,
                `add_generation_prompt`, `continue_final_message`.

        Where servers keep their weights (`release_weights: false`), in any context once they have some. Raises
        StateError outside the context, ConfigError for prompts that cannot be, GenerationError.
        """
        from hybrid_engine.backends.vllm.prompts import in_form_of

        completions = self.generate_sequences(prompts, sampling, attention_mask, data=data, **chat)
        return in_form_of(prompts, completions, self._pad_token_id())

    def barrier(self, phase: str) -> None:
        """Wait until all ranks are here. Raises RemoteError with what failed on another; `phase` names the place."""
        self.job.agreement.conclude(phase)

    def generate_sequences(
        self,
        prompts: Prompts,
        sampling: Samplings | None = None,
        attention_mask: torch.Tensor | None = None,
        *,
        data: Data = "global",
        **chat: Unpack[ChatArguments],
    ) -> list[list[Completion]]:
        """`n` completions of each prompt, in their order; everything else as of `generate`."""
        self.sharding.require_drawing()
        return self.inference.generate_over_replicas(prompts, sampling, self.adapter, attention_mask, data, chat)

    @overload
    def compute_log_probs(self, batch: Batch, *, data: Data = ...) -> torch.Tensor: ...

    @overload
    def compute_log_probs(
        self, batch: Batch, *, data: Data = ..., entropy: bool, top_k: int = ...
    ) -> dict[str, torch.Tensor]: ...

    @overload
    def compute_log_probs(self, batch: Batch, *, data: Data = ..., top_k: int) -> dict[str, torch.Tensor]: ...

    def compute_log_probs(
        self, batch: Batch, *, data: Data = "global", entropy: bool = False, top_k: int = 0
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """Log-probability [B, S] fp32 of every label under the training weights. In train or forward context.

        Args:
            batch: see `batches.Batch`. Everything that is computed is at its `temperature`.
            data: "global": all ranks pass the same batch and get the whole result; "local": each data parallel rank
                passes a batch of its own, as large as the others', and gets the result for it.
            entropy: return `entropy` [B, S] too, in nats.
            top_k: if not 0, return `top_log_probs` and `top_token_ids` [B, S, top_k] too, the most likely tokens first.

        Returns a tensor, or where more is asked for, a dict in which it is `log_probs`. Values of padding are 0. Raises
        BatchError with every violation, and RemoteError with its text on ranks that find none.
        """
        compute = self._of_the_trainer("compute_log_probs")
        self.sharding.require(State.TRAIN, State.FORWARD)
        return compute(batch, self.job.agreement, data=data, entropy=entropy, top_k=top_k)

    def update(
        self,
        batch: Batch,
        loss_function: LossFunction,
        *,
        data: Data = "global",
        entropy: bool = False,
        top_k: int = 0,
    ) -> dict[str, float]:
        """One optimizer step on the batch, and one of the learning-rate schedule. In `train_context`.

        Args:
            batch: see `batches.Batch`.
            loss_function: see `batches.LossFunction`.
            data, entropy, top_k: as of `compute_log_probs`; the loss function finds them in its micro batch, `entropy`
                with gradient.

        Returns what the loss function reports, averaged, with `grad_norm`, `learning_rate` and `skipped`; see
        `ActorTrainer.train_step`. Raises on all ranks, with no weight changed, BatchError with every violation, or
        LossError for a loss function that fails or returns no loss, and RemoteError with its text on ranks that are not
        at fault.
        """
        update = self._of_the_trainer("update")
        self.sharding.require(State.TRAIN)
        report: dict[str, float] = update(
            batch, loss_function, self.job.agreement, data=data, entropy=entropy, top_k=top_k
        )
        return report

    @property
    def learning_rate(self) -> float:
        """Of the next update."""
        rate: float = self._of_the_trainer("learning_rate")
        return rate

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the learning rate of the updates to come, a number from 0 to 1e30; in any state.

        On every rank alike: an update raises BatchError where ranks differ. Raises StateError where
        `actor_config.optimizer.schedule` does that, and ArgumentError for another value, before anything changes.
        """
        self._of_the_trainer("set_learning_rate")(learning_rate)

    def save_checkpoint(self, directory: str | Path, *, check_nan: bool = True) -> None:
        """Write parameters, optimizer state, the schedule's position and training's generators below `directory`.

        In `train_context`. A checkpoint that is there is replaced when the new one is complete; a directory that holds
        anything else is refused. So are NaN and infinities (WeightError), unless `check_nan` is false. vLLM's sampler
        is not in it: give `Sampling` a seed for each step.
        """
        save = self._of_the_trainer("save_checkpoint")
        self.sharding.require(State.TRAIN)
        save(directory, check_nan=check_nan)

    def load_checkpoint(self, directory: str | Path) -> None:
        """Load what `save_checkpoint` wrote, on all ranks or on none. In `train_context`.

        What Megatron has saved is loaded in the same layout, what FSDP2 has saved on any number of ranks.
        """
        load = self._of_the_trainer("load_checkpoint")
        self.sharding.require(State.TRAIN)
        load(directory)

    def load_hf_checkpoint(self, path: str | Path) -> None:
        """Take the weights from a Hugging Face checkpoint (safetensors), whatever the layout. In `train_context`.

        Every rank reads only what it holds, and its share of the files to check their checksums. Main parameters
        follow; moments and step count stay as they are; adapters add nothing from then on, for a checkpoint holds sums.
        Raises, with nothing changed on any rank, ConfigError, FileError naming the file, or ParameterMismatchError
        naming every tensor that is missing, unknown or of another shape.
        """
        self.sharding.require(State.TRAIN)
        from hybrid_engine.backends.huggingface import load_hf_checkpoint

        load_hf_checkpoint(path, self.train.weights.base, self.table, self.job)
        self.train.reload_main_params()

    def save_hf_checkpoint(
        self, path: str | Path, dtype: str | torch.dtype | None = None, *, check_nan: bool = True
    ) -> None:
        """Write the weights, adapters added, as a Hugging Face checkpoint with config and tokenizer of `config.model`.

        In `train_context`. `path` is on storage that all ranks share; every rank writes its part and nothing is
        gathered. `dtype`: of the stored weights, e.g. "bfloat16" or torch.bfloat16; default: the training weights' own.
        Older weights of this model there are replaced: whatever happens, readers find those or the new ones. Raises
        FileError naming the file, ConfigError for another dtype, or where the weights are another model's, and, unless
        `check_nan` is false, WeightError for what would be stored as NaN or infinity, before anything is written.
        """
        self.sharding.require(State.TRAIN)
        from hybrid_engine.backends.huggingface import save_hf_checkpoint

        with self.job.agreement.phase("adding adapters"):
            weights = self.train.weights.merged
        save_hf_checkpoint(path, weights, self.table, self.job, self.config.model, dtype, check_nan=check_nan)

    def resident_nbytes(self) -> dict[str, int]:
        """Bytes of weights and training state on this rank's device now, by model, caches left out. No collective."""
        actor = held_nbytes(self.train.offload_items(), self.job.device.type)
        found = Counter({"actor": actor, "vLLM": self.sharding.inference.resident_nbytes()})
        for companion in self.companions:
            found[companion.name] += companion.resident_nbytes()
        return found

    def _pad_token_id(self) -> int:
        hf_config = self.config.hf_config()
        ends = (hf_config.get("pad_token_id"), hf_config.get("eos_token_id"))
        return next((token for token in ends if isinstance(token, int)), 0)

    def _of_the_trainer(self, name: str) -> Any:
        """What only a trainer has that was built from a configuration. Raises StateError where it is another."""
        if (found := getattr(self.train, name, None)) is None:
            raise StateError(f"{name}: the model is trained in its owner's loop: {_BY_OWNERS[name]}")
        return found

    @property
    def rank(self) -> int:
        """Of this process."""
        return self.job.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.job.world_size

    @cached_property
    def table(self) -> ModelTable:
        """The model's name table."""
        return table_for(self.config.hf_config())

    def take_over(self, owner: ExitStack) -> None:
        """Have `shutdown` end what `owner` would have ended."""
        self.ends.enter_context(owner.pop_all())

    def shutdown(self) -> None:
        """End vLLM and the job, where this engine made them; idempotent.

        Model and optimizer stay, on the device; what `ActorHybridWorker` has built goes with it. Another engine may be
        built afterwards.
        """
        self.ends.close()
        self._sharding = None


def _switch_of(parts: EngineParts[Any]) -> Switch:
    inference: Any = parts.inference
    config = parts.config.generate_config
    if config.servers:
        served: Switch = inference.switch(parts.train, parts.offloader)
        return served
    return ShardingManager(
        trainer=parts.train,
        inference=parts.weights,
        caches=inference,
        offloader=parts.offloader,
        config=config,
        job=inference.job,
        training_side=parts.training_side,
    )


_BY_OWNERS = {
    "update": "step your own optimizer in train_context",
    "compute_log_probs": "call your model in forward_context or train_context",
    "learning_rate": "ask your own optimizer",
    "set_learning_rate": "set that of your own optimizer",
    "save_checkpoint": "save model and optimizer in train_context, as your loop does",
    "load_checkpoint": "load model and optimizer in train_context, as your loop does",
}
"""What `ActorHybridWorker` does for its users -> what others do."""
