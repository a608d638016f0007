"""Conversations of several turns by token ids: what the policy drew is never tokenized again.

    given     the prompt's token ids, of its chat template
    drawn     an answer: vLLM goes on from all token ids so far
    given     what the environment replies: messages in the rest of the template, a text, or token ids
    drawn     the next answer; and so on, until the environment ends it or `max_tokens` are behind the prompt

So the token ids that are trained on are those that vLLM was given and drew, and log-probabilities belong to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Unpack

from hybrid_engine.errors import ArgumentError, ConfigError, Violation, nearest, shortened
from hybrid_engine.hybrid_engine import HybridEngine
from hybrid_engine.ranks.digests import text_digest
from hybrid_engine.rl.asking import ask_each
from hybrid_engine.trainer.batches.making import required_whole

if TYPE_CHECKING:
    from hybrid_engine.backends.vllm import Completion
    from hybrid_engine.backends.vllm.prompts import ChatArguments, Message, ModelTokenizer
    from hybrid_engine.backends.vllm.requests import Samplings

    Reply = Sequence[Message] | str | Sequence[int] | None
    """Messages, a text or token ids, which the conversation goes on with; None ends it."""

Environment = Callable[[Any], "Callable[[Completion], Reply]"]
"""(prompt) -> what replies to each answer of one conversation; called on rank 0 alone."""


_REPLIES = "Reply with messages, a text, token ids, or None to end the conversation"
_OF_ALL_TURNS = ("tools", "chat_template_kwargs")
_OF_ONE_ANSWER = ("add_generation_prompt", "continue_final_message")


@dataclass(frozen=True)
class Conversation:
    """Turns of one conversation, each of which begins with all of the one before.

    Attributes:
        turns: answers. The prompt of each is all that vLLM was given for it.
        is_cut: the environment's last reply did not fit, and is not in it.
        messages: the chat with answers and replies, of which texts and token ids are in the assistant's message that
            they go on in; on rank 0 and of prompts that are chats, else empty.
        environment: what replied; on rank 0, for the reward.

    Raises ValueError for turns that are none of one conversation.
    """

    turns: tuple[Completion, ...]
    is_cut: bool = False
    messages: tuple[Message, ...] = field(default=(), compare=False)
    environment: Any = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        before: tuple[int, ...] = ()
        for number, turn in enumerate(self.turns):
            if turn.prompt_token_ids[: len(before)] != before:
                raise ValueError(f"turn {number} was given other token ids than the turns before it have")
            if turn.temperature != self.temperature:
                raise ValueError(f"turn {number} was drawn at temperature {turn.temperature}, not {self.temperature}")
            before = (*turn.prompt_token_ids, *turn.token_ids)

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """What the first turn was given."""
        return self.turns[0].prompt_token_ids

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All behind the prompt, drawn and given."""
        last = self.turns[-1]
        return (*last.prompt_token_ids, *last.token_ids)[len(self.prompt_token_ids) :]

    @property
    def is_drawn(self) -> tuple[bool, ...]:
        """Of each of `token_ids`, whether the policy drew it."""
        drawn: list[bool] = []
        for turn in self.turns:
            given = len(turn.prompt_token_ids) - len(self.prompt_token_ids) - len(drawn)
            drawn += [False] * given + [True] * len(turn.token_ids)
        return tuple(drawn)

    @property
    def logprobs(self) -> tuple[float, ...]:
        """Of the tokens that were drawn."""
        return tuple(value for turn in self.turns for value in turn.logprobs)

    @property
    def temperature(self) -> float:
        """Of all turns."""
        return self.turns[0].temperature

    @property
    def finish_reason(self) -> str:
        """Of the last turn; "length" where the conversation was cut."""
        return "length" if self.is_cut else self.turns[-1].finish_reason

    @property
    def text(self) -> str:
        """Of the last answer."""
        return self.turns[-1].text


