"""TRL: its trainers stay as they are, and vLLM's weights come by a switch of this engine.

    with colocated():                                       GRPOTrainer, and whoever else uses TRL's VLLMGeneration
        trainer = GRPOTrainer(..., args=GRPOConfig(use_vllm=True))
        trainer.train()

    with WeightTransfer() as transfer:                      AsyncGRPOTrainer, and a server with our load format
        trainer = AsyncGRPOTrainer(..., weight_transfer=transfer)
        transfer.attach(trainer)
        trainer.train()

What each replaces of TRL, which names the tests compare with the installed one:

    VLLMGeneration._init_vllm         builds no vLLM; `llm` and `sync_weights` are an engine's, which is built at the
                                      first sync, when accelerate has prepared the model
    AsyncGRPOTrainer._streaming_iter  yields nothing: every rank takes part in a publish in its place
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from types import SimpleNamespace, TracebackType
from typing import Any, Self

from hybrid_engine.errors import ConfigError, StateError, Violation
from hybrid_engine.hybrid_engine import HybridEngine
from hybrid_engine.integrations import NAME, require_tested
from hybrid_engine.integrations.accelerated import answers, check, engine_around, with_own
from hybrid_engine.serving.clients import HttpServer
from hybrid_engine.switch.states import State

TESTED_VERSION = "1.16"
"""Of TRL, with any number behind it: what is replaced here is not among the names that TRL keeps."""

INSTALL = "hybrid-engine[trl]"

_SECONDS_FOR_AN_ANSWER = 60.0


@contextmanager
def colocated(**rollout_config: Any) -> Iterator[None]:
    """TRL's trainers that are made inside, with a colocated vLLM, generate by an engine of ours.

    Train inside, too: at the end their engines are shut down, and their models are on the device. `vllm_mode`,
    `vllm_tensor_parallel_size`, `vllm_gpu_memory_utilization` and `vllm_max_model_length` are TRL's.

    Args:
        rollout_config: further keys, as `HybridEngine` takes them.

    Raises DependencyError here, ConfigError where a trainer is made that this cannot serve, and at its first
    generation what `HybridEngine` raises.
    """
    require_tested("trl", TESTED_VERSION, INSTALL)
    generation_class = import_module("trl.generation.vllm_generation").VLLMGeneration
    original = generation_class._init_vllm
    with ExitStack() as ends:

        def init(generation: Any) -> None:
            generation.llm = llm = _ColocatedLlm(generation, rollout_config, ends)
            generation.sync_weights = llm.sync_weights
            # of stock vLLM: the engine gathers the prompts of a replica, and its weights always leave the device
            generation.tensor_parallel_size, generation.enable_sleep_mode = 1, False

        generation_class._init_vllm = init
        ends.callback(setattr, generation_class, "_init_vllm", original)
        yield


class _ColocatedLlm:
    """What takes the place of `vllm.LLM` in a VLLMGeneration.

    Attributes:
        engine: None until the first sync.
    """

    def __init__(self, generation: Any, rollout_config: Mapping[str, Any], ends: ExitStack) -> None:
        check(generation.accelerator, _findings(generation))
        own = {
            "infer_tensor_parallel_size": generation.tensor_parallel_size,
            "gpu_memory_utilization": generation.gpu_memory_utilization,
            "max_num_seqs": generation.max_num_seqs,
            "max_model_len": generation.max_model_length,
        }
        own |= {"vllm": {"trust_remote_code": True}} if generation.trust_remote_code else {}
        self._generation, self._config, self._ends = generation, with_own(own, rollout_config), ends
        self.engine: HybridEngine[Any] | None = None

    @property
    def llm_engine(self) -> Any:
        return self._built().inference.llm.llm_engine

    def sync_weights(self) -> None:
        """Reshard the weights into vLLM. Collective."""
        self._built().sharding.enter(State.INFER)

    def generate(self, prompts: Sequence[Mapping[str, Any]], sampling_params: Any, use_tqdm: bool) -> list[Any]:
        """Complete this rank's prompts, and bring training state back. Collective."""
        engine = self._built()
        with engine.rollout_context():
            answered: list[Any] = answers(engine, prompts, sampling_params)
        engine.sharding.enter(State.TRAIN)
        return answered

    def _built(self) -> HybridEngine[Any]:
        if self.engine is None:
            self.engine = self._ends.enter_context(engine_around(self._generation, self._config))
        return self.engine


