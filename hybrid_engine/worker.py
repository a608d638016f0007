"""`ActorHybridWorker`: one rank of a group that generates with vLLM and trains with Megatron, from a configuration."""

from __future__ import annotations

import datetime
import itertools
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

import megatron_patches
from hybrid_engine.assembly import build_inference_engine
from hybrid_engine.config import HybridConfig
from hybrid_engine.errors import ConfigError, DependencyError, LostRankError, Violation
from hybrid_engine.hybrid_engine import HybridEngine
from hybrid_engine.memory.offloader import MegatronOffloader
from hybrid_engine.models import table_for
from hybrid_engine.models.lora_tensors import adapted_modules, adapter_shapes
from hybrid_engine.ports import InferenceWeights
from hybrid_engine.ranks.agreement import SECONDS_TO_BUILD, SHORT_PATIENCE, Agreement
from hybrid_engine.switch.sharding_manager import ShardingManager, State
from megatron_patches.errors import PatchSetError

if TYPE_CHECKING:
    from hybrid_engine.backends.megatron.train_engine import Batch, LossFunction, TrainEngine
    from hybrid_engine.backends.vllm import Completion, InferenceEngine, Sampling


class ActorHybridWorker:
    """The actor: Megatron for training, vLLM for generation, on the same devices.

    Build one on every rank, under torchrun. It creates the process group when there is none, applies the Megatron
    patches, and builds both engines; Megatron's weights are the only ones initialised, vLLM's come by resharding.

    Batches and prompts are global: every rank passes the same, and gets the whole result.

    Args:
        config: see `load_config`.
        weights_only: the training model holds weights and is not asked to compute. For checks of the switch with models
            or layouts that this project does not train.
    """

    def __init__(self, config: HybridConfig, *, weights_only: bool = False) -> None:
        self.config = config
        self._weights_only = weights_only
        self.adapter: str | None = None  # what completions are drawn with, where adapters are delivered apart
        self._is_shut_down = self._has_parallel_state = False
        self._created_process_group = _initialize_process_group(config.generate_config.timeout_seconds)
        try:
            self._agreement = Agreement(config.generate_config.timeout_seconds)
            self._build(self._agreement)
        except BaseException:
            self.shutdown()
            raise

    def _build(self, agreement: Agreement) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        with agreement.building():
            self._build_engines(agreement)

    def _build_engines(self, agreement: Agreement) -> None:
        with agreement.phase("checking what is installed"):
            _require_installed()
            hf_config = self.config.hf_config()
            self.table = table_for(hf_config)
        with agreement.phase("building the training engine", SHORT_PATIENCE):
            from hybrid_engine.backends.megatron import build
            from hybrid_engine.backends.megatron.train_engine import TrainEngine

            actor_config = self.config.actor_config
            self._has_parallel_state = True
            build.initialize_parallel_state(actor_config, self.config.generate_config.timeout_seconds)
            self.actor = build.build_actor(actor_config, self.table, hf_config, weights_only=self._weights_only)
            adapters_apart = self.config.generate_config.lora_delivery == "adapter"
            self.train: TrainEngine = TrainEngine(self.actor, self.table, actor_config.micro_batch_size, adapters_apart)
            offloader = MegatronOffloader(self.train.offload_items, reachable=self.train.reachable_tensors)
            offloader.offload()  # vLLM looks at the memory that is free while it starts
        self.inference: InferenceEngine = build_inference_engine(self.config, self.table, self.train.weights, agreement)
        with agreement.phase("delivering adapters"):
            weights = self._weights_with_adapter() if adapters_apart else self.inference.adaptor
        self.engine = HybridEngine(self.train, self.inference, self.config, offloader, agreement, weights)

    def _weights_with_adapter(self) -> InferenceWeights:
        """vLLM's weights and the adapter beside them; completions use it from then on."""
        from hybrid_engine.backends.vllm.engine_settings import AdapterConfig
        from hybrid_engine.backends.vllm.lora.delivery import ACTOR_ADAPTER, WeightsWithAdapter

        lora = self.config.actor_config.lora
        shapes = adapter_shapes(self.table, lora.target_modules, lora.rank)
        adapter = AdapterConfig(lora.rank, lora.alpha, adapted_modules(shapes))
        self.adapter = ACTOR_ADAPTER
        dtype = getattr(torch, self.config.wire_dtype)
        return WeightsWithAdapter(self.inference.adaptor, self.inference.adapters, shapes, adapter, dtype)

    @property
    def sharding(self) -> ShardingManager:
        """The switch, its state and its last report."""
        return self.engine.sharding

    def rollout_context(self) -> AbstractContextManager[None]:
        """See `HybridEngine.rollout_context`."""
        return self.engine.rollout_context()

    def train_context(self) -> AbstractContextManager[None]:
        """See `HybridEngine.train_context`."""
        return self.engine.train_context()

    def forward_context(self) -> AbstractContextManager[None]:
        """See `HybridEngine.forward_context`."""
        return self.engine.forward_context()

    def generate_sequences(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[Completion]]:
        """Completions of all prompts, spread over the inference replicas. In `rollout_context`.

        Args:
            prompts: token ids, the same list on every rank.
            sampling: how; `sampling.n` completions a prompt.

        Returns, on every rank, a list of `n` completions for each prompt, in the order of `prompts`.
        """
        self.sharding.require(State.INFER)
        return self.inference.generate_over_replicas(prompts, sampling, self.adapter)

    def compute_log_probs(self, batch: Batch) -> torch.Tensor:
        """Log-probability [B, S] fp32 of every label under the training weights. In train or forward context."""
        self.sharding.require(State.TRAIN, State.FORWARD)
        with self._agreement.call("scoring"):
            return whole_log_probs(self.train, batch)

    def update(self, batch: Batch, loss_function: LossFunction) -> dict[str, float]:
        """One optimizer step on the batch; see `TrainEngine.train_step`. In `train_context`."""
        self.sharding.require(State.TRAIN)
        with self._agreement.call("training step"):
            return self.train.train_step(share_of(self.train, batch), loss_function)

    def save_checkpoint(self, directory: str | Path) -> None:
        """Write parameters, optimizer state and generators below `directory`. In `train_context`."""
        self.sharding.require(State.TRAIN)
        from hybrid_engine.backends.megatron import rank_checkpoint as checkpoint

        self.train.weights.base.prepare()
        checkpoint.save_checkpoint(directory, self.actor, self.sharding.agreement)

    def load_checkpoint(self, directory: str | Path) -> None:
        """Take up what `save_checkpoint` wrote, on all ranks or on none. In `train_context`."""
        self.sharding.require(State.TRAIN)
        from hybrid_engine.backends.megatron import rank_checkpoint as checkpoint

        checkpoint.load_checkpoint(directory, self.actor, self.sharding.agreement)

    def load_hf_checkpoint(self, path: str | Path) -> None:
        """Take the weights from a Hugging Face checkpoint (safetensors), whatever the layout. In `train_context`.

        Every rank reads only what it holds, and its share of the files to check their checksums. Main parameters
        follow; moments and step count stay as they are; adapters add nothing from then on, for a checkpoint holds sums.
        Raises, with nothing changed on any rank, ConfigError, FileError naming the file, or ParameterMismatchError
        naming every tensor that is missing, unknown or of another shape.
        """
        self.sharding.require(State.TRAIN)
        from hybrid_engine.backends.huggingface import load_hf_checkpoint

        load_hf_checkpoint(path, self.train.weights.base, self.table, self.sharding.agreement)
        self.train.take_up_weights()

    def save_hf_checkpoint(self, path: str | Path, dtype: str | None = None) -> None:
        """Write the weights, adapters added, as a Hugging Face checkpoint with config and tokenizer of `config.model`.

        In `train_context`. `path` is on storage that all ranks share; every rank writes its part and nothing is
        gathered. `dtype`: of the stored weights, e.g. "bfloat16"; default: the training weights' own. Older weights of
        this model there are replaced: whatever happens, readers find those or the new ones. Raises FileError naming the
        file, and ConfigError where the weights are another model's.
        """
        self.sharding.require(State.TRAIN)
        from hybrid_engine.backends.huggingface import save_hf_checkpoint

        model_dir, agreement = self.config.model, self.sharding.agreement
        with agreement.phase("adding adapters"):
            weights = self.train.weights.merged
        save_hf_checkpoint(path, weights, self.table, agreement, model_dir, dtype)

    def shutdown(self) -> None:
        """End vLLM, Megatron's groups, and the process group if it was created here; idempotent.

        Another worker may be built afterwards. This one keeps its configuration and Megatron's weights, nothing else;
        they go with it.
        """
        if self._is_shut_down:
            return
        self._is_shut_down = True
        with ExitStack() as steps:  # the last first, each even if another fails
            if self._created_process_group:
                steps.callback(_end_job)
            if "_agreement" in vars(self):
                steps.callback(self._agreement.close)
            if self._has_parallel_state:
                steps.callback(self._end_megatron)
            if "inference" in vars(self):
                steps.callback(self.inference.shutdown)
            if "engine" in vars(self):
                steps.callback(vars(self).pop("engine").sharding.close)

    def _end_megatron(self) -> None:
        from hybrid_engine.backends.megatron import build

        if "actor" in vars(self):
            build.end_training(self.actor)
        build.destroy_parallel_state()


