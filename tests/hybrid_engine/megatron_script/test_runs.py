"""`pretrain_gpt.py` of Megatron-LM with and without --enable-resharding: results are equal.

Losses and checkpoints must not differ. `pretrain_hybrid.py` is included if the checkout has it.

MEGATRON_LM_PATH names a git checkout of a version that has patches; it is cloned and not changed.
`nox -s megatron-tests` also puts it on PYTHONPATH, as its version can differ from the installed
one. A run takes half a minute to two.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_engine.tools.launching import Ended, run_ranks
from tests.harness.launch import REPO_ROOT
from tests.harness.values import Values
from tests.harness.vllm_server import FILLED, PLAIN, serving
from tests.hybrid_engine.tools.programs import read_lines
from tests.zoo.families import write_config

# A stand-in for wandb, and callbacks: in a run, package `tests` is the checkout's.
SCRIPT_PATH = Path(__file__).parent / "script_path"
PYTHON_PATHS = [
    str(REPO_ROOT),
    str(SCRIPT_PATH),
    *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)),
]
CHECKOUT = os.environ.get("MEGATRON_LM_PATH", "")

pytestmark = [
    pytest.mark.engines,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not CHECKOUT, reason="MEGATRON_LM_PATH names no checkout of Megatron-LM"),
]

DENSE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 130,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 0,
    "eos_token_id": 129,
}
EXPERTS = {
    **DENSE,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}
MODEL = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --ffn-hidden-size "
    "192 --group-query-attention "
    "--num-query-groups 2 --kv-channels 32 --seq-length 32 --max-position-embeddings 128 --swiglu "
    "--normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
    "--untie-embeddings-and-output-weights"
)
TRAINING = (
    "--micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --min-lr 1e-4 "
    "--lr-warmup-iters 2 --weight-decay 0.1 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 129 "
    "--make-vocab-size-divisible-by 8 --split 90,5,5 "
    "--num-workers 0 --eval-interval 3 --eval-iters 1 --log-interval 1 --tensorboard-log-interval 1"
)
ON_CPU = (
    "--transformer-impl local --use-cpu-initialization --distributed-backend gloo "
    "--attention-backend unfused "
    "--no-masked-softmax-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion "
    "--no-bias-gelu-fusion "
    "--no-rope-fusion --no-persist-layer-norm --no-gradient-accumulation-fusion"
)
NUM_STEPS = 6
SAVING = f"--train-iters {NUM_STEPS} --save checkpoint --save-interval 4 --ckpt-format torch"
CALLBACKS = "script_callbacks"


@dataclass(frozen=True)
class Case:
    """A run of the script, made with and without resharding.

    Attributes:
        num_ranks: of both runs.
        flags: of both runs: Megatron's layout and options.
        ours: flags of the run with resharding, after the common ones.
        versions: iteration of each switch -> weight version, the number of optimizer steps.
        last: iteration after which the run ends.
        model: the Hugging Face config.
        script: of the checkout.
    """

    num_ranks: int
    flags: str
    ours: str
    versions: dict[int, int] = field(default_factory=lambda: {2: 2, 4: 4, 6: 6})
    last: int = NUM_STEPS
    model: str = "dense"
    script: str = "pretrain_gpt.py"


CASES = {
    "TP": Case(2, "--tensor-model-parallel-size 2", "--infer-tensor-parallel-size 1"),
    "TP PP": Case(
        4,
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
        "--infer-tensor-parallel-size 2",
    ),
    "DP": Case(
        2,
        "--bf16 --use-distributed-optimizer --overlap-grad-reduce "
        "--overlap-param-gather --ckpt-format torch_dist "
        "--exit-interval 4 --wandb-project project --wandb-exp-name name --wandb-save-dir wandb",
        "--infer-tensor-parallel-size 1 --resharding-verify sample "
        f"--resharding-callback {CALLBACKS}:sample",
        versions={2: 2, 4: 4},
        last=4,
    ),
    "VPP": Case(
        2,
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage "
        "1 --exit-signal-handler "
        "--exit-interval 4",
        f"--infer-tensor-parallel-size 2 --resharding-callback {CALLBACKS}:terminate",
        versions={2: 2, 4: 4},
        last=4,
    ),
    "fp16": Case(
        2,
        "--tensor-model-parallel-size 2 --fp16 --initial-loss-scale 1048576 "
        "--loss-scale-window 2 --hysteresis 1",
        "--infer-tensor-parallel-size 1 --resharding-interval 3",
        versions={5: 3},
    ),
    "EP": Case(
        2,
        "--expert-model-parallel-size 2 --num-experts 4 --moe-router-topk 2 "
        "--moe-ffn-hidden-size 64 --qk-layernorm",
        "--infer-tensor-parallel-size 2",
        model="experts",
    ),
    "hybrid": Case(
        2,
        "--pipeline-model-parallel-size 2 --hybrid-layer-pattern *-*|-*-*- --spec "
        "hybrid_stack SPEC",
        "--infer-tensor-parallel-size 2",
        script="pretrain_hybrid.py",
    ),
}
if not Path(CHECKOUT, "pretrain_hybrid.py").is_file():  # since 0.18
    del CASES["hybrid"]
RUNS = [(name, "launcher") for name in CASES] + [("TP", "patched"), ("TP PP", "patched")]
"""Case, and how resharding is added."""


class Scripts:
    """A plain and a patched clone of the checkout, and a directory for runs."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.plain = self._clone("plain")
        self.patched = self._clone("patched")
        subprocess.run(
            [REPO_ROOT / "patches" / "apply.sh", self.patched], check=True, capture_output=True
        )
        settings = {
            "max_model_len": 64,
            "max_num_seqs": 16,
            "kv_cache_mb": 16,
            "timeout_seconds": 120,
        }
        for name, config in {"dense": DENSE, "experts": EXPERTS}.items():
            model = directory / name
            model.mkdir()
            write_config(model, config)
            ours = {"model": str(model), "generate_config": settings, "sampling": {"n": 2}}
            (directory / f"{name}.yaml").write_text(json.dumps(ours))
        self.prompts = directory / "prompts.jsonl"
        self.prompts.write_text('{"prompt": [1, 2, 3]}\n{"prompt": "5 6 7 8"}\n')

    def _clone(self, name: str) -> Path:
        tree = self.directory / name
        subprocess.run(
            ["git", "clone", "-q", "--shared", CHECKOUT, tree], check=True, capture_output=True
        )
        # Megatron compiles these at start, which needs pybind11. The installed package has them,
        # of another version perhaps, but the source is the same from 0.16 to 0.19.
        installed = importlib.metadata.distribution("megatron-core").locate_file(
            "megatron/core/datasets"
        )
        for compiled in Path(str(installed)).glob("helpers_cpp*.so"):
            shutil.copy(compiled, tree / "megatron" / "core" / "datasets")
        return tree

    def run(self, name: str, case: Case, *flags: str, way: str = "launcher") -> Path:
        """Run pretrain_gpt.py in a directory of this name; return the directory."""
        ended = self.end(name, case, *flags, way=way)
        assert ended.status == 0, ended.output
        return self.directory / name

    def end(self, name: str, case: Case, *flags: str, way: str = "launcher") -> Ended:
        """Run the script; return its status and output, even if it fails."""
        directory = self.directory / name
        directory.mkdir()
        tree = self.patched if way.startswith("patched") else self.plain
        command = [] if way == "patched" else ["-m", "megatron_patches"]
        arguments = " ".join([MODEL, TRAINING, ON_CPU, *flags]).split()
        ended = run_ranks(
            [*command, str(tree / case.script), *arguments, "--tensorboard-dir", "tensorboard"],
            case.num_ranks,
            280,
            environment={"PYTHONPATH": os.pathsep.join(PYTHON_PATHS), "HF_HUB_OFFLINE": "1"},
            directory=directory,
        )
        (directory / "output").write_text(ended.output)
        return ended

    def resharding(self, case: Case) -> str:
        """Return the flags that enable resharding."""
        return (
            "--enable-resharding --resharding-engine hybrid_engine.megatron_script:make_engine "
            f"--resharding-config {self.directory / case.model}.yaml --resharding-interval 2 "
            f"--resharding-prompts {self.prompts} --resharding-output samples "
            f"--resharding-verify full {case.ours}"
        )


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Scripts:
    return Scripts(tmp_path_factory.mktemp("scripts"))


