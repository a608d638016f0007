"""vLLM in the training processes: built on their process group, filled by an adaptor.

    # collective
    engine = InferenceEngine(settings, tensors={hf name: shape}, job=Job.join(timeout))
    # once
    plan(training.layout(), engine.adaptor.layout())
    # every switch
    ... allocate, fill, commit through engine.adaptor; engine.reset_caches() ...
    # all ranks together
    completions = engine.generate(prompts_of_this_replica, Sampling(n=8, max_tokens=32))
    engine.adaptor.release()

Every rank of a replica passes the same prompts and computes the same completions. Replicas may pass
different numbers of prompts, including none. Replicas that share experts call `generate` together.
`generate_over_replicas` takes care of all this.

A call that fails half-way, by KeyboardInterrupt as well, leaves no request and no cached prefix,
and the sampler's generator where it was: repeating the call draws the same tokens. If only one rank
of a replica fails, the others wait for it in vLLM; such a replica cannot go on.
"""

from __future__ import annotations

import atexit
import gc
import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import reduce
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from hybrid_engine.backends.vllm import arguments, internals, isolation, process_state
from hybrid_engine.backends.vllm.completing import (
    CompletingEngine,
    Completions,
    seeded,
)
from hybrid_engine.backends.vllm.config_reads import ConfigReads
from hybrid_engine.backends.vllm.engine_settings import (
    Completion,
    InferenceSettings,
    OwnDtypes,
    TokenIds,
)
from hybrid_engine.backends.vllm.images import image_refusal, noise_chat
from hybrid_engine.backends.vllm.live_layers import (
    captured_routes,
    live_attention,
    require_positions,
)
from hybrid_engine.backends.vllm.lora import DeliveredLoras
from hybrid_engine.backends.vllm.process_state import (
    ProcessSettings,
    process_settings_kept,
    random_state_kept,
)
from hybrid_engine.backends.vllm.prompts import ModelTokenizer, check_token_ids
from hybrid_engine.backends.vllm.requests import (
    Request,
    abandon,
    asked_for,
    completions_of,
    needs_tokenizer,
    none_left,
    one_thread,
    probe_limits,
    prompt_distributions,
    refusals_named,
    require_answers,
    reset_prefix_cache,
    sampling_params,
    zero_caches,
)
from hybrid_engine.backends.vllm.weights.adaptor import VllmAdaptor
from hybrid_engine.backends.vllm.weights.drafter import join, trace_new
from hybrid_engine.backends.vllm.weights.loader import capturing
from hybrid_engine.backends.vllm.weights.postload import require_quantised
from hybrid_engine.backends.vllm.weights.processed_model import ProcessedModel
from hybrid_engine.backends.vllm.weights.processing_barrier import ProcessingBarrier
from hybrid_engine.backends.vllm.weights.traced_model import TracedModel
from hybrid_engine.backends.vllm.weights.tracing import dtypes_of
from hybrid_engine.backends.vllm.weights.weight_memory import (
    SleepMode,
    WeightMemory,
    prepare_allocator,
    shared_segments,
    without_what_stays,
)
from hybrid_engine.compute_check.attention import POSITIONS, Attentions
from hybrid_engine.compute_check.config_reads import Reads
from hybrid_engine.compute_check.probes import ProbeAnswer, ProbeImage, ProbeLimits
from hybrid_engine.config.inference_rules import UNQUANTISED
from hybrid_engine.errors import ArgumentError, ConfigError, StateError
from hybrid_engine.files.model_files import HfConfig
from hybrid_engine.messages import decode
from hybrid_engine.models.derived import PLACEHOLDER_BIAS, placeholder_tokens
from hybrid_engine.models.lora_tensors import LoraSettings
from hybrid_engine.models.quantization_configs import format_in
from hybrid_engine.ranks.agreement import SHORT_PATIENCE
from hybrid_engine.ranks.digests import text_digest
from hybrid_engine.ranks.job import Job
from hybrid_engine.ranks.signals_and_forks import Ends
from hybrid_engine.ranks.torch_internals import Tensors, torch_defaults
from hybrid_engine.records.regions import Shapes

if TYPE_CHECKING:
    from vllm import LLM

    from hybrid_engine.backends.vllm.requests import AnySampling, Samplings

logger = logging.getLogger("hybrid_engine")

_EVERY_RANK = SimpleNamespace(is_first_rank=True)
"""A group for vLLM's capture of experts in which every rank is the first.

vLLM returns experts on the first rank of a replica, where its scheduler is; here each rank has a
scheduler.
"""


