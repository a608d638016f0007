"""The loop with both real engines: it learns, and a run that was interrupted goes on to the same rows."""

from __future__ import annotations

import json
from collections import Counter
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
from hybrid_engine.switch.states import SwitchHooks
from tests.harness.errors import has_violation, has_violations, violations_of
from tests.harness.launch import REPO_ROOT, Ranks
from tests.hybrid_engine.rl.stand_ins import stand_in
from tests.zoo import workers
from tests.zoo.tokenizers import save_characters

pytestmark = pytest.mark.timeout(900)

PROMPTS = [{"prompt": [first, 3, 4], "wanted": first % 2} for first in range(5, 11)]
CONFIG: dict[str, Any] = {
    **{"steps": 3, "prompts_per_step": 4, "samples_per_prompt": 4, "max_tokens": 6, "temperature": 0.8},
    **{"epochs": 2, "minibatches": 2, "learning_rate": 1e-2, "schedule": "cosine", "warmup_steps": 1},
    **{"kl_coefficient": 0.01, "importance_cap": 2.0, "clip_ratio_high": 0.3, "evaluate_every": 2, "save_every": 2},
}
IN_TURNS = {**CONFIG, "max_tokens_per_turn": 2}
OF_PPO = {**CONFIG, "critic_warmup_steps": 1, "critic_epochs": 2, "critic_learning_rate": 2e-2}


def reward(prompt: Mapping[str, Any], completion: Completion) -> float:
    return sum(token % 2 == prompt["wanted"] for token in completion.token_ids) / 6


def evaluate(worker: ActorHybridWorker) -> dict[str, float]:
    sampling = Sampling(temperature=0.0, max_tokens=6, ignore_eos=True)
    ((one,),) = converse(worker, [[5, 6]], sampling, goes_on, max_tokens_per_turn=2)
    return {"last_token": float(one.turns[1].token_ids[0])}


def goes_on(prompt: Any) -> Any:
    replies = iter([[7, 8]])
    return lambda answer: next(replies, None)


def interrupted(prompt: Mapping[str, Any], completion: Completion) -> float:
    interrupted.calls += 1
    return reward(prompt, completion) if interrupted.calls <= 16 else float("nan")


interrupted.calls = 0


def runs(model: Path, out: Path, algorithm: type[GrpoConfig | PpoConfig], settings: dict[str, Any]) -> dict[str, Any]:
    """Rows of a whole run, of one that is stopped after step 1 and whose reward fails in step 3, and of the same call
    again."""
    actor, critic = {"tensor_model_parallel_size": 2, "micro_batch_size": 4}, {"critic_config": {}}
    with workers.build_worker(model, actor, **(critic if algorithm is PpoConfig else {})) as worker:
        worker.save_checkpoint(out / "start")
        reports: list[ReshardReport] = []
        worker.on_reshard_end(reports.append)
        hooks = list(worker.sharding._end_hooks)

        def run(
            name: str, reward: Any, stops: bool = False, begins: bool = True, **changed: Any
        ) -> list[dict[str, Any]]:
            if begins:
                with worker.train_context():
                    worker.load_checkpoint(out / "start")
            config, places = algorithm(**{**settings, **changed}), {"out": out / name, "evaluate": evaluate}
            if config.max_tokens_per_turn:
                places["environment"] = goes_on
            done: list[dict[str, Any]] = []
            return train(
                worker, PROMPTS, reward, config, **places, on_step=done.append, should_stop=lambda: stops and bool(done)
            )

        found: dict[str, Any] = {"whole": run("whole", reward), "stopped": run("resumed", reward, stops=True)}
        found["model"] = (out / "resumed" / "model").exists()
        for name, place, failing, changed in (
            ("failed", "resumed", interrupted, {}),
            ("same worker", "resumed", reward, {"begins": False}),
            ("refused", "resumed", reward, {"seed": 1}),
            ("rows", "rows", reward, {"minibatches": 3}),
        ):
            with pytest.raises(HybridEngineError) as caught:
                run(place, failing, **changed)
            found[name] = violations_of(caught.value), str(caught.value)
        found["resumed"] = run("resumed", reward)
        found["again"] = run("resumed", reward)
        found["hooks"] = worker.sharding._end_hooks == hooks
        found["talk"] = talk(worker, algorithm)
    return found


