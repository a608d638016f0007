"""The RL loop with both real engines: learning, resuming, and its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from hybrid_engine import ActorHybridWorker, Completion, ReshardReport, Sampling
from hybrid_engine.config import HybridConfig
from hybrid_engine.config.loading import ALIASES, paths_of
from hybrid_engine.errors import ArgumentError, ConfigError, HybridEngineError
from hybrid_engine.rl import Conversation, GrpoConfig, Loop, PpoConfig, converse, train
from hybrid_engine.rl.step_metrics import StepMeter, combine_ranks
from tests.harness.errors import has_violation, has_violations, violations_of
from tests.harness.launch import REPO_ROOT, of_all_ranks, on_engines
from tests.harness.values import Values
from tests.hybrid_engine.rl.stand_ins import stand_in
from tests.hybrid_engine.tools.programs import read_lines
from tests.zoo import workers
from tests.zoo.tokenizers import save_characters

pytestmark = pytest.mark.timeout(900)

PROMPTS = [{"prompt": [first, 3, 4], "wanted": first % 2} for first in range(5, 11)]
CONFIG: Values = {
    "steps": 3,
    "prompts_per_step": 4,
    "samples_per_prompt": 4,
    "max_tokens": 6,
    "temperature": 0.8,
    "epochs": 2,
    "minibatches": 2,
    "learning_rate": 1e-2,
    "schedule": "cosine",
    "warmup_steps": 1,
    "kl_coefficient": 0.01,
    "importance_cap": 2.0,
    "clip_ratio_high": 0.3,
    "evaluate_every": 2,
    "save_every": 2,
}
CONFIG_OF_TURNS = {**CONFIG, "max_tokens_per_turn": 2}
CONFIG_OF_PPO = {
    **CONFIG,
    "critic_warmup_steps": 1,
    "critic_epochs": 2,
    "critic_learning_rate": 2e-2,
}


def reward(prompt: Mapping[str, Any], completion: Completion) -> float:
    return sum(token % 2 == prompt["wanted"] for token in completion.token_ids) / 6


def evaluate(worker: ActorHybridWorker) -> dict[str, float]:
    sampling = Sampling(temperature=0.0, max_tokens=6, ignore_eos=True)
    ((conversation,),) = converse(worker, [[5, 6]], sampling, reply_once, max_tokens_per_turn=2)
    return {"last_token": float(conversation.turns[1].token_ids[0])}


def reply_once(prompt: Any) -> Any:
    replies = iter([[7, 8]])
    return lambda answer: next(replies, None)


def failing_reward(prompt: Mapping[str, Any], completion: Completion) -> float:
    failing_reward.calls += 1
    return reward(prompt, completion) if failing_reward.calls <= 16 else float("nan")


failing_reward.calls = 0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = workers.write_model(tmp_path_factory.mktemp("model"), "qwen3", num_hidden_layers=2)
    save_characters(model)
    return model


@pytest.mark.slow
@on_engines({2: ["grpo", "ppo", "ppo with FSDP2"]})
def test_a_resumed_run_has_the_rows_of_an_uninterrupted_run(
    model: Path, tmp_path: Path, case: str
) -> None:
    """Run at once, then stop after step 1, fail in step 3 and resume."""
    algorithm = GrpoConfig if case == "grpo" else PpoConfig
    settings = CONFIG_OF_TURNS if case == "grpo" else CONFIG_OF_PPO
    actor: Values = {"tensor_model_parallel_size": 2}
    if case == "ppo with FSDP2":
        actor = {"fsdp": {}, "micro_batch_size": 2, "make_vocab_size_divisible_by": 128}
    critic = {} if case == "grpo" else {"critic_config": {}}
    with workers.build_worker(model, {"micro_batch_size": 4, **actor}, **critic) as worker:
        worker.save_checkpoint(tmp_path / "start")
        reports: list[ReshardReport] = []
        worker.on_reshard_end(reports.append)
        hooks = list(worker.sharding._end_hooks)

        def run(
            name: str, reward: Any, stops: bool = False, begins: bool = True, **changed: Any
        ) -> list[Values]:
            if begins:
                with worker.train_context():
                    worker.load_checkpoint(tmp_path / "start")
            config = algorithm(**{**settings, **changed})
            places = {"out": tmp_path / name, "evaluate": evaluate}
            if config.max_tokens_per_turn:
                places["environment"] = reply_once
            done: list[Values] = []
            return train(
                worker,
                PROMPTS,
                reward,
                config,
                **places,
                on_step=done.append,
                should_stop=lambda: stops and bool(done),
            )

        def refused(name: str, reward: Any, **changed: Any) -> HybridEngineError:
            with pytest.raises(HybridEngineError) as caught:
                run(name, reward, **changed)
            return caught.value

        whole = run("whole", reward)
        assert of_all_ranks(whole)[0] == whole
        assert [row["step"] for row in run("resumed", reward, stops=True)] == [1]
        assert not (tmp_path / "resumed" / "model").exists()
        failing_reward.calls = 0
        failed = refused("resumed", failing_reward)
        assert "nan for prompt 5, completion 0" in str(failed), (
            "rank 1 has the text of rank 0's error"
        )
        same_worker = refused("resumed", reward, begins=False)
        # The worker has the weights of step 2, not of step 0.
        assert violations_of(same_worker) == [("model", "different-reference")]
        of_seed = refused("resumed", reward, seed=1)
        of_rows = refused("rows", reward, minibatches=3)
        if worker.rank == 0:
            assert set(violations_of(failed)) == {("reward", "invalid-reward")}
            assert violations_of(of_seed) == [(f"{algorithm.__name__}.seed", "differs-from-run")]
            assert (f"{algorithm.__name__}.minibatches", "not-divisible") in violations_of(of_rows)
        resumed = run("resumed", reward)
        assert [row["step"] for row in resumed] == [3], "the checkpoint of step 2 was complete"
        assert run("resumed", reward) == []
        assert worker.sharding._end_hooks == hooks, "runs that ended or failed leave no hooks"
        check_conversations(worker, algorithm)
        if worker.rank == 0:
            check_rows(tmp_path, algorithm, settings)


def check_rows(out: Path, algorithm: type[GrpoConfig | PpoConfig], settings: Values) -> None:
    """Check the files of both runs."""
    whole, resumed = (rows_of(out / name) for name in ("whole", "resumed"))
    assert [row["step"] for row in whole] == [1, 2, 3]
    assert whole == resumed
    trained = whole
    if algorithm is PpoConfig:
        trained = whole[1:]
        assert "policy_loss" not in whole[0], "the first step trains only the critic"
        assert whole[0]["explained_variance"] == 0, "the value head starts with zeros"
        assert [row["weight_version"] for row in whole] == [
            whole[0]["weight_version"] + more for more in (0, 4, 8)
        ]
        assert all(row["value_loss"] > 0 and row["explained_variance"] <= 1 for row in whole)
        assert whole[2]["value_loss"] < whole[0]["value_loss"]
    for row in whole:
        assert 0 < row["bytes_received"] == row["bytes_least"]
        assert row["logprob_diff_mean"] <= row["logprob_diff"] < 1e-4
        assert 0 <= row["logprob_equal"] < 1
    for row in trained:
        assert row["grad_norm"] > 0
        assert row["importance"] == pytest.approx(1, abs=1e-3)
    kl = [row["kl"] for row in whole]
    assert kl[: 4 - len(trained)] == pytest.approx([0] * (4 - len(trained)), abs=1e-9)
    assert all(0 < value < 5 for value in kl[4 - len(trained) :])
    assert [row["learning_rate"] for row in whole] == pytest.approx([0.01, 0.0075, 0.0025])
    assert ["last_token" in row for row in whole] == [False, True, True]
    assert all(row["turns"] > 1.5 for row in whole if "max_tokens_per_turn" in settings)
    assert whole[0]["bytes_received"] < whole[1]["bytes_received"], (
        "an evaluation needs another switch"
    )
    assert [path.name for path in (out / "resumed" / "checkpoints").iterdir()] == ["step-000003"]
    assert (out / "resumed" / "model" / "config.json").exists()


def reply_twice(prompt: Any) -> Any:
    replies = iter([[{"role": "tool", "content": "7"}, {"role": "user", "content": "?"}], "so:"])
    return lambda answer: next(replies, None)


def check_conversations(worker: ActorHybridWorker, algorithm: type[GrpoConfig | PpoConfig]) -> None:
    """Train two steps on conversations, which hold exactly the prompts and answers of vLLM."""
    answered: set[Any] = set()
    conversations: list[list[Any]] = []
    generate = worker.inference.llm.generate

    def record_answers(*arguments: Any, **options: Any) -> Any:
        outputs = generate(*arguments, **options)
        for output in outputs:
            answered.update(
                (tuple(output.prompt_token_ids), tuple(answer.token_ids))
                for answer in output.outputs
            )
        return outputs

    def reward(prompt: Any, conversation: Conversation) -> float:
        conversations.append(
            [(turn.prompt_token_ids, turn.token_ids) for turn in conversation.turns]
        )
        return sum(token % 3 for turn in conversation.turns for token in turn.token_ids)

    settings = {
        "steps": 2,
        "prompts_per_step": 2,
        "samples_per_prompt": 4,
        "max_tokens": 26,
        "temperature": 0.8,
    }
    # Half of all tokens end an answer, so that conversations have different lengths.
    config = algorithm(**settings, minibatches=2, stop_token_ids=list(range(0, 100, 2)))
    chats = [{"prompt": [{"role": "user", "content": text}]} for text in ("x", "yz")]
    with mock.patch.object(worker.inference.llm, "generate", record_answers):
        rows = train(
            worker,
            chats,
            reward,
            config,
            environment=reply_twice,
            chat_template_kwargs={"suffix": ""},
        )
    assert of_all_ranks(rows)[0] == rows
    of_both = set().union(*of_all_ranks(answered))
    if worker.rank:
        assert conversations == []
    else:
        turns = {turn for turns in conversations for turn in turns}
        assert of_both == turns, "prompts and answers of vLLM, over both replicas"
        assert max(len(turns) for turns in conversations) == 3  # two replies at most
        assert len(conversations) == 16
        for row in rows:
            assert row["logprob_diff"] < 1e-4
            assert 1 <= row["turns"] <= 3
            drawn = [
                sum(len(answer) for _, answer in turns)
                for turns in conversations[8 * (row["step"] - 1) :][:8]
            ]
            assert row["response_tokens"] == pytest.approx(sum(drawn) / 8)
    check_failures(worker, chats)


def check_failures(worker: ActorHybridWorker, chats: list[Any]) -> None:
    """A failure of one rank is raised on both and does not affect the next call."""

    def failing(prompt: Any) -> Any:
        reply = reply_twice(prompt)
        return lambda answer: reply(answer) if len(answer.prompt_token_ids) < 12 else 1 / 0

    sampling = Sampling(n=2, max_tokens=26, seed=1, stop_token_ids=list(range(0, 100, 2)))
    own_sampling = Sampling(max_tokens=None) if worker.rank else sampling
    # An answer that ends with the last token of its budget leaves no room for a reply.
    full = Sampling(max_tokens=1, stop_token_ids=list(range(100)))
    with worker.rollout_context():
        assert [len(row[0].turns) for row in converse(worker, chats, full, reply_twice)] == [1, 1]
        before = converse(worker, chats, sampling, reply_twice)
        with pytest.raises(HybridEngineError, match="max_tokens") as unbounded:
            converse(worker, chats, own_sampling, reply_twice)
        with pytest.raises(
            HybridEngineError, match=r"ZeroDivisionError for prompt \d, completion \d"
        ) as failed:
            converse(worker, chats, sampling, failing)
        # The other rank raises RemoteError with the text of this rank's error.
        codes = [violations_of(error.value) for error in (unbounded, failed)]
        if worker.rank:
            assert codes == [[("sampling", "unbounded-sampling")], []]
        else:
            assert codes == [[], [("environment", "callback-failed")]]
        assert converse(worker, chats, sampling, reply_twice) == before


def rows_of(out: Path) -> list[dict[str, float]]:
    """Return the rows of a run without times and memory."""
    rows = read_lines(out / "metrics.jsonl")
    measured = ("seconds", "rss_bytes", "peak_bytes")
    return [
        {key: value for key, value in row.items() if not key.endswith(measured)} for row in rows
    ]


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("constant", [0.5, 1, 1, 1, 1]),
        ("linear", [0.5, 1, 0.75, 0.5, 0.25]),
        ("cosine", [0.5, 1, 0.8535534, 0.5, 0.1464466]),
    ],
)
def test_the_learning_rate_rises_and_falls(schedule: str, rates: list[float]) -> None:
    config = GrpoConfig(steps=5, schedule=schedule, warmup_steps=2)
    assert [config.learning_rate_factor(step) for step in range(1, 6)] == pytest.approx(rates)


def test_all_wrong_keys_are_named() -> None:
    refused = has_violations(
        ("GrpoConfig.samples_per_prompt", "wrong-value"),
        ("GrpoConfig.keep_best", "wrong-value"),
        ("GrpoConfig.max_staleness", "wrong-value"),
        *(
            (f"GrpoConfig.{name}", "unknown-key")
            for name in ("clipratio", "beta", "max_new_tokens")
        ),
    )
    with pytest.raises(ConfigError, check=refused) as caught:
        GrpoConfig(
            samples_per_prompt=1,
            keep_best="",
            max_staleness=-1,
            clipratio=0.1,
            beta=0.1,
            max_new_tokens=8,
        )
    remedies = {
        violation.key.removeprefix("GrpoConfig."): violation.remedy
        for violation in caught.value.findings
    }
    for name, suggestion in (
        ("clipratio", "clip_ratio"),
        ("beta", "kl_coefficient"),
        ("max_new_tokens", "max_tokens"),
    ):
        assert suggestion in remedies[name]


def test_aliases_of_other_frameworks_map_to_existing_keys() -> None:
    known = {path[-1] for section in (HybridConfig, GrpoConfig) for path in paths_of(section)}
    assert {*" ".join(ALIASES.values()).split()} <= known


def test_settings_of_turns_are_passed_on() -> None:
    loop = Loop(
        stand_in(), "ab", mock.Mock(), GrpoConfig(max_tokens_per_turn=5), environment=mock.Mock()
    )
    with mock.patch("hybrid_engine.rl.group_queue.Conversations") as conversations:
        loop.queue.draw([7], ["a"], Sampling())
    assert conversations.call_args.kwargs == {
        "max_tokens_per_turn": 5,
        "names": [7],
        "goes_on": False,
    }


def loop_without_engines(prompts: Any = "abcde", **settings: Any) -> Loop:
    return Loop(stand_in(), prompts, mock.Mock(), GrpoConfig(**settings))


@pytest.mark.slow  # imports vLLM
def test_each_step_of_each_run_has_its_own_seed() -> None:
    seeds = [
        loop_without_engines(seed=seed).queue.sampling(step).seed
        for seed in (0, 1)
        for step in range(1, 6)
    ]
    assert len(set(seeds)) == 10


def test_prompts_without_room_are_refused_before_generation() -> None:
    """A row of seq_length 300 holds 301 tokens, since the first is only an input."""
    loop_without_engines(["a" * 45], max_tokens=256)
    numbers = ("2 of 3", "prompts[2]: 47 tokens", "256 of max_tokens", "301")
    with pytest.raises(ConfigError, check=has_violation("prompts", "prompts-too-long", *numbers)):
        loop_without_engines(["a", "a" * 46, "a" * 47], max_tokens=256)
    loop = loop_without_engines(lambda step: ["a" * 45 * step], prompts_per_step=1, max_tokens=256)
    with pytest.raises(ConfigError, check=has_violation("prompts", "prompts-too-long", "1 of 1")):
        loop.learn(2)
    assert not loop.worker.rollout_context.called


def test_advantages_and_loss_may_be_user_functions() -> None:
    rewards = torch.tensor([[0.0, 3.0]])
    groups = [[mock.Mock(), mock.Mock()]]
    mask = penalties = torch.tensor([[0.0, 1.0, 0.0], [0.0, 1.0, 1.0]])

    def advantages_by(returned: Any) -> torch.Tensor:
        function = mock.Mock(return_value=returned)
        functions = {"loss": mock.sentinel.loss, "advantages": function}
        loop = Loop(stand_in(), "ab", mock.Mock(), GrpoConfig(samples_per_prompt=2), **functions)
        assert loop._loss is mock.sentinel.loss
        advantages = loop._advantages_of(loop.config, rewards, penalties, {"mask": mask}, groups)  # type: ignore[arg-type]
        (received, of_groups) = function.call_args.args
        assert (received.tolist(), of_groups) == ([[-1, 1]], groups)
        return advantages

    assert advantages_by([[-1.0, 1.0]]).tolist() == [[0, -1, 0], [0, 1, 1]]
    assert advantages_by(mask).equal(mask)
    for wrong, words in ((torch.zeros(2), "(2,)"), (torch.tensor([[0.0, torch.nan]]), "finite")):
        with pytest.raises(
            ArgumentError, check=has_violation("advantages", "wrong-advantages", words)
        ):
            advantages_by(wrong)


@pytest.mark.parametrize(("flag", "word"), [(True, "group"), (False, "none")])
def test_scale_rewards_accepts_a_flag(flag: bool, word: str) -> None:
    assert GrpoConfig(scale_rewards=flag).scale_rewards == word  # type: ignore[arg-type]


def test_evaluation_figures_do_not_overwrite_columns() -> None:
    loop = loop_without_engines()
    loop._meter.take = lambda _: {"seconds": 2.0, "rss_bytes": 1.0}  # type: ignore[method-assign]
    figures = {"reward": 0.25, "seconds": 7, "accuracy": torch.tensor(0.75)}
    row = loop.finish({"reward": 0.5}, lambda _: figures)  # type: ignore[return-value,arg-type]
    held_out = {"held_out_reward": 0.25, "held_out_seconds": 7, "accuracy": 0.75}
    assert row == {"reward": 0.5, "seconds": 2.0, "rss_bytes": 1.0, **held_out}
    for wrong, code, text in (
        (None, "not-a-mapping", "None"),
        ({"accuracy": "high"}, "not-a-number", "accuracy is 'high'"),
    ):
        with pytest.raises(ArgumentError, check=has_violation("evaluate", code, text)):
            loop.finish({}, lambda _, wrong=wrong: wrong)  # type: ignore[misc]


def test_figures_of_ranks_and_phases_are_combined() -> None:
    loop = loop_without_engines()
    started = []
    worker = loop.worker
    worker.reports_cover_all_ranks = False
    of_rank_1 = {
        "bytes_received": 5,
        "bytes_least": 4,
        "peak_bytes": 3,
        "rss_bytes": 1,
        "reshard_seconds": 1.0,
    }
    worker.job.agreement.gather = lambda values, *_: [
        values,
        {**dict.fromkeys(values, 0), **of_rank_1},
    ]
    loop._meter = meter = StepMeter(lambda phase, step: started.append((phase, step)))
    values: Values = {
        **dict.fromkeys(ReshardReport.__dataclass_fields__, 0),
        "direction": "train->infer",
    }
    meter.begin(3)
    for seconds, received, peak in ((0.5, 100, 7), (0.25, 20, 9)):
        numbers = {
            "seconds": seconds,
            "bytes_received": received,
            "bytes_least": received,
            "peak_bytes": peak,
        }
        meter.count(ReshardReport(**{**values, "seconds_by_phase": {}, **numbers}))
        with meter.phase("update"):
            pass
    assert started == [("update", 3)] * 2
    row = meter.take(worker)
    assert (row["bytes_received"], row["bytes_least"], row["peak_bytes"]) == (125, 124, 9)
    assert (row["reshard_seconds"], row["update_seconds"] > 0) == (1.0, True)
    assert row["rss_bytes"] > 10_000_000
    more = loop.finish({"step": 3, **row}, lambda worker: {"accuracy": 1})
    assert (more["accuracy"], more["evaluate_seconds"] > 0, more["seconds"] > row["seconds"]) == (
        1.0,
        True,
        True,
    )
    assert (more["bytes_received"], more["peak_bytes"], more["update_seconds"]) == (
        130,
        9,
        row["update_seconds"],
    )
    assert combine_ranks([row, row], are_totals=True)["bytes_received"] == 125


def test_the_documentation_has_every_option() -> None:
    page = (REPO_ROOT / "docs" / "rl.md").read_text()
    options = {*GrpoConfig.model_fields, *PpoConfig.model_fields}
    assert [name for name in options if f"`{name}`" not in page] == []