class WeightTransfer:
    """What an AsyncGRPOTrainer takes as `weight_transfer`; its server has `--load-format hybrid_engine`.

    A context manager: at its end the server is left paused or with the weights that it has, as it was. All ranks make
    one, and `attach` it.

    Args:
        rollout_config: keys as `HybridEngine` takes them. Servers keep their weights, and nothing leaves the trainers'
            device, unless these say otherwise.

    Attributes:
        engine: whose switch publishes; None until the first sync.
    """

    def __init__(self, **rollout_config: Any) -> None:
        require_tested("trl", TESTED_VERSION, INSTALL)
        offload = {f"offload_train_{kind}": False for kind in ("param", "grad", "optimizer")}
        self._config = {"release_weights": False, **offload, **rollout_config}
        self._ends = ExitStack()
        self._trainer: Any = None
        self.engine: HybridEngine[Any] | None = None

    def attach(self, trainer: Any) -> None:
        """Publish this trainer's weights to the server that it draws from. Raises ConfigError."""
        model = trainer.accelerator.unwrap_model(trainer.model)
        adapters = getattr(model, "peft_config", None)
        merged = Violation("peft_config", "TRL adds LoRA to the weights while it sends them", "Leave it out")
        check(trainer.accelerator, [merged] if adapters else [])
        self._config = {
            "servers": [trainer.args.vllm_server_base_url],
            "server_max_lag": trainer.args.weight_sync_steps,
            **self._config,
        }
        self._trainer, trainer._streaming_iter = trainer, self._publish

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ends.__exit__(kind, error, traceback)

    def _publish(self) -> Iterator[tuple[str, Any]]:
        if self.engine is None:
            model = self._trainer.accelerator.unwrap_model(self._trainer.model)
            source = SimpleNamespace(model=model, accelerator=self._trainer.accelerator)
            self.engine = self._ends.enter_context(engine_around(source, self._config))
        self.engine.sharding.enter(State.INFER)
        self.engine.sharding.enter(State.TRAIN)
        yield from ()

    # -- what TRL calls, on its main process --------------------------------------------------------------------------

    def init_weight_transfer(self) -> None:
        if self._trainer is None:
            raise StateError("WeightTransfer has no trainer: call attach(trainer) on all ranks before trainer.train()")
        self._trainer.vllm_client.wait_for_server_ready()
        # not by TRL's client, which has no proof for a server that asks for one
        server = HttpServer(
            self._trainer.args.vllm_server_base_url,
            _SECONDS_FOR_AN_ANSWER,
            allow_public=self._config.get("server_allow_public", False),
        )
        settings = server.get("server_info?config_format=json")["vllm_config"]
        found = settings.get("load_config", {}).get("load_format")
        if found != NAME:
            remedy = f"""Start it with --load-format {NAME} --weight-transfer-config '{{"backend": "{NAME}"}}'"""
            raise ConfigError([Violation("vllm_server_base_url", f"its server has load format {found}", remedy)])

    def pause(self) -> None:
        """A publish pauses the server."""

    def send_weights(self, iterator: Iterator[tuple[str, Any]]) -> None:
        for _ in iterator:
            pass

    def resume(self) -> None:
        """A publish resumes the server, once all of its weights are there."""

    def destroy(self) -> None:
        """Other ranks hear nothing of it: all leave at the end of the block."""


def _findings(generation: Any) -> list[Violation]:
    """Settings of a VLLMGeneration that are not ours."""
    found = []
    if generation.mode != "colocate":
        remedy = "Set vllm_mode='colocate'; for a server use AsyncGRPOTrainer with WeightTransfer"
        found.append(Violation("vllm_mode", generation.mode, remedy))
    if generation.model_impl not in ("vllm", "auto"):
        found.append(Violation("vllm_model_impl", generation.model_impl, "Set it to 'vllm'"))
    if generation.logprobs:
        found.append(Violation("logprobs", f"{generation.logprobs} others at each token", "Only drawn tokens have one"))
    return found
