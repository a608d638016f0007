"""`train_rl.py --perform-rl-step` of Megatron-LM, with rollouts by a `vllm serve` that we fill.

MEGATRON_LM_PATH names a git checkout of core_v0.19.0, as in test_runs.py.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import json
import os
import sys
import time
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pydantic
import pytest

from hybrid_engine.backends.vllm.engine_settings import Sampling
from hybrid_engine.errors import ArgumentError
from hybrid_engine.megatron_script.rl_engine import RolloutEngine
from hybrid_engine.tools.launching import Ended, run_ranks
from tests.harness.errors import has_violation
from tests.harness.values import Values
from tests.harness.vllm_server import FILLED, PLAIN, serving
from tests.hybrid_engine.megatron_script.test_runs import (
    CHECKOUT,
    DENSE,
    EXPERTS,
    ON_CPU,
    PYTHON_PATHS,
    Scripts,
)
from tests.hybrid_engine.tools.programs import read_lines
from tests.zoo.families import write_config
from tests.zoo.tokenizers import save_characters

HAS_RL_LOOP = Path(CHECKOUT, "megatron/rl/rollout_granularity.py").is_file()
with_checkout = pytest.mark.skipif(
    not (CHECKOUT and HAS_RL_LOOP),
    reason="MEGATRON_LM_PATH names no checkout of Megatron-LM with the RL loop of 0.19",
)


def runs_script(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that runs a checkout's script, which takes half a minute."""
    for mark in (with_checkout, pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(600)):
        test = mark(test)
    return test


END_TOKEN = 100
COMMON_CONFIG = {
    "num_hidden_layers": 2,
    "vocab_size": 101,
    "bos_token_id": None,
    "eos_token_id": END_TOKEN,
}
MODEL = (
    "--num-layers 2 --hidden-size 128 --num-attention-heads 4 --ffn-hidden-size "
    "192 --group-query-attention "
    "--num-query-groups 2 --kv-channels 32 --seq-length 64 --max-position-embeddings 128 --swiglu "
    "--normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
    "--untie-embeddings-and-output-weights --make-vocab-size-divisible-by 8 "
    "--tokenizer-type HuggingFaceTokenizer"
)
TRAINING = (
    "--perform-rl-step --inference-max-seq-length 64 --grpo-group-size 4 --grpo-prompts-per-step 2 "
    "--global-batch-size 8 --micro-batch-size 2 --lr 1e-2 --min-lr 1e-2 "
    "--weight-decay 0.1 --attention-dropout 0 "
    "--hidden-dropout 0 --log-interval 1 --eval-interval 2 --eval-iters 1 "
    "--rl-prompts-per-eval 2 --train-iters 6 "
    "--num-workers 0 --wandb-project project --wandb-exp-name name "
    "--wandb-save-dir wandb --tensorboard-dir tensorboard"
)


@dataclass(frozen=True)
class Case:
    """A run on two ranks, with its own server.

    Attributes:
        flags: of Megatron.
        dtype: of the server.
        generate: keys of generate_config.
        rollouts: iteration of each collection -> weight version, the number of optimizer steps.
        versions: of the weights at each switch to inference, including evaluations, which come
            first in their iteration.
        last: iteration after which Megatron exits.
        close: relative tolerance of a trainer's probability to vLLM's.
        hf_config: of the model, without COMMON_CONFIG.
        is_patched: whether the source is patched; otherwise the launcher adds resharding.
    """

    flags: str
    rollouts: dict[int, int]
    versions: list[int]
    last: int
    dtype: str = "float32"
    generate: Values = field(default_factory=dict)
    close: float = 1e-5
    is_patched: bool = False
    hf_config: Values = field(default_factory=lambda: DENSE)


