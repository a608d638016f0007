"""Certification that a stock vLLM computes the same after a reload as after a cold load.

    former weights --load--> engine --vLLM's own reload--> given weights --+
    given weights --load--> engine --sleep, wake---------> given weights --+-- bit by bit:
    former weights --> vLLM --this project's own switch--> given weights --+   certificate.py
    given weights --load--> engine (cold) ---------------------------------+

    python -m hybrid_engine.tools.verify.certify JOB.json      runs each engine in a forked process

The forking process imports vLLM once and computes nothing, so it has no threads when it forks.
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
from hybrid_engine.errors import ConfigError, HybridEngineError, ReshardError
from hybrid_engine.files.model_files import CONFIG, weight_files
from hybrid_engine.models import table_for
from hybrid_engine.models.families import read_model
from hybrid_engine.tools.launching import run_ranks
from hybrid_engine.tools.verify.certificate import EngineSnapshot, Finding, compare
from hybrid_engine.tools.verify.comparison import write_random_checkpoint

COLD = "cold"
OWN = "own switch"
WAYS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    COLD: ("given", ()),
    "reload": ("former", ("reload",)),
    "sleep 1": ("given", ("sleep 1", "wake")),
    "sleep 2": ("former", ("sleep 2", "wake", "reload")),
    OWN: ("former", ()),
}
"""Way -> initial weights, and the steps of `stock.STEPS` to the given weights.

All others are compared with the first."""

_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1",
    # The engine runs in the forked process, and its workers are called with a function.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
}
_DEFAULT_ENVIRONMENT = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
_MODEL_TIMEOUT = 1800.0
_FAILURE = "failure.json"
_REFUSED = 2  # argparse's exit status for invalid arguments
_OF_SWITCH = {"model", "dtype", "max_model_len", "max_num_seqs", "worker_cls"}
"""Arguments that the switch also takes, and worker_cls, which the switch sets itself."""


@dataclass(frozen=True)
class CheckpointPair:
    """Two checkpoints of one model.

    Attributes:
        name: for reports.
        former, given: directories of the checkpoints.
        words: vLLM's arguments as on a command line, including the dtype.
        scratch: directory for snapshots.
    """

    name: str
    former: str
    given: str
    words: Sequence[str]
    scratch: str


def prepare(model: Path, name: str, words: Sequence[str], scratch: Path) -> CheckpointPair:
    """Write the former checkpoint of a model, and the given one if `model` has only a config.

    Args:
        model: directory of the model.
        name: name for reports.
        words: vLLM's arguments. The default dtype is the checkpoint's, even if vLLM would take a
            narrower one.
        scratch: directory for checkpoints and snapshots.

    Raises:
        ConfigError, FileError: if the checkpoint is broken, or a model of images has no processor.
        UnknownModelError: if `model` is only a config whose architecture has no name table.
    """
    config = json.loads((model / CONFIG).read_text())
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    given = model
    former = scratch / "former"
    if any(model.glob("*.safetensors*")):
        _write_other_weights(model, former)
    else:
        table = table_for(config)
        given = scratch / "given"
        for seed, directory in enumerate((given, former)):
            write_random_checkpoint(directory, model, table, dtype, seed)
    return CheckpointPair(name, str(former), str(given), ("--dtype", dtype, *words), str(scratch))


def _write_other_weights(model: Path, directory: Path) -> None:
    """Write a checkpoint's files with noise added to every weight.

    Integers may be packed numbers, so their elements are reversed instead.
    """
    names = weight_files(model)
    weights = ("*.safetensors", "*.bin", "*.pt", "*.pth")
    shutil.copytree(model, directory, ignore=shutil.ignore_patterns(*weights))
    for name in names:
        tensors = load_file(model / name)
        for key, tensor in tensors.items():
            if not tensor.is_floating_point():
                tensors[key] = tensor.reshape(-1).flip(0).view(tensor.shape)
                continue
            # The same seed for every tensor, so that copies of a tensor stay equal.
            generator = torch.Generator().manual_seed(0)
            noise = torch.randn(tensor.shape, generator=generator)
            noise *= 0.1 * (tensor.float().abs().mean() + 0.01)
            tensors[key] = (tensor.float() + noise).to(tensor.dtype)
        save_file(tensors, directory / name, metadata={"format": "pt"})


# -- in the command --------------------------------------------------------------------------------


def certify(pairs: Sequence[CheckpointPair], scratch: Path) -> dict[str, list[Finding]]:
    """Run every way for every model, and return model -> findings in the order of `WAYS`.

    Raises:
        ConfigError: for arguments that vLLM does not have.
        ReshardError: if the process ended without an answer or ran out of time; the message has its
            output.
    """
    job = scratch / "job.json"
    out = scratch / "ended.json"
    job.write_text(json.dumps({"pairs": [vars(pair) for pair in pairs], "out": str(out)}))
    environment = dict(_ENVIRONMENT)
    for name, value in _DEFAULT_ENVIRONMENT.items():
        environment[name] = os.environ.get(name, value)
    timeout = _MODEL_TIMEOUT * len(pairs)
    arguments = ["-m", "hybrid_engine.tools.verify.certify", str(job)]
    ended = run_ranks(arguments, 1, timeout, environment=environment)
    if ended.status == _REFUSED:
        last_line = ended.output.strip().rpartition("\n")[2]
        raise ConfigError.of(
            "VLLM ARGUMENTS",
            last_line,
            "Give arguments of `vllm serve` after `--`",
            code="unknown-vllm-argument",
        )
    ended.require_success("certify", timeout)
    failures = json.loads(out.read_text())
    return {pair.name: list(_findings(pair, failures[pair.name])) for pair in pairs}


def _findings(pair: CheckpointPair, failures: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield the findings of one model.

    `failures`: way -> status and reason of a way that did not run to its end, else None.
    """
    directories = {way: Path(pair.scratch, way) for way in WAYS}
    cold = None if failures[COLD] else EngineSnapshot.read(directories[COLD] / "after")
    for way in WAYS:
        if way == COLD:
            continue
        if cold is None:
            yield Finding(way, "failed", f"a cold engine fails: {failures[COLD]['reason']}")
        elif failures[way]:
            yield Finding(way, **failures[way])
        else:
            before = EngineSnapshot.read(directories[way] / "before")
            after = EngineSnapshot.read(directories[way] / "after")
            yield compare(way, cold, before, after)


