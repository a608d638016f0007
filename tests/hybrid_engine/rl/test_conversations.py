"""Conversations with a stand-in for vLLM: tokens of each turn, and batches from them.

test_loop.py has real engines.
"""

from __future__ import annotations

import asyncio
import json
import struct
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_engine import Completion, Sampling, build_batch, pack
from hybrid_engine.backends.vllm.completing import CompletingEngine, Completions
from hybrid_engine.backends.vllm.engine_settings import RoutedExperts
from hybrid_engine.backends.vllm.prompts import (
    ModelTokenizer,
    check_token_ids,
    rendering_of,
    token_ids_of,
)
from hybrid_engine.backends.vllm.requests import Request, sampling_params
from hybrid_engine.errors import ArgumentError
from hybrid_engine.layouts.parallelism import InferenceParallelism
from hybrid_engine.messages import decode
from hybrid_engine.rl import Conversation, converse
from hybrid_engine.rl.losses import align_log_probs
from tests.harness.errors import has_violation, violated
from tests.hybrid_engine.rl.stand_ins import ALONE
from tests.zoo.tokenizers import save_characters

pytestmark = pytest.mark.slow  # imports vLLM's settings and transformers

CHATML = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}~\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
END = "~"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    """A character is a token; templates end a turn with a drawn `~` and a line break."""
    path = tmp_path_factory.mktemp("model")
    save_characters(path, CHATML)
    return ModelTokenizer(str(path))


# -- rows of a batch --

parts = st.lists(st.integers(1, 100), min_size=1, max_size=4)


@st.composite
def conversations(draw: st.DrawFn) -> Conversation:
    context = draw(parts)
    turns = []
    for number in range(draw(st.integers(1, 4))):
        context = [*context, *(draw(parts) if number else [])]
        drawn = draw(parts)
        logprobs = tuple(-float(token) for token in drawn)
        turns.append(
            Completion(
                tuple(drawn), logprobs, "stop", prompt_token_ids=tuple(context), temperature=0.7
            )
        )
        context = [*context, *drawn]
    return Conversation(tuple(turns))


@given(st.lists(conversations(), min_size=1, max_size=3))
def test_batches_contain_all_tokens_and_learn_drawn_ones(sampled: list[Conversation]) -> None:
    length = 40
    prompts = [conversation.prompt_token_ids for conversation in sampled]
    batch = build_batch(prompts, sampled, length)
    packed = pack(prompts, sampled, length)
    log_probs = align_log_probs([conversation.logprobs for conversation in sampled], batch)
    masks = packed.unpack(packed.batch["mask"])
    for row, (conversation, mask) in enumerate(zip(sampled, masks, strict=True)):
        last = conversation.turns[-1]
        whole = [*last.prompt_token_ids, *last.token_ids]
        assert [*conversation.prompt_token_ids, *conversation.token_ids] == whole
        assert [*batch["tokens"][row, :1].tolist(), *batch["labels"][row].tolist()][
            : len(whole)
        ] == whole
        columns = batch["mask"][row].bool()
        expected = [token for turn in conversation.turns for token in turn.token_ids]
        assert batch["labels"][row][columns].tolist() == expected
        assert (-log_probs[row][columns]).tolist() == expected
        assert mask.tolist() == batch["mask"][row, : len(whole) - 1].tolist()
    assert batch["temperature"].tolist() == pytest.approx([0.7] * len(sampled))


def test_experts_are_those_of_the_turn_that_drew_a_token() -> None:
    turns = []
    context: list[int] = []
    for number in range(3):
        context += [1, 2]
        # all tokens so far, but not the last one that is drawn
        routed = RoutedExperts(struct.pack("h", number) * (len(context) + 2), 1, 1)
        turns.append(
            Completion(
                (3, 4, 5), (), "stop", prompt_token_ids=tuple(context), routed_experts=routed
            )
        )
        context += [3, 4, 5]
    conversation = Conversation(tuple(turns))
    batch = build_batch([conversation.prompt_token_ids], [conversation], 16)
    expected = [0] * 4 + [1] * 5 + [2] * 5
    assert batch["routed_experts"].flatten().tolist() == expected + [-1] * 2
    unknown = Conversation((*turns[:-1], replace(turns[-1], routed_experts=None)))
    assert unknown.routed_experts is None