PP = Case(
    "--pipeline-model-parallel-size 2 --grpo-iterations 1",
    rollouts={0: 0, 1: 1},
    versions=[0, 1, 2],
    last=2,
)
CASES = {
    "TP": Case(
        "--tensor-model-parallel-size 2 --grpo-iterations 1",
        rollouts={0: 0, 1: 1, 2: 2},
        versions=[0, 1, 2, 2],
        last=3,
    ),
    "PP": PP,
    "EP": replace(
        PP,
        flags="--expert-model-parallel-size 2 --num-experts 4 --moe-router-topk 2 "
        "--moe-ffn-hidden-size 64 "
        "--qk-layernorm --grpo-iterations 1",
        hf_config=EXPERTS,
    ),
    "DP": Case(
        "--bf16 --use-distributed-optimizer --grpo-iterations 2 "
        "--rl-inference-logprobs-is-correction",
        dtype="bfloat16",
        generate={"release_weights": False},
        rollouts={0: 0, 2: 2},
        versions=[0, 2, 2, 4],
        last=4,
        close=0.05,
        is_patched=True,
    ),
}
Starts = Callable[..., tuple[Path, Ended]]
Runs = Callable[[str], Path]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Starts:
    """Run a case: (name of a directory, case, action of the environment in the second
    collection)."""
    here = tmp_path_factory.mktemp("rl")
    scripts = Scripts(here)
    environment = here / "environment.yaml"
    environment.write_text(
        json.dumps([{"agent_type": "AceMathAgent", "agent_args": {"max_k": 2}, "weight": 1.0}])
    )

    def run(name: str, case: Case, action: str = "") -> tuple[Path, Ended]:
        directory = here / name
        model = directory / "model"
        model.mkdir(parents=True)
        write_config(model, {**case.hf_config, **COMMON_CONFIG})
        save_characters(model, eos_token="~", pad_token="`")
        with serving(model, directory, *PLAIN, "--dtype", case.dtype, *FILLED) as server:
            generate = {
                "servers": [server.url],
                "max_model_len": 64,
                "timeout_seconds": 120,
                **case.generate,
            }
            config = directory / "config.yaml"
            config.write_text(json.dumps({"model": str(model), "generate_config": generate}))
            ours = (
                f"--enable-resharding --resharding-config {config} --resharding-output "
                "out --resharding-verify full"
            )
            ours += " --resharding-engine hybrid_engine.megatron_script:make_engine"
            files = (
                f"--tokenizer-model {model} --langrl-env-config {environment} "
                f"--exit-interval {case.last}"
            )
            arguments = " ".join([MODEL, TRAINING, ON_CPU, files, ours, case.flags]).split()
            way, tree = (
                ([], scripts.patched)
                if case.is_patched
                else (["-m", "megatron_patches"], scripts.plain)
            )
            settings = {
                "HF_HUB_OFFLINE": "1",
                "LANGRL_LOG_DIR": str(directory),
                "THEN": action,
                "SERVER": str(server.pid),
            }
            ended = run_ranks(
                [*way, str(tree / "train_rl.py"), *arguments],
                2,
                280,
                environment={"PYTHONPATH": os.pathsep.join(PYTHON_PATHS), **settings},
                directory=directory,
            )
            (directory / "output").write_text(ended.output)
        return directory, ended

    return run


@pytest.fixture(scope="module")
def runs(start: Starts) -> Runs:
    """Name of a case -> directory of its run. Each case runs once."""

    @functools.cache
    def run(name: str) -> Path:
        directory, ended = start(name, CASES[name])
        assert ended.status == 0, ended.output
        return directory

    return run


def for_all_cases(test: Callable[..., None]) -> Callable[..., None]:
    return runs_script(pytest.mark.parametrize("name", CASES)(test))