class InferenceEngine(CompletingEngine):
    """One rank of the colocated vLLM.

    Attributes:
        adaptor: this rank's weights (`InferenceWeights`).
        place: this rank's shard, stage and replica.
        trained_lora: name of the LoRA that switches deliver with the weights; None without one.
    """

    trained_lora: str | None = None

    def __init__(
        self,
        settings: InferenceSettings,
        tensors: Shapes,
        job: Job,
        dtypes: OwnDtypes = None,
    ) -> None:
        """Build vLLM; every rank of the job calls this at the same time.

        `generate` is refused until all groups have been committed once. The process's random state,
        process groups, environment and torch settings are restored.

        Args:
            settings: the same on every rank.
            tensors: canonical names and shapes of the whole model.
            job: job of the ranks that generate; outlives this object.
            dtypes: canonical name -> dtype, if it differs from that of the weights
                (`ModelTable.dtypes`).

        Raises DependencyError, ConfigError, ModelError or ParameterMismatchError.
        """
        tokenizer = ModelTokenizer(settings.tokenizer_dir or settings.model_dir)
        super().__init__(job, settings.sizes, tokenizer)
        self.rank = job.rank
        self.settings = settings
        self._agreement = job.agreement
        with Ends() as undo, torch_defaults(), process_settings_kept():
            with self._agreement.phase("checking vLLM and the model"):
                isolation.require_no_groups()
                self._device_type = arguments.check_settings(settings, job)
                with random_state_kept():  # this imports vLLM's modules
                    internals.require_names(
                        self._device_type,
                        with_lora=settings.max_loras > 0,
                        with_routes=settings.generate.router_replay,
                    )
                self.place = settings.sizes.place_of(job.rank)
            memory = WeightMemory()
            sharing: AbstractContextManager[None] = nullcontext()
            if self._device_type == "cpu":
                from hybrid_engine.backends.vllm.cpu import host_memory, shm_cleanup

                shm_cleanup.check_room(settings, job)
                memory = host_memory.CpuWeightMemory()
                sharing = shm_cleanup.unnamed_shared_memory(job.agreement)
            sleeps = arguments.is_sleepy(settings, self._device_type)
            with self._agreement.phase("looking for memory of an earlier vLLM"):
                if sleeps:
                    prepare_allocator()
                    undo.enter_context(shared_segments())
            undo.callback(isolation.destroy_groups)
            with sharing, random_state_kept():
                self._llm, models = self._build(tensors, dtypes, undo)
                # At collection or exit this finalizer would end the default process group, which
                # belongs to the caller; see `shutdown`.
                finalizer = getattr(self._llm.llm_engine.engine_core, "_finalizer", None)
                if finalizer is not None:
                    finalizer.detach()
                # vLLM froze what the collector knew. What stays frozen when the process ends is
                # reported as leaked by the libraries that made it.
                atexit.register(gc.unfreeze)
                with self._agreement.phase("joining the drafter to the main model"):
                    model = reduce(join, models)
                config = self._llm.llm_engine.vllm_config
                hf_config = config.model_config.hf_config
                self.placeholders = placeholder_tokens(hf_config.to_dict()).values()
                layers = config.compilation_config.static_forward_context
                self.no_images = image_refusal(layers.values())
                seed = text_digest(str(settings.generate.seed), str(self.place.dp_rank))
                self._generator_state = process_state.seeded_state(seed)
                self._process_settings = ProcessSettings.now()
            self._loras: DeliveredLoras | None = None
            if settings.max_loras:
                self._loras = DeliveredLoras(self._llm, undo)
            self._sleep_mode: SleepMode | None = None
            if sleeps:
                # Through `self`, so that `shutdown` removes the last reference to the LLM.
                self._sleep_mode = SleepMode(
                    lambda: internals.worker_of(self.llm),
                    lambda: self.llm.sleep(level=0),
                    lambda: self.llm.wake_up(tags=["scheduling"]),
                    lambda: internals.core_of(self.llm).scheduler.kv_cache_manager.block_pool,
                )
            memory = self._sleep_mode or memory
            # Weights are processed with the settings of their first processing, except that the
            # caller's stream, on which they arrive, and its number of threads stay.
            processing = replace(self._process_settings, stream=None, num_threads=None)
            keeps_memory = not settings.generate.release_weights
            self._adaptor: VllmAdaptor | None = VllmAdaptor(model, memory, keeps_memory, processing)
            undo.callback(self.groups.close)
            self._ends = undo.pop_all()

    # -- completions -------------------------------------------------------------------------------

    def generate(
        self,
        prompts: TokenIds,
        sampling: Samplings,
        lora: str | None = None,
    ) -> list[list[Completion]]:
        """Complete token-id prompts: per prompt, `n` completions of its sampling.

        All ranks call this together. `lora` names a delivered LoRA to generate with.

        Raises StateError while the weights are released or incomplete, or while vLLM has requests
        of other callers, and ArgumentError naming every prompt that is empty, too long or out of
        the vocabulary.
        """
        samplings = asked_for(sampling, len(prompts), self.params_of)
        self.check_prompts(prompts, [params.max_tokens or 1 for params in samplings])
        requests = self.requests_of(prompts, seeded(samplings, prompts), lora)
        return self.whole(prompts, self.complete(requests))

    def prompt_logprobs(self, token_ids: TokenIds, lora: str | None = None) -> list[torch.Tensor]:
        """Return log-probabilities of each token given the tokens before it.

        Per sequence a float32 tensor [length - 1].
        """
        scored = self._score(token_ids, 0, lora)
        dtype = torch.float32
        return [torch.tensor(completion.prompt_logprobs, dtype=dtype) for completion in scored]

    def prompt_distributions(
        self,
        token_ids: TokenIds,
        lora: str | None = None,
    ) -> list[torch.Tensor]:
        """Return log-probabilities of the whole vocabulary. Slow; for tests.

        Per sequence a float32 tensor [length - 1, vocabulary].
        """
        return list(map(prompt_distributions, self._score(token_ids, -1, lora)))

    def abandon_requests(self) -> None:
        """Abort all unfinished requests and reset the prefix cache; every rank calls this.

        A failed call does this itself. Call it after adding requests to `llm` directly, or after
        interrupting that clean-up.
        """
        abandon(self.llm)

    # -- port `Probed` of compute_check ------------------------------------------------------------

    def probe_limits(self) -> ProbeLimits:
        """See the port."""
        refusal = arguments.scoring_problem(self.settings.sizes, self._device_type) or ""
        return probe_limits(self.llm.llm_engine.vllm_config, refusal)

    def probe(self, tokens: torch.Tensor) -> ProbeAnswer:
        """See the port. Uses the trained LoRA, and draws nothing."""
        return self._probe(tokens.tolist(), tokens.numel())

    def image_prompt(self) -> ProbeImage | None:
        """See `probes.WithImagePrompt`."""
        if self.no_images or not self.placeholders:
            return None
        try:
            prompt = self.tokenizer.encode_images(noise_chat(), {})
            self.check_prompts([prompt], 1)
        except (ConfigError, ArgumentError, ValueError) as error:
            if self.job.rank == 0:
                logger.warning("[Reshard] images are not compared: %s", error)
            return None
        return ProbeImage(torch.tensor([prompt]), prompt.inputs, prompt)

    def probe_image(self, image: ProbeImage) -> ProbeAnswer:
        """See `probes.ProbedWithImages`."""
        return self._probe([image.prompt], image.tokens.numel())

    def _probe(self, prompts: TokenIds, num_tokens: int) -> ProbeAnswer:
        state = self._generator_state
        model = internals.model_runner_of(self.llm).model
        try:
            with captured_routes(model, num_tokens) as routes:
                rows = self.prompt_logprobs(prompts, self.trained_lora)
        finally:
            self._generator_state = state
        dtype = self.llm.llm_engine.model_config.dtype
        return ProbeAnswer(torch.stack(rows), dtype, routes)

    def attention(self, positions: Sequence[int] = POSITIONS) -> Attentions:
        """See the port."""
        config = self.llm.llm_engine.vllm_config
        layers = config.compilation_config.static_forward_context
        return live_attention(internals.model_runner_of(self.llm).model, layers, positions)

    def config_reads(self) -> Reads:
        """See the port."""
        return self._config_reads.reads

    def computed_settings(self) -> HfConfig:
        """Return config.json as vLLM has read it."""
        return dict(self.llm.llm_engine.model_config.hf_config.to_dict())

    # -- LoRA --------------------------------------------------------------------------------------

    def set_lora(self, name: str, settings: LoraSettings, tensors: Tensors) -> None:
        """Deliver a LoRA, or a new version of one; it stays through switches of the base weights.

        All ranks call this with all tensors. Each keeps a copy on the host and its slice on the
        device.

        Args:
            name: name to generate with.
            settings: rank, alpha and modules.
            tensors: by PEFT names: base_model.model.<module>.lora_A.weight [rank, in],
                lora_B [out, rank].

        Raises ConfigError with everything that does not fit, and StateError if LoRA is off.
        """
        self.loras.deliver(name, settings, tensors)

    def remove_lora(self, name: str) -> None:
        """Remove a LoRA. Raises StateError for an unknown name."""
        self.loras.forget(name)

    @property
    def loras(self) -> DeliveredLoras:
        """Delivered LoRAs. Raises StateError if LoRA is off, or after `shutdown`."""
        _ = self.llm  # raises after `shutdown`
        if self._loras is None:
            raise StateError(
                "vLLM was built without LoRA: set max_loras to the number of LoRAs in one batch",
                code="lora-is-off",
            )
        return self._loras

    # -- memory ------------------------------------------------------------------------------------

    @property
    def adaptor(self) -> VllmAdaptor:
        assert self._adaptor is not None
        return self._adaptor

    @property
    def llm(self) -> Any:
        """The `vllm.LLM`. Raises StateError after `shutdown`."""
        if self._llm is None:
            raise StateError(
                "the inference engine was shut down: build a new one", code="engine-is-closed"
            )
        return self._llm

    def reset_caches(self) -> None:
        """Reset the prefix cache and zero all caches; call after every switch.

        Raises StateError while requests are unfinished.
        """
        reset_prefix_cache(self.llm)
        runner = internals.model_runner_of(self.llm)
        if self._sleep_mode is None:
            zero_caches(runner)
        # A sleeping cache has no memory.
        elif not self._sleep_mode.is_kv_cache_asleep:
            zero_caches(runner, self._sleep_mode.pending())

    def release(self) -> None:
        """Free the weights and, on GPU with sleep mode, the KV cache. Raises as `reset_caches`."""
        reset_prefix_cache(self.llm)
        if self._loras is not None:
            self._loras.drop_from_device()
        self.adaptor.release()

    def wake_kv_cache(self) -> None:
        """Allocate the KV cache again (GPU, after a release); call after the weights' commit.

        It is uninitialised until `reset_caches`.
        """
        if self._sleep_mode is not None:
            self._sleep_mode.wake_kv_cache()
        if self._loras is not None:
            # vLLM's own state of LoRAs, whose restored memory is uninitialised.
            internals.model_runner_of(self.llm).reset_lora_state()

    def shutdown(self) -> None:
        """End vLLM and its process groups, not the caller's. Idempotent.

        Another engine may be built afterwards.
        """
        if self._llm is None or self._ends.is_inherited:
            return
        llm = self._llm
        self.adaptor.close()
        self._llm = None
        self._adaptor = None
        self._loras = None
        self._sleep_mode = None
        gc.unfreeze()  # vLLM froze the collector's generations at start-up
        isolation.forget_import_frames()
        with self._ends:
            core = internals.core_of(llm)
            core.structured_output_manager.clear_backend()
            core.model_executor.shutdown()
            core.scheduler.shutdown()
        del core, llm
        gc.collect()

    # -- inside ------------------------------------------------------------------------------------

    def _build(
        self,
        tensors: Shapes,
        dtypes: OwnDtypes,
        owner: ExitStack,
    ) -> tuple[LLM, list[ProcessedModel]]:
        """Build vLLM and inspect the weights of its model, and of its drafter if it has one.

        `owner` ends groups that are made here.
        """
        sleeps = arguments.is_sleepy(self.settings, self._device_type)
        torch_dtypes = dtypes_of(tensors, getattr(torch, self.settings.dtype), dtypes)
        without_lora = "set max_loras to 0" if self.settings.max_loras else ""
        models: list[ProcessedModel] = []
        llm_arguments = arguments.llm_arguments(self.settings, self._device_type)
        reads: ConfigReads = llm_arguments["hf_overrides"]
        self._config_reads = reads

        def trace(model: torch.nn.Module, model_config: Any) -> TracedModel:
            with self._agreement.phase("tracing vLLM's loader"):
                require_positions(model, model_config.max_model_len)
                if model_config.runner_type != "draft":
                    reads.require_known(model)
                    reads.stop()
                rank = self.rank
                return trace_new(model, model_config, tensors, torch_dtypes, rank, without_lora)

        @contextmanager
        def inspecting(is_collective: bool) -> Iterator[ProcessingBarrier]:
            barrier = ProcessingBarrier()
            # If any rank of the job needs a group, all make one.
            (is_any,) = self._agreement.any_of([is_collective], "looking for collectives")
            if is_any:
                # By instance, stage, replica and shard.
                instances = self.settings.sizes.ranks.swapaxes(1, 2)
                parts = instances.reshape(-1, instances[0, 0].size).tolist()
                barrier = ProcessingBarrier(self.rank, self.job.new_group(owner, parts))
            # Peers of a failed rank may be inside a collective of vLLM, unable to notice it.
            patience = SHORT_PATIENCE if barrier.is_collective else None
            with self._agreement.phase("inspecting what vLLM computes with", patience):
                yield barrier

        def keep(_model: torch.nn.Module, processed: ProcessedModel) -> None:
            models.append(processed)
            method = self.settings.generate.quantization
            if self.settings.quantization_config is not None:
                method = format_in(self.settings.quantization_config).method
            if method not in (None, UNQUANTISED):
                require_quantised(processed.modules, method, logs=self.rank == 0)

        with (
            isolation.building_groups(self.settings, self.job),
            arguments.eager_stance(self.settings, self._device_type),
            internals.LOAD_MODEL.replaced(without_what_stays) if sleeps else nullcontext(),
        ):
            from vllm import LLM

            with (
                capturing(trace, inspecting, keep),
                reads.checked(),
                internals.ROUTES_GROUP.replaced(lambda _: lambda: _EVERY_RANK)
                if self.settings.generate.router_replay
                else nullcontext(),
            ):
                llm = LLM(**llm_arguments)
                if self.settings.generate.router_replay and self._device_type == "cpu":
                    from hybrid_engine.backends.vllm.cpu import cpu_worker

                    cpu_worker.attach(llm)
        return llm, models

    def params_of(self, sampling: AnySampling | None) -> Any:
        """Return vLLM's parameters, which never draw the placeholder of an image."""
        params = sampling_params(sampling, self.tokenizer)
        if self.placeholders:
            # In place of an image's embedding it would have none.
            bias = dict.fromkeys(self.placeholders, PLACEHOLDER_BIAS)
            params.logit_bias = {**(params.logit_bias or {}), **bias}
        return params

    @contextmanager
    def one_call(self) -> Iterator[None]:
        """See the base class: restores the generator, also if another replica fails."""
        with one_thread:
            state = self._generator_state
            try:
                yield
            except BaseException:
                self._generator_state = state
                raise

    @one_thread
    def complete(self, requests: Sequence[Request]) -> Completions:
        """See the base class."""
        from vllm import SamplingParams

        llm = self.llm
        params = [decode(request.sampling, SamplingParams) for request in requests]
        names = [request.lora for request in requests]
        loras = [name and self.loras.request(name) for name in names] if any(names) else None
        are_scored = any(prompt_params.prompt_logprobs is not None for prompt_params in params)
        problem_of = arguments.scoring_problem if are_scored else arguments.generation_problem
        problem = problem_of(self.settings.sizes, self._device_type)
        if problem:
            raise StateError(
                f"{problem}: {arguments.GENERATING_LAYOUT}", code="layout-cannot-generate"
            )
        self.adaptor.require_ready()
        if self._sleep_mode is not None and self._sleep_mode.is_kv_cache_asleep:
            raise StateError(
                "the KV cache's memory is released: call wake_kv_cache() before generating",
                code="kv-cache-released",
            )
        tokenizer: AbstractContextManager[None] = nullcontext()
        if any(map(needs_tokenizer, params)):
            tokenizer = self.tokenizer.attached_to(llm)
        with (
            torch_defaults(),
            random_state_kept(),
            process_settings_kept(self._process_settings),
            arguments.eager_stance(self.settings, self._device_type),
            tokenizer,
        ):
            process_state.set_state(self._generator_state)
            with refusals_named(), none_left(llm):
                prompts = [request.for_vllm for request in requests]
                outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=loras)
                num_each = [prompt_params.n for prompt_params in params]
                require_answers(outputs, requests, num_each)
            self._generator_state = process_state.get_state()
        return list(map(completions_of, outputs, params))

    def _score(
        self,
        token_ids: TokenIds,
        num_logprobs: int,
        lora: str | None = None,
    ) -> list[Completion]:
        """Return a completion of each sequence with the log-probabilities of its tokens.

        `num_logprobs`: of other tokens in their places; -1 asks for the whole vocabulary.
        """
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=num_logprobs)
        return [completion for (completion,) in self.generate(token_ids, params, lora)]

    def check_prompts(self, prompts: TokenIds, max_tokens: int | Sequence[int]) -> None:
        """See the base class."""
        config = self.llm.llm_engine.model_config
        check_token_ids(prompts, max_tokens, config.max_model_len, config.get_vocab_size())
