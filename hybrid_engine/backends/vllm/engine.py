"""vLLM in the processes that train: built on their process group, fed by an adaptor, asked for completions.

    engine = InferenceEngine(settings, tensors={hf name: shape}, rank=dist.get_rank())     # collective
    plan(training.layout(), engine.adaptor.layout())                                       # once
    ... allocate, fill, commit through engine.adaptor; engine.reset_caches() ...            # every switch
    completions = engine.generate(prompts_of_this_replica, Sampling(n=8, max_tokens=32))   # all ranks together
    engine.adaptor.release()

Every rank of a replica passes the same prompts and computes the same answers; replicas may pass different numbers of
prompts, also none.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import random
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hybrid_engine.backends.vllm.adaptor import VllmAdaptor
from hybrid_engine.backends.vllm.names import ENGINE_TOKEN
from hybrid_engine.backends.vllm.settings import Completion, InferenceSettings, Sampling
from hybrid_engine.backends.vllm.version import TESTED_VERSION, require_vllm
from hybrid_engine.errors import ConfigError, RemoteError, StateError, UnknownModelError, Violation

logger = logging.getLogger(__name__)

_DEFAULT_CPU_KV_CACHE = 256 << 20
_SHM = Path("/dev/shm")


class InferenceEngine:
    """One rank of the colocated vLLM.

    Attributes:
        adaptor: this rank's weights (`InferenceWeights`).
        tp_rank, pp_rank, dp_rank: which shard, stage and replica this rank is.
    """

    def __init__(self, settings: InferenceSettings, tensors: Mapping[str, tuple[int, ...]], rank: int) -> None:
        """Build vLLM; every rank calls this at the same time, with an initialised default process group.

        Args:
            settings: the same on every rank.
            tensors: canonical names and shapes of the whole model.
            rank: global rank.

        Weights are zero and `generate` refuses until all groups were committed once. The process's random state and
        its process groups are as before. Raises DependencyError, ConfigError, ModelError or ParameterMismatchError.
        """
        require_vllm()
        _check_world(settings, rank)
        self.settings = settings
        self.rank = rank
        tp, pp = settings.tensor_parallel_size, settings.pipeline_parallel_size
        self.tp_rank, self.pp_rank, self.dp_rank = rank % tp, rank // tp % pp, rank // (tp * pp)
        self._device_type = "cuda" if torch.cuda.is_available() else "cpu"
        self._adaptor: VllmAdaptor | None = None
        self._kv_cache_asleep = False
        set_environment(settings, rank)
        with _random_state_kept():
            try:
                self._llm: Any = self._build(tensors)
            except BaseException:
                _destroy_groups()
                raise
            # At collection or exit vLLM would end the default process group, which is the caller's; see `shutdown`.
            self._llm.llm_engine.engine_core._finalizer.detach()
            self._generator_state = _seeded_state(settings.seed + self.dp_rank)
        if self._device_type == "cuda" and self._sleep_mode:
            self.adaptor.memory = _SleepMode(self)

    # -- answers ------------------------------------------------------------------------------------------------------

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[Completion]]:
        """Complete token-id prompts: per prompt, `sampling.n` completions.

        All ranks call together. Raises StateError while the weights are released or incomplete, and ConfigError
        naming every prompt that is empty, too long or out of the vocabulary.
        """
        self._check_prompts(prompts, sampling.max_tokens)
        outputs = self._run(prompts, _sampling_params(sampling))
        return [[_completion(choice) for choice in output.outputs] for output in outputs]

    def prompt_logprobs(self, token_ids: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Log-probability of each token after the tokens before it: per sequence a float32 tensor [length - 1]."""
        return [
            torch.tensor([position[token].logprob for position, token in zip(rows[1:], tokens[1:], strict=True)])
            for rows, tokens in zip(self._score(token_ids, 0), token_ids, strict=True)
        ]

    def prompt_distributions(self, token_ids: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Log-probabilities of the whole vocabulary: per sequence float32 [length - 1, vocabulary]. Slow; for tests."""
        distributions = []
        for rows in self._score(token_ids, -1):
            table = torch.empty(len(rows) - 1, len(rows[1]))
            for index, position in enumerate(rows[1:]):
                for token, entry in position.items():
                    table[index, token] = entry.logprob
            distributions.append(table)
        return distributions

    def manual_seed(self, seed: int) -> None:
        """Start the sampler's generator anew; replica d gets seed + d. Makes a resumed run draw as the first did."""
        with _random_state_kept():
            self._generator_state = _seeded_state(seed + self.dp_rank)

    # -- memory -------------------------------------------------------------------------------------------------------

    @property
    def adaptor(self) -> VllmAdaptor:
        assert self._adaptor is not None
        return self._adaptor

    @property
    def llm(self) -> Any:
        """The `vllm.LLM`. Raises StateError after `shutdown`."""
        if self._llm is None:
            raise StateError("the inference engine was shut down: build a new one")
        return self._llm

    def reset_caches(self) -> None:
        """Forget cached prefixes; call after every switch, for they were computed with the old weights."""
        self.llm.reset_prefix_cache()

    def release(self) -> None:
        """Give up the weights' memory and, on GPU with sleep mode, the KV cache's."""
        self.llm.reset_prefix_cache()
        self.adaptor.release()

    def wake_kv_cache(self) -> None:
        """Take the KV cache's memory again (GPU, after a release); call once the weights are committed."""
        if self._kv_cache_asleep:
            self.llm.wake_up(tags=["kv_cache"])
            self._kv_cache_asleep = False

    def memory_bytes(self) -> Mapping[str, int]:
        """Bytes on this rank: `weights` in memory now, `weights_total` when all are, `kv_cache`."""
        runner = self.llm.llm_engine.model_executor.driver_worker.worker.model_runner
        storages = [cache.untyped_storage() for cache in runner.kv_caches if isinstance(cache, torch.Tensor)]
        kv_cache = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
        return {
            "weights": self.adaptor.resident_nbytes(),
            "weights_total": self.adaptor.nbytes,
            "kv_cache": 0 if self._kv_cache_asleep else kv_cache,
        }

    def shutdown(self) -> None:
        """End vLLM and its process groups, not the caller's; idempotent. Another engine may be built afterwards."""
        if self._llm is None:
            return
        llm, self._llm, self._adaptor = self._llm, None, None
        core = llm.llm_engine.engine_core.engine_core
        core.structured_output_manager.clear_backend()
        core.model_executor.shutdown()
        core.scheduler.shutdown()
        del core, llm
        gc.unfreeze()  # vLLM froze the collector's generations at start-up
        _destroy_groups()
        gc.collect()

    # -- inside -------------------------------------------------------------------------------------------------------

    @property
    def _sleep_mode(self) -> bool:
        chosen = self.settings.enable_sleep_mode
        return self._device_type == "cuda" if chosen is None else chosen and self._device_type == "cuda"

    @property
    def _eager(self) -> bool:
        chosen = self.settings.enforce_eager
        return self._device_type == "cpu" if chosen is None else chosen

    def _build(self, tensors: Mapping[str, tuple[int, ...]]) -> Any:
        with _own_shared_memory(), self._stance():
            from vllm import LLM

            from hybrid_engine.backends.vllm.loader import capturing

            _inspect_here(self.settings.model_dir)

            def capture(model: torch.nn.Module, model_config: Any) -> VllmAdaptor:
                dtype = getattr(torch, self.settings.dtype)
                with _raised_everywhere("tracing vLLM's loader"):
                    self._adaptor = VllmAdaptor(model, tensors, dtype, self.rank, model_config.dtype)
                return self._adaptor

            with capturing(capture):
                return LLM(**self._llm_arguments())

    def _llm_arguments(self) -> dict[str, Any]:
        from hybrid_engine.backends.vllm.loader import LOAD_FORMAT

        settings = self.settings
        arguments = {
            "model": settings.model_dir,
            "load_format": LOAD_FORMAT,
            "skip_tokenizer_init": True,
            "distributed_executor_backend": "external_launcher",
            "tensor_parallel_size": settings.tensor_parallel_size,
            "pipeline_parallel_size": settings.pipeline_parallel_size,
            # Replicas know of each other only where they share experts; else vLLM would keep them in lockstep.
            "data_parallel_size": settings.data_parallel_size if settings.enable_expert_parallel else 1,
            "enable_expert_parallel": settings.enable_expert_parallel,
            "dtype": settings.dtype,
            "seed": settings.seed,
            "enforce_eager": self._eager,
            "max_num_seqs": settings.max_num_seqs,
            "enable_prefix_caching": settings.enable_prefix_caching,
            "gpu_memory_utilization": settings.gpu_memory_utilization,
            "enable_sleep_mode": self._sleep_mode,
            "max_logprobs": -1,
            "disable_log_stats": True,
        }
        kv_cache_bytes = settings.kv_cache_bytes
        if self._device_type == "cpu":
            kv_cache_bytes = kv_cache_bytes or _DEFAULT_CPU_KV_CACHE
            arguments["worker_cls"] = "hybrid_engine.backends.vllm.worker.GuestCPUWorker"
        if kv_cache_bytes is not None:
            arguments["kv_cache_memory_bytes"] = kv_cache_bytes
        if settings.max_model_len is not None:
            arguments["max_model_len"] = settings.max_model_len
        return {**arguments, **settings.extra}

    def _stance(self) -> contextlib.AbstractContextManager[Any]:
        """Eager on CPU means eager: vLLM's samplers carry `torch.compile` decorators that cost seconds at first use."""
        if self._eager and self._device_type == "cpu":
            return torch.compiler.set_stance("force_eager")
        return contextlib.nullcontext()

    def _run(self, prompts: Sequence[Sequence[int]], params: Any) -> list[Any]:
        llm = self.llm
        self.adaptor.require_ready()
        if self._kv_cache_asleep:
            raise StateError("the KV cache's memory is released: call wake_kv_cache() before generating")
        requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        with _random_state_kept(), self._stance():
            _set_state(self._generator_state)
            outputs = llm.generate(requests, params, use_tqdm=False)
            self._generator_state = _get_state()
        return outputs

    def _score(self, token_ids: Sequence[Sequence[int]], num_logprobs: int) -> list[Any]:
        from vllm import SamplingParams

        self._check_prompts(token_ids, 1)
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=num_logprobs, detokenize=False)
        return [output.prompt_logprobs for output in self._run(token_ids, params)]

    def _check_prompts(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
        config = self.llm.llm_engine.model_config
        limit, vocabulary = config.max_model_len, config.get_vocab_size()
        violations = []
        for index, prompt in enumerate(prompts):
            if not len(prompt) or len(prompt) + max_tokens > limit:
                problem = f"{len(prompt)} tokens and {max_tokens} to draw, but 1 to {limit} fit together"
                violations.append(Violation(f"prompts[{index}]", problem, "Shorten it or raise max_model_len"))
            elif min(prompt) < 0 or max(prompt) >= vocabulary:
                problem = f"token ids from {min(prompt)} to {max(prompt)}, but the vocabulary has {vocabulary}"
                violations.append(Violation(f"prompts[{index}]", problem, "Use the model's tokenizer"))
        if violations:
            raise ConfigError(violations)


def _inspect_here(model_dir: str) -> None:
    """Register the model's class itself: by name, vLLM would import itself again in a subprocess to look at it.

    Raises UnknownModelError when vLLM has no such architecture.
    """
    from vllm import ModelRegistry

    architectures = json.loads(Path(model_dir, "config.json").read_text()).get("architectures", [])
    known = [name for name in architectures if name in ModelRegistry.models]
    if not known:
        raise UnknownModelError(
            f"{model_dir}/config.json: vLLM {TESTED_VERSION} has no model for architectures {architectures}; it names "
            "them as transformers does, e.g. LlamaForCausalLM"
        )
    for name in known:
        registered = ModelRegistry.models[name]
        if hasattr(registered, "module_name"):
            ModelRegistry.register_model(name, registered.load_model_cls())


def _destroy_groups() -> None:
    """End vLLM's process groups; its own way of doing this also ends the default group, which is the caller's."""
    from vllm import envs
    from vllm.distributed import parallel_state

    envs.disable_envs_cache()
    parallel_state.destroy_model_parallel()
    if parallel_state._WORLD is not None:
        parallel_state._WORLD.destroy()
        parallel_state._WORLD = None
        parallel_state._NODE_COUNT = None


class _SleepMode:
    """vLLM's sleep mode as the adaptor's `DeviceMemory`: level 2 gives weights and KV cache back, addresses stay."""

    def __init__(self, engine: InferenceEngine) -> None:
        self._engine = engine

    def free(self) -> None:
        self._engine.llm.sleep(level=2)
        self._engine._kv_cache_asleep = True

    def restore(self) -> None:
        self._engine.llm.wake_up(tags=["weights"])


def set_environment(settings: InferenceSettings, rank: int) -> None:
    """Set what vLLM reads from the environment, where the user has not: call before vLLM is first imported."""
    defaults = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": settings.log_level,
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(dist.get_world_size()),
    }
    for key, value in defaults.items():
        os.environ.setdefault(key, value)