Runs = Callable[[str, str], Path]


@pytest.fixture(scope="module")
def runs(scripts: Scripts) -> Runs:
    """(case, "without" | "launcher" | "patched") -> directory of the run. Each runs once."""

    @functools.cache
    def run(name: str, way: str) -> Path:
        case = CASES[name]
        ours = () if way == "without" else (scripts.resharding(case),)
        return scripts.run(f"{name} {way}", case, SAVING, case.flags, *ours, way=way)

    return run


def scalars(directory: Path, ours: bool = False) -> dict[str, list[tuple[int, float]]]:
    """Return the scalars in TensorBoard: Megatron's without times, or ours.

    The last validation is excluded, since Megatron does not flush after training.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory / "tensorboard"))
    events.Reload()
    return {
        tag: [
            (scalar.step, scalar.value)
            for scalar in events.Scalars(tag)
            if "validation" not in tag or scalar.step < NUM_STEPS
        ]
        for tag in events.Tags()["scalars"]
        if tag.startswith("resharding") == ours and not tag.endswith(("-time", " vs samples"))
    }


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value of a nested structure with its path; tensors as bytes."""
    if isinstance(value, torch.Tensor):
        yield (
            path,
            (
                value.dtype,
                tuple(value.shape),
                value.contiguous().view(-1).view(torch.uint8).numpy().tobytes(),
            ),
        )
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield from leaves(inner, f"{path}[{index}]")
    elif hasattr(value, "__dict__"):
        yield from leaves(vars(value), path)
    else:
        yield path, repr(value)