def test_turns_that_do_not_continue_are_refused() -> None:
    first = Completion((4, 5), (), "stop", prompt_token_ids=(1, 2))
    with pytest.raises(ValueError, match="prompt of turn 1"):
        Conversation((first, Completion((7,), (), "stop", prompt_token_ids=(1, 2, 4, 6))))
    with pytest.raises(ValueError, match=r"turn 1 .* 0\.5, .* 1\.0"):
        Conversation(
            (first, Completion((7,), (), "stop", prompt_token_ids=(1, 2, 4, 5), temperature=0.5))
        )


# -- replies --

texts = st.text("abc <>:", max_size=5)


@given(st.lists(st.tuples(texts, texts), min_size=1, max_size=3), st.booleans())
def test_a_reply_equals_the_template_after_an_answer(
    tokenizer: ModelTokenizer, turns: list[tuple[str, str]], is_ended: bool
) -> None:
    """The oracle is the whole chat encoded at once, since a token is a character."""
    rendering = rendering_of(None, tokenizer)
    chat = [{"role": "user", "content": "?"}]
    token_ids = tokenizer.encode_chat(chat, rendering)
    for answer, result in turns:
        (drawn,) = (
            tokenizer.encode([answer + (END if is_ended else "")]) if answer or is_ended else [[]]
        )
        reply = [{"role": "tool", "content": result}, {"role": "user", "content": "!"}]
        token_ids += [*drawn, *tokenizer.encode_reply(chat, drawn, reply, rendering)]
        chat += [{"role": "assistant", "content": answer}, *reply]
    assert token_ids == tokenizer.encode_chat(chat, rendering)


BY_LINES = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] "
    "}}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.mark.parametrize(
    ("template", "answer", "expected"),
    [
        (CHATML, "a~", "\n<user>1~\n<assistant>"),
        (CHATML, "a", "~\n<user>1~\n<assistant>"),
        (CHATML, "a\n", "~\n<user>1~\n<assistant>"),
        (CHATML.replace("~", " ~"), "a~", "\n<user>1 ~\n<assistant>"),
        (CHATML.replace("~", " ~"), "a ~", "\n<user>1 ~\n<assistant>"),
        (CHATML.replace("~", " ~"), "a", " ~\n<user>1 ~\n<assistant>"),
        (CHATML.replace("~", "###"), "a###", "\n<user>1###\n<assistant>"),
        (CHATML.replace("~", "###"), "a#b", "###\n<user>1###\n<assistant>"),
        (BY_LINES, "a\nuser:", " 1\nassistant: "),
        (BY_LINES, "a", "\nuser: 1\nassistant: "),
        (BY_LINES, "au", "\nuser: 1\nassistant: "),
        (BY_LINES, "a\nuser: 1\nassistant: ", "\nuser: 1\nassistant: "),
    ],
)
def test_a_drawn_end_of_turn_is_not_repeated(
    tmp_path: Path,
    template: str,
    answer: str,
    expected: str,
) -> None:
    """Llama 2 has a space before its end token; a stop string can include the next role."""
    save_characters(tmp_path, template, eos_token=END)
    tokenizer = ModelTokenizer(str(tmp_path))
    chat = [{"role": "user", "content": "?"}]
    reply = [{"role": "user", "content": "1"}]
    token_ids = tokenizer.encode_reply(
        chat, tokenizer.encode([answer])[0], reply, rendering_of(None, tokenizer)
    )
    assert tokenizer.loaded.decode(token_ids) == expected


def test_a_template_without_answers_is_refused(tmp_path: Path) -> None:
    save_characters(
        tmp_path,
        "{% for message in messages if message['role'] == 'user' %}{{ "
        "message['content'] }}{% endfor %}",
    )
    tokenizer = ModelTokenizer(str(tmp_path))
    with pytest.raises(ValueError, match="leaves out an answer"):
        tokenizer.encode_reply(
            [{"role": "user", "content": "?"}], [5], [{"role": "user", "content": "!"}], {}
        )