def _check_world(settings: InferenceSettings, rank: int) -> None:
    if not dist.is_initialized():
        raise StateError("no process group: call torch.distributed.init_process_group (or Megatron's) first")
    violations = []
    if settings.num_ranks != dist.get_world_size():
        violations.append(
            Violation(
                "data_parallel_size x pipeline_parallel_size x tensor_parallel_size",
                f"{settings.data_parallel_size} x {settings.pipeline_parallel_size} x {settings.tensor_parallel_size} "
                f"= {settings.num_ranks}, but there are {dist.get_world_size()} ranks",
                "Let their product be the world size",
            )
        )
    if not Path(settings.model_dir, "config.json").is_file():
        problem = f"{settings.model_dir} has no config.json"
        violations.append(Violation("model_dir", problem, "Give a directory with the Hugging Face config"))
    if rank != dist.get_rank() or os.environ.get("RANK", str(rank)) != str(rank):
        problem = f"{rank}, but the process group says {dist.get_rank()} and RANK is {os.environ.get('RANK')}"
        violations.append(Violation("rank", problem, "Launch with torchrun and pass dist.get_rank()"))
    if violations:
        raise ConfigError(violations)


@contextlib.contextmanager
def _raised_everywhere(phase: str) -> Iterator[None]:
    """Let every rank learn of an error inside: the others raise RemoteError instead of waiting for this one."""
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    reports: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(reports, None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    if failed := {rank: report for rank, report in enumerate(reports) if report is not None}:
        raise RemoteError("\n".join(f"{phase} failed on rank {rank}: {report}" for rank, report in failed.items()))


@contextlib.contextmanager
def _own_shared_memory() -> Iterator[None]:
    """Give the shared memory that vLLM makes inside a name of this engine, and take the names away at the end.

    All ranks have mapped it then. Without names nothing stays in /dev/shm, whatever becomes of the processes.
    """
    token = [secrets.token_hex(8)]
    dist.broadcast_object_list(token)
    os.environ[ENGINE_TOKEN] = token[0]
    try:
        yield
        dist.barrier()
    finally:
        del os.environ[ENGINE_TOKEN]
        for path in _SHM.glob(f"*{token[0]}*"):
            path.unlink(missing_ok=True)


def _sampling_params(sampling: Sampling) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        n=sampling.n,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_tokens,
        seed=sampling.seed,
        logprobs=0 if sampling.logprobs else None,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        detokenize=False,
    )


def _completion(choice: Any) -> Completion:
    tokens = tuple(choice.token_ids)
    logprobs = choice.logprobs or ()
    return Completion(
        tokens,
        tuple(position[token].logprob for position, token in zip(logprobs, tokens, strict=False)),
        str(choice.finish_reason),
    )


def _get_state() -> tuple[Any, ...]:
    """The random state of this process: Python, numpy, torch and the current device."""
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda


def _set_state(state: tuple[Any, ...]) -> None:
    python, numpy, cpu, cuda = state
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(cpu)
    if cuda is not None:
        torch.cuda.set_rng_state(cuda)


def _seeded_state(seed: int) -> tuple[Any, ...]:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    return _get_state()


@contextlib.contextmanager
def _random_state_kept() -> Iterator[None]:
    """Whatever vLLM draws or seeds inside, training draws as if it had not: dropout and data order stay bitwise."""
    state = _get_state()
    try:
        yield
    finally:
        _set_state(state)