def checkpoint(directory: Path) -> Values:
    """Return every value of every file of the checkpoints of a run."""
    files = {
        str(file.relative_to(directory)): torch.load(file, weights_only=False)
        for file in sorted(directory.glob("checkpoint/**/*.pt"))
    }
    for metadata in sorted(directory.glob("checkpoint/*/.metadata")):  # of torch_dist
        files[str(metadata.parent.relative_to(directory))] = distributed_checkpoint(metadata.parent)
    return {
        f"{name}{path}": value for name, content in files.items() for path, value in leaves(content)
    }


def distributed_checkpoint(directory: Path) -> Values:
    """Return every tensor and object of a distributed checkpoint, unsharded."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    whole = directory.parent / "whole"
    dcp_to_torch_save(directory, whole)
    return torch.load(whole, weights_only=False)


def logged_losses(directory: Path) -> list[str]:
    """Return the lines of Megatron's output that have losses, without dates and times."""
    matching = [
        line for line in (directory / "output").read_text().splitlines() if "lm loss" in line
    ]
    return [re.sub(r"\[[^]]*\]|elapsed time[^|]*\|", "", line) for line in matching]


@pytest.mark.parametrize(("name", "way"), RUNS)
def test_losses_are_equal_to_the_last_digit(runs: Runs, name: str, way: str) -> None:
    without = scalars(runs(name, "without"))
    resharded = scalars(runs(name, way))
    assert resharded == without
    assert [step for step, _ in resharded["lm loss"]] == list(range(1, CASES[name].last + 1))
    assert len({value for _, value in resharded["lm loss"]}) == CASES[name].last
    assert resharded["lm loss validation"]


@pytest.mark.parametrize(("name", "way"), RUNS)
def test_samples_and_timings_are_written(runs: Runs, name: str, way: str) -> None:
    directory = runs(name, way)
    versions = CASES[name].versions
    samples = read_lines(directory / "samples" / "samples.jsonl")
    assert [sample["iteration"] for sample in samples] == [
        iteration for iteration in versions for _ in range(4)
    ]
    assert all(len(sample["log_probs"]) == len(sample["token_ids"]) > 0 for sample in samples)
    assert {sample["prompt"] for sample in samples if "prompt" in sample} == {"5 6 7 8"}
    switches = read_lines(directory / "samples" / "switches.jsonl")
    assert [switch["version"] for switch in switches] == [
        version for version in versions.values() for _ in range(2)
    ]
    assert [
        step for step, _ in scalars(directory, ours=True)["resharding/train->infer seconds"]
    ] == list(versions)
    output = (directory / "output").read_text()
    assert "resharding-to-inference" in output
    reports = [line for line in output.splitlines() if "[Reshard] direction=" in line]
    assert len(reports) == 2 * len(versions)  # from one rank
    assert "verified=" in reports[0]