def converse(
    engine: HybridEngine[Any],
    prompts: Sequence[Any],
    sampling: Samplings,
    environment: Environment,
    *,
    max_tokens_per_turn: int | None = None,
    names: Sequence[int] | None = None,
    **chat: Unpack[ChatArguments],
) -> list[list[Conversation]]:
    """`n` conversations of each prompt. Collective, in the rollout context; prompts are the same on all ranks.

    Args:
        engine: a worker, or another engine.
        prompts: texts, chats or lists of token ids, or mappings that have one of these under "prompt".
        sampling: of every turn, ours or `vllm.SamplingParams`, one for all prompts or a list with one for each;
            `max_tokens` bounds all that follows the prompt, drawn and given.
        environment: called on rank 0 with an element of `prompts`, for each conversation. What it returns is called
            with each answer that `max_tokens` did not cut off, and returns the reply: messages, where prompts are
            chats, a text or token ids, which are appended as they are, or None to end the conversation. Where it is a
            coroutine function, all conversations of a turn are replied to together.
        max_tokens_per_turn: bounds each answer; one that it cuts off ("length") is replied to like any other.
        names: of prompts, in messages; default: their places in the list.
        chat: `tools`, `chat_template_kwargs`; as of `generate`.

    Each conversation draws by streams of its own. Raises on rank 0 ArgumentError for an environment that fails or
    replies anything else, and RemoteError with its text on the others; and what `generate_sequences` raises.
    """
    from hybrid_engine.backends.vllm.requests import asked_for

    with engine.job.agreement.phase("checking a conversation"):
        violations = [*no_arguments(chat, ("environment", "sampling", "max_tokens_per_turn", "names"))]
        if isinstance(prompts, str | Mapping) or not hasattr(prompts, "__len__"):
            violations.append(Violation("prompts", f"got {shortened(prompts)}", "Pass a list of prompts"))
        if max_tokens_per_turn is not None:
            remedy = "Pass a number of tokens, at least 1"
            violations += required_whole(max_tokens_per_turn, "max_tokens_per_turn", remedy, least=1)
        if violations:
            raise ArgumentError(violations)
        bounded = asked_for(sampling, len(prompts), _bounded).each
    host = _Host(engine, environment, chat)
    most = max_tokens_per_turn
    first = bounded if most is None else [_of_turn(one, one.max_tokens, most) for one in bounded]
    groups = engine.generate_sequences([prompt_of(each) for each in prompts], list(first), **chat)
    starts = [group[0].prompt_token_ids for group in groups]
    engine.inference.check_prompts(starts, [one.max_tokens for one in bounded])  # said now, not in a later turn
    everyone = [
        _UnderWay(prompt, f"prompt {name}, completion {number}", one)
        for prompt, name, one, group in zip(prompts, names or range(len(prompts)), bounded, groups, strict=True)
        for number in range(len(group))
    ]
    going, answers, turn = everyone, [one for group in groups for one in group], 1
    host.begin(everyone)
    while going:
        for each, answer in zip(going, answers, strict=True):
            each.answered(answer)
        asked = [each for each in going if each.turns[-1].finish_reason != "length" or each.room]
        going = [each for each, reply in zip(asked, host.replies(asked), strict=True) if each.take(reply)]
        turn += 1
        if going:
            how = [_of_turn(each.sampling, each.room, most, turn) for each in going]
            drawn = engine.generate_sequences([each.context for each in going], how)
            answers = [answer for (answer,) in drawn]
    done = iter(everyone)
    return [[next(done).ended() for _ in group] for group in groups]


def no_arguments(chat: Iterable[str], others: Iterable[str]) -> Iterator[Violation]:
    """Report names that are no arguments of a conversation. `others`: further arguments that may be meant."""
    for name in chat:
        if name in _OF_ONE_ANSWER:
            yield Violation(name, "every turn begins with an answer of the model", "Leave it out")
        elif name not in _OF_ALL_TURNS:
            meant = nearest(name, [*_OF_ALL_TURNS, *others])
            yield Violation(name, "is no argument of this call", f"Did you mean {meant}?" if meant else "Leave it out")


def prompt_of(each: Any) -> Any:
    """What is asked, of an element of `prompts`."""
    return each["prompt"] if isinstance(each, Mapping) and "prompt" in each else each


def _bounded(sampling: Any) -> Any:
    """A sampling of either kind, which vLLM need not be installed for. Raises ArgumentError for one without an end."""
    from hybrid_engine.backends.vllm import Sampling

    is_one = isinstance(sampling, Sampling) or hasattr(sampling, "clone")
    if is_one and getattr(sampling, "max_tokens", None) is not None:
        return sampling
    remedy = "Pass hybrid_engine.Sampling or vllm.SamplingParams, with max_tokens, which bounds a conversation"
    raise ArgumentError([Violation("sampling", f"got {shortened(sampling)}", remedy)])


def _of_turn(sampling: Any, room: int, most: int | None, turn: int = 1) -> Any:
    """The sampling of a turn that has `room`, and may have `most` tokens: from the second on one answer, by a seed of
    the turn."""
    num = min(room, most or room)
    values: dict[str, Any] = {"max_tokens": num, "min_tokens": min(num, sampling.min_tokens)}
    if turn > 1:
        values |= {"n": 1, "seed": None if sampling.seed is None else text_digest(str(sampling.seed), str(turn))}
    if not hasattr(sampling, "clone"):
        return replace(sampling, **values)
    params = sampling.clone()
    for name, value in values.items():
        setattr(params, name, value)
    return params