# -- conversations with a stand-in --


class Answers(CompletingEngine):
    """Answers conversation 0 with "a", 1 with "b" ... and the end of a turn, or with `texts`;
    records its calls.
    """

    def __init__(self, tokenizer: ModelTokenizer, texts: Iterable[str]) -> None:
        super().__init__(ALONE, InferenceParallelism(1), tokenizer)
        self._texts = iter(texts)
        self.calls: list[list[Asked]] = []

    def params_of(self, sampling: Any) -> Any:
        return sampling_params(sampling)

    def check_prompts(self, prompts: Any, max_tokens: Any) -> None:
        check_token_ids(prompts, max_tokens, 1000, 102)

    def complete(self, requests: Sequence[Request]) -> Completions:
        from vllm import SamplingParams

        decoded = [
            Asked(request.prompt, decode(request.sampling, SamplingParams)) for request in requests
        ]
        self.calls.append(decoded)
        groups = []
        for request, (_, params) in zip(requests, decoded, strict=True):
            text = next(self._texts, "abcdefgh"[request.number])
            (drawn,) = self.tokenizer.encode([text + END], add_special_tokens=False)
            kept = tuple(drawn[: params.max_tokens])
            ending = "stop" if len(kept) == len(drawn) else "length"
            groups.append([Completion(kept, (-1.0,) * len(kept), ending)])
        return groups


class Asked(NamedTuple):
    """A request, decoded."""

    prompt: list[int]
    params: Any


class Engine:
    """The part of an engine that conversations use."""

    adapter = None
    job = ALONE
    rank = 0
    sharding = SimpleNamespace(require_drawing=bool)

    def __init__(self, tokenizer: ModelTokenizer, texts: Iterable[str] = ()) -> None:
        self.inference = Answers(tokenizer, texts)

    @property
    def calls(self) -> list[list[Asked]]:
        return self.inference.calls


CHATS = [
    {"prompt": [{"role": "user", "content": text}], "times": times}
    for text, times in (("x", 0), ("yz", 2))
]
CHAT: Any = CHATS[0]["prompt"]


def reply_times(prompt: Any) -> Callable[[Completion], Any]:
    """Build an environment that replies `prompt["times"]` times."""
    return answered_by(
        *({"role": "user", "content": str(number + 1)} for number in range(prompt["times"]))
    )


def answered_by(*replies: Any) -> Callable[[Completion], Any]:
    """Return a function that gives these replies, messages alone, and then None."""
    left = iter(replies)

    def reply(_answer: Completion) -> Any:
        value = next(left, None)
        return [value] if isinstance(value, dict) else value

    return reply


def held(engine: Any, environment: Any, prompts: Any = CHATS, **options: Any) -> list[Conversation]:
    """Return all conversations; `options` are of the sampling, and `max_tokens_per_turn`."""
    limit = options.pop("max_tokens_per_turn", None)
    sampling = options.pop("sampling", None) or Sampling(**options)
    groups = converse(engine, prompts, sampling, environment, max_tokens_per_turn=limit)
    return [conversation for group in groups for conversation in group]


def test_a_conversation_continues_from_the_drawn_tokens(tokenizer: ModelTokenizer) -> None:
    engine = Engine(tokenizer)
    *short, first, second = held(engine, reply_times, n=2, max_tokens=50, seed=3)
    assert [len(conversation.turns) for conversation in (*short, first, second)] == [1, 1, 3, 3]
    assert [message["content"] for message in second.messages] == ["yz", "d", "1", "d", "2", "d"]
    assert tokenizer.loaded.decode([*first.prompt_token_ids, *first.token_ids]) == (
        "<user>yz~\n<assistant>c~\n<user>1~\n<assistant>c~\n<user>2~\n<assistant>c~"
    )
    assert (first.text, first.finish_reason, first.is_cut) == ("c", "stop", False)
    assert [len(requests) for requests in engine.calls] == [4, 2, 2], (
        "ended conversations generate no more"
    )
    seeds = {params.seed for requests in engine.calls for _, params in requests}
    assert len(seeds) == 8, "one seed per turn"
    for conversation in (first, second):
        for requests, turn in zip(engine.calls, conversation.turns, strict=True):
            assert list(turn.prompt_token_ids) in [prompt for prompt, _ in requests]