class ReferenceModel:
    """A frozen copy of the actor's present weights, off the device except while it scores.

    Args:
        worker: gives layout and weights; in train or forward state now, for the weights must be on the device.
    """

    def __init__(self, worker: ActorHybridWorker) -> None:
        worker.train.guard(["param"])
        from hybrid_engine.backends.megatron import build
        from hybrid_engine.backends.megatron.train_engine import TrainEngine

        actor_config = worker.config.actor_config
        model = build.build_reference(actor_config, worker.table, worker.config.hf_config())
        self.engine = TrainEngine(model, worker.table, actor_config.micro_batch_size)
        self.engine.copy_weights_from(worker.train)
        self._agreement = worker.sharding.agreement
        self._offloader = MegatronOffloader(self.engine.offload_items)
        self._offloader.offload({"param"})

    def compute_log_probs(self, batch: Batch) -> torch.Tensor:
        """Log-probability [B, S] fp32 of every label under the frozen weights. Collective; in any state."""
        with self._agreement.phase("onload of the reference"):
            self._offloader.onload({"param"}, read_only=True)
        try:
            with self._agreement.call("scoring by the reference"):
                return whole_log_probs(self.engine, batch)
        finally:
            self._offloader.offload({"param"})


def _require_installed() -> None:
    """Check both engines' versions and patch megatron-core, before anything is built. Raises DependencyError."""
    from hybrid_engine.backends.vllm import require_vllm

    require_vllm()
    try:
        megatron_patches.apply()
    except PatchSetError as error:
        raise DependencyError(str(error)) from error


