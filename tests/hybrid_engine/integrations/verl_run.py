"""verl's manager, actors and checkpoint engine worker in Ray, on a CPU, with our classes in their places.

    python -m tests.hybrid_engine.integrations.verl_run MODEL URL OUT standalone|hybrid

verl's own: CheckpointEngineManager's and ActorRolloutRefWorker's `update_weights`, TrainingWorker with its FSDP2 engine
and optimizer, CheckpointEngineWorker, vLLM's ServerAdapter. In place of its replica, which wants a GPU, is `Replica`
with an actor that calls the server at URL by vLLM's routes.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import ray
import torch
from verl.checkpoint_engine.base import CheckpointEngineRegistry, CheckpointEngineWorker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.trainer.config import CheckpointConfig
from verl.workers.config import (
    CheckpointEngineConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    RolloutConfig,
    TrainingWorkerConfig,
)
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker
from verl.workers.rollout.replica import RolloutMode, RolloutReplica

from hybrid_engine.integrations import verl as ours
from hybrid_engine.serving.clients import HttpServer

NUM_UPDATES = 3
ASKED = {"prompt": [5, 6, 7, 8], "max_tokens": 8, "temperature": 0.0, "logprobs": 0, "return_token_ids": True}
SPLIT = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}


def model_config(path: str) -> HFModelConfig:
    return HFModelConfig(
        path=path,
        override_config={"attn_implementation": "sdpa"},
        use_remove_padding=False,
        enable_gradient_checkpointing=False,
    )


class Actor(TrainingWorker):
    """What an ActorRolloutRefWorker has of an actor, whose own `__init__` reads the whole of a verl configuration."""

    def __init__(self, path: str, engine_kwargs: dict[str, Any]) -> None:
        torch.distributed.init_process_group("gloo")  # verl asks for one backend each of the CPU and of the device
        engine = FSDPEngineConfig(
            strategy="fsdp2",
            mixed_precision=SPLIT,
            use_torch_compile=False,
            wrap_policy={"transformer_layer_cls_to_wrap": ["Qwen3DecoderLayer"]},
        )
        config = TrainingWorkerConfig(
            model_type="language_model",
            model_config=model_config(path),
            engine_config=engine,
            optimizer_config=FSDPOptimizerConfig(lr=1e-3, total_training_steps=10),
            checkpoint_config=CheckpointConfig(),
        )
        super().__init__(config)
        self.reset()
        self.actor = self
        self.checkpoint_engine = CheckpointEngineRegistry.new(
            ours.NAME, is_master=self.rank == 0, bucket_size=1 << 20, **engine_kwargs
        )

    update_weights = ActorRolloutRefWorker.update_weights
    execute_checkpoint_engine = ActorRolloutRefWorker.execute_checkpoint_engine

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def step(self, seed: int) -> float:
        """One optimizer step of verl's engine; the ranks' batches differ."""
        torch.manual_seed(seed + self.rank)
        tokens = torch.randint(5, 60, (2, 16))
        with self.engine.train_mode():
            self.engine.optimizer_zero_grad()
            self.engine.module(input_ids=tokens, labels=tokens).loss.backward()
            return float(self.engine.optimizer_step())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def log_probs(self, tokens: list[int]) -> list[float]:
        """Of each token but the first."""
        with torch.no_grad(), self.engine.eval_mode():
            found = self.engine.module(input_ids=torch.tensor([tokens])).logits[0].log_softmax(-1)
        return [float(found[at - 1, tokens[at]]) for at in range(1, len(tokens))]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def found(self) -> dict[str, Any]:
        report = self.checkpoint_engine.last_report
        return {
            "state": str(self.checkpoint_engine.engine.sharding.state),
            "engine": type(self.engine).__mro__[2].__name__,
            "kinds": sorted({type(each).__name__ for each in self.engine.module.parameters()}),
            "parameters": len([*self.engine.module.parameters()]),
            "version": report.version,
            "verified": report.tensors_verified,
            "surplus": report.bytes_received - report.bytes_least,
        }


class ServerActor:
    """In place of verl's vLLMHttpServer: the calls of a manager, as vLLM's routes."""

    def __init__(self, url: str) -> None:
        self.server, self.calls = HttpServer(url, 60), list[str]()

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

    def told(self) -> list[str]:
        calls, self.calls = self.calls, []
        return calls


class Replica(RolloutReplica):
    """One that is there already."""

    def __init__(self, url: str, config: RolloutConfig, path: str, mode: RolloutMode, workers: list[Any]) -> None:
        super().__init__(0, config, model_config(path), gpus_per_node=1)
        self.rollout_mode, self.workers, self._server_address = mode, workers, url.removeprefix("http://")
        # the name by which verl's ServerAdapter finds it
        self.servers = [ray.remote(ServerActor).options(name="vllm_server_0_0", num_cpus=0).remote(url)]

    async def launch_servers(self) -> None:
        """The test has."""


def run(path: str, url: str, mode: RolloutMode) -> dict[str, Any]:
    engine_kwargs = {ours.NAME: {"verify": "full"}}
    engine_config = CheckpointEngineConfig(
        backend=ours.NAME, custom_backend_module=ours.__name__, engine_kwargs=engine_kwargs
    )
    config = RolloutConfig(
        name="vllm", tensor_model_parallel_size=1, load_format=ours.NAME, checkpoint_engine=engine_config
    )

    def group(size: int, cls: type, *arguments: Any, **named: Any) -> RayWorkerGroup:
        pool = RayResourcePool([size], use_gpu=False, max_colocate_count=1)
        made = RayClassWithInitArgs(ray.remote(cls), *arguments, **named)
        return RayWorkerGroup(pool, made, device_name="cpu")

    actors = group(2, Actor, path, engine_kwargs[ours.NAME])
    workers: list[Any] = []
    if mode is RolloutMode.STANDALONE:
        rollout = group(1, CheckpointEngineWorker, config, model_config(path), replica_rank=0)
        workers = rollout.workers
    replica = Replica(url, config, path, mode, workers)
    manager = ours.Manager(config=engine_config, actor_wg=actors, replicas=[replica])
    manager.sleep_replicas()  # as verl's trainers do before the first update
    server, updates = HttpServer(url, 60), []
    for step in range(NUM_UPDATES):
        metrics = manager.update_weights(step)
        found = actors.found()
        (choice,) = server.complete(ASKED)["choices"]
        manager.sleep_replicas()
        tokens = [*ASKED["prompt"], *choice["token_ids"]]  # type: ignore[misc]
        own = actors.log_probs(tokens)[0][-len(choice["token_ids"]) :]
        drawn = choice["logprobs"]["token_logprobs"]
        updates.append(
            {
                "metrics": metrics,
                "after update": found,
                "after sleep": actors.found(),
                "difference": max(abs(one - other) for one, other in zip(own, drawn, strict=True)),
                "calls": ray.get(replica.servers[0].told.remote()),
                "drawn": drawn,
                "norms": actors.step(step),
            }
        )
    return {"updates": updates, "weights": server.get("weight_info")}


def main() -> None:
    path, url, out, mode = sys.argv[1:]
    variables = {name: value for name, value in os.environ.items() if name.startswith(("VERL_", "OMP_", "PYTHONPATH"))}
    ray.init(num_cpus=4, include_dashboard=False, runtime_env={"env_vars": variables})
    try:
        Path(out).write_text(json.dumps(run(path, url, RolloutMode(mode))))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    # by its module's name, for Ray's workers to find its classes
    from tests.hybrid_engine.integrations import verl_run

    verl_run.main()
