"""Certifies that a stock vLLM computes after a reload what it computes after a cold load.

    former weights --load--> engine --vLLM's own reload--> given weights --------\
    given weights --load--> engine --sleep, wake----------> given weights --------+-- bit by bit: certificate.py
    former weights --> vLLM --this project's own switch--> given weights --------/
    given weights --load--> engine (cold) ---------------------------------------/

    python -m hybrid_engine.verification.certify JOB.json      the engines, each in a process forked from this one

That process imports vLLM once and computes nothing: what it forks finds no threads.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from hybrid_engine.config import load_config
from hybrid_engine.errors import ConfigError, HybridEngineError, ReshardError, Violation
from hybrid_engine.files.model_files import CONFIG, weight_files
from hybrid_engine.models import table_for
from hybrid_engine.ranks.launching import run_ranks
from hybrid_engine.verification.certificate import Finding, Snapshot, compare
from hybrid_engine.verification.comparison import write_random_checkpoint

COLD, OWN = "cold", "own switch"
WAYS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    COLD: ("given", ()),
    "reload": ("former", ("reload",)),
    "sleep 1": ("given", ("sleep 1", "wake")),
    "sleep 2": ("former", ("sleep 2", "wake", "reload")),
    OWN: ("former", ()),
}
"""What an engine begins with, and the steps of `stock.STEPS` to the given weights; all are compared with the first."""

_ENVIRONMENT = {
    **{"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "VLLM_NO_USAGE_STATS": "1"},
    # in the engine's own process, whose workers are called with a function
    **{"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"},
}
_DEFAULT_ENVIRONMENT = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
_SECONDS_PER_MODEL = 1800.0
_REFUSED = 2  # the status with which argparse ends
_OF_SWITCH = {"model", "dtype", "max_model_len", "max_num_seqs", "worker_cls"}
"""Arguments that mean the same to the switch, and the worker, of which it has its own."""


@dataclass(frozen=True)
class Pair:
    """Two checkpoints of one model.

    Attributes:
        name: for reports.
        former, given: directories.
        words: vLLM's arguments, as on a command line; the dtype is among them.
        scratch: directory for what is observed.
    """

    name: str
    former: str
    given: str
    words: Sequence[str]
    scratch: str


def prepare(model: Path, name: str, words: Sequence[str], scratch: Path) -> Pair:
    """Write the former checkpoint of a model, and the given one where there is only a config.

    `words`: vLLM's arguments. The default dtype is the checkpoint's own, also where vLLM would take a narrower one.

    Raises ConfigError and FileError for a broken checkpoint, UnknownModelError for a config alone without a name table.
    """
    config = json.loads((model / CONFIG).read_text())
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    given, former = model, scratch / "former"
    if any(model.glob("*.safetensors*")):
        _write_other_weights(model, former)
    else:
        table, given = table_for(config), scratch / "given"
        for seed, directory in enumerate((given, former)):
            write_random_checkpoint(directory, model, table, dtype, seed)
    return Pair(name, str(former), str(given), ("--dtype", dtype, *words), str(scratch))


def _write_other_weights(model: Path, directory: Path) -> None:
    """Write a checkpoint's files with noise on every weight; integers, which may be packed numbers, are reversed."""
    names = weight_files(model)
    shutil.copytree(model, directory, ignore=shutil.ignore_patterns("*.safetensors", "*.bin", "*.pt", "*.pth"))
    for name in names:
        tensors = load_file(model / name)
        for key, tensor in tensors.items():
            if tensor.is_floating_point():
                noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0))  # copies stay copies
                noise *= 0.1 * (tensor.float().abs().mean() + 0.01)
                tensors[key] = (tensor.float() + noise).to(tensor.dtype)
            else:
                tensors[key] = tensor.reshape(-1).flip(0).view(tensor.shape)
        save_file(tensors, directory / name, metadata={"format": "pt"})


# -- in the command ----------------------------------------------------------------------------------------------------


def certify(pairs: Sequence[Pair], scratch: Path) -> dict[str, list[Finding]]:
    """Run every way for every model; return the findings by model, in the order of `WAYS`.

    Raises ConfigError for arguments that vLLM does not have, and ReshardError, with what was said, where there is no
    answer or the time is over.
    """
    job, out = scratch / "job.json", scratch / "ended.json"
    job.write_text(json.dumps({"pairs": [vars(pair) for pair in pairs], "out": str(out)}))
    environment = _ENVIRONMENT | {name: os.environ.get(name, value) for name, value in _DEFAULT_ENVIRONMENT.items()}
    timeout = _SECONDS_PER_MODEL * len(pairs)
    ended = run_ranks(["-m", "hybrid_engine.verification.certify", str(job)], 1, timeout, environment=environment)
    if ended.status == _REFUSED:
        remedy = "Give arguments of `vllm serve` after `--`"
        raise ConfigError([Violation("VLLM ARGUMENTS", ended.output.strip().rpartition("\n")[2], remedy)])
    if ended.status != 0:
        state = f"no answer within {timeout:g} s" if ended.status is None else f"certify ended with {ended.status}"
        raise ReshardError(f"{state}:\n{ended.output}")
    told = json.loads(out.read_text())
    return {pair.name: list(_findings(pair, told[pair.name])) for pair in pairs}


