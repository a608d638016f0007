"""ms-swift's trainers with our engine instead of its vLLM; without ms-swift, error messages.

Packages: `pip install --no-deps ms-swift==4.6.0`, trl 0.29, datasets 4.8.4, modelscope,
modelscope-hub, addict, attrdict, binpacking, dacite, dill, json-repair, multiprocess, nltk, oss2
with crcmod and aliyun-python-sdk-core and -kms, pandas, pyarrow, rouge, sentencepiece, simplejson,
sortedcontainers, tiktoken, xxhash, and peft 0.21.2, which is newer than ms-swift allows.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hybrid_engine.errors import ConfigError, DependencyError, StateError
from hybrid_engine.integrations import ms_swift as ours
from hybrid_engine.integrations import require_tested
from tests.harness.errors import has_code, has_violations, refused, violated
from tests.harness.launch import Ranks
from tests.harness.values import Values
from tests.hybrid_engine.integrations.installed import pretend_version
from tests.hybrid_engine.integrations.test_trl import (
    CLOSE,
    NUM_STEPS,
    accelerator,
    clone_parameters,
    full_parameters,
    shard_by_fsdp2,
    write_model,
)

PLUGIN = """
from hybrid_engine.integrations import ms_swift
from swift.rewards import ORM, orms

ms_swift.install(verify="full")

class Letters(ORM):
    def __call__(self, completions, **_):
        return [sum(map(str.isalpha, text)) / 8 for text in completions]

