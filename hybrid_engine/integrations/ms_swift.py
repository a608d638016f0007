"""ms-swift's GRPO and GKD trainers, unchanged, with vLLM's weights delivered by our switch.

A file for `swift rlhf --external_plugins` contains

    from hybrid_engine.integrations import ms_swift

    ms_swift.install()

Replaced methods of ms-swift; the tests compare their names with the installed version:

    RolloutTrainerMixin._prepare_vllm   takes ms-swift's settings, and replaces in its trainer:
      VllmEngine._prepare_engine        does not build a vLLM; requests go to our engine
      _fast_infer                       runs in a rollout context, between the switches of weights
                                        and training state
      _move_model_to_vllm               does nothing: vLLM has the weights already
      train                             closes the engine, which the first rollout has built
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from importlib import import_module
from typing import Any

from hybrid_engine.errors import ConfigError, StateError, Violation, Violations
from hybrid_engine.hybrid_engine import HybridEngine
from hybrid_engine.integrations import require_tested
from hybrid_engine.integrations.accelerated import (
    engine_around,
    merge_configs,
    request_outputs,
    require_supported,
)
from hybrid_engine.switch.states import State

TESTED_VERSION = "4.6"
"""Prefix of the tested versions: ms-swift does not promise to keep the names that are replaced."""


def install(**rollout_config: Any) -> Callable[[], None]:
    """Have ms-swift's trainers with a colocated vLLM generate by our engine.

    It applies to trainers that are created afterwards. `vllm_tensor_parallel_size` and other
    settings of vLLM are ms-swift's. `sleep_level`, `offload_model` and `offload_optimizer` have no
    effect: a switch moves training state, and vLLM's weights leave the device.

    Args:
        rollout_config: further keys, as `HybridEngine` takes them.

    Returns a function that reverts it.

    Raises:
        DependencyError: ms-swift is missing, or its version was not tested.
        StateError: it is installed already.
        ConfigError: ms-swift runs with Megatron. Also when an unsupported trainer is created.

    The first rollout of a trainer raises the errors of `HybridEngine`.
    """
    require_tested("ms-swift", TESTED_VERSION, f"ms-swift=={TESTED_VERSION}.*")
    if "swift.megatron" in sys.modules:
        raise ConfigError.of(
            "--external_plugins",
            "megatron rlhf and its Ray workers are not supported",
            "Use swift rlhf with FSDP2 or DDP; for a Megatron model in your own loop use "
            "hybrid_engine.attach",
            code="not-supported",
        )
    mixin = import_module("swift.rlhf_trainers.rollout_mixin").RolloutTrainerMixin
    original = mixin._prepare_vllm
    if original.__module__ == __name__:
        raise StateError(
            "ms_swift.install was called before: call it once, or first call the function that it "
            "returned",
            code="installed-already",
        )

    def prepare_vllm(trainer: Any) -> None:
        if trainer.args.use_vllm:
            _SwiftRollouts(trainer, rollout_config).install(original)
        else:
            original(trainer)

    mixin._prepare_vllm = prepare_vllm
    return lambda: setattr(mixin, "_prepare_vllm", original)


class _SwiftRollouts:
    """Rollouts of one trainer.

    Attributes:
        engine: None before the first rollout, and after training has ended.
    """

    def __init__(self, trainer: Any, rollout_config: Mapping[str, Any]) -> None:
        require_supported(trainer.accelerator, _violations(trainer))
        args = trainer.args
        # Default as in ms-swift: all completions of a replica in one generation.
        prompts_per_replica = args.per_device_train_batch_size * args.vllm_tensor_parallel_size
        max_num_seqs = args.vllm_max_num_seqs
        if not max_num_seqs:
            max_num_seqs = prompts_per_replica * getattr(args, "steps_per_generation", 1)
        trainer_config = {
            "infer_tensor_parallel_size": args.vllm_tensor_parallel_size,
            "gpu_memory_utilization": args.vllm_gpu_memory_utilization,
            "max_num_seqs": max_num_seqs,
            "max_model_len": args.vllm_max_model_len,
            "vllm": {
                "trust_remote_code": True,
                "enable_prefix_caching": args.vllm_enable_prefix_caching,
            },
        }
        if args.vllm_enforce_eager:
            trainer_config["enforce_eager"] = True
        self._trainer = trainer
        self._config = merge_configs(trainer_config, rollout_config)
        self._ends: ExitStack | None = None
        self.engine: HybridEngine | None = None

    def install(self, prepare_vllm: Callable[[Any], None]) -> None:
        """Prepare the trainer by ms-swift's own `prepare_vllm`, then replace its methods."""
        trainer = self._trainer
        # ms-swift would gather the prompts of a replica, and offload training state. The engine
        # does both.
        trainer.vllm_tensor_parallel_size = 1
        trainer.args.sleep_level = 0
        trainer.args.offload_model = False
        trainer.args.offload_optimizer = False
        vllm_engine = import_module("swift.infer_engine.vllm_engine").VllmEngine
        prepare_engine = vllm_engine._prepare_engine

        def prepare_requests(swift_engine: Any) -> None:
            swift_engine.engine = _RequestQueue(self.built_engine)

        # On the class, because prepare_vllm creates the object; reverted for other engines.
        vllm_engine._prepare_engine = prepare_requests
        try:
            prepare_vllm(trainer)
        finally:
            vllm_engine._prepare_engine = prepare_engine
        original_infer = trainer._fast_infer
        original_train = trainer.train

        def fast_infer(samples: Any) -> Any:
            engine = self.built_engine()
            with engine.rollout_context():
                outputs = original_infer(samples)
            # The trainer's model is used next, so its state must be back.
            engine.sharding.enter(State.TRAIN)
            return outputs

        def train(*args: Any, **kwargs: Any) -> Any:
            with ExitStack() as self._ends:
                try:
                    return original_train(*args, **kwargs)
                finally:
                    self._ends = None
                    self.engine = None

        trainer._fast_infer = fast_infer
        trainer.train = train
        trainer._move_model_to_vllm = lambda skip_async_check=False: None
        trainer.rollouts = self

    def built_engine(self) -> HybridEngine:
        """Return the engine; the first call builds it. Raises StateError outside of training."""
        if self._ends is None:
            raise StateError(
                "rollouts are only possible inside trainer.train(), which ends vLLM: run "
                "evaluation there",
                code="not-training",
            )
        if self.engine is None:
            self.engine = self._ends.enter_context(engine_around(self._trainer, self._config))
        return self.engine


