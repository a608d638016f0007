"""verl's manager, actors and checkpoint engine worker in Ray, on a CPU, with our classes.

    python -m tests.hybrid_engine.integrations.verl_run MODEL URL OUT standalone|hybrid
    fsdp2|mbridge|megatron-bridge

From verl: `update_weights` of CheckpointEngineManager and ActorRolloutRefWorker, TrainingWorker
with its FSDP2 or Megatron engine and optimizer, CheckpointEngineWorker, vLLM's ServerAdapter. Its
replica needs a GPU, so `Replica` replaces it, with an actor that calls the server at URL by vLLM's
routes.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch
from tensordict import TensorDict
from verl.checkpoint_engine.base import CheckpointEngineRegistry, CheckpointEngineWorker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.trainer.config import CheckpointConfig
from verl.utils.tensordict_utils import get_tensordict
from verl.workers.config import (
    CheckpointEngineConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    McoreEngineConfig,
    McoreOptimizerConfig,
    RolloutConfig,
    TrainingWorkerConfig,
)
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker
from verl.workers.rollout.replica import RolloutMode, RolloutReplica
from verl.workers.utils.losses import sft_loss

import megatron_patches
from hybrid_engine.backends.vllm import version
from hybrid_engine.integrations import verl as ours
from hybrid_engine.memory.elastic import exported_buffer_of
from hybrid_engine.memory.offload_items import OffloadItem
from hybrid_engine.serving.clients import HttpServer
from tests.harness.values import Values
from tests.harness.vllm_server import REQUEST
from tests.hybrid_engine.integrations import verl_on_cpu
from tests.zoo.tiny_models import read_canonical

NUM_UPDATES = 3
SPLIT = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}


def model_config(path: str) -> HFModelConfig:
    return HFModelConfig(
        path=path,
        override_config={"attn_implementation": "sdpa"},
        use_remove_padding=False,
        enable_gradient_checkpointing=False,
    )


def fsdp2_configs() -> Values:
    engine = FSDPEngineConfig(
        strategy="fsdp2",
        mixed_precision=SPLIT,
        use_torch_compile=False,
        wrap_policy={"transformer_layer_cls_to_wrap": ["Qwen3DecoderLayer"]},
    )
    return {
        "engine_config": engine,
        "optimizer_config": FSDPOptimizerConfig(lr=1e-3, total_training_steps=10),
    }


def megatron_configs(bridge: str) -> Values:
    """Return the configuration of tensor parallel ranks."""
    megatron_patches.apply()
    if bridge == "mbridge":
        verl_on_cpu.let_mbridge_build()
    more = verl_on_cpu.let_megatron_bridge_build() if bridge == "megatron-bridge" else {}
    fusions = (
        "bias_activation_fusion",
        "bias_dropout_fusion",
        "masked_softmax_fusion",
        "gradient_accumulation_fusion",
    )
    settings = {
        "use_cpu_initialization": True,
        "attention_backend": "local",
        **dict.fromkeys(fusions, False),
        **more,
    }
    engine = McoreEngineConfig(
        tensor_model_parallel_size=torch.distributed.get_world_size(),
        vanilla_mbridge=bridge == "mbridge",
        override_transformer_config=settings,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=1,
    )
    vars(engine)["dtype"] = (
        "float32"  # this class refuses it, but verl's Megatron engine supports it
    )
    optimizer = McoreOptimizerConfig(lr=1e-3, total_training_steps=10)
    return {"engine_config": engine, "optimizer_config": optimizer}


class Actor(TrainingWorker):
    """The parts of an ActorRolloutRefWorker that an actor needs, without a whole verl
    configuration.
    """

    def __init__(self, path: str, engine_kwargs: Values, builder: str) -> None:
        version.installed = dict  # actors need no vLLM
        torch.distributed.init_process_group(
            "gloo"
        )  # verl would request a backend for the CPU and one for the device
        self.is_megatron = builder != "fsdp2"
        configs = megatron_configs(builder) if self.is_megatron else fsdp2_configs()
        model = model_config(path)
        super().__init__(
            TrainingWorkerConfig(
                model_type="language_model",
                model_config=model,
                checkpoint_config=CheckpointConfig(),
                **configs,
            )
        )
        self.reset()
        if self.is_megatron:
            verl_on_cpu.mask_causally(self.engine.module)
        self.actor = self
        self.checkpoint_engine = CheckpointEngineRegistry.new(
            ours.NAME, is_master=self.rank == 0, bucket_size=1 << 20, **engine_kwargs
        )

    update_weights = ActorRolloutRefWorker.update_weights
    execute_checkpoint_engine = ActorRolloutRefWorker.execute_checkpoint_engine

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def step(self, seed: int) -> float | None:
        """Run an optimizer step of verl's engine; return the gradient norm, if verl reports it.

        Data parallel ranks have different batches.
        """
        torch.manual_seed(seed + self.engine.get_data_parallel_rank())
        tokens = torch.randint(5, 60, (2, 16))
        with self.engine.train_mode():
            if self.is_megatron:
                return self.engine.train_batch(batch_of(tokens), partial(sft_loss, None))[
                    "metrics"
                ].get("grad_norm")
            self.engine.optimizer_zero_grad()
            self.engine.module(input_ids=tokens, labels=tokens).loss.backward()
            return float(self.engine.optimizer_step())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def log_probs(self, tokens: list[int]) -> list[float]:
        """Return the log-probabilities of all tokens but the first."""
        rows = torch.tensor([tokens])
        with torch.no_grad(), self.engine.eval_mode():
            if self.is_megatron:
                (log_probs,) = self.engine.infer_batch(batch_of(rows))["model_output"][
                    "log_probs"
                ].unbind()
                return log_probs[:-1].tolist()
            log_probs = self.engine.module(input_ids=rows).logits[0].log_softmax(-1)
        return [float(log_probs[at - 1, tokens[at]]) for at in range(1, len(tokens))]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def state(self) -> Values:
        engine = self.checkpoint_engine.engine
        report = self.checkpoint_engine.last_report
        return {
            "state": str(engine.sharding.state),
            "engine": type(self.engine).__bases__[-1].__name__,
            "kinds": sorted({type(module).__name__ for module in self.modules()}),
            "ordinary": [
                item.owner for item in engine.train.offload_items() if not is_elastic(item)
            ],
            "tensors": len(engine.table.shapes),
            "version": report.version,
            "verified": report.tensors_verified,
            "surplus": report.bytes_received - report.bytes_least,
        }

    def modules(self) -> list[Any]:
        """Return Megatron's chunks, or FSDP2's parameters."""
        return self.engine.module if self.is_megatron else [*self.engine.module.parameters()]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def num_different(self, directory: str) -> int:
        """Return how many tensors that verl would send differ from our engine's."""
        self.checkpoint_engine.engine.save_hf_checkpoint(directory)
        verls = {
            name: tensor.cpu().clone() for name, tensor in self.engine.get_per_tensor_param()[0]
        }
        ours = read_canonical(Path(directory))
        return len(verls.keys() ^ ours.keys()) + sum(
            not torch.equal(ours[name], verls[name]) for name in ours
        )


