"""Conversations with a real server and two ranks: each goes on by itself, and over publishes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hybrid_engine import ActorHybridWorker, Completion, Sampling
from hybrid_engine.rl import GrpoConfig, converse, train
from hybrid_engine.rl.conversations import Conversations
from tests.harness.launch import Outcomes, Ranks
from tests.harness.values import Values
from tests.harness.vllm_server import FILLED, PLAIN, serving
from tests.hybrid_engine.serving.test_servers import config_of, train_step, write_model

LENGTH = 64
PROMPTS = [[5, 3, 4], [9, 3, 4, 6], [5, 3, 4]]
SAMPLING = Sampling(n=2, max_tokens=40, seed=11)
TURN = 6
"""Maximum number of tokens of an answer."""
ACTOR = {"tensor_model_parallel_size": 2, "seq_length": LENGTH, "micro_batch_size": 2}
Reply = Callable[[Completion], Awaitable[list[int] | None]]


def worker_of(model: str, url: str) -> ActorHybridWorker:
    generate = {"release_weights": False, "server_max_lag": 4, "max_model_len": LENGTH}
    return ActorHybridWorker(config_of(model, [url], ACTOR, **generate))


def replying(turns: int, reply: list[int]) -> Callable[[Any], Reply]:
    """Build an environment that replies to all answers but the last of `turns`."""

    def environment(_prompt: Any) -> Reply:
        left = turns - 1

        async def respond(_answer: Completion) -> list[int] | None:
            nonlocal left
            left -= 1
            return reply if left >= 0 else None

        return respond

    return environment


def figures_of(groups: Any) -> list[list[Any]]:
    return [
        [(talk.token_ids, talk.is_drawn, talk.logprobs, talk.versions, len(talk.turns)) for talk in group]
        for group in groups
    ]


def hold(model: str, url: str) -> Values:
    """Converse in several ways; on both ranks."""
    results: Values = {}
    with worker_of(model, url) as worker:
        with worker.rollout_context():
            environment = replying(3, [7, 8])
            for name in ("first", "again"):
                groups = converse(worker, PROMPTS, SAMPLING, environment, max_tokens_per_turn=TURN)
                results[name] = figures_of(groups)
            results["held"] = [[len(talk.messages), talk.environment is not None] for group in groups for talk in group]
            sampling = Sampling(max_tokens=40)
            groups = converse(worker, PROMPTS[:2], sampling, one_for_another(), max_tokens_per_turn=TURN)
            results["waiting"] = figures_of(groups)
            gate = Gate(num_conversations=2)
            begun = Conversations(
                worker, PROMPTS[:1], SAMPLING, gate.environment, max_tokens_per_turn=TURN, goes_on=True
            )
            if worker.rank == 0:
                assert gate.are_answered.wait(60)
        with worker.train_context():
            train_step(worker, 0)
        with worker.rollout_context():
            gate.is_open.set()
            results["over a publish"] = figures_of(begun.collect())
            results["version"] = worker.train.version
    return results


def one_for_another() -> Callable[[Any], Reply]:
    """Build an environment whose first conversation gets its reply when the second had three answers."""
    is_ready = asyncio.Event()
    num_made = 0

    def environment(_prompt: Any) -> Reply:
        nonlocal num_made
        number = num_made
        num_made += 1
        answers: list[Completion] = []

        async def respond(answer: Completion) -> list[int] | None:
            answers.append(answer)
            if number == 0:
                await is_ready.wait()
                return None
            if len(answers) == 3:
                is_ready.set()
                return None
            return [7]

        return respond

    return environment


class Gate:
    """Environment that holds back its replies until it is opened."""

    def __init__(self, num_conversations: int) -> None:
        self.are_answered = threading.Event()
        self.is_open = threading.Event()
        self._num_waiting = num_conversations

    def environment(self, _prompt: Any) -> Reply:
        num_answers = 0

        async def respond(_answer: Completion) -> list[int] | None:
            nonlocal num_answers
            num_answers += 1
            if num_answers > 1:
                return None
            self._num_waiting -= 1
            if self._num_waiting == 0:
                self.are_answered.set()
            while not self.is_open.is_set():
                await asyncio.sleep(0.02)
            return [7]

        return respond


def learn(model: str, url: str, out: Path) -> list[Values]:
    def reward(_prompt: Any, conversation: Any) -> float:
        assert conversation.environment is not None
        return sum(token % 2 for token in conversation.token_ids) / 4

    config = GrpoConfig(
        **{"steps": 4, "prompts_per_step": 2, "samples_per_prompt": 2, "max_tokens": 40, "learning_rate": 3e-3},
        **{"epochs": 1, "minibatches": 2, "save_every": 2, "max_staleness": 1, "max_tokens_per_turn": TURN},
    )
    with worker_of(model, url) as worker:
        rows = train(worker, PROMPTS, reward, config, out=out, environment=replying(3, [7, 8]))
    with worker_of(model, url) as worker:
        config = config.model_copy(update={"steps": 5})
        rows += train(worker, PROMPTS, reward, config, out=out, environment=replying(3, [7, 8]))
    return rows


@pytest.fixture(scope="module")
def outcomes(engines: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcomes]:
    directory = tmp_path_factory.mktemp("served")
    model = write_model(directory / "model", "qwen2", max_position_embeddings=LENGTH)
    # Requests compute prompts in parts.
    sizes = {"--max-model-len": LENGTH, "--max-num-seqs": 8, "--max-num-batched-tokens": 8}
    arguments = [str(part) for size in sizes.items() for part in size]
    with serving(model, directory / "server", *FILLED, *PLAIN, *arguments) as served:
        calls: Values = {
            "hold": (hold, (model, served.url)),
            "learn": (learn, (model, served.url, directory / "run")),
        }
        yield engines.launch_in_turn(2, calls, timeout=400)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_each_conversation_goes_on_by_itself(outcomes: Outcomes) -> None:
    """All ranks get the same turns; equal prompts differ, and the same seed repeats them."""
    results, received = outcomes["hold"]
    for name in ("first", "again", "waiting", "over a publish"):
        assert results[name] == received[name]
    assert results["first"] == results["again"]
    assert results["held"] == [[0, True]] * 6
    assert received["held"] == [[0, False]] * 6
    talks = [talk for group in results["first"] for talk in group]
    assert len({token_ids for token_ids, *_ in talks}) == 6
    for token_ids, is_drawn, logprobs, versions, num_turns in talks:
        assert num_turns == 3
        assert len(token_ids) == len(is_drawn) <= SAMPLING.max_tokens
        assert len(logprobs) == len(versions) == sum(is_drawn)
        assert is_drawn.count(False) == 4
    # The first had to wait for the third answer of the second.
    assert [group[0][4] for group in results["waiting"]] == [1, 3]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_conversations_go_on_over_a_publish(outcomes: Outcomes) -> None:
    results, _ = outcomes["hold"]
    versions = [set(talk[3]) for talk in results["over a publish"][0]]
    assert versions == [{0, results["version"]}] * 2


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_conversations_are_held_ahead(outcomes: Outcomes) -> None:
    """A resumed run holds those of the next step again."""
    rows, received = outcomes["learn"]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert [row["staleness_max"] for row in rows] == [0, 1, 1, 1, 0]
    assert all(row["turns"] == 3 for row in rows)
    assert all(0 <= row["generation_wait_seconds"] < 400 for row in rows)
    assert [row["loss"] for row in rows] == [row["loss"] for row in received]