class _RequestQueue:
    """Replacement of vLLM's `LLMEngine` in ms-swift's engine.

    It collects the requests of a call, and completes all of them in one step.
    """

    def __init__(self, engine: Callable[[], HybridEngine]) -> None:
        self._engine = engine
        self._requests: list[tuple[str, Mapping[str, Any], Any]] = []
        self._is_completed = False

    def add_request(self, request_id: str, prompt: Mapping[str, Any], params: Any) -> None:
        self._requests.append((request_id, prompt, params))

    def has_unfinished_requests(self) -> bool:
        """Return True until `step` has run, even without requests: all ranks must call it."""
        is_completed = self._is_completed
        self._is_completed = False
        return not is_completed

    def step(self) -> list[Any]:
        """Return the outputs of all requests of this rank. Collective."""
        requests = self._requests
        self._requests = []
        prompts = [prompt for _, prompt, _ in requests]
        outputs = request_outputs(self._engine(), prompts, [params for *_, params in requests])
        for (request_id, _, _), output in zip(requests, outputs, strict=True):
            output.request_id = request_id
            output.finished = True
        self._is_completed = True
        return outputs

    def reset_mm_cache(self) -> None:
        """Do nothing: there are no images."""


def _violations(trainer: Any) -> Violations:
    """Yield the settings of a trainer that an engine cannot honour."""
    args = trainer.args
    if args.vllm_mode != "colocate":
        yield Violation(
            "vllm_mode",
            f"{args.vllm_mode}: swift rollout transfers weights in its own way",
            "Set it to colocate",
            code="unsupported-value",
        )
    if args.vllm_enable_lora:
        yield Violation(
            "vllm_enable_lora",
            "true",
            "Set it to false: LoRA is merged into the weights of a switch",
            code="unsupported-value",
        )
    if args.vllm_engine_kwargs:
        names = ", ".join(sorted(args.vllm_engine_kwargs))
        yield Violation(
            "vllm_engine_kwargs", names, "Pass them to install(vllm={...})", code="not-supported"
        )
    if trainer.model.model_meta.is_multimodal:
        yield Violation("model", "takes images", "Use a model of text only", code="not-supported")