def is_elastic(item: OffloadItem) -> bool:
    """Return whether a tensor that is offloaded alone is in elastic memory."""
    return (
        item.kind not in ("param", "grad")
        or item.action == "rebuild"
        or exported_buffer_of(item.tensor) is not None
    )


def batch_of(tokens: torch.Tensor) -> TensorDict:
    """Return a batch of rows without padding, as verl passes them to its Megatron engine."""
    rows = torch.nested.as_nested_tensor([*tokens], layout=torch.jagged)
    tensors = {
        "input_ids": rows,
        "loss_mask": torch.ones_like(rows),
        "temperature": torch.ones(len(tokens)),
    }
    return get_tensordict(tensors, {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 1})


class ServerActor:
    """Replacement of verl's vLLMHttpServer: the manager's calls, as requests to vLLM's routes."""

    def __init__(self, url: str) -> None:
        self.server = HttpServer(url, 60)
        self.calls: list[str] = []

    def abort_all_requests(self, reject_request: bool = False) -> None:
        self.calls.append("abort")
        self.server.pause("abort", True)

    def resume_generation(self) -> None:
        self.calls.append("resume")
        self.server.resume()

    def set_global_steps(self, global_steps: int) -> None:
        self.calls.append(f"step {global_steps}")

    def collective_rpc(self, method: str, **_: Any) -> None:
        self.calls.append(f"rpc {method}")

    def clear_kv_cache(self) -> None:
        self.calls.append("clear")

    def release_kv_cache(self) -> None:
        self.calls.append("release")

    def sleep(self) -> None:
        self.calls.append("sleep")

    def take_calls(self) -> list[str]:
        calls = self.calls
        self.calls = []
        return calls


