"""TRL's trainers, unchanged, with vLLM's weights delivered by a switch of this engine.

    with colocated():                                   GRPOTrainer, and other users of TRL's
        trainer = GRPOTrainer(                          VLLMGeneration
            ..., args=GRPOConfig(use_vllm=True)
        )
        trainer.train()

    with WeightTransfer() as transfer:                  AsyncGRPOTrainer, and a server with our
        trainer = AsyncGRPOTrainer(                     load format
            ..., weight_transfer=transfer
        )
        transfer.attach(trainer)
        trainer.train()

Replaced methods of TRL; the tests compare their names with the installed version:

    VLLMGeneration._init_vllm         does not build a vLLM. `llm` and `sync_weights` are an
                                      engine's, which is built at the first sync, after accelerate
                                      has prepared the model
    AsyncGRPOTrainer._streaming_iter  yields nothing. Every rank takes part in a publish instead
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from hybrid_engine.errors import ConfigError, StateError, Violation, Violations
from hybrid_engine.hybrid_engine import HybridEngine
from hybrid_engine.integrations import OWN_DEVICES, require_tested
from hybrid_engine.integrations.accelerated import (
    engine_around,
    merge_configs,
    request_outputs,
    require_supported,
)
from hybrid_engine.serving import NAME
from hybrid_engine.serving.clients import HttpServer
from hybrid_engine.switch.states import State

TESTED_VERSION = "1.16"
"""Prefix of TRL's tested versions: TRL does not promise to keep the names that are replaced."""

INSTALL = ".[trl]"

_REQUEST_TIMEOUT_SECONDS = 60.0


@contextmanager
def colocated(**rollout_config: Any) -> Iterator[None]:
    """Have TRL's trainers with a colocated vLLM generate by our engine.

    Create the trainers inside the block, and train inside it: at its end the engines are shut
    down, and the models are on the device. `vllm_mode`, `vllm_tensor_parallel_size`,
    `vllm_gpu_memory_utilization` and `vllm_max_model_length` are TRL's settings.

    Args:
        rollout_config: further keys, as `HybridEngine` takes them.

    Raises DependencyError here, ConfigError when an unsupported trainer is created, and the errors
    of `HybridEngine` at its first generation.
    """
    require_tested("trl", TESTED_VERSION, INSTALL)
    generation_class = import_module("trl.generation.vllm_generation").VLLMGeneration
    original = generation_class._init_vllm
    with ExitStack() as ends:

        def init_vllm(generation: Any) -> None:
            llm = _ColocatedLlm(generation, rollout_config, ends)
            generation.llm = llm
            generation.sync_weights = llm.sync_weights
            # These are for stock vLLM. Here the engine gathers the prompts of a replica, and its
            # weights always leave the device.
            generation.tensor_parallel_size = 1
            generation.enable_sleep_mode = False

        generation_class._init_vllm = init_vllm
        ends.callback(setattr, generation_class, "_init_vllm", original)
        yield


class _ColocatedLlm:
    """Replacement of `vllm.LLM` in a VLLMGeneration.

    Attributes:
        engine: None until the first sync.
    """

    def __init__(self, generation: Any, rollout_config: Mapping[str, Any], ends: ExitStack) -> None:
        require_supported(generation.accelerator, _violations(generation))
        trainer_config = {
            "infer_tensor_parallel_size": generation.tensor_parallel_size,
            "gpu_memory_utilization": generation.gpu_memory_utilization,
            "max_num_seqs": generation.max_num_seqs,
            "max_model_len": generation.max_model_length,
        }
        if generation.trust_remote_code:
            trainer_config["vllm"] = {"trust_remote_code": True}
        self._generation = generation
        self._config = merge_configs(trainer_config, rollout_config)
        self._ends = ends
        self.engine: HybridEngine | None = None

    @property
    def llm_engine(self) -> Any:
        return self._built_engine().inference.llm.llm_engine

    def sync_weights(self) -> None:
        """Reshard the weights into vLLM. Collective."""
        self._built_engine().sharding.enter(State.INFER)

    def generate(
        self,
        prompts: Sequence[Mapping[str, Any]],
        sampling_params: Any,
        use_tqdm: bool,
    ) -> list[Any]:
        """Complete this rank's prompts, and bring training state back. Collective."""
        engine = self._built_engine()
        with engine.rollout_context():
            samplings = [sampling_params] * len(prompts)
            outputs: list[Any] = request_outputs(engine, prompts, samplings)
        engine.sharding.enter(State.TRAIN)
        return outputs

    def _built_engine(self) -> HybridEngine:
        # Not in the constructor: accelerate has not prepared the model by then.
        if self.engine is None:
            self.engine = self._ends.enter_context(engine_around(self._generation, self._config))
        return self.engine


