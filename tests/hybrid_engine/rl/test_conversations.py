"""Conversations against what was given and drawn, turn by turn, by a stand-in for vLLM; real engines: test_loop.py."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid_engine import Completion, Sampling, build_batch, pack
from hybrid_engine.backends.vllm.prompts import ModelTokenizer, check_token_ids, rendering_of, token_ids_of
from hybrid_engine.backends.vllm.requests import caller_fields
from hybrid_engine.errors import ArgumentError
from hybrid_engine.rl import Conversation, converse
from hybrid_engine.rl.losses import align_log_probs
from tests.harness.errors import has_violation
from tests.zoo.tokenizers import save_characters

pytestmark = pytest.mark.slow  # imports vLLM's settings and transformers

CHATML = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}~\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
END = "~"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    """A character is a token; a turn ends with one that the model draws, and a line break that it does not."""
    path = tmp_path_factory.mktemp("model")
    save_characters(path, CHATML)
    return ModelTokenizer(str(path))


# -- what a conversation is --------------------------------------------------------------------------------------------

parts = st.lists(st.integers(1, 100), min_size=1, max_size=4)


@st.composite
def conversations(draw: st.DrawFn) -> Conversation:
    context = draw(parts)
    turns = []
    for number in range(draw(st.integers(1, 4))):
        context = [*context, *(draw(parts) if number else [])]
        drawn = draw(parts)
        logprobs = tuple(-float(token) for token in drawn)
        turns.append(Completion(tuple(drawn), logprobs, "stop", prompt_token_ids=tuple(context), temperature=0.7))
        context = [*context, *drawn]
    return Conversation(tuple(turns))


@given(st.lists(conversations(), min_size=1, max_size=3))
def test_rows_have_what_was_given_and_learn_from_what_was_drawn(drawn: list[Conversation]) -> None:
    length = 40
    prompts = [one.prompt_token_ids for one in drawn]
    batch, packed = build_batch(prompts, drawn, length), pack(prompts, drawn, length)
    sampled = align_log_probs([one.logprobs for one in drawn], batch)
    masks = packed.unpack(packed.batch["mask"])
    for row, (one, mask) in enumerate(zip(drawn, masks, strict=True)):
        last = one.turns[-1]
        whole = [*last.prompt_token_ids, *last.token_ids]
        assert [*one.prompt_token_ids, *one.token_ids] == whole
        assert [*batch["tokens"][row, :1].tolist(), *batch["labels"][row].tolist()][: len(whole)] == whole
        columns = batch["mask"][row].bool()
        expected = [token for turn in one.turns for token in turn.token_ids]
        assert batch["labels"][row][columns].tolist() == expected
        assert (-sampled[row][columns]).tolist() == expected
        assert mask.tolist() == batch["mask"][row, : len(whole) - 1].tolist()
        for turn in one.turns:  # each token of a turn is behind what the turn was given
            start = len(turn.prompt_token_ids)
            assert batch["mask"][row, start - 1 : start - 1 + len(turn.token_ids)].all()
    assert batch["temperature"].tolist() == pytest.approx([0.7] * len(drawn))


def test_turns_of_no_conversation_are_refused() -> None:
    first = Completion((4, 5), (), "stop", prompt_token_ids=(1, 2))
    with pytest.raises(ValueError, match="prompt of turn 1"):
        Conversation((first, Completion((7,), (), "stop", prompt_token_ids=(1, 2, 4, 6))))
    with pytest.raises(ValueError, match=r"turn 1 .* 0\.5, .* 1\.0"):
        Conversation((first, Completion((7,), (), "stop", prompt_token_ids=(1, 2, 4, 5), temperature=0.5)))


# -- what follows an answer --------------------------------------------------------------------------------------------

texts = st.text("abc <>:", max_size=5)


@given(st.lists(st.tuples(texts, texts), min_size=1, max_size=3), st.booleans())
def test_a_reply_is_what_the_template_has_behind_an_answer(
    tokenizer: ModelTokenizer, turns: list[tuple[str, str]], is_ended: bool
) -> None:
    """A token is a character here, so that the whole chat in one go is an oracle."""
    rendering = rendering_of(None, tokenizer)
    chat = [{"role": "user", "content": "?"}]
    token_ids = tokenizer.encode_chat(chat, rendering)
    for answer, result in turns:
        (drawn,) = tokenizer.encode([answer + (END if is_ended else "")]) if answer or is_ended else [[]]
        reply = [{"role": "tool", "content": result}, {"role": "user", "content": "!"}]
        token_ids += [*drawn, *tokenizer.encode_reply(chat, drawn, reply, rendering)]
        chat += [{"role": "assistant", "content": answer}, *reply]
    assert token_ids == tokenizer.encode_chat(chat, rendering)


BY_LINES = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.mark.parametrize(
    ("template", "drawn", "expected"),
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
def test_what_an_answer_drew_of_the_end_of_its_turn_is_not_put_again(
    tmp_path: Path, template: str, drawn: str, expected: str
) -> None:
    """Llama 2 has a space before its end token; a stop string may be as long as the next message's role."""
    save_characters(tmp_path, template, eos_token=END)
    tokenizer = ModelTokenizer(str(tmp_path))
    chat, reply = ([{"role": "user", "content": text}] for text in "?1")
    token_ids = tokenizer.encode_reply(chat, tokenizer.encode([drawn])[0], reply, rendering_of(None, tokenizer))
    assert tokenizer.loaded.decode(token_ids) == expected


