"""ms-swift's own trainers, with our engine in the places of its vLLM. Where it is not installed, what says so.

Packages: `pip install --no-deps ms-swift==4.6.0`, trl 0.29, datasets 4.8.4, modelscope, modelscope-hub, addict,
attrdict, binpacking, dacite, dill, json-repair, multiprocess, nltk, oss2 with crcmod and aliyun-python-sdk-core and
-kms, pandas, pyarrow, rouge, sentencepiece, simplejson, sortedcontainers, tiktoken, xxhash, and peft 0.21.2, which is
newer than ms-swift allows.
"""

from __future__ import annotations

import inspect
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
from tests.harness.errors import has_code, has_violation, has_violations
from tests.harness.launch import Ranks
from tests.hybrid_engine.integrations.installed import pretend
from tests.hybrid_engine.integrations.test_trl import CLOSE, NUM_STEPS, accelerator, shard_by_fsdp2, write_model

PLUGIN = """
from hybrid_engine.integrations import ms_swift
from swift.rewards import ORM, orms

ms_swift.install(verify="full")

class Letters(ORM):
    def __call__(self, completions, **_):
        return [sum(map(str.isalpha, text)) / 8 for text in completions]

orms["letters"] = Letters
"""


def lacking() -> str | None:
    try:
        require_tested("ms-swift", ours.TESTED_VERSION, f"ms-swift=={ours.TESTED_VERSION}.*")
        # its wheel has no requirements that all install beside vLLM's CPU build
        import_module("swift.utils")
    except (DependencyError, ImportError) as error:
        return str(error)
    return None


LACKING = lacking()
with_ms_swift = pytest.mark.skipif(LACKING is not None, reason=str(LACKING))


# -- runs --------------------------------------------------------------------------------------------------------------


def grpo(model: str, out: str, tensor_parallel_size: int = 1, is_sharded: bool = False) -> dict[str, Any]:
    """`swift rlhf` in this process: what happened at each rollout, and which parameters it has trained."""
    os.environ["VLLM_PLUGINS"] = "hybrid_engine"  # not ms-swift's, which wants torchvision for a model of images
    from swift.pipelines.train.rlhf import SwiftRLHF

    told: dict[str, list[Any]] = {"states": [], "reports": [], "differences": []}

    class Watched(SwiftRLHF):
        def train(self, trainer: Any) -> Any:
            self.trainer = trainer
            self.before = {name: each.detach().clone() for name, each in trainer.model.named_parameters()}
            if is_sharded:
                shard_by_fsdp2(trainer)
            watch(trainer, "_infer_single_or_multi_turn", lambda *_: see(trainer.rollouts.engine.sharding))
            watch(trainer, "_score_completions", lambda *_: told["states"].append(state(trainer)))
            watch(trainer, "_compute_rollout_offpolicy_metrics", compare)
            return super().train(trainer)

    def see(sharding: Any) -> None:
        told["states"].append(str(sharding.state))
        told["reports"].append(sharding.last_report)

    def state(trainer: Any) -> str:
        return str(trainer.rollouts.engine.sharding.state)

    def compare(own: Any, drawn: Any, mask: Any) -> None:
        told["differences"].append(((own - drawn) * mask).abs().max().item())

    run = Watched(arguments(model, out, tensor_parallel_size))
    run.main()
    left = run.trainer.accelerator.unwrap_model(run.trainer.model).named_parameters()
    trained = {name: getattr(each, "full_tensor", lambda each=each: each)() for name, each in left}
    reports = told.pop("reports")
    return {
        **told,
        "versions": [report.version for report in reports],
        "verified": [report.tensors_verified for report in reports],
        "surplus": [report.bytes_received - report.bytes_least for report in reports],
        "trained": sum(not each.equal(trained[name]) for name, each in run.before.items()),
        "parameters": len(run.before),
        "kinds": {type(each).__name__ for each in run.trainer.model.parameters()},
        "ended": run.trainer.rollouts.engine is None,
        "megatron": "swift.megatron" in sys.modules,
    }


def watch(trainer: Any, name: str, seen: Callable[..., None]) -> None:
    method = getattr(trainer, name)

    def watched(*args: Any, **kwargs: Any) -> Any:
        seen(*args)
        return method(*args, **kwargs)

    setattr(trainer, name, watched)


