"""ms-swift: its GRPO and GKD trainers stay as they are, and a colocated vLLM's weights come by a switch of this engine.

A file that `swift rlhf --external_plugins` is given has

    from hybrid_engine.integrations import ms_swift

    ms_swift.install()

What is replaced of ms-swift, which names the tests compare with the installed one:

    RolloutTrainerMixin._prepare_vllm   takes ms-swift's settings, and has its trainer do the following three
      VllmEngine._prepare_engine        builds no vLLM: what takes its place hands requests on to an engine of ours
      _fast_infer                       the same within a rollout context: weights come before it, training state after
      _move_model_to_vllm               does nothing: the weights are there
      train                             the same; the engine is built at its first rollout, and ends with it
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from importlib import import_module
from typing import Any

from hybrid_engine.errors import ConfigError, StateError, Violation
from hybrid_engine.hybrid_engine import HybridEngine
from hybrid_engine.integrations import require_tested
from hybrid_engine.integrations.accelerated import answers, check, engine_around, with_own
from hybrid_engine.switch.states import State

TESTED_VERSION = "4.6"
"""Of ms-swift, with any number behind it: what is replaced here is not among the names that it keeps."""


def install(**rollout_config: Any) -> Callable[[], None]:
    """Have ms-swift's trainers that are made from now on generate by an engine of ours, where vLLM is colocated.

    `vllm_tensor_parallel_size` and other settings of vLLM are ms-swift's. `sleep_level`, `offload_model` and
    `offload_optimizer` say nothing: a switch moves training state, and vLLM's weights leave the device.

    Args:
        rollout_config: further keys, as `HybridEngine` takes them.

    Returns what undoes it. Raises DependencyError, ConfigError and, a second time, StateError here; ConfigError where a
    trainer is made that this cannot serve, and at its first rollout what `HybridEngine` raises.
    """
    require_tested("ms-swift", TESTED_VERSION, f"ms-swift=={TESTED_VERSION}.*")
    if "swift.megatron" in sys.modules:
        remedy = "Use swift rlhf with FSDP2 or DDP; hybrid_engine.attach takes a Megatron model of your own loop"
        raise ConfigError([Violation("--external_plugins", "megatron rlhf and its Ray workers are not served", remedy)])
    mixin = import_module("swift.rlhf_trainers.rollout_mixin").RolloutTrainerMixin
    original = mixin._prepare_vllm
    if original.__module__ == __name__:
        raise StateError("ms_swift.install was called before: call it once, or what it returned first")

    def prepare(trainer: Any) -> None:
        if trainer.args.use_vllm:
            _Rollouts(trainer, rollout_config).take_over(original)
        else:
            original(trainer)

    mixin._prepare_vllm = prepare
    return lambda: setattr(mixin, "_prepare_vllm", original)


class _Rollouts:
    """Those of one trainer.

    Attributes:
        engine: None until the first, and once training has ended.
    """

    def __init__(self, trainer: Any, rollout_config: Mapping[str, Any]) -> None:
        check(trainer.accelerator, _findings(trainer))
        args = trainer.args
        per_replica = args.per_device_train_batch_size * args.vllm_tensor_parallel_size
        own = {
            "infer_tensor_parallel_size": args.vllm_tensor_parallel_size,
            "gpu_memory_utilization": args.vllm_gpu_memory_utilization,
            "max_num_seqs": args.vllm_max_num_seqs or per_replica * getattr(args, "steps_per_generation", 1),
            "max_model_len": args.vllm_max_model_len,
            "vllm": {"trust_remote_code": True, "enable_prefix_caching": args.vllm_enable_prefix_caching},
        }
        own |= {"enforce_eager": True} if args.vllm_enforce_eager else {}
        self._trainer, self._config = trainer, with_own(own, rollout_config)
        self._ends: ExitStack | None = None
        self.engine: HybridEngine[Any] | None = None

    def take_over(self, prepare_vllm: Callable[[Any], None]) -> None:
        trainer, args = self._trainer, self._trainer.args
        # the engine gathers the prompts of a replica, and moves what these would
        trainer.vllm_tensor_parallel_size, args.sleep_level = 1, 0
        args.offload_model = args.offload_optimizer = False
        vllm_engine = import_module("swift.infer_engine.vllm_engine").VllmEngine
        prepare_engine = vllm_engine._prepare_engine
        vllm_engine._prepare_engine = lambda of: setattr(of, "engine", _Requests(self.built))
        try:
            prepare_vllm(trainer)
        finally:
            vllm_engine._prepare_engine = prepare_engine
        infer, train = trainer._fast_infer, trainer.train

        def fast_infer(samples: Any) -> Any:
            engine = self.built()
            with engine.rollout_context():
                outputs = infer(samples)
            engine.sharding.enter(State.TRAIN)
            return outputs

        def trained(*args: Any, **kwargs: Any) -> Any:
            with ExitStack() as self._ends:
                try:
                    return train(*args, **kwargs)
                finally:
                    self._ends, self.engine = None, None

        trainer._fast_infer, trainer.train = fast_infer, trained
        trainer._move_model_to_vllm = lambda skip_async_check=False: None
        trainer.rollouts = self

    def built(self) -> HybridEngine[Any]:
        if self._ends is None:
            raise StateError("a rollout outside trainer.train(): vLLM is there while it trains. Evaluate there, too")
        if self.engine is None:
            self.engine = self._ends.enter_context(engine_around(self._trainer, self._config))
        return self.engine


class _Requests:
    """In the place of vLLM's `LLMEngine` in ms-swift's: it takes the requests of a call, and answers all in a step."""

    def __init__(self, engine: Callable[[], HybridEngine[Any]]) -> None:
        self._engine = engine
        self._asked: list[tuple[str, Mapping[str, Any], Any]] = []
        self._params: Any = None
        self._is_answered = False

    def add_request(self, request_id: str, prompt: Mapping[str, Any], params: Any) -> None:
        self._asked.append((request_id, prompt, params))

    def has_unfinished_requests(self) -> bool:
        """Until `step` has answered; also without a request, for all ranks answer together."""
        is_answered, self._is_answered = self._is_answered, False
        return not is_answered

    def step(self) -> list[Any]:
        """Answers to all requests of this rank. Collective."""
        asked, self._asked = self._asked, []
        # in a later turn a rank may have none
        self._params = asked[0][2] if asked else self._params
        rooms = sorted({params.max_tokens for _, _, params in asked})
        findings = []
        if self._params is None:  # what a rank asks for, all must
            findings.append(Violation("prompts", "this rank has none in the first rollout", "Give each rank some"))
        if any(params != self._params for _, _, params in asked):
            problem = f"requests of one rollout differ: max_tokens {', '.join(map(str, rooms))}"
            remedy = "Set it to the longest prompt and max_completion_length; completion_length_limit_scope: per_round"
            findings.append(Violation("vllm_max_model_len", problem, remedy))
        answered = answers(self._engine(), [prompt for _, prompt, _ in asked], self._params, findings)
        for (request_id, _, _), answer in zip(asked, answered, strict=True):
            answer.request_id, answer.finished = request_id, True
        self._is_answered = True
        return answered

    def reset_mm_cache(self) -> None:
        """There are no images."""


def _findings(trainer: Any) -> list[Violation]:
    """Settings of a trainer that an engine cannot honour."""
    args = trainer.args
    found = []
    if args.vllm_mode != "colocate":
        problem = f"{args.vllm_mode}: swift rollout takes weights by its own routes"
        found.append(Violation("vllm_mode", problem, "Set it to colocate"))
    if args.vllm_enable_lora:
        remedy = "Set it to false: LoRA is merged into the weights on their way"
        found.append(Violation("vllm_enable_lora", "true", remedy))
    if args.vllm_engine_kwargs:
        named = ", ".join(sorted(args.vllm_engine_kwargs))
        found.append(Violation("vllm_engine_kwargs", named, "Give them to install(vllm={...})"))
    if trainer.model.model_meta.is_multimodal:
        found.append(Violation("model", "takes images", "Use one of text alone"))
    return found