def test_a_template_without_answers_cannot_go_on(tmp_path: Path) -> None:
    save_characters(
        tmp_path, "{% for message in messages if message['role'] == 'user' %}{{ message['content'] }}{% endfor %}"
    )
    tokenizer = ModelTokenizer(str(tmp_path))
    with pytest.raises(ValueError, match="leaves out an answer"):
        tokenizer.encode_reply([{"role": "user", "content": "?"}], [5], [{"role": "user", "content": "!"}], {})


# -- conversations with a stand-in -------------------------------------------------------------------------------------


class Engine:
    """Answers "a", "b" ... and the end of a turn, as far as there is room; notes what it is asked for."""

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        agreement = SimpleNamespace(phase=lambda _: nullcontext(), gather=lambda found, *_: [found])
        self.inference, self.job, self.rank = (
            SimpleNamespace(
                tokenizer=tokenizer, check_prompts=lambda prompts, num: check_token_ids(prompts, num, 1000, 102)
            ),
            SimpleNamespace(agreement=agreement, timeout_seconds=60),
            0,
        )
        self.asked: list[tuple[Any, list[Sampling]]] = []

    def generate_sequences(self, prompts: Sequence[Any], sampling: Any, **chat: Any) -> list[list[Completion]]:
        tokenizer = self.inference.tokenizer
        each = sampling if isinstance(sampling, list) else [sampling] * len(prompts)
        token_ids = token_ids_of(prompts, tokenizer, None, chat)  # type: ignore[arg-type]
        self.asked.append((token_ids, each))
        found = []
        for prompt, how in zip(token_ids, each, strict=True):
            answers = tokenizer.encode([f"{'abcdefgh'[number % 8]}{END}" for number in range(how.n)])
            group = []
            for drawn in answers:
                kept = tuple(drawn[: how.max_tokens])
                ending = "stop" if len(kept) == len(drawn) else "length"
                logprobs = tuple(-1.0 for _ in kept)
                group.append(Completion(kept, logprobs, ending, None, tuple(prompt), tokenizer=tokenizer))
            found.append(group)
        return found


CHATS = [{"prompt": [{"role": "user", "content": text}], "times": times} for text, times in (("x", 0), ("yz", 2))]


def asks_again(prompt: Any) -> Callable[[Completion], Any]:
    """Replies as often as the prompt says."""
    seen: list[str] = []

    def reply(answer: Completion) -> Any:
        seen.append(answer.text)
        return [{"role": "user", "content": str(len(seen))}] if len(seen) <= prompt["times"] else None

    return reply


def test_a_conversation_goes_on_from_the_very_tokens(tokenizer: ModelTokenizer) -> None:
    engine = Engine(tokenizer)
    groups = converse(engine, CHATS, Sampling(n=2, max_tokens=50, seed=3), asks_again)  # type: ignore[arg-type]
    assert [[len(one.turns) for one in group] for group in groups] == [[1, 1], [3, 3]]
    once, twice = groups[1]
    assert [message["content"] for message in twice.messages] == ["yz", "b", "1", "a", "2", "a"]
    assert tokenizer.loaded.decode([*once.prompt_token_ids, *once.token_ids]) == (
        "<user>yz~\n<assistant>a~\n<user>1~\n<assistant>a~\n<user>2~\n<assistant>a~"
    )
    assert (once.text, once.finish_reason, once.is_cut) == ("a", "stop", False)
    assert [len(prompts) for prompts, _ in engine.asked] == [2, 2, 2], "those that ended are not asked"
    used = [[how.seed for how in each] for _, each in engine.asked]
    assert len({seed for of_turn in used for seed in of_turn}) == 3, "one for each turn"
    for conversation in (once, twice):
        for (prompts, _), turn in zip(engine.asked, conversation.turns, strict=True):
            assert list(turn.prompt_token_ids) in prompts


