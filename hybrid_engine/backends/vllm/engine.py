"""vLLM in the processes that train: built on their process group, fed by an adaptor, asked for completions.

    engine = InferenceEngine(settings, tensors={hf name: shape}, job=Job.join(timeout))     # collective
    plan(training.layout(), engine.adaptor.layout())                                       # once
    ... allocate, fill, commit through engine.adaptor; engine.reset_caches() ...            # every switch
    completions = engine.generate(prompts_of_this_replica, Sampling(n=8, max_tokens=32))   # all ranks together
    engine.adaptor.release()

Every rank of a replica passes the same prompts and computes the same answers; replicas may pass different numbers of
prompts, also none. Replicas that share experts call `generate` together. `generate_over_replicas` sees to all of that.

A call that fails half-way, by KeyboardInterrupt too, leaves no request, no cached prefix, and the sampler's generator
where it was: the same call again draws what it would have drawn. Where only one rank of a replica fails, the others
wait for it in vLLM; such a replica cannot go on.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from hybrid_engine.backends.vllm import arguments, internals, isolation, process_state, requests
from hybrid_engine.backends.vllm.config_reads import ConfigReads
from hybrid_engine.backends.vllm.engine_settings import Completion, InferenceSettings
from hybrid_engine.backends.vllm.live_attention import live_attention, require_positions
from hybrid_engine.backends.vllm.lora import DeliveredLoras
from hybrid_engine.backends.vllm.process_state import ProcessSettings, process_settings_kept, random_state_kept
from hybrid_engine.backends.vllm.prompts import ChatArguments, ModelTokenizer, Prompts, check_token_ids, token_ids_of
from hybrid_engine.backends.vllm.replica_exchange import ReplicaExchange, Request, check_data, stream_seeds
from hybrid_engine.backends.vllm.requests import asked_for, one_thread, sampling_of, sampling_params
from hybrid_engine.backends.vllm.weights.adaptor import VllmAdaptor
from hybrid_engine.backends.vllm.weights.loader import capturing
from hybrid_engine.backends.vllm.weights.processed_model import ProcessedModel, inspect_model
from hybrid_engine.backends.vllm.weights.processing_barrier import ProcessingBarrier
from hybrid_engine.backends.vllm.weights.traced_model import Context, TracedModel, trace_model
from hybrid_engine.backends.vllm.weights.weight_memory import (
    SleepingLlm,
    SleepMode,
    WeightMemory,
    after_workspaces,
    prepare_allocator,
)
from hybrid_engine.errors import ModelError, StateError
from hybrid_engine.memory.cuda_driver import taken_nbytes
from hybrid_engine.models.lora_tensors import LoraSettings
from hybrid_engine.ports import Data, NearEnd
from hybrid_engine.probes import Attention, ProbeAnswer, ProbeLimits
from hybrid_engine.ranks.agreement import SHORT_PATIENCE
from hybrid_engine.ranks.digests import text_digest
from hybrid_engine.ranks.job import Job
from hybrid_engine.ranks.process import Ends
from hybrid_engine.ranks.torch_internals import torch_defaults

if TYPE_CHECKING:
    from vllm import LLM

    from hybrid_engine.backends.vllm.requests import AnySampling, Samplings


class InferenceEngine:
    """One rank of the colocated vLLM.

    Attributes:
        adaptor: this rank's weights (`InferenceWeights`).
        tokenizer: the model's, where its directory has one.
        taken_before: bytes of this rank's GPU that were taken when vLLM was built; 0 on a CPU.
        near_end: is called in every `generate` when few sequences are left; `HybridEngine` sets it for prefetch.
        trained_lora: name of the LoRA that switches deliver beside the weights; None where there is none.
    """

    near_end: NearEnd | None = None
    trained_lora: str | None = None

    def __init__(
        self,
        settings: InferenceSettings,
        tensors: Mapping[str, tuple[int, ...]],
        job: Job,
        dtypes: Mapping[str, str] | None = None,
    ) -> None:
        """Build vLLM; every rank of the job calls this at the same time.

        Args:
            settings: the same on every rank.
            tensors: canonical names and shapes of the whole model.
            job: whose ranks generate; outlives this object.
            dtypes: canonical name -> dtype, where it is not that of the weights (`ModelTable.dtypes`).

        `generate` refuses until all groups were committed once. The process's random state, its process groups,
        environment and torch's settings are as before.

        Raises DependencyError, ConfigError, ModelError or ParameterMismatchError.
        """
        self.job, self.rank, self._agreement, self.settings = job, job.rank, job.agreement, settings
        self.tokenizer = ModelTokenizer(settings.tokenizer_dir or settings.model_dir)
        with Ends() as undo, torch_defaults(), process_settings_kept():
            with self._agreement.phase("checking vLLM and the model"):
                isolation.require_no_groups()
                self._device_type = arguments.check_settings(settings, job)
                with random_state_kept():  # it imports vLLM's modules
                    internals.require_names(self._device_type, with_lora=settings.max_loras > 0)
                self._place = settings.sizes.place_of(job.rank)
            memory = WeightMemory()
            sharing: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
            if self._device_type == "cpu":
                from hybrid_engine.backends.vllm.cpu import host_memory, shm_cleanup

                shm_cleanup.check_room(settings, job)
                memory = host_memory.CpuWeightMemory()
                sharing = shm_cleanup.unnamed_shared_memory(job.agreement)
            sleeps = arguments.is_sleepy(settings, self._device_type)
            with self._agreement.phase("looking for memory of an earlier vLLM"):
                if sleeps:
                    prepare_allocator()
            undo.callback(isolation.destroy_groups)
            self.taken_before = taken_nbytes(job.device)
            with sharing, random_state_kept():
                self._llm, model = self._build(tensors, dtypes, undo)
                # At collection or exit vLLM would end the default process group, which is the caller's; see `shutdown`.
                if (finalizer := getattr(self._llm.llm_engine.engine_core, "_finalizer", None)) is not None:
                    finalizer.detach()
                own_seed = text_digest(str(settings.generate.seed), str(self.dp_rank))
                self._generator_state = process_state.seeded_state(own_seed)
                self._process_settings = ProcessSettings.now()
            self._loras: DeliveredLoras | None = DeliveredLoras(self._llm, undo) if settings.max_loras else None
            self._sleep_mode = SleepMode(SleepingLlm(lambda: self.llm)) if sleeps else None
            memory = self._sleep_mode or memory
            # as weights were processed at first, but for the caller's stream, on which they arrive, and its threads
            own = replace(self._process_settings, stream=None, num_threads=None)
            self._adaptor: VllmAdaptor | None = VllmAdaptor(model, memory, not settings.generate.release_weights, own)
            self._exchange = ReplicaExchange(settings.sizes, job, self.tokenizer)
            undo.callback(self._exchange.close)
            self._ends = undo.pop_all()

    # -- answers ------------------------------------------------------------------------------------------------------

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Samplings, lora: str | None = None
    ) -> list[list[Completion]]:
        """Complete token-id prompts: per prompt, `n` completions of its sampling; with a LoRA, if one is named.

        All ranks call together. Raises StateError while the weights are released or incomplete, or while vLLM has
        requests of somebody else, and ConfigError naming every prompt that is empty, too long or out of the vocabulary.
        """
        asked = asked_for(sampling, len(prompts), self._params_of)
        self.check_prompts(prompts, asked.max_tokens)
        seeds = stream_seeds(asked.seeds, prompts, "global", self.job)
        each = [sampling_of(b"", params, seed) for params, seed in zip(asked.each, seeds, strict=True)]
        return self._complete(prompts, each, lora)

    def prompt_logprobs(self, token_ids: Sequence[Sequence[int]], lora: str | None = None) -> list[torch.Tensor]:
        """Log-probability of each token after the tokens before it: per sequence a float32 tensor [length - 1]."""
        return [
            requests.logprobs_of_prompt(*each) for each in zip(self._score(token_ids, 0, lora), token_ids, strict=True)
        ]

    def prompt_distributions(self, token_ids: Sequence[Sequence[int]], lora: str | None = None) -> list[torch.Tensor]:
        """Log-probabilities of the whole vocabulary: per sequence float32 [length - 1, vocabulary]. Slow; for tests."""
        return [requests.distributions_of_prompt(rows) for rows in self._score(token_ids, -1, lora)]

    @one_thread
    def generate_over_replicas(
        self,
        prompts: Prompts,
        sampling: Samplings | None = None,
        lora: str | None = None,
        attention_mask: torch.Tensor | None = None,
        data: Data = "global",
        chat: ChatArguments | None = None,
    ) -> list[list[Completion]]:
        """Completions of prompts in any form (prompts.py), in their order, by all replicas. Collective.

        Args:
            prompts: with global data the same on every rank, each of which gets all completions; with local data this
                rank's own, any number of them, whose completions it gets.
            sampling: how, one for all prompts or a list with one for each; `n` completions a prompt; default:
                `Sampling()`. The same on every rank, but for a list with local data.
            lora: name of a delivered one.
            attention_mask: of a tensor of prompts.
            data: "global" or "local", the same on every rank.
            chat: what chats are rendered with.

        Raises, on all ranks: ConfigError naming every prompt that cannot be, StateError as `generate`, GenerationError
        where vLLM failed and RemoteError on the others.
        """
        state = self._generator_state
        with self._agreement.phase("checking prompts"):  # those of all ranks: no replica starts in vain
            check_data(data)
            token_ids = token_ids_of(prompts, self.tokenizer, attention_mask, chat)
            asked = asked_for(sampling, len(token_ids), self._params_of)
            self.check_prompts(token_ids, asked.max_tokens)

        def complete(share: Sequence[Request]) -> list[list[Completion]]:
            each = [sampling_of(request.sampling, asked.shared, request.seed) for request in share]
            return self._complete([request.prompt for request in share], each, lora)

        try:
            alike = (data, asked.fields(data), lora)
            return self._exchange.complete(token_ids, data, alike, asked.seeds, asked.messages(), complete)
        except BaseException:
            self._generator_state = state  # also where this replica's part went well
            raise

    def abandon_requests(self) -> None:
        """Abort whatever vLLM has not finished, and forget cached prefixes; a failed call has done so by itself.

        Every rank calls. For those who add requests to `llm` on their own, or interrupted this clean-up too.
        """
        requests.abandon(self.llm)

    # -- probes (port `Probed`, switch/computation.py) -----------------------------------------------------------------

    def probe_limits(self) -> ProbeLimits:
        """See the port."""
        refusal = arguments.generation_problem(self.settings.sizes, self._device_type) or ""
        return requests.probe_limits(self.llm.llm_engine.vllm_config, refusal)

    def probe(self, tokens: torch.Tensor) -> ProbeAnswer:
        """See the port. Uses the trained LoRA, draws nothing, and prefetches nothing at its end."""
        state, near_end, self.near_end = self._generator_state, self.near_end, None
        try:
            rows = self.prompt_logprobs(tokens.tolist(), self.trained_lora)
        finally:
            self._generator_state, self.near_end = state, near_end
        return ProbeAnswer(torch.stack(rows), self.llm.llm_engine.model_config.dtype)

    def attention(self) -> Mapping[int, Attention]:
        """See the port."""
        layers = self.llm.llm_engine.vllm_config.compilation_config.static_forward_context
        return live_attention(internals.model_runner_of(self.llm).model, layers)

    def computed_settings(self) -> Mapping[str, Any]:
        """config.json as vLLM has it."""
        return dict(self.llm.llm_engine.model_config.hf_config.to_dict())

    # -- LoRA ---------------------------------------------------------------------------------------------------------

    def set_lora(self, name: str, settings: LoraSettings, tensors: Mapping[str, torch.Tensor]) -> None:
        """Deliver a LoRA, or a new version of one; it stays through switches of the base weights.

        All ranks call, with all of it; each keeps a copy on the host and its slice on the device.

        Args:
            name: to generate with.
            settings: rank, alpha and modules.
            tensors: by PEFT names: base_model.model.<module>.lora_A.weight [rank, in], lora_B [out, rank].

        Raises ConfigError with everything that does not fit, StateError when LoRA is off.
        """
        self.loras.deliver(name, settings, tensors)

    def remove_lora(self, name: str) -> None:
        """Forget a LoRA. Raises StateError when there is none of this name."""
        self.loras.forget(name)

    @property
    def loras(self) -> DeliveredLoras:
        """Raises StateError when vLLM was built without LoRA, or after `shutdown`."""
        _ = self.llm  # raises after `shutdown`
        if self._loras is None:
            raise StateError("vLLM was built without LoRA: set max_loras to the number of LoRAs in one batch")
        return self._loras

    # -- memory -------------------------------------------------------------------------------------------------------

    @property
    def adaptor(self) -> VllmAdaptor:
        assert self._adaptor is not None
        return self._adaptor

    @property
    def tp_rank(self) -> int:
        """Which shard this rank holds."""
        return self._place.tp_rank

    @property
    def pp_rank(self) -> int:
        """Which stage this rank holds."""
        return self._place.pp_rank

    @property
    def dp_rank(self) -> int:
        """Which replica this rank is in, of all."""
        return self._place.dp_rank

    @property
    def llm(self) -> Any:
        """The `vllm.LLM`. Raises StateError after `shutdown`."""
        if self._llm is None:
            raise StateError("the inference engine was shut down: build a new one")
        return self._llm

    def reset_caches(self) -> None:
        """Forget cached prefixes and zero all caches, after every switch. Raises StateError while requests are
        unfinished."""
        requests.reset_prefix_cache(self.llm)
        if self._sleep_mode is None or not self._sleep_mode.is_kv_cache_asleep:  # what sleeps has no memory
            requests.zero_caches(internals.model_runner_of(self.llm))

    def release(self) -> None:
        """Give up the weights' memory and, on GPU with sleep mode, the KV cache's. Raises as `reset_caches`."""
        requests.reset_prefix_cache(self.llm)
        if self._loras is not None:
            self._loras.drop_from_device()
        self.adaptor.release()

    def wake_kv_cache(self) -> None:
        """Take the KV cache's memory again (GPU, after a release); call once the weights are committed."""
        if self._sleep_mode is not None and self._sleep_mode.is_kv_cache_asleep:
            self._sleep_mode.wake_kv_cache()
            requests.zero_caches(internals.model_runner_of(self.llm))  # memory that anything may have been in
        if self._loras is not None:
            self._loras.reset_device()

    def shutdown(self) -> None:
        """End vLLM and its process groups, not the caller's; idempotent. Another engine may be built afterwards."""
        if self._llm is None or self._ends.is_inherited:
            return
        llm = self._llm
        self.adaptor.close()
        self._llm = self._adaptor = self._loras = self._sleep_mode = None
        gc.unfreeze()  # vLLM froze the collector's generations at start-up
        isolation.forget_import_frames()
        with self._ends:
            core = internals.core_of(llm)
            core.structured_output_manager.clear_backend()
            core.model_executor.shutdown()
            core.scheduler.shutdown()
        del core, llm
        gc.collect()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _build(
        self, tensors: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, str] | None, owner: contextlib.ExitStack
    ) -> tuple[LLM, ProcessedModel]:
        """vLLM, and its model as it was before and after its post-load processing; `owner` ends groups made here."""
        sleeps = arguments.is_sleepy(self.settings, self._device_type)
        names = dict.fromkeys(tensors, self.settings.dtype) | dict(dtypes or {})
        torch_dtypes = {name: getattr(torch, dtype) for name, dtype in names.items()}

        llm_arguments = arguments.llm_arguments(self.settings, self._device_type)
        reads: ConfigReads = llm_arguments["hf_overrides"]

        def trace(model: torch.nn.Module, model_config: Any) -> TracedModel:
            with self._agreement.phase("tracing vLLM's loader"):
                reads.require_known(model)
                require_positions(model, model_config.max_model_len)
                reads.stop()
                traced = trace_model(model, tensors, torch_dtypes, self.rank)
                if self.settings.max_loras and traced.staged:
                    raise ModelError(
                        f"{', '.join(traced.staged)} can only be written by the model's own loader, which does "
                        "not know the layers that LoRA wraps: set max_loras to 0"
                    )
            return traced

        def inspect(
            traced: TracedModel, context: Context, act_dtype: torch.dtype, is_collective: bool
        ) -> ProcessedModel:
            barrier = self._barrier(is_collective, owner)
            patience = SHORT_PATIENCE if barrier.is_collective else None  # the others may be inside vLLM's collective
            with self._agreement.phase("inspecting what vLLM computes with", patience):
                keeps_addresses = self._device_type != "cpu"
                has_graphs = keeps_addresses and not arguments.is_eager(self.settings, self._device_type)
                return inspect_model(traced, context, act_dtype, keeps_addresses, barrier, has_graphs)

        with (
            isolation.building_groups(self.settings, self.job),
            arguments.eager_stance(self.settings, self._device_type),
            internals.LOAD_MODEL.replaced(after_workspaces) if sleeps else contextlib.nullcontext(),
        ):
            from vllm import LLM

            with capturing(trace, inspect) as models, reads.checked():
                llm = LLM(**llm_arguments)
        (model,) = models
        return llm, model

    def _barrier(self, is_collective: bool, owner: contextlib.ExitStack) -> ProcessingBarrier:
        """For the processing of weights, which `is_collective` on this rank: a group ended by `owner` if on any."""
        if not any(self._agreement.any_of([is_collective], "looking for collectives")):
            return ProcessingBarrier()
        instances = self.settings.sizes.ranks.swapaxes(1, 2)  # instance, stage, replica, shard
        parts = instances.reshape(-1, instances[0, 0].size).tolist()
        return ProcessingBarrier(self.rank, self.job.new_group(owner, parts))

    def _params_of(self, sampling: AnySampling | None) -> Any:
        return sampling_params(sampling, self.tokenizer)

    def _complete(
        self, prompts: Sequence[Sequence[int]], each: Sequence[Any], lora: str | None
    ) -> list[list[Completion]]:
        outputs = self._run(prompts, each, lora)
        return [
            requests.completions_of(output, params, self.tokenizer)
            for output, params in zip(outputs, each, strict=True)
        ]

    @one_thread
    def _run(self, prompts: Sequence[Sequence[int]], each: Sequence[Any], lora: str | None) -> list[Any]:
        """vLLM's outputs of prompts with parameters for each."""
        llm = self.llm
        lora_request = None if lora is None else self.loras.request(lora)
        if problem := arguments.generation_problem(self.settings.sizes, self._device_type):
            raise StateError(f"{problem}: {arguments.GENERATING_LAYOUT}")
        self.adaptor.require_ready()
        if self._sleep_mode is not None and self._sleep_mode.is_kv_cache_asleep:
            raise StateError("the KV cache's memory is released: call wake_kv_cache() before generating")
        prompted = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        needs_tokenizer = any(map(requests.needs_tokenizer, each))
        tokenizer = self.tokenizer.attached_to(llm) if needs_tokenizer else contextlib.nullcontext()
        stance = arguments.eager_stance(self.settings, self._device_type)
        with torch_defaults(), random_state_kept(), process_settings_kept(self._process_settings), stance, tokenizer:
            process_state.set_state(self._generator_state)
            with requests.refusals_named(), requests.none_left(llm), requests.calling_near_end(llm, self.near_end):
                outputs = llm.generate(prompted, each, use_tqdm=False, lora_request=lora_request)
                requests.require_answers(outputs, prompts, [params.n for params in each])
            self._generator_state = process_state.get_state()
        return outputs

    def _score(self, token_ids: Sequence[Sequence[int]], num_logprobs: int, lora: str | None = None) -> list[Any]:
        from vllm import SamplingParams

        self.check_prompts(token_ids, 1)
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=num_logprobs, detokenize=False)
        return [output.prompt_logprobs for output in self._run(token_ids, [params] * len(token_ids), lora)]

    def check_prompts(self, prompts: Sequence[Sequence[int]], max_tokens: int | Sequence[int]) -> None:
        """Raise ConfigError naming every prompt that is empty, too long or out of the vocabulary."""
        config = self.llm.llm_engine.model_config
        check_token_ids(prompts, max_tokens, config.max_model_len, config.get_vocab_size())