@dataclass
class _UnderWay:
    """A conversation that goes on. All ranks have turns and context, rank 0 the rest.

    Attributes:
        place: in messages.
        sampling: as the caller has it; its `max_tokens` bounds all behind the prompt.
        context: all token ids so far, which the next turn is given.
        messages: of a chat, before the assistant's message that the last answer is in; None where the prompt is none.
        begun: of that message, what is before the last answer.
        replied: messages of the last reply; or the last answer and the reply as text, which join that message.
    """

    prompt: Any
    place: str
    sampling: Any
    turns: list[Completion] = field(default_factory=list)
    context: list[int] = field(default_factory=list)
    is_cut: bool = False
    messages: list[Message] | None = None
    begun: str = ""
    replied: Sequence[Message] | str = ""
    respond: Any = None

    @property
    def room(self) -> int:
        """Tokens that may follow the context."""
        num_taken = len(self.context) - len(self.turns[0].prompt_token_ids)
        return int(self.sampling.max_tokens) - num_taken

    def answered(self, answer: Completion) -> None:
        """Note what was drawn."""
        self.turns.append(answer)
        self.context = [*answer.prompt_token_ids, *answer.token_ids]

    def take(self, reply: list[int] | None) -> bool:
        """Go on with a reply, where that leaves room for an answer of one token at least; whether it does."""
        self.is_cut = reply is not None and len(reply) >= self.room
        if reply is None or self.is_cut:
            return False
        self.context += reply
        if isinstance(self.replied, str):
            self.begun += self.replied
        elif self.messages is not None:
            self.messages += [self._said(), *self.replied]
            self.begun = ""
        return True

    def ended(self) -> Conversation:
        messages = () if self.messages is None else (*self.messages, self._said())
        return Conversation(tuple(self.turns), self.is_cut, messages, self.respond)

    def _said(self) -> Message:
        return {"role": "assistant", "content": self.begun + self.turns[-1].text}


class _Host:
    """Environments of all conversations, on rank 0; the others hear what they reply."""

    def __init__(self, engine: HybridEngine[Any], environment: Environment, chat: ChatArguments) -> None:
        self._engine, self._environment, self._chat = engine, environment, chat
        self._tokenizer: ModelTokenizer = engine.inference.tokenizer

    def begin(self, everyone: Sequence[_UnderWay]) -> None:
        """Make an environment for each. Raises as `converse` where that fails."""
        from hybrid_engine.backends.vllm.prompts import form_of

        job = self._engine.job
        with job.agreement.phase("environment"):
            if self._engine.rank == 0:
                calls = [(each.place, self._environment, (each.prompt,)) for each in everyone]
                made = ask_each("environment", calls, job.timeout_seconds)
                for each, respond in zip(everyone, made, strict=True):
                    asked = prompt_of(each.prompt)
                    each.messages = list(asked) if form_of(asked) == "a chat" else None
                    if not callable(respond):
                        problem = f"for {each.place} it returned {shortened(respond)}"
                        raise ArgumentError(
                            [Violation("environment", problem, "Return what is called with each answer")]
                        )
                    each.respond = respond

    def replies(self, going: Sequence[_UnderWay]) -> list[list[int] | None]:
        """Token ids of the reply to each last answer; None ends the conversation. Raises as `begin`."""
        job, found = self._engine.job, list[list[int] | None]()
        with job.agreement.phase("environment"):
            if self._engine.rank == 0:
                calls = [(each.place, each.respond, (each.turns[-1],)) for each in going]
                said = ask_each("environment", calls, job.timeout_seconds)
                found = [self._reply(each, reply) for each, reply in zip(going, said, strict=True)]
        replies: list[list[int] | None] = job.agreement.gather(found, list[list[int] | None], "environment")[0]
        return replies

    def _reply(self, each: _UnderWay, reply: Any) -> list[int] | None:
        from hybrid_engine.backends.vllm.prompts import form_of

        if reply is None:
            return None
        try:
            token_ids = self._token_ids(reply, each)
            if not token_ids:
                raise ValueError("the reply has no tokens, and None would end the conversation")
            token_ids = token_ids[: max(1, each.room)]  # one that does not fit is left out, however long it is
            self._engine.inference.check_prompts([token_ids], 1)
        except (ConfigError, ValueError) as error:
            raise ArgumentError([Violation("environment", f"for {each.place}: {error}", _REPLIES)]) from error
        if each.messages is not None:
            is_chat = form_of(reply) == "a chat"
            each.replied = reply if is_chat else self._tokenizer.decode([*each.turns[-1].token_ids, *token_ids])
        return token_ids

    def _token_ids(self, reply: Any, each: _UnderWay) -> list[int]:
        from hybrid_engine.backends.vllm.prompts import form_of, rendering_of

        form = form_of(reply)
        if form == "token ids":
            return [int(token) for token in reply]
        if form == "a text":
            return self._tokenizer.encode([reply], add_special_tokens=False)[0]
        if form != "a chat":
            raise ValueError(f"the reply is {form}")
        if each.messages is None:
            raise ValueError("the reply has messages, but the prompt is no chat, so no template says how they go on")
        rendering = rendering_of(self._chat, self._tokenizer)
        return self._tokenizer.encode_reply(each.messages, each.turns[-1].token_ids, reply, rendering)
