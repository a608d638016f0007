"""Walks on ranks.

python -m tests.walk.runs --trainer fsdp2 --ranks 1 --seeds 0:20 --steps 40
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import pickle
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from random import Random
from typing import Any

from hybrid_engine.config import HybridConfig, load_config
from hybrid_engine.ranks.job import Job
from tests.harness.launch import Ranks
from tests.walk.interruptions import Points
from tests.walk.oracle import Subject
from tests.walk.walk import Findings, Walk
from tests.zoo import workers

TRAINERS = ("fsdp2", "fsdp2-lora", "megatron", "megatron-bf16", "megatron-lora")
SERVED = ("fsdp2-vllm", "megatron-vllm")
TIMEOUT = 15.0
SIZES = {"num_hidden_layers": 2, "intermediate_size": 256}


def walks(
    directory: str, trainer: str, seeds: Sequence[int], num_steps: int, faults: float, seconds: float = 1e9
) -> list[Findings]:
    """A rank function: a walk for each seed, each with a new engine, while there is time."""
    started, found = time.monotonic(), []
    for seed in seeds:
        if time.monotonic() - started > seconds:
            break
        with walking(directory, trainer, seed, _settings(Random(seed)), faults) as walk:
            found.append(walk.run(num_steps))
        _keep(directory, found[-1])
        if found[-1].parted and int(os.environ["WORLD_SIZE"]) > 1:
            break
    return found


def plans(directory: str, trainer: str, first: int = 0, seconds: float = 1e9) -> list[Findings]:
    """A rank function: every call in every state, from number `first` on; a new engine after each that is wrong."""
    settings = {"incremental": "auto", "prefetch": "auto", "bucket_mb": 1, "timeout_seconds": TIMEOUT}
    started, names, found = time.monotonic(), [""], []
    while first < len(names) and time.monotonic() - started < seconds:
        with walking(directory, trainer, first, settings, 0.0) as walk:
            names = walk.plans()
            found.append(walk.follow(names[first:]))
        _keep(directory, found[-1])
        first += found[-1].counts["plans"]
    return found


@contextmanager
def walking(directory: str, trainer: str, seed: int, settings: Mapping[str, Any], faults: float) -> Iterator[Walk]:
    path, place = written_model(Path(directory)), Path(directory) / f"checkpoint-{seed}"
    faulthandler.enable()
    with ExitStack() as ends:
        config = configured(path, trainer, settings)
        job = ends.enter_context(closing(Job.join(config.generate_config.timeout_seconds, host="here")))
        subject = subject_of(path, trainer, config, job, ends)
        yield Walk(subject, Points(), seed, place, faults=faults, settings=f"{trainer} {settings}")
    shutil.rmtree(place, ignore_errors=True)


def _keep(directory: str, found: Findings) -> None:
    """On the disk, should a rank die in a later walk."""
    (Path(directory) / f"{found.seed}.found{os.environ['RANK']}").write_bytes(pickle.dumps(found))


def written_model(directory: Path) -> Path:
    return workers.write_model(directory / f"model{os.environ['RANK']}", "qwen3", **SIZES)


def _settings(chance: Random) -> dict[str, Any]:
    return {
        "incremental": chance.choice(("auto", "auto", "auto", "off")),
        "incremental_mb": chance.choice((1, 1024, 1024)),
        "prefetch": chance.choice(("auto", "off")),
        "verify": chance.choice(("off", "off", "full", "sample")),
        "offload_train_param": chance.random() < 0.9,
        "offload_train_optimizer": chance.random() < 0.9,
        "release_weights": chance.random() < 0.9,
        "transport": chance.choice(("auto", "auto", "collective")),
        "bucket_mb": 1,
        "timeout_seconds": TIMEOUT,
    }


def configured(path: Path, trainer: str, settings: Mapping[str, Any]) -> HybridConfig:
    actor: dict[str, Any] = {"params_dtype": "float32", "micro_batch_size": 2, "optimizer": {"lr": 1e-2}}
    if trainer.startswith("fsdp2"):
        actor["fsdp"] = {}
    else:
        actor |= {"make_vocab_size_divisible_by": 8, "seq_length": workers.SEQ_LENGTH}
    if trainer in SERVED:
        settings = {**settings, "max_model_len": 64, "max_num_seqs": 16, "kv_cache_mb": 16, "timeout_seconds": 60.0}
    if trainer == "megatron-bf16":
        actor["params_dtype"] = "bfloat16"
    if trainer == "megatron-lora":
        actor["lora"] = {"rank": 4}
    values = {"model": str(path), "random_weights": True, "actor_config": actor, "generate_config": dict(settings)}
    return load_config(values, int(os.environ["WORLD_SIZE"]))


def subject_of(path: Path, trainer: str, config: HybridConfig, job: Job, ends: ExitStack) -> Subject:
    """A trainer with an engine around it, which end with `ends`."""
    if trainer.startswith("fsdp2"):
        from tests.walk.fsdp2 import Fsdp2

        return Fsdp2(path, config, job, ends, lora="lora" in trainer, serve="vllm" in trainer)
    from tests.walk.megatron import Megatron

    return Megatron(config, job, ends, serve="vllm" in trainer)


def report(found: Iterable[Findings]) -> str:
    found = list(found)
    counts: Counter[str] = sum((each.counts for each in found), Counter())
    refused: Counter[str] = sum((each.refused for each in found), Counter())
    places: Counter[str] = sum((each.interrupted for each in found), Counter())
    lines = [f"{len(found)} walks, {sum(each.parted for each in found)} parted: {dict(counts)}"]
    lines.append(f"faults at {len(places)} places; refused: {dict(refused.most_common(12))}")
    lines += [f"WRONG seed {each.seed}: {each.wrong}" for each in found if each.wrong]
    return "\n".join(lines)


def story(found: Findings, last: int = 14) -> str:
    """How a walk came to what is wrong."""
    return "\n".join([f"seed {found.seed}, {found.settings}", *found.history[-last:], f"=> {found.wrong}"])


def launched(
    engines: Ranks, num_ranks: int, function: Callable[..., Any], *call: Any, timeout: float
) -> list[Findings]:
    """Walks on new ranks, until one that ends them: a rank dies in it, or the ranks lose each other."""
    with tempfile.TemporaryDirectory() as directory:
        try:
            found: list[Findings] = engines.launch(function, num_ranks, directory, *call, timeout=timeout)[0]
            return found
        except AssertionError as crashed:
            done = sorted(Path(directory).glob("*.found0"), key=lambda path: path.stat().st_mtime)
            return [*(pickle.loads(path.read_bytes()) for path in done), _crash(Path(directory), crashed)]


def _crash(directory: Path, error: AssertionError) -> Findings:
    """What is known of a walk in which a rank died."""
    journals = sorted(directory.glob("checkpoint-*-rank0.txt"), key=lambda path: path.stat().st_mtime)
    if not journals:
        raise error
    first, *history = journals[-1].read_text().splitlines()
    frames = [line.strip() for line in str(error).splitlines() if line.strip().startswith('File "/')]
    why = next((word for word in ("Segfault", "outlived", "SIGABRT") if word in str(error)), str(error)[-300:])
    seed = int(journals[-1].name.split("-")[1]) + max(0, sum(line.startswith("plan ") for line in history) - 1)
    return Findings(seed, first.partition(", ")[2], f"a rank died: {why} {frames[:6]}", history)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trainer", default="fsdp2", choices=TRAINERS + SERVED)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--seeds", default="0:10")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--faults", type=float, default=0.3)
    parser.add_argument("--seconds", type=float, default=500.0)
    parser.add_argument("--plans", action="store_true", help="every call once, in place of random walks")
    parser.add_argument("--last", type=int, default=12)
    given = parser.parse_args()
    first, _, end = given.seeds.partition(":")
    seeds = range(int(first), int(end or int(first) + 1))
    found: list[Findings] = []
    ended = time.monotonic() + given.seconds
    while seeds and (left := ended - time.monotonic()) > 0:
        function, *call = walks, given.trainer, seeds, given.steps, given.faults, left
        if given.plans:
            function, *call = plans, given.trainer, seeds.start, left
        fresh = launched(Ranks(with_engines=True), given.ranks, function, *call, timeout=left + 90)
        for each in fresh:
            if each.wrong:
                print(story(each, given.last), end="\n\n", flush=True)
        found += fresh
        if not fresh or (given.plans and not fresh[-1].wrong.startswith("a rank died")):
            break
        seeds = range(fresh[-1].seed + 1, seeds.stop)
    print(report(found))


if __name__ == "__main__":
    main()
