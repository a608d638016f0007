"""GRPO on Ray: ranks that train and a vLLM server as plain actors of one placement group.

    python -m examples.recipes.on_ray examples/gpt_rl/configs/tp2_to_dp2.yaml --ranks 2 --out runs/on_ray

The job is `make rl`'s. Ray starts a lost server anew, under the same name. Ranks that are lost, or have lost their
server, are replaced here, and go on from the last checkpoint. Ray counts CPUs; on GPUs let a rank and a worker of the
server share one, num_gpus=0.5 each: that was never run.
"""

from __future__ import annotations

import argparse
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
import yaml
from ray.exceptions import GetTimeoutError, RayActorError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from examples.gpt_rl.served import engine_arguments
from hybrid_engine.backends.vllm.server.async_server import VllmActor
from hybrid_engine.errors import LostRankError, ServerError
from hybrid_engine.serving.invitation import TOKEN

SERVER = "vllm"
RESTARTS = 3
SECONDS_TO_START = 600.0


class TrainerRank:
    """One rank of the job, in a process of its own."""

    def node(self) -> str:
        """Ray's id of the node it is on."""
        return ray.get_runtime_context().get_node_id()

    def place(self) -> tuple[str, str]:
        """Where the ranks meet, if this is the first: its address, and a port that is free."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), str(probe.getsockname()[1])

    def train(self, environment: dict[str, str], config: str, out: Path, overrides: Sequence[str]) -> None:
        """Run the example to its end, on from its last checkpoint. Collective."""
        os.environ.update(environment)
        from rich.console import Console

        from examples.gpt_rl.settings import load_settings
        from examples.gpt_rl.train import run, run_files

        out.mkdir(parents=True, exist_ok=True)
        settings = load_settings(config, int(environment["WORLD_SIZE"]), overrides)
        run(settings, run_files(out), True, Console(quiet=environment["RANK"] != "0"))


def actor_in(group: PlacementGroup, bundle: int, kind: type, **options: Any) -> Any:
    """Have Ray make actors of a class in one bundle of the group."""
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
    return ray.remote(kind).options(scheduling_strategy=strategy, num_cpus=1, **options)


def start_server(group: PlacementGroup, bundle: int, config: str) -> Any:
    """Start vLLM without weights, as the configuration's model; Ray starts it anew when it is lost."""
    values = yaml.safe_load(Path(config).read_text())
    model = (Path(config).parent / values["model"]).resolve()
    arguments = {**engine_arguments(model, values), "enforce_eager": True, "skip_tokenizer_init": True}
    options = {"name": SERVER, "max_restarts": -1, "max_concurrency": 64}
    return actor_in(group, bundle, VllmActor, **options).remote(**arguments)


def train(group: PlacementGroup, ranks: int, server: Any, config: str, out: Path, overrides: Sequence[str]) -> None:
    """Train to the end, with new actors where some were lost."""
    for left in reversed(range(RESTARTS + 1)):
        wait_for(server)
        actors = [actor_in(group, rank, TrainerRank).remote() for rank in range(ranks)]
        try:
            address, port = ray.get(actors[0].place.remote())
            common = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": address, "MASTER_PORT": port}
            # the token is for ranks and servers of several nodes
            meeting = [f"generate_config.server_address={address}"] if TOKEN in os.environ else []
            nodes = ray.get([actor.node.remote() for actor in actors])
            # a rank's GPU is the one of its place among the ranks of its node
            places = [
                {**common, "RANK": str(rank), "LOCAL_RANK": str(nodes[:rank].count(node))}
                for rank, node in enumerate(nodes)
            ]
            starts = zip(actors, places, strict=True)
            ray.get([actor.train.remote(place, config, out, [*meeting, *overrides]) for actor, place in starts])
            return
        except (RayActorError, LostRankError, ServerError) as error:
            if not left:
                raise
            print(f"starting new ranks: {type(error).__name__}: {error}", flush=True)
        finally:
            for actor in actors:
                ray.kill(actor)


def wait_for(server: Any, seconds: float = SECONDS_TO_START) -> None:
    """Wait until the server is up, which Ray may be starting anew.

    Raises RayActorError, with the cause, where its constructor fails, and ServerError where it is not up in time.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            ray.get(server.num_workers.remote(), timeout=max(deadline - time.monotonic(), 0))
            return
        except (GetTimeoutError, RayActorError) as error:
            if isinstance(error, RayActorError) and error.actor_init_failed:
                raise
            if time.monotonic() > deadline:
                raise ServerError(
                    f"the server was not up within {seconds:.0f} s ({type(error).__name__}: {error}). `ray status` "
                    "says whether a node has room for it, and the actor's log what it does; raise SECONDS_TO_START if "
                    "it needs longer"
                ) from error
            time.sleep(1)


def main() -> None:
    """Start Ray and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("runs/on_ray"), help="that all nodes can write")
    parser.add_argument("--address", help="of a cluster that is there, as auto; default: start one here")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_intermixed_args()
    if options.address:
        ray.init(address=options.address)
    else:
        ray.init(num_cpus=options.ranks + 1, include_dashboard=False)
    run(options.config, options.ranks, options.out, options.overrides)


def run(config: str, ranks: int, out: Path, overrides: Sequence[str] = ()) -> None:
    """Train on the Ray that this process is connected to."""
    group = placement_group([{"CPU": 1}] * (ranks + 1), strategy="PACK")
    server = start_server(group, ranks, config)
    try:
        train(group, ranks, server, config, out.absolute(), [f"generate_config.servers=[ray:{SERVER}]", *overrides])
    finally:
        ray.kill(server)
        remove_placement_group(group)


if __name__ == "__main__":
    main()
