"""Conversations, finished and not: their token ids, their messages, and their environments.

Token ids that the policy drew are never re-tokenized. Training uses exactly the token ids that vLLM
received and drew, so log-probabilities match them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import TYPE_CHECKING, Any

from hybrid_engine.ranks.digests import text_digest

if TYPE_CHECKING:
    from hybrid_engine.backends.vllm import Completion
    from hybrid_engine.backends.vllm.engine_settings import Message, RoutedExperts

    Reply = Sequence[Message] | str | Sequence[int] | None
    """Messages, a text or token ids that continue the conversation; None ends it."""

Environment = Callable[[Any], "Callable[[Completion], Reply]"]
"""(prompt) -> function that replies to each answer of one conversation; called on rank 0 only."""


@dataclass(frozen=True)
class Conversation:
    """Turns of one conversation; each turn begins with all token ids of the turn before it.

    Attributes:
        turns: the answers. The prompt of each is everything that vLLM received for it.
        is_cut: True if the last reply was dropped because it did not fit into `max_tokens`.
        messages: the chat with answers and replies. Replies that are texts or token ids are part
            of the assistant's message that they continue. Empty above rank 0, and for prompts that
            are not chats.
        environment: the function that replied; on rank 0 only, for the reward.

    Raises ValueError if the turns do not form one conversation.
    """

    turns: tuple[Completion, ...]
    is_cut: bool = False
    messages: tuple[Message, ...] = field(default=(), compare=False)
    environment: Any = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        # Token ids that the next prompt must begin with. If a turn were tokenized again, its ids
        # could differ from the drawn ids, and log-probabilities would not match.
        context: tuple[int, ...] = ()
        for number, turn in enumerate(self.turns):
            if turn.prompt_token_ids[: len(context)] != context:
                raise ValueError(
                    f"the prompt of turn {number} does not begin with the {len(context)} token ids "
                    "of the turns before it"
                )
            if turn.temperature != self.temperature:
                raise ValueError(
                    f"turn {number} was drawn at temperature {turn.temperature}, turn 0 at "
                    f"{self.temperature}"
                )
            context = (*turn.prompt_token_ids, *turn.token_ids)

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """Token ids of the first turn's prompt."""
        return self.turns[0].prompt_token_ids

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Token ids after the prompt: answers and replies."""
        last = self.turns[-1]
        whole = (*last.prompt_token_ids, *last.token_ids)
        return whole[len(self.prompt_token_ids) :]

    @property
    def is_drawn(self) -> tuple[bool, ...]:
        """True for each of `token_ids` that the policy drew, False for tokens of replies."""
        drawn: list[bool] = []
        for turn in self.turns:
            # Before the answer of a turn, after all that came earlier, stands the reply to the
            # previous answer.
            reply_end = len(turn.prompt_token_ids) - len(self.prompt_token_ids)
            drawn += [False] * (reply_end - len(drawn))
            drawn += [True] * len(turn.token_ids)
        return tuple(drawn)

    @property
    def logprobs(self) -> tuple[float, ...]:
        """Log-probabilities of the tokens that the policy drew."""
        return tuple(value for turn in self.turns for value in turn.logprobs)

    @property
    def routed_experts(self) -> RoutedExperts | None:
        """Experts of each token but the last, None without.

        They are those of the turn that drew the token, because later turns computed it again.
        """
        known = [turn.routed_experts for turn in self.turns if turn.routed_experts is not None]
        if len(known) < len(self.turns):
            return None
        return reduce(type(known[0]).followed_by, known)

    @property
    def versions(self) -> tuple[int, ...]:
        """Of servers: version of the weights that drew each token that the policy drew."""
        return tuple(version for turn in self.turns for version in turn.versions)

    @property
    def temperature(self) -> float:
        """Sampling temperature of every turn."""
        return self.turns[0].temperature

    @property
    def finish_reason(self) -> str:
        """Finish reason of the last turn, or "length" if the conversation was cut."""
        return "length" if self.is_cut else self.turns[-1].finish_reason

    @property
    def text(self) -> str:
        """Text of the last answer."""
        return self.turns[-1].text


def prompt_of(element: Any) -> Any:
    """Return the prompt of an element of `prompts`, which may be a mapping with further values."""
    if isinstance(element, Mapping) and "prompt" in element:
        return element["prompt"]
    return element


def sampling_of_turn(sampling: Any, room: int, limit: int | None, turn: int) -> Any:
    """Return the sampling of a turn for which `room` tokens are left.

    The turn draws at most `limit` tokens. From the second turn on its seed depends on the turn.
    """
    from hybrid_engine.backends.vllm.requests import with_values

    max_tokens = min(room, limit or room)
    # vLLM refuses min_tokens above max_tokens, which a short rest of the room would cause.
    values = {"max_tokens": max_tokens, "min_tokens": min(max_tokens, sampling.min_tokens)}
    # With the seed of the first turn, every turn would draw the same random numbers.
    if turn > 1 and sampling.seed is not None:
        values["seed"] = text_digest(str(sampling.seed), str(turn))
    return with_values(sampling, **values)


@dataclass
class ConversationState:
    """State of an unfinished conversation. Rank 0 alone has messages and the environment.

    Attributes:
        prompt: the element of `prompts`.
        place: prompt and completion, for messages.
        sampling: the caller's sampling; its `max_tokens` bounds everything after the prompt.
        turns: the answers so far.
        context: all token ids so far, the prompt of the next turn.
        is_cut: the last reply did not fit.
        messages: the chat before the assistant's message that has the last answer; None if the
            prompt is not a chat.
        prefix: text of that assistant's message before the last answer.
        last_reply: messages of the last reply. For a reply of text or token ids: the text of the
            last answer and the reply, which are both part of the assistant's message.
        respond: the environment's function.
    """

    prompt: Any
    place: str
    sampling: Any
    turns: list[Completion] = field(default_factory=list)
    context: list[int] = field(default_factory=list)
    is_cut: bool = False
    messages: list[Message] | None = None
    prefix: str = ""
    last_reply: Sequence[Message] | str = ""
    respond: Any = None

    @property
    def room(self) -> int:
        """Number of tokens that may follow the context."""
        if not self.turns:
            return int(self.sampling.max_tokens)
        num_taken = len(self.context) - len(self.turns[0].prompt_token_ids)
        return int(self.sampling.max_tokens) - num_taken

    @property
    def gets_reply(self) -> bool:
        """True if the last answer gets a reply: `max_tokens` did not cut it off."""
        # If only max_tokens_per_turn cut it off, there is room left.
        return self.turns[-1].finish_reason != "length" or self.room > 0

    def add_answer(self, answer: Completion) -> None:
        """Append an answer to turns and context."""
        self.turns.append(answer)
        self.context = [*answer.prompt_token_ids, *answer.token_ids]

    def replies_and_answers(self) -> list[Completion]:
        """Return the turns, whose prompts are the replies alone: the rest is in earlier turns."""
        # Prompt p, answer a, reply r: the next turn's prompt is p a r, of which p and a are known.
        num_known = len(self.turns[0].prompt_token_ids)
        turns = []
        for turn in self.turns:
            reply = turn.prompt_token_ids[num_known:]
            turns.append(replace(turn, prompt_token_ids=reply, tokenizer=None))
            num_known = len(turn.prompt_token_ids) + len(turn.token_ids)
        return turns

    def add_reply(self, reply: list[int] | None) -> bool:
        """Append a reply if it leaves room for an answer of at least one token.

        Returns whether the conversation continues.
        """
        # A reply that fills the room is dropped as well: tokens after the last answer are not
        # trained on.
        self.is_cut = reply is not None and len(reply) >= self.room
        if reply is None or self.is_cut:
            return False
        self.context += reply
        # Text continues the assistant's message. A message of another role after it would make
        # templates fail that require alternating roles.
        if isinstance(self.last_reply, str):
            self.prefix += self.last_reply
        elif self.messages is not None:
            self.messages += [self._assistant_message(), *self.last_reply]
            self.prefix = ""
        return True

    def result(self) -> Conversation:
        messages: tuple[Message, ...] = ()
        if self.messages is not None:
            messages = (*self.messages, self._assistant_message())
        return Conversation(tuple(self.turns), self.is_cut, messages, self.respond)

    def _assistant_message(self) -> Message:
        return {"role": "assistant", "content": self.prefix + self.turns[-1].text}