def _end_job() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def share_of(engine: TrainEngine, batch: Batch) -> Batch:
    """This data parallel rank's consecutive part of a global batch."""
    num_sequences = batch["tokens"].shape[0]
    if num_sequences % (engine.dp_size * engine.micro_batch_size):
        raise ValueError(
            f"{num_sequences} sequences do not split over {engine.dp_size} data parallel ranks in micro batches of "
            f"{engine.micro_batch_size}; pad the batch"
        )
    size = num_sequences // engine.dp_size
    return {name: tensor[engine.dp_rank * size : (engine.dp_rank + 1) * size] for name, tensor in batch.items()}


def whole_log_probs(engine: TrainEngine, batch: Batch) -> torch.Tensor:
    """Score a global batch: each data parallel rank its share, the result on every rank."""
    own = engine.log_probs(share_of(engine, batch))
    whole = own if engine.dp_size == 1 else engine.gather_over_data_parallel(own)
    return whole.to(batch["tokens"].device)


def _initialize_process_group(timeout_seconds: float) -> bool:
    """Join torchrun's process group unless there is one; True when it was created here."""
    if dist.is_initialized():
        return False
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ConfigError([Violation("environment", f"{', '.join(missing)} not set", "Start the script with torchrun")])
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    start_up = max(timeout_seconds, SECONDS_TO_BUILD)
    try:
        store, rank, world_size = next(dist.rendezvous("env://", timeout=datetime.timedelta(seconds=start_up)))
        # torchrun's store outlives a group: under its own keys a second one would find the first one's addresses
        own_store = dist.PrefixStore(f"hybrid_engine/{next(_group_numbers)}", store)
        _meet(own_store, rank, world_size, start_up)
    except dist.DistError as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise LostRankError(
            f"the ranks did not meet at {where} within {start_up:g} s ({error}): see the logs of those that are "
            "missing, or raise generate_config.timeout_seconds"
        ) from error
    timeout = datetime.timedelta(seconds=timeout_seconds)
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, store=own_store, rank=rank, world_size=world_size, timeout=timeout)
    return True


def _meet(store: dist.Store, rank: int, world_size: int, seconds: float) -> None:
    """Wait until every rank has started: they import for a minute on a busy host, and not at one speed.

    Afterwards a wait for a peer takes no longer than the timeout. Raises LostRankError naming the missing ranks.
    """
    names = [f"started/{each}" for each in range(world_size)]
    store.set(names[rank], "")
    try:
        store.wait(names, datetime.timedelta(seconds=seconds))
    except dist.DistStoreError as error:
        missing = [str(each) for each, name in enumerate(names) if not store.check([name])]
        raise LostRankError(
            f"rank {', '.join(missing)} of {world_size} did not start within {seconds:g} s: see its log, or raise "
            "generate_config.timeout_seconds"
        ) from error


_group_numbers = itertools.count()
