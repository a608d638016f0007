"""`pretrain_gpt.py` of Megatron-LM itself, with --enable-resharding and without: the same losses, the same checkpoint.

MEGATRON_LM_PATH names a git checkout of core_v0.16.1; it is cloned, not touched.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_engine.launching import run_ranks
from tests.launch import REPO_ROOT

FURTHER_PATHS = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
CHECKOUT = os.environ.get("MEGATRON_LM_PATH", "")

pytestmark = [
    pytest.mark.engines,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not CHECKOUT, reason="MEGATRON_LM_PATH names no checkout of Megatron-LM core_v0.16.1"),
]

HF_CONFIG = {
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
MODEL = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --ffn-hidden-size 192 --group-query-attention "
    "--num-query-groups 2 --kv-channels 32 --seq-length 32 --max-position-embeddings 128 --swiglu "
    "--normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
    "--untie-embeddings-and-output-weights"
)
TRAINING = (
    "--micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --min-lr 1e-4 --lr-warmup-iters 2 --weight-decay 0.1 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 129 --make-vocab-size-divisible-by 8 --split 90,5,5 "
    "--num-workers 0 --eval-interval 3 --eval-iters 1 --log-interval 1 --tensorboard-log-interval 1"
)
ON_CPU = (
    "--transformer-impl local --use-cpu-initialization --distributed-backend gloo --attention-backend unfused "
    "--no-masked-softmax-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-bias-gelu-fusion "
    "--no-rope-fusion --no-persist-layer-norm --no-gradient-accumulation-fusion"
)
NUM_STEPS = 6
LAYOUTS = {
    2: ("--tensor-model-parallel-size 2", "--infer-tensor-parallel-size 1"),
    4: (
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --use-distributed-optimizer",
        "--infer-tensor-parallel-size 2",
    ),
}
"""Ranks -> Megatron's layout, inference's."""


class Scripts:
    """A clone of the checkout, once as it is and once patched, and a directory to run in."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.plain = self._clone("plain")
        self.patched = self._clone("patched")
        subprocess.run([REPO_ROOT / "patches" / "apply.sh", self.patched], check=True, capture_output=True)
        model = directory / "model"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(HF_CONFIG))
        settings = {"max_model_len": 64, "max_num_seqs": 16, "timeout_seconds": 120}
        self.config = directory / "config.yaml"
        self.config.write_text(json.dumps({"model": str(model), "generate_config": settings, "sampling": {"n": 2}}))
        self.prompts = directory / "prompts.jsonl"
        self.prompts.write_text('{"prompt": [1, 2, 3]}\n{"prompt": "5 6 7 8"}\n')

    def _clone(self, name: str) -> Path:
        tree = self.directory / name
        subprocess.run(["git", "clone", "-q", "--shared", CHECKOUT, tree], check=True, capture_output=True)
        # what Megatron compiles at start, which takes pybind11, comes with the installed package
        installed = Path(importlib.util.find_spec("megatron.core.datasets").submodule_search_locations[0])
        for compiled in installed.glob("helpers_cpp*.so"):
            shutil.copy(compiled, tree / "megatron" / "core" / "datasets")
        return tree

    def run(self, name: str, num_ranks: int, *flags: str, way: str = "launcher") -> Path:
        """Run pretrain_gpt.py in a directory of this name, which is returned."""
        directory = self.directory / name
        directory.mkdir()
        tree = self.patched if way == "patched" else self.plain
        command = [] if way == "patched" else ["-m", "megatron_patches"]
        arguments = " ".join([MODEL, TRAINING, ON_CPU, LAYOUTS[num_ranks][0], *flags]).split()
        ended = run_ranks(
            [*command, str(tree / "pretrain_gpt.py"), *arguments, "--tensorboard-dir", "tensorboard"],
            num_ranks,
            280,
            environment={"PYTHONPATH": os.pathsep.join([str(REPO_ROOT), *FURTHER_PATHS]), "HF_HUB_OFFLINE": "1"},
            directory=directory,
        )
        (directory / "output").write_text(ended.output)
        assert ended.status == 0, ended.output
        return directory

    def resharding(self, num_ranks: int, interval: int = 2) -> str:
        """The flags that switch."""
        return (
            f"--enable-resharding --resharding-engine hybrid_engine.megatron_script:make_engine "
            f"--resharding-config {self.config} --resharding-interval {interval} --resharding-prompts {self.prompts} "
            f"--resharding-output samples --resharding-verify full {LAYOUTS[num_ranks][1]}"
        )


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Scripts:
    return Scripts(tmp_path_factory.mktemp("scripts"))