@for_all_cases
def test_rollouts_use_the_weights_of_the_last_step(runs: Runs, name: str) -> None:
    """Weights are bitwise equal, bytes are minimal, and training runs to its last iteration."""
    directory = runs(name)
    case = CASES[name]
    switches = read_lines(directory / "out" / "switches.jsonl")
    filled = switches[::2]
    back = switches[1::2]
    assert (
        [switch["version"] for switch in filled]
        == case.versions
        == [switch["version"] for switch in back]
    )
    assert {switch["direction"] for switch in filled} == {"train->infer"}
    assert {switch["direction"] for switch in back} == {"infer->train"}
    for switch in filled:
        assert switch["tensors_verified"] == filled[0]["tensors_verified"] >= 21, "all tensors"
        assert switch["bytes_received"] == switch["bytes_least"] > 0
    assert f"exiting program at iteration {case.last}" in (directory / "output").read_text()
    assert "letters_eval_mean_pass_at_1" in (directory / "output").read_text()


@for_all_cases
def test_megatron_trains_on_the_completions(runs: Runs, name: str) -> None:
    """Completions are whole, have log-probabilities, and differ between weight versions."""
    directory = runs(name)
    case = CASES[name]
    collected = [
        json.loads(
            (directory / f"rollouts_rank0_iteration{iteration}_environment.json").read_text()
        )
        for iteration in case.rollouts
    ]
    for iteration, groups in zip(case.rollouts, collected, strict=True):
        assert [len(group) for group in groups] == [4, 4]
        for rollout in (rollout for group in groups for rollout in group):
            (tokens,), (mask,), (logprobs,) = (
                rollout[key] for key in ("trajectory", "generation_mask", "logprobs")
            )
            assert len(tokens) == 64 or tokens[-1] == END_TOKEN
            assert len(tokens) == len(mask)
            assert sum(mask) == len(logprobs) > 0
            assert rollout["policy_epoch"] == [[[0, iteration]]]
    texts = [
        json.dumps([[rollout["trajectory"] for rollout in group] for group in groups])
        for groups in collected
    ]
    assert len(set(texts)) == len(texts)


@for_all_cases
def test_log_probabilities_match_the_trainer(runs: Runs, name: str) -> None:
    """Megatron's comparison of each collection. It pads the vocabulary of 101 to 112 or 104."""
    directory = runs(name)
    case = CASES[name]
    compared = [
        line for line in read_lines(directory / "wandb.jsonl") if "max_piold_to_inf_prob" in line
    ]
    by_step = {line["step"]: line for line in compared}
    assert by_step.keys() >= case.rollouts.keys()
    for line in by_step.values():
        assert line["max_piold_to_inf_prob"] == pytest.approx(1, abs=case.close)
        assert line["min_piold_to_inf_prob"] == pytest.approx(1, abs=case.close)
        assert line["max_inf_train_prob_abs_diff"] < case.close
        assert line["max_inf_prob"] > 0


@runs_script
def test_a_resumed_run_continues_with_the_saved_weights(start: Starts) -> None:
    """The step count continues, and the first rollouts use the loaded weights.

    In the first run the environment takes longer than the timeout of ranks elsewhere.
    """
    case = CASES["TP"]
    saving = "--ckpt-format torch --save ../saved --save-interval 2"
    impatient = replace(
        case, generate={"timeout_seconds": 10}, flags=f"{case.flags} {saving}", last=2
    )
    first, ended = start("first", impatient, "wait")
    assert ended.status == 0, ended.output
    loading = f"--ckpt-format torch --load {first.parent / 'saved'}"
    second, ended = start("second", replace(case, flags=f"{case.flags} {loading}", last=4))
    assert ended.status == 0, ended.output
    filled = read_lines(second / "out" / "switches.jsonl")[::2]
    assert [switch["version"] for switch in filled] == [2, 3, 4]
    compared = [
        line for line in read_lines(second / "wandb.jsonl") if "max_piold_to_inf_prob" in line
    ]
    assert {line["step"] for line in compared} == {2, 3}
    assert all(
        line["max_piold_to_inf_prob"] == pytest.approx(1, abs=case.close) for line in compared
    )