def _findings(pair: Pair, told: Mapping[str, Any]) -> Iterator[Finding]:
    """The findings of one model, from why each way was not compared, where it was not."""
    observed = {way: Path(pair.scratch, way) for way in WAYS}
    cold = None if told[COLD] else Snapshot.read(observed[COLD] / "after")
    for way in [*WAYS][1:]:
        if cold is None:
            yield Finding(way, "failed", f"a cold engine fails: {told[COLD]['reason']}")
        elif told[way]:
            yield Finding(way, **told[way])
        else:
            yield compare(way, cold, *(Snapshot.read(observed[way] / each) for each in ("before", "after")))


# -- in the process that forks -----------------------------------------------------------------------------------------


def main(path: str) -> None:
    """Run the engines of the job in a file, one after the other; write why any is not to be compared."""
    from hybrid_engine.backends.vllm import stock

    job = json.loads(Path(path).read_text())
    told: dict[str, dict[str, Any]] = {}
    for pair in (Pair(**each) for each in job["pairs"]):
        stock.arguments_of(pair.given, pair.words)  # imports vLLM, for all that are forked
        own = told.setdefault(pair.name, {})
        for way, (_, steps) in WAYS.items():
            why = stock.why_not(steps)
            own[way] = {"status": "not run", "reason": why} if why else _forked(pair, way)
            if own[COLD]:
                break
    Path(job["out"]).write_text(json.dumps(told))


def _forked(pair: Pair, way: str) -> dict[str, Any] | None:
    """Run one way in a process of its own; return why it is not to be compared."""
    directory = Path(pair.scratch, way)
    directory.mkdir(parents=True)
    process = multiprocessing.get_context("fork").Process(target=_run, args=(pair, way, directory))
    process.start()
    process.join()
    if (told := directory / "told.json").is_file():
        return dict(json.loads(told.read_text()))
    return None if process.exitcode == 0 else {"status": "failed", "reason": f"it ended with {process.exitcode}"}


def _run(pair: Pair, way: str, directory: Path) -> None:
    from hybrid_engine.backends.vllm import stock

    start, steps = WAYS[way]
    try:
        if way == OWN:
            _switch(pair, directory)
        else:
            stock.run(getattr(pair, start), steps, pair.given, pair.words, directory)
    except Exception as error:  # vLLM's, of any kind: it is what is reported
        is_refusal = isinstance(error, HybridEngineError) and not isinstance(error, ReshardError)
        said = {"status": "not run", "reason": str(error)}
        said = said if is_refusal else {"status": "failed", "reason": traceback.format_exc()}
        (directory / "told.json").write_text(json.dumps(said))


def _switch(pair: Pair, directory: Path) -> None:
    """Bring both checkpoints into a vLLM of this process by this project's own switch, and observe both."""
    from hybrid_engine.backends.vllm import stock
    from hybrid_engine.trainer.worker import ActorHybridWorker

    arguments, plain = (stock.arguments_of(pair.given, words) for words in (pair.words, ()))
    differ = {name for name, value in vars(arguments).items() if value != getattr(plain, name)}
    if other := differ - _OF_SWITCH:
        problem = f"{', '.join(sorted(other))}: the switch is not given it"
        raise ConfigError([Violation("VLLM ARGUMENTS", problem, "See `hybrid-engine verify` for other layouts")])
    generate = {"max_model_len": arguments.max_model_len, "max_num_seqs": arguments.max_num_seqs, "kv_cache_mb": 64}
    actor = {"params_dtype": arguments.dtype, "seq_length": arguments.max_model_len}
    values = {"model": pair.given, "actor_config": actor, "generate_config": generate}
    config = load_config({**values, "random_weights": True}, 1, weights_only=True)
    with ActorHybridWorker(config, weights_only=True) as worker:
        for name, checkpoint in (("before", pair.former), ("after", pair.given)):
            with worker.train_context():
                worker.load_hf_checkpoint(checkpoint)
            with worker.rollout_context():
                stock.observe(worker.inference.llm, directory / name)


if __name__ == "__main__":
    main(sys.argv[1])