orms["letters"] = Letters
"""


def missing_requirement() -> str | None:
    try:
        require_tested("ms-swift", ours.TESTED_VERSION, f"ms-swift=={ours.TESTED_VERSION}.*")
        # Not all requirements of its wheel can be installed with vLLM's CPU build.
        import_module("swift.utils")
    except (DependencyError, ImportError) as error:
        return str(error)
    return None


MISSING = missing_requirement()
with_ms_swift = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))


# -- runs ------------------------------------------------------------------------------------------


def grpo(model: str, out: str, tensor_parallel_size: int = 1, is_sharded: bool = False) -> Values:
    """Run `swift rlhf` in this process; return observations of rollouts and trained parameters."""
    os.environ["VLLM_PLUGINS"] = "hybrid_engine"  # ms-swift's plug-in needs torchvision
    from swift.pipelines.train.rlhf import SwiftRLHF

    observed = {"states": [], "reports": [], "differences": []}

    class WatchedRlhf(SwiftRLHF):
        def train(self, trainer: Any) -> Any:
            self.trainer = trainer
            self.before = clone_parameters(trainer.model)
            if is_sharded:
                shard_by_fsdp2(trainer)
            watch(
                trainer,
                "_infer_single_or_multi_turn",
                lambda *_: record_switch(trainer.rollouts.engine.sharding),
            )
            watch(
                trainer, "_score_completions", lambda *_: observed["states"].append(state(trainer))
            )
            watch(trainer, "_compute_rollout_offpolicy_metrics", compare)
            return super().train(trainer)

    def record_switch(sharding: Any) -> None:
        observed["states"].append(str(sharding.state))
        observed["reports"].append(sharding.last_report)

    def state(trainer: Any) -> str:
        return str(trainer.rollouts.engine.sharding.state)

    def compare(log_probs: Any, sampled: Any, mask: Any) -> None:
        observed["differences"].append(((log_probs - sampled) * mask).abs().max().item())

    run = WatchedRlhf(arguments(model, out, tensor_parallel_size))
    run.main()
    trained = full_parameters(run.trainer)
    reports = observed.pop("reports")
    return {
        **observed,
        "versions": [report.version for report in reports],
        "verified": [report.tensors_verified for report in reports],
        "surplus": [report.bytes_received - report.bytes_least for report in reports],
        "trained": sum(not before.equal(trained[name]) for name, before in run.before.items()),
        "parameters": len(run.before),
        "kinds": {type(parameter).__name__ for parameter in run.trainer.model.parameters()},
        "ended": run.trainer.rollouts.engine is None,
        "megatron": "swift.megatron" in sys.modules,
    }


def watch(trainer: Any, name: str, observe: Callable[..., None]) -> None:
    method = getattr(trainer, name)

    def observed_method(*args: Any, **kwargs: Any) -> Any:
        observe(*args)
        return method(*args, **kwargs)

    setattr(trainer, name, observed_method)


def arguments(model: str, out: str, tensor_parallel_size: int) -> list[str]:
    directory = Path(out)
    options = {
        **{"rlhf_type": "grpo", "tuner_type": "full", "beta": 0, "reward_funcs": "letters"},
        **{
            "model": model,
            "model_type": "qwen3",
            "template": "dummy",
            "use_chat_template": "false",
            "torch_dtype": "float32",
            "use_hf": "true",
        },
        **{
            "dataset": directory / "data.jsonl",
            "split_dataset_ratio": 0,
            "load_from_cache_file": "false",
        },
        **{
            "external_plugins": directory / "plugin.py",
            "output_dir": directory / "out",
            "add_version": "false",
        },
        **{
            "use_vllm": "true",
            "vllm_mode": "colocate",
            "vllm_tensor_parallel_size": tensor_parallel_size,
        },
        **{
            "vllm_max_model_len": 64,
            "sleep_level": 1,
            "offload_model": "true",
            "offload_optimizer": "true",
        },
        **{
            "max_completion_length": 8,
            "num_generations": 4,
            "per_device_train_batch_size": 4,
            "temperature": 1,
        },
        **{
            "max_steps": NUM_STEPS,
            "learning_rate": 1e-3,
            "lr_scheduler_type": "constant",
            "warmup_ratio": 0,
        },
        **{
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "log_rollout_offpolicy_metrics": "true",
        },
        **{"dataloader_num_workers": 0, "dataset_num_proc": 1, "gradient_accumulation_steps": 1},
        **{
            "use_cpu": "true",
            "bf16": "false",
            "gradient_checkpointing": "false",
            "attn_impl": "sdpa",
        },
    }
    return [part for name, value in options.items() for part in (f"--{name}", str(value))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("model"))


@with_ms_swift
@pytest.mark.long
@pytest.mark.parametrize(
    ("num_ranks", "kind"), [(1, "Parameter"), (2, "Parameter"), (2, "DTensor")]
)
def test_grpo_generates_with_our_weights(
    engines: Ranks, model: str, tmp_path: Path, num_ranks: int, kind: str
) -> None:
    """Train alone, in DDP, and sharded by accelerate's FSDP2."""
    rows = [
        {"messages": [{"role": "user", "content": text}]}
        for text in ("abc", "hello", "1+1=", "xyz")
    ] * 8
    (tmp_path / "data.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "plugin.py").write_text(PLUGIN)
    arguments = (model, str(tmp_path), num_ranks, kind == "DTensor")
    for observed in engines.launch(grpo, num_ranks, *arguments, timeout=600):
        assert observed["kinds"] == {kind}
        assert len(observed["differences"]) == NUM_STEPS
        assert max(observed["differences"]) < CLOSE
        assert observed["versions"] == list(range(NUM_STEPS))
        assert observed["verified"] == [observed["parameters"]] * NUM_STEPS, "bit by bit"
        assert observed["surplus"] == [0] * NUM_STEPS, "bytes above the minimum"
        assert observed["states"] == ["infer", "train"] * NUM_STEPS
        assert observed["trained"] == observed["parameters"]
        assert observed["ended"]
        assert not observed["megatron"], "install depends on this"


# -- without ms-swift ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("installed", "refused"),
    [
        (None, has_code("needs-package", "pip install 'ms-swift==4.6.*'")),
        ("4.60.0", has_code("untested-version", "ms-swift 4.60.0", "4.6 was tested")),
    ],
)
def test_a_missing_or_untested_version_is_reported(
    installed: str | None, refused: Callable[[BaseException], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_version(monkeypatch, installed)
    with pytest.raises(DependencyError, check=refused):
        ours.install()


class Mixin:
    """Stand-in for ms-swift's mixin, with the replaced methods."""

    def __init__(self, **changes: Any) -> None:
        plain = {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_enable_lora": False,
            "vllm_engine_kwargs": None,
        }
        plain |= {
            "vllm_tensor_parallel_size": 2,
            "vllm_gpu_memory_utilization": 0.3,
            "vllm_max_model_len": 64,
        }
        plain |= {"vllm_enable_prefix_caching": True, "vllm_enforce_eager": True}
        plain |= {
            "vllm_max_num_seqs": None,
            "per_device_train_batch_size": 4,
            "steps_per_generation": 2,
        }
        plain |= {"sleep_level": 1, "offload_model": True, "offload_optimizer": True}
        self.args = SimpleNamespace(**{**plain, **changes})
        self.model = SimpleNamespace(model_meta=SimpleNamespace(is_multimodal=False))
        self.accelerator = accelerator()
        self.vllm_tensor_parallel_size = 2

    def _prepare_vllm(self) -> None:
        if self.args.use_vllm:
            self.engine = Engine()

    def _fast_infer(self, samples: Any) -> Any:
        return samples

    def train(self) -> Any:
        return self._fast_infer([1])


class Engine:
    """Stand-in for ms-swift's `VllmEngine`."""

    def __init__(self) -> None:
        self._prepare_engine()

    def _prepare_engine(self) -> None:
        raise AssertionError("ms-swift would build a vLLM")


@pytest.fixture
def mixin(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Mixin]]:
    pretend_version(monkeypatch, f"{ours.TESTED_VERSION}.0")
    for name, value in (
        ("rlhf_trainers.rollout_mixin", Mixin),
        ("infer_engine.vllm_engine", Engine),
    ):
        kind = {Mixin: "RolloutTrainerMixin", Engine: "VllmEngine"}[value]
        monkeypatch.setitem(sys.modules, f"swift.{name}", SimpleNamespace(**{kind: value}))
    monkeypatch.delitem(sys.modules, "swift.megatron", raising=False)
    originals = (Mixin._prepare_vllm, Engine._prepare_engine)
    yield Mixin
    assert originals == (Mixin._prepare_vllm, Engine._prepare_engine), "everything must be undone"


def test_adopts_settings_of_ms_swift(mixin: type[Mixin]) -> None:
    undo = ours.install(max_num_seqs=4, vllm={"block_size": 16})
    try:
        with refused(StateError, "installed-already"):
            ours.install()
        trainer = mixin()
        trainer._prepare_vllm()
        config = trainer.rollouts._config
        assert (config["infer_tensor_parallel_size"], config["max_model_len"]) == (2, 64)
        assert config["max_num_seqs"] == 4, "arguments of the caller override"
        assert config["vllm"] == {
            "trust_remote_code": True,
            "enable_prefix_caching": True,
            "block_size": 16,
        }
        assert {
            getattr(trainer.args, name)
            for name in ("sleep_level", "offload_model", "offload_optimizer")
        } == {0}
        assert trainer.vllm_tensor_parallel_size == 1, "ms-swift must not gather prompts"
        with refused(StateError, "not-training", "trainer.train()"):
            trainer._fast_infer([])
        plain = mixin(use_vllm=False)
        plain._prepare_vllm()
        assert plain.train() == [1], "generated by ms-swift"
    finally:
        undo()


def test_unsupported_settings_are_refused(mixin: type[Mixin]) -> None:
    changes = {
        "vllm_mode": "server",
        "vllm_enable_lora": True,
        "vllm_engine_kwargs": {"seed": 1, "block_size": 16},
    }
    refused = has_violations(
        ("vllm_mode", "unsupported-value"),
        ("vllm_enable_lora", "unsupported-value"),
        ("vllm_engine_kwargs", "not-supported"),
    )
    undo = ours.install()
    try:
        with pytest.raises(ConfigError, check=refused) as caught:
            mixin(**changes)._prepare_vllm()
    finally:
        undo()
    assert "block_size, seed" in str(caught.value)


def test_megatron_and_its_ray_workers_are_refused(
    mixin: type[Mixin], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "swift.megatron", SimpleNamespace())
    with violated(ConfigError, ("--external_plugins", "not-supported")):
        ours.install()


def test_requests_of_a_rollout_may_have_different_parameters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []

    def request_outputs(engine: Any, prompts: Any, samplings: Any) -> list[Any]:
        calls.append((prompts, samplings))
        return [SimpleNamespace() for _ in prompts]

    monkeypatch.setattr(ours, "request_outputs", request_outputs)
    requests = ours._RequestQueue(lambda: None)  # type: ignore[arg-type,return-value]
    prompts = [{"prompt_token_ids": [number]} for number in (0, 1)]
    for number in (0, 1):
        requests.add_request(str(number), prompts[number], number)
    turns = []
    for _ in range(2):  # the second without a request on this rank
        while requests.has_unfinished_requests():
            turns.append([(output.request_id, output.finished) for output in requests.step()])
    assert turns == [[("0", True), ("1", True)], []]
    assert calls == [(prompts, [0, 1]), ([], [])]