@runs_script
@pytest.mark.parametrize(
    ("action", "message"),
    [("raise", "StopAsyncIteration"), ("kill", "a rollout failed: ServerError: http://127.0.0.1:")],
)
def test_a_failed_rollout_ends_both_ranks(start: Starts, action: str, message: str) -> None:
    """The environment of the first rank fails, or the server; the run ends before any timeout."""
    started = time.monotonic()
    directory, ended = start(action, CASES["TP"], action)
    assert ended.status not in (0, None), "must fail, and must not hang"
    assert message in ended.output
    assert time.monotonic() - started < 110
    assert [switch["version"] for switch in read_lines(directory / "out" / "switches.jsonl")] == [
        0,
        0,
    ]


# -- interface without Megatron --------------------------------------------------------------------

INTERFACE = "hybrid_engine.backends.megatron.rl_interface"


class Message(pydantic.BaseModel):
    role: str
    content: str


class Tokenizer:
    """Encodes text by code points; a chat begins with a special token, as in most templates."""

    bos = 1
    eod = 0
    chat_template: str | None = "template"

    def tokenize(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def detokenize(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))

    def apply_chat_template(
        self,
        messages: list[dict[str, str]],
        tokenize: bool,
        add_generation_prompt: bool,
        **tools: Any,
    ) -> UserDict[str, list[int]]:
        assert tokenize
        assert add_generation_prompt
        text = "".join(message["content"] for message in messages) + str(tools or "")
        return UserDict(input_ids=[self.bos, *self.tokenize(text)])


@dataclass
class FakeRolloutEngine:
    """Fake of a `RolloutEngine`."""

    is_first: bool = True
    most_requests: int = 2
    meetings_left: int = 0

    def __post_init__(self) -> None:
        self.calls: list[Any] = []

    def publish(self) -> None:
        self.calls.append("publish")

    def meet(self, *, is_done: bool) -> bool:
        self.calls.append(f"meet {is_done}")
        self.meetings_left -= 1
        return is_done or self.meetings_left == 0

    def withdraw(self) -> None:
        self.calls.append("withdraw")

    def complete(self, prompt: list[int], **wanted: Any) -> Any:
        self.calls.append((prompt, wanted))
        return SimpleNamespace(
            token_ids=(104, 105, 0), logprobs=(-1.0, -2.0, -3.0), finish_reason="stop"
        )

    def end(self) -> None:
        self.calls.append("end")


ARGS = SimpleNamespace(inference_max_seq_length=16, rl_skip_bos_token=False)


