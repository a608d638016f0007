"""GRPO on Ray: training ranks and a vLLM server as plain actors of a placement group.

    python -m examples.recipes.on_ray examples/gpt_rl/configs/tp2_to_dp2.yaml --out runs/on_ray

The job is that of `make rl`. Ray restarts a lost server under the same name. If a rank or the
server is lost, new ranks resume from the last checkpoint. Resources are CPUs; GPUs were never
tried.
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
    """A rank of the job in its own process."""

    def node(self) -> str:
        """Return Ray's id of the actor's node."""
        return ray.get_runtime_context().get_node_id()

    def place(self) -> tuple[str, str]:
        """Return the address of this node and a free port, for the rendezvous of the ranks."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), str(probe.getsockname()[1])

    def train(
        self, environment: dict[str, str], config: str, out: Path, overrides: Sequence[str]
    ) -> None:
        """Run the example to its end, from its last checkpoint if there is one. Collective."""
        os.environ.update(environment)
        from rich.console import Console

        from examples.gpt_rl.settings import load_settings
        from examples.gpt_rl.train import run, run_files

        out.mkdir(parents=True, exist_ok=True)
        settings = load_settings(config, int(environment["WORLD_SIZE"]), overrides)
        run(settings, run_files(out), True, Console(quiet=environment["RANK"] != "0"))


def actor_in(group: PlacementGroup, bundle: int, kind: type, **options: Any) -> Any:
    """Return `kind` as a Ray actor class in a bundle of the group."""
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
    return ray.remote(kind).options(scheduling_strategy=strategy, num_cpus=1, **options)


def start_server(group: PlacementGroup, bundle: int, config: str) -> Any:
    """Start vLLM without weights, as an actor that Ray restarts."""
    values = yaml.safe_load(Path(config).read_text())
    model = (Path(config).parent / values["model"]).resolve()
    arguments = {
        **engine_arguments(model, values),
        "enforce_eager": True,
        "skip_tokenizer_init": True,
    }
    options = {"name": SERVER, "max_restarts": -1, "max_concurrency": 64}
    return actor_in(group, bundle, VllmActor, **options).remote(**arguments)


def train(
    group: PlacementGroup, ranks: int, server: Any, config: str, out: Path, overrides: Sequence[str]
) -> None:
    """Train to the end; start new actors if some were lost."""
    for restarts_left in reversed(range(RESTARTS + 1)):
        wait_for(server)
        actors = [actor_in(group, rank, TrainerRank).remote() for rank in range(ranks)]
        try:
            address, port = ray.get(actors[0].place.remote())
            common = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": address, "MASTER_PORT": port}
            # with a token, ranks and servers may be on several nodes and need a reachable address
            is_reachable = TOKEN in os.environ
            server_address = [f"generate_config.server_address={address}"] if is_reachable else []
            nodes = ray.get([actor.node.remote() for actor in actors])
            runs = []
            for rank, (actor, node) in enumerate(zip(actors, nodes, strict=True)):
                # the local rank selects the GPU
                environment = {
                    **common,
                    "RANK": str(rank),
                    "LOCAL_RANK": str(nodes[:rank].count(node)),
                }
                settings = [*server_address, *overrides]
                runs.append(actor.train.remote(environment, config, out, settings))
            ray.get(runs)
            return
        except (RayActorError, LostRankError, ServerError) as error:
            if not restarts_left:
                raise
            print(f"starting new ranks: {type(error).__name__}: {error}", flush=True)
        finally:
            for actor in actors:
                ray.kill(actor)


def wait_for(server: Any, seconds: float = SECONDS_TO_START) -> None:
    """Wait until the server is up; Ray may be restarting it.

    Raises RayActorError with the cause if its constructor fails, and ServerError after `seconds`.
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
                    f"the server was not up within {seconds:.0f} s ({type(error).__name__}: "
                    f"{error}). `ray status` shows free resources, "
                    "and the log of the actor its progress; raise SECONDS_TO_START if needed"
                ) from error
            time.sleep(1)


def main() -> None:
    """Start Ray and train."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--out", type=Path, default=Path("runs/on_ray"), help="directory that all nodes can write"
    )
    parser.add_argument(
        "--address", help="address of a running cluster, or auto; default: start one"
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_intermixed_args()
    if options.address:
        ray.init(address=options.address)
    else:
        ray.init(num_cpus=options.ranks + 1, include_dashboard=False)
    run(options.config, options.ranks, options.out, options.overrides)


def run(config: str, ranks: int, out: Path, overrides: Sequence[str] = ()) -> None:
    """Train on the connected Ray cluster."""
    group = placement_group([{"CPU": 1}] * (ranks + 1), strategy="PACK")
    server = start_server(group, ranks, config)
    try:
        settings = [f"generate_config.servers=[ray:{SERVER}]", *overrides]
        train(group, ranks, server, config, out.absolute(), settings)
    finally:
        ray.kill(server)
        remove_placement_group(group)


if __name__ == "__main__":
    main()
