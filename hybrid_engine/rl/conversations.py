"""Conversations of several turns by token ids: tokens that the policy drew are never re-tokenized.

    prompt    token ids of the prompt, by its chat template
    answer    drawn by vLLM from all token ids so far
    reply     from the environment: messages (rendered by the template), a text, or token ids
    answer    drawn by vLLM; and so on, until the environment ends the conversation, or
              `max_tokens` tokens follow the prompt

Training uses exactly the token ids that vLLM received and drew, so log-probabilities match them.

Replicas of vLLM in the ranks draw a turn of all conversations together, and wait for all replies
before the next. With servers each conversation goes on when its reply is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack

from hybrid_engine.errors import ArgumentError, Violation, Violations, nearest, shortened
from hybrid_engine.hybrid_engine import HybridEngine
from hybrid_engine.rl.conversation_state import (
    Conversation,
    ConversationState,
    Environment,
    EnvironmentRunner,
    prompt_of,
    sampling_of_turn,
)
from hybrid_engine.rl.served_conversations import ServedConversations
from hybrid_engine.trainer.batches.batch_building import required_whole

if TYPE_CHECKING:
    from hybrid_engine.backends.vllm import Completion
    from hybrid_engine.backends.vllm.prompts import ChatArguments
    from hybrid_engine.backends.vllm.requests import Samplings

CHAT_ARGUMENTS = ("tools", "chat_template_kwargs")
_SINGLE_ANSWER_ARGUMENTS = ("add_generation_prompt", "continue_final_message")


def converse(
    engine: HybridEngine,
    prompts: Sequence[Any],
    sampling: Samplings,
    environment: Environment,
    *,
    max_tokens_per_turn: int | None = None,
    names: Sequence[int] | None = None,
    **chat: Unpack[ChatArguments],
) -> list[list[Conversation]]:
    """Hold `n` conversations for each prompt, each with its own random streams.

    Collective, in the rollout context; prompts are the same on all ranks.

    Args:
        engine: a worker, or another engine.
        prompts: texts, chats or lists of token ids, or mappings that have one of these under
            "prompt".
        sampling: parameters of every turn, ours or `vllm.SamplingParams`: one for all prompts, or
            a list with one for each prompt. `max_tokens` bounds everything after the prompt,
            answers and replies together.
        environment: called on rank 0 with an element of `prompts` for each conversation. It
            returns a function that is called with each answer, except those that `max_tokens` cut
            off, and returns the reply: messages, if the prompts are chats; a text or token ids,
            which are appended unchanged; or None to end the conversation. Replies of coroutine
            functions are awaited together: all those of a turn, and with servers while others are
            drawn. Other functions are called one after the other.
        max_tokens_per_turn: bounds each answer. An answer that it cuts off ("length") gets a
            reply like any other.
        names: numbers of the prompts in messages; default: their indices.
        chat: `tools` and `chat_template_kwargs`, as in `generate`.

    Raises:
        ArgumentError: on rank 0, an environment failed or returned an invalid reply.
        RemoteError: on other ranks, with the text of that error.

    Also raises the errors of `generate_sequences`.
    """
    from hybrid_engine.backends.vllm.server.inference import ServedInference

    inference: Any = engine.inference
    if isinstance(inference, ServedInference):
        begun = begin_conversations(
            engine,
            prompts,
            sampling,
            environment,
            max_tokens_per_turn=max_tokens_per_turn,
            names=names,
            **chat,
        )
        return begun.collect()
    samplings = _checked(engine, prompts, sampling, max_tokens_per_turn, chat)
    runner = EnvironmentRunner(engine, environment, chat)
    first_samplings = [
        sampling_of_turn(params, params.max_tokens, max_tokens_per_turn) for params in samplings
    ]
    first_prompts = [prompt_of(prompt) for prompt in prompts]
    groups = engine.generate_sequences(first_prompts, first_samplings, **chat)
    # A later turn may use all of max_tokens. Fail now, not after some turns, if there is no room.
    engine.inference.check_prompts(
        [group[0].prompt_token_ids for group in groups], [params.max_tokens for params in samplings]
    )
    # Flat, in the order of the prompts: a turn generates for all active conversations at once.
    conversations = [
        ConversationState(prompt, f"prompt {name}, completion {number}", params)
        for prompt, name, params, group in zip(
            prompts, names or range(len(prompts)), samplings, groups, strict=True
        )
        for number in range(len(group))
    ]
    runner.begin(conversations)
    active = conversations
    answers = [answer for group in groups for answer in group]
    turn = 1
    while active:
        for state, answer in zip(active, answers, strict=True):
            state.add_answer(answer)
        answered = [state for state in active if state.gets_reply]
        replies = runner.replies(answered)
        active = [
            state for state, reply in zip(answered, replies, strict=True) if state.add_reply(reply)
        ]
        turn += 1
        if active:
            params_of_turn = [
                sampling_of_turn(state.sampling, state.room, max_tokens_per_turn, turn)
                for state in active
            ]
            completions = engine.generate_sequences(
                [state.context for state in active], params_of_turn
            )
            answers = [answer for (answer,) in completions]
    finished = iter(conversations)
    return [[next(finished).result() for _ in group] for group in groups]


def begin_conversations(
    engine: HybridEngine,
    prompts: Sequence[Any],
    sampling: Samplings,
    environment: Environment,
    *,
    max_tokens_per_turn: int | None = None,
    names: Sequence[int] | None = None,
    goes_on: bool = False,
    **chat: Unpack[ChatArguments],
) -> ServedConversations:
    """Begin conversations with servers, which go on in the background; `collect` waits for them.

    Collective. Arguments and errors as of `converse`.

    Args:
        goes_on: they continue after a publish, with the next weights; see `Completion.versions`.
            Otherwise the present weights draw all tokens.
    """
    from hybrid_engine.backends.vllm.requests import Request

    samplings = _checked(engine, prompts, sampling, max_tokens_per_turn, chat)
    inference: Any = engine.inference
    first_prompts = [prompt_of(prompt) for prompt in prompts]
    token_ids, seeded = inference.prepare(first_prompts, list(samplings), chat=chat)
    with engine.job.agreement.phase("looking for weights"):
        weights = inference.weights(goes_on=goes_on)

    def complete(number: int, context: Sequence[int], params: Any) -> Completion:
        request = Request.of(context, params, number=number, weights=weights)
        ((answer,),) = inference.whole([context], inference.complete([request]))
        return answer

    runner = EnvironmentRunner(engine, environment, chat)
    groups = [
        [
            ConversationState(
                prompt,
                f"prompt {name}, completion {number}",
                # Seeds of the completions of a prompt as vLLM makes them.
                replace(params, n=1, seed=None if params.seed is None else params.seed + number),
                context=list(context),
            )
            for number in range(params.n)
        ]
        for prompt, name, params, context in zip(
            prompts, names or range(len(prompts)), seeded, token_ids, strict=True
        )
    ]
    return ServedConversations(engine, groups, runner, complete, max_tokens_per_turn)


def _checked(
    engine: HybridEngine,
    prompts: Sequence[Any],
    sampling: Samplings,
    max_tokens_per_turn: int | None,
    chat: Mapping[str, Any],
) -> Sequence[Any]:
    """Return the sampling of each prompt. Collective; raises ArgumentError."""
    from hybrid_engine.backends.vllm.requests import asked_for

    with engine.job.agreement.phase("checking a conversation"):
        own_arguments = ("environment", "sampling", "max_tokens_per_turn", "names")
        violations = [*unknown_arguments(chat, own_arguments)]
        if isinstance(prompts, str | Mapping) or not hasattr(prompts, "__len__"):
            problem = f"got {shortened(prompts)}"
            remedy = "Pass a list of prompts"
            violations.append(Violation("prompts", problem, remedy, code="not-a-list"))
        if max_tokens_per_turn is not None:
            remedy = "Pass a number of tokens, at least 1"
            violations += required_whole(
                max_tokens_per_turn, "max_tokens_per_turn", remedy, least=1
            )
        if violations:
            raise ArgumentError(violations)
        samplings = asked_for(sampling, len(prompts), _require_bound)
        # Later turns begin with token ids, which have no images.
        pictured = [index for index, prompt in enumerate(prompts) if _has_images(prompt)]
        if pictured:
            key = f"prompts[{pictured[0]}]"
            problem = "has images, and conversations are text alone"
            remedy = "Leave the environment out"
            raise ArgumentError([Violation(key, problem, remedy, code="images-unsupported")])
    return samplings


def unknown_arguments(names: Iterable[str], known: Iterable[str]) -> Violations:
    """Report keyword arguments that a conversation does not take.

    Args:
        names: names of the further keyword arguments of the call.
        known: arguments of the call, for the suggestion if a name is misspelled.
    """
    for name in names:
        if name in _SINGLE_ANSWER_ARGUMENTS:
            problem = "not available here: every turn begins with an answer of the model"
            yield Violation(name, problem, "Leave it out", code="not-supported")
        elif name not in CHAT_ARGUMENTS:
            suggestion = nearest(name, [*CHAT_ARGUMENTS, *known])
            remedy = f"Did you mean {suggestion}?" if suggestion else "Leave it out"
            problem = "this call has no such argument"
            yield Violation(name, problem, remedy, code="unknown-argument")


def _has_images(element: Any) -> bool:
    from hybrid_engine.backends.vllm.images import has_images
    from hybrid_engine.backends.vllm.prompts import form_of

    prompt = prompt_of(element)
    return form_of(prompt) == "a chat" and has_images(prompt)


def _require_bound(sampling: Any) -> Any:
    """Return `sampling`, ours or vLLM's. Raises ArgumentError if it has no `max_tokens`.

    Does not import vLLM, which need not be installed here.
    """
    from hybrid_engine.backends.vllm import Sampling

    # vLLM's SamplingParams have `clone`.
    is_sampling = isinstance(sampling, Sampling) or hasattr(sampling, "clone")
    if is_sampling and getattr(sampling, "max_tokens", None) is not None:
        return sampling
    remedy = (
        "Pass hybrid_engine.Sampling or vllm.SamplingParams, with max_tokens to bound the "
        "conversation"
    )
    problem = f"got {shortened(sampling)}"
    raise ArgumentError([Violation("sampling", problem, remedy, code="unbounded-sampling")])