def asks_twice(prompt: Any) -> Any:
    replies = iter([[{"role": "tool", "content": "7"}, {"role": "user", "content": "?"}], "so:"])
    return lambda answer: next(replies, None)


def talk(worker: ActorHybridWorker, algorithm: type[GrpoConfig | PpoConfig]) -> dict[str, Any]:
    """Two steps of conversations: what vLLM was given and drew, what was rewarded (rank 0), what was trained on."""
    found: dict[str, Any] = {"answered": [], "rewarded": [], "batches": []}
    generate, update = worker.inference.llm.generate, worker.update

    def answered(*asked: Any, **how: Any) -> Any:
        outputs = generate(*asked, **how)
        found["answered"] += [
            (tuple(each.prompt_token_ids), tuple(one.token_ids)) for each in outputs for one in each.outputs
        ]
        return outputs

    def trained(batch: Any, loss: Any) -> dict[str, float]:
        found["batches"].append(dict(batch))
        return update(batch, loss)

    def reward(prompt: Any, conversation: Conversation) -> float:
        found["rewarded"].append([(one.prompt_token_ids, one.token_ids, one.logprobs) for one in conversation.turns])
        return sum(token % 3 for turn in conversation.turns for token in turn.token_ids)

    settings = {"steps": 2, "prompts_per_step": 2, "samples_per_prompt": 4, "max_tokens": 26, "temperature": 0.8}
    config = algorithm(**settings, minibatches=2, stop_token_ids=list(range(0, 100, 2)))
    chats = [{"prompt": [{"role": "user", "content": text}]} for text in ("x", "yz")]
    with (
        mock.patch.object(worker.inference.llm, "generate", answered),
        mock.patch.object(worker, "update", trained),
    ):
        found["rows"] = train(
            worker, chats, reward, config, environment=asks_twice, chat_template_kwargs={"suffix": ""}
        )
    check_faults(worker, chats)
    return found


def check_faults(worker: ActorHybridWorker, chats: list[Any]) -> None:
    """What fails on one rank is raised on both, and the next call is as if it had not been."""

    def failing(prompt: Any) -> Any:
        reply = asks_twice(prompt)
        return lambda answer: reply(answer) if len(answer.prompt_token_ids) < 12 else 1 / 0

    sampling = Sampling(n=2, max_tokens=26, seed=1, stop_token_ids=list(range(0, 100, 2)))
    of_one_rank = Sampling(max_tokens=None) if worker.rank else sampling
    with worker.rollout_context():
        before = converse(worker, chats, sampling, asks_twice)
        with pytest.raises(HybridEngineError, match="max_tokens") as unbounded:
            converse(worker, chats, of_one_rank, asks_twice)
        with pytest.raises(HybridEngineError, match=r"ZeroDivisionError for prompt \d, completion \d") as failed:
            converse(worker, chats, sampling, failing)
        # The other rank raises RemoteError, which has the text of this one's error.
        codes = [violations_of(error.value) for error in (unbounded, failed)]
        if worker.rank:
            assert codes == [[("sampling", "unbounded-sampling")], []]
        else:
            assert codes == [[], [("environment", "callback-failed")]]
        assert converse(worker, chats, sampling, asks_twice) == before