@pytest.fixture(scope="module")
def runs(scripts: Scripts) -> Callable[[int, str], Path]:
    """(ranks, "without" | "launcher" | "patched") -> the directory of that run; each is made once."""

    @functools.cache
    def run(num_ranks: int, way: str) -> Path:
        saving = f"--train-iters {NUM_STEPS} --save checkpoint --save-interval 4 --ckpt-format torch"
        ours = () if way == "without" else (scripts.resharding(num_ranks),)
        return scripts.run(f"{num_ranks} {way}", num_ranks, saving, *ours, way=way)

    return run


def scalars(directory: Path, ours: bool = False) -> dict[str, list[tuple[int, float]]]:
    """What Megatron wrote to TensorBoard, without times; or what we wrote.

    Megatron does not flush what it writes after training, the last validation, so that is left out.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(directory / "tensorboard"))
    found.Reload()
    return {
        tag: [(one.step, one.value) for one in found.Scalars(tag) if "validation" not in tag or one.step < NUM_STEPS]
        for tag in found.Tags()["scalars"]
        if tag.startswith("resharding") == ours and not tag.endswith(("-time", " vs samples"))
    }


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of a nested structure, tensors as bytes, with its path."""
    if isinstance(value, torch.Tensor):
        yield path, (value.dtype, tuple(value.shape), value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
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


def checkpoint(directory: Path) -> dict[str, Any]:
    """Every value in every file of the checkpoints below a run's directory."""
    return {
        f"{file.relative_to(directory)}{path}": value
        for file in sorted(directory.glob("checkpoint/**/*.pt"))
        for path, value in leaves(torch.load(file, weights_only=False))
    }


@pytest.mark.parametrize("num_ranks", LAYOUTS)
@pytest.mark.parametrize("way", ["launcher", "patched"])
def test_losses_are_equal_to_the_last_digit(runs: Callable[[int, str], Path], num_ranks: int, way: str) -> None:
    without, found = scalars(runs(num_ranks, "without")), scalars(runs(num_ranks, way))
    assert found == without
    assert [step for step, _ in found["lm loss"]] == [1, 2, 3, 4, 5, 6]
    assert len({value for _, value in found["lm loss"]}) == 6
    assert found["lm loss validation"]


@pytest.mark.parametrize("num_ranks", LAYOUTS)
@pytest.mark.parametrize("way", ["launcher", "patched"])
def test_samples_and_timings_are_written(runs: Callable[[int, str], Path], num_ranks: int, way: str) -> None:
    directory = runs(num_ranks, way)
    samples = [json.loads(line) for line in (directory / "samples" / "samples.jsonl").read_text().splitlines()]
    assert [sample["iteration"] for sample in samples] == [iteration for iteration in (2, 4, 6) for _ in range(4)]
    assert all(len(sample["log_probs"]) == len(sample["token_ids"]) > 0 for sample in samples)
    assert {sample["prompt"] for sample in samples if "prompt" in sample} == {"5 6 7 8"}
    switches = [json.loads(line) for line in (directory / "samples" / "switches.jsonl").read_text().splitlines()]
    assert [switch["version"] for switch in switches] == [2, 2, 4, 4, 6, 6]
    assert [step for step, _ in scalars(directory, ours=True)["resharding/train->infer seconds"]] == [2, 4, 6]
    assert "resharding-to-inference" in (directory / "output").read_text()


@pytest.mark.parametrize("num_ranks", LAYOUTS)
@pytest.mark.parametrize("way", ["launcher", "patched"])
def test_checkpoints_are_bitwise_equal(runs: Callable[[int, str], Path], num_ranks: int, way: str) -> None:
    """But for what says where the run was: its paths are relative, so nothing does."""
    without, found = checkpoint(runs(num_ranks, "without")), checkpoint(runs(num_ranks, way))
    assert len(without) > 100
    assert {name for name in without.keys() | found.keys() if without.get(name) != found.get(name)} == set()


def test_a_resumed_run_goes_on_with_and_without(scripts: Scripts, runs: Callable[[int, str], Path]) -> None:
    """From iteration 4 of the run that switched; steps go on being counted, so the next switch is after the sixth."""
    first = runs(2, "launcher")
    saved = scripts.directory / "saved"
    shutil.copytree(first / "checkpoint", saved)
    (saved / "latest_checkpointed_iteration.txt").write_text("4")
    loading = f"--train-iters {NUM_STEPS} --load {saved} --ckpt-format torch"
    plain = scalars(scripts.run("resumed without", 2, loading))
    resumed = scripts.run("resumed with", 2, loading, scripts.resharding(2))
    assert scalars(resumed) == plain
    whole = dict(scalars(first)["lm loss"])
    assert dict(plain["lm loss"]) == {step: whole[step] for step in (5, 6)}
    lines = (resumed / "samples" / "samples.jsonl").read_text().splitlines()
    before = (first / "samples" / "samples.jsonl").read_text().splitlines()
    assert lines == before[-4:]