class Replica(RolloutReplica):
    """A replica with a running server."""

    def __init__(
        self, url: str, config: RolloutConfig, path: str, mode: RolloutMode, workers: list[Any]
    ) -> None:
        super().__init__(0, config, model_config(path), gpus_per_node=1)
        self.rollout_mode = mode
        self.workers = workers
        self._server_address = url.removeprefix("http://")
        # verl's ServerAdapter looks up this name.
        self.servers = [
            ray.remote(ServerActor).options(name="vllm_server_0_0", num_cpus=0).remote(url)
        ]

    async def launch_servers(self) -> None:
        """Do nothing: the test has started the server."""


def run(path: str, url: str, mode: RolloutMode, builder: str) -> Values:
    engine_kwargs = {ours.NAME: {"verify": "full"}}
    engine_config = CheckpointEngineConfig(
        backend=ours.NAME, custom_backend_module=ours.__name__, engine_kwargs=engine_kwargs
    )
    config = RolloutConfig(
        name="vllm",
        tensor_model_parallel_size=1,
        load_format=ours.NAME,
        checkpoint_engine=engine_config,
    )

    def group(size: int, cls: type, *arguments: Any, **named: Any) -> RayWorkerGroup:
        pool = RayResourcePool([size], use_gpu=False, max_colocate_count=1)
        actor_class = RayClassWithInitArgs(ray.remote(cls), *arguments, **named)
        return RayWorkerGroup(pool, actor_class, device_name="cpu")

    actors = group(2, Actor, path, engine_kwargs[ours.NAME], builder)
    workers = []
    if mode is RolloutMode.STANDALONE:
        rollout = group(1, CheckpointEngineWorker, config, model_config(path), replica_rank=0)
        workers = rollout.workers
    replica = Replica(url, config, path, mode, workers)
    manager = ours.Manager(config=engine_config, actor_wg=actors, replicas=[replica])
    manager.sleep_replicas()  # as verl's trainers do before the first update
    server = HttpServer(url, 60)
    updates = []
    for step in range(NUM_UPDATES):
        metrics = manager.update_weights(step)
        state = actors.state()
        (choice,) = server.complete(REQUEST)["choices"]
        manager.sleep_replicas()
        tokens = [*REQUEST["prompt"], *choice["token_ids"]]  # type: ignore[misc]
        expected = actors.log_probs(tokens)[0][-len(choice["token_ids"]) :]
        drawn = choice["logprobs"]["token_logprobs"]
        updates.append(
            {
                "metrics": metrics,
                "after update": state,
                "after sleep": actors.state(),
                "num_different": actors.num_different(f"{path} after {step}"),
                "difference": max(abs(a - b) for a, b in zip(expected, drawn, strict=True)),
                "calls": ray.get(replica.servers[0].take_calls.remote()),
                "drawn": drawn,
                "norms": actors.step(step),
            }
        )
    return {"updates": updates, "weights": server.get("weight_info")}


def main() -> None:
    path, url, out, mode, builder = sys.argv[1:]
    variables = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("VERL_", "OMP_", "PYTHONPATH"))
    }
    ray.init(num_cpus=4, include_dashboard=False, runtime_env={"env_vars": variables})
    try:
        Path(out).write_text(json.dumps(run(path, url, RolloutMode(mode), builder)))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    # Ray's workers find classes by the module's name, which is not __main__.
    from tests.hybrid_engine.integrations import verl_run

    verl_run.main()