def check_talk(*of_ranks: dict[str, Any]) -> None:
    """What is trained on is what vLLM was given and drew, and nothing else counts."""
    first, second = of_ranks
    answered, conversations = Counter(first["answered"] + second["answered"]), first["rewarded"]
    turns = Counter((given, drawn) for turns in conversations for given, drawn, _ in turns)
    assert answered.keys() == turns.keys(), "what vLLM itself was given and drew, each replica its share"
    assert max(len(turns) for turns in conversations) == 3
    assert second["rewarded"] == []
    whole = {}
    for turns in conversations:
        given, drawn, _ = turns[-1]
        columns = [
            (len(given) + at - 1, token, logprob)
            for given, drawn, logprobs in turns
            for at, (token, logprob) in enumerate(zip(drawn, logprobs, strict=True))
        ]
        whole[(*given, *drawn)] = columns
    num_rows = 0
    for batch in first["batches"]:
        rows = torch.cat([batch["tokens"][:, :1], batch["labels"]], dim=1).tolist()
        for number, row in enumerate(rows):
            (columns,) = [
                columns
                for token_ids, columns in whole.items()
                if tuple(row[: len(token_ids)]) == token_ids and not any(row[len(token_ids) :])
            ]
            learned = batch["mask"][number].nonzero().flatten().tolist()
            assert learned == [column for column, _, _ in columns]
            assert [row[column + 1] for column in learned] == [token for _, token, _ in columns]
            logprobs = torch.tensor([logprob for _, _, logprob in columns])
            for name in ("sampled_log_probs", "old_log_probs"):
                torch.testing.assert_close(batch[name][number, learned], logprobs, atol=1e-4, rtol=0)
            assert not batch["weights"][number][batch["mask"][number] == 0].any()
            num_rows += 1
    assert num_rows == len(conversations) == 16
    for row in first["rows"]:
        assert row["logprob_diff"] < 1e-4
        assert 1 <= row["turns"] <= 3
    assert first["rows"] == second["rows"]


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "settings"), [(GrpoConfig, IN_TURNS), (PpoConfig, OF_PPO)])
def test_a_resumed_run_has_the_rows_of_one_without_interruption(
    engines: Ranks, tmp_path: Path, algorithm: type[GrpoConfig | PpoConfig], settings: dict[str, Any]
) -> None:
    model = workers.write_model(tmp_path / "model", "qwen3", num_hidden_layers=2)
    save_characters(model)
    first, second = engines.launch(runs, 2, model, tmp_path, algorithm, settings)
    assert first["whole"] == second["whole"]
    assert ([row["step"] for row in first["stopped"]], first["model"]) == ([1], False)
    whole, resumed = (rows_of(tmp_path / name) for name in ("whole", "resumed"))
    assert [row["step"] for row in whole] == [1, 2, 3]
    assert whole == resumed
    assert [row["step"] for row in first["resumed"]] == [3], "step 2 had a checkpoint"
    assert first["again"] == []
    assert first["hooks"], "none of a run that has ended, or failed"
    check_talk(first["talk"], second["talk"])
    trained = whole
    if algorithm is PpoConfig:
        trained = whole[1:]
        assert "policy_loss" not in whole[0], "only the critic learns at first"
        assert whole[0]["explained_variance"] == 0, "its head begins with zeros"
        assert [row["weight_version"] for row in whole] == [whole[0]["weight_version"] + more for more in (0, 4, 8)]
        assert all(row["value_loss"] > 0 and row["explained_variance"] <= 1 for row in whole)
        assert whole[2]["value_loss"] < whole[0]["value_loss"]
    for row in whole:
        assert 0 < row["bytes_received"] == row["bytes_least"]
        assert row["logprob_diff_mean"] <= row["logprob_diff"] < 1e-4
    for row in trained:
        assert row["grad_norm"] > 0
        assert row["importance"] == pytest.approx(1, abs=1e-3)
    kl = [row["kl"] for row in whole]
    assert kl[: 4 - len(trained)] == pytest.approx([0] * (4 - len(trained)), abs=1e-9)
    assert all(0 < value < 5 for value in kl[4 - len(trained) :])
    assert [row["learning_rate"] for row in whole] == pytest.approx([0.01, 0.0075, 0.0025])
    assert ["last_token" in row for row in whole] == [False, True, True]
    assert all(row["turns"] > 1.5 for row in whole if "max_tokens_per_turn" in settings)
    assert whole[0]["bytes_received"] < whole[1]["bytes_received"], "the evaluation has weights of its own step"
    assert first["refused"][0] == [(f"{algorithm.__name__}.seed", "differs-from-run")]
    assert (f"{algorithm.__name__}.minibatches", "not-divisible") in first["rows"][0]
    for of_rank in (first, second):
        listed = of_rank["same worker"][0]
        assert listed == [("model", "different-reference")], "it has the weights of step 2, not of step 0"
    assert set(first["failed"][0]) == {("reward", "invalid-reward")}
    for of_rank in (first, second):
        assert "nan for prompt 5, completion 0" in of_rank["failed"][1], "rank 1 has the text of rank 0's error"
    assert [path.name for path in (tmp_path / "resumed" / "checkpoints").iterdir()] == ["step-000003"]
    assert (tmp_path / "resumed" / "model" / "config.json").exists()