@pytest.mark.parametrize("most", range(1, 45, 4))
def test_no_conversation_is_longer_than_it_may_be(tokenizer: ModelTokenizer, most: int) -> None:
    """Whatever the environment says, which never ends."""
    engine = Engine(tokenizer)
    forever = [{**CHATS[0], "times": 1000}]
    ((one,),) = converse(engine, forever, Sampling(max_tokens=most, min_tokens=1), asks_again)  # type: ignore[arg-type]
    assert len(one.token_ids) <= most
    assert one.finish_reason == "length"
    assert one.is_drawn[-1], "a reply that nothing follows is left out"
    assert one.is_cut == (one.turns[-1].finish_reason == "stop")
    for prompts, each in engine.asked:
        room = [most - (len(prompt) - len(one.prompt_token_ids)) for prompt in prompts]
        assert [how.max_tokens for how in each] == room


@pytest.mark.parametrize(
    "reply", [[7] * 2000, "x" * 2000, [{"role": "user", "content": "x" * 2000}]], ids=["token ids", "text", "messages"]
)
def test_a_reply_longer_than_the_model_ends_its_conversation_alone(tokenizer: ModelTokenizer, reply: Any) -> None:
    def environment(prompt: Any) -> Callable[[Completion], Any]:
        return asks_again(prompt) if prompt["times"] else lambda _: reply

    ((cut,), (other,)) = converse(Engine(tokenizer), CHATS, Sampling(max_tokens=50), environment)  # type: ignore[arg-type]
    assert (cut.is_cut, cut.finish_reason, len(cut.turns)) == (True, "length", 1)
    assert (other.is_cut, other.finish_reason, len(other.turns)) == (False, "stop", 3)


def test_an_answer_that_its_own_bound_cuts_off_is_replied_to(tokenizer: ModelTokenizer) -> None:
    engine = Engine(tokenizer)
    sampling = Sampling(max_tokens=40, min_tokens=3)
    ((one,),) = converse(engine, [{**CHATS[0], "times": 9}], sampling, asks_again, max_tokens_per_turn=1)  # type: ignore[arg-type]
    assert [turn.finish_reason for turn in one.turns] == ["length"] * len(one.turns)
    assert tokenizer.loaded.decode(one.token_ids) == "a~\n<user>1~\n<assistant>a"
    assert (len(one.turns), one.is_cut, one.finish_reason) == (2, True, "length")
    assert [(how.max_tokens, how.min_tokens) for _, each in engine.asked for how in each] == [(1, 1)] * 2
    for most in (0, "1"):
        with pytest.raises(ArgumentError) as caught:
            converse(engine, CHATS, sampling, asks_again, max_tokens_per_turn=most)  # type: ignore[arg-type]
        assert [finding.key for finding in caught.value.findings] == ["max_tokens_per_turn"]


def test_each_prompt_has_its_own_sampling_in_every_turn(tokenizer: ModelTokenizer) -> None:
    from vllm import SamplingParams

    engine, ours = Engine(tokenizer), Sampling(n=2, max_tokens=20, seed=3)
    theirs = SamplingParams(max_tokens=50, temperature=0.5, logit_bias={5: 1.0})
    groups = converse(engine, [CHATS[1]] * 2, [ours, theirs], asks_again)  # type: ignore[arg-type]
    assert [len(group) for group in groups] == [2, 1]
    assert [[(len(one.turns), one.is_cut) for one in group] for group in groups] == [[(1, True)] * 2, [(3, False)]]
    (_, (first, second)), *later = engine.asked
    assert (first, caller_fields(second)) == (ours, caller_fields(theirs))
    for prompts, (how,) in later:
        assert (how.n, how.temperature, how.logit_bias, how.seed) == (1, 0.5, {5: 1.0}, None)
        assert how.max_tokens == 50 - (len(prompts[0]) - len(groups[1][0].prompt_token_ids))
    assert theirs.max_tokens == 50, "it is the caller's"
    with pytest.raises(ArgumentError, check=has_violation("sampling[1]", "unbounded-sampling", "5")):
        converse(engine, CHATS, [ours, 5], asks_again)  # type: ignore[arg-type,list-item]


def test_texts_and_token_ids_are_appended_as_they_are(tokenizer: ModelTokenizer) -> None:
    replies: list[Any] = ["{c}", [7, 8], None]
    groups = converse(Engine(tokenizer), [[5, 6]], Sampling(max_tokens=30), lambda _: lambda _: replies.pop(0))  # type: ignore[arg-type]
    ((one,),) = groups
    given = [token for token, is_drawn in zip(one.token_ids, one.is_drawn, strict=True) if not is_drawn]
    assert given == [*tokenizer.encode(["{c}"])[0], 7, 8]
    assert one.messages == ()