# -- in the process that forks ---------------------------------------------------------------------


def main(path: str) -> None:
    """Run the engines of the job in a file one after the other, and write their failures."""
    from hybrid_engine.backends.vllm import stock

    job = json.loads(Path(path).read_text())
    failures: dict[str, dict[str, Any]] = {}
    for values in job["pairs"]:
        pair = CheckpointPair(**values)
        stock.arguments_of(pair.given, pair.words)  # imports vLLM for all forked processes
        of_model = failures.setdefault(pair.name, {})
        for way, (_, steps) in WAYS.items():
            reason = stock.why_not(steps)
            if reason:
                of_model[way] = {"status": "not run", "reason": reason}
            else:
                of_model[way] = _run_forked(pair, way)
            if of_model[COLD]:
                break  # without the truth, the other ways cannot be compared
    Path(job["out"]).write_text(json.dumps(failures))


def _run_forked(pair: CheckpointPair, way: str) -> dict[str, Any] | None:
    """Run one way in a forked process; return status and reason of a failure, else None."""
    directory = Path(pair.scratch, way)
    directory.mkdir(parents=True)
    context = multiprocessing.get_context("fork")
    process = context.Process(target=_run, args=(pair, way, directory))
    process.start()
    process.join()
    failure = directory / _FAILURE
    if failure.is_file():
        return dict(json.loads(failure.read_text()))
    if process.exitcode == 0:
        return None
    return {"status": "failed", "reason": f"it ended with {process.exitcode}"}


def _run(pair: CheckpointPair, way: str, directory: Path) -> None:
    from hybrid_engine.backends.vllm import stock

    start, steps = WAYS[way]
    try:
        if way == OWN:
            _switch(pair, directory)
        else:
            stock.run(getattr(pair, start), steps, pair.given, pair.words, directory)
    except Exception as error:  # errors of vLLM can have any type, and all are reported
        is_refusal = isinstance(error, HybridEngineError) and not isinstance(error, ReshardError)
        if is_refusal:
            failure = {"status": "not run", "reason": str(error)}
        else:
            failure = {"status": "failed", "reason": traceback.format_exc()}
        (directory / _FAILURE).write_text(json.dumps(failure))


def _switch(pair: CheckpointPair, directory: Path) -> None:
    """Move both checkpoints into a vLLM of this process by this project's switch; snapshot both."""
    from hybrid_engine.backends.vllm import stock
    from hybrid_engine.trainer.worker import ActorHybridWorker

    arguments = stock.arguments_of(pair.given, pair.words)
    defaults = stock.arguments_of(pair.given, ())
    changed = {name for name, value in vars(arguments).items() if value != getattr(defaults, name)}
    unsupported = changed - _OF_SWITCH
    if unsupported:
        raise ConfigError.of(
            "VLLM ARGUMENTS",
            f"{', '.join(sorted(unsupported))}: the switch does not take it",
            "See `hybrid-engine verify` for other layouts",
            code="not-for-switch",
        )
    actor = {"params_dtype": arguments.dtype, "seq_length": arguments.max_model_len}
    table, _ = read_model(Path(pair.given))
    if table.is_derived:
        actor["fsdp"] = {}  # no Megatron model is built of it
    values = {
        "model": pair.given,
        "random_weights": True,
        "actor_config": actor,
        "generate_config": {
            "max_model_len": arguments.max_model_len,
            "max_num_seqs": arguments.max_num_seqs,
            "kv_cache_mb": 64,
        },
    }
    config = load_config(values, 1, weights_only=True)
    with ActorHybridWorker(config, weights_only=True) as worker:
        for name, checkpoint in (("before", pair.former), ("after", pair.given)):
            with worker.train_context():
                worker.load_hf_checkpoint(checkpoint)
            with worker.rollout_context():
                stock.observe(worker.inference.llm, directory / name)


if __name__ == "__main__":
    main(sys.argv[1])
