"""`HybridEngine`: trains and generates in turn with one set of weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, closing
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack, cast
from weakref import WeakSet

import torch

from hybrid_engine.assembly import checked_config, inference_side, megatron_lora
from hybrid_engine.compute_check.probes import WithAttention
from hybrid_engine.config import FsdpConfig, GenerateConfig, HybridConfig
from hybrid_engine.config.loading import generate_values, read_train_config
from hybrid_engine.config.rules import without_peft_form
from hybrid_engine.errors import ConfigError, StateError
from hybrid_engine.files.durable import naming
from hybrid_engine.layouts.parallelism import sizes_text
from hybrid_engine.memory.offloader import Offloader
from hybrid_engine.models.lora_tensors import ActorLora
from hybrid_engine.models.table import ModelTable
from hybrid_engine.ports import ColocatedModel, Data, Trainer, TrainingWeights
from hybrid_engine.ranks.agreement import SHORT_PATIENCE
from hybrid_engine.ranks.job import Job
from hybrid_engine.ranks.signals_and_forks import Ends
from hybrid_engine.ranks.torch_internals import torch_defaults
from hybrid_engine.switch.states import Hook, State, Switch

if TYPE_CHECKING:
    from hybrid_engine.backends.vllm import Completion, InferenceEngine
    from hybrid_engine.backends.vllm.prompts import ChatArguments, Prompts
    from hybrid_engine.backends.vllm.requests import Samplings


class HybridEngine:
    """Engine that trains and generates in turn with one set of weights.

    All methods but those for hooks are collective. The `with` statement starts and shuts down.

    With a transformers model, which FSDP2 shards here, or which the caller has sharded (then
    without `train_config`):

        train_config = {"fsdp_config": {}}
        with HybridEngine(
            model=model, rollout_config={"tp_size": 2}, train_config=train_config
        ) as engine:
            optimizer = torch.optim.AdamW(model.parameters())
            with engine.rollout_context():
                sequences = engine.generate(prompts, Sampling(max_tokens=64))
            with engine.train_context():
                model(sequences, labels=labels).loss.backward()
                optimizer.step()

    For Megatron's model and optimizer in your own loop, use `hybrid_engine.attach`; for your own
    trainer, `HybridEngine.around`. The subclass `ActorHybridWorker` builds its trainer from a
    configuration. It also updates, scores and writes checkpoints, which your own loop does itself.

    Args:
        model: transformers causal LM, possibly wrapped by PEFT. It is sharded in place and remains
            the caller's, whose loop trains it. LoRA is added to the weights when they are sent, or
            delivered separately (`lora_delivery: adapter`).
        rollout_config: `tp_size`, `pp_size`, `dp_type`, and the keys of `generate_config`; see
            `config.loading`.
        train_config: `fsdp_config`, see `config.FsdpConfig`; None if the model is sharded already.
        shard: False leaves the model unchanged. If it is not sharded, every rank has all of it, and
            the caller's loop keeps the replicas equal, as DDP does.
        enable_reshard: must be True, because weights reach vLLM only by resharding.
        compress_reshard: send weights in `compression_dtype`, in which vLLM then computes.
        compression_dtype: torch dtype, or its name.

    Attributes:
        train: the trainer: a `ShardedModel` here, or another `ports.Trainer`.
        inference: engine that generates, with vLLM's `llm` where vLLM runs in these ranks.
        config: checked configuration.
        job: the ranks.
        adapter: name of the LoRA to generate with, if adapters are delivered separately.
        reports_cover_all_ranks: True if each report of a switch counts the bytes of all ranks.
        ends: callbacks of `shutdown`, run in reverse order.

    Training and scoring outside these contexts raise StateError, because memory may be released.
    """

    train: Trainer
    inference: InferenceEngine
    config: HybridConfig
    job: Job
    adapter: str | None = None
    _sharding: Switch | None = None

    @torch_defaults()  # because these tensors are trained and filled in other modes of torch
    def __init__(
        self,
        *,
        model: torch.nn.Module,
        rollout_config: Mapping[str, Any] | None = None,
        train_config: Mapping[str, Any] | None = None,
        shard: bool = True,
        enable_reshard: bool = True,
        compress_reshard: bool = False,
        compression_dtype: torch.dtype | str = torch.bfloat16,
    ) -> None:
        from hybrid_engine.backends.fsdp import ShardedModel
        from hybrid_engine.backends.fsdp.sharded_tensors import is_sharded, mesh_of, shard_model

        if not enable_reshard:
            raise ConfigError.of(
                "enable_reshard",
                "False",
                "Leave it out: weights reach vLLM only by resharding",
                code="must-be-enabled",
            )
        values = generate_values(rollout_config or {})
        if compress_reshard:
            values["compress_reshard"] = True
            values["compression_dtype"] = str(compression_dtype).removeprefix("torch.")
        timeout_seconds = values.get("timeout_seconds", GenerateConfig().timeout_seconds)
        with Ends() as owner:
            job = owner.enter_context(closing(Job.join(timeout_seconds)))
            with job.building():
                with job.agreement.phase("checking the configuration"):
                    if not shard and train_config is not None:
                        raise ConfigError.of(
                            "train_config",
                            "configures sharding, but shard is False",
                            "Leave one out",
                            code="contradicts-shard",
                        )
                    is_whole = not (shard or is_sharded(model))
                    if not is_whole:
                        fsdp = read_train_config(train_config or {}, job.world_size)
                    elif job.world_size > 1:
                        # Every rank has a replica of the whole model.
                        fsdp = FsdpConfig(sharding_strategy="HYBRID_SHARD", replicas=job.world_size)
                    else:
                        fsdp = FsdpConfig()
                    tokenizer = values.pop("model", None)
                    settings = {
                        "actor_config": {"seq_length": 1, "fsdp": fsdp},
                        "generate_config": values,
                    }
                    config, tokenizer_dir = checked_config(
                        model, settings, job.world_size, owner, tokenizer, own_loop=True
                    )
                    table = config.table()
                    inference_side(config).check(job)
                with job.agreement.phase("sharding the model", SHORT_PATIENCE):
                    if shard and (train_config is not None or not is_sharded(model)):
                        shard_model(model, fsdp, mesh_of(fsdp, job.device, job.world_size))
                    delivery = config.generate_config.lora_delivery
                    train = ShardedModel(
                        model,
                        table,
                        job.rank,
                        lora_delivery=delivery,
                        is_whole=is_whole,
                    )
                    # Runs after its state has returned to the device.
                    owner.callback(train.close)
                job.built("model ready")
                lora = train.weights.lora
                self._add_inference(
                    train,
                    config,
                    table,
                    job,
                    owner,
                    lora=lora,
                    tokenizer_dir=tokenizer_dir,
                )
            self.take_over(owner)

    @classmethod
    def around(cls, make_trainer: Callable[[Job], Trainer], config: HybridConfig) -> HybridEngine:
        """Return an engine with the caller's own trainer, in state TRAIN. Collective.

        Args:
            make_trainer: creates the trainer of this rank. Its `close`, if it has one, is called at
                the end. `backends.training_side` has helpers for trainers, and
                examples/own_trainer.py is a trainer of 40 lines.
            config: result of `load_config(..., own_loop=True, own_weights=True)`.

        Raises, on all ranks, errors of `make_trainer` on any rank and of building vLLM.
        """
        with Ends() as owner:
            job = owner.enter_context(closing(Job.join(config.generate_config.timeout_seconds)))
            with job.building():
                with job.agreement.phase("checking what is installed"):
                    inference_side(config).check(job)

                with job.agreement.phase("looking at the training model"):
                    train = make_trainer(job)
                    owner.callback(getattr(train, "close", lambda: None))
                job.built("trainer built")
                engine = cls.beside(train, config, config.table(), job, owner)
            engine.take_over(owner)
        return engine

    @classmethod
    def beside(
        cls,
        train: Trainer,
        config: HybridConfig,
        table: ModelTable,
        job: Job,
        owner: ExitStack,
    ) -> HybridEngine:
        """Return an engine in an existing job; see `_add_inference`."""
        engine = cls.__new__(cls)
        engine._add_inference(train, config, table, job, owner)
        return engine

    def _add_inference(
        self,
        train: Trainer,
        config: HybridConfig,
        table: ModelTable,
        job: Job,
        owner: ExitStack,
        *,
        lora: ActorLora | None = None,
        tokenizer_dir: str | None = None,
        gives_back: bool = True,
    ) -> None:
        """Build the inference side for this trainer, and the switch between both: state TRAIN.

        Collective, within `job.building()`.

        Args:
            train: trainer that provides the weights.
            config: configuration of both sides.
            table: name table of the model.
            job: all ranks.
            owner: closes everything that is built here.
            lora: adapters that are delivered separately.
            tokenizer_dir: directory of the tokenizer, if it is not the model's.
            gives_back: return training state to the device at the end, or if a rank fails.
        """
        with job.agreement.phase("looking at the trainer's state", SHORT_PATIENCE):
            offloader = Offloader(train)
            if gives_back:
                owner.callback(offloader.onload)
            trainer: object = train
            if isinstance(trainer, WithAttention) and config.generate_config.check_compute != "off":
                # Read now and remembered, because vLLM changes classes of transformers when it
                # loads.
                trainer.attention()
        inference, self._sharding = inference_side(config).build(
            train,
            offloader,
            table,
            job,
            owner,
            lora=lora,
            tokenizer_dir=tokenizer_dir,
        )
        self.ends = Ends()
        self.colocated_models: WeakSet[ColocatedModel] = WeakSet()
        self.train = train
        # Both inference sides generate in the same way; only with servers there is no `llm`.
        self.inference = cast("InferenceEngine", inference)
        self.config = config
        self.job = job
        self.adapter = None if lora is None else lora.name
        self.reports_cover_all_ranks = bool(config.generate_config.servers)
        owner.callback(self.sharding.close)
        # Model and optimizer belong to the caller, but left the device while vLLM was built.
        self.start()
        generate = config.generate_config
        vllm = f"vLLM {sizes_text(generate.sizes(job.world_size))} built"
        job.built("servers connected" if generate.servers else vllm)
        # It takes a while, in which a user would press Ctrl-C.
        owner.callback(job.say, "closing the engines ...")

    @property
    def sharding(self) -> Switch:
        """The switch. Raises StateError after `shutdown`."""
        if self._sharding is None:
            raise StateError(
                f"this {type(self).__name__} was shut down: build a new one", code="was-shut-down"
            )
        return self._sharding

    def rollout_context(self) -> AbstractContextManager[None]:
        """Context for generation: vLLM has the weights, configured training state is offloaded."""
        return self.sharding.entered(State.INFER)

    def train_context(self) -> AbstractContextManager[None]:
        """Context for training: training state is on the device, vLLM's weights are released."""
        return self.sharding.entered(State.TRAIN)

    def forward_context(self) -> AbstractContextManager[None]:
        """Context for scoring: only parameters need to be on the device."""
        return self.sharding.entered(State.FORWARD)

    def start(self) -> None:
        """Enter state TRAIN. Idempotent; the `with` statement and the first context call it."""
        self.sharding.start()

    def on_reshard_start(self, hook: Hook) -> Hook:
        """Decorator: call `hook(from_state, to_state)`, or `hook()`, before every switch."""
        return self.sharding.on_reshard_start(hook)

    def on_reshard_end(self, hook: Hook) -> Hook:
        """Decorator: call `hook(report)`, or `hook()`, after every successful switch.

        `print` itself is called on rank 0 alone.
        """
        register = self.sharding.on_reshard_end
        return hook if hook is print and self.job.rank else register(hook)

    def generate(
        self,
        prompts: Prompts,
        sampling: Samplings | None = None,
        attention_mask: torch.Tensor | None = None,
        *,
        data: Data = "global",
        **chat: Unpack[ChatArguments],
    ) -> Any:
        """Return completions in the form of the prompts. Called in `rollout_context`.

        The prompts are distributed over the inference replicas. If servers keep their weights
        (`release_weights: false`), any context will do once they have received some.

        Args:
            prompts: token ids [B, S] int64, for a result [B * n, S + longest] of prompts and
                completions, padded on the right; texts or chats, for n texts each; or lists of
                token ids, for n `Completion`s each.
            sampling: `Sampling` or `vllm.SamplingParams` for all prompts, or a list with one for
                each prompt; default: `Sampling()`.
            attention_mask: [B, S], 0 at padding of a tensor of prompts, on either side.
            data: "global": all ranks pass the same prompts and get all completions; "local": each
                rank passes its own prompts, any number, and gets their completions.
            chat: arguments for chats, as in transformers' `apply_chat_template`: `tools`,
                `chat_template_kwargs`, `add_generation_prompt`, `continue_final_message`.

        Raises StateError outside the context, ConfigError for invalid prompts, GenerationError.
        """
        from hybrid_engine.backends.vllm.prompts import in_form_of

        completions = self.generate_sequences(prompts, sampling, attention_mask, data=data, **chat)
        hf_config = self.config.hf_config()
        # `eos_token_id` may be a list, which cannot pad.
        tokens = (hf_config.get("pad_token_id"), hf_config.get("eos_token_id"))
        pad_token_id = next((token for token in tokens if isinstance(token, int)), 0)
        return in_form_of(prompts, completions, pad_token_id)

    def barrier(self, phase: str) -> None:
        """Wait until all ranks call this. `phase` is its name in messages.

        Raises RemoteError with the error of another rank that failed.
        """
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
        """Return `n` completions of each prompt, in the order of prompts. See `generate`."""
        self.sharding.require_drawing()
        return self.inference.generate_over_replicas(
            prompts, sampling, self.adapter, attention_mask, data, chat
        )

    def load_hf_checkpoint(self, path: str | Path) -> None:
        """Load the weights of a Hugging Face checkpoint (safetensors). Called in `train_context`.

        Works with any parallel layout. Every rank reads only its own shards, and its share of the
        files to verify their checksums. Main parameters are updated; moments and the step count are
        unchanged. Adapters are reset to contribute nothing, because a checkpoint holds merged
        weights.

        Raises, with nothing changed on any rank, ConfigError, FileError naming the file, or
        ParameterMismatchError naming every tensor that is missing, unknown or of another shape.
        """
        self.sharding.require(State.TRAIN)
        from hybrid_engine.backends.huggingface import load_hf_checkpoint

        load_hf_checkpoint(path, self.train.weights.base, self.table, self.job)
        self.train.reload_main_params()

    def save_hf_checkpoint(
        self,
        path: str | Path,
        dtype: str | torch.dtype | None = None,
        *,
        check_nan: bool = True,
    ) -> None:
        """Write the weights, adapters merged, as a Hugging Face checkpoint. In `train_context`.

        The checkpoint includes the config and tokenizer of `config.model`. Every rank writes its
        own part, and nothing is gathered. Older weights of this model at `path` are replaced; after
        any interruption readers find either the old or the new weights.

        Args:
            path: directory on storage that all ranks share.
            dtype: dtype of the stored weights, such as "bfloat16" or torch.bfloat16; default: that
                of the training weights.
            check_nan: raise WeightError, before anything is written, for weights that would be
                stored as NaN or infinity.

        Raises FileError naming the file; ConfigError for an invalid dtype, or if `path` has weights
        of another model.
        """
        self.sharding.require(State.TRAIN)
        from hybrid_engine.backends.huggingface import save_hf_checkpoint

        weights = self._merged_weights()
        save_hf_checkpoint(
            path, weights, self.table, self.job, self.config.model, dtype, check_nan=check_nan
        )

    def weights_digest(self) -> str:
        """Return the digest of the weights, adapters merged. In train or forward context."""
        from hybrid_engine.backends.huggingface import weights_digest

        return weights_digest(self._merged_weights(), self.job)

    def _merged_weights(self) -> TrainingWeights:
        with self.job.agreement.phase("adding adapters"):
            return self.train.weights.merged

    @property
    def has_adapters(self) -> bool:
        """True if the trainer's model has active adapters, in a form of PEFT's."""
        has_scalings = bool(getattr(self.train.weights, "scalings", None))
        return has_scalings or megatron_lora(self.config.actor_config, self.table) is not None

    def save_adapters(self, path: str | Path) -> None:
        """Write adapters as PEFT's `save_pretrained` does. In `train_context`.

        Megatron's are written from any layout; the directory is replaced, like a checkpoint.

        Raises StateError for a model without them, ConfigError if `path` has other files, FileError
        if a file cannot be written, and Megatron's WeightError for values that are not finite.
        """
        self.sharding.require(State.TRAIN)
        if not self.has_adapters:
            targets = ", ".join(without_peft_form(self.table, self.config.actor_config.lora))
            without = f" in PEFT's form, but in experts or on transposed weights: {targets}"
            raise StateError(
                f"the model has no adapters{without if targets else ''}; save_hf_checkpoint "
                "writes its weights, with adapters merged",
                code="no-adapters",
            )
        weights: Any = self.train.weights
        lora = megatron_lora(self.config.actor_config, self.table)
        if lora is None:
            with self.job.agreement.phase("writing the adapters"), naming("writing", path):
                weights.save_adapters(path, writes=self.rank == 0)
        else:
            from hybrid_engine.backends.huggingface import save_hf_checkpoint

            with self.job.agreement.phase("separating adapters"):
                adapters = weights.separate
            save_hf_checkpoint(path, adapters, self.table, self.job, self.config.model, lora=lora)

    def resident_nbytes(self) -> dict[str, int]:
        """Return bytes of weights and training state on this rank's device now, by model.

        Caches are not included. Not collective.
        """
        actor = self.sharding.offloader.held_nbytes()
        found = Counter({"actor": actor, "vLLM": self.sharding.inference.resident_nbytes()})
        for model in self.colocated_models:
            found[model.name] += model.resident_nbytes()
        return found

    @property
    def rank(self) -> int:
        """Global rank of this process."""
        return self.job.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.job.world_size

    @cached_property
    def table(self) -> ModelTable:
        """Name table of the model."""
        return self.config.table()

    def take_over(self, owner: ExitStack) -> None:
        """Transfer the callbacks of `owner` to `shutdown`."""
        self.ends.enter_context(owner.pop_all())

    def shutdown(self) -> None:
        """End vLLM and the job if this engine created them; idempotent.

        The caller's model and optimizer remain on the device, but those that `ActorHybridWorker`
        built are released. Another engine may be built afterwards.
        """
        self.ends.close()
        self._sharding = None

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException as error:
            # Python does not call __exit__ if __enter__ raises.
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None or self.job.is_inherited:
            self.shutdown()
            return
        self.job.agreement.leave(error)
        try:
            self.shutdown()
        except Exception as failure:
            # The error that ended the block is raised; this one is only noted.
            error.add_note(f"then the shutdown failed: {type(failure).__name__}: {failure}")
