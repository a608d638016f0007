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
from tests.harness.launch import of_all_ranks, on_engines
from tests.harness.values import Values
from tests.harness.vllm_server import FILLED, PLAIN, serving
from tests.hybrid_engine.serving.test_servers import config_of, train_step, write_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

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


def figures_of(groups: Any) -> list[Any]:
    """Return what all ranks receive."""
    return [
        (talk.token_ids, talk.is_drawn, talk.logprobs, talk.versions)
        for group in groups
        for talk in group
    ]


def one_for_another() -> Callable[[Any], Reply]:
    """Build an environment whose first conversation gets its reply when the second had three
    answers.
    """
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


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Yield a model, and the address of its server."""
    directory = tmp_path_factory.mktemp("served")
    model = write_model(directory / "model", "qwen2", max_position_embeddings=LENGTH)
    # Requests compute prompts in parts.
    sizes = {"--max-model-len": LENGTH, "--max-num-seqs": 8, "--max-num-batched-tokens": 8}
    arguments = [str(part) for size in sizes.items() for part in size]
    with serving(model, directory / "server", *FILLED, *PLAIN, *arguments) as server:
        yield model, server.url


@on_engines(2, timeout=400)
def test_each_conversation_goes_on_by_itself(served: tuple[str, str]) -> None:
    """All ranks get the same turns; equal prompts differ, and the same seed repeats them."""
    environment = replying(3, [7, 8])
    with worker_of(*served) as worker, worker.rollout_context():
        groups = converse(worker, PROMPTS, SAMPLING, environment, max_tokens_per_turn=TURN)
        assert converse(worker, PROMPTS, SAMPLING, environment, max_tokens_per_turn=TURN) == groups
        sampling = Sampling(max_tokens=40)
        waiting = converse(
            worker, PROMPTS[:2], sampling, one_for_another(), max_tokens_per_turn=TURN
        )
        received = of_all_ranks(figures_of([*groups, *waiting]))
    assert received[0] == received[1]
    talks = [talk for group in groups for talk in group]
    assert len({talk.token_ids for talk in talks}) == 6
    for talk in talks:
        assert (talk.messages, talk.environment is not None) == ((), worker.rank == 0)
        assert len(talk.turns) == 3
        assert len(talk.token_ids) == len(talk.is_drawn) <= 40
        assert len(talk.logprobs) == len(talk.versions) == sum(talk.is_drawn)
        assert talk.is_drawn.count(False) == 4
    # The first had to wait for the third answer of the second.
    assert [len(group[0].turns) for group in waiting] == [1, 3]


@on_engines(2, timeout=400)
def test_conversations_go_on_over_a_publish(served: tuple[str, str]) -> None:
    gate = Gate(num_conversations=2)
    with worker_of(*served) as worker:
        with worker.rollout_context():
            begun = Conversations(
                worker,
                PROMPTS[:1],
                SAMPLING,
                gate.environment,
                max_tokens_per_turn=TURN,
                goes_on=True,
            )
            if worker.rank == 0:
                assert gate.are_answered.wait(60)
        with worker.train_context():
            train_step(worker, 0)
        with worker.rollout_context():
            gate.is_open.set()
            groups = begun.collect()
        received = of_all_ranks(figures_of(groups))
    assert received[0] == received[1]
    assert [set(talk.versions) for talk in groups[0]] == [{0, worker.train.version}] * 2


@on_engines(2, timeout=400)
def test_conversations_are_held_ahead(served: tuple[str, str], tmp_path: Path) -> None:
    """A resumed run holds those of the next step again."""

    def reward(_prompt: Any, conversation: Any) -> float:
        assert conversation.environment is not None
        return sum(token % 2 for token in conversation.token_ids) / 4

    rows: list[Values] = []
    for steps in (4, 5):
        config = GrpoConfig(
            **{
                "steps": steps,
                "prompts_per_step": 2,
                "samples_per_prompt": 2,
                "max_tokens": 40,
                "learning_rate": 3e-3,
            },
            **{"minibatches": 2, "save_every": 2, "max_staleness": 1, "max_tokens_per_turn": TURN},
        )
        with worker_of(*served) as worker:
            rows += train(
                worker, PROMPTS, reward, config, out=tmp_path, environment=replying(3, [7, 8])
            )
            assert of_all_ranks(rows)[0] == rows
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    # On a busy host the server may begin with a step only after the update before it.
    assert {row["staleness_max"] for row in rows} == {0, 1}
    assert rows[0]["staleness_max"] == rows[4]["staleness_max"] == 0
    assert all(row["turns"] == 3 for row in rows)
    assert all(0 <= row["generation_wait_seconds"] < 400 for row in rows)