def arguments(model: str, out: str, tensor_parallel_size: int) -> list[str]:
    directory = Path(out)
    told = {
        **{"rlhf_type": "grpo", "tuner_type": "full", "beta": 0, "reward_funcs": "letters"},
        **{
            "model": model,
            "model_type": "qwen3",
            "template": "dummy",
            "use_chat_template": "false",
            "torch_dtype": "float32",
            "use_hf": "true",
        },
        **{"dataset": directory / "data.jsonl", "split_dataset_ratio": 0, "load_from_cache_file": "false"},
        **{"external_plugins": directory / "plugin.py", "output_dir": directory / "out", "add_version": "false"},
        **{"use_vllm": "true", "vllm_mode": "colocate", "vllm_tensor_parallel_size": tensor_parallel_size},
        **{"vllm_max_model_len": 64, "sleep_level": 1, "offload_model": "true", "offload_optimizer": "true"},
        **{"max_completion_length": 8, "num_generations": 4, "per_device_train_batch_size": 4, "temperature": 1},
        **{"max_steps": NUM_STEPS, "learning_rate": 1e-3, "lr_scheduler_type": "constant", "warmup_ratio": 0},
        **{"logging_steps": 1, "save_strategy": "no", "report_to": "none", "log_rollout_offpolicy_metrics": "true"},
        **{"dataloader_num_workers": 0, "dataset_num_proc": 1, "gradient_accumulation_steps": 1},
        **{"use_cpu": "true", "bf16": "false", "gradient_checkpointing": "false", "attn_impl": "sdpa"},
    }
    return [part for name, value in told.items() for part in (f"--{name}", str(value))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("model"))


@with_ms_swift
@pytest.mark.long
@pytest.mark.parametrize(("num_ranks", "kind"), [(1, "Parameter"), (2, "Parameter"), (2, "DTensor")])
def test_grpo_generates_with_our_weights(engines: Ranks, model: str, tmp_path: Path, num_ranks: int, kind: str) -> None:
    """Alone, in DDP, and sharded by accelerate's FSDP2."""
    rows = [{"messages": [{"role": "user", "content": text}]} for text in ("abc", "hello", "1+1=", "xyz")] * 8
    (tmp_path / "data.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "plugin.py").write_text(PLUGIN)
    for found in engines.launch(grpo, num_ranks, model, str(tmp_path), num_ranks, kind == "DTensor", timeout=600):
        assert found["kinds"] == {kind}
        assert len(found["differences"]) == NUM_STEPS
        assert max(found["differences"]) < CLOSE
        assert found["versions"] == list(range(NUM_STEPS))
        assert found["verified"] == [found["parameters"]] * NUM_STEPS, "bit by bit"
        assert found["surplus"] == [0] * NUM_STEPS, "bytes beyond the fewest possible"
        assert found["states"] == ["infer", "train"] * NUM_STEPS
        assert found["trained"] == found["parameters"]
        assert found["ended"]
        assert not found["megatron"], "which is what install goes by"


# -- contracts ---------------------------------------------------------------------------------------------------------


@with_ms_swift
def test_ms_swift_has_the_names_that_are_replaced() -> None:
    from swift.infer_engine.vllm_engine import VllmEngine
    from swift.rlhf_trainers.rollout_mixin import RolloutTrainerMixin

    def takes(method: Any) -> list[str]:
        return [*inspect.signature(method).parameters]

    assert takes(RolloutTrainerMixin._prepare_vllm) == takes(VllmEngine._prepare_engine) == ["self"]
    assert takes(RolloutTrainerMixin._fast_infer) == ["self", "samples"]
    assert takes(RolloutTrainerMixin._move_model_to_vllm) == ["self", "skip_async_check"]
    answered = inspect.getsource(VllmEngine.infer) + inspect.getsource(VllmEngine._add_request)
    used = {part for name in vars(ours._RequestQueue) if not name.startswith("_") for part in [f"self.engine.{name}("]}
    in_mixin = inspect.getsource(RolloutTrainerMixin._prepare_vllm).replace("self.engine.engine", "self.engine")
    assert all(call in answered + in_mixin for call in used)
    assert "self.engine.add_request(request_id, llm_inputs, generation_config, **kwargs)" in answered


# -- without ms-swift --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("installed", "refused"),
    [
        (None, has_code("needs-package", "pip install 'ms-swift==4.6.*'")),
        ("4.60.0", has_code("untested-version", "ms-swift 4.60.0", "4.6 was tested")),
    ],
)
def test_what_is_missing_is_said(
    installed: str | None, refused: Callable[[BaseException], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, installed)
    with pytest.raises(DependencyError, check=refused):
        ours.install()


class Mixin:
    """ms-swift's, as far as it is replaced."""

    def __init__(self, **changes: Any) -> None:
        plain = {"use_vllm": True, "vllm_mode": "colocate", "vllm_enable_lora": False, "vllm_engine_kwargs": None}
        plain |= {"vllm_tensor_parallel_size": 2, "vllm_gpu_memory_utilization": 0.3, "vllm_max_model_len": 64}
        plain |= {"vllm_enable_prefix_caching": True, "vllm_enforce_eager": True}
        plain |= {"vllm_max_num_seqs": None, "per_device_train_batch_size": 4, "steps_per_generation": 2}
        plain |= {"sleep_level": 1, "offload_model": True, "offload_optimizer": True}
        self.args = SimpleNamespace(**{**plain, **changes})
        self.model = SimpleNamespace(model_meta=SimpleNamespace(is_multimodal=False))
        self.accelerator, self.vllm_tensor_parallel_size = accelerator(), 2

    def _prepare_vllm(self) -> None:
        if self.args.use_vllm:
            self.engine = Engine()

    def _fast_infer(self, samples: Any) -> Any:
        return samples

    def train(self) -> Any:
        return self._fast_infer([1])


class Engine:
    """ms-swift's `VllmEngine`."""

    def __init__(self) -> None:
        self._prepare_engine()

    def _prepare_engine(self) -> None:
        raise AssertionError("it builds a vLLM")


@pytest.fixture
def mixin(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Mixin]]:
    pretend(monkeypatch, f"{ours.TESTED_VERSION}.0")
    for name, value in (("rlhf_trainers.rollout_mixin", Mixin), ("infer_engine.vllm_engine", Engine)):
        kind = {Mixin: "RolloutTrainerMixin", Engine: "VllmEngine"}[value]
        monkeypatch.setitem(sys.modules, f"swift.{name}", SimpleNamespace(**{kind: value}))
    monkeypatch.delitem(sys.modules, "swift.megatron", raising=False)
    originals = Mixin._prepare_vllm, Engine._prepare_engine
    yield Mixin
    assert originals == (Mixin._prepare_vllm, Engine._prepare_engine), "all is undone"