@pytest.fixture
def interface(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, with stand-ins for Megatron."""
    response = pydantic.create_model(
        "InferenceResponse", __config__=pydantic.ConfigDict(extra="allow")
    )
    mixin = type("Mixin", (pydantic.BaseModel,), {})
    stand_ins = {
        "megatron.rl": {},
        "megatron.rl.inference": {
            "InferenceRequest": SimpleNamespace,
            "InferenceResponse": response,
            "LLMChatMessage": Message,
            "ReturnsRaw": mixin,
            "ReturnsTokens": type("Tokens", (pydantic.BaseModel,), {}),
        },
        "megatron.rl.server": {},
        "megatron.rl.server.api": {
            "InferenceServer": type("InferenceServer", (pydantic.BaseModel,), {})
        },
        "megatron.training": {},
        "megatron.training.global_vars": {"get_args": lambda: ARGS, "get_tokenizer": Tokenizer},
        "megatron.core.inference.text_generation_controllers.text_generation_controller": {
            "TextGenerationController": SimpleNamespace(
                detokenize=lambda tokenizer, ids: tokenizer.detokenize(
                    [token for token in ids if token]
                )
            )
        },
    }
    for name, values in stand_ins.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, INTERFACE, raising=False)
    yield importlib.import_module(INTERFACE)
    del sys.modules[INTERFACE]


def request_for(text: str, tools: list[Values] | None = None, **args: Any) -> Any:
    values = {"temperature": None, "top_p": None, "top_k": None, "max_tokens": None, **args}
    return SimpleNamespace(
        prompt=[Message(role="user", content=text)],
        tools=tools,
        generation_args=SimpleNamespace(**values),
    )


@pytest.mark.slow
def test_a_chat_is_tokenized_and_a_completion_returned(interface: Any) -> None:
    engine = FakeRolloutEngine()

    async def run() -> Any:
        server = await interface.ServedRollouts.launch(engine)
        server.set_generation_epoch(7)
        return await server.base_generate(
            request_for("ab", temperature=0.0, top_p=0.0, top_k=-1, max_tokens=99)
        )

    response = asyncio.run(run()).model_dump()
    # The model's end token in config.json is ignored.
    ends = {"stop_token_ids": (0,), "ignore_eos": True}
    assert engine.calls == [
        ([1, 97, 98], {"max_tokens": 13, "temperature": 0.0, "top_p": 1.0, "top_k": 0, **ends})
    ]
    assert response == {
        "response": {"role": "assistant", "content": "hi"},
        "raw_text": "\x01abhi",
        "token_ids": [1, 97, 98, 104, 105, 0],
        "prompt_length": 3,
        "logprobs": [-1.0, -2.0, -3.0],
        "finish_reason": "stop",
        "policy_epoch": [(0, 7)],
        "kv_cache_epoch": [(0, 7)],
        "num_evictions": 0,
    }


@pytest.mark.slow
def test_the_first_token_follows_megatrons_arguments_and_tokenizer(
    interface: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert interface._prompt(request_for("ab", tools=[]), Tokenizer()) == [
        1,
        *map(ord, "ab{'tools': []}"),
    ]
    monkeypatch.setattr(ARGS, "rl_skip_bos_token", True)
    assert interface._prompt(request_for("ab"), Tokenizer()) == [97, 98]
    monkeypatch.setattr(ARGS, "rl_skip_bos_token", False)
    monkeypatch.setattr(Tokenizer, "chat_template", None)
    assert interface._prompt(request_for("ab"), Tokenizer()) == [1, 97, 98]
    monkeypatch.setattr(Tokenizer, "bos", None)
    assert interface._prompt(request_for("ab"), Tokenizer()) == [97, 98]


@pytest.mark.slow
def test_ranks_synchronize_while_the_first_generates(
    interface: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second `resume` or `suspend` has no effect, and `kill` suspends."""
    monkeypatch.setattr(interface, "MEETING_INTERVAL", 0.01)
    first = FakeRolloutEngine()
    other = FakeRolloutEngine(is_first=False, meetings_left=3)

    async def run(engine: FakeRolloutEngine) -> None:
        server = await interface.ServedRollouts.launch(engine)
        await server.suspend()
        await server.resume()
        await server.resume()
        await asyncio.sleep(0.1)
        await server.kill()
        await server.suspend()

    asyncio.run(run(first))
    asyncio.run(run(other))
    assert first.calls[:2] == ["publish", "meet False"]
    assert set(first.calls[2:-3]) == {"meet False"}
    assert first.calls[-3:] == ["meet True", "withdraw", "end"]
    assert other.calls == ["publish", *["meet False"] * 3, "withdraw", "end"]


def test_a_prompt_that_leaves_no_room_is_an_error() -> None:
    engine = RolloutEngine.__new__(RolloutEngine)
    calls = []
    engine.inference = SimpleNamespace(complete_one=lambda *arguments: calls.append(arguments))
    engine.complete([5, 6], max_tokens=3, top_p=0.9)
    assert calls == [([5, 6], Sampling(max_tokens=3, top_p=0.9))]
    with pytest.raises(ArgumentError, check=has_violation("prompt", "prompt-too-long", "2 tokens")):
        engine.complete([5, 6], max_tokens=0)