@pytest.mark.parametrize("most", range(1, 45, 4))
def test_conversations_stay_within_max_tokens(tokenizer: ModelTokenizer, most: int) -> None:
    """The environment never ends the conversation."""
    engine = Engine(tokenizer)
    (conversation,) = held(
        engine, reply_times, [{**CHATS[0], "times": 1000}], max_tokens=most, min_tokens=1
    )
    assert len(conversation.token_ids) <= most
    assert conversation.finish_reason == "length"
    assert conversation.is_drawn[-1], "a reply without a following answer is dropped"
    assert conversation.is_cut == (conversation.turns[-1].finish_reason == "stop")
    for ((prompt, params),) in engine.calls:
        assert params.max_tokens == most - (len(prompt) - len(conversation.prompt_token_ids))


@pytest.mark.parametrize(
    "reply",
    [[7] * 2000, "x" * 2000, {"role": "user", "content": "x" * 2000}],
    ids=["token ids", "text", "messages"],
)
def test_a_reply_that_exceeds_the_model_ends_only_its_conversation(
    tokenizer: ModelTokenizer,
    reply: Any,
) -> None:
    def environment(prompt: Any) -> Callable[[Completion], Any]:
        return reply_times(prompt) if prompt["times"] else answered_by(reply)

    cut, other = held(Engine(tokenizer), environment, max_tokens=50)
    assert (cut.is_cut, cut.finish_reason, len(cut.turns)) == (True, "length", 1)
    assert (other.is_cut, other.finish_reason, len(other.turns)) == (False, "stop", 3)


def test_an_answer_cut_by_max_tokens_per_turn_gets_a_reply(tokenizer: ModelTokenizer) -> None:
    engine = Engine(tokenizer)
    prompts = [{**CHATS[0], "times": 9}]
    (conversation,) = held(
        engine, reply_times, prompts, max_tokens=40, min_tokens=3, max_tokens_per_turn=1
    )
    assert [turn.finish_reason for turn in conversation.turns] == ["length"] * 2
    assert tokenizer.loaded.decode(conversation.token_ids) == "a~\n<user>1~\n<assistant>a"
    assert (conversation.is_cut, conversation.finish_reason) == (True, "length")
    limits = [(params.max_tokens, params.min_tokens) for ((_, params),) in engine.calls]
    assert limits == [(1, 1)] * 2


def test_each_prompt_keeps_its_sampling_in_every_turn(tokenizer: ModelTokenizer) -> None:
    from vllm import SamplingParams

    engine = Engine(tokenizer)
    ours = Sampling(n=2, max_tokens=20, seed=3)
    theirs = SamplingParams(max_tokens=50, temperature=0.5, logit_bias={5: 1.0})
    *cut, whole = held(engine, reply_times, [CHATS[1]] * 2, sampling=[ours, theirs])
    lengths = [(len(conversation.turns), conversation.is_cut) for conversation in (*cut, whole)]
    assert lengths == [(1, True), (1, True), (3, False)]
    (*of_ours, of_theirs), *later = engine.calls
    assert [(params.max_tokens, params.temperature) for _, params in of_ours] == [(20, 1.0)] * 2
    assert of_ours[0].params.seed + 1 == of_ours[1].params.seed
    assert of_theirs.params == sampling_params(theirs)
    for ((prompt, params),) in later:
        assert (params.n, params.temperature, params.logit_bias, params.seed) == (
            1,
            0.5,
            {5: 1.0},
            None,
        )
        assert params.max_tokens == 50 - (len(prompt) - len(whole.prompt_token_ids))
    assert theirs.max_tokens == 50, "the caller's object does not change"


