"""Walks on ranks."""

from __future__ import annotations

import faulthandler
import os
import pickle
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from random import Random
from typing import Any

from hybrid_engine.config import HybridConfig, load_config
from hybrid_engine.ranks.job import Job
from tests.harness.launch import Ranks
from tests.harness.values import Values
from tests.walk.interruptions import Points
from tests.walk.oracle import Subject
from tests.walk.walk import Findings, Walk
from tests.zoo import workers

TRAINERS = ("fsdp2", "fsdp2-lora", "megatron", "megatron-bf16", "megatron-lora")
SERVED = ("fsdp2-vllm", "megatron-vllm")
TIMEOUT = 15.0
SIZES = {"num_hidden_layers": 2, "intermediate_size": 256}


def walks(
    directory: str,
    trainer: str,
    seeds: Sequence[int],
    num_steps: int,
    faults: float,
    seconds: float = 1e9,
) -> list[Findings]:
    """Run a walk with a new engine for each seed on this rank, until `seconds` have passed."""
    started = time.monotonic()
    findings = []
    for seed in seeds:
        if time.monotonic() - started > seconds:
            break
        with walking(directory, trainer, seed, _settings(Random(seed)), faults) as walk:
            findings.append(walk.run(num_steps))
        _keep(directory, findings[-1])
        if findings[-1].parted and int(os.environ["WORLD_SIZE"]) > 1:
            break
    return findings


def plans(directory: str, trainer: str) -> list[Findings]:
    """Make every call in every state, with a new engine after a wrong one."""
    settings = {"incremental": "auto", "bucket_mb": 1, "timeout_seconds": TIMEOUT}
    first = 0
    names = [""]
    findings = []
    while first < len(names):
        with walking(directory, trainer, first, settings, 0.0) as walk:
            names = walk.plans()
            findings.append(walk.follow(names[first:]))
        _keep(directory, findings[-1])
        first += findings[-1].counts["plans"]
    return findings


@contextmanager
def walking(
    directory: str, trainer: str, seed: int, settings: Mapping[str, Any], faults: float
) -> Iterator[Walk]:
    path = written_model(Path(directory))
    checkpoint = Path(directory) / f"checkpoint-{seed}"
    faulthandler.enable()
    with ExitStack() as ends:
        config = configured(path, trainer, settings)
        job = ends.enter_context(
            closing(Job.join(config.generate_config.timeout_seconds, host="here"))
        )
        subject = subject_of(path, trainer, config, job, ends)
        yield Walk(
            subject, Points(), seed, checkpoint, faults=faults, settings=f"{trainer} {settings}"
        )
    shutil.rmtree(checkpoint, ignore_errors=True)


def _keep(directory: str, findings: Findings) -> None:
    """Keep findings on the disk, because a rank may die in a later walk."""
    (Path(directory) / f"{findings.seed}.findings{os.environ['RANK']}").write_bytes(
        pickle.dumps(findings)
    )


def written_model(directory: Path) -> Path:
    return workers.write_model(directory / f"model{os.environ['RANK']}", "qwen3", **SIZES)


def _settings(chance: Random) -> Values:
    return {
        "incremental": chance.choice(("auto", "auto", "auto", "off")),
        "incremental_mb": chance.choice((1, 1024, 1024)),
        "verify": chance.choice(("off", "off", "full", "sample")),
        "offload_train_param": chance.choice((True, True, True, "auto", False)),
        "offload_train_optimizer": chance.choice((True, True, True, "auto", False)),
        "release_weights": chance.random() < 0.9,
        "transport": chance.choice(("auto", "auto", "collective")),
        "bucket_mb": 1,
        "timeout_seconds": TIMEOUT,
    }


def configured(path: Path, trainer: str, settings: Mapping[str, Any]) -> HybridConfig:
    actor = {"params_dtype": "float32", "micro_batch_size": 2, "optimizer": {"lr": 1e-2}}
    if trainer.startswith("fsdp2"):
        actor["fsdp"] = {}
    else:
        actor |= {"make_vocab_size_divisible_by": 8, "seq_length": workers.SEQ_LENGTH}
    if trainer in SERVED:
        settings = {
            **settings,
            "max_model_len": 64,
            "max_num_seqs": 16,
            "kv_cache_mb": 16,
            "timeout_seconds": 60.0,
        }
    if trainer == "megatron-bf16":
        actor["params_dtype"] = "bfloat16"
    if trainer == "megatron-lora":
        actor["lora"] = {"rank": 4}
    values = {
        "model": str(path),
        "random_weights": True,
        "actor_config": actor,
        "generate_config": dict(settings),
    }
    return load_config(values, int(os.environ["WORLD_SIZE"]))


def subject_of(
    path: Path, trainer: str, config: HybridConfig, job: Job, ends: ExitStack
) -> Subject:
    """Build a trainer in an engine; `ends` closes both."""
    if trainer.startswith("fsdp2"):
        from tests.walk.fsdp2 import Fsdp2

        return Fsdp2(path, config, job, ends, lora="lora" in trainer, serve="vllm" in trainer)
    from tests.walk.megatron import Megatron

    return Megatron(config, job, ends, serve="vllm" in trainer)


def report(walks: Sequence[Findings]) -> str:
    counts = sum((walk.counts for walk in walks), Counter())
    refused = sum((walk.refused for walk in walks), Counter())
    places = sum((walk.interrupted for walk in walks), Counter())
    lines = [f"{len(walks)} walks, {sum(walk.parted for walk in walks)} parted: {dict(counts)}"]
    lines.append(f"faults at {len(places)} places; refused: {dict(refused.most_common(12))}")
    lines += [f"WRONG seed {walk.seed}: {walk.wrong}" for walk in walks if walk.wrong]
    return "\n".join(lines)


def story(findings: Findings, last: int = 14) -> str:
    """Return the last actions of a walk and its wrong behaviour."""
    head = f"seed {findings.seed}, {findings.settings}"
    return "\n".join([head, *findings.history[-last:], f"=> {findings.wrong}"])


def launched(
    engines: Ranks, num_ranks: int, function: Callable[..., Any], *call: Any, timeout: float
) -> list[Findings]:
    """Walk on new ranks until a rank dies or the ranks lose each other."""
    with tempfile.TemporaryDirectory() as directory:
        try:
            return engines.launch(function, num_ranks, directory, *call, timeout=timeout)[0]
        except AssertionError as crashed:
            done = sorted(
                Path(directory).glob("*.findings0"), key=lambda path: path.stat().st_mtime
            )
            return [
                *(pickle.loads(path.read_bytes()) for path in done),
                _crash(Path(directory), crashed),
            ]


def _crash(directory: Path, error: AssertionError) -> Findings:
    """Return the findings of a walk in which a rank died, from its journal."""
    journals = sorted(
        directory.glob("checkpoint-*-rank0.txt"), key=lambda path: path.stat().st_mtime
    )
    if not journals:
        raise error
    first, *history = journals[-1].read_text().splitlines()
    frames = [
        line.strip() for line in str(error).splitlines() if line.strip().startswith('File "/')
    ]
    reason = next(
        (word for word in ("Segfault", "exceeded", "SIGABRT") if word in str(error)),
        str(error)[-300:],
    )
    seed = int(journals[-1].name.split("-")[1]) + max(
        0, sum(line.startswith("plan ") for line in history) - 1
    )
    return Findings(seed, first.partition(", ")[2], f"a rank died: {reason} {frames[:6]}", history)