def test_a_text_goes_on_in_the_message_of_its_answer(tmp_path: Path) -> None:
    """So that a template which wants roles in turn takes messages after it."""
    refusal = "{% if loop.previtem and loop.previtem.role == message.role %}{{ raise_exception('twice') }}{% endif %}"
    save_characters(tmp_path, CHATML.replace("<{{", f"{refusal}<{{{{"))
    replies: list[Any] = ["{c}", [7, 8], [{"role": "user", "content": "1"}], "{d}", None]
    engine, prompts = Engine(ModelTokenizer(str(tmp_path))), [CHATS[0]["prompt"]]
    ((one,),) = converse(engine, prompts, Sampling(max_tokens=90), lambda _: lambda _: replies.pop(0))  # type: ignore[arg-type]
    said = engine.inference.tokenizer.decode([7, 8])
    roles = ["user", "assistant", "user", "assistant"]
    assert [message["role"] for message in one.messages] == roles
    assert [message["content"] for message in one.messages] == ["x", f"a~{{c}}a~{said}a", "1", "a~{d}a"]


def test_coroutines_reply_to_all_conversations_of_a_turn_together(tokenizer: ModelTokenizer) -> None:
    prompts, together = [[5], [6], [7]], asyncio.Barrier(3)

    async def environment(_: Any) -> Any:
        turns = iter([[8], None])

        async def reply(_: Completion) -> Any:
            async with asyncio.timeout(60):
                await together.wait()
            return next(turns)

        return reply

    groups = converse(Engine(tokenizer), prompts, Sampling(max_tokens=30), environment)  # type: ignore[arg-type]
    assert [len(one.turns) for (one,) in groups] == [2, 2, 2]


def fails(_: Completion) -> Any:
    raise RuntimeError("the sandbox is gone")


@pytest.mark.parametrize(
    ("prompt", "reply", "code", "text"),
    [
        ("chat", fails, "callback-failed", "RuntimeError for prompt 1, completion 0: the sandbox is gone"),
        ("chat", fails, "callback-failed", f"{__file__}:"),
        ("chat", lambda _: 5, "invalid-reply", "5"),
        ("chat", lambda _: [99999], "invalid-reply", "99999"),
        ("chat", lambda _: [], "invalid-reply", "no tokens"),
        ("chat", lambda _: {"role": "user", "content": "x"}, "invalid-reply", "a message outside of a chat"),
        ("ids", lambda _: [{"role": "user", "content": "x"}], "invalid-reply", "the prompt is not a chat"),
    ],
)
def test_an_environment_that_fails_is_named(
    tokenizer: ModelTokenizer, prompt: str, reply: Any, code: str, text: str
) -> None:
    prompts: list[Any] = [element["prompt"] for element in CHATS] if prompt == "chat" else [[5], [6]]
    calls: list[Any] = []

    def environment(prompt: Any) -> Any:
        calls.append(prompt)
        return reply if len(calls) == 2 else lambda _: None

    failed = has_violation("environment", code, "prompt 1, completion 0", text)
    with pytest.raises(ArgumentError, check=failed):
        converse(Engine(tokenizer), prompts, Sampling(max_tokens=9), environment)  # type: ignore[arg-type]
    assert calls == prompts


def test_what_bounds_no_conversation_is_refused(tokenizer: ModelTokenizer) -> None:
    engine: Any = Engine(tokenizer)
    for sampling in (Sampling(max_tokens=None), None, SimpleNamespace(max_tokens=5)):
        with pytest.raises(ArgumentError, check=has_violation("sampling", "unbounded-sampling", "max_tokens")):
            converse(engine, CHATS, sampling, asks_again)  # type: ignore[arg-type]
    for refused, argument in (
        (has_violation("continue_final_message", "not-supported"), {"continue_final_message": True}),
        (has_violation("tool", "unknown-argument", "tools"), {"tool": []}),
    ):
        with pytest.raises(ArgumentError, check=refused):
            converse(engine, CHATS, Sampling(), asks_again, **argument)  # type: ignore[arg-type]
    for prompts in (CHATS[0]["prompt"], [{"question": "x"}]):
        with pytest.raises(ArgumentError) as caught:
            converse(engine, prompts, Sampling(), asks_again)  # type: ignore[arg-type]
        assert [finding.key for finding in caught.value.findings] == ["prompts[0]"]
    for value in (None, "x"):
        with pytest.raises(ArgumentError, check=has_violation("prompts", "not-a-list", repr(value))):
            converse(engine, value, Sampling(), asks_again)  # type: ignore[arg-type]
    failed = has_violation("environment", "not-callable", "prompt 0, completion 0", "None")
    with pytest.raises(ArgumentError, check=failed):
        converse(engine, CHATS, Sampling(), lambda _: None)  # type: ignore[arg-type,return-value]


def test_a_batch_of_conversations_is_no_other_where_there_is_one_turn() -> None:
    turn = Completion((4, 5), (-1.0, -2.0), "stop", prompt_token_ids=(1, 2))
    batches = [build_batch([(1, 2)], [one], 8) for one in (turn, Conversation((turn,)))]
    assert all(torch.equal(batches[0][name], batches[1][name]) for name in batches[0])