class WeightTransfer(AbstractContextManager["WeightTransfer"]):
    """The `weight_transfer` of an AsyncGRPOTrainer; its server has `--load-format hybrid_engine`.

    A context manager. At its end the server is not touched: it stays paused, or keeps its present
    weights.
    All ranks create one, and `attach` it.

    Args:
        rollout_config: keys, as `HybridEngine` takes them. By default servers keep their weights,
            and nothing leaves the trainers' devices.

    Attributes:
        engine: the engine that publishes; None until the first sync.
    """

    def __init__(self, **rollout_config: Any) -> None:
        require_tested("trl", TESTED_VERSION, INSTALL)
        self._config: dict[str, Any] = {**OWN_DEVICES, **rollout_config}
        self._ends = ExitStack()
        self._trainer: Any = None
        self.engine: HybridEngine | None = None

    def attach(self, trainer: Any) -> None:
        """Publish this trainer's weights to the server from which it samples.

        Raises ConfigError for a trainer that is not supported.
        """
        model = trainer.accelerator.unwrap_model(trainer.model)
        violations = []
        if getattr(model, "peft_config", None):
            violations.append(
                Violation(
                    "peft_config",
                    "TRL adds LoRA to the weights while it sends them",
                    "Leave it out",
                    code="not-supported",
                )
            )
        require_supported(trainer.accelerator, violations)
        self._config = {
            "servers": [trainer.args.vllm_server_base_url],
            "server_max_lag": trainer.args.weight_sync_steps,
            **self._config,
        }
        self._trainer = trainer
        trainer._streaming_iter = self._publish

    def __exit__(self, *error: Any) -> None:
        self._ends.__exit__(*error)

    def _publish(self) -> Iterator[tuple[str, Any]]:
        """Publish the weights, and yield no tensors. Every rank iterates over it."""
        if self.engine is None:
            model = self._trainer.accelerator.unwrap_model(self._trainer.model)
            owner = SimpleNamespace(model=model, accelerator=self._trainer.accelerator)
            self.engine = self._ends.enter_context(engine_around(owner, self._config))
        # A publish is a whole round trip: the trainer goes on with its own training state.
        self.engine.sharding.enter(State.INFER)
        self.engine.sharding.enter(State.TRAIN)
        # A generator: it publishes as TRL iterates, not when it is called.
        yield from ()

    # -- called by TRL on its main process ----------------------------------------------------

    def init_weight_transfer(self) -> None:
        """Check the server. Raises StateError without a trainer, ConfigError for another server."""
        if self._trainer is None:
            raise StateError(
                "WeightTransfer has no trainer: call attach(trainer) on all ranks before "
                "trainer.train()",
                code="not-attached",
            )
        self._trainer.vllm_client.wait_for_server_ready()
        # Not with TRL's client, which cannot prove that it has the token that a server may demand.
        server = HttpServer(
            self._trainer.args.vllm_server_base_url,
            _REQUEST_TIMEOUT_SECONDS,
            allow_public=self._config.get("server_allow_public", False),
        )
        settings = server.get("server_info?config_format=json")["vllm_config"]
        load_format = settings.get("load_config", {}).get("load_format")
        if load_format != NAME:
            backend = f'{{"backend": "{NAME}"}}'
            raise ConfigError.of(
                "vllm_server_base_url",
                f"its server has load format {load_format}",
                f"Start it with --load-format {NAME} --weight-transfer-config '{backend}'",
                code="wrong-load-format",
            )

    def pause(self) -> None:
        """Do nothing: a publish pauses the server."""

    def send_weights(self, iterator: Iterator[tuple[str, Any]]) -> None:
        """Exhaust the iterator, which publishes the weights."""
        for _ in iterator:
            pass

    def resume(self) -> None:
        """Do nothing: a publish resumes the server after all of its weights have arrived."""

    def destroy(self) -> None:
        """Do nothing: TRL calls it on one rank only, and all ranks end with the block."""


def _violations(generation: Any) -> Violations:
    """Yield the settings of a VLLMGeneration that an engine cannot honour."""
    if generation.mode != "colocate":
        yield Violation(
            "vllm_mode",
            generation.mode,
            "Set vllm_mode='colocate'; for a server use AsyncGRPOTrainer with WeightTransfer",
            code="unsupported-value",
        )
    if generation.model_impl not in ("vllm", "auto"):
        yield Violation(
            "vllm_model_impl", generation.model_impl, "Set it to 'vllm'", code="unsupported-value"
        )
    if generation.logprobs:
        yield Violation(
            "logprobs",
            f"{generation.logprobs} others at each token",
            "Set it to 0: only drawn tokens have a log-probability",
            code="unsupported-value",
        )
