"""`HybridEngine`: one object that trains and generates in turn with one set of weights."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

import torch

from hybrid_engine.config import HybridConfig
from hybrid_engine.memory.offloader import Offloader
from hybrid_engine.model_parts import build_parts
from hybrid_engine.ports import InferenceWeights, NearEnd, Trainer
from hybrid_engine.ranks.forks import Ends
from hybrid_engine.records.layout import Layout
from hybrid_engine.switch.contexts import SwitchContexts
from hybrid_engine.switch.sharding_manager import ShardingManager
from hybrid_engine.switch.states import State

if TYPE_CHECKING:
    from hybrid_engine.backends.fsdp import ShardedModel
    from hybrid_engine.backends.vllm import InferenceEngine
    from hybrid_engine.backends.vllm.generation.prompts import Prompts
    from hybrid_engine.backends.vllm.generation.sampling_params import AnySampling
    from hybrid_engine.ports import Data

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
    built and ends: `HybridEngine(train, inference, config)`. `ActorHybridWorker` builds Megatron and vLLM from a
    configuration and adds rollouts and updates.

    Args:
        model: a transformers causal LM, or PEFT's around one; sharded in place, it stays the caller's, who trains it in
            his own loop. LoRA is added to the weights on their way, or delivered apart (`lora_delivery: adapter`).
        rollout_config: `tp_size`, `pp_size`, `dp_type`, and the keys of `generate_config`; see `config.hugging_face`.
        train_config: `fsdp_config`, see `config.FsdpConfig`; None: the model is sharded already.
        enable_reshard: False is refused: there is no other way to bring the weights to vLLM.
        compress_reshard: send weights in `compression_dtype`, which vLLM then computes in.
        compression_dtype: a torch dtype or its name.

        train: whoever trains: a `TrainEngine`, a `LiveModel` where somebody else's loop trains Megatron's model, a
            `ShardedModel`, or another `ports.Trainer`.
        inference: an `InferenceEngine`; the switch is one of its job.
        config: the checked configuration.
        offloader: of the trainer's state; made here when there is none.
        weights: what is written at a switch; default: the inference engine's weights alone.
        training_layouts: of all ranks, where they are known (`rendezvous.gather_layouts`).

    Training and scoring outside these contexts, on memory that was given away, raise StateError.
    """

    train: TrainerT
    inference: InferenceEngine

    @overload
    def __init__(
        self: HybridEngine[ShardedModel],
        *,
        model: torch.nn.Module,
        rollout_config: Mapping[str, Any] | None = None,
        train_config: Mapping[str, Any] | None = None,
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
        training_layouts: Sequence[Layout] | None = None,
    ) -> None: ...

    def __init__(
        self,
        train: Any = None,
        inference: Any = None,
        config: Any = None,
        *,
        offloader: Offloader | None = None,
        weights: InferenceWeights | None = None,
        training_layouts: Sequence[Layout] | None = None,
        model: torch.nn.Module | None = None,
        **settings: Any,
    ) -> None:
        self._lora: str | None = None  # what completions are drawn with, where it is delivered by itself
        with Ends() as undo:
            if model is not None:
                parts = build_parts(model, undo, **settings)
                train, inference, config = parts.train, parts.inference, parts.config
                offloader, training_layouts = parts.offloader, parts.training_layouts
                weights, self._lora = parts.weights, parts.lora
            elif settings:
                raise TypeError(f"only with a model: {', '.join(settings)}")
            self.train, self.inference, self.config, self.job = train, inference, config, inference.job
            self._sharding = ShardingManager(
                trainer=train,
                inference=weights or inference.adaptor,
                caches=inference,
                offloader=offloader or Offloader(train.offload_items, reachable=train.reachable_tensors),
                config=config.generate_config,
                job=inference.job,
                training_layouts=training_layouts,
            )
            if model is not None:
                undo.callback(self.sharding.close)
            self._ends = undo.pop_all()
        # weak: the switch refers to the model, whose hooks in autograd Python's collector does not see through
        require_kinds = weakref.WeakMethod(self.sharding.require_kinds)
        train.guard = lambda kinds: (require := require_kinds()) and require(kinds)
        if config.generate_config.prefetch == "auto":
            near_end = weakref.WeakMethod(self.sharding.near_end)
            inference.near_end = NearEnd(
                # on the CPU a copy would take a core from decoding
                config.generate_config.prefetch_share if inference.job.device.type == "cuda" else 0.0,
                lambda: (begin := near_end()) and begin(),
            )

    def generate(
        self,
        prompts: Prompts,
        sampling: AnySampling | None = None,
        attention_mask: torch.Tensor | None = None,
        *,
        data: Data = "global",
    ) -> Any:
        """Completions of prompts, in the form of the prompts, spread over the inference replicas. In `rollout_context`.

        Args:
            prompts: token ids [B, S] int64, which are answered by a tensor [B * n, S + longest] of prompts and
                completions, padded on the right; texts or chats, by n texts each; or lists of token ids, by n
                `Completion`s each.
            sampling: how, ours or `vllm.SamplingParams`; default: `Sampling()`.
            attention_mask: [B, S], 0 where a prompt of a tensor is padded, on either side.
            data: "global": all ranks pass the same prompts and get all completions; "local": each rank passes its own,
                any number of them, and gets theirs.

        Raises StateError outside the context, ConfigError for prompts that cannot be, GenerationError.
        """
        from hybrid_engine.backends.vllm.generation.prompts import in_form_of

        self.sharding.require(State.INFER)
        completions = self.inference.generate_over_replicas(prompts, sampling, self._lora, attention_mask, data)
        return in_form_of(prompts, completions, self._pad_token_id())

    def _pad_token_id(self) -> int:
        hf_config = self.config.hf_config()
        ends = (hf_config.get("pad_token_id"), hf_config.get("eos_token_id"))
        return next((token for token in ends if isinstance(token, int)), 0)

    def take_over(self, owner: ExitStack) -> None:
        """Have `shutdown` end what `owner` would have ended."""
        self._ends.enter_context(owner.pop_all())

    def shutdown(self) -> None:
        """End vLLM and the job, where this engine made them; idempotent. Model and optimizer stay, on the device."""
        self._ends.close()