def rows_of(out: Path) -> list[dict[str, float]]:
    """The rows written, without what the clock and the memory say."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    measured = ("seconds", "rss_bytes", "peak_bytes")
    return [{key: value for key, value in row.items() if not key.endswith(measured)} for row in rows]


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
    assert [config.learning_rate_share(step) for step in range(1, 6)] == pytest.approx(rates)


def test_a_configuration_names_everything_that_is_wrong() -> None:
    refused = has_violations(
        ("GrpoConfig.samples_per_prompt", "wrong-value"),
        *((f"GrpoConfig.{name}", "unknown-key") for name in ("clipratio", "beta", "max_new_tokens")),
    )
    with pytest.raises(ConfigError, check=refused) as caught:
        GrpoConfig(samples_per_prompt=1, clipratio=0.1, beta=0.1, max_new_tokens=8)
    remedies = {violation.key.removeprefix("GrpoConfig."): violation.remedy for violation in caught.value.findings}
    for name, suggestion in (("clipratio", "clip_ratio"), ("beta", "kl_coefficient"), ("max_new_tokens", "max_tokens")):
        assert suggestion in remedies[name]


def test_every_name_of_another_framework_stands_for_keys_that_exist() -> None:
    known = {path[-1] for section in (HybridConfig, GrpoConfig) for path in paths_of(section)}
    assert set().union(*ALIASES.values()) <= known


def test_what_a_run_does_not_take_is_named() -> None:
    with pytest.raises(ConfigError, check=has_violation("enviroment", "unknown-argument", "environment?")):
        Loop(stand_in(), "ab", mock.Mock(), GrpoConfig(), enviroment=mock.Mock())  # type: ignore[call-arg]


def test_a_bound_of_turns_is_for_conversations() -> None:
    worker, config = stand_in(), GrpoConfig(max_tokens_per_turn=5)
    needed = has_violation("GrpoConfig.max_tokens_per_turn", "needs-environment", "5", "`environment`")
    with pytest.raises(ConfigError, check=needed):
        Loop(worker, "ab", mock.Mock(), config)
    loop = Loop(worker, "ab", mock.Mock(), config, environment=mock.Mock())
    with mock.patch("hybrid_engine.rl.loop.converse") as converse:
        loop._draw([7], ["a"], Sampling())
    assert converse.call_args.kwargs == {"max_tokens_per_turn": 5, "names": [7]}


def without_engines(prompts: Any = "abcde", **settings: Any) -> Loop:
    return Loop(stand_in(), prompts, mock.Mock(), GrpoConfig(**settings))


@pytest.mark.slow  # imports vLLM
def test_every_step_of_every_run_samples_with_a_seed_of_its_own() -> None:
    seeds = [without_engines(seed=seed)._sampling(step).seed for seed in (0, 1) for step in range(1, 6)]
    assert len(set(seeds)) == 10


def test_each_pass_has_every_prompt_once_in_an_order_of_its_own() -> None:
    loop = without_engines(prompts_per_step=2)
    drawn = [prompt for step in range(1, 11) for prompt in loop._prompts_of(step)[1]]
    passes = {"".join(drawn[start : start + 5]) for start in range(0, 20, 5)}
    assert {"".join(sorted(one)) for one in passes} == {"abcde"}
    assert all("abcde"[name] == prompt for name, prompt in zip(*loop._prompts_of(3), strict=True))
    assert len(passes) > 1


def test_a_function_gives_the_prompts_of_a_step_and_no_more() -> None:
    loop = without_engines(lambda step: [step] * min(step, 2), prompts_per_step=2)
    assert loop._prompts_of(7) == (range(2), [7, 7])
    with pytest.raises(ArgumentError, check=has_violation("prompts", "wrong-length", "1 for step 1", "Return 2")):
        loop._prompts_of(1)


def test_prompts_without_room_are_refused_before_anything_is_drawn() -> None:
    """In a row of seq_length 300 are 301 tokens, whose first no token is before."""
    without_engines(["a" * 45], max_tokens=256)
    numbers = ("2 of 3", "prompts[2]: 47 tokens", "256 of max_tokens", "301")
    with pytest.raises(ConfigError, check=has_violation("prompts", "prompts-too-long", *numbers)):
        without_engines(["a", "a" * 46, "a" * 47], max_tokens=256)
    loop = without_engines(lambda step: ["a" * 45 * step], prompts_per_step=1, max_tokens=256)
    with pytest.raises(ConfigError, check=has_violation("prompts", "prompts-too-long", "1 of 1")):
        loop.learn(2)
    assert not loop.worker.rollout_context.called


def test_advantages_and_loss_may_be_functions_of_the_caller() -> None:
    rewards, groups = torch.tensor([[0.0, 3.0]]), [[mock.Mock(), mock.Mock()]]
    config = GrpoConfig(samples_per_prompt=2)

    def loop_with(advantages: Any) -> Loop:
        return Loop(stand_in(), "ab", mock.Mock(), config, loss=mock.sentinel.loss, advantages=advantages)

    received: list[Any] = []

    def ranks(*arguments: Any) -> list[list[float]]:
        received.extend(arguments)
        return [[-1.0, 1.0]]

    loop = loop_with(ranks)
    assert loop._loss is mock.sentinel.loss
    assert loop._advantages_of(config, rewards, groups).tolist() == [[-1.0, 1.0]]
    assert received == [rewards, groups]
    for wrong, words in ((torch.zeros(2), "(2,)"), (torch.tensor([[0.0, torch.nan]]), "finite")):
        refused = has_violation("advantages", "wrong-advantages", words)
        with pytest.raises(ArgumentError, check=refused):
            loop_with(lambda *_, wrong=wrong: wrong)._advantages_of(config, rewards, groups)
    worker = stand_in()
    worker.config.critic_config.micro_batch_size = 1
    with pytest.raises(ConfigError, check=has_violation("advantages", "conflicting-keys")):
        Loop(worker, "ab", mock.Mock(), PpoConfig(), advantages=ranks)


def test_settings_of_a_loss_reach_it() -> None:
    config = GrpoConfig(
        clip_ratio=0.1,
        clip_ratio_high=0.3,
        ratio="sequence",
        clipping="cispo",
        dual_clip=3.0,
        kl_coefficient=0.5,
        kl_estimator="k2",
        importance_cap=2.0,
        entropy_coefficient=0.25,
    )
    with mock.patch("hybrid_engine.rl.config.policy_loss") as policy_loss:
        config.policy_loss()
    assert policy_loss.call_args == mock.call(
        0.1,
        0.5,
        clip_ratio_high=0.3,
        importance_cap=2.0,
        ratio_of="sequence",
        clipping="cispo",
        dual_clip=3.0,
        kl_estimator="k2",
        entropy_coefficient=0.25,
    )


@pytest.mark.parametrize(("value", "word", "recorded"), [(True, "group", True), (False, "none", False)])
def test_a_flag_of_older_runs_names_a_scale(value: bool, word: str, recorded: bool) -> None:
    config = GrpoConfig(scale_rewards=value)  # type: ignore[arg-type]
    assert config.scale_rewards == word
    assert config.shared()["GrpoConfig"]["scale_rewards"] is recorded
    assert GrpoConfig(scale_rewards="batch").shared()["GrpoConfig"]["scale_rewards"] == "batch"


def test_callbacks_that_are_not_awaited_are_refused() -> None:
    async def late(*_: Any) -> Any: ...

    given: Any = dict.fromkeys(("evaluate", "on_step", "should_stop", "loss", "advantages"), late)
    named = [(name, "coroutine-function") for name in ("prompts", *given)]
    refused = has_violations(("configuration", "unreadable-file"), *named)
    with pytest.raises(ConfigError, check=refused):
        train("no such configuration", late, late, GrpoConfig(), **given)  # type: ignore[arg-type]


def test_figures_of_an_evaluation_take_no_column() -> None:
    loop = without_engines()
    loop._meter.take = lambda _: {"seconds": 2.0, "rss_bytes": 1.0}  # type: ignore[method-assign]
    row = loop.finish({"reward": 0.5}, lambda _: {"reward": 0.25, "seconds": 7, "accuracy": torch.tensor(0.75)})
    figures = {"held_out_reward": 0.25, "held_out_seconds": 7, "accuracy": 0.75}
    assert row == {"reward": 0.5, "seconds": 2.0, "rss_bytes": 1.0, **figures}
    for figures, refused in (
        (None, has_violation("evaluate", "not-a-mapping", "None")),
        ({"accuracy": "high"}, has_violation("evaluate", "not-a-number", "accuracy is 'high'")),
    ):
        with pytest.raises(ArgumentError, check=refused):
            loop.finish({}, lambda _, figures=figures: figures)  # type: ignore[misc]


def test_a_closed_loop_hears_of_no_more_switches() -> None:
    worker, hooks, prompts = stand_in(sharding=SwitchHooks()), [], ["a"]
    worker.on_reshard_end = worker.sharding.on_reshard_end
    worker.sharding.on_reshard_end(hooks.append)
    first, second = (Loop(worker, prompts, mock.Mock(), GrpoConfig()) for _ in range(2))
    for _ in range(2):
        first.close()
    worker.sharding._call_end_hooks("a report")
    assert (hooks, first._meter.switches, second._meter.switches) == (["a report"], [], ["a report"])
    del worker.sharding
    second.close()


def test_figures_of_ranks_and_of_parts_of_a_step_are_combined() -> None:
    loop, started = without_engines(), []
    worker = loop.worker
    worker.reports_cover_all_ranks = False
    other = {"bytes_received": 5, "bytes_least": 4, "peak_bytes": 3, "rss_bytes": 1, "reshard_seconds": 1.0}
    worker.job.agreement.gather = lambda own, *_: [own, {**dict.fromkeys(own, 0), **other}]
    loop._meter = meter = StepMeter(lambda phase, step: started.append((phase, step)))
    values: dict[str, Any] = {**dict.fromkeys(ReshardReport.__dataclass_fields__, 0), "direction": "train->infer"}
    meter.begin(3)
    for seconds, received, peak in ((0.5, 100, 7), (0.25, 20, 9)):
        numbers = {"seconds": seconds, "bytes_received": received, "bytes_least": received, "peak_bytes": peak}
        meter.switches.append(ReshardReport(**{**values, "seconds_by_phase": {}, **numbers}))
        with meter.phase("update"):
            pass
    assert started == [("update", 3)] * 2
    row = meter.take(worker)
    assert (row["bytes_received"], row["bytes_least"], row["peak_bytes"]) == (125, 124, 9)
    assert (row["reshard_seconds"], row["update_seconds"] > 0) == (1.0, True)
    assert row["rss_bytes"] > 10_000_000
    more = loop.finish({"step": 3, **row}, lambda worker: {"accuracy": 1})
    assert (more["accuracy"], more["evaluate_seconds"] > 0, more["seconds"] > row["seconds"]) == (1.0, True, True)
    assert (more["bytes_received"], more["peak_bytes"], more["update_seconds"]) == (130, 9, row["update_seconds"])
    assert combine_ranks([row, row], are_totals=True)["bytes_received"] == 125


def test_the_page_has_every_option() -> None:
    page = (REPO_ROOT / "docs" / "rl.md").read_text()
    options = {*GrpoConfig.model_fields, *PpoConfig.model_fields}
    assert [name for name in options if f"`{name}`" not in page] == []