def test_a_text_reply_extends_the_message_of_the_answer(tmp_path: Path) -> None:
    """A template that requires alternating roles then accepts later messages."""
    refusal = (
        "{% if loop.previtem and loop.previtem.role == message.role %}{{ "
        "raise_exception('twice') }}{% endif %}"
    )
    save_characters(tmp_path, CHATML.replace("<{{", f"{refusal}<{{{{"))
    replies = ("{c}", [7, 8], {"role": "user", "content": "1"}, "{d}")
    tokenizer = ModelTokenizer(str(tmp_path))
    (conversation,) = held(
        Engine(tokenizer), lambda _: answered_by(*replies), [CHAT], max_tokens=90
    )
    messages = [(message["role"], message["content"]) for message in conversation.messages]
    continued = f"a~{{c}}a~{tokenizer.decode([7, 8])}a"
    assert messages == [
        ("user", "x"),
        ("assistant", continued),
        ("user", "1"),
        ("assistant", "a~{d}a"),
    ]


HALF = json.loads('"half an emoji \\ud83d"')
"""A text of valid JSON that has no UTF-8."""


@pytest.mark.parametrize(
    ("broken", "code", "text"),
    [
        (HALF, "not-unicode", "14"),
        ([{"role": "user", "content": HALF}], "refused-by-template", "position 20"),
        ([{"role": "user", "content": 5}], "invalid-prompt", "5"),
    ],
)
def test_a_prompt_that_is_no_text_is_named(
    tokenizer: ModelTokenizer,
    broken: Any,
    code: str,
    text: str,
) -> None:
    fine = "fine" if isinstance(broken, str) else CHAT
    with pytest.raises(ArgumentError, check=has_violation("prompts[1]", code, text)):
        token_ids_of([fine, broken, fine], tokenizer)  # type: ignore[list-item]


@pytest.mark.parametrize("reply", [HALF[-6:], {"role": "tool", "content": HALF[-6:]}])
def test_a_reply_may_be_any_text(tokenizer: ModelTokenizer, reply: Any) -> None:
    """A tool's output, such as names of files, may have half a pair."""
    (conversation,) = held(Engine(tokenizer), lambda _: answered_by(reply), [CHAT], max_tokens=60)
    assert "moji ?" in tokenizer.loaded.decode(conversation.token_ids)


def test_a_huge_reply_is_not_tokenized_whole(tokenizer: ModelTokenizer) -> None:
    (token_ids,) = tokenizer.encode(["x" * 10**7], most_tokens=50)
    assert 50 <= len(token_ids) < 5000


def test_tools_need_a_template_that_reads_them(tokenizer: ModelTokenizer, tmp_path: Path) -> None:
    chat: Any = {"tools": [{"type": "function", "function": {"name": "add"}}]}
    prompts = [CHAT]
    with violated(ArgumentError, ("tools", "tools-not-read")):
        token_ids_of(prompts, tokenizer, chat=chat)
    save_characters(tmp_path, "{{ tools | length if tools else '' }}" + CHATML)
    assert token_ids_of(prompts, ModelTokenizer(str(tmp_path)), chat=chat)


def test_coroutine_replies_of_a_turn_run_together(tokenizer: ModelTokenizer) -> None:
    barrier = asyncio.Barrier(3)  # passes only if all three replies run at once

    async def environment(_: Any) -> Any:
        answered = answered_by([8])

        async def reply(answer: Completion) -> Any:
            async with asyncio.timeout(60):
                await barrier.wait()
            return answered(answer)

        return reply

    conversations = held(Engine(tokenizer), environment, [[5], [6], [7]], max_tokens=30)
    assert [len(conversation.turns) for conversation in conversations] == [2, 2, 2]


def raise_error(_: Completion) -> Any:
    raise RuntimeError("the sandbox is gone")


async def block(_: Completion) -> None:
    time.sleep(3)  # blocks the event loop, unlike asyncio.sleep