@pytest.mark.parametrize(("name", "way"), RUNS)
def test_checkpoints_are_bitwise_equal(runs: Runs, name: str, way: str) -> None:
    """Paths in them are relative, so they match too."""
    without = checkpoint(runs(name, "without"))
    resharded = checkpoint(runs(name, way))
    assert len(without) > 100
    assert {
        name
        for name in without.keys() | resharded.keys()
        if without.get(name) != resharded.get(name)
    } == set()


def test_a_patched_tree_without_the_flag_behaves_as_before(scripts: Scripts, runs: Runs) -> None:
    """The launcher redirects CUDA calls, without which the tree needs CUDA like Megatron."""
    case = CASES["TP"]
    before = runs("TP", "without")
    after = scripts.run("TP patched, without", case, SAVING, case.flags, way="patched, launcher")
    assert scalars(after) == scalars(before)
    assert logged_losses(after) == logged_losses(before) != []
    assert checkpoint(after) == checkpoint(before)
    assert "resharding" not in (after / "output").read_text().lower()


def test_servers_replace_vllm_in_megatrons_process(scripts: Scripts, runs: Runs) -> None:
    """Megatron's results do not change."""
    case = CASES["TP"]
    settings = json.loads((scripts.directory / "dense.yaml").read_text())
    with serving(
        scripts.directory / "dense", scripts.directory / "server", *PLAIN, *FILLED
    ) as server:
        settings["generate_config"]["servers"] = [server.url]
        (scripts.directory / "served.yaml").write_text(json.dumps(settings))
        ours = scripts.resharding(replace(case, model="served"))
        directory = scripts.run("TP served", case, SAVING, case.flags, ours)
    assert scalars(directory) == scalars(runs("TP", "without"))
    samples = read_lines(directory / "samples" / "samples.jsonl")
    assert [sample["iteration"] for sample in samples] == [
        iteration for iteration in case.versions for _ in range(4)
    ]


def test_a_callback_is_called_on_every_replica(runs: Runs) -> None:
    first, second = (
        read_lines(runs("DP", "launcher") / f"callback{rank}.jsonl") for rank in range(2)
    )
    assert first == second
    assert [len(tokens) for tokens in first] == [3, 3]


def test_a_signal_ends_the_run_like_a_plain_run(runs: Runs) -> None:
    """Megatron checks for signals after a step, and saves."""
    assert (
        "exiting program after receiving SIGTERM"
        in (runs("VPP", "launcher") / "output").read_text()
    )
    assert "exiting program at iteration 4" in (runs("VPP", "without") / "output").read_text()


@pytest.mark.parametrize(
    "name", ["TP", "TP PP", "fp16"]
)  # a distributed optimizer needs Transformer Engine or apex
def test_a_resumed_run_continues_with_and_without_resharding(
    scripts: Scripts, runs: Runs, name: str
) -> None:
    """Resume from iteration 4 of the run that switched; the step count continues."""
    case = CASES[name]
    first = runs(name, "launcher")
    saved = scripts.directory / name.replace(" ", "-") / "saved"
    shutil.copytree(first / "checkpoint", saved)
    (saved / "latest_checkpointed_iteration.txt").write_text("4")
    loading = f"--train-iters {NUM_STEPS} --load {saved} --ckpt-format torch {case.flags}"
    plain = scalars(scripts.run(f"{name} resumed without", case, loading))
    resumed = scripts.run(f"{name} resumed with", case, loading, scripts.resharding(case))
    assert scalars(resumed) == plain
    whole = dict(scalars(first)["lm loss"])
    assert dict(plain["lm loss"]) == {step: whole[step] for step in (5, 6)}
    for file in ("samples.jsonl", "switches.jsonl"):
        before = [line for line in read_lines(first / "samples" / file) if line["iteration"] > 4]
        again = read_lines(resumed / "samples" / file)
        assert len(again) == len(before)
        for key in ("iteration", "version", "token_ids", "log_probs"):
            assert [line.get(key) for line in again] == [line.get(key) for line in before]


def test_a_failed_callback_on_one_rank_ends_both(scripts: Scripts) -> None:
    case = CASES["TP"]
    failing = f"--train-iters {NUM_STEPS} --resharding-callback {CALLBACKS}:fail"
    ended = scripts.end("callback fails", case, case.flags, scripts.resharding(case), failing)
    assert ended.status == 1
    assert "ReshardError: callback: ValueError: the callback failed on purpose" in ended.output
    assert "RemoteError: callback failed on 1 rank(s):" in ended.output