def test_its_settings_are_taken_and_what_a_switch_moves_is_left_to_it(mixin: type[Mixin]) -> None:
    undo = ours.install(max_num_seqs=4, vllm={"block_size": 16})
    try:
        with pytest.raises(StateError, check=has_code("installed-already")):
            ours.install()
        trainer = mixin()
        trainer._prepare_vllm()
        config = trainer.rollouts._config
        assert (config["infer_tensor_parallel_size"], config["max_model_len"]) == (2, 64)
        assert config["max_num_seqs"] == 4, "the caller's come last"
        assert config["vllm"] == {"trust_remote_code": True, "enable_prefix_caching": True, "block_size": 16}
        assert {getattr(trainer.args, name) for name in ("sleep_level", "offload_model", "offload_optimizer")} == {0}
        assert trainer.vllm_tensor_parallel_size == 1, "it gathers no prompts"
        with pytest.raises(StateError, check=has_code("not-training", "trainer.train()")):
            trainer._fast_infer([])
        plain = mixin(use_vllm=False)
        plain._prepare_vllm()
        assert plain.train() == [1], "ms-swift's own generation"
    finally:
        undo()


def test_settings_that_an_engine_cannot_honour(mixin: type[Mixin]) -> None:
    changes = {"vllm_mode": "server", "vllm_enable_lora": True, "vllm_engine_kwargs": {"seed": 1, "block_size": 16}}
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


def test_megatron_and_its_ray_workers_are_refused(mixin: type[Mixin], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "swift.megatron", SimpleNamespace())
    with pytest.raises(ConfigError, check=has_violation("--external_plugins", "not-supported")):
        ours.install()


def test_requests_of_a_rollout_are_alike_and_all_ranks_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def request_outputs(engine: Any, prompts: Any, params: Any, violations: Any) -> list[Any]:
        asked.append((prompts, params, [(violation.key, violation.code) for violation in violations]))
        return [SimpleNamespace() for _ in prompts]

    monkeypatch.setattr(ours, "request_outputs", request_outputs)
    requests = ours._RequestQueue(lambda: None)  # type: ignore[arg-type,return-value]
    of_eight = SimpleNamespace(max_tokens=8)
    for each in ("0", "1"):
        requests.add_request(each, {"prompt_token_ids": [int(each)]}, of_eight)
    turns = []
    for _ in range(2):  # in the second, this rank has no request
        while requests.has_unfinished_requests():
            turns.append([(each.request_id, each.finished) for each in requests.step()])
    assert turns == [[("0", True), ("1", True)], []]
    assert asked[1] == ([], of_eight, [])
    for number in (3, 8):
        requests.add_request(str(number), {"prompt_token_ids": [1]}, SimpleNamespace(max_tokens=number))
    requests.step()
    assert asked[2][2] == [("vllm_max_model_len", "different-requests")]
    ours._RequestQueue(lambda: None).step()  # type: ignore[arg-type,return-value]
    assert asked[3][2] == [("prompts", "no-prompts")], "reported before the ranks meet, so by all of them"