OF_USER = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("prompts", "reply", "code", "text"),
    [
        (
            "chats",
            raise_error,
            "callback-failed",
            f"0: the sandbox is gone. It was raised by {__file__}:",
        ),
        ("chats", lambda _: next(iter(())), "callback-failed", "StopIteration"),
        ("chats", lambda _: 5, "invalid-reply", "5"),
        ("chats", lambda _: [99999], "invalid-reply", "99999"),
        ("chats", lambda _: [], "invalid-reply", "no tokens"),
        ("chats", lambda _: OF_USER, "invalid-reply", "a message outside of a chat"),
        ("token ids", lambda _: [OF_USER], "invalid-reply", "the prompt is not a chat"),
        ("chats", None, "not-callable", "None"),
    ],
)
def test_a_failed_environment_is_named(
    tokenizer: ModelTokenizer, prompts: str, reply: Any, code: str, text: str
) -> None:
    elements: list[Any] = (
        [element["prompt"] for element in CHATS] if prompts == "chats" else [[5], [6]]
    )
    calls: list[Any] = []

    def environment(prompt: Any) -> Any:
        calls.append(prompt)
        return reply if len(calls) == 2 else answered_by()

    failed = has_violation("environment", code, "prompt 1, completion 0", text)
    with pytest.raises(ArgumentError, check=failed):
        held(Engine(tokenizer), environment, elements, max_tokens=9)
    assert calls == elements


@pytest.mark.parametrize(
    ("reply", "code"),
    [(block, "event-loop-blocked"), (lambda _: time.sleep(3), "callback-timeout")],
)
def test_a_reply_that_takes_too_long_is_named(
    tokenizer: ModelTokenizer,
    reply: Any,
    code: str,
) -> None:
    engine = Engine(tokenizer)
    engine.job = SimpleNamespace(**{**vars(ALONE), "timeout_seconds": 1.0})
    started = time.monotonic()
    with violated(ArgumentError, ("environment", code)):
        held(engine, lambda _: reply, max_tokens=9)
    assert time.monotonic() - started < 3
    assert len(held(Engine(tokenizer), reply_times, max_tokens=50)) == 2


def test_functions_are_called_in_one_thread(tokenizer: ModelTokenizer) -> None:
    """Some, such as those of sqlite3, must be."""
    threads = set()

    def environment(prompt: Any) -> Callable[[Completion], Any]:
        threads.add(threading.get_ident())
        reply = reply_times(prompt)
        return lambda answer: threads.add(threading.get_ident()) or reply(answer)

    held(Engine(tokenizer), environment, n=3, max_tokens=50)
    assert len(threads) == 1


OURS = Sampling(max_tokens=40)


@pytest.mark.parametrize(
    ("arguments", "violation"),
    [
        ({"sampling": Sampling(max_tokens=None)}, ("sampling", "unbounded-sampling", "max_tokens")),
        ({"sampling": None}, ("sampling", "unbounded-sampling", "max_tokens")),
        ({"sampling": SimpleNamespace(max_tokens=5)}, ("sampling", "wrong-type", "max_tokens")),
        ({"sampling": [OURS, 5]}, ("sampling", "unbounded-sampling", "5")),
        ({"continue_final_message": True}, ("continue_final_message", "not-supported")),
        ({"tool": []}, ("tool", "unknown-argument", "tools")),
        ({"max_tokens_per_turn": 0}, ("max_tokens_per_turn", "out-of-range", "0")),
        ({"max_tokens_per_turn": "1"}, ("max_tokens_per_turn", "not-a-whole-number", "1")),
        ({"prompts": CHAT}, ("prompts[0]", "invalid-prompt")),
        ({"prompts": [{"question": "x"}]}, ("prompts[0]", "invalid-prompt")),
        ({"prompts": None}, ("prompts", "not-a-list", "None")),
        ({"prompts": "x"}, ("prompts", "not-a-list", "'x'")),
    ],
)
def test_wrong_arguments_are_refused(
    tokenizer: ModelTokenizer, arguments: dict[str, Any], violation: tuple[str, ...]
) -> None:
    named: Any = {"prompts": CHATS, "sampling": OURS, "environment": reply_times, **arguments}
    with pytest.raises(ArgumentError, check=has_violation(*violation)):
        converse(Engine(tokenizer), **named)  # type: ignore[arg-type]
